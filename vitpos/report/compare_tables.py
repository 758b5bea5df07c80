"""A comparison of encodings (docs/results.md, `comparison`) as a table, its legend, and records for a spreadsheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vitpos.report.grouping import Group
from vitpos.tables import Table, change, marks, number, percent, span

Comparison = dict[str, Any]
SCATTER = 0.2  # of shares of seeds: their mean says little of any one model


def heading(found: Comparison) -> str:
    data = f"{found['data']} ({found['apart']})" if found["apart"] else found["data"]
    return f"{data}: encodings, over seeds and {found['images']} test images"


def placed(found: Comparison) -> bool:
    return any(row["placement"] for row in found["rows"])


def covers(results: dict[str, Any], index: int, group: Group) -> bool:
    """Whether every model of a group stands in a row of its comparison."""
    rows = [row for one in results.get("comparison", []) if one["group"] == index for row in one["rows"]]
    return sum(len(row["runs"]) for row in rows) == len(group.runs)


def equivalent(difference: dict[str, Any]) -> bool:
    p = difference["p_equivalent_holm"]
    return p is not None and p <= 0.05


def sign(difference: dict[str, Any]) -> str:
    """Stars for a difference that is not chance, and a mark for one that is certainly small."""
    return marks(difference["p_holm"]) + ("≈" if equivalent(difference) else "")


def unit_of(metric: dict[str, Any]) -> str:
    return str(metric.get("unit", "percent"))  # not stored by early versions, which had shares alone


def lines(cell: dict[str, Any] | None, unit: str) -> list[str]:
    """Mean, interval, difference and rank of one cell, a line each."""
    if cell is None:
        return ["–"]
    found = [number(cell["mean"]["value"], unit), span(cell["mean"], unit)]
    if difference := cell["difference"]:
        found.append(f"Δ {change(difference['value'], unit)}{sign(difference)}")
        found.append(f"{change(difference['low'], unit)} to {change(difference['high'], unit)}")
    if rank := rank_text(cell["rank"]):
        found.append(rank)
    return found


def leaders(found: Comparison) -> list[tuple[str, str, str]]:
    """For each column: its title, the encodings that may have the highest mean, and those that do not; highest
    first."""
    said = []
    for metric in found["metrics"]:
        unit = unit_of(metric)
        cells = [(row["encoding"], row["cells"].get(metric["key"])) for row in found["rows"]]
        ranked = sorted(((cell["mean"]["value"], name, cell["rank"]) for name, cell in cells if cell and cell["rank"]),
                        key=lambda entry: -entry[0])  # fmt: skip
        if len({rank["of"] for *_, rank in ranked}) == 1 and len(ranked) == ranked[0][2]["of"]:
            may, not_ = (
                ", ".join(
                    f"{name} {number(value, unit)}" for value, name, rank in ranked if (rank["low"] == 1) == first
                )
                for first in (True, False)
            )
            said.append((metric["title"], may, not_))
    return said


def scattered(found: Comparison) -> list[str]:
    """Where seeds of one encoding differ by more than `SCATTER`: the encoding, the column, each seed's value."""
    said = []
    for row in found["rows"]:
        for metric in found["metrics"]:
            cell = row["cells"].get(metric["key"])
            if cell and unit_of(metric) == "percent" and max(cell["by_seed"]) - min(cell["by_seed"]) > SCATTER:
                values = ", ".join(percent(value) for value in cell["by_seed"])
                said.append(f"{row['encoding']}, {metric['title']}: {values}")
    return said


def rank_text(rank: dict[str, Any] | None) -> str:
    """Empty where it could be any."""
    if rank is None or (rank["low"], rank["high"]) == (1, rank["of"]):
        return ""
    possible = str(rank["low"]) if rank["low"] == rank["high"] else f"{rank['low']}–{rank['high']}"
    return f"rank {possible}/{rank['of']}"


def heads(found: Comparison) -> list[str]:
    fixed = ["encoding", *["trained at"] * placed(found), "seeds"]
    return fixed + [metric["title"] for metric in found["metrics"]]


def named(encoding: str, apart: str) -> list[str]:
    """The first cell of a row, a line each; `apart` tells it from others of its encoding."""
    return [encoding, *([f"({apart})"] if apart else [])]


def table(found: Comparison) -> Table:
    rows = []
    for row in found["rows"]:
        fixed = [named(row["encoding"], row["apart"])]
        fixed += [[str(row["placement"] or "–")]] * placed(found)
        rows.append([*fixed, [str(len(row["seeds"]))], *_cells(row, found["metrics"])])
    return Table(heads(found), rows, heading(found))


def _cells(row: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [lines(row["cells"].get(metric["key"]), unit_of(metric)) for metric in metrics]


def explained(found: Comparison) -> list[str]:
    """What to see, and what not to conclude."""
    shares = all(unit_of(metric) == "percent" for metric in found["metrics"])
    text = [
        "One row is one encoding under one recipe: the mean over its seeds, in percent"
        f"{'' if shares else ' (what is no share in its own unit)'}, and its "
        f"{100 * found['level']:g}% interval over seeds and images: of other seeds, on other images like these. Two "
        "intervals that overlap may still belong to different encodings: the differences say so, because they are "
        "paired.",
    ]
    if found["baseline"]:
        text.append(
            f"Δ: difference to {found['baseline']} in points{'' if shares else ' or that unit'}, paired by seed and "
            "image, with its interval. * p ≤ 0.05, ** 0.01, *** 0.001, after Holm's correction for the "
            f"{found['tests']} differences of this table; intervals are for each alone. Differences to another "
            "encoding: the same command with compare.baseline=NAME."
        )
        if found["margin"]:
            alone = "" if shares else "; of shares alone, since the margin is one"
            text.append(
                f"≈: within ±{100 * found['margin']:g} points, p ≤ 0.05 by two one-sided tests, after Holm{alone}."
            )
        text.append("No star is no proof of equality: with few seeds only large differences can be seen.")
    if any(cell["rank"] for row in found["rows"] for cell in row["cells"].values()):
        text.append(
            "rank: the ranks that an encoding can have among those of its architecture, epochs and placement, 1 the "
            f"highest mean{'' if shares else ' (of an error that is the worst)'}; 95% for all encodings of a column "
            "together, corrected over its pairs. Stars are corrected over the whole table, so that a difference may "
            "decide a rank and have none. No rank: it may have any."
        )
    return text + found["remarks"]


def records(found: Comparison) -> Iterator[dict[str, Any]]:
    """One record a row and metric: shares in 0..1, anything else in its `unit`."""
    for row in found["rows"]:
        for metric in found["metrics"]:
            cell = row["cells"].get(metric["key"])
            if cell is None:
                continue
            difference, rank = cell["difference"] or {}, cell["rank"] or {}
            yield {
                "of": "encoding", "data": found["data"], "apart": found["apart"], "encoding": row["encoding"],
                "trained": row["placement"], "recipe": row["apart"], "seeds": " ".join(map(str, row["seeds"])),
                "metric": metric["key"], "title": metric["title"], "unit": unit_of(metric),
                **{key: cell["mean"][key] for key in ("value", "low", "high", "over")},
                "difference_to": (row["baseline"] or {}).get("encoding") if difference else None,
                "difference": difference.get("value"), "difference_low": difference.get("low"),
                "difference_high": difference.get("high"), "p": difference.get("p"), "p_holm": difference.get("p_holm"),
                "p_equivalent_holm": difference.get("p_equivalent_holm"), "rank": rank.get("value"),
                "rank_low": rank.get("low"), "rank_high": rank.get("high"),
            }  # fmt: skip
