"""What each encoding is best trained with, by validation: python -m vitpos.tuning FOLDER

The folder holds the runs of a sweep over encodings and settings. Numbers of encodings compare only if each had the
same chance, so that runs which give one encoding more settings or seeds than another are refused. Options of an
encoding (``ape1d(std=0.5)``) are settings as well; of those only the number must be the same.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from vitpos.cli import fail
from vitpos.evaluation import find_runs
from vitpos.spec import parse
from vitpos.tables import Table, markdown, percent

Settings = tuple[str, ...]  # what was given of what varies, as on the command line
Scores = dict[str, dict[Settings, dict[int, float]]]  # by encoding, settings and seed
OWN = ("pos", "seed", "out", "resume")


def scores(runs: Sequence[Path]) -> Scores:
    """Validation accuracy after the last epoch. ValueError where encodings did not get the same settings and seeds."""
    read = [dict(_flat(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")))) for folder in runs]
    keys = [key for key in {key: None for values in read for key in values} if key not in OWN]
    varied = [key for key in keys if any(values.get(key) != read[0].get(key) for values in read)]
    found: Scores = defaultdict(lambda: defaultdict(dict))
    for folder, values in zip(runs, read):
        spec, seed = parse(values["pos"]), values["seed"]
        encoding = " + ".join(spec.names)
        own = [f"pos={spec}"] if str(spec) != encoding else []
        settings = (*own, *(f"{key}={values.get(key)}" for key in varied))
        seeds = found[encoding][settings]
        if seed in seeds:
            raise ValueError(f"{folder}: a second run of {encoding} with {' '.join(settings)} and seed {seed}")
        seeds[seed] = float(pd.read_csv(folder / "metrics.csv")["val_accuracy"].iloc[-1])
    _check_budget(found)
    return found


def _flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        yield key, values
        return
    for name, value in values.items():
        yield from _flat(value, f"{key}.{name}".lstrip("."))


def _check_budget(found: Scores) -> None:
    def budget(encoding: str) -> list[tuple[Settings, tuple[int, ...]]]:
        runs = found[encoding].items()
        return sorted((tuple(s for s in settings if s[:4] != "pos="), tuple(sorted(seeds))) for settings, seeds in runs)

    first, *others = found
    for other in others:
        for ours, theirs in ((first, other), (other, first)):
            missing = list(budget(ours))
            for tried in budget(theirs):
                if tried in missing:
                    missing.remove(tried)
            if missing:
                settings, seeds = missing[0]
                raise ValueError(
                    f"not the same budget: {ours} was trained with {' '.join(settings) or 'its options'} and seeds "
                    f"{', '.join(map(str, seeds))}, {theirs} was not; train it so too, or leave these runs out"
                )


def chosen(found: Scores) -> Table:
    """The best settings of each encoding, by the mean over seeds, and the next best."""
    rows = []
    for encoding, tried in sorted(found.items()):
        means = {settings: sum(seeds.values()) / len(seeds) for settings, seeds in tried.items()}
        best, *rest = sorted(means, key=lambda settings: -means[settings])
        rows.append(
            [
                [encoding],
                [f"{len(tried)} x {len(tried[best])}"],
                [" ".join(best)],
                [percent(means[best])],
                [f"{percent(means[rest[0]])} with {' '.join(rest[0])}" if rest else ""],
            ]
        )
    return Table(["encoding", "settings x seeds", "best", "validation accuracy", "next"], rows)


def main() -> None:
    if len(sys.argv) != 2:
        fail("usage: python -m vitpos.tuning FOLDER")
    try:
        sys.stdout.write(markdown(chosen(scores(find_runs(sys.argv[1])))))
    except (ValueError, OSError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
