"""The tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from vitpos.report.compare_tables import explained, heading, lines
from vitpos.report.groups import Interval, base_name, groups
from vitpos.report.views import Shown, shown, views
from vitpos.report.words import certificates, legend, remarks, title
from vitpos.tables import percent, span


def print_table(results: dict[str, Any], console: Console | None = None) -> None:
    """Tables, legends and certificates; colours only where the console has them, sensible from 80 columns on."""
    console = console or Console()
    found = groups(results)
    for comparison in results.get("comparison", []):
        _print_comparison(comparison, console)
    compared = {one["group"]: sum(len(row["runs"]) for row in one["rows"]) for one in results.get("comparison", [])}
    for index, group in enumerate(found):
        if compared.get(index) == len(group.runs):  # every model stands in a row above; the files have each
            _print_lines((*certificates(group), *remarks(group)), console)
            continue
        seeds = len({run["seed"] for run in group.runs}) > 1
        table = _rich_table(title(group))
        widths = [max(9, *map(len, column.title.split())) for column in group.columns]  # headings break at blanks
        room = console.width - sum(width + 2 for width in widths)
        table.add_column("encoding", overflow="fold", max_width=max(room, 8))
        for column, width in zip(group.columns, widths):
            table.add_column(column.title, justify="right", width=width)
        for run in group.runs:
            trained = f"trained {run['placement']}" if group.placed and run["placement"] else ""
            below = ", ".join(filter(None, (trained, f"seed {run['seed']}" if seeds else "")))
            table.add_row(
                _console_lines([base_name(run), below]), *(_console_cell(column.pick(run)) for column in group.columns)
            )
        console.print(table)
        _print_lines((*legend(group), *certificates(group), *remarks(group)), console)
        for own in views(group, "table"):
            if own.view["brief"]:
                console.print(_console_table(own, seeds))
                console.print()


def _print_lines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(Text(line, style="dim"))
    console.print()


def _print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """One row an encoding, over its seeds."""
    metrics = comparison["metrics"]
    widths = [max(11, *map(len, metric["title"].split())) for metric in metrics]
    table = _rich_table(heading(comparison))
    table.add_column("encoding", overflow="fold", max_width=max(console.width - sum(width + 2 for width in widths), 8))
    for metric, width in zip(metrics, widths):
        table.add_column(metric["title"], justify="right", width=width)
    for row in comparison["rows"]:
        trained = f"trained {row['placement']}" if row["placement"] else ""
        below = ", ".join(filter(None, (row["apart"], trained, f"{len(row['seeds'])} seeds")))
        cells = [lines(row["cells"].get(metric["key"])) for metric in metrics]
        table.add_row(*(_console_lines(cell) for cell in ([row["encoding"], below], *cells)))
    console.print(table)
    _print_lines(explained(comparison), console)


def _console_lines(cell: list[str]) -> Text:
    """The first line bold, the others dim."""
    return Text.assemble((cell[0], "bold"), *(("\n" + line, "dim") for line in cell[1:] if line))


def _rich_table(title: str) -> RichTable:
    return RichTable(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True,
        title=title, title_style="bold", title_justify="left",
    )  # fmt: skip


def _console_table(found: Shown, seeds: bool) -> RichTable:
    """A probe's own table: the runs one below another."""
    table = _rich_table(found.view["title"])
    table.add_column("encoding", overflow="fold")
    for column in found.view["columns"]:
        table.add_column(column["title"], justify="right")
    for run, view in found.runs:
        for i, row in enumerate(view["rows"]):
            name = "" if i else base_name(run) + (f", seed {run['seed']}" if seeds else "")
            cells = [shown(value, column["unit"]) for value, column in zip(row, view["columns"])]
            table.add_row(
                Text(name, "bold"), *(Text.assemble(text, ("\n" + of if of else "", "dim")) for text, of in cells)
            )
    return table


def _console_cell(interval: Interval | None) -> Text:
    if interval is None:
        return Text("-", style="dim")
    return Text.assemble((percent(interval["value"]), "bold"), "\n", (span(interval), "dim"))
