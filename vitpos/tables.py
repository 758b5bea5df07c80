"""How numbers are written, and tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

Cell = Sequence[str]  # lines, one below another
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {char: "\\" + char for char in "&%$#_{}"}
LATEX |= {"\N{MINUS SIGN}": "$-$", "Δ": r"$\Delta$", "≈": r"$\approx$", "–": "--", "…": r"\ldots{}", "*": r"$^{*}$"}


@dataclass(frozen=True)
class Table:
    """Heads, and rows of cells; the first cell of a row is code."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""


def percent(value: float) -> str:
    return f"{100 * value:.1f}".replace("-", "\N{MINUS SIGN}")


def points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "\N{MINUS SIGN}")


def number(value: float, unit: str) -> str:
    """Of unit "percent" a share in 0..1; of any other three digits, without the unit."""
    if unit == "percent":
        return percent(value)
    return (str(value) if isinstance(value, int) else f"{value:.3g}").replace("-", "\N{MINUS SIGN}")


def change(value: float, unit: str) -> str:
    """A difference, with its sign: of shares in points."""
    return points(value) if unit == "percent" else f"{value:+.3g}".replace("-", "\N{MINUS SIGN}")


def span(interval: Mapping[str, Any], unit: str = "percent") -> str:
    low, high = (number(interval[end], unit) for end in ("low", "high"))
    return f"{low}–{high}" if interval["low"] >= 0 else f"{low} to {high}"


def marks(p: float | None) -> str:
    """Stars of a p value that is corrected for its table: * to 0.05, ** to 0.01, *** to 0.001."""
    return "" if p is None else "*" * sum(p <= limit for limit in (0.05, 0.01, 0.001))


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"

    text = line(table.heads) + line(["---"] * len(table.heads))
    for name, *cells in table.rows:
        text += line([f"`{' '.join(name)}`", *("<br>".join(cell).replace("*", "\\*") for cell in cells)])
    return text


def latex(table: Table) -> str:
    """A tabular (booktabs); lines of one cell are a \\shortstack."""

    def escape(text: str) -> str:
        return "".join(LATEX.get(char, char) for char in text)

    def stack(cell: Cell) -> str:
        lines = [escape(part) for part in cell]
        return lines[0] if len(lines) == 1 else r"\shortstack[r]{" + r" \\ ".join(lines) + "}"

    rows = [[rf"\texttt{{{escape(' '.join(name))}}}", *map(stack, cells)] for name, *cells in table.rows]
    frame = pd.DataFrame(rows, columns=[escape(head) for head in table.heads])
    title = "".join(f"% {line}\n" for line in table.title.splitlines())
    return title + frame.to_latex(index=False, escape=False, column_format="l" + "r" * (len(table.heads) - 1))


def csv(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a record; the columns of all of them, in the order in which they come up."""
    return pd.DataFrame(list(records), dtype=object).to_csv(index=False)
