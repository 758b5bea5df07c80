"""The tables on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from vitpos.report.compare_tables import covers, explained, heading, lines, unit_of
from vitpos.report.grouping import Group, Interval, base_name, groups
from vitpos.report.views import Shown, shown, views
from vitpos.report.words import certificates, legend, policies, remarks, title, told
from vitpos.tables import percent, span


def print_table(results: dict[str, Any], console: Console | None = None) -> None:
    """Tables, legends and certificates; colours only where the console has them, sensible from 80 columns on."""
    console = console or Console()
    found = groups(results)
    for comparison in results.get("comparison", []):
        _print_comparison(comparison, found[comparison["group"]], console)
    for index, group in enumerate(found):
        if covers(results, index, group):  # the files have each model
            _print_lines((*certificates(group), *remarks(group)), console)
            continue
        rows = [
            [_lines([base_name(run), *told(run, group.runs)]), *(_cell(column.pick(run)) for column in group.columns)]
            for run in group.runs
        ]
        _print_wide(title(group), [column.title for column in group.columns], rows, 9, console)
        _print_lines((*legend(group), *certificates(group), *remarks(group)), console)
        for own in views(group, "table"):
            if own.view["brief"]:
                console.print(_own_table(own, group))
                console.print()


def _print_comparison(comparison: dict[str, Any], group: Group, console: Console) -> None:
    """One row an encoding, over its seeds."""
    metrics = comparison["metrics"]
    rows = []
    for row in comparison["rows"]:
        trained = f"trained {row['placement']}" if row["placement"] else ""
        below = [row["apart"], trained, f"{len(row['seeds'])} seeds"]
        cells = [lines(row["cells"].get(metric["key"]), unit_of(metric)) for metric in metrics]
        rows.append([_lines(cell) for cell in ([row["encoding"], *below], *cells)])
    _print_wide(heading(comparison), [metric["title"] for metric in metrics], rows, 11, console)
    notes = [f"{metric['title']}: {metric['note']}." for metric in metrics if metric["note"]]
    _print_lines((*notes, *explained(comparison), *policies(group)), console)


def _print_wide(name: str, heads: list[str], rows: list[list[Text]], least: int, console: Console) -> None:
    """A table with a first column of encodings, in parts below each other where it is wider than the console."""
    widths = [max(least, *map(len, head.split())) + 2 for head in heads]  # headings break at blanks
    fit = max(1, (console.width - 14) // max(widths))
    size = math.ceil(len(heads) / math.ceil(len(heads) / fit))
    for start in range(0, len(heads), size):
        part = slice(start, start + size)
        table = _rich_table("" if start else name)
        table.add_column("encoding", overflow="fold", max_width=console.width - sum(widths[part]))
        for head, width in zip(heads[part], widths[part]):
            table.add_column(head, justify="right", width=width - 2)
        for first, *cells in rows:
            table.add_row(first, *cells[part])
        console.print(table)


def _print_lines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(Text(line, style="dim"))
    console.print()


def _lines(cell: list[str]) -> Text:
    """The first line bold, the others dim."""
    return Text.assemble((cell[0], "bold"), *(("\n" + line, "dim") for line in cell[1:] if line))


def _rich_table(title: str) -> RichTable:
    return RichTable(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True,
        title=title, title_style="bold", title_justify="left",
    )  # fmt: skip


def _own_table(found: Shown, group: Group) -> RichTable:
    """A probe's own table: the runs one below another, what is said of each beside its rows."""
    table = _rich_table(found.view["title"])
    table.add_column("encoding", overflow="fold")
    for column in found.view["columns"]:
        table.add_column(column["title"], justify="right")
    for run, view in found.runs:
        said = [Text(base_name(run), "bold"), *(Text(line, "dim") for line in told(run, group.runs))]
        for i, row in enumerate(view["rows"], 1):
            cells = [shown(value, column["unit"]) for value, column in zip(row, view["columns"])]
            beside = len(said) if i == len(view["rows"]) else 2 if any(of for _, of in cells) else 1
            name, said = Text("\n").join(said[:beside]), said[beside:]
            table.add_row(name, *(Text.assemble(text, ("\n" + of if of else "", "dim")) for text, of in cells))
    return table


def _cell(interval: Interval | None) -> Text:
    if interval is None:
        return Text("-", style="dim")
    return Text.assemble((percent(interval["value"]), "bold"), "\n", (span(interval), "dim"))
