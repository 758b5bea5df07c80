"""What evaluations have left: runs with their per-image decisions, from which every number is computed again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitpos import probes, report

Decisions = dict[str, np.ndarray]


def read(folders: Sequence[Path]) -> tuple[list[dict[str, Any]], list[Decisions], dict[str, Any]]:
    """Runs, their decisions, and what the provenance says of them, from every predictions.npz at or below `folders`.

    A run that was stored twice counts once. Raises ValueError where its decisions differ, or a file is not of one run,
    and FileNotFoundError where there is nothing.
    """
    found: dict[Any, tuple[Path, dict[str, Any], Decisions]] = {}
    origins = []
    for path in (path for folder in folders for path in _below(folder)):
        results = report.read(path.parent / "results.json")
        if len(results["runs"]) != 1:
            raise ValueError(f"{path.parent} holds one run's decisions, but the results of {len(results['runs'])}")
        with np.load(path, allow_pickle=False) as file:
            decisions = dict(file)
        about = {key: value for key, value in results["runs"][0].items() if key != "difference_to_none"}
        run = {**about, **json.loads(json.dumps(probes.summarize(decisions)))}
        key = run["checkpoint"], run["label"], json.dumps(report.setup(run), sort_keys=True)
        first, _, known = found.setdefault(key, (path.parent, run, decisions))
        if any(name not in known or not np.array_equal(decisions[name], known[name]) for name in decisions):
            raise ValueError(f"{first} and {path.parent} hold different decisions of {run['label']}; name one of them")
        origins.append(results["provenance"])
    common: dict[str, Any] = {}
    for name in ("device", "threads", "batch_size", "precision"):
        values = [origin.get(name) for origin in origins]
        common[name] = values[0] if all(value == values[0] for value in values) else "several"
    paths, runs, stored = zip(*found.values())
    return list(runs), list(stored), common | {"recomputed_from": [str(path) for path in paths]}


def _below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"results={folder}: no such folder")
    paths = sorted(folder.rglob("predictions.npz"))
    if not paths:
        raise FileNotFoundError(f"results={folder}: no predictions.npz below it; eval.py runs=FOLDER writes them")
    return paths
