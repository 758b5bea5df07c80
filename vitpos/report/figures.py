"""The figures of a group of runs, for files and for the page."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from vitpos.report.grouping import (
    Group,
    Interval,
    Run,
    apart,
    base_name,
    over_seeds,
    settings,
    shifts_of,
    sizes_of,
    which,
)
from vitpos.report.views import Shown, views
from vitpos.report.words import told

# Okabe-Ito without black and yellow, and two more that stay apart under the common colour-vision deficiencies.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5FC0", "#8C6D31")
MARKERS = "osD^vPX*"
GREY = "#84848c"  # `none`, the baseline, everywhere
INK, GRID = "#1c1c21", "#d7d7dd"  # in the page: the text colour and the grid colour of the theme
FIGURE = re.compile(
    r"(\d+-)?(position|shift|resolution-(canvas|upsample)|probe-.+)\.png"
)  # names that `drawings` gives


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

    def laid_out(self, columns: int) -> Figure:
        """Laid out twice, here and when it is printed: the first time square panels are taken for wide ones."""
        figure = self.draw(columns)
        figure.draw_without_rendering()
        return figure

    def png(self) -> bytes:
        with rc_context(RC):
            figure = self.laid_out(self.columns)
            buffer = io.BytesIO()
            FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=160, facecolor="white")
        return buffer.getvalue()

    def svg(self, columns: int) -> str:
        """Inline SVG in the page's own colours: ink and grid follow the theme, the background is the page's."""
        with rc_context(RC):
            figure = self.laid_out(columns)
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


def _panels(
    titles: Sequence[Sequence[str]], columns: int, width: float, height: float, bar: float = 0.0, **kwargs: Any
) -> tuple[Figure, list[Any]]:
    """Axes below their titles, which may be longer than a panel of `width` inches, less those of a colour `bar`;
    `height` is that with two lines."""
    most, count = int(10.8 * (width - bar)), len(titles)
    texts = ["\n".join(part for line in lines for part in textwrap.wrap(line, most)) for lines in titles]
    height += 0.2 * max(0, *(text.count("\n") - 1 for text in texts))
    rows = math.ceil(count / columns)
    columns = math.ceil(count / rows)  # rows of about one length
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    for axis, text in zip(axes, texts):
        axis.set_title(text, parse_math=False)
    return figure, axes[:count]


def _said(run: Run, group: Group) -> list[str]:
    return [base_name(run), ", ".join(told(run, group.runs))]


def _mean_of(group: Group) -> str:
    """ ", mean of seeds 0, 1, 2" where runs are drawn together."""
    drawn = dict.fromkeys(", ".join(map(str, run["seeds"])) for run in group.runs if "seeds" in run)
    return f", mean of seeds {' or '.join(drawn)}" if drawn else ""


def _seeds(group: Group, kind: str = "curves") -> str:
    bars = "; bars: from the lowest seed to the highest" if kind == "curves" else ""
    return f"{means[2:].capitalize()}{bars}. " if (means := _mean_of(group)) else ""


def _key(group: Group) -> str:
    """How to read lines and bars."""
    lines = "Dashed: the control trained at uniform placement. " * any(r["placement"] == "uniform" for r in group.runs)
    lines += _seeds(group)
    grey = list({id(none): none for run in group.runs if (none := _baseline(run, group))}.values())
    if len(grey) == 1:
        lines += f"Grey: none{'' if 'seeds' in grey[0] else ', run ' + which(grey[0])}"
    elif grey:
        lines += "Grey: none, of the same recipe where there is one"
    if grey:
        alone = any(base_name(run) != "none" and not _baseline(run, group) for run in group.runs)
        lines += f"{'; only beside models of its architecture and epochs' * (alone or len(grey) > 1)}. "
    if any("seeds" not in run for run in group.runs):
        lines += f"Bars{' of one seed' * bool(_seeds(group))}: 95% over images, for that model. "
    return f"{lines}Dotted: what always answering the most frequent class reaches."


def _baseline(run: Run, group: Group) -> Run | None:
    """The `none` to be seen beside a run, if it is another encoding's: of its architecture and epochs; of its placement
    where there is such a one, else home (as `baselines` has it); then of its recipe."""
    nones = [r for r in group.runs if base_name(r) == "none"] if base_name(run) != "none" else []
    able = [r for r in nones if all(r[key] == run[key] for key in ("architecture", "epochs"))]
    able = [r for r in able if r["placement"] in (run["placement"], "home")]
    return min(able, key=lambda r: (r["placement"] != run["placement"], settings(r) != settings(run)), default=None)


def drawings(results: dict[str, Any], group: Group, prefix: str = "") -> list[Drawing]:
    """The figures of one group of runs; those that differ in nothing but the seed are drawn as their mean."""
    look = styles(results)
    group = dataclasses.replace(group, runs=over_seeds(group.runs))
    key = _key(group)
    homes = any(run["placement"] == "home" for run in group.runs)
    found = []
    if group.variant:
        moved = "Where the object was drawn" if group.variant == "canvas" else f"Shift of the image ({group.variant})"
        found.append(
            Drawing(
                f"{prefix}position",
                "Accuracy by position",
                f"{moved}, in pixels: whole patches only. One square is one position, its number the accuracy in "
                f"percent{_mean_of(group)}; the outlined one is the reference"
                + (
                    ", with the object in the very corner (home, as trained, is up to a patch away from it)"
                    if homes
                    else ""
                )
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
                    f"{prefix}{view.name}", view.view["title"], f"{view.note} {_seeds(group, kind)}".strip(),
                    functools.partial(draw[kind], group, view), columns,
                )
            )  # fmt: skip
    return found


def _probe_curves(group: Group, found: Shown, columns: int) -> Figure:
    """One panel a run, one line a series."""
    titles = [_said(run, group) for run, _ in found.runs]
    figure, axes = _panels(titles, columns, 3.3 if columns > 1 else 4.2, 2.6, sharex=True, sharey=True)
    names = list(dict.fromkeys(line["name"] for _, view in found.runs for line in view["series"]))
    drawn: dict[str, Any] = {}
    scale = 100 if found.view["unit"] == "percent" else 1
    for axis, (_, view) in zip(axes, found.runs):
        for line in view["series"]:
            i = names.index(line["name"])
            points = [(x, y) for x, y in zip(line["x"], line["y"]) if y is not None]
            value = [scale * (y["value"] if isinstance(y, dict) else y) for _, y in points]
            bars = [[scale * abs(y["value"] - y[end]) if isinstance(y, dict) else 0 for _, y in points]
                    for end in ("low", "high")]  # fmt: skip
            drawn[line["name"]] = axis.errorbar(
                [x for x, _ in points], value, bars, color=PALETTE[i % len(PALETTE)], marker=MARKERS[i % len(MARKERS)],
                markersize=4, elinewidth=1, linewidth=1.6,
            )  # fmt: skip
        if any(isinstance(x, str) for line in view["series"] for x in line["x"]):
            axis.tick_params(axis="x", labelrotation=60)
        axis.label_outer()
    if len(names) > 1:
        shown = [name for name in names if name in drawn]
        figure.legend(
            [drawn[name] for name in shown], shown, loc="outside upper left", fontsize=9, frameon=False,
            ncols=3 if columns > 1 else 2,
        )  # fmt: skip
    figure.supxlabel(found.view["x"], fontsize=10)
    figure.supylabel(found.view["y"], fontsize=10)
    return figure


def _probe_maps(group: Group, found: Shown, columns: int) -> Figure:
    """One panel a run and map, one colour scale for all."""
    panels = [(run, panel) for run, view in found.runs for panel in view["panels"]]
    figure, axes = _panels([[*_said(run, group), panel["name"]] for run, panel in panels], columns, 2.3, 2.3, bar=0.25)
    values = [[[math.nan if v is None else v for v in row] for row in panel["values"]] for _, panel in panels]
    known = [v for rows in values for row in rows for v in row if not math.isnan(v)] or [0.0]
    for axis, rows in zip(axes, values):
        mesh = axis.pcolormesh(rows, cmap="cividis", vmin=min(known), vmax=max(known), edgecolors="none")
        axis.set(aspect="equal")
        axis.invert_yaxis()
        axis.set_xticks([]), axis.set_yticks([])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    figure.colorbar(mesh, ax=axes, shrink=0.8, label=found.view["unit"])
    return figure


def _heat_maps(group: Group, columns: int) -> Figure:
    runs = [run for run in group.runs if shifts_of(run).get("patch")]
    figure, axes = _panels([_said(run, group) for run in runs], columns, 2.05, 2.25)
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
        axis.set(aspect="equal")
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
    """One panel an encoding and setting, `none` in grey behind each; shared axes, so that heights compare."""
    panels: dict[tuple[str, str], list[Run]] = {}
    for run in group.runs:
        panels.setdefault((base_name(run), apart(run, group.runs)), []).append(run)
    figure, axes = _panels(list(panels), columns, 3.3 if columns > 1 else 4.2, 2.35, sharex=True, sharey=True)
    for axis, ((encoding, _), runs) in zip(axes, panels.items()):
        if reference := _baseline(runs[0], group):
            _curve(axis, curves(reference)["line"], GREY, "", "-", width=1.2)
        for run in runs:
            colour, marker = look[encoding]
            found = curves(run)
            _curve(axis, found["line"], colour, marker, "--" if run["placement"] == "uniform" else "-")
            if run["placement"] != "uniform":
                _curve(axis, found.get("hollow", []), colour, marker, "", hollow=True)
        axis.axhline(100 * group.runs[0]["majority_class"], color=GREY, linewidth=1, linestyle=":")
        axis.set(ylim=(0, 102))
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
