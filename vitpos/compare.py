"""Encodings compared over seeds and images, from the per-image scores of many runs.

A row is an encoding under one recipe: the runs that differ in nothing but the seed. Rows stand in one table where they
were measured in the same way (`report.setup`). Each mean has an interval over seeds and images; each difference is to
the baseline's row, paired by seed and image; all differences of a table are corrected together (Holm); ranks are among
rows of one architecture, number of epochs and placement. One seed says nothing about an encoding: such rows are left
out, and named; so are runs that cannot be told apart (a seed that is there twice), without the others of their row.

Scores may be of fewer images than the table: a column then has rows only whose runs took the same ones. Scores that
are no shares keep their own unit, and no margin, which is a share, is applied to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitpos import hierarchy, report, significance
from vitpos.spec import nearest, parse
from vitpos.stats import LEVEL, Score

Run = dict[str, Any]
INTERVALS = ("crossed", "bootstrap")
TOO_SURE = (
    "Intervals of the means are a bootstrap of seeds and images (compare.interval=bootstrap), which holds the truth "
    "less often than 95%, the less the fewer the seeds (docs/statistics.md); those of differences and ranks are not."
)


@dataclass(frozen=True, eq=False)
class Measured:
    """A run, and what it did with each image. `images` [N] tells whether two runs answered the same ones."""

    run: Run
    images: NDArray[Any]
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class Options:
    """`baseline`: the encoding that differences are to, None for no differences. `metrics`: keys of scores, None for
    the columns of the report's table. `margin`: a difference below it does not matter, as a share (0.01 is a point), in
    columns of shares; to be fixed before the results are seen; None for no test of equivalence. `interval` of the
    means: crossed, or bootstrap (`hierarchy.bootstrap`), which is too sure with few seeds; differences and ranks are
    crossed always."""

    baseline: str | None = "none"
    metrics: Sequence[str] | None = None
    margin: float | None = None
    interval: str = "crossed"

    def __post_init__(self) -> None:
        if self.interval not in INTERVALS:
            raise ValueError(
                f"compare.interval={self.interval} must be one of {', '.join(INTERVALS)}; "
                f"{nearest(self.interval, INTERVALS)}"
            )
        if self.margin is not None and not 0 < self.margin < 1:
            raise ValueError(f"compare.margin={self.margin} must be a share between 0 and 1 (0.01 is one point)")
        if self.baseline is not None:
            try:
                parse(self.baseline)
            except ValueError as error:
                raise ValueError(f"compare.baseline={self.baseline} is no encoding: {error}") from None


@dataclass(eq=False)
class Row:
    """The runs of one encoding under one recipe, by seed."""

    encoding: str
    recipe: str
    kind: tuple[Any, ...]  # architecture, epochs, placement
    members: list[Measured]
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    baseline: Row | None = None

    @property
    def run(self) -> Run:
        return self.members[0].run

    @property
    def seeds(self) -> list[int]:
        return [member.run["seed"] for member in self.members]

    @property
    def name(self) -> str:
        return self.encoding + (f" trained {self.run['placement']}" if self.run["placement"] == "uniform" else "")

    def table(self, key: str, seeds: Sequence[int]) -> NDArray[np.float64]:
        """Scores [R, N] at these seeds, in their order."""
        by_seed = {member.run["seed"]: member.scores[key].values for member in self.members}
        return np.stack([by_seed[seed] for seed in seeds]).astype(np.float64)

    def score(self, key: str) -> Score:
        """What kind of score the row's are."""
        return self.members[0].scores[key]


def comparison(measured: Sequence[Measured], options: Options = Options()) -> list[dict[str, Any]]:
    """One comparison for each set of runs that were measured in the same way and have encodings with several seeds
    (docs/results.md). Raises ValueError for a baseline or a metric that none of the runs has."""
    known = list(dict.fromkeys(str(one.run["encoding"]) for one in measured))
    if options.baseline is not None and options.baseline not in ("none", *known):
        near = nearest(options.baseline, {"none", *known})
        raise ValueError(f"compare.baseline={options.baseline} is none of the encodings; {near}")
    found = []
    for index, group, members in _grouped(measured):
        columns = {column.key: (column.title, column.note) for column in group.columns}
        if options.metrics is not None:
            have = dict.fromkeys(key for member in members for key in member.scores)
            for key in options.metrics:
                if key not in have:
                    raise ValueError(f"compare.metrics: {key!r} was not measured; {nearest(key, list(have))}")
            columns = {key: columns.get(key, (_titled(key, members), "")) for key in options.metrics}
        rows, alone, in_the_way = _rows(members)
        if rows:
            found.append({"group": index, **_compared(group, rows, columns, options, in_the_way + alone)})
    return found


def _titled(key: str, members: Sequence[Measured]) -> str:
    """The key, with its unit where that is not said by the numbers."""
    unit = next((member.scores[key].unit for member in members if key in member.scores), "")
    return key if unit in ("", "percent") else f"{key} ({unit})"


def obstacles(measured: Sequence[Measured]) -> list[str]:
    """What keeps runs of several seeds from being compared, where no comparison came of them."""
    found = []
    for _, _, members in _grouped(measured):
        rows, _, in_the_way = _rows(members)
        found += [] if rows else in_the_way
    return found


def _grouped(measured: Sequence[Measured]) -> Iterator[tuple[int, report.Group, list[Measured]]]:
    by_run = {id(one.run): one for one in measured}
    for index, group in enumerate(report.groups({"runs": [one.run for one in measured]})):
        yield index, group, [by_run[id(run)] for run in group.runs]


def _rows(members: Sequence[Measured]) -> tuple[list[Row], list[str], list[str]]:
    """The rows with several seeds, in the order of the runs; which encodings have one seed alone; and which runs are
    left out for another reason, a line each. What one run spoils is that run, or its seed, and nothing else."""
    rows: list[Row] = []
    images = _most(member.images for member in members)
    for member in members:
        run = member.run
        recipe = json.dumps(run.get("recipe"), sort_keys=True)
        key = str(run["encoding"]), recipe, (run["architecture"], run["epochs"], run["placement"])
        row = next((row for row in rows if (row.encoding, row.recipe, row.kind) == key), None)
        if row is None:
            rows.append(row := Row(*key, []))
        row.members.append(member)
    kept: list[Row] = []
    alone: list[str] = []
    in_the_way: list[str] = []
    for row in rows:
        name, several = row.name, len(row.members) > 1
        for why, out in _unusable(row, images):
            (in_the_way if several else alone).append(f"{name}: {why}")
            row.members = [member for member in row.members if member not in out]
        if len(row.members) > 1:
            kept.append(row)
        elif row.members:
            alone.append(f"{name}: left out; one seed ({row.seeds[0]}) says nothing about the encoding")
    return kept, alone, in_the_way


def _unusable(row: Row, images: NDArray[Any]) -> Iterator[tuple[str, list[Measured]]]:
    """Of a row's runs those that cannot stand in it, each lot with the reason."""
    unknown = [member for member in row.members if member.run["seed"] is None]
    if unknown:
        yield f"{_named(unknown)} left out; no seed is known", unknown
    others = [member for member in row.members if not np.array_equal(member.images, images)]
    if others:
        yield f"{_named(others)} left out; the test images are others than those of most runs", others
    for seed in sorted({seed for seed in row.seeds if row.seeds.count(seed) > 1}):
        same = [member for member in row.members if member.run["seed"] == seed]
        first, *rest = same
        if all(_alike(first, other) for other in rest):
            yield f"{_named(same)} are seed {seed} and decide alike: counted once", rest
            continue
        told = "their configuration is the same" if row.run.get("recipe") else "no config.yaml tells them apart"
        yield f"{_named(same)} left out; all are seed {seed} and {told}: leave out all but one of them", same


def _most(arrays: Iterable[Any]) -> Any:
    """The array (or None) that most are equal to, the first of several."""
    kinds: list[list[Any]] = []
    for array in arrays:
        kind = next((kind for kind in kinds if _equal(kind[0], array)), None)
        if kind is None:
            kinds.append(kind := [])
        kind.append(array)
    return max(kinds, key=len)[0]


def _equal(one: Any, other: Any) -> bool:
    """Of two arrays or None."""
    return bool(np.array_equal(one, other))


def _alike(one: Measured, other: Measured) -> bool:
    """Whether two runs have the same scores on the same images, numbers that are no shares but for rounding: one model
    that is there twice."""
    if one.scores.keys() != other.scores.keys():
        return False
    for key, score in one.scores.items():
        mine, theirs = score.values, other.scores[key].values
        if mine.shape != theirs.shape:
            return False
        apart = 0.0 if score.bounded else 1e-6 + 1e-4 * float(np.abs(mine).max())
        if not np.allclose(mine, theirs, rtol=0, atol=apart):
            return False
    return True


def _named(members: Sequence[Measured]) -> str:
    """Labels of runs, or their folders where labels are alike."""
    labels = [str(member.run["label"]) for member in members]
    if len(set(labels)) < len(labels):
        labels = [str(Path(member.run["checkpoint"]).parent if member.run["checkpoint"] else member.run["label"])
                  for member in members]  # fmt: skip
    return ", ".join(labels)


def _compared(
    group: report.Group, rows: list[Row], columns: dict[str, tuple[str, str]], options: Options, remarks: list[str]
) -> dict[str, Any]:
    metrics = []
    for key, (title, note) in columns.items():
        remarks += _means(rows, key, options.interval)
        unit = next((row.score(key).unit for row in rows if key in row.cells), "percent")
        count = next((row.cells[key]["mean"]["n"] for row in rows if key in row.cells), group.images)
        note = "; ".join(filter(None, (note, f"on {count} of the images" if count < group.images else "")))
        metrics.append({"key": key, "title": title, "note": note, "unit": unit})
    if options.interval == "bootstrap":
        remarks = [TOO_SURE, *remarks]
    remarks += _differences(rows, options)
    remarks += _ranks(rows, list(columns))
    differences = [cell["difference"] for row in rows for cell in row.cells.values() if cell["difference"]]
    for p, name in (("p", "p_holm"), ("p_equivalent", "p_equivalent_holm")):
        tested = [difference for difference in differences if difference[p] is not None]
        for difference, adjusted in zip(tested, significance.holm([difference[p] for difference in tested])):
            difference[name] = float(adjusted)
    fewest = min((difference["seeds"] for difference in differences), default=0)
    if fewest > 0 and significance.smallest_p(fewest) > significance.ALPHA:
        remarks.append(
            f"Without the assumption that seeds are about normal, p below 0.05 is not attainable with {fewest} seeds: "
            f"their signs alone give {significance.smallest_p(fewest):.2g} at best."
        )
    return {
        "data": group.data,
        "apart": group.apart,
        "images": group.images,
        "level": LEVEL,
        "baseline": options.baseline if differences else None,
        "margin": options.margin,
        "tests": len(differences),
        "metrics": metrics,
        "rows": [_entry(row, rows) for row in rows],
        "remarks": remarks,
    }


def _means(rows: Sequence[Row], key: str, interval: str) -> list[str]:
    """Fill in each row's mean of one metric, over the images that most runs took for it; returns what stands in the way
    of any."""
    able = [row for row in rows if all(key in member.scores for member in row.members)]
    if not able:
        return []
    remarks = []
    images = _most(member.scores[key].images for row in able for member in row.members)
    for row in able:
        others = [member for member in row.members if not _equal(member.scores[key].images, images)]
        if others:
            remarks.append(f"{row.name}: no {key}; {_named(others)} took other images for it than most runs")
            continue
        table, kind = row.table(key, row.seeds), row.score(key)
        row.cells[key] = {
            "mean": _mean(table, kind, interval).as_dict(),
            "by_seed": table.mean(axis=1).tolist(),
            "difference": None,
            "rank": None,
        }
    return remarks


def _mean(table: NDArray[np.float64], kind: Score, interval: str) -> hierarchy.SeedEstimate:
    if interval == "bootstrap":
        return hierarchy.bootstrap(table, bounded=kind.bounded)
    return hierarchy.mean(table, kind.repeats, bounded=kind.bounded)


def _entry(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    base = row.baseline
    return {
        "encoding": row.encoding,
        "placement": row.run["placement"],
        "architecture": row.run["architecture"],
        "epochs": row.run["epochs"],
        "apart": report.apart(row.run, [other.run for other in rows]),
        "seeds": row.seeds,
        "runs": [member.run["label"] for member in row.members],
        "baseline": None if base is None else {"encoding": base.encoding, "placement": base.run["placement"]},
        "cells": row.cells,
    }


def _unlike(row: Row, base: Row) -> str:
    mine, theirs = report.settings(row.run), report.settings(base.run)
    return ", ".join(
        f"{key} {mine.get(key)}, not {theirs.get(key)}"
        for key in {**mine, **theirs}
        if mine.get(key) != theirs.get(key)
    )


def _differences(rows: Sequence[Row], options: Options) -> list[str]:
    """Fill in each row's differences to its baseline; returns what stands in the way of any."""
    if options.baseline is None:
        return []
    bases = [row for row in rows if row.encoding == options.baseline]
    if not bases:
        return [f"No differences: no {options.baseline} with several seeds was measured in the same way"]
    remarks = []
    for row in rows:
        if row.encoding == options.baseline:
            continue
        able = [base for base in bases if base.kind[:-1] == row.kind[:-1] and base.kind[-1] in (row.kind[-1], "home")]
        if not able:
            remarks.append(
                f"{row.name}: no difference; no {options.baseline} has its architecture, epochs and placement"
            )
            continue
        base = min(able, key=lambda base: (base.kind != row.kind, base.recipe != row.recipe))
        if base.recipe != row.recipe:
            remarks.append(
                f"{row.name}: trained otherwise than the {base.name} that it is compared with ({_unlike(row, base)})"
            )
        common = sorted(set(row.seeds) & set(base.seeds))
        if len(common) < 2:
            remarks.append(f"{row.name}: no difference; it shares {len(common)} seeds with {base.name}, 2 are needed")
            continue
        if len(common) < max(len(row.seeds), len(base.seeds)):
            remarks.append(f"{row.name}: difference over the shared seeds {', '.join(map(str, common))}")
        row.baseline = base
        for key, cell in row.cells.items():
            if key in base.cells:
                mine, theirs = row.table(key, common), base.table(key, common)
                cell["difference"] = _difference(mine, theirs, row.score(key), options.margin)
    return remarks


def _difference(
    mine: NDArray[np.float64], theirs: NDArray[np.float64], kind: Score, margin: float | None
) -> dict[str, Any]:
    parts = hierarchy.paired(mine, theirs, bounded=kind.bounded)
    margin = margin if kind.unit == "percent" else None  # it is a share
    return hierarchy.difference(mine, theirs, bounded=kind.bounded).as_dict() | {
        "by_seed": (mine - theirs).mean(axis=1).tolist(),
        "p": float(hierarchy.different(parts)),
        "p_holm": None,
        "p_sign_flip": significance.sign_flip((mine - theirs).mean(axis=1)),
        "p_sign_flip_smallest": significance.smallest_p(len(mine)),
        "p_equivalent": None if margin is None else float(hierarchy.equivalent(parts, margin)),
        "p_equivalent_holm": None,
    }


def _sharing(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Rows that share two seeds or more, and these: of all, or without those that share least with the others."""
    kept = list(rows)
    while True:
        common = set.intersection(*(set(row.seeds) for row in kept))
        if len(common) > 1 or len(kept) == 1:
            return kept, sorted(common)
        shared = [sum(len(set(row.seeds) & set(other.seeds)) for other in kept if other is not row) for row in kept]
        del kept[shared.index(min(shared))]


def _ranks(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Fill in each row's rank among the rows of its kind."""
    remarks = []
    for kind in dict.fromkeys(row.kind for row in rows):
        all_of_kind = [row for row in rows if row.kind == kind]
        alike, common = _sharing(all_of_kind)
        for row in all_of_kind:
            if row not in alike:
                remarks.append(f"{row.name}: no rank; it shares too few seeds with the others")
        if len(alike) < 2:
            continue
        if len(common) < max(len(row.seeds) for row in alike):
            shared = ", ".join(map(str, common))
            remarks.append(f"Ranks of {', '.join(row.name for row in alike)}: over the shared seeds {shared}")
        for key in keys:
            able = [row for row in alike if key in row.cells]
            if len(able) > 1:
                tables = np.stack([row.table(key, common) for row in able])
                found = significance.ranks(tables, bounded=able[0].score(key).bounded)
                for row, rank in zip(able, found):
                    row.cells[key]["rank"] = asdict(rank)
    return remarks
