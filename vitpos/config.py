"""The typed configuration of a training run.

The dataclasses here and in `vitpos.data` are the schema of ``configs/``: Hydra refuses an unknown key or a value of
the wrong type, and `check` refuses values that make no sense. The encoding is a plain string, ``pos``.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import os
import re
import tempfile
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from timm.optim import list_optimizers

from vitpos import data, spec

PRECISIONS = ("no", "bf16", "fp16")
LOSSES = ("ce", "bce")
AUTO = "auto"  # of resume: go on with the run in out=, or start it
TRIAL = ".saving-"  # begins the name of what is written to see whether a folder can be
# how and where, not what: a run may go on elsewhere, its data moved
MOVABLE = (
    "out", "resume", "train.cpu", "train.threads", "train.sharding", "train.save_every", "train.nonfinite",
    "train.nonfinite_limit", "train.pictures", "data.workers", "data.root", "data.download",
)  # fmt: skip


@dataclass
class ModelConfig:
    """A timm architecture. in_chans, num_classes and img_size come from the data."""

    name: str = MISSING
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class CoordsConfig:
    """Augmentation of the patches' coordinates, one draw a batch: see ``vitpos.positions.augment``. Off by default."""

    shift: float = 0.0  # along each axis, in half sides of the image
    stretch: float = 1.0  # largest factor of each axis
    rescale: float = 1.0  # largest factor of both axes together
    jitter: float = 0.0  # of each patch, standard deviation in patches


@dataclass
class TrainConfig:
    epochs: int = 32
    batch_size: int = 64  # over all processes
    eval_batch_size: int = 256
    lr: float = 2e-3
    pos_lr_mult: float = 1.0  # learning-rate multiplier of positional parameters
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    warmup: float = 0.1  # fraction of all steps, then cosine to zero
    optimizer: str = "adamw"  # any of timm.optim.list_optimizers() that need two betas and no more than a gradient
    layer_decay: float | None = None  # factor of the learning rate from one block to the one before it, e.g. 0.75
    loss: str = "ce"  # ce (cross-entropy) or bce (binary cross-entropy of each class)
    bce_threshold: float | None = 0.2  # bce: targets above it count as 1, others as 0; null takes them as they are
    label_smoothing: float = 0.1
    mixup: float = 0.0  # alpha of the beta distribution that two images' shares are drawn from; 0: off
    cutmix: float = 0.0  # the same for the pasted area; with mixup too, each batch draws one of the two
    mix_prob: float = 1.0  # of a batch to be mixed at all
    repeats: int = 1  # copies of an image in a batch, each with its own augmentation
    sizes: list[Any] | None = None  # in pixels, [h, w] or one number for a square: each batch draws one of them
    accumulate: int = 1  # parts that a batch is cut into: less memory, the same step
    coords: CoordsConfig = field(default_factory=CoordsConfig)
    fade: float = 0.5  # fraction of all steps in which encodings that are fading (see preserve) go away
    clip_grad: float = 1.0  # largest gradient norm; 0 switches clipping off
    ema: float | None = None  # decay of an exponential moving average of the weights, e.g. 0.999
    precision: str = "no"  # no (float32), bf16 or fp16
    cpu: bool = False  # use the CPU even where an accelerator is
    threads: int | None = None  # of torch, per process; null leaves torch's default
    sharding: str = "none"  # of the weights over several processes: none (each holds all, DDP) or fsdp
    save_every: int | None = None  # steps; null saves the state after each epoch only
    nonfinite: str = "stop"  # at a loss or gradient that is no finite number: stop, or skip the step
    nonfinite_limit: int = 10  # stop after so many skipped in a row
    pictures: int = 4  # how often TensorBoard shows the encoding over a run; 0: neither that nor images


@dataclass
class RunConfig:
    pos: str = "rope_axial"
    seed: int = 0
    out: str | None = None  # run folder; of a sweep, the folder that holds its run folders
    resume: str | None = None  # run folder to continue; auto: the one that out= names, where it is there already
    init: str | None = None  # run folder or .safetensors file to begin from: its architecture, weights, training grid
    preserve: bool = False  # with init: pos begins with no effect and what it replaces fades (vitpos.attach)
    data: Any = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def register() -> None:
    """Make the schema known to Hydra, as group ``schema``."""
    store = ConfigStore.instance()
    nodes = {"run": RunConfig, "digits": data.DigitsConfig, "cifar": data.CifarConfig, "folder": data.FolderConfig,
             "webdataset": data.WebdatasetConfig}  # fmt: skip
    for name, node in nodes.items():
        store.store(group="schema", name=name, node=node)


def pair(size: Any) -> tuple[int, int]:
    """(h, w) of an entry of train.sizes."""
    sides = [size, size] if isinstance(size, int) else size
    if not (isinstance(sides, list) and len(sides) == 2 and all(type(s) is int and s >= 1 for s in sides)):
        raise ValueError(f"train.sizes holds {size!r}; expected [h, w] or one number, in pixels")
    return sides[0], sides[1]


def typed(cfg: DictConfig) -> RunConfig:
    """The composed configuration as checked dataclasses; ValueError or TypeError says which value is wrong."""
    values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    _check_keys(values, RunConfig)
    train = {**values["train"], "coords": _build(CoordsConfig, values["train"].get("coords", {}), "train.coords.")}
    run = RunConfig(
        **{
            **values,
            "model": _build(ModelConfig, values["model"], "model."),
            "train": _build(TrainConfig, train, "train."),
        }
    )
    run.data = data.resolve(values["data"])
    run.pos = str(spec.parse(run.pos))
    check(run)
    return run


def _check_keys(values: dict[str, Any], kind: Any, prefix: str = "") -> None:
    known = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise ValueError(f"unknown config key {prefix + key!r}; {spec.nearest(key, known)}")


def _build(kind: Any, values: dict[str, Any], prefix: str) -> Any:
    _check_keys(values, kind, prefix)
    return kind(**values)


def check(run: RunConfig) -> None:
    """Raise ValueError for a value out of its range."""
    t = run.train
    # not those with three betas, nor one that differentiates gradients
    optimizers = [str(name) for name in list_optimizers() if not re.fullmatch(r"(bnb|c)?adanw?|adahessian", str(name))]
    rules = [
        ("seed", run.seed, run.seed >= 0, "0 or more"),
        ("train.epochs", t.epochs, t.epochs >= 1, "1 or more"),
        ("train.batch_size", t.batch_size, t.batch_size >= 1, "1 or more"),
        ("train.eval_batch_size", t.eval_batch_size, t.eval_batch_size >= 1, "1 or more"),
        ("train.lr", t.lr, t.lr > 0, "positive"),
        ("train.pos_lr_mult", t.pos_lr_mult, t.pos_lr_mult >= 0, "0 or more"),
        ("train.weight_decay", t.weight_decay, t.weight_decay >= 0, "0 or more"),
        ("train.betas", t.betas, len(t.betas) == 2 and all(0 <= b < 1 for b in t.betas), "two numbers in [0, 1)"),
        ("train.warmup", t.warmup, 0 <= t.warmup < 1, "in [0, 1)"),
        ("train.optimizer", t.optimizer, t.optimizer in optimizers, f"timm's; {spec.nearest(t.optimizer, optimizers)}"),
        ("train.layer_decay", t.layer_decay, t.layer_decay is None or 0 < t.layer_decay <= 1, "null or in (0, 1]"),
        ("train.loss", t.loss, t.loss in LOSSES, f"one of {', '.join(LOSSES)}"),
        (
            "train.bce_threshold",
            t.bce_threshold,
            t.bce_threshold is None or 0 <= t.bce_threshold < 1,
            "null or in [0, 1)",
        ),
        ("train.mixup", t.mixup, t.mixup >= 0, "0 or more"),
        ("train.cutmix", t.cutmix, t.cutmix >= 0, "0 or more"),
        ("train.mix_prob", t.mix_prob, 0 <= t.mix_prob <= 1, "in [0, 1]"),
        ("train.repeats", t.repeats, t.repeats >= 1, "1 or more"),
        ("train.accumulate", t.accumulate, t.accumulate >= 1, "1 or more"),
        ("train.label_smoothing", t.label_smoothing, 0 <= t.label_smoothing < 1, "in [0, 1)"),
        ("train.coords.shift", t.coords.shift, t.coords.shift >= 0, "0 or more"),
        ("train.coords.stretch", t.coords.stretch, t.coords.stretch >= 1, "1 or more"),
        ("train.coords.rescale", t.coords.rescale, t.coords.rescale >= 1, "1 or more"),
        ("train.coords.jitter", t.coords.jitter, t.coords.jitter >= 0, "0 or more"),
        ("train.fade", t.fade, 0 <= t.fade <= 1, "in 0..1"),
        ("train.clip_grad", t.clip_grad, t.clip_grad >= 0, "0 or more"),
        ("train.ema", t.ema, t.ema is None or 0 < t.ema < 1, "null or in (0, 1)"),
        ("train.precision", t.precision, t.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        ("train.pictures", t.pictures, t.pictures >= 0, "0 or more"),
        ("train.threads", t.threads, t.threads is None or t.threads >= 1, "null or 1 or more"),
        ("train.sharding", t.sharding, t.sharding in ("none", "fsdp"), "none or fsdp"),
        ("train.save_every", t.save_every, t.save_every is None or t.save_every >= 1, "null or 1 or more steps"),
        ("train.nonfinite", t.nonfinite, t.nonfinite in ("stop", "skip"), "stop or skip"),
        ("train.nonfinite_limit", t.nonfinite_limit, t.nonfinite_limit >= 1, "1 or more steps"),
    ]
    for key, value, holds, wanted in rules:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value} must be a finite number, {wanted}")
        if not holds:
            raise ValueError(f"{key}={value} must be {wanted}")
    if run.preserve and run.init is None:
        raise ValueError("preserve=true keeps what trained weights compute; it needs init=RUN_FOLDER, whose they are")
    if t.sharding == "fsdp" and t.precision == "fp16":
        raise ValueError("train.sharding=fsdp is not made for train.precision=fp16; take bf16")
    if t.sharding == "fsdp" and t.optimizer not in ("adam", "adamw"):
        raise ValueError(f"train.sharding=fsdp is not made for train.optimizer={t.optimizer}; take adamw or adam")
    if t.sizes is not None and not [pair(size) for size in t.sizes]:
        raise ValueError("train.sizes=[] must be null or hold a size")
    taken = {"in_chans", "num_classes", "img_size", "pos"} & set(run.model.kwargs)
    if taken:
        raise ValueError(f"model.kwargs.{min(taken)} is not set here: it follows from the data and from pos")


def chosen(cfg: DictConfig) -> DictConfig:
    """What to run: the command line's configuration or, with ``resume``, that of the run which is continued."""
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() and cfg.init and not cfg.resume else []
    for key in (word.split("=")[0].lstrip("+~") for word in words):
        if key == "model" or key.startswith("model."):
            raise ValueError(f"init={cfg.init} has the model that it was trained with; leave {key} out")
    if cfg.resume is None and "SUBMITIT_EXECUTOR" not in os.environ:  # whose jobs may start several times
        return cfg
    return _found(cfg) if cfg.resume in (None, AUTO) else resumed(cfg, Path(cfg.resume))


def resumed(cfg: DictConfig, folder: Path) -> DictConfig:
    """The configuration stored in a run folder; what the command line says besides must not contradict it."""
    stored = _stored(folder)
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    for override in given:
        key = override.split("=")[0].lstrip("+~")
        if key == "resume":
            continue
        if key == "experiment":
            raise ValueError(f"resume={folder} goes on with its own configuration; leave experiment out")
        if key == "data":  # the choice of a dataset; each of its options is an override of its own
            key = "data.name"
        ours, theirs = (_plain(OmegaConf.select(c, key)) for c in (cfg, stored))
        if key.startswith("data.") and key.removeprefix("data.") not in stored.data:
            raise ValueError(f"unknown config key {key!r}; {suggest(key, stored)}")
        if key in MOVABLE and key != "out":
            OmegaConf.update(stored, key, ours)
            continue
        if key == "pos":
            ours, theirs = str(spec.parse(ours)), str(spec.parse(theirs))
        differing = difference(ours, theirs, key)
        if differing is not None:
            name, ours, theirs = differing
            raise ValueError(
                f"resume={folder} was trained with {name.removesuffix('.name')}={theirs} and cannot go on with {ours}; "
                f"leave {key.removesuffix('.name')} out, or start a new run"
            )
    stored.resume = str(folder)
    return stored


def _found(cfg: DictConfig) -> DictConfig:
    """The same configuration, with ``resume`` its own run folder if that is there, else null."""
    run = typed(cfg)
    if run.out is None and not _sweeping():
        raise ValueError("resume=auto finds a run by its folder; name that with out=FOLDER")
    folder = new_folder(run)
    if _sweeping():  # which may have been longer, or in another order
        begun_ones = sorted(path.parent for path in folder.parent.glob("*/config.yaml"))
        same = (path for path in begun_ones if difference(identity(run), identity(typed(_stored(path)))) is None)
        folder = next(same, folder)
    begun = (folder / "config.yaml").is_file()
    if begun:
        differing = difference(identity(run), identity(typed(_stored(folder))))
        if differing is not None:
            key, ours, theirs = differing
            raise ValueError(f"the run in {folder} has {key}={theirs}, not {ours}; choose another out=")
    cfg.resume = str(folder) if begun else None
    return cfg


def _sweeping() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _stored(folder: Path) -> Any:
    """RUN/config.yaml over the schema."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"resume={folder}: no run there ({path} is missing)")
    try:
        content: Any = OmegaConf.load(path)
        missing = [key for key in ("pos", "seed", "data", "model", "train") if key not in content]
        if missing or not isinstance(content, DictConfig):
            raise ValueError(f"it has no {', '.join(missing)}")
        return OmegaConf.merge(OmegaConf.structured(RunConfig), content)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged: {reason}; put it right, or start a new run") from None


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def identity(run: RunConfig) -> dict[str, Any]:
    """What makes a run the experiment that it is: its configuration but for `MOVABLE`."""
    values = dataclasses.asdict(run)
    for parent, _, leaf in (key.rpartition(".") for key in MOVABLE):
        (values[parent] if parent else values).pop(leaf, None)
    if run.init is not None:
        del values["model"]  # it comes with the weights
    return values


def difference(ours: Any, theirs: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """The first dotted key at which two nested dicts differ, with both values (None where one lacks it)."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return None if ours == theirs else (key, ours, theirs)
    pairs = ((f"{key}.{name}".lstrip("."), ours.get(name), theirs.get(name)) for name in {**theirs, **ours})
    return next(filter(None, (difference(a, b, name) for name, a, b in pairs)), None)


def new_folder(run: RunConfig) -> Path:
    """Where a new run goes: out, or runs/<date>/<time>-<encoding>-s<seed>; in a sweep, a folder of its own there."""
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in run.pos.replace(" ", "").replace("+", "_"))
    label = f"{slug.strip('-')}-s{run.seed}"
    if _sweeping():
        return Path(HydraConfig.get().sweep.dir) / f"{HydraConfig.get().job.num:02d}-{label}"
    if run.out is not None:
        return Path(run.out)
    now = datetime.now()
    path = Path("runs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{label}"
    return next(p for n in itertools.count(1) if not (p := path if n == 1 else Path(f"{path}-{n}")).exists())


def check_folder(run: RunConfig) -> None:
    """Raise ValueError where the run's folder cannot be written, or a new run's holds files already."""
    if run.resume is not None:
        check_writable(f"resume={run.resume}", Path(run.resume))
        return
    path = new_folder(run)
    check_writable(f"out={path}", path)
    if path.is_dir() and any(not found.name.startswith(TRIAL) for found in path.iterdir()):
        raise ValueError(f"out={path} holds files already; choose another folder, or continue its run with resume=")


def check_writable(asked: str, path: Path) -> None:
    """Raise ValueError unless ``path``, which was ``asked`` for, is a folder that can be written, or can become one."""
    try:
        at = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        raise ValueError(f"{asked} cannot be used: {error.strerror}") from None
    if not at.is_dir():
        raise ValueError(f"{asked}: {at} is a file, expected a folder")
    try:
        with tempfile.TemporaryDirectory(dir=at, prefix=TRIAL):
            pass
    except OSError as error:
        raise ValueError(f"{asked}: cannot write into {at} ({error.strerror}); name another folder") from None


def suggest(key: str, known: DictConfig) -> str:
    """Half a sentence naming the keys of a configuration nearest to the dotted ``key``."""
    keys = [k for k in _flatten(known) if k.startswith("hydra.") == key.startswith("hydra.")]
    parent, _, leaf = key.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == parent]
    near = _near(leaf, keys, 1.0) or _near(leaf, siblings if parent and siblings else keys, 0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(siblings or [k for k in keys if '.' not in k])}"


def _near(leaf: str, keys: list[str], cutoff: float) -> list[str]:
    """The keys whose last part is the one most like ``leaf``."""
    best = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in keys], n=1, cutoff=cutoff)
    return [k for k in keys if k.rpartition(".")[2] in best]


def _flatten(node: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in map(str, node):
        keys.append(f"{prefix}{key}")
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            keys += _flatten(child, f"{prefix}{key}.")
    return keys


register()
