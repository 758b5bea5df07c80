"""Numbers to a console table, Markdown, LaTeX, CSV, figures, JSON and one HTML page.

Knows results (docs/results.md), no model and no torch.

A result set is the dict that `results.json` holds: {"schema", "provenance", "runs": [run, ...]}. Runs measured in the
same way (`setup`; same kind of shift and of size) stand in one table; others get a table of their own. Where encodings
were compared over several seeds (`comparison`), that table comes first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vitpos.report.console import print_table
from vitpos.report.figures import FIGURE, drawings
from vitpos.report.files import SCHEMA, read, to_json, write
from vitpos.report.grouping import Group, apart, baselines, groups, settings, setup
from vitpos.report.page import to_html
from vitpos.report.text import to_csv, to_latex, to_markdown

__all__ = [
    "SCHEMA", "Group", "apart", "baselines", "groups", "print_table", "read", "save", "settings", "setup",
    "to_csv", "to_html", "to_json", "to_latex", "to_markdown", "write",
]  # fmt: skip


def save(
    results: dict[str, Any],
    folder: str | os.PathLike[str],
    page: bool = True,
    predictions: bytes | None = None,
) -> list[Path]:
    """Write results.json, table.md, table.csv, table.tex, figures/*.png, `predictions` as predictions.npz where given
    and, if `page`, report.html into `folder`; returns the paths.

    Everything is made before anything is written. What an earlier evaluation left in `folder` and this one does not
    have (a page, figures, another evaluation's predictions) is removed: what lies there is of one evaluation.
    """
    folder, found = Path(folder), groups(results)
    contents: dict[str, str | bytes] = {} if predictions is None else {"predictions.npz": predictions}
    contents |= {"results.json": to_json(results), "table.md": to_markdown(results)}
    contents |= {"table.csv": to_csv(results), "table.tex": to_latex(results)}
    for i, group in enumerate(found):
        for drawing in drawings(results, group, f"{i}-" if len(found) > 1 else ""):
            contents[f"figures/{drawing.name}.png"] = drawing.png()
    if page:
        contents["report.html"] = to_html(results)
    old = [path for path in folder.glob("figures/*.png") if FIGURE.fullmatch(path.name)] + [folder / "report.html"]
    if len(results["runs"]) > 1:
        old.append(folder / "predictions.npz")  # one run's decisions are not those of several
    for path in old:
        if path.relative_to(folder).as_posix() not in contents:
            path.unlink(missing_ok=True)
    return [write(folder / name, content) for name, content in contents.items()]
