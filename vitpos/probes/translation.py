"""Translation: accuracy and agreement of decisions while the same content moves.

Variants, never pooled, because they measure different things (Chaman & Dokmanic 2021, arXiv:2011.14214, and Zhang 2019,
arXiv:1904.11486, differ in exactly this):

- `canvas`: the object is drawn at another place of the same black canvas; nothing is cut off, nothing wraps.
- `crop`: S_d x[i, j] = x[i - dy, j - dx] where that is inside the image, black elsewhere: a window that
  slides over an image lying on black. Content that leaves is lost.
- `circular`: S_d x[i, j] = x[(i - dy) mod H, (j - dx) mod W]: loses nothing, but makes a seam.
- `reflect`: as crop, with the image mirrored at its border in place of black.
- `window`: windows of native size into the image enlarged by 8/7: Zhang's crops of 224 px out of 256. For `zhang` only.

Groups of shifts, never pooled either:

- `patch`: whole patches, only the encoding and the border can tell them apart.
- `subpatch`: less than a patch: the patch grid cuts the content differently, whatever the encoding.
- `phase`: along the diagonal from 0 to two patches, as a curve and by phase (the shift modulo the patch).
- `bilinear`, `fourier`: fractions of a pixel, by two interpolations (`_shifts.py` says what each does), as circular
  shifts; on a canvas the seam lies in black. One whole pixel is among them, where both are exact.
- `zhang`: two random shifts, see below.

Consistency has three meanings, always under their names: `pairwise` (all pairs of distinct shifts), `vs_reference`
(against the unshifted decision), `zhang` (two shifts drawn at random, mean agreement over passes). As published one
pair serves a whole batch; `zhang_per_image` draws one for each image. Shifts are uniform on 0..M-1 pixels an axis, M
a seventh of the side (32 of 224); on a canvas, over all places of the object.

Black is put in before normalisation. The first shift of every group but zhang is the reference: no shift, for canvas
the corner (0, 0). Logit drift: E|f(x) - f(S_d x)| over the spread of the logits, and the variance of the true class's
logit over the shifts of a group (Ding et al. 2023, arXiv:2306.07470). `every`: right at each shift of the group at once
(worst of the grid image by image: Michaeli et al. 2023, Alias-Free Convnets, arXiv:2303.08085).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitpos import seeds, stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._shifts import (
    Shift,
    bilinear_shift,
    circular_shift,
    crop_shift,
    fourier_shift,
    patch_shifts,
    phase_shifts,
    reflect_shift,
    subpatch_shifts,
)
from vitpos.probes._subject import Batch
from vitpos.probes._views import View, curves, table

MOVES = {"crop": crop_shift, "circular": circular_shift, "reflect": reflect_shift}
VARIANTS = ("canvas", *MOVES, "window")
FRACTIONAL = {"bilinear": bilinear_shift, "fourier": fourier_shift}
FRACTIONS = tuple((f, f) for f in (0.0, 0.25, 0.5, 0.75, 1.0))  # pixels
GROUPS = ("patch", "subpatch", "phase", *FRACTIONAL)
COLUMNS = ("shifts", "pred", "logit_change")  # of each variant and group; newer files also hold
DRIFT = ("logit_drift", "true_logit", "logit_norm")


def room_on_canvas(images: Any) -> tuple[int, int]:
    """How far the object's top-left corner can go from (0, 0), in pixels."""
    obj = images.object_size
    oh, ow = (obj, obj) if isinstance(obj, int) else obj
    return images.canvas[0] - oh, images.canvas[1] - ow


def canvas_positions(images: Any, patch: tuple[int, int]) -> dict[str, list[Shift]]:
    """Offsets (y, x) of the object's top-left corner, by group; the object always fits the canvas."""
    free = room_on_canvas(images)
    aligned = list(itertools.product(range(0, free[0] + 1, patch[0]), range(0, free[1] + 1, patch[1])))
    if len(aligned) < 2:
        raise NotApplicable(
            f"an object of {images.canvas[0] - free[0]}x{images.canvas[1] - free[1]} px has no second whole-patch "
            f"position on a canvas of "
            f"{images.canvas[0]}x{images.canvas[1]} px (patch {patch[0]}x{patch[1]})"
        )
    phases = [d for d in subpatch_shifts(patch) if d[0] <= free[0] and d[1] <= free[1]]
    return {"patch": aligned, "subpatch": phases, "phase": phase_shifts(patch, free)}


def reach(size: tuple[int, int]) -> tuple[int, int]:
    """How many pixels the random shifts of `zhang` are drawn from, by axis: 32 of 224."""
    return max(2, round(size[0] / 7)), max(2, round(size[1] / 7))


def window(images: Tensor, shift: Shift, extra: tuple[int, int]) -> Tensor:
    """A window of native size at `shift` in the images enlarged by `extra` pixels (bilinear, antialiased)."""
    h, w = images.shape[-2:]
    size = h + extra[0], w + extra[1]
    big = F.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
    return big[..., shift[0] : shift[0] + h, shift[1] : shift[1] + w]


@register(
    "translation",
    definitions={
        "canvas": "The object is drawn at another place of the same black canvas. Nothing is cut off or wraps.",
        "crop": "The image slides and what it leaves behind is black (filled before normalisation). "
        "Content that leaves the frame is lost.",
        "circular": "The image is rolled; what leaves on one side comes in on the other, with a seam.",
        "reflect": "The image slides and is mirrored at its border.",
        "window": "Windows of native size into the image enlarged by 8/7, as published for zhang.",
        "patch": "Shifts by whole patches: the tokens of the content stay the same, only their places change.",
        "subpatch": "Shifts by less than a patch: the patch grid cuts the content differently, whatever the encoding.",
        "phase": "Shifts along the diagonal, up to two patches; the phase is the shift modulo the patch.",
        "bilinear, fourier": "Shifts by fractions of a pixel, interpolated linearly (which blurs) or by a phase ramp "
        "of the spectrum (band-limited, rings at the seam); both wrap.",
        "zhang": "Consistency: agreement of two random shifts, mean over images and passes. One pair a batch as "
        "published, or one an image; the result says which. The interval is over images, for these shifts.",
        "every": "Share of images that are right at every shift of the group at once.",
        "logit_drift": "Norm of the change of the logits against the reference, over the norm of the logits about "
        "their mean, both summed over images.",
        "true_logit_variance": "Variance of the true class's logit over the shifts of the group, mean over images.",
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
    """Options: `variants` ("auto": canvas where the data set can place its object, else crop, circular and window; or
    a list), `steps`: whole-patch shifts reach that many patches each way (not canvas), `subpatch`, `phase`,
    `fractional` (canvas and circular): also measure those, `zhang`: passes of two random shifts (0: none),
    `zhang_per_image`: a pair for each image in place of one a batch."""

    in_parts: ClassVar[bool] = True
    defaults: ClassVar[dict[str, Any]] = {
        "variants": "auto", "steps": 2, "subpatch": True, "phase": True, "fractional": True, "zhang": 5,
        "zhang_per_image": False,
    }  # fmt: skip

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        variants = options["variants"]
        if variants == "auto":
            variants = ["canvas"] if hasattr(subject.images, "place") else ["crop", "circular", "window"]
        if not isinstance(variants, list | tuple) or not all(variant in VARIANTS for variant in variants):
            raise ValueError(f"translation.variants must be auto or a list out of {list(VARIANTS)}, got {variants!r}")
        if options["steps"] < 1:
            raise ValueError(f"translation.steps must be at least 1 patch, got {options['steps']}")
        if options["zhang"] < 0:
            raise ValueError(f"translation.zhang must be 0 (none) or a number of passes, got {options['zhang']}")
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
                source, render = self._moving(subject, variant, group)
                whole = source is None and group not in FRACTIONAL  # pixels, which are moved as they are
                columns = subject.sweep(shifts, render, f"{variant}, {group}", source=source, normalized=whole)
                kept = {key: columns[key] for key in ("pred", "logit_change", "logit_drift", "true_logit")}
                kept |= {"shifts": np.array(shifts), "logit_norm": columns["logit_norm"][0]}
                arrays |= {f"{variant}/{group}/{key}": array for key, array in kept.items()}
            if options["zhang"]:
                found = self._zhang(subject, variant, options)
                arrays |= {f"{variant}/zhang/{key}": array for key, array in found.items()}
        return arrays

    @staticmethod
    def _moving(subject: Subject, variant: str, group: str) -> tuple[Any, Any]:
        """What a sweep of a group makes of batches (None: their pixels), and how that is moved."""
        place: Any = getattr(subject.images, "place", None)
        if variant == "crop":
            return None, functools.partial(crop_shift, black=subject.black)
        if variant != "canvas":
            return None, FRACTIONAL.get(group, MOVES.get(variant))
        if group in FRACTIONAL:
            move = FRACTIONAL[group]
            return iter, lambda indices, d: move(place(indices, offset=(0, 0)).to(subject.dtype), d)
        return iter, lambda indices, offset: place(indices, offset=offset)

    @staticmethod
    def _groups(subject: Subject, variant: str, options: Mapping[str, Any]) -> dict[str, list[Any]]:
        patch, size = subject.patch, subject.size
        groups: dict[str, list[Any]]
        if variant == "window":
            return {}
        if variant == "canvas":
            if not hasattr(subject.images, "place"):
                raise NotApplicable(
                    "canvas shift needs a data set that can place its object (digits); use crop or circular"
                )
            groups = dict(canvas_positions(subject.images, patch))
            room = room_on_canvas(subject.images)
        else:
            whole = patch_shifts(patch, size, options["steps"])
            groups = {"patch": whole} if len(whole) > 1 else {}
            groups["subpatch"] = [d for d in subpatch_shifts(patch) if d[0] < size[0] and d[1] < size[1]]
            room = size[0] - 1, size[1] - 1
            groups["phase"] = phase_shifts(patch, room)
        if options["fractional"] and variant in ("canvas", "circular") and min(room) >= 1:
            groups |= {name: list(FRACTIONS) for name in FRACTIONAL}
        off = {name for name in ("subpatch", "phase") if not options[name]}
        return {name: shifts for name, shifts in groups.items() if name not in off and len(shifts) > 1}

    @staticmethod
    def _zhang(subject: Subject, variant: str, options: Mapping[str, Any]) -> Arrays:
        """Decisions [passes, 2, N] at two random shifts, and these [passes, 2, N, 2]."""
        images: Any = subject.images
        if variant == "canvas":
            room = room_on_canvas(images)
            count = room[0] + 1, room[1] + 1
        else:
            count = reach(subject.size)
        n, passes, each = len(subject.ids), options["zhang"], options["zhang_per_image"]
        drawn = np.zeros((passes, 2, n, 2), dtype=np.int64)
        for p in range(passes):
            if each:
                found = seeds.integers(
                    seeds.stream(0, "probe-zhang", p), seeds.sample_keys(subject.ids), (*count, *count)
                )
                drawn[p] = found.reshape(n, 2, 2).swapaxes(0, 1)
                continue
            for part, _ in subject.batches():
                generator = seeds.generator(0, "probe-zhang", p, part.start)
                pair = torch.stack([torch.randint(c, (2,), generator=generator) for c in count], dim=1)
                drawn[p, :, part] = pair[:, None].numpy()

        def moved(batch: Any, shift: Shift) -> Tensor:
            if variant == "canvas":
                return images.place(batch, offset=shift)
            return window(batch, shift, count) if variant == "window" else MOVES[variant](batch, shift)

        def render(given: tuple[slice, Tensor], condition: tuple[int, int]) -> Tensor:
            part, batch = given
            shifts = [(int(y), int(x)) for y, x in drawn[condition][part]]
            if len(set(shifts)) == 1:
                return moved(batch, shifts[0])
            return torch.cat([moved(batch[i : i + 1], shift) for i, shift in enumerate(shifts)])

        conditions = list(itertools.product(range(passes), range(2)))

        def source(some: list[Batch]) -> Iterator[tuple[slice, Any]]:
            return ((part, (part, batch)) for part, batch in (some if variant == "canvas" else subject.loaded(some)))

        columns = subject.sweep(conditions, render, f"{variant}, zhang", source=source)
        pred = columns["pred"].reshape(passes, 2, n)
        return {"pred": pred, "shifts": drawn, "per_image": np.array(each), "reach": np.array(count)}

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
            groups: dict[str, Any] = {}
            for group in GROUPS:
                known = (key for key in (*COLUMNS, *DRIFT) if f"{variant}/{group}/{key}" in arrays)
                columns = {key: arrays[f"{variant}/{group}/{key}"] for key in known}
                if columns:
                    groups[group] = _summary(columns, truth)
                if columns and group == "phase":
                    groups[group] |= _by_phase(columns, truth, arrays["patch_size"])
            if f"{variant}/zhang/pred" in arrays:
                groups["zhang"] = _zhang_summary(arrays, variant, truth)
            if groups:
                result["variants"][variant] = groups
        return result

    def views(self, summary: dict[str, Any]) -> list[View]:
        found: list[View] = []
        pairs, fractions, parts, stability = [], [], [], []
        for variant, groups in summary["variants"].items():
            stability += [
                [variant, name, len(entry["shifts"]) - 1]
                + [entry["consistency"][key] for key in ("pairwise", "pairwise_given_correct", "vs_reference")]
                + [entry[key] for key in ("every", "logit_drift", "true_logit_variance")]
                for name, entry in groups.items()
                if name in GROUPS and "logit_drift" in entry
            ]
            if "phase" in groups:
                parts += [
                    [variant, name, groups["phase"][key]["shifts"], groups["phase"][key]["accuracy"],
                     groups["phase"][key]["vs_reference"]]
                    for key, name in (("whole", "whole patches"), ("between", "between"))
                    if key in groups["phase"]
                ]  # fmt: skip
                rows = groups["phase"]["shifts"]
                at = [row[0] for row in rows[1:]]
                lines = {
                    "accuracy": ([row[0] for row in rows], groups["phase"]["accuracy"]),
                    "vs reference": (at, groups["phase"]["agreement"]),
                }
                note = (
                    "Shifts along the diagonal. At whole patches the tokens of the content are the same; between them "
                    "the patch grid cuts it differently, whatever the encoding."
                )
                title = f"Accuracy and agreement against phase ({variant})"
                found.append(curves(f"phase-{variant}", title, note, "shift (pixels)", "share (%)", lines, "percent"))
            for name in FRACTIONAL:
                if name in groups:
                    entry = groups[name]
                    fractions += [
                        [variant, name, str(shift[0]), accuracy, agreement]
                        for shift, accuracy, agreement in zip(
                            entry["shifts"][1:], entry["accuracy"][1:], entry["agreement"]
                        )
                    ]
            if "zhang" in groups:
                entry = groups["zhang"]
                drawn = "image" if entry["per_image"] else "batch"
                pairs.append([variant, drawn, entry["passes"], entry["accuracy"], entry["consistency"]])
        if parts:
            heads = {"shift": "", "along the diagonal": "", "shifts": "", "accuracy": "percent",
                     "vs reference": "percent"}  # fmt: skip
            note = (
                "At whole patches the encoding and the border matter, between them the tokenizer as well. The two are "
                "at different distances (the shortest, which training may have seen, lie between): none, which has no "
                "encoding, shows the tokenizer's part alone."
            )
            found.append(table("phase-parts", "Shifts by whole patches and between", note, heads, parts))
        if fractions:
            heads = {"shift": "", "interpolation": "", "pixels": "", "accuracy": "percent", "vs reference": "percent"}
            note = (
                "Along the diagonal; what leaves on one side comes in on the other. Bilinear blurs; Fourier is "
                "band-limited and rings at the seam."
            )
            found.append(table("fractions", "Shifts by fractions of a pixel", note, heads, fractions))
        if pairs:
            heads = {"shift": "", "a pair for each": "", "passes": "", "accuracy": "percent", "zhang": "percent"}
            note = "Agreement of two random shifts (zhang). A constant answer has 100: read accuracy beside it."
            found.append(table("zhang", "Consistency under random shifts", note, heads, pairs))
        if stability:
            heads = {"shift": "", "group": "", "shifts": ""}
            shares = ("pairwise", "pairwise given correct", "vs reference", "right at every shift")
            heads |= dict.fromkeys(shares, "percent")
            heads |= {"logit drift": "", "variance of the true logit": ""}
            note = (
                "Consistency under two of its names, also over images that are right unshifted, which a constant "
                "answer does not inflate; and how far the logits move, whatever is decided."
            )
            found.append(table("stability", "What each kind of shift changes", note, heads, stability))
        return found

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
                    ("every", stats.Score(correct.all(axis=0))),
                )
            }
        for variant in VARIANTS:
            drawn = arrays.get(f"{variant}/zhang/pred")
            if drawn is not None:
                found[f"{variant}/zhang"] = stats.Score((drawn[:, 0] == drawn[:, 1]).mean(axis=0), len(drawn))
        return found


def _summary(columns: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
    """Numbers of one variant and group: shifts [S, 2] (the first is the reference), pred [S, N], truth [N]."""
    shifts, pred, change = (columns[key] for key in COLUMNS)  # [S, 2], [S, N], [S, N]
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
    drift: dict[str, Any] = {}
    if "logit_drift" in columns:  # not stored by early versions
        relative = stats.ratio(columns["logit_drift"][1:].mean(axis=0), columns["logit_norm"])
        variance = stats.ratio(columns["true_logit"].astype(np.float64).var(axis=0))
        drift["logit_drift"] = relative.as_dict() if relative else None
        drift["true_logit_variance"] = variance.as_dict() if variance else None
    return drift | {
        "shifts": shifts.tolist(),
        "accuracy": [stats.accuracy(row).as_dict() for row in correct],
        "reference": stats.accuracy(right).as_dict(),
        "mean": stats.mean_over_images(correct.mean(axis=0), len(correct)).as_dict(),
        "mean_shifted": stats.mean_over_images(correct[1:].mean(axis=0), len(correct) - 1).as_dict(),
        "every": stats.accuracy(correct.all(axis=0)).as_dict(),
        "agreement": [stats.accuracy(~row).as_dict() for row in differs],
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


def _by_phase(columns: Arrays, truth: NDArray[np.int64], patch: NDArray[np.int64]) -> dict[str, Any]:
    """Accuracy and agreement with the reference over the other shifts: of each phase (shift modulo patch), of those by
    `whole` patches, and of those `between`."""
    shifts, pred = columns["shifts"][1:], columns["pred"][1:]
    phases: NDArray[np.int64] = shifts % patch

    def over(mine: NDArray[np.bool_]) -> dict[str, Any]:
        count = int(mine.sum())
        right, same = (pred[mine] == truth).mean(axis=0), (pred[mine] == columns["pred"][0]).mean(axis=0)
        return {
            "shifts": count,
            "accuracy": stats.mean_over_images(right, count).as_dict(),
            "vs_reference": stats.mean_over_images(same, count).as_dict(),
        }

    between = np.any(phases > 0, axis=1)
    parts = {"whole": ~between, "between": between}
    found: dict[str, Any] = {name: over(mine) for name, mine in parts.items() if mine.any()}
    rows = [{"phase": phase, **over((phases == phase).all(axis=1))} for phase in np.unique(phases, axis=0).tolist()]
    return found | {"by_phase": rows}


def _zhang_summary(arrays: Arrays, variant: str, truth: NDArray[np.int64]) -> dict[str, Any]:
    pred = arrays[f"{variant}/zhang/pred"]  # [passes, 2, N]
    passes = len(pred)
    return {
        "passes": passes,
        "pairs": passes * pred.shape[2],
        "per_image": bool(arrays[f"{variant}/zhang/per_image"]),
        "reach": arrays[f"{variant}/zhang/reach"].tolist(),
        "accuracy": stats.mean_over_images((pred == truth).mean(axis=(0, 1)), 2 * passes).as_dict(),
        "consistency": stats.mean_over_images((pred[:, 0] == pred[:, 1]).mean(axis=0), passes).as_dict(),
    }
