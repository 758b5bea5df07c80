"""Probes: what an encoding did to a model's spatial invariance. One file a probe, one registry.

A probe has two halves, so that every number can be computed again without the model, and says what is shown of it:

    collect(subject, options) -> {key: array}   runs the model; one column (last axis) is one image
    summarize(arrays, truth)  -> json-able dict  numbers and intervals from those arrays alone
    views(summary)            -> list of views   optional: tables and figures as data (`_views.py`) for the report
    scores(arrays, truth)     -> {key: Score}    optional: per-image scores, to compare encodings over seeds

Scores are of the images in the probe's array `images` where it has one and a score names no others, else of all; None
stands for one that is not defined. What is a ratio of sums over images is said once, as `stats.Ratio`, which has both
its interval and its score.

`collect` raises NotApplicable, with the reason, for a model or data set that the probe cannot be used on.
`by_default = False` on the class: it runs only when it is named (it takes long). `in_parts = True`: all its long loops
are `subject.sweep` or `subject.over_images`, which several processes share and which go on where they were stopped;
any other probe is one part, measured by one process.

A new probe is one new file in this folder:

    @register("mine", definitions={"my_score": "what it is, exactly"})
    class Mine:
        defaults = {"steps": 2}
        def collect(self, subject, options): ...
        def summarize(self, arrays, truth): ...
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitpos import significance, stats
from vitpos.probes._subject import NotApplicable, Subject
from vitpos.spec import nearest

__all__ = [
    "PRECISIONS",
    "Arrays",
    "NotApplicable",
    "Probe",
    "Subject",
    "default_names",
    "differences",
    "evaluate",
    "get",
    "names",
    "register",
    "resolve",
    "scores",
    "summarize",
]

Arrays = dict[str, NDArray[Any]]
PRECISIONS = ("float32", "bf16")


class Probe(Protocol):
    """`defaults` are the options with their default values; other keys are refused."""

    defaults: dict[str, Any]
    # by_default: bool = True
    # in_parts: bool = False
    # def views(self, summary: dict[str, Any]) -> list[View]: ...
    # def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score | None]: ...

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays: ...

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]: ...


REGISTRY: dict[str, Probe] = {}
DEFINITIONS: dict[str, dict[str, str]] = {}
P = TypeVar("P", bound=type)


def register(name: str, definitions: dict[str, str]) -> Callable[[P], P]:
    """Class decorator: registers one instance under `name`. A name that is taken raises ValueError."""

    def add(cls: P) -> P:
        if name in REGISTRY:
            raise ValueError(f"probe {name!r} is already registered, by {type(REGISTRY[name]).__module__}")
        REGISTRY[name], DEFINITIONS[name] = cls(), definitions
        return cls

    return add


def names() -> list[str]:
    return sorted(REGISTRY)


def default_names() -> list[str]:
    """The probes that run where none is named."""
    return [name for name in names() if getattr(REGISTRY[name], "by_default", True)]


def get(name: str) -> Probe:
    if name not in REGISTRY:
        raise ValueError(f"unknown probe {name!r}: {nearest(name, names())}")
    return REGISTRY[name]


# Options are checked against the type of their default; a word as default stands for a list as well ("auto").
KINDS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int), str: (str, list, tuple)}


def resolve(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A probe's options, those not given by default. Raises ValueError for an unknown key, TypeError for a value of
    another type than the default."""
    defaults = get(name).defaults
    for key, value in options.items():
        if key not in defaults:
            raise ValueError(f"probe {name!r} has no option {key!r}: {nearest(key, list(defaults))}")
        kinds = KINDS.get(type(defaults[key]), (type(value),))
        if type(value) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds if kind is not tuple)
            raise TypeError(
                f"{name}.{key}={value!r} is {type(value).__name__}, expected {wanted} (default {defaults[key]!r})"
            )
    return {**defaults, **options}


def evaluate(subject: Subject, probes: Mapping[str, Mapping[str, Any]]) -> Arrays:
    """Run plain evaluation and each named probe with its options; the model is left as it was found.

    Returns per-image arrays (documented in docs/results.md): `labels` [N], `ids` [N], `plain/pred` [N], and
    each probe's own under `<probe>/...`; `<probe>/not_applicable` says why where a probe does not apply.
    """
    resolved = {name: resolve(name, options) for name, options in probes.items()}
    with subject.evaluating():
        arrays: Arrays = {"labels": subject.labels.numpy(), "ids": np.array(subject.ids)}
        if reason := subject.accepts(subject.size):
            raise ValueError(f"{reason}: these are the images as they are; load them or make the model at another size")
        arrays |= {f"plain/{key}": array for key, array in subject.plain().items()}
        whole = [name for name in resolved if not getattr(get(name), "in_parts", False)]
        alone = subject.alone()
        measured = subject.parts.each(whole, lambda some: (_collect(whole[i], alone, resolved[whole[i]]) for i in some))
        found = dict(zip(whole, measured))
        for name, options in resolved.items():
            own = found[name] if name in found else _collect(name, subject, options)
            arrays.update({f"{name}/{key}": array for key, array in own.items()})
    arrays["meta"] = np.array(json.dumps({"schema": "vitpos.predictions/1", "probes": resolved}))
    return arrays


def _collect(name: str, subject: Subject, options: Mapping[str, Any]) -> Arrays:
    try:
        return get(name).collect(subject, options)
    except NotApplicable as reason:
        return {"not_applicable": np.array(str(reason))}


def summarize(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Numbers and intervals from per-image arrays alone (what `predictions.npz` holds)."""
    truth = arrays["labels"]
    meta = json.loads(str(arrays["meta"]))
    result: dict[str, Any] = {
        "images": len(truth),
        "majority_class": float(np.bincount(truth).max() / len(truth)),
        "accuracy": stats.accuracy(arrays["plain/pred"] == truth).as_dict(),
        "probes": {},
    }
    if "plain/float32" in arrays:
        drift = stats.ratio(arrays["plain/logit_drift"], arrays["plain/logit_norm"]) if len(truth) > 1 else None
        result["float32"] = {
            "accuracy": stats.accuracy(arrays["plain/float32"] == truth).as_dict(),
            "agreement": stats.accuracy(arrays["plain/float32"] == arrays["plain/pred"]).as_dict(),
            "logit_drift": None if drift is None else drift.as_dict(),
        }
    for name, options in meta["probes"].items():
        own = _own(arrays, name)
        about = {"definitions": DEFINITIONS[name], "options": options}
        if "not_applicable" in own:
            result["probes"][name] = about | {"not_applicable": str(own["not_applicable"])}
            continue
        summary = get(name).summarize(own, truth)
        views = getattr(get(name), "views", None)
        result["probes"][name] = about | summary | ({} if views is None else {"views": views(summary)})
    return result


def _own(arrays: Mapping[str, NDArray[Any]], name: str) -> Arrays:
    return {key[len(name) + 1 :]: arrays[key] for key in arrays if key.startswith(name + "/")}


def scores(arrays: Mapping[str, NDArray[Any]]) -> dict[str, stats.Score]:
    """Per-image scores of everything that encodings can be compared by: `accuracy`, and `<probe>/<key>`, the key
    without the blanks and brackets that a command line would have to quote."""
    truth = arrays["labels"]
    found = {"accuracy": stats.Score(arrays["plain/pred"] == truth)}
    for name in json.loads(str(arrays["meta"]))["probes"]:
        own, probe = _own(arrays, name), get(name)
        if not hasattr(probe, "scores") or "not_applicable" in own:
            continue
        for key, score in probe.scores(own, truth).items():
            if score is None:
                continue
            if score.images is None and "images" in own:
                score = replace(score, images=own["images"])
            count = len(truth if score.images is None else score.images)
            if score.values.shape != (count,):
                raise ValueError(f"{name}/{key}: expected scores of {count} images, got shape {score.values.shape}")
            found[f"{name}/{re.sub(r'[ ()]+', '_', key).strip('_')}"] = score
    return found


def differences(arrays: Mapping[str, NDArray[Any]], baseline: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """Accuracy minus the baseline's on the same images: plain, and at each size that both were measured at.

    Each with McNemar's p. Empty if ids or labels differ. That the images behind equal ids are the same, and at the same
    sizes, is the caller's to know (eval.py compares what `report.setup` holds). Under several policies each is compared
    with the baseline's first row of that kind and size.
    """
    truth = arrays["labels"]
    if not np.array_equal(arrays["ids"], baseline["ids"]) or not np.array_equal(truth, baseline["labels"]):
        return []
    pairs = [({"kind": "plain"}, arrays["plain/pred"], baseline["plain/pred"])]
    for kind in ("upsample", "canvas", "zoom"):
        key = f"resolution/{kind}/"
        if f"{key}pred" not in arrays or f"{key}pred" not in baseline:
            continue
        known: dict[tuple[int, int], NDArray[np.int64]] = {}
        for size, pred in zip(baseline[f"{key}sizes"].tolist(), baseline[f"{key}pred"]):
            known.setdefault(tuple(size), pred)
        for size, policy, pred in zip(arrays[f"{key}sizes"].tolist(), arrays[f"{key}policies"], arrays[f"{key}pred"]):
            if tuple(size) in known:
                pairs.append(({"kind": kind, "size": size, "policy": str(policy)}, pred, known[tuple(size)]))
    found = []
    for name, mine, theirs in pairs:
        both = mine == truth, theirs == truth
        difference = stats.paired_difference(*both).as_dict() | {"p": significance.mcnemar(*both)}
        found.append(name | {"difference": difference})
    return found


def discover() -> None:
    """Import every probe of this folder, which registers it; files that start with `_` are none."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")


discover()
