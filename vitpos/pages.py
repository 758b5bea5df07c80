"""Pages about encodings, made from the code: an overview table, a page each, and a figure of what each one does.

Drawing needs matplotlib, which is imported when a figure is asked for.
"""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitpos.composition import Held, Position, held_by, why_not
from vitpos.encoding import LAWS, Contextual, Encoding, Geometry, Rotations, Turns, law_state
from vitpos.positions import Extent, Positions, grid
from vitpos.spec import REGISTRY, Spec, list_encodings, options, parse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panel = tuple[str, Tensor]  # a title and a map [H, W]
VIT_B = Geometry(dim=768, heads=12, head_dim=64, depth=12, grid=(14, 14))


def overview() -> str:
    """One row an encoding: where it acts, its parameters, its laws; then which encodings combine."""
    rows = [
        "| encoding | what it is | acts on | parameters | exactly invariant to |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in list_encodings():
        cls = REGISTRY[name]
        held = [law if law in cls.laws else f"{law}¹" for law in LAWS if law_state(cls.laws, law) != "does not hold"]
        row = [f"[`{name}`]({name}.md)", cls.summary, ", ".join(cls.sites()), f"{parameters(name):,}", ", ".join(held)]
        rows.append("| " + " | ".join(cell or "-" for cell in row) + " |")
    return "\n".join(
        [
            "# Encodings",
            "",
            "Made by `make docs` from the code. Parameters are those of a ViT-B/16 at 224 px with default options; "
            "invariances are exact ones of a whole model, without options (a page of its own says more).",
            "",
            *rows,
            "",
            "¹ without class and register tokens",
            "",
            *(f"- **{law}**: {meaning}." for law, meaning in LAWS.items()),
            "",
            "## Which combine",
            "",
            *_combinations(),
            "",
            "## How each begins in a trained model",
            "",
            *_beginnings(),
        ]
    )


def _combinations() -> list[str]:
    names = [name for name in list_encodings() if name not in ("native", "none")]
    clashing = [first for first in names if any(why_not(first, second) for second in names if second != first)]
    return [
        "Any two combine with `+`, in any order, except",
        "",
        "- `none` with any other: it means no position at all;",
        f"- two of {', '.join(f'`{name}`' for name in clashing)}: both would rotate q and k.",
    ]


def _beginnings() -> list[str]:
    """What ``attach(..., preserve=True)`` does about each encoding."""
    names = [name for name in list_encodings() if name not in ("native", "none")]
    found: dict[str, list[str]] = {"gate": [], "zeros": [], "nothing": []}
    refused = []
    for name in names:
        try:
            found[REGISTRY[name].beginning(dict(parse(name).terms[0].options))].append(f"`{name}`")
        except ValueError as error:
            refused.append(f"| no | {error} | `{name}` |")
    possible = [name for group in found.values() for name in group]
    exact = [f"`{name}`" for name in names if not {"bias", "mix"} & set(REGISTRY[name].sites())]
    exact = [name for name in exact if name in possible]
    return [
        "`vitpos.attach(model, spec, preserve=True)` leaves what a model computes as it is; fine-tuning goes on from "
        "there. What was added to its tokens (an absolute table) stays and fades as `vitpos.set_fade` says. Its logits "
        f"are equal bit for bit with {', '.join(exact)} (without `free_prefix`), to rounding "
        "with the others.",
        "",
        "| possible | how | encodings |",
        "| --- | --- | --- |",
        f"| yes | a learned gate, one number a head (or for all tokens), begins at 0 | {', '.join(found['gate'])} |",
        f"| yes | its own weights (of a network, those of the last layer) begin at 0 | {', '.join(found['zeros'])} |",
        f"| yes | it has no effect on the training grid | {', '.join(found['nothing'])} |",
        *refused,
        "",
        "With `wrap=True` the fixed rotations turn by whole cycles and cannot begin at 0 (`rope_mixed` can); "
        "`cpb(center=False)` cannot. A rotation or bias that the model has already is kept, not faded: "
        "`native + rpb` adds to it.",
    ]


def parameters(name: str, geometry: Geometry = VIT_B) -> int:
    """How many parameters an encoding has in a model of this geometry, with default options."""
    with torch.device("meta"):
        return sum(p.numel() for p in Position(parse(name), geometry).parameters())


def page(name: str) -> str:
    """One encoding in Markdown: its docstring, options, laws, parameters and source."""
    cls: type[Encoding] = REGISTRY[name]
    lines = [
        f"# `{name}`",
        "",
        f"{cls.summary[0].upper()}{cls.summary[1:]}.",
        "",
        *([f"![what {name} does]({name}.png)", ""] if _has_maps(name) else []),
        "",
    ]
    lines += ["```text", (inspect.getdoc(cls) or "").strip(), "```", ""]
    if options(name):
        lines += ["| option | default |", "| --- | --- |"]
        lines += [
            f"| `{option.name}` | `{dict(parse(name).terms[0].options)[key]!r}` |"
            for key, option in options(name).items()
        ]
        lines.append("")
    lines += [
        "| exact invariance | default | " + " | ".join(f"`{v}`" for v in cls.variants) + (" |" if cls.variants else "")
    ]
    lines += ["| --- | --- |" + " --- |" * len(cls.variants)]
    for law, meaning in LAWS.items():
        states = [law_state(laws, law) for laws in (cls.laws, *cls.variants.values())]
        lines.append(f"| {law}: {meaning} | " + " | ".join(states) + " |")
    lines += ["", *_cycles(name)]
    lines += [
        f"Parameters in a ViT-B/16 at 224 px: {parameters(name):,} "
        f"({'one set a layer' if cls.per_layer else 'shared by all layers'}).",
        "",
        f"Source: {cls.paper}.",
    ]
    return "\n".join(lines)


def cycles(encoding: Encoding, extent: Extent) -> Tensor | None:
    """How often each phase of an encoding turns around from border to border of an image: [1 | h, pairs, (y, x)].

    None for an encoding that has no phases linear in the coordinates.
    """
    start = Positions(torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64), extent)
    phases = encoding.double().phases(start)
    if phases is None:
        return None
    a_patch = (phases[0, :, 1:] - phases[0, :, :1]).mT  # [1 | h, pairs, (y, x)], in radians
    return a_patch.detach() * a_patch.new_tensor(extent) / (2 * math.pi)


def spectrum(text: str, extent: Extent, geometry: Geometry = VIT_B) -> str:
    """The cycles of an encoding over an image of ``extent`` patches, pair by pair, of the first layer's first head.

    The model is trained on ``geometry.grid``; learned frequencies are those of initialization (seed 0).
    Raises ValueError for a spec without phases.
    """
    torch.manual_seed(0)
    lines = []
    for encoding in {e.name: e for e in reversed([*Position(parse(text), geometry).encodings()])}.values():
        found = cycles(encoding, extent)
        if found is not None:
            height, width = extent
            lines += [
                f"{encoding.name}: cycles over an image of {height} x {width} patches",
                "  pair         y         x",
            ]
            lines += [f"  {pair:4d}  {y:8.4f}  {x:8.4f}" for pair, (y, x) in enumerate(found[0].tolist())]
    if not lines:
        raise ValueError(f"{text} has no phases that turn with the coordinates")
    return "\n".join(lines)


def _cycles(name: str) -> list[str]:
    """A row for each axis: the most and the least cycles over two sizes of image, which shows what the unit is."""
    torch.manual_seed(0)
    encoding = next(Position(parse(name), VIT_B).encodings())
    sizes = (VIT_B.grid, (2 * VIT_B.grid[0], 2 * VIT_B.grid[1]))
    found = [cycles(encoding, size) for size in sizes]
    if found[0] is None:
        return []
    lines = [
        "| cycles over an image of | " + " | ".join(f"{h} x {w} patches" for h, w in sizes) + " |",
        "| --- | --- | --- |",
    ]
    for axis, label in enumerate(("down", "across")):
        turning = [c[..., axis].abs() for c in found if c is not None]
        turning = [c[c > 0] for c in turning]
        lines.append(f"| {label} | " + " | ".join(f"{c.max():.3g} to {c.min():.3g}" for c in turning) + " |")
    how = ", at initialization" if list(encoding.parameters()) else ""
    return [
        *lines,
        "",
        f"Highest and lowest frequency{how}, in a ViT-B/16 trained on 14 x 14 patches: as many cycles in a larger "
        "image where coordinates are fractions of it, more where they count patches. "
        f"`python -m vitpos.encodings {name} --cycles 14x14` lists all.",
        "",
    ]


def panels(spec: Spec, extent: Extent) -> list[Panel]:
    """Maps over the grid of what an encoding does, at initialization, seen from the patch at the centre."""
    torch.manual_seed(0)
    return maps(Position(spec, Geometry(dim=192, heads=12, head_dim=16, depth=2, grid=extent)), extent)


def maps(position: Position, extent: Extent, held: Held | None = None) -> list[Panel]:
    """The same of encodings as they are, in the last layer where each has its own; ``held`` as in `Position`."""
    pos = grid(*extent)
    centre = extent[0] // 2 * extent[1] + extent[1] // 2
    found: list[Panel] = []
    last = {type(encoding): encoding for encoding in position.encodings()}
    with torch.no_grad():
        for encoding in last.values():
            given = [] if held is None else held_by(encoding, held)
            for site in encoding.sites():
                found += _PANELS[site](encoding, pos, centre, *given)
    return [(title, values.detach().float().reshape(extent)) for title, values in found]


def _of_tokens(encoding: Any, pos: Positions, centre: int, *held: Any) -> list[Panel]:
    vectors = encoding.tokens(pos, *held)[0]  # [N, D]
    channels = [k * vectors.shape[1] // 4 for k in range(4)]
    alike = torch.nn.functional.cosine_similarity(vectors, vectors[centre], dim=-1)
    return [(f"channel {c}", vectors[:, c]) for c in channels] + [("cosine with the centre", alike)]


def _of_mix(encoding: Any, pos: Positions, centre: int, *held: Any) -> list[Panel]:
    impulse = torch.zeros(1, pos.coords.shape[1], encoding.geometry.dim)
    impulse[:, centre] = 1
    zero, ones = torch.zeros_like(impulse), torch.ones_like(impulse)
    still = encoding.mix(zero, pos)
    return [
        ("an impulse, channel 0", (encoding.mix(impulse, pos) - still)[0, :, 0]),
        ("a constant image, channel 0", (encoding.mix(ones, pos) - still)[0, :, 0]),
    ]


def _of_angles(encoding: Any, pos: Positions, centre: int, *held: Any) -> list[Panel]:
    angles = encoding.angles(Positions(pos.coords, pos.extent), *held)
    if isinstance(angles, Rotations):
        relative = angles.matrix[0, 0, centre].mT @ angles.matrix[0, 0]  # [N, d/b, b, b]
        alike = relative.diagonal(dim1=-2, dim2=-1).mean(dim=(-2, -1))
        entries = [(f"matrix entry (0, {c}), block 0", angles.matrix[0, 0, :, 0, 0, c]) for c in (0, 1)]
        return [*entries, ("q = k: logit against the centre", alike)]
    if isinstance(angles, Turns):
        cos, sin = (table[-1] if angles.by_layer else table for table in (angles.cos, angles.sin))
        phase = torch.atan2(sin, cos)[0, 0]
    else:
        phase = angles.phase[0, 0]  # [N, d/2]
    chosen = [k * phase.shape[1] // 4 for k in range(4)]
    alike = (phase - phase[centre]).cos().mean(-1)
    return [(f"cos, pair {c}", phase[:, c].cos()) for c in chosen] + [("q = k: logit against the centre", alike)]


def _of_bias(encoding: Any, pos: Positions, centre: int, *held: Any) -> list[Panel]:
    bias = encoding.bias(Positions(pos.coords, pos.extent), *held)
    if isinstance(bias, Contextual):
        return [("bucket, query at the centre", bias.buckets[0, centre].float())]
    layer = encoding.geometry.layer if encoding.per_layer else encoding.geometry.depth - 1
    values = bias.values[0, :, centre] * encoding.slope_of(layer)  # [h, N]
    heads = sorted({round(k * (len(values) - 1) / 3) for k in range(4)})
    return [(f"bias, head {h}", values[h]) for h in heads]


def _of_scale(encoding: Any, pos: Positions, centre: int, *held: Any) -> list[Panel]:
    return []  # a number, not a map


_PANELS = {"tokens": _of_tokens, "mix": _of_mix, "angles": _of_angles, "bias": _of_bias, "scale": _of_scale}


def draw(text: str, extent: Extent) -> Figure:
    """A figure of ``panels`` side by side, each with its own colour scale; keys that a bias hides are grey."""
    spec = parse(text)
    shown = panels(spec, extent)
    if not shown:
        raise ValueError(f"{spec} has no map over the grid to draw")
    return _figure(shown, f"{spec} on {extent[0]} x {extent[1]} patches")


def draw_model(model: Any) -> Figure | None:
    """The same of a model's encodings with their present weights, on its training grid; None without a map."""
    position, extent = model.position, model.position.geometry.grid
    held: dict[str, Any] = {**model.own(), **model.own_of(model.blocks[-1])}
    if model.pos_embed is not None:
        held["pos_embed"] = model.pos_embed[:, model.prefix_rows :]
    position, held = copy.deepcopy((position, {k: v.detach() if isinstance(v, Tensor) else v for k, v in held.items()}))
    shown = maps(position.cpu().float().eval(), extent, {name: value.cpu().float() for name, value in held.items()})
    return _figure(shown, f"{position.spec} on {extent[0]} x {extent[1]} patches") if shown else None


def _figure(shown: list[Panel], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 * len(shown), 2.4), layout="constrained", dpi=80)
    figure.suptitle(title, fontsize=10)
    for axes, (name, values) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        axes.set_facecolor("0.7")
        low, high = values[values.isfinite()].aminmax()
        image = axes.imshow(
            values.masked_fill(~values.isfinite(), float("nan")).numpy(),
            vmin=float(low),
            vmax=float(high),
            cmap="viridis",
        )
        axes.plot(values.shape[1] // 2, values.shape[0] // 2, "w+", markersize=7)
        axes.set_title(name, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
        figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)
    return figure


def write(folder: Path) -> None:
    """Overview, pages and figures of all encodings."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(overview() + "\n")
    for name in list_encodings():
        (folder / f"{name}.md").write_text(page(name) + "\n")
        if _has_maps(name):
            draw(name, (7, 11)).savefig(folder / f"{name}.png", metadata={"Software": None})


def _has_maps(name: str) -> bool:
    return not set(REGISTRY[name].sites()) <= {"scale"}
