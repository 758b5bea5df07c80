"""The main tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

from typing import Any

from vitpos.report.compare_tables import named, records, table
from vitpos.report.grouping import Group, apart, base_name, groups
from vitpos.report.words import title
from vitpos.tables import Table, csv, latex, markdown, percent, span


def tables(results: dict[str, Any]) -> list[Table]:
    """Encodings over seeds where they were compared, then each group's models."""
    compared = [table(found) for found in results.get("comparison", [])]
    return compared + [_models(group) for group in groups(results)]


def to_markdown(results: dict[str, Any]) -> str:
    """The main tables as Markdown; where there are several, each below its title."""
    found = tables(results)
    return "\n".join(f"{table.title}\n\n{markdown(table)}" if len(found) > 1 else markdown(table) for table in found)


def to_latex(results: dict[str, Any]) -> str:
    """The same as LaTeX, for the package booktabs; titles are comments."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(map(latex, tables(results)))


def to_csv(results: dict[str, Any]) -> str:
    """The same numbers as one line a row and column, shares in 0..1 (docs/results.md)."""
    compared = [record for found in results.get("comparison", []) for record in records(found)]
    models = [
        {
            "of": "model", "data": group.data, "apart": group.apart, "encoding": base_name(run),
            "trained": run["placement"], "recipe": apart(run, group.runs), "seeds": run["seed"],
            "metric": column.key, "title": column.title, "unit": "percent", "label": run["label"],
            **{key: entry[key] for key in ("value", "low", "high", "over")},
        }
        for group in groups(results)
        for run in group.runs
        for column in group.columns
        if (entry := column.pick(run))
    ]  # fmt: skip
    return csv(compared + models)


def _models(group: Group) -> Table:
    """One row a model."""
    seeds = len({run["seed"] for run in group.runs}) > 1
    heads = ["encoding", *["trained at"] * group.placed, *["seed"] * seeds, *(column.title for column in group.columns)]
    rows = []
    for run in group.runs:
        cells = [str(run["placement"] or "–")] * group.placed
        cells += ["–" if run["seed"] is None else str(run["seed"])] * seeds
        for entry in (column.pick(run) for column in group.columns):
            cells.append(f"{percent(entry['value'])} ({span(entry)})" if entry else "–")
        rows.append([named(base_name(run), apart(run, group.runs)), *([cell] for cell in cells)])
    return Table(heads, rows, title(group))
