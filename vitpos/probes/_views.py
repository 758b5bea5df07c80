"""What a probe shows, as data: tables, curves and maps that the report draws without knowing the probe. Not a probe.

A view is a JSON-able dict with `kind`, `key` (names its file), `title`, `note` and what its kind needs. Numbers are
numbers or intervals (`stats.Estimate.as_dict`), text is text, None is a dash. `unit` is "percent" for shares in 0..1
that are shown in percent, else what the numbers are in ("" for none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

View = dict[str, Any]
Line = tuple[Sequence[Any], Sequence[Any]]  # x values (numbers or words) and y values


def table(
    key: str, title: str, note: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], *, brief: bool = False
) -> View:
    """`columns` maps a heading to its unit. A `brief` table is short enough for the console."""
    heads = [{"title": name, "unit": unit} for name, unit in columns.items()]
    return {
        "kind": "table", "key": key, "title": title, "note": note, "brief": brief, "columns": heads,
        "rows": [list(row) for row in rows],
    }  # fmt: skip


def curves(
    key: str,
    title: str,
    note: str,
    x: str,
    y: str,
    series: Mapping[str, tuple[Sequence[Any], Sequence[Any]]],
    unit: str,
) -> View:
    """`series` maps a line's name to its x values (numbers or words) and its y values; `x` and `y` label the axes."""
    lines = [{"name": name, "x": list(at), "y": list(values)} for name, (at, values) in series.items()]
    return {"kind": "curves", "key": key, "title": title, "note": note, "x": x, "y": y, "unit": unit, "series": lines}


def maps(key: str, title: str, note: str, panels: Mapping[str, Sequence[Sequence[float | None]]], unit: str) -> View:
    """`panels` maps a name to values [h][w] over the image; all share one colour scale."""
    parts = [{"name": name, "values": [list(row) for row in values]} for name, values in panels.items()]
    return {"kind": "maps", "key": key, "title": title, "note": note, "unit": unit, "panels": parts}
