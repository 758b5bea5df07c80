"""Translation: accuracy and agreement of decisions while the same content moves.

Three variants, never pooled, because they measure different things (Chaman & Dokmanic 2021, arXiv:2011.14214,
and Zhang 2019, arXiv:1904.11486, differ in exactly this):

- `canvas`: the object is drawn at another place of the same black canvas; nothing is cut off, nothing wraps.
- `crop`: S_d x[i, j] = x[i - dy, j - dx] where that is inside the image, black elsewhere: a window that
  slides over an image lying on black. Content that leaves is lost.
- `circular`: S_d x[i, j] = x[(i - dy) mod H, (j - dx) mod W]: loses nothing, but makes a seam.

Two groups of shifts, never pooled either: `patch` (whole patches, only the encoding and the border can tell
them apart) and `subpatch` (less than a patch: the patch grid cuts the content differently, whatever the
encoding). Black is put in before normalisation. The first shift of every group is the reference: no shift,
for canvas the corner (0, 0).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitpos import stats
from vitpos.probes import Arrays, NotApplicable, Subject, register

VARIANTS = ("canvas", "crop", "circular")
COLUMNS = ("shifts", "pred", "logit_change")  # of each variant and group
Shift = tuple[int, int]


def crop_shift(images: Tensor, shift: Shift) -> Tensor:
    """[b, C, H, W] moved by (dy, dx) pixels, down and right positive; vacated pixels are 0."""
    (dy, dx), (h, w) = shift, images.shape[-2:]
    if abs(dy) >= h or abs(dx) >= w:
        return torch.zeros_like(images)
    kept = images[..., max(-dy, 0) : h - max(dy, 0), max(-dx, 0) : w - max(dx, 0)]
    return F.pad(kept, (max(dx, 0), max(-dx, 0), max(dy, 0), max(-dy, 0)))


def circular_shift(images: Tensor, shift: Shift) -> Tensor:
    """[b, C, H, W] rolled by (dy, dx) pixels, down and right positive."""
    return torch.roll(images, shift, dims=(-2, -1))


def subpatch_shifts(patch: tuple[int, int]) -> list[Shift]:
    """(0, 0) and the quarter-patch phases (every pixel if the patch has four or fewer)."""
    rows, columns = (range(0, p, max(1, p // 4)) for p in patch)
    return list(itertools.product(rows, columns))


def patch_shifts(patch: tuple[int, int], size: tuple[int, int], steps: int) -> list[Shift]:
    """(0, 0), then all whole-patch shifts up to `steps` patches each way that leave part of the image in
    view."""
    rows, columns = ([k * p for k in range(-steps, steps + 1) if abs(k * p) < s] for p, s in zip(patch, size))
    return sorted(itertools.product(rows, columns), key=lambda d: (d != (0, 0), d))


def canvas_positions(images: Any, patch: tuple[int, int]) -> dict[str, list[Shift]]:
    """Offsets (y, x) of the object's top-left corner, by group; the object always fits the canvas."""
    obj = images.object_size
    oh, ow = (obj, obj) if isinstance(obj, int) else obj
    free = images.canvas[0] - oh, images.canvas[1] - ow
    aligned = list(itertools.product(range(0, free[0] + 1, patch[0]), range(0, free[1] + 1, patch[1])))
    if len(aligned) < 2:
        raise NotApplicable(
            f"an object of {oh}x{ow} px has no second whole-patch position on a canvas of "
            f"{images.canvas[0]}x{images.canvas[1]} px (patch {patch[0]}x{patch[1]})"
        )
    phases = [d for d in subpatch_shifts(patch) if d[0] <= free[0] and d[1] <= free[1]]
    return {"patch": aligned, "subpatch": phases}


@register(
    "translation",
    definitions={
        "canvas": "The object is drawn at another place of the same black canvas. Nothing is cut off or wraps.",
        "crop": "The image slides and what it leaves behind is black (filled before normalisation). "
        "Content that leaves the frame is lost.",
        "circular": "The image is rolled; what leaves on one side comes in on the other, with a seam.",
        "patch": "Shifts by whole patches: the tokens of the content stay the same, only their places change.",
        "subpatch": "Shifts by less than a patch: the patch grid cuts the content differently, whatever the encoding.",
        "mean_shifted": "Accuracy averaged over all positions except the reference (unshifted; canvas: the corner).",
        "worst": "Accuracy at the worst position of the grid, chosen on one half of the images and scored on the "
        "other, averaged over both directions. A plain minimum would be biased low.",
        "pairwise": "Consistency: share of pairs of distinct positions at which the decision is the same, per image.",
        "vs_reference": "Consistency: share of shifted positions with the same decision as at the reference.",
        "pairwise_given_correct": "As pairwise, over the images that are right at the reference.",
        "vs_reference_given_correct": "As vs_reference, over the images that are right at the reference.",
        "logit_change": "Largest absolute change of any logit against the reference, over images, classes, positions.",
    },
)
class Translation:
    """Options: `variants` ("auto": canvas where the data set can place its object, else crop and circular; or
    a list), `steps`: whole-patch shifts reach that many patches each way (crop, circular), `subpatch`: also
    measure those."""

    defaults: ClassVar[dict[str, Any]] = {"variants": "auto", "steps": 2, "subpatch": True}

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        movable = hasattr(subject.images, "place")
        variants = options["variants"]
        if variants == "auto":
            variants = ["canvas"] if movable else ["crop", "circular"]
        if not isinstance(variants, list | tuple) or not all(variant in VARIANTS for variant in variants):
            raise ValueError(f"translation.variants must be auto or a list out of {list(VARIANTS)}, got {variants!r}")
        if options["steps"] < 1:
            raise ValueError(f"translation.steps must be at least 1 patch, got {options['steps']}")
        if len(subject.ids) < 2:
            raise ValueError("the worst position needs at least 2 images (one half chooses, one scores), got 1")
        arrays: Arrays = {
            "patch_size": np.array(subject.patch),
            "patch_source": np.array(subject.patch_source),
            "image_size": np.array(subject.size),
        }
        for variant in variants:
            try:
                groups = self._groups(subject, variant, options)
            except NotApplicable as reason:
                arrays[f"{variant}/not_applicable"] = np.array(str(reason))
                continue
            for group, shifts in groups.items():
                if group == "subpatch" and not options["subpatch"]:
                    continue
                render = {"crop": crop_shift, "circular": circular_shift}.get(variant, self._placed(subject))
                source = subject.batches() if variant == "canvas" else None
                columns = subject.sweep(shifts, render, f"{variant}, {group}", source=source)
                arrays |= {
                    f"{variant}/{group}/shifts": np.array(shifts),
                    f"{variant}/{group}/pred": columns["pred"],
                    f"{variant}/{group}/logit_change": columns["logit_change"],
                }
        return arrays

    @staticmethod
    def _placed(subject: Subject) -> Any:
        place: Any = getattr(subject.images, "place", None)
        return lambda indices, offset: place(indices, offset=offset)

    @staticmethod
    def _groups(subject: Subject, variant: str, options: Mapping[str, Any]) -> dict[str, list[Shift]]:
        if variant == "canvas":
            if not hasattr(subject.images, "place"):
                raise NotApplicable(
                    "canvas shift needs a data set that can place its object (digits); use crop or circular"
                )
            return canvas_positions(subject.images, subject.patch)
        whole = patch_shifts(subject.patch, subject.size, options["steps"])
        groups = {"patch": whole} if len(whole) > 1 else {}
        phases = [d for d in subpatch_shifts(subject.patch) if d[0] < subject.size[0] and d[1] < subject.size[1]]
        return groups | {"subpatch": phases}

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "patch_size": arrays["patch_size"].tolist(),
            "patch_source": str(arrays["patch_source"]),
            "image_size": arrays["image_size"].tolist(),
            "variants": {},
        }
        for variant in VARIANTS:
            if f"{variant}/not_applicable" in arrays:
                result["variants"][variant] = {"not_applicable": str(arrays[f"{variant}/not_applicable"])}
            groups = {
                group: _summary({key: arrays[f"{variant}/{group}/{key}"] for key in COLUMNS}, truth)
                for group in ("patch", "subpatch")
                if f"{variant}/{group}/pred" in arrays
            }
            if groups:
                result["variants"][variant] = groups
        return result

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score]:
        found: dict[str, stats.Score] = {}
        for variant, group in itertools.product(VARIANTS, ("patch", "subpatch")):
            pred = arrays.get(f"{variant}/{group}/pred")
            if pred is None or len(pred) < 2:
                continue
            correct, count = pred == truth, len(pred)
            found |= {
                f"{variant}/{group}/{name}": score
                for name, score in (
                    ("mean_shifted", stats.Score(correct[1:].mean(axis=0), count - 1)),
                    ("worst", stats.Score(stats.worst_scores(correct))),
                    ("pairwise", stats.Score(stats.pairwise_agreement(pred), count)),
                    ("vs_reference", stats.Score(stats.reference_agreement(pred[1:], pred[0]), count - 1)),
                )
            }
        return found


def _summary(columns: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
    """Numbers of one variant and group: shifts [S, 2] (the first is the reference), pred [S, N], truth [N]."""
    shifts, pred, change = (columns[key] for key in COLUMNS)
    correct = pred == truth
    distance = np.sqrt(((shifts - shifts[0]) ** 2).sum(axis=1))
    right = correct[0]
    worst, chosen = stats.worst_of_grid(correct)
    agreement = {
        "pairwise": (stats.pairwise_agreement(pred), len(pred)),
        "vs_reference": (stats.reference_agreement(pred[1:], pred[0]), len(pred) - 1),
    }
    consistency: dict[str, Any] = {
        name: stats.mean_over_images(score, k).as_dict() for name, (score, k) in agreement.items()
    }
    for name, (score, k) in agreement.items():
        given = stats.mean_over_images(score[right], k).as_dict() if right.any() else None  # null: none is right
        consistency[f"{name}_given_correct"] = given
    differs = pred[1:] != pred[0]
    return {
        "shifts": shifts.tolist(),
        "accuracy": [stats.accuracy(row).as_dict() for row in correct],
        "reference": stats.accuracy(right).as_dict(),
        "mean": stats.mean_over_images(correct.mean(axis=0), len(correct)).as_dict(),
        "mean_shifted": stats.mean_over_images(correct[1:].mean(axis=0), len(correct) - 1).as_dict(),
        "worst": worst.as_dict() | {"shifts": [shifts[c].tolist() for c in chosen]},
        "consistency": consistency,
        "by_distance": [
            {"distance": float(d), "shifts": int((distance == d).sum())}
            | {
                "accuracy": stats.mean_over_images(
                    correct[distance == d].mean(axis=0), int((distance == d).sum())
                ).as_dict()
            }
            for d in np.unique(distance)
        ],
        "logit_change": {
            "largest": float(change.max()),
            "decisions": int(differs.size),
            "differing_decisions": int(differs.sum()),
            "images_with_a_difference": int(differs.any(axis=0).sum()),
        },
    }
