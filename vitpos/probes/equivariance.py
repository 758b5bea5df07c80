"""Equivariance: do the features move along when the image moves? By layer and by distance from the border; and which
exact identities the model has.

Dense features. For a shift d by whole patches (of a network of stages: by whole cells of its coarsest) and a layer's
map F, place i + d of F(S_d x) should show what place i of F(x) showed, wherever both lie in the image:

    error = sqrt( sum |F(S_d x)[i + d] - F(x)[i]|^2 / sum |F(x)[i]|^2 )     over i, all shifts d != 0 and all images

Pairs are kept apart by their distance from the border, that of the nearer of the two places, in cells of the layer's
map (0: one of them lies at the border), so that the effect of the border shows and `interior` can leave it out. Beside
it stand the mean cosine of the pairs, and the same error between different places of one image (`unrelated`,
sqrt(2 Var / mean square)): features of which most is alike everywhere have a small error whatever they do, so read
error beside unrelated. `crop` shifts fill with black and lose what leaves; `circular` ones wrap.

Identities of the whole model, in float64, on the logits (each holds to rounding or fails by what is given):

- `offset`: the same vector is added to all coordinates, of whole steps or of fractions.
- `circular`: the image is rolled by whole patches.
- `permutation`: patches and their coordinates are permuted together: true of any transformer whose patches see
  nothing beyond themselves and whose encoding is a function of coordinates alone. One that fails reads token order.

Source: Kayhan & van Gemert 2020, arXiv:2003.07064 (border); Lenc & Vedaldi 2015, Understanding Image Representations by
Measuring Their Equivariance, arXiv:1411.5908. The identities are vitpos's declared laws, tried on the model at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpos import positions, stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._exact import TOLERANCE, certificate, relative_change, verdict
from vitpos.probes._shifts import circular_shift, crop_shift, patch_shifts
from vitpos.probes._views import View, curves, table
from vitpos.probes.shuffle import orders, shuffle_blocks

WHOLE, FRACTIONAL = (1.0, -2.0), (0.37, -1.61)  # what is added to all coordinates (y, x)
WORDS = {
    "offset": "coordinates moved by whole steps",
    "offset_fractional": "coordinates moved by fractions",
    "circular": "image rolled by whole patches",
    "permutation": "patches permuted with their coordinates",
}
SHIFTS = {"crop": crop_shift, "circular": circular_shift}
Pair = tuple[Tensor, Tensor]  # features [b, D, pairs] before and after the shift, at the places that correspond


def corresponding(before: Tensor, after: Tensor, step: tuple[int, int], wrap: bool) -> tuple[Pair, Tensor]:
    """Features of maps [b, D, h, w] at places i and i + step, and each pair's distance from the border [pairs]."""
    h, w = before.shape[-2:]
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    there_y, there_x = y + step[0], x + step[1]
    inside = (there_y >= 0) & (there_y < h) & (there_x >= 0) & (there_x < w)
    keep = torch.ones_like(inside) if wrap else inside
    y, x, there_y, there_x = y[keep], x[keep], there_y[keep] % h, there_x[keep] % w
    distance = torch.stack([y, h - 1 - y, x, w - 1 - x, there_y, h - 1 - there_y, there_x, w - 1 - there_x]).amin(0)
    return (before[..., y, x], after[..., there_y, there_x]), distance


def spread(maps: Tensor) -> Tensor:
    """Mean squared distance between the features of two different places of an image [b], maps [b, D, h, w]."""
    flat = maps.flatten(2)
    n = max(flat.shape[2], 2)
    return 2 * (flat - flat.mean(2, keepdim=True)).square().sum((1, 2)) / (n - 1)


@register(
    "equivariance",
    definitions={
        "error": "Relative error of the features at corresponding places, before and after a shift by whole patches; "
        "over shifts, places and images.",
        "border, interior": "The same over pairs of which one lies at the border of the layer's map; over those with "
        "both at least one cell away.",
        "unrelated": "The error between two different places of one image: what features that are not equivariant at "
        "all come to.",
        "cosine": "Mean cosine of the features at corresponding places.",
        "offset": "Identity: the same vector added to all coordinates changes no logit (whole steps, and fractions).",
        "circular": "Identity: rolling the image by whole patches changes no logit.",
        "permutation": "Identity: permuting patches together with their coordinates changes no logit.",
        "holds": "To a relative change of 1e-12 of the logits in float64. A constant model has every identity.",
        "constant": "The logits are the same for all images tried: no identity says anything.",
    },
)
class Equivariance:
    """Options: `images` whose features are compared (0: all), `steps`: shifts up to that many patches each way,
    `shift` ("crop" or "circular"), `exact_images`: on which the identities are tried."""

    defaults: ClassVar[dict[str, Any]] = {"images": 64, "steps": 1, "shift": "crop", "exact_images": 4}

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        if options["shift"] not in SHIFTS:
            raise ValueError(f"equivariance.shift must be one of {list(SHIFTS)}, got {options['shift']!r}")
        if min(options["steps"], options["exact_images"]) < 1:
            raise ValueError(f"equivariance.steps and exact_images must be at least 1, got {dict(options)}")
        arrays: Arrays = {"constant": np.array(constant(subject, options["exact_images"]))}
        for name, tried in identities(subject, options["exact_images"]).items():
            arrays |= {f"{name}/{key}": array for key, array in tried.items()}
        try:
            found = self._features(subject, options)
        except NotApplicable as reason:
            found = {"not_applicable": np.array(str(reason))}
        return arrays | {f"features/{key}": array for key, array in found.items()}

    @staticmethod
    def _features(subject: Subject, options: Mapping[str, Any]) -> Arrays:
        part, chosen = subject.some(options["images"])
        size = part.size
        cell = _coarsest(part)
        steps = [d for d in patch_shifts(cell, size, options["steps"]) if d != (0, 0)]
        if size[0] % cell[0] or size[1] % cell[1] or not steps:
            raise NotApplicable(
                f"an image of {size[0]}x{size[1]} px is not two or more whole cells of {cell[0]}x{cell[1]} px, "
                "those of the coarsest layer"
            )
        move, wrap = SHIFTS[options["shift"]], options["shift"] == "circular"
        n = len(chosen)
        layers: list[str] = []
        sums: dict[str, NDArray[np.float64]] = {}
        advance = part.track("equivariance", n * len(steps))
        for where, pixels in part.loaded():
            plain = part.features(pixels)
            if not layers:
                layers = list(plain)
                grids = np.array([maps.shape[-2:] for maps in plain.values()])
                _check_steps(grids, size, steps)
                shape = len(layers), int(grids.min(axis=1).max() + 1) // 2, n
                sums = {key: np.zeros(shape) for key in ("error", "norm", "cosine", "pairs")}
                sums["spread"] = np.zeros((len(layers), n))
            for k, maps in enumerate(plain.values()):
                sums["spread"][k, where] = spread(maps).double().cpu().numpy()
            for dy, dx in steps:
                moved = part.features(move(pixels, (dy, dx)))
                for k, name in enumerate(layers):
                    h, w = plain[name].shape[-2:]
                    step = dy * h // size[0], dx * w // size[1]
                    (a, b), distance = corresponding(plain[name], moved[name], step, wrap)
                    found = {
                        "error": (b - a).square().sum(1),
                        "norm": a.square().sum(1),
                        "cosine": torch.cosine_similarity(a, b, dim=1),
                        "pairs": torch.ones_like(a[:, 0]),
                    }
                    for key, values in found.items():
                        ringed = torch.zeros(len(a), shape[1], dtype=torch.float64, device=a.device)
                        index = distance.to(a.device).expand(len(a), -1)
                        sums[key][k, :, where] += ringed.scatter_add(1, index, values.double()).mT.cpu().numpy()
                advance(len(pixels))
        return {"images": chosen, "layers": np.array(layers), "grids": grids, "shifts": np.array(steps)} | sums

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        certificates = {
            name: {"not_applicable": str(arrays[f"{name}/not_applicable"])}
            if f"{name}/not_applicable" in arrays
            else certificate(arrays[f"{name}/change"])
            for name in WORDS
        }
        if "features/not_applicable" in arrays:
            features: dict[str, Any] = {"not_applicable": str(arrays["features/not_applicable"])}
        else:
            own = _features_of(arrays)
            features = {
                "images_used": len(own["images"]),
                "shifts": own["shifts"].tolist(),
                "layers": [_layer(own, k) for k in range(len(own["layers"]))],
            }
        same = bool(arrays["constant"]) if "constant" in arrays else None  # not stored by early versions
        return {"identities": certificates, "constant": same, "features": features}

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score | None]:
        if "features/not_applicable" in arrays:
            return {}
        own = _features_of(arrays)
        return {
            f"{key}/{layer}": ratio.score(own["images"])
            for k, layer in enumerate(own["layers"])
            for key, ratio in _ratios(own, k).items()
        }

    def views(self, summary: dict[str, Any]) -> list[View]:
        empty = " (a constant model)" if summary["constant"] else ""
        verdicts = [
            [WORDS[name], verdict(entry) + empty, entry.get("largest")] for name, entry in summary["identities"].items()
        ]
        tried = (
            "Tried on the logits in float64: relative change. A model with the same logits for all images has all of "
            "them, which says nothing: it is marked as constant."
        )
        heads = {"what changes nothing": "", "verdict": "", "largest change": ""}
        found = [table("identities", "Exact identities", tried, heads, verdicts, brief=True)]
        if "layers" not in summary["features"]:
            return found
        layers = summary["features"]["layers"]
        names = [layer["layer"] for layer in layers]
        note = (
            "Relative error of the features at corresponding places, before and after a shift by whole patches to each "
            "side, of which what leaves the frame is lost (with shift=circular it comes in again). At the border, and "
            "away from it; unrelated: between different places of one image, for scale."
        )
        kinds = ("error", "border", "interior", "unrelated")
        lines = {key: (names, [layer[key] for layer in layers]) for key in kinds}
        columns = dict.fromkeys(("layer", *kinds, "cosine"), "")
        rows = [[layer[key] for key in columns] for layer in layers]
        by_distance = {
            layer["layer"]: (list(range(len(layer["by_distance"]))), layer["by_distance"]) for layer in layers
        }
        return [
            *found,
            curves("layers", "Error of equivariance by layer", note, "layer", "relative error", lines, ""),
            curves(
                "border", "Error of equivariance by distance from the border",
                "Distance of the nearer of the two places, in cells of the layer's map.",
                "distance from the border (cells)", "relative error", by_distance, "",
            ),
            table("layers", "Equivariance by layer", note, columns, rows),
        ]  # fmt: skip


def identities(subject: Subject, images: int) -> dict[str, Arrays]:
    """For each identity the relative change of the logits [trials, images] in float64, or why it cannot be tried."""
    exact, _ = subject.precise().some(images)
    pixels = exact.pixels(exact.indices)
    patch = exact.patch

    def moved_coordinates(by: tuple[float, float]) -> NDArray[np.float64]:
        model, coords = exact.positioned(), _coordinates(exact)
        plain = exact.logits(pixels, model, coords=coords)
        return relative_change(exact.logits(pixels, model, coords=coords + coords.new_tensor(by)), plain)[None]

    def rolled() -> NDArray[np.float64]:
        _check_whole(exact)
        shifts = ((patch[0], 0), (0, patch[1]), (2 * patch[0], patch[1]))
        plain = exact.logits(pixels)
        return np.stack([relative_change(exact.logits(circular_shift(pixels, d)), plain) for d in shifts])

    def permuted() -> NDArray[np.float64]:
        model, coords = exact.positioned(), _coordinates(exact)
        order = orders(exact.ids, 0, 1, coords.shape[1])
        plain = exact.logits(pixels, model, coords=coords)
        placed = coords[0, order.to(coords.device)]  # [b, N, 2]
        return relative_change(exact.logits(shuffle_blocks(pixels, patch, order), model, coords=placed), plain)[None]

    tried: dict[str, Callable[[], NDArray[np.float64]]] = {
        "offset": lambda: moved_coordinates(WHOLE),
        "offset_fractional": lambda: moved_coordinates(FRACTIONAL),
        "circular": rolled,
        "permutation": permuted,
    }
    found: dict[str, Arrays] = {}
    for name, trial in tried.items():
        try:
            found[name] = {"change": trial()}
        except (NotApplicable, ValueError) as reason:  # an encoding may refuse coordinates, e.g. fractions
            found[name] = {"not_applicable": np.array(str(reason))}
    return found


def constant(subject: Subject, images: int) -> bool:
    """Whether the logits are the same for all of some images, in float64."""
    exact, _ = subject.precise().some(images)
    logits = exact.logits(exact.pixels(exact.indices))
    return bool(relative_change(logits, logits[:1].expand_as(logits)).max() <= TOLERANCE)


def _coarsest(subject: Subject) -> tuple[int, int]:
    """The cells (h, w) in pixels of the coarsest layer, or the patch where that is larger: what shifts are whole in
    every layer."""
    maps = subject.features(subject.pixels(subject.indices[:1])).values()
    cells = [[-(-side // count) for side, count in zip(subject.size, one.shape[-2:])] for one in maps]
    return tuple(max(sides) for sides in zip(subject.patch, *cells))  # type: ignore[return-value]


def _check_steps(grids: NDArray[np.int64], size: tuple[int, int], steps: list[tuple[int, int]]) -> None:
    for grid in grids.tolist():
        if any(d[axis] * grid[axis] % size[axis] for d in steps for axis in (0, 1)):
            raise NotApplicable(f"a map of {grid[0]}x{grid[1]} has no whole cell for shifts of {steps[-1]} px")


def _check_whole(subject: Subject) -> None:
    if subject.size[0] % subject.patch[0] or subject.size[1] % subject.patch[1]:
        raise NotApplicable(
            f"{subject.size[0]}x{subject.size[1]} px are no whole number of patches of "
            f"{subject.patch[0]}x{subject.patch[1]} px"
        )


def _coordinates(subject: Subject) -> Tensor:
    """The cells of the image's own grid, explicitly [1, N, 2]."""
    _check_whole(subject)
    grid = subject.size[0] // subject.patch[0], subject.size[1] // subject.patch[1]
    return positions.grid(*grid, device=subject.device, dtype=subject.dtype).coords


def _features_of(arrays: Arrays) -> Arrays:
    return {key.removeprefix("features/"): array for key, array in arrays.items() if key.startswith("features/")}


def _error(columns: Arrays, k: int, rings: Any) -> stats.Ratio:
    """Relative error of one layer over some of the rings."""
    return stats.Ratio(columns["error"][k][rings].sum(0), columns["norm"][k][rings].sum(0), root=True)


def _ratios(columns: Arrays, k: int) -> dict[str, stats.Ratio]:
    """What are ratios of sums over images, or roots of such, of one layer."""
    norm, pairs = columns["norm"][k].sum(0), columns["pairs"][k].sum(0)
    return {
        "error": _error(columns, k, slice(None)),
        "border": _error(columns, k, slice(0, 1)),
        "interior": _error(columns, k, slice(1, None)),
        "unrelated": stats.Ratio(columns["spread"][k] * pairs, norm, root=True),
        "cosine": stats.Ratio(columns["cosine"][k].sum(0), pairs),
    }


def _layer(columns: Arrays, k: int) -> dict[str, Any]:
    """Numbers of one layer."""
    rings = np.flatnonzero(columns["pairs"][k][:, 0] > 0).tolist()
    return {
        "layer": str(columns["layers"][k]),
        "grid": columns["grids"][k].tolist(),
        **{key: ratio.summary() for key, ratio in _ratios(columns, k).items()},
        "by_distance": [_error(columns, k, [ring]).summary() for ring in rings],
    }
