"""Numbers to a console table, Markdown, LaTeX, CSV, figures, JSON and one HTML page.

Knows results (docs/results.md), no model and no torch.

A result set is the dict that `results.json` holds: {"schema", "provenance", "runs": [run, ...]}. Runs measured in the
same way (`setup`; same kind of shift and of size) stand in one table; others get a table of their own. Where encodings
were compared over several seeds (`comparison`), that table comes first.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from vitpos import compare_tables
from vitpos.tables import Table, csv, latex, markdown, marks, percent, points, span

SCHEMA = "vitpos.results/1"
# Okabe-Ito without black and yellow, and two more that stay apart under the common colour-vision deficiencies.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5FC0", "#8C6D31")
MARKERS = "osD^vPX*"
# Keys of a data configuration that shape training alone: the test images are the same whatever they are.
TRAINING_ONLY = {"placement", "val_fraction", "crop_padding", "flip", "min_crop_area", "workers", "download"}
GREY = "#84848c"  # `none`, the baseline, everywhere
INK, GRID = "#1c1c21", "#d7d7dd"  # in the page: the text colour and the grid colour of the theme
FIGURE = re.compile(
    r"(\d+-)?(position|shift|resolution-(canvas|upsample)|probe-.+)\.png"
)  # names that `drawings` gives
Run = dict[str, Any]
Interval = dict[str, Any]


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        whole = Path(folder) / path.name
        whole.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(whole, path)
    return path


def to_json(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=1, allow_nan=False) + "\n"


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A stored result set; ValueError if it is none, or of another version of the schema."""
    try:
        results = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        found = results.get("schema") if isinstance(results, dict) else type(results).__name__
        raise ValueError(f"{path} has schema {found!r}, expected {SCHEMA!r}")
    return results


# What stands beside what


def base_name(run: Run) -> str:
    return str(run["encoding"])


def ordered(runs: Iterable[Run]) -> list[Run]:
    """By encoding, each followed by its control of uniform placement; seeds in order; `none` last."""
    return sorted(runs, key=lambda r: (base_name(r) == "none", base_name(r), r["placement"] != "home", r["seed"] or 0))


def setup(run: Run) -> dict[str, Any]:
    """What was measured on what. Only runs with equal setups stand in one table or are compared as pairs."""
    translation = run["probes"].get("translation", {})
    resolution = run["probes"].get("resolution", {})
    return {
        **{key: value for key, value in run["data"].items() if key not in TRAINING_ONLY},
        "image_size": run["image_size"],
        "images": run["images"],
        "classes": decided(run),
        "precision": "bf16" if "float32" in run else "float32",
        "patch_size": translation.get("patch_size", resolution.get("patch_size")),
        "options": {name: probe.get("options") for name, probe in run["probes"].items()},
        "shifts": {
            f"{variant}, {name}": entry["shifts"]
            for variant, found in translation.get("variants", {}).items()
            for name, entry in found.items()
            if "shifts" in entry
        },
    }


def decided(run: Run) -> str:
    """Among which classes is decided, where a model knows more of them than the images show; else ''."""
    found = run.get("decision")
    if not found:
        return ""
    among = f"all {found['known']}" if found["among"] == found["known"] else f"these {found['among']}"
    return f"{found['classes']} of {found['known']} ({found['names']}), decided among {among}"


def baselines(runs: list[Run]) -> list[int | None]:
    """For each run the index of the `none` that it is compared with; None where there is none, and for `none`.

    It was measured in the same way (`setup`) and trained alike: architecture, epochs and seed are the run's; so is
    the placement where there is such a one, else it is home; then so is the recipe. The first of several.
    """
    setups = [setup(run) for run in runs]

    def alike(i: int, j: int) -> bool:
        same = all(runs[i][key] == runs[j][key] for key in ("architecture", "epochs", "seed"))
        return base_name(runs[j]) == "none" and same and setups[i] == setups[j]

    found: list[int | None] = []
    for i, run in enumerate(runs):
        able = [j for j in range(len(runs)) if alike(i, j)] if base_name(run) != "none" else []
        ranked = [j for place in (run["placement"], "home") for j in able if runs[j]["placement"] == place]
        ranked.sort(
            key=lambda j: (runs[j]["placement"] != run["placement"], runs[j].get("recipe") != run.get("recipe"))
        )
        found.append(ranked[0] if ranked else None)
    return found


def compared_with(run: Run) -> str:
    """Which `none` the differences of a run are to; '' if it has none."""
    other = run.get("difference_to_none")
    return _which(other | {"label": other["baseline"]}) if other else ""


def _which(run: Run) -> str:
    extra = [f"trained {run['placement']}"] if run.get("placement") else []
    extra += [f"seed {run['seed']}"] if run.get("seed") is not None else []
    return f"{run['label']}" + (f" ({', '.join(extra)})" if extra else "")


def shift_variant(run: Run) -> str | None:
    """The variant of the translation probe that the table shows: canvas where there is one, else crop."""
    variants = run["probes"].get("translation", {}).get("variants", {})
    return next((v for v in ("canvas", "crop", "circular") if "patch" in variants.get(v, {})), None)


def size_kind(run: Run) -> str | None:
    kinds = run["probes"].get("resolution", {}).get("kinds", {})
    return next((k for k in ("canvas", "upsample") if len(kinds.get(k, {}).get("rows", [])) > 1), None)


def shifts_of(run: Run) -> dict[str, Any]:
    variant = shift_variant(run)
    return run["probes"]["translation"]["variants"][variant] if variant else {}


def sizes_of(run: Run, kind: str | None) -> list[dict[str, Any]]:
    return run["probes"].get("resolution", {}).get("kinds", {}).get(str(kind), {}).get("rows", [])


@dataclass
class Column:
    """One column of the table; `pick` gives its interval, or None where a run does not have it."""

    title: str
    pick: Callable[[Run], Interval | None]
    note: str
    key: str  # of the per-image score that it is the mean of (`probes.scores`)
    delta: Callable[[Run], Interval | None] = lambda run: None  # difference to `none`, shown in the page


@dataclass
class Group:
    """Runs that can stand in one table."""

    runs: list[Run]
    variant: str | None
    kind: str | None
    columns: list[Column] = field(default_factory=list)
    apart: str = ""  # what tells it from other groups of the same data, e.g. "object_size 8"

    @property
    def data(self) -> str:
        return str(self.runs[0]["data"]["name"])

    @property
    def placed(self) -> bool:
        return any(run["placement"] for run in self.runs)

    @property
    def images(self) -> int:
        return int(self.runs[0]["images"])


def row_at_scale(run: Run, kind: str | None, scale: float) -> dict[str, Any] | None:
    """The square enlargement nearest to `scale`, under the first policy listed."""
    rows = [row for row in sizes_of(run, kind) if row["scale"][0] == row["scale"][1]]
    near = [row for row in rows if abs(row["scale"][0] - scale) <= 0.15]
    return min(near, key=lambda row: abs(row["scale"][0] - scale), default=None)


def groups(results: dict[str, Any]) -> list[Group]:
    def key(run: Run) -> tuple[Any, ...]:
        kinds = run["data"]["name"], str(shift_variant(run)), str(size_kind(run))
        return *kinds, json.dumps(setup(run), sort_keys=True)

    found = []
    for _, members in itertools.groupby(sorted(results["runs"], key=key), key=key):
        runs = ordered(members)
        group = Group(runs, shift_variant(runs[0]), size_kind(runs[0]))
        group.columns = _columns(group)
        found.append(group)
    for group in found:
        group.apart = ", ".join(_apart(group, [other for other in found if other.data == group.data]))
    return found


def _apart(group: Group, others: list[Group]) -> list[str]:
    """What of a group's setup is not the same in all of `others`, for its title."""
    setups = [setup(other.runs[0]) for other in others]
    mine = setup(group.runs[0])
    varied = [
        key
        for key in mine
        if key not in ("images", "shifts", "options") and any(mine[key] != s.get(key) for s in setups)
    ]
    return [f"{key} {'x'.join(map(str, v)) if isinstance(v := mine[key], list) else v}" for key in varied]


def _columns(group: Group) -> list[Column]:
    patch = shifts_of(group.runs[0]).get("patch")
    canvas = group.variant == "canvas"
    home = "home" if canvas else "accuracy"
    where = (
        "with the object within the first patch of the corner, where training at home has it"
        if canvas
        else "on the images as they are"
    )
    note = f"accuracy {where}; read everything else beside it"
    columns = [Column(home, lambda run: run["accuracy"], note, "accuracy")]
    if patch:
        key = f"translation/{group.variant}/patch/"
        others = len(patch["shifts"]) - 1
        columns += [
            Column(
                "unseen positions" if canvas else f"shifted ({group.variant})",
                lambda run: shifts_of(run)["patch"]["mean_shifted"],
                f"mean accuracy over the {others} whole-patch "
                + ("positions other than the corner (0, 0)" if canvas else f"shifts ({group.variant})")
                + ("; training at home has not seen them" if canvas else ""),
                key + "mean_shifted",
            ),
            Column(
                "worst position" if canvas else "worst shift",
                lambda run: shifts_of(run)["patch"]["worst"],
                f"the worst of all {others + 1}, chosen on one half of the images and scored on the other, both ways",
                key + "worst",
            ),
            Column(
                "consistency (pairwise)",
                lambda run: shifts_of(run)["patch"]["consistency"]["pairwise"],
                "share of pairs of positions with the same decision, right or wrong; a constant answer has 100",
                key + "pairwise",
            ),
        ]
    larger = "canvas" if group.kind == "canvas" else "upsampled"
    meaning = "canvas grown, object on the tokens it was on" if group.kind == "canvas" else "image resized"
    for scale, label in ((1.5, "1.5x"), (2.0, "2x")):
        rows = [row for run in group.runs if (row := row_at_scale(run, group.kind, scale))]
        if rows:
            sizes = " or ".join(dict.fromkeys(f"{row['size'][0]}x{row['size'][1]} px" for row in rows))
            columns.append(
                Column(
                    f"{label} {larger}",
                    functools.partial(_accuracy_at, group.kind, scale),
                    f"accuracy with both sides {label} ({sizes}): {meaning}",
                    f"resolution/{group.kind}/" + "x".join(map(str, rows[0]["size"])),
                    functools.partial(_difference_at, group.kind, scale),
                )
            )
    return columns


def _accuracy_at(kind: str | None, scale: float, run: Run) -> Interval | None:
    row = row_at_scale(run, kind, scale)
    return row["accuracy"] if row else None


def _difference_at(kind: str | None, scale: float, run: Run) -> Interval | None:
    row = row_at_scale(run, kind, scale)
    return difference(run, str(kind), row["size"], row["policy"]) if row else None


def legend(group: Group) -> list[str]:
    """What the columns and intervals are over, and what not to conclude."""
    lines = [f"{column.title}: {column.note}." for column in group.columns]
    lines += [
        f"All in percent, on {group.images} test images. Each interval is 95% over images, for this one model "
        "(positions of one image are not independent: clustered by image).",
        "One row is one model. An interval over images says nothing about the encoding in general: "
        "another seed can move a row by more than its interval. Several seeds of each encoding (seed=0,1,2) can be "
        "compared.",
    ]
    if any(compared_with(run) for run in group.runs):
        lines.append(
            "A star at a difference: McNemar's exact test of these two models, p ≤ 0.05 after Holm's correction for "
            "all differences of this evaluation (** 0.01, *** 0.001)."
        )
    if any(row_at_scale(run, group.kind, 2.0) and compared_with(run) for run in group.runs):
        lines.append("Larger sizes change more than positions: read them as the difference to none on the same images.")
    return lines


def baseline(group: Group) -> Run | None:
    return next((run for run in group.runs if base_name(run) == "none"), None)


def certificates(group: Group) -> list[str]:
    """How far `none` is from exact invariance: certain in theory, so it checks the measurement itself."""
    lines = []
    for run in group.runs:
        patch = shifts_of(run).get("patch")
        if base_name(run) == "none" and patch and group.variant in ("canvas", "circular"):
            change = patch["logit_change"]
            lines.append(
                f"none (seed {run['seed']}): largest logit change between whole-patch positions "
                f"{change['largest']:.1e}; {change['differing_decisions']} of {change['decisions']} decisions differ"
            )
    return lines


def difference(run: Run, kind: str, size: list[int], policy: str) -> Interval | None:
    for entry in (run.get("difference_to_none") or {}).get("rows", []):
        if entry["kind"] == kind and entry.get("size") == size and entry.get("policy") == policy:
            return entry["difference"]
    return None


# Console


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
        table = _rich_table(_title(group))
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
        for shown in views(group, "table"):
            if shown.view["brief"]:
                console.print(_console_table(shown, seeds))
                console.print()


def _print_lines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(Text(line, style="dim"))
    console.print()


def _print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """One row an encoding, over its seeds."""
    metrics = comparison["metrics"]
    widths = [max(11, *map(len, metric["title"].split())) for metric in metrics]
    table = _rich_table(compare_tables.title(comparison))
    table.add_column("encoding", overflow="fold", max_width=max(console.width - sum(width + 2 for width in widths), 8))
    for metric, width in zip(metrics, widths):
        table.add_column(metric["title"], justify="right", width=width)
    for row in comparison["rows"]:
        trained = f"trained {row['placement']}" if row["placement"] else ""
        below = ", ".join(filter(None, (row["apart"], trained, f"{len(row['seeds'])} seeds")))
        cells = [compare_tables.lines(row["cells"].get(metric["key"])) for metric in metrics]
        table.add_row(*(_console_lines(cell) for cell in ([row["encoding"], below], *cells)))
    console.print(table)
    _print_lines(compare_tables.legend(comparison), console)


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


def _title(group: Group) -> str:
    shift = {"canvas": "object moved on its canvas", "crop": "image shifted over black", "circular": "image rolled"}
    size = {"canvas": "canvas enlarged", "upsample": "image resized"}
    data = f"{group.data} ({group.apart})" if group.apart else group.data
    parts = [f"{data}: {group.images} test images", shift.get(str(group.variant)), size.get(str(group.kind))]
    return ", ".join(part for part in parts if part)


def _console_cell(interval: Interval | None) -> Text:
    if interval is None:
        return Text("-", style="dim")
    return Text.assemble((percent(interval["value"]), "bold"), "\n", (span(interval), "dim"))


def remarks(group: Group) -> list[str]:
    """Why cells are empty, and what else a row needs said."""
    found: dict[str, None] = {}
    for run in group.runs:
        if not run["trained"]:
            found[f"{base_name(run)} ({run['label']}): random weights, never trained; its accuracy means nothing"] = (
                None
            )
        if classes := decided(run):
            found[f"classes of the test images: {classes} classes of the model"] = None
        if full := run.get("float32"):
            found[
                f"{base_name(run)} ({run['label']}): computed in bf16; its plain decisions agree with float32 on "
                f"{percent(full['agreement']['value'])}% ({span(full['agreement'])}) of the images, where accuracy is "
                f"{percent(full['accuracy']['value'])}%"
            ] = None
        for probe, entry in run["probes"].items():
            for place, why in _not_applicable(entry, (probe,)):
                found[f"not measured ({base_name(run)}): {', '.join(place)}: {why}"] = None
        for name, entry in run["probes"].get("resolution", {}).get("kinds", {}).items():
            for refused in entry.get("refused", [])[:1]:
                count = len(entry["refused"])
                found[f"not measured ({base_name(run)}): {name} at {count} sizes: {refused['why']}"] = None
    return list(found)


def _not_applicable(entry: dict[str, Any], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every place in a probe's results that says why something does not apply, at any depth."""
    if "not_applicable" in entry:
        yield place, entry["not_applicable"]
        return
    for name, inner in entry.items():
        if isinstance(inner, dict) and name not in ("definitions", "options"):
            hidden = name in ("variants", "kinds")  # mere containers
            yield from _not_applicable(inner, place if hidden else (*place, name))


# What a probe says of its own (`vitpos/probes/_views.py`)


@dataclass
class Shown:
    """One view of a probe, with the runs of a group that have it, each with its own numbers."""

    probe: str
    view: dict[str, Any]
    runs: list[tuple[Run, dict[str, Any]]]

    @property
    def name(self) -> str:
        return f"probe-{self.probe}-{self.view['key']}"


def views(group: Group, kind: str) -> list[Shown]:
    """The views of one kind (table, curves, maps) of a group's runs, by probe."""
    found: dict[tuple[str, str], Shown] = {}
    for run in group.runs:
        for probe, entry in run["probes"].items():
            for view in entry.get("views", []):
                if view["kind"] == kind:
                    found.setdefault((probe, view["key"]), Shown(probe, view, [])).runs.append((run, view))
    return list(found.values())


def shown(value: Any, unit: str) -> tuple[str, str]:
    """A cell's number and its interval, as text; either may be empty."""
    if isinstance(value, dict):
        low, high = (_number(value[key], unit) for key in ("low", "high"))
        return _number(value["value"], unit), f"{low} to {high}"
    if value is None:
        return "–", ""
    return (value if isinstance(value, str) else _number(value, unit)), ""


def _number(value: float, unit: str) -> str:
    if unit == "percent":
        return percent(value)
    return str(value) if isinstance(value, int) else f"{value:.3g}"


# Markdown, LaTeX, CSV


def tables(results: dict[str, Any]) -> list[Table]:
    """Encodings over seeds where they were compared, then each group's models."""
    compared = [compare_tables.table(found) for found in results.get("comparison", [])]
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
    compared = [record for found in results.get("comparison", []) for record in compare_tables.records(found)]
    models = [
        {
            "of": "model", "data": group.data, "apart": group.apart, "encoding": base_name(run),
            "trained": run["placement"], "recipe": "", "seeds": run["seed"],
            "metric": column.key, "title": column.title, "label": run["label"],
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
        cells = [base_name(run), *[str(run["placement"] or "–")] * group.placed]
        cells += ["–" if run["seed"] is None else str(run["seed"])] * seeds
        for entry in (column.pick(run) for column in group.columns):
            cells.append(f"{percent(entry['value'])} ({span(entry)})" if entry else "–")
        rows.append([[cell] for cell in cells])
    return Table(heads, rows, _title(group))


# Figures


def styles(results: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Encoding -> (colour, marker), the same in every figure and table of a report."""
    names = sorted({base_name(run) for run in results["runs"]} - {"none"})
    chosen = {
        name: (PALETTE[i % len(PALETTE)], MARKERS[(i + i // len(PALETTE)) % len(MARKERS)])
        for i, name in enumerate(names)
    }
    return chosen | {"none": (GREY, "o")}


RC: Any = {
    "font.size": 10, "axes.titlesize": 10.5, "axes.labelsize": 10, "axes.edgecolor": INK, "text.color": INK,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.facecolor": "none", "axes.grid": True, "axes.axisbelow": True,
    "grid.color": GRID, "grid.linewidth": 0.8, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "svg.hashsalt": "vitpos", "lines.linewidth": 1.8, "figure.dpi": 100,
}  # fmt: skip


@dataclass
class Drawing:
    """A figure that can be laid out in any number of columns."""

    name: str
    title: str
    caption: str
    draw: Callable[[int], Figure]
    columns: int

    def png(self) -> bytes:
        with rc_context(RC):
            figure = self.draw(self.columns)
            buffer = io.BytesIO()
            FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=160, facecolor="white")
        return buffer.getvalue()

    def svg(self, columns: int) -> str:
        """Inline SVG in the page's own colours: ink and grid follow the theme, the background is the page's."""
        with rc_context(RC):
            figure = self.draw(columns)
            buffer = io.StringIO()
            FigureCanvasSVG(figure).print_figure(buffer, format="svg", facecolor="none", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])  # type: ignore[index]
        label = self.title.replace('"', "'")
        opening = f'<svg role="img" aria-label="{label}" style="max-width:{width * 4 / 3:.0f}px"'
        text = re.sub(r'^<svg( (?:width|height)="[^"]*")*', opening, text)
        text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
        # Two layouts of one figure stand in one page: their ids must not meet.
        text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}{columns}-", text)
        return text.replace(INK, "currentColor").replace(GRID, "var(--grid)")


def _panels(count: int, columns: int, width: float, height: float, **kwargs: Any) -> tuple[Figure, list[Any]]:
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def _run_title(run: Run, group: Group) -> str:
    extra = [f"trained {run['placement']}"] if run["placement"] else []
    extra += [f"seed {run['seed']}"] if len({r["seed"] for r in group.runs}) > 1 else []
    return base_name(run) + ("\n" + ", ".join(extra) if extra else "")


def drawings(results: dict[str, Any], group: Group, prefix: str = "") -> list[Drawing]:
    """The figures of one group of runs."""
    look = styles(results)
    key = (
        "Dashed: the control trained at uniform placement. "
        if any(r["placement"] == "uniform" for r in group.runs)
        else ""
    )
    grey = baseline(group)
    key += f"Grey: none, {_which(grey)}. " if grey else ""
    key += "Bars: 95% over images, for that model."
    homes = any(run["placement"] == "home" for run in group.runs)
    found = []
    if group.variant:
        moved = "Where the object was drawn" if group.variant == "canvas" else f"Shift of the image ({group.variant})"
        found.append(
            Drawing(
                f"{prefix}position",
                "Accuracy by position",
                f"{moved}, in pixels: whole patches only. One square is one position, its number the accuracy in "
                + "percent; the outlined one is the reference"
                + (", beside which training at home has its objects" if homes else "")
                + ". A model that generalises over position has one colour throughout; bright is accurate.",
                lambda columns: _heat_maps(group, columns),
                5,
            )
        )
        found.append(
            Drawing(
                f"{prefix}shift",
                "Accuracy against shift",
                "Filled and joined: whole patches"
                + (", where only position and border can matter" if group.variant == "canvas" else "")
                + ". Hollow: shifts of less "
                "than a patch, which also change how the patch grid cuts the content, whatever the encoding. " + key,
                lambda columns: _curves(group, look, columns, *_shift_axes(group)),
                3,
            )
        )
    for kind, title, caption in (
        ("canvas", "Accuracy on a larger canvas", "The object stays on the tokens it was on; only positions and "
         "background are new. Read it as the distance to none, which loses accuracy to the background alone."),
        ("upsample", "Accuracy on a resized image", "The object grows with the grid (bilinear, antialiased). "
         "The size of things changes too, so that no model stays flat."),
    ):  # fmt: skip
        if any(len(sizes_of(run, kind)) > 1 for run in group.runs):
            found.append(
                Drawing(
                    f"{prefix}resolution-{kind}",
                    title,
                    f"{caption} {key}",
                    lambda columns, kind=kind: _curves(group, look, columns, *_size_axes(group, kind)),  # type: ignore[misc]
                    3,
                )
            )
    draw = {"curves": _probe_curves, "maps": _probe_maps}
    for kind, columns in (("curves", 3), ("maps", 5)):
        for view in views(group, kind):
            found.append(
                Drawing(
                    f"{prefix}{view.name}", view.view["title"], view.view["note"],
                    functools.partial(draw[kind], group, view), columns,
                )
            )  # fmt: skip
    return found


def _probe_curves(group: Group, found: Shown, columns: int) -> Figure:
    """One panel a run, one line a series."""
    figure, axes = _panels(len(found.runs), columns, 3.3 if columns > 1 else 4.2, 2.6, sharex=True, sharey=True)
    scale = 100 if found.view["unit"] == "percent" else 1
    for axis, (run, view) in zip(axes, found.runs):
        for i, line in enumerate(view["series"]):
            points = [(x, y) for x, y in zip(line["x"], line["y"]) if y is not None]
            value = [scale * (y["value"] if isinstance(y, dict) else y) for _, y in points]
            bars = [[scale * abs(y["value"] - y[end]) if isinstance(y, dict) else 0 for _, y in points]
                    for end in ("low", "high")]  # fmt: skip
            axis.errorbar(
                [x for x, _ in points], value, bars, color=PALETTE[i % len(PALETTE)], marker=MARKERS[i % len(MARKERS)],
                markersize=4, elinewidth=1, linewidth=1.6, label=line["name"],
            )  # fmt: skip
        axis.set(title=_run_title(run, group))
        if any(isinstance(x, str) for line in view["series"] for x in line["x"]):
            axis.tick_params(axis="x", labelrotation=60)
        axis.label_outer()
    if len(found.view["series"]) > 1:
        axes[0].legend(fontsize=7.5, framealpha=0.6)
    figure.supxlabel(found.view["x"], fontsize=10)
    figure.supylabel(found.view["y"], fontsize=10)
    return figure


def _probe_maps(group: Group, found: Shown, columns: int) -> Figure:
    """One panel a run and map, one colour scale for all."""
    panels = [(run, panel) for run, view in found.runs for panel in view["panels"]]
    figure, axes = _panels(len(panels), columns, 2.3, 2.3)
    values = [[[math.nan if v is None else v for v in row] for row in panel["values"]] for _, panel in panels]
    known = [v for rows in values for row in rows for v in row if not math.isnan(v)] or [0.0]
    for axis, (run, panel), rows in zip(axes, panels, values):
        mesh = axis.pcolormesh(rows, cmap="cividis", vmin=min(known), vmax=max(known), edgecolors="none")
        axis.set(aspect="equal", title=_run_title(run, group) + (f"\n{panel['name']}" if panel["name"] else ""))
        axis.invert_yaxis()
        axis.set_xticks([]), axis.set_yticks([])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    figure.colorbar(mesh, ax=axes, shrink=0.8, label=found.view["unit"])
    return figure


def _heat_maps(group: Group, columns: int) -> Figure:
    runs = [run for run in group.runs if shifts_of(run).get("patch")]
    figure, axes = _panels(len(runs), columns, 2.05, 2.25)
    for axis, run in zip(axes, runs):
        patch = shifts_of(run)["patch"]
        rows = sorted({dy for dy, _ in patch["shifts"]})
        cols = sorted({dx for _, dx in patch["shifts"]})
        values = [[math.nan] * len(cols) for _ in rows]
        for (dy, dx), accuracy in zip(patch["shifts"], patch["accuracy"]):
            values[rows.index(dy)][cols.index(dx)] = 100 * accuracy["value"]
        # pcolormesh, not imshow: cells stay vector shapes in the page.
        axis.pcolormesh(values, cmap="cividis", vmin=0, vmax=100, edgecolors="none")
        for i, j in itertools.product(range(len(rows)), range(len(cols))):
            if not math.isnan(values[i][j]):
                colour = "white" if values[i][j] < 55 else "black"
                axis.text(j + 0.5, i + 0.5, f"{values[i][j]:.0f}", ha="center", va="center", color=colour, fontsize=8.5)
        y, x = rows.index(patch["shifts"][0][0]), cols.index(patch["shifts"][0][1])
        axis.plot([x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y], color="#D55E00", linewidth=2, clip_on=False)
        axis.set(aspect="equal", title=_run_title(run, group))
        axis.set_xticks([k + 0.5 for k in range(len(cols))], [str(c) for c in cols])
        axis.set_yticks([k + 0.5 for k in range(len(rows))], [str(r) for r in rows])
        axis.invert_yaxis()
        axis.tick_params(length=0)
        axis.grid(False)
        axis.spines[:].set_visible(False)
    figure.supxlabel("x (pixels)", fontsize=10)
    figure.supylabel("y (pixels)", fontsize=10)
    return figure


Curve = list[tuple[float, Interval]]


def _shift_axes(group: Group) -> tuple[str, Callable[[Run], dict[str, Curve]]]:
    def curves(run: Run) -> dict[str, Curve]:
        found = shifts_of(run)
        points = {
            name: [(point["distance"], point["accuracy"]) for point in found[name]["by_distance"]]
            for name in ("patch", "subpatch")
            if name in found
        }
        return {"line": points.get("patch", []), "hollow": points.get("subpatch", [])[1:]}

    return "distance from the reference (pixels)", curves


def _size_axes(group: Group, kind: str) -> tuple[str, Callable[[Run], dict[str, Curve]]]:
    def curves(run: Run) -> dict[str, Curve]:
        rows = sizes_of(run, kind)
        first = rows[0]["policy"] if rows else ""
        return {
            "line": sorted(
                ((row["size"][0], row["accuracy"]) for row in rows
                 if row["scale"][0] == row["scale"][1] and row["policy"] == first),
                key=lambda point: point[0],
            )
        }  # fmt: skip

    return "side of the canvas (pixels)" if kind == "canvas" else "side of the image (pixels)", curves


def _curves(
    group: Group, look: dict[str, tuple[str, str]], columns: int, label: str, curves: Callable[[Run], dict[str, Curve]]
) -> Figure:
    """One panel an encoding, `none` in grey behind each; shared axes, so that heights compare."""
    encodings = list(dict.fromkeys(base_name(run) for run in group.runs))
    width = 3.3 if columns > 1 else 4.2
    figure, axes = _panels(len(encodings), columns, width, 2.35, sharex=True, sharey=True)
    reference = baseline(group)
    for axis, encoding in zip(axes, encodings):
        if reference is not None and encoding != "none":
            _curve(axis, curves(reference)["line"], GREY, "", "-", width=1.2)
        for run in (r for r in group.runs if base_name(r) == encoding):
            colour, marker = look[encoding]
            found = curves(run)
            _curve(axis, found["line"], colour, marker, "--" if run["placement"] == "uniform" else "-")
            if run["placement"] != "uniform":
                _curve(axis, found.get("hollow", []), colour, marker, "", hollow=True)
        axis.set(title=encoding, ylim=(0, 102))
        axis.label_outer()
    figure.supxlabel(label, fontsize=10)
    figure.supylabel("accuracy (%)", fontsize=10)
    return figure


def _curve(
    axis: Any, points: Curve, colour: str, marker: str, line: str, width: float = 1.8, hollow: bool = False
) -> None:
    x = [distance for distance, _ in points]
    y = [100 * e["value"] for _, e in points]
    below = [100 * (e["value"] - e["low"]) for _, e in points]
    above = [100 * (e["high"] - e["value"]) for _, e in points]
    axis.errorbar(
        x, y, [below, above] if marker else None, color=colour, marker=marker or None, linestyle=line or "none",
        linewidth=width, markersize=4.5, elinewidth=1, markerfacecolor="none" if hollow else colour,
        alpha=0.75 if hollow else 1,
    )  # fmt: skip


# The page


def to_html(results: dict[str, Any]) -> str:
    """One self-contained page: no request, light and dark by the reader's setting. Its one script sorts tables; without
    it everything is there all the same."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"percent": percent, "span": span, "points": points, "compared_with": compared_with}
    filters |= {"shown": shown, "marks": marks, "sign": compare_tables.sign, "rank_text": compare_tables.rank_text}
    environment.filters |= filters
    look = styles(results)
    found = groups(results)
    definitions: dict[str, dict[str, str]] = {}
    for run in results["runs"]:
        for name, probe in run["probes"].items():
            definitions.setdefault(name, probe["definitions"])
    return environment.get_template("report.html").render(
        results=results,
        groups=[_page_group(results, group, f"g{i}-") for i, group in enumerate(found)],
        colours={name: colour for name, (colour, _) in look.items()},
        comparisons=[
            {
                "title": compare_tables.title(one),
                "placed": compare_tables.placed(one),
                **one,
                "legend": compare_tables.legend(one),
            }
            for one in results.get("comparison", [])
        ],
        definitions=definitions,
        schema=SCHEMA,
    )


def _page_group(results: dict[str, Any], group: Group, prefix: str) -> dict[str, Any]:
    figures = [
        {"title": d.title, "caption": d.caption, "wide": d.svg(d.columns), "narrow": d.svg(2 if d.columns == 5 else 1)}
        for d in drawings(results, group, prefix)
    ]
    sizes = []
    for kind in ("canvas", "upsample"):
        measured = {tuple(row["size"]): None for run in group.runs for row in sizes_of(run, kind)}
        if len(measured) > 1:
            sizes.append(
                {
                    "kind": kind,
                    "sizes": [list(size) for size in sorted(measured, key=lambda s: (s[0] != s[1], s))],
                    "rows": [entry for run in group.runs for entry in _size_rows(run, kind)],
                }
            )
    return {
        "title": _title(group),
        "data": group.data,
        "images": group.images,
        "placed": group.placed,
        "seeds": len({run["seed"] for run in group.runs}) > 1,
        "runs": group.runs,
        "columns": group.columns,
        "legend": legend(group),
        "certificates": certificates(group),
        "remarks": remarks(group),
        "figures": figures,
        "sizes": sizes,
        "shifts": [row for run in group.runs for row in _shift_rows(run)],
        "tables": views(group, "table"),
        "compared": any(compared_with(run) for run in group.runs),
    }


def _shift_rows(run: Run) -> list[dict[str, Any]]:
    """One row a variant and group of shifts, everything measured there."""
    variants = run["probes"].get("translation", {}).get("variants", {})
    names = {"patch": "whole patches", "subpatch": "less than a patch"}
    return [
        {"run": run, "variant": variant, "reach": names[group], "count": len(entry["shifts"])} | entry
        for variant, found in variants.items()
        for group, entry in found.items()
        if group in names
    ]


def _size_rows(run: Run, kind: str) -> list[dict[str, Any]]:
    """One row a policy: accuracy and difference to `none` by size."""
    rows: dict[str, dict[str, Any]] = {}
    for row in sizes_of(run, kind):
        entry = rows.setdefault(row["policy"], {"run": run, "policy": row["policy"], "cells": {}})
        change = difference(run, kind, row["size"], row["policy"])
        entry["cells"][tuple(row["size"])] = {"accuracy": row["accuracy"], "difference": change}
    return list(rows.values())


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
