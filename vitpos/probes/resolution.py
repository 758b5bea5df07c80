"""Resolution: accuracy at other sizes and aspect ratios, without fine-tuning.

Two kinds, kept apart because they probe different things:

- `upsample`: the image is resized (bilinear, antialiased), so the object grows with the grid; no new
  information.
- `canvas`: the canvas grows to the right and down, black, and the object stays on the tokens it was on: only
  positions and background are new. Data sets without a blank canvas do not have it (a black margin would cut
  the scene off).

Each row names the resize policy that was in force: what the encoding does with positions beyond its training
grid. Both happen before normalisation; at the native size both are plain evaluation, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitpos import stats
from vitpos.probes import Arrays, NotApplicable, Subject, register

KINDS = ("upsample", "canvas")
# (h, w) multiples of the native size; the native size comes first, it is the reference.
SCALES = {
    "upsample": [(1, 1), (0.5, 0.5), (0.75, 0.75), (1.25, 1.25), (1.5, 1.5), (2, 2), (1, 1.5), (1.5, 1)],
    "canvas": [(1, 1), (1.5, 1.5), (2, 2), (1, 1.5), (1.5, 1)],
}
Size = tuple[int, int]


def upsample(images: Tensor, size: Size) -> Tensor:
    """[b, C, H, W] -> [b, C, h, w], bilinear with antialiasing; the native size is returned as it is."""
    if tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)


def extend(images: Tensor, size: Size) -> Tensor:
    """[b, C, H, W] -> [b, C, h, w] by black on the right and below: every token keeps its row and column."""
    h, w = images.shape[-2:]
    return F.pad(images, (0, size[1] - w, 0, size[0] - h))


def check_size(size: Size, patch: Size) -> None:
    for length, p, side in zip(size, patch, ("height", "width")):
        if length < p or length % p:
            low = length // p * p
            near = f"{low} or {low + p}" if low else f"{p}"
            raise ValueError(
                f"{side} {length} of size {size[0]}x{size[1]} is not a multiple of the patch ({p}): try {near}"
            )


def resolve_sizes(sizes: Any, kind: str, native: Size, patch: Size) -> list[Size]:
    """The sizes of one kind, the native one first. "auto": SCALES, to the nearest multiple of the patch."""
    if sizes == "auto":
        found = [
            native
            if scale == (1, 1)
            else tuple(max(1, int(s * n / p + 0.5)) * p for s, n, p in zip(scale, native, patch))
            for scale in SCALES[kind]
        ]
        return list(dict.fromkeys(found))  # type: ignore[arg-type]
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise ValueError(f"sizes must be auto or a list of sides or [height, width] pairs, got {sizes!r}")
    pairs = []
    for size in sizes:
        pair = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
        if len(pair) != 2 or not all(isinstance(s, int) for s in pair):
            raise ValueError(f"a size is a side or a [height, width] pair in pixels, got {size!r}")
        check_size(pair, patch)
        pairs.append(pair)
    if kind == "canvas" and any(h < native[0] or w < native[1] for h, w in pairs):
        raise ValueError(f"a canvas can only be larger than the native {native[0]}x{native[1]}, got {pairs}")
    return list(dict.fromkeys([native, *pairs]))


@register(
    "resolution",
    definitions={
        "upsample": "The image is resized (bilinear, antialiased): the object grows with the grid.",
        "canvas": "The canvas grows to the right and down, black; the object stays on the tokens it was on. "
        "Only positions and background are new.",
        "policy": "What the encoding does with positions beyond its training grid: extrapolate (coordinates run on), "
        "interpolate (scaled into the training grid); '-' where nothing depends on it.",
    },
)
class Resolution:
    """Options: `upsample` and `canvas` ("auto", "none", or a list of sides or [h, w] pairs in pixels),
    `policies` ("default", or a list of resize policies that are compared on the same weights)."""

    defaults: ClassVar[dict[str, Any]] = {"upsample": "auto", "canvas": "auto", "policies": "default"}

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        policies = options["policies"]
        policies = [policies] if isinstance(policies, str) else list(policies)
        if not policies or not all(isinstance(policy, str) for policy in policies):
            raise ValueError(f"resolution.policies must be default or a list of resize policies, got {policies!r}")
        arrays: Arrays = {"image_size": np.array(subject.size), "patch_size": np.array(subject.patch)}
        for kind in KINDS:
            if options[kind] == "none":
                continue
            if kind == "canvas" and not hasattr(subject.images, "place"):
                arrays["canvas/not_applicable"] = np.array(
                    "a larger canvas needs a data set on a blank canvas (digits)"
                )
                continue
            sizes = resolve_sizes(options[kind], kind, subject.size, subject.patch)
            reasons = {size: reason for size in sizes if (reason := subject.accepts(size))}
            run = [size for size in sizes if size not in reasons]
            rows, preds = [], []
            for policy in policies:
                try:
                    model = None if policy == "default" else subject.with_policy(policy)
                except NotApplicable as reason:
                    arrays[f"{kind}/not_applicable"] = np.array(str(reason))
                    continue
                name = subject.resize_policy(model)
                render = upsample if kind == "upsample" else extend
                preds.append(subject.sweep(run, render, f"{kind}, {name}", model=model)["pred"])
                rows += [(size, name) for size in run]
            if preds:
                arrays |= {
                    f"{kind}/sizes": np.array([size for size, _ in rows]),
                    f"{kind}/policies": np.array([name for _, name in rows]),
                    f"{kind}/pred": np.concatenate(preds),
                }
            if reasons:
                arrays[f"{kind}/refused_sizes"] = np.array(list(reasons))
                arrays[f"{kind}/refused_why"] = np.array(list(reasons.values()))
        return arrays

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        native = arrays["image_size"]
        result: dict[str, Any] = {"image_size": native.tolist(), "kinds": {}}
        if "patch_size" in arrays:  # not stored by early versions
            result["patch_size"] = arrays["patch_size"].tolist()
        for kind in KINDS:
            entry: dict[str, Any] = {}
            if f"{kind}/not_applicable" in arrays:
                entry["not_applicable"] = str(arrays[f"{kind}/not_applicable"])
            if f"{kind}/pred" in arrays:
                columns = (arrays[f"{kind}/{key}"] for key in ("sizes", "policies", "pred"))
                entry["rows"] = [
                    {
                        "size": size.tolist(),
                        "scale": [round(float(s / n), 4) for s, n in zip(size, native)],
                        "policy": str(policy),
                        "accuracy": stats.accuracy(pred == truth).as_dict(),
                    }
                    for size, policy, pred in zip(*columns)
                ]
            if f"{kind}/refused_sizes" in arrays:
                refused = zip(arrays[f"{kind}/refused_sizes"].tolist(), arrays[f"{kind}/refused_why"].tolist())
                entry["refused"] = [{"size": size, "why": why} for size, why in refused]
            if entry:
                result["kinds"][kind] = entry
        return result

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score]:
        """By size, under the first policy listed."""
        found: dict[str, stats.Score] = {}
        for kind in KINDS:
            if f"{kind}/pred" in arrays:
                for (height, width), pred in zip(arrays[f"{kind}/sizes"].tolist(), arrays[f"{kind}/pred"]):
                    found.setdefault(f"{kind}/{height}x{width}", stats.Score(pred == truth))
        return found
