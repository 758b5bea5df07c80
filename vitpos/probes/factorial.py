"""Factorial: of what a shift does to the logits, the tokenizer's part and the encoding's, inside one network.

When an image moves, two things change: the tokens (another cut of the content, other content at the border) and the
coordinates that the content has. Here they are crossed. With T the tokens, p the coordinates of the grid, and S_d the
image moved by d = o patches over black, the four cells are

    f(T(x), p)      the image as it is            f(T(x), p - o)      coordinates moved alone
    f(T(S x), p)    the ordinary shifted image    f(T(S x), p - o)    both: the coordinates follow the content

so that in the fourth every piece of content has the coordinates it had, whatever patch it is in. Reported, as change of
decisions and as drift |f - f'| over the spread of the logits:

    ordinary    = f(T(S x), p) - f(T(x), p)                what a shifted image does
    following   = f(T(S x), p - o) - f(T(x), p)            what is left of it: tokenizer and border
    encoding    = f(T(S x), p) - f(T(S x), p - o)          the encoding's part: ordinary - following
    coordinates = f(T(x), p - o) - f(T(x), p)              coordinates moved alone: 0 for what knows offsets only
    interaction = f(T(S x), p - o) - f(T(S x), p) - coordinates

Offsets o are of whole and of fractional patches (o times the patch must be whole pixels). Norms of parts do not add up.

The derivative of the logit of the decision by the coordinates, as a map over the image: |d f / d p[n]| at each place,
in logits per patch, in float64. Its sum over the places is the derivative by a common offset; `offset_share` = |sum| /
sum of magnitudes is 0 for an encoding that knows offsets only. Where an encoding reads a table the derivative is that
of its interpolation, at the nodes one-sided.

Source: ours (a 2 x 2 factorial intervention). A timm model takes coordinates through its native encoding, which changes
no logit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitpos import positions, stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._shifts import crop_shift
from vitpos.probes._views import View, curves, maps, table

SIZES = (0.25, 0.5, 0.75, 1.0, 2.0)  # of the offsets in patches, along either axis
EFFECTS = ("ordinary", "following", "encoding", "coordinates")  # those that compare decisions
Offset = tuple[float, float]


def resolve_offsets(given: Any, patch: tuple[int, int], size: tuple[int, int]) -> list[Offset]:
    """Offsets (y, x) in patches, each a whole number of pixels that leaves something in view."""
    if given == "auto":
        both = [pair for o in SIZES for pair in ((o, 0.0), (0.0, o))]
        return [o for o in both if all((c * p).is_integer() and c * p < s for c, p, s in zip(o, patch, size))]
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"factorial.offsets must be auto or a list of [y, x] pairs in patches, got {given!r}")
    offsets: list[Offset] = []
    for pair in given:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(c, int | float) for c in pair):
            raise ValueError(f"factorial.offsets: a pair [y, x] in patches was expected, got {pair!r}")
        for c, p, s in zip(pair, patch, size):
            if not float(c * p).is_integer() or abs(c * p) >= s:
                raise ValueError(
                    f"factorial.offsets: {c} patches of {p} px are no whole number of pixels within the image ({s} px)"
                )
        offsets.append((float(pair[0]), float(pair[1])))
    return offsets


@register(
    "factorial",
    definitions={
        "ordinary": "Shifted image against the image: what a shift does.",
        "following": "The same with coordinates that move along with the content: what tokenizer and border do.",
        "encoding": "Shifted image, coordinates of the grid against coordinates that move along: the encoding's part.",
        "coordinates": "The unshifted image with its coordinates moved alone.",
        "decisions": "Share of images whose decision differs between the two.",
        "drift": "Norm of the difference of the logits, over the norm of the logits about their mean, both summed over "
        "images.",
        "gradient": "Magnitude of the derivative of the logit of the decision by the coordinates of a place, in logits "
        "per patch.",
        "offset_share": "The derivative by an offset common to all places over the sum of the magnitudes: 0 where only "
        "offsets between places matter.",
    },
)
class Factorial:
    """Options: `offsets` ("auto", or a list of [y, x] in patches, down and right positive), `images` (0: all),
    `gradient_images`: of the map of derivatives."""

    defaults: ClassVar[dict[str, Any]] = {"offsets": "auto", "images": 64, "gradient_images": 16}

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        part, chosen = subject.some(options["images"])
        if options["gradient_images"] < 1:
            raise ValueError(f"factorial.gradient_images must be at least 1, got {options['gradient_images']}")
        patch, size = part.patch, part.size
        if size[0] % patch[0] or size[1] % patch[1]:
            raise NotApplicable(f"{size[0]}x{size[1]} px are no whole number of patches of {patch[0]}x{patch[1]} px")
        offsets = resolve_offsets(options["offsets"], patch, size)
        if not offsets:
            raise NotApplicable(f"no offset is a whole number of pixels within an image of {size[0]}x{size[1]} px")
        model = part.positioned()
        grid = size[0] // patch[0], size[1] // patch[1]
        coords = positions.grid(*grid, device=part.device).coords
        refused: dict[Offset, str] = {}
        for offset in offsets:
            try:
                part.logits(part.pixels(part.indices[:1]), model, coords=coords - coords.new_tensor(offset))
            except ValueError as reason:  # an encoding may refuse coordinates, e.g. fractions
                refused[offset] = str(reason)
        offsets = [offset for offset in offsets if offset not in refused]
        shape = len(offsets), len(chosen)
        columns = {f"drift_{name}": np.zeros(shape, np.float32) for name in (*EFFECTS, "interaction")}
        columns |= {f"pred_{name}": np.zeros(shape, np.int64) for name in ("shifted", "coordinates", "both")}
        pred, norm = np.zeros(shape[1], np.int64), np.zeros(shape[1], np.float32)
        advance = part.track("factorial", shape[0] * shape[1])
        for where, pixels in part.loaded():
            plain = part.logits(pixels, model, coords=coords)
            pred[where] = plain.argmax(1).numpy()
            norm[where] = (plain - plain.mean(1, keepdim=True)).norm(dim=1).numpy()
            for s, offset in enumerate(offsets):
                moved = crop_shift(pixels, (round(offset[0] * patch[0]), round(offset[1] * patch[1])))
                follow = coords - coords.new_tensor(offset)
                shifted, both = (part.logits(moved, model, coords=c) for c in (coords, follow))
                alone = part.logits(pixels, model, coords=follow)
                drifts = {
                    "ordinary": shifted - plain, "following": both - plain, "encoding": shifted - both,
                    "coordinates": alone - plain, "interaction": both - shifted - alone + plain,
                }  # fmt: skip
                for name, drift in drifts.items():
                    columns[f"drift_{name}"][s, where] = drift.norm(dim=1).numpy()
                for name, logits in {"shifted": shifted, "coordinates": alone, "both": both}.items():
                    columns[f"pred_{name}"][s, where] = logits.argmax(1).numpy()
                advance(len(pixels))
        arrays = columns | {"images": chosen, "offsets": np.array(offsets).reshape(-1, 2), "pred": pred, "norm": norm}
        if refused:
            arrays["refused_offsets"] = np.array(list(refused))
            arrays["refused_why"] = np.array(list(refused.values()))
        try:
            found = self._gradient(subject, grid, options["gradient_images"])
        except NotApplicable as reason:
            found = {"not_applicable": np.array(str(reason))}
        return arrays | {f"gradient/{key}": np.ascontiguousarray(array) for key, array in found.items()}

    @staticmethod
    def _gradient(subject: Subject, grid: tuple[int, int], images: int) -> Arrays:
        exact, chosen = subject.precise().some(images)
        model = exact.positioned().requires_grad_(False)
        parts = []
        with exact.differentiable():
            cells = positions.grid(*grid, device=exact.device, dtype=exact.dtype).coords
            for indices in exact.indices.split(8):
                coords = cells.repeat(len(indices), 1, 1).requires_grad_()
                logits = exact.decided(model(exact.normalized(exact.pixels(indices)), coords=coords))
                if not logits.requires_grad:
                    raise NotApplicable("the logits are no differentiable function of the coordinates")
                (slope,) = torch.autograd.grad(logits.amax(1).sum(), coords)
                parts.append(slope.cpu())
        slopes = torch.cat(parts)  # [n, N, 2]
        magnitude = slopes.norm(dim=2).mT.reshape(*grid, -1)
        return {"images": chosen, "magnitude": magnitude.numpy(), "offset": slopes.sum(1).mT.numpy()}

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        labels = truth[arrays["images"]]
        rows = []
        for s, offset in enumerate(arrays["offsets"].tolist()):
            answers, drifts = _answers(arrays, labels, s), _drifts(arrays, s)
            rows.append(
                {"offset": offset}
                | {kind: {name: stats.accuracy(x).as_dict() for name, x in found.items()}
                   for kind, found in answers.items()}
                | {"drift": {name: ratio.summary() for name, ratio in drifts.items()}}
            )  # fmt: skip
        result: dict[str, Any] = {"images_used": len(labels), "rows": rows}
        if "refused_offsets" in arrays:
            refused = zip(arrays["refused_offsets"].tolist(), arrays["refused_why"].tolist())
            result["refused"] = [{"offset": offset, "why": why} for offset, why in refused]
        if "gradient/not_applicable" in arrays:
            return result | {"gradient": {"not_applicable": arrays["gradient/not_applicable"].item()}}
        magnitude = arrays["gradient/magnitude"]
        result["gradient"] = {
            "map": magnitude.mean(axis=-1).tolist(),
            "mean": float(magnitude.mean()),
            "offset_share": _offset_share(arrays).summary() if magnitude.shape[-1] > 1 else None,
        }
        return result

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score | None]:
        """By offset in patches, down x right."""
        labels = truth[arrays["images"]]
        found: dict[str, stats.Score | None] = {}
        for s, (down, right) in enumerate(arrays["offsets"].tolist()):
            at = f"{down:g}x{right:g}"
            for kind, answers in _answers(arrays, labels, s).items():
                found |= {f"{kind}/{name}/{at}": stats.Score(x) for name, x in answers.items()}
            found |= {f"drift/{name}/{at}": ratio.score() for name, ratio in _drifts(arrays, s).items()}
        if "gradient/magnitude" in arrays and len(arrays["gradient/images"]) > 1:
            found["offset_share"] = _offset_share(arrays).score(arrays["gradient/images"])
        return found

    def views(self, summary: dict[str, Any]) -> list[View]:
        rows = [
            [*row["offset"], *(row["decisions"][name] for name in EFFECTS), row["drift"]["interaction"]]
            for row in summary["rows"]
        ]
        heads = {"down (patches)": "", "right (patches)": ""} | dict.fromkeys(EFFECTS, "percent")
        heads |= {"interaction (drift)": ""}
        parts = (
            "as the image is shifted (ordinary); as it is shifted and its coordinates follow (following: tokenizer and "
            "border); by the coordinates of the shifted image (encoding)"
        )
        note = (
            f"Share of decisions that change: {parts}; by moving "
            "the coordinates of the unshifted image alone (coordinates). Interaction: what the two together change of "
            "the logits beyond each alone, over the spread of the logits. A relative encoding has no part of its own "
            "(encoding is 0): it tells no place, and what the border does through it stands under following."
        )
        found = [table("cells", "Tokens crossed with coordinates", note, heads, rows, brief=True)] if rows else []
        lines = {}
        for axis, way in enumerate(("down", "right")):
            along = [row for row in summary["rows"] if row["offset"][axis] and not row["offset"][1 - axis]]
            for name in EFFECTS[:3]:
                if along:
                    at = [row["offset"][axis] for row in along]
                    lines[f"{name}, {way}"] = (at, [row["drift"][name] for row in along])
        if lines:
            found.append(
                curves(
                    "drift", "The parts of a shift",
                    f"Drift of the logits relative to their spread: {parts}. What leaves the frame is lost.",
                    "offset (patches)", "relative drift", lines, "",
                )
            )  # fmt: skip
        if "map" in summary["gradient"]:
            found.append(
                maps(
                    "gradient", "How much each place's coordinates matter",
                    "Magnitude of the derivative of the decision's logit by the coordinates, mean over images.",
                    {"": summary["gradient"]["map"]}, "logits per patch",
                )
            )  # fmt: skip
        return found


def _answers(arrays: Arrays, labels: NDArray[np.int64], s: int) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """Of one offset, by image: in which cells the decision is right (`accuracy`), which effects change it
    (`decisions`)."""
    cells = {"plain": arrays["pred"]}
    cells |= {name: arrays[f"pred_{name}"][s] for name in ("shifted", "coordinates", "both")}
    pairs = {"ordinary": ("shifted", "plain"), "following": ("both", "plain"), "encoding": ("shifted", "both"),
             "coordinates": ("coordinates", "plain")}  # fmt: skip
    return {
        "accuracy": {name: pred == labels for name, pred in cells.items()},
        "decisions": {name: cells[a] != cells[b] for name, (a, b) in pairs.items()},
    }


def _drifts(arrays: Arrays, s: int) -> dict[str, stats.Ratio]:
    return {name: stats.Ratio(arrays[f"drift_{name}"][s], arrays["norm"]) for name in (*EFFECTS, "interaction")}


def _offset_share(arrays: Arrays) -> stats.Ratio:
    magnitude = arrays["gradient/magnitude"].sum((0, 1))
    return stats.Ratio(np.linalg.norm(arrays["gradient/offset"], axis=0), magnitude, "percent")
