"""What eval.py's page calls: where models come from, the options of the probes, progress, provenance, stored
decisions."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import timm
import timm.data
import torch
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import vitpos
from vitpos import compare, data, labels, preemption, probes, seeds, significance
from vitpos.composition import Position
from vitpos.config import MOVABLE
from vitpos.data.decoded import INTERPOLATIONS
from vitpos.parts import Parts, Processes
from vitpos.spec import REGISTRY, nearest, parse

WEIGHTS = "last.safetensors"
KINDS: dict[str, tuple[type, ...]] = {  # of the keys of configs/eval.yaml
    "checkpoint": (str, type(None)), "runs": (str, type(None)), "timm_model": (str, type(None)),
    "pretrained": (bool,), "model_args": (dict, type(None)), "out": (str, type(None)),
    "probes": (list, str, type(None)), "images": (int,), "batch_size": (int,), "device": (str,),
    "weights": (str, type(None)), "restrict": (bool,), "precision": (str,),
    "threads": (int, type(None)), "data": (dict,), "results": (str, type(None)), "compare": (dict,),
    "compare.baseline": (str, type(None)), "compare.metrics": (list, str, type(None)),
    "compare.margin": (float, int, type(None)),
}  # fmt: skip
WORDS = {"timm_model": "model"}  # keys that the command line calls otherwise
EVERY = 60  # seconds between lines of progress where there is no terminal
PACKAGES = ("torch", "timm", "numpy", "scipy", "statsmodels")


@dataclass
class Source:
    """A model, its test images, its preprocessing, and what a table row says about it."""

    model: nn.Module
    images: data.Dataset
    mean: list[float]
    std: list[float]
    about: dict[str, Any]
    places: list[int] | None = None  # the logit of each class of the images, where the model knows others too


def register() -> None:
    """Make every probe's options and defaults known to Hydra, as schema/probes: a new probe brings its
    own."""
    node = {name: dict(probes.get(name).defaults) for name in probes.names()}
    ConfigStore.instance().store(group="schema", name="probes", node=node)


def words(given: list[str], quote: Callable[[str], str]) -> list[str]:
    """The command line's words as Hydra needs them; `quote` makes any text a string of its grammar.

    `data.KEY=value` overrides a key of whatever data a run was trained on, so it may be new to the configuration;
    `model` would be the group of training configurations.
    """
    found = []
    for word in given:
        key, _, value = word.partition("=")
        if key.startswith("data."):
            word = f"++{word}"
        elif key == "model":
            word = f"timm_model={value if value == 'null' else quote(value)}"
        found.append(word)
    return found


def check(cfg: DictConfig) -> None:
    """Refuse values of the wrong type or out of their range: TypeError or ValueError, naming the key."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    for key, kinds in KINDS.items():
        group, _, leaf = key.rpartition(".")
        name, value = WORDS.get(key, key), (values[group] if group else values)[leaf]
        if type(value) not in kinds:
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise TypeError(f"{name}={value!r} is {type(value).__name__}, expected {wanted}")
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{name}= is empty; leave it out or give a value")
    if cfg.images < 0 or cfg.images == 1:
        raise ValueError(
            f"images={cfg.images} must be 0 (all) or at least 2: the worst position is chosen on one half of them and "
            "scored on the other"
        )
    if cfg.batch_size < 1:
        raise ValueError(f"batch_size={cfg.batch_size} must be 1 or more")
    if cfg.precision not in probes.PRECISIONS:
        raise ValueError(f"precision={cfg.precision} must be one of {', '.join(probes.PRECISIONS)}")
    if cfg.threads is not None and cfg.threads < 1:
        raise ValueError(f"threads={cfg.threads} must be null or 1 or more")
    for key, value in (values["model_args"] or {}).items():
        if key in ("depth", "embed_dim", "num_heads", "patch_size", "in_chans", "img_size", "num_classes"):
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number < 1:
                    raise ValueError(f"model_args.{key}={value} must be 1 or more")


def options(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """The probes to run, each with its options."""
    asked: Any = cfg.probes
    names = probes.default_names() if asked is None else [asked] if isinstance(asked, str) else list(asked)
    found = {}
    for name in names:
        probes.get(str(name))
        given: Any = OmegaConf.to_container(cfg, resolve=True)[name]  # type: ignore[call-overload, index]
        if not isinstance(given, dict):
            raise TypeError(
                f"{name}={given!r} is {type(given).__name__}, expected the probe's options: {name}.KEY=value"
            )
        found[name] = probes.resolve(name, given)
    return found


def device(cfg: DictConfig, processes: Processes) -> str:
    """The device that cfg.device names; "auto" is a GPU where there is one, another for each process of a machine. Sets
    the number of threads too."""
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    name = str(cfg.device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if processes.count > 1 and name == "cuda":
            name = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name} cannot be used here ({str(error).splitlines()[0]}): try device=cpu") from None
    return name


def select(cfg: DictConfig, device: str, processes: Processes) -> tuple[list[tuple[Callable[[], Source], Path]], Path]:
    """What to evaluate, for each model (load, folder of its own results), and where the report goes.

    Models are loaded one at a time. Everything that can be refused without loading is refused here.
    """
    keys = {"checkpoint": "checkpoint", "runs": "runs", "model": "timm_model", "results": "results"}
    given = [name for name, key in keys.items() if cfg[key] is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"give one of checkpoint=RUN, runs=FOLDER, model=TIMM_NAME, results=FOLDER; got {found}")
    if given == ["results"]:
        out = Path(cfg.out or roots_of("results", cfg.results)[0] / "eval")
        claim(out, f"out={out}")
        return [], out
    images: dict[str, Any] = OmegaConf.to_container(cfg.data, resolve=True)  # type: ignore[assignment]
    if given == ["model"]:
        args: Any = {} if cfg.model_args is None else OmegaConf.to_container(cfg.model_args, resolve=True)
        load = functools.partial(
            from_timm, cfg.timm_model, images, pretrained=cfg.pretrained, weights=cfg.weights, model_args=args,
            device=device, given=data_keys(), restrict=cfg.restrict,
        )  # fmt: skip
        now = processes.agree(datetime.now())
        default = Path("runs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-eval-{_slug(cfg.timm_model.rsplit('/')[-1])}"
        out = Path(cfg.out or default)
        models: list[tuple[Callable[[], Source], Path]] = [(load, out)]
    else:
        if cfg.pretrained or cfg.weights is not None or cfg.model_args is not None:
            raise ValueError(f"pretrained, weights and model_args go with model=TIMM_NAME, not with {given[0]}=")
        paths = find_runs(cfg.runs) if given == ["runs"] else [Path(cfg.checkpoint)]
        labels = _labels(paths)
        folders = [weights_of(path)[1] for path in paths]
        default = roots_of("runs", cfg.runs)[0] / "eval" if given == ["runs"] else folders[0]
        out = Path(cfg.out or default)
        if len(paths) == 1:
            folders = [out]
        elif cfg.out is not None:
            folders = [out / name for name in _apart(labels)]
        elif out in folders:
            raise ValueError(f"runs={cfg.runs}: {out} would hold one run's results and all of them; give out=FOLDER")
        loads = [functools.partial(from_checkpoint, path, images, device, restrict=cfg.restrict) for path in paths]
        models = list(zip(loads, folders))
    for folder in dict.fromkeys((out, *(folder for _, folder in models))):
        claim(folder, f"out={out}" if folder == out else f"results in {folder}")
    return models, out


def _labels(paths: list[Path]) -> list[str]:
    """What the runs are called; a file that cannot be read is named, and with others what to do about it."""
    labels = []
    for path in paths:
        weights = weights_of(path)[0]
        try:
            card = vitpos.read_card(weights)
        except ValueError as error:
            where = "" if str(weights) in str(error) else f"{weights}: "
            advice = f" (1 of {len(paths)} runs; move it away or name the others)" if len(paths) > 1 else ""
            raise ValueError(f"{where}{error}{advice}") from None
        labels.append(label_of(card, weights))
    return labels


def label_of(card: Mapping[str, Any], weights: Path) -> str:
    return str((card["extra"] or {}).get("run") or weights.parent.name)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+=(),-]", "-", text).lstrip(".") or "run"


def _apart(labels: list[str]) -> list[str]:
    """Names of folders, one a label, none alike and none that a report uses itself."""
    taken = {"figures", "results.json", "table.md", "table.csv", "table.tex", "report.html"}
    names = []
    for label in map(_slug, labels):
        name = next(n for i in itertools.count(1) if (n := label if i == 1 else f"{label}-{i}") not in taken)
        taken.add(name)
        names.append(name)
    return names


def claim(folder: Path, asked: str) -> None:
    """Refuse a folder for results (ValueError) that cannot be written, or holds more than an earlier evaluation."""
    at = next(path for path in (folder, *folder.parents) if path.exists())
    if not at.is_dir():
        raise ValueError(f"{asked}: {at} is a file, expected a folder")
    try:
        with tempfile.TemporaryDirectory(dir=at, prefix=".saving-"):
            pass
    except OSError as error:
        raise ValueError(f"{asked}: cannot write into {at} ({error.strerror}); give another out=FOLDER") from None
    if at != folder or _is_evaluation(folder):
        return
    # An evaluation that was broken off has no results.json of its own yet.
    parts = [path for path in folder.iterdir() if path.name != "predictions.npz" and not path.name.startswith(".")]
    foreign = sorted(path.name for path in parts if not _is_evaluation(path))
    if foreign:
        raise ValueError(
            f"{asked}: {folder} holds other things (e.g. {foreign[0]}) and no earlier evaluation; give a new or empty "
            "folder by out=FOLDER"
        )


def _is_evaluation(folder: Path) -> bool:
    try:
        results = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(results, dict) and str(results.get("schema")).startswith("vitpos.results/")


def provenance(command: str, cfg: DictConfig, device: str) -> dict[str, Any]:
    """What someone needs to obtain the same numbers."""
    return {
        "command": command,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"vitpos": vitpos.__version__, "python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{device} ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "batch_size": cfg.batch_size,
        "precision": cfg.precision,
        "split": "test",
    }


@contextmanager
def progress(processes: Processes) -> Iterator[Callable[[str, str, int], Callable[[int], None]]]:
    """A progress line of the first process on the error stream, per model and probe part: a bar on a terminal, else a
    line a minute."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("images"),
        TimeRemainingColumn(),
    )
    said = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def track(model: str, part: str, total: int) -> Callable[[int], None]:
            done = 0
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(f"{model}: {part}", total=total)

            def advance(count: int) -> None:
                nonlocal done, said
                done += count
                bar.advance(task, count)
                if not console.is_terminal and time.monotonic() - said > EVERY:
                    said = time.monotonic()
                    print(f"{model}: {part}: {done:,} of {total:,} images", file=sys.stderr, flush=True)

            return advance

        yield track if processes.first else lambda model, part, total: lambda count: None


def keep(
    folder: Path, subject: probes.Subject, options: Mapping[str, Any], config: Mapping[str, Any], processes: Processes
) -> Parts:
    """Where the parts of one model's evaluation are kept: those of an earlier start are used where nothing that they
    depend on differs (weights, images by their ids, options, batch size, device, threads, versions)."""
    model: Any = subject.model
    position = getattr(model, "position", None)
    told = {
        "versions": {"vitpos": vitpos.__version__} | {name: version(name) for name in PACKAGES},
        "options": options, "data": config, "model": repr(model),
        "encoding": position.resolved if isinstance(position, Position) else None, "subject": subject.told(),
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    identity = digest.hexdigest()[:16]
    if len(set(processes.exchange(identity))) > 1:
        raise ValueError("the processes hold different models or images, so they cannot share an evaluation")
    return Parts(folder, identity, processes)


@contextmanager
def going_on(parts: Parts) -> Iterator[None]:
    """Inside, a user's error discards the parts; a signal ends with the word that they are kept."""
    try:
        yield
    except (ValueError, TypeError):
        parts.discard()
        raise
    except preemption.Stopped as stopped:
        raise preemption.Stopped(
            stopped.number, f"what is measured is kept in {parts.root}; the same command goes on"
        ) from None


def add_differences(
    runs: list[dict[str, Any]], decisions: list[Mapping[str, np.ndarray]], baselines: Sequence[int | None]
) -> None:
    """Give each run its paired difference to its baseline, a run by index (`report.baselines`), with McNemar's p, and p
    corrected for all of them together (Holm)."""
    for run, own, base in zip(runs, decisions, baselines):
        if base is not None and (rows := probes.differences(own, decisions[base])):
            other = runs[base]
            about = {key: other[key] for key in ("placement", "seed", "checkpoint")}
            run["difference_to_none"] = {"baseline": other["label"], **about, "rows": rows}
    tested = [row["difference"] for run in runs for row in run.get("difference_to_none", {}).get("rows", [])]
    for difference, p in zip(tested, significance.holm([difference["p"] for difference in tested])):
        difference["p_holm"] = float(p)


def summaries(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What each encoding of the runs is, in a line; without those that are not installed here."""
    found: dict[str, str] = {}
    for text in {run["encoding"] for run in runs}:
        with suppress(ValueError):
            found |= {term.name: REGISTRY[term.name].summary for term in parse(text).terms}
    return dict(sorted(found.items()))


def add_comparison(
    results: dict[str, Any], decisions: Sequence[Mapping[str, np.ndarray]], cfg: DictConfig
) -> dict[str, Any]:
    """The results with encodings compared over seeds, where several seeds of any are there (`comparison`), or what is
    in the way (`not_compared`)."""
    chosen: Any = OmegaConf.to_container(cfg.compare, resolve=True)
    if isinstance(chosen["metrics"], str):
        chosen["metrics"] = [chosen["metrics"]]
    measured = [
        compare.Measured(run, np.concatenate([own["ids"].astype(str), own["labels"].astype(str)]), probes.scores(own))
        for run, own in zip(results["runs"], decisions)
    ]
    found = compare.comparison(measured, compare.Options(**chosen))
    obstacles = compare.obstacles(measured)
    return results | ({"comparison": found} if found else {}) | ({"not_compared": obstacles} if obstacles else {})


def roots_of(key: str, folders: str) -> list[Path]:
    """The folders that runs= or results= (`key`) names, parted by commas; a comma belongs to a name where such a folder
    exists."""
    parts, found = folders.split(","), []
    while parts:
        names = [",".join(parts[:count]).strip() for count in range(len(parts), 0, -1)]
        if not names[-1]:
            raise ValueError(f"{key}={folders}: a name between the commas is empty")
        name = next((name for name in names if Path(name).is_dir()), names[-1])
        found.append(Path(name))
        parts = parts[len(names) - names.index(name) :]
    return found


def find_runs(folders: str) -> list[Path]:
    """Every run folder (one that holds last.safetensors) at or below these folders, sorted."""
    found: list[Path] = []
    for root in roots_of("runs", folders):
        if not root.is_dir():
            raise FileNotFoundError(f"runs={root}: no such folder")
        below = sorted(path.parent for path in root.rglob(WEIGHTS))
        if not below:
            raise FileNotFoundError(f"runs={root}: no run folder below it (none holds {WEIGHTS})")
        found += below
    return list(dict.fromkeys(found))


def weights_of(path: Path) -> tuple[Path, Path]:
    """(weights file, folder of its results) for a run folder or a weights file."""
    if path.is_dir():
        if not (path / WEIGHTS).is_file():
            raise FileNotFoundError(f"checkpoint={path}: the folder holds no {WEIGHTS}")
        return path / WEIGHTS, path / "eval"
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint={path}: no such file or folder")
    return path, path.parent / ("eval" if path.name == WEIGHTS else f"{path.stem}-eval")


def _test_images(config: Mapping[str, Any], device: str, seed: int = 0) -> tuple[data.Dataset, dict[str, Any]]:
    resolved = data.resolve(config)
    return data.load(resolved, "test", seed=seed).to(device), asdict(resolved)


def _check_classes(images: data.Dataset, classes: list[str] | None, count: int | None, who: str) -> None:
    ours = images.info.classes
    if count is not None and count != len(ours):
        raise ValueError(
            f"{who} has {count} classes, data {images.info.name} has {len(ours)}: they must be the same ones"
        )
    if classes is not None and list(classes) != list(ours):
        odd = next(f"{a!r} and {b!r}" for a, b in zip(classes, ours) if a != b)
        raise ValueError(f"{who} was trained on other classes than data {images.info.name} has (first: {odd})")


def _decision(places: list[int] | None, images: data.Dataset, known: int, names: str, restrict: bool) -> dict[str, Any]:
    """What a run says of the classes that were decided among: nothing where they are those of the images."""
    if places is None:
        if restrict:
            raise ValueError("restrict=true is for data of some of a model's classes; here they are the same ones")
        return {}
    count = len(images.info.classes)
    return {"decision": {"among": count if restrict else known, "known": known, "classes": count, "names": names}}


def from_checkpoint(path: Path, overrides: Mapping[str, Any], device: str, restrict: bool = False) -> Source:
    """A model saved by vitpos, on the data that it was trained on, unless overrides say otherwise. Data may hold some
    of the model's classes, by their names."""
    weights, _ = weights_of(path)
    card = vitpos.read_card(weights)
    extra, preprocessing = card["extra"] or {}, card["preprocessing"] or {}
    trained_on = extra.get("data") or {}
    config = dict(overrides) if "name" in overrides else {**trained_on, **overrides}
    if "name" not in config:
        raise ValueError(f"{weights} does not say what data it was trained on: name some, e.g. data=digits")
    images, config = _test_images(config, device, extra.get("seed") or 0)
    classes, found = card["classes"], None
    if classes and set(images.info.classes) < set(classes):
        found = labels.places(images.info.classes, classes, str(weights))
    else:
        _check_classes(images, classes, len(classes) if classes else None, str(weights))
    decision = _decision(found, images, len(classes or ()), "the model's own", restrict)
    model = vitpos.load(weights, device=device)
    about = {
        "label": label_of(card, weights),
        "encoding": card["pos"],
        "placement": trained_on.get("placement"),
        "seed": extra.get("seed"),
        "epochs": extra.get("epochs"),
        "architecture": card["architecture"],
        "checkpoint": str(weights),
        "trained": True,
        "data": config,
        "recipe": recipe_of(weights.parent),
    }
    mean, std = (list(preprocessing.get(key) or getattr(images.info, key)) for key in ("mean", "std"))
    return Source(model, images, mean, std, about | decision | _counted(model), found)


def recipe_of(folder: Path) -> dict[str, Any] | None:
    """How a run was trained: its configuration without encoding, seed, placement and what changes no result; None where
    the folder has none."""
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    stored = yaml.safe_load(path.read_text())
    for key in (*MOVABLE, "pos", "seed", "data.placement"):
        group, _, leaf = key.rpartition(".")
        ((stored.get(group) or {}) if group else stored).pop(leaf, None)
    return stored | {"init": stored.get("init") is not None}  # which weights it began from differs by seed


def from_timm(
    name: str, config: Mapping[str, Any], *, pretrained: bool, model_args: Mapping[str, Any], device: str,
    weights: str | None = None, given: Collection[str] = (), restrict: bool = False,
) -> Source:  # fmt: skip
    """A timm model by name, with `weights` of a local file or, if `pretrained`, timm's.

    Untrained ones take the data's size, channels and classes, and have the random weights of seed 0. Trained ones read
    files at their own size (that in `model_args`, else the one they were published at) and interpolation (but for keys
    of data in `given`), and data that is named as the model's classes are, such as by ImageNet's wnids, may hold some
    of them.
    """
    if "name" not in config:
        raise ValueError(f"model={name} needs to be told its images: data=digits, or data=folder data.root=...")
    bare = name.split(".")[0]
    if not timm.is_model(bare):
        raise ValueError(f"unknown timm model {name!r}; {nearest(bare, timm.list_models())[:120]}")
    kwargs, trained = dict(model_args), pretrained or weights is not None
    if trained:
        kwargs = _with_weights(name, kwargs, weights)
        free = config.keys() - given
        own_size = model_args.get("img_size") if "img_size" in free else None
        config = {**config, **{key: value for key, value in _own_images(name, own_size).items() if key in free}}
    images, config = _test_images(config, device)
    info = images.info
    if not trained:
        kwargs = {"num_classes": len(info.classes), "in_chans": info.in_chans, "img_size": info.img_size} | kwargs
    with seeds.global_generators(seeds.stream(0, "backbone")):  # random weights are the same again, in every process
        model = _create(name, trained, kwargs).to(device).eval()
    (known, names), found = labels.label_set(model), None
    if set(known) & set(info.classes) or (known and len(known) != len(info.classes)):
        found = labels.places(info.classes, known, f"model {name} ({names})")
    else:
        _check_classes(images, None, getattr(model, "num_classes", None), f"model {name}")
    prepared = timm.data.resolve_model_data_config(model)
    own = trained and len(prepared["mean"]) == info.in_chans
    mean, std = (list(prepared[key]) if own else list(getattr(info, key)) for key in ("mean", "std"))
    about = {
        "label": name,
        "encoding": str(model.position.spec) if isinstance(getattr(model, "position", None), Position) else "native",
        "placement": None,
        "seed": None,
        "epochs": None,
        "architecture": name,
        "checkpoint": weights,
        "trained": trained,
        "data": config,
        "recipe": None,
    }
    decision = _decision(found, images, len(known), names, restrict)
    return Source(model, images, mean, std, about | decision | _counted(model), found)


def data_keys() -> set[str]:
    """The keys of data that the command line gives."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return {key.removeprefix("data.") for word in given if (key := word.partition("=")[0].lstrip("+"))[:5] == "data."}


def _own_images(name: str, size: Any) -> dict[str, Any]:
    """How timm reads the images of a pretrained model, as keys of data; at ``size`` if the model was given one."""
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    if height != width:
        raise ValueError(
            f"model_args.img_size={size}: images are read as squares; give their side, data.img_size=SIDE, and "
            "model_args.dynamic_img_size=true"
        )
    own: Any = timm.get_pretrained_cfg(name)
    if own is None:
        return {}
    found: dict[str, Any] = {"img_size": own.input_size[-1]} if own.input_size[1] == own.input_size[2] else {}
    found = found if size is None else {"img_size": height}
    return found | ({"interpolation": own.interpolation} if own.interpolation in INTERPOLATIONS else {})


def _with_weights(name: str, kwargs: dict[str, Any], weights: str | None) -> dict[str, Any]:
    """The arguments that make timm load a local file, if there is one, whose head is the model's."""
    count = kwargs.get("num_classes")
    if weights is None:
        own: Any = timm.get_pretrained_cfg(name)
        if count is not None and own is not None and count != own.num_classes:
            raise ValueError(
                f"pretrained=true: the weights of {name} have {own.num_classes} classes, "
                f"model_args.num_classes={count} would give them a random head"
            )
        return kwargs
    if not Path(weights).is_file():
        raise FileNotFoundError(f"weights={weights}: no such file")
    overlay = {"file": weights} | ({} if count is None else {"num_classes": count})
    return {**kwargs, "pretrained_cfg_overlay": {**kwargs.get("pretrained_cfg_overlay", {}), **overlay}}


def _counted(model: nn.Module) -> dict[str, int]:
    return {"parameters": sum(p.numel() for p in model.parameters())}


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> Any:
    if pretrained and "pretrained_cfg_overlay" not in kwargs:
        _check_hub(name)
    try:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except TypeError as error:
        if "img_size" not in str(error) or "img_size" not in kwargs:
            raise ValueError(f"model={name}: {error}") from None
        # Convolutional networks take any size and know no img_size.
        return _create(name, pretrained, {key: value for key, value in kwargs.items() if key != "img_size"})
    except Exception as error:  # an unreadable file can raise anything
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"model={name} could not be made{' with its weights' if pretrained else ''}: {first}"
        ) from None


def _check_hub(name: str) -> None:
    """Fail at once, not after minutes of retries, where the weights' hub cannot be reached and nothing is
    cached."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return
    repository = (timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg()).hf_hub_id
    if repository and isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
        return
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        raise ValueError(
            f"pretrained=true: the weights of {name} are not cached and their hub cannot be reached; "
            "go online once, or give a local file: weights=PATH"
        ) from None


register()
