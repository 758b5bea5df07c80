"""What eval.py calls: options, what to evaluate and where results go, progress, provenance, comparison."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import vitpos
from vitpos import compare, preemption, probes, significance
from vitpos.composition import Position
from vitpos.config import check_writable
from vitpos.parts import Parts, Processes
from vitpos.sources import Source, data_keys, find_runs, from_checkpoint, from_timm, label_of, roots_of, weights_of
from vitpos.spec import REGISTRY, parse

KINDS: dict[str, tuple[type, ...]] = {  # of the keys of configs/eval.yaml
    "checkpoint": (str, type(None)), "runs": (str, type(None)), "timm_model": (str, type(None)),
    "pretrained": (bool,), "model_args": (dict, type(None)), "out": (str, type(None)),
    "probes": (list, str, type(None)), "images": (int,), "batch_size": (int,), "device": (str,),
    "weights": (str, type(None)), "restrict": (bool,), "tensorboard": (bool,), "precision": (str,),
    "threads": (int, type(None)), "data": (dict,), "results": (str, type(None)), "compare": (dict,),
    "compare.baseline": (str, type(None)), "compare.metrics": (list, str, type(None)),
    "compare.margin": (float, int, type(None)), "compare.interval": (str,),
}  # fmt: skip
SOURCES = {"checkpoint": "checkpoint", "runs": "runs", "model": "timm_model", "results": "results"}  # word: key
STORED = ("out", "compare", "tensorboard", "threads", "device")  # what goes with results=
WORDS = {"timm_model": "model"}  # keys that the command line calls otherwise
EVERY = 60  # seconds between lines of progress where there is no terminal
PACKAGES = ("torch", "timm", "numpy", "scipy", "statsmodels", "kornia")


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
    compared(cfg)
    if cfg.precision not in probes.PRECISIONS:
        raise ValueError(f"precision={cfg.precision} must be one of {', '.join(probes.PRECISIONS)}")
    if cfg.threads is not None and cfg.threads < 1:
        raise ValueError(f"threads={cfg.threads} must be null or 1 or more")
    for key, value in (values["model_args"] or {}).items():
        if key in ("depth", "embed_dim", "num_heads", "patch_size", "in_chans", "img_size", "num_classes"):
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number < 1:
                    raise ValueError(f"model_args.{key}={value} must be 1 or more")


def check_read(cfg: DictConfig, given: Sequence[str]) -> None:
    """Refuse (ValueError) a word KEY=VALUE of the command line that this evaluation would not read."""
    asked = _asked(cfg)
    for word in given:
        key = word.partition("=")[0].lstrip("+")
        group = key.partition(".")[0]
        if cfg.results is not None and group not in (*STORED, *SOURCES.values()):
            raise ValueError(
                f"{key}= does not go with results=, which reads what was decided before, without a model; only "
                f"{', '.join(STORED)} do. Evaluate again by checkpoint=, runs= or model="
            )
        if group in probes.names() and group not in asked:
            raise ValueError(f"{key}=: {group} is not among the probes to run, which are {', '.join(asked) or 'none'}")


def _asked(cfg: DictConfig) -> list[str]:
    """The names of the probes to run."""
    asked: Any = cfg.probes
    return probes.default_names() if asked is None else [asked] if isinstance(asked, str) else list(asked)


def options(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """The probes to run, each with its options."""
    found = {}
    for name in _asked(cfg):
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
    given = [name for name, key in SOURCES.items() if cfg[key] is not None]
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


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+=(),-]", "-", text).lstrip(".") or "run"


def _apart(labels: list[str]) -> list[str]:
    """Names of folders, one a label, none alike and none that a report uses itself."""
    taken = {"figures", "results.json", "table.md", "table.csv", "table.tex", "report.html", "tb"}
    names = []
    for label in map(_slug, labels):
        name = next(n for i in itertools.count(1) if (n := label if i == 1 else f"{label}-{i}") not in taken)
        taken.add(name)
        names.append(name)
    return names


def claim(folder: Path, asked: str) -> None:
    """Refuse a folder for results (ValueError) that cannot be written, or holds more than an earlier evaluation."""
    check_writable(asked, folder)
    if not folder.exists() or _is_evaluation(folder):
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


def compared(cfg: DictConfig) -> compare.Options:
    chosen: Any = OmegaConf.to_container(cfg.compare, resolve=True)
    if isinstance(chosen["metrics"], str):
        chosen["metrics"] = [chosen["metrics"]]
    return compare.Options(**chosen)


def add_comparison(
    results: dict[str, Any], decisions: Sequence[Mapping[str, np.ndarray]], cfg: DictConfig
) -> dict[str, Any]:
    """The results with encodings compared over seeds, where several seeds of any are there (`comparison`), or what is
    in the way (`not_compared`)."""
    measured = [
        compare.Measured(run, np.concatenate([own["ids"].astype(str), own["labels"].astype(str)]), probes.scores(own))
        for run, own in zip(results["runs"], decisions)
    ]
    found = compare.comparison(measured, compared(cfg))
    obstacles = compare.obstacles(measured)
    return results | ({"comparison": found} if found else {}) | ({"not_compared": obstacles} if obstacles else {})


def show(results: Mapping[str, Any], out: Path, wanted: bool) -> None:
    """Events for TensorBoard in `out`/tb, if wanted; else none are left there."""
    if wanted:
        from vitpos import board  # slow to import

        board.evaluated(out / "tb", dict(zip(_apart([run["label"] for run in results["runs"]]), results["runs"])))
    else:
        shutil.rmtree(out / "tb", ignore_errors=True)


register()
