"""Resolution: accuracy at other sizes and aspect ratios, without fine-tuning.

Three kinds, kept apart because they probe different things:

- `upsample`: the image is resized (`interpolation`, antialiased), so the object grows with the grid; no new
  information.
- `canvas`: the canvas grows to the right and down, black, and the object stays on the tokens it was on: only
  positions and background are new. Data sets without a blank canvas do not have it (a black margin would cut
  the scene off).
- `zoom`: the control for `upsample`: the image is resized likewise, then cut back (or filled up with black) to the
  native size: objects of that size on the grid of training. Networks trained on random resized crops see objects
  larger in training than in tests, and gain from larger test images whatever their encoding (FixRes): what zoom gains
  too is no evidence for an encoding. upsample - zoom, on the same images, is not the encoding's part alone: upsample
  keeps the share of background, zoom does not (`none`, on digits, has differences of up to 28 points), so read it
  beside `none`. About the centre, on a canvas from the top left corner; sizes that would cut content off a canvas are
  refused. Of a scene the margin is lost, which upsample keeps.

Each row names the resize policy that was in force (what the encoding does with positions beyond its training grid) and
the interpolation; several policies are compared on the same weights, and with `logn` the same once more with the
temperature ln N / ln N0 on the logits. Beside accuracy: expected calibration error (15 bins of equal width of the
largest probability, each |accuracy - confidence| weighted by its share of images; some is found for a calibrated model
too, the more the fewer images), and the mean entropy of the probabilities in nats.

All happens before normalisation; at the native size it is plain evaluation, bit for bit.

Source: Touvron et al. 2019, Fixing the Train-Test Resolution Discrepancy, arXiv:1906.06423 (FixRes); Guo et al. 2017,
On Calibration of Modern Neural Networks, arXiv:1706.04599, equation 3; the temperature: vitpos/encodings/logn.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import vitpos
from vitpos import stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._views import View, table
from vitpos.spec import list_encodings, nearest
from vitpos.spec import options as spec_options

KINDS = ("upsample", "canvas", "zoom")
# (h, w) multiples of the native size; the native size comes first, it is the reference.
SCALES = {
    "upsample": [(1, 1), (0.5, 0.5), (0.75, 0.75), (1.25, 1.25), (1.5, 1.5), (2, 2), (1, 1.5), (1.5, 1)],
    "canvas": [(1, 1), (1.5, 1.5), (2, 2), (1, 1.5), (1.5, 1)],
}
INTERPOLATIONS = ("bilinear", "bicubic", "nearest-exact")
Size = tuple[int, int]


def upsample(images: Tensor, size: Size, interpolation: str = "bilinear") -> Tensor:
    """[b, C, H, W] -> [b, C, h, w], antialiased but for nearest-exact; the native size is returned as it is."""
    if tuple(images.shape[-2:]) == size:
        return images
    if interpolation == "nearest-exact":
        return F.interpolate(images, size, mode=interpolation)
    resized = F.interpolate(images, size, mode=interpolation, antialias=True, align_corners=False)
    return resized.clamp(0, 1) if interpolation == "bicubic" else resized


def extend(images: Tensor, size: Size) -> Tensor:
    """[b, C, H, W] -> [b, C, h, w] by black on the right and below: every token keeps its row and column."""
    h, w = images.shape[-2:]
    return F.pad(images, (0, size[1] - w, 0, size[0] - h))


def zoom(images: Tensor, size: Size, interpolation: str, centred: bool) -> Tensor:
    """Resized to `size`, then cut or filled up with black to its own size [b, C, H, W], about centre or corner."""
    resized = upsample(images, size, interpolation)
    pads = []
    for native, now in zip(images.shape[:-3:-1], resized.shape[:-3:-1]):  # width first, as F.pad counts
        before = (native - now) // 2 if centred else 0
        pads += [before, native - now - before]
    return F.pad(resized, pads)  # a negative pad cuts


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
        raise ValueError(
            f"resolution.{kind} must be none, auto or a list of sides or [height, width] pairs, got {sizes!r}"
        )
    pairs = []
    for size in sizes:
        pair = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
        if len(pair) != 2 or not all(isinstance(s, int) for s in pair):
            raise ValueError(f"resolution.{kind}: a size is a side or a [height, width] pair in pixels, got {size!r}")
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
        "zoom": "The control for upsample: resized likewise, then cut or filled up to the native size. Objects of that "
        "size on the grid of training.",
        "upsample - zoom": "Accuracy of the two at one size on the same images: the larger grid, and the share of "
        "background, which zoom changes; read it beside none.",
        "ece": "Expected calibration error: 15 bins of confidence, |accuracy - confidence| weighted by images. Its "
        "interval begins at 0 where a calibrated model would err as much by chance.",
        "entropy": "Mean entropy of the probabilities, in nats.",
        "interpolation": "How images are resized; bilinear and bicubic are antialiased.",
        "policy": "What the encoding does with positions beyond its training grid: extrapolate (coordinates run on), "
        "interpolate (scaled into the training grid), timm's own (as the model's class does it); '-' where nothing "
        "depends on it.",
    },
)
class Resolution:
    """Options: `upsample`, `canvas` and `zoom` ("auto", "none", or a list of sides or [h, w] pairs in pixels; zoom
    takes the sizes of upsample where it is "auto"), `policies` ("default", or a list of resize policies that are
    compared on the same weights), `interpolation` of resized images, `logn`: also with the temperature."""

    in_parts: ClassVar[bool] = True
    defaults: ClassVar[dict[str, Any]] = {
        "upsample": "auto", "canvas": "auto", "zoom": "auto", "policies": "default", "interpolation": "bilinear",
        "logn": False,
    }  # fmt: skip

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        policies, interpolation = options["policies"], options["interpolation"]
        policies = [policies] if isinstance(policies, str) else list(policies)
        if not policies or not all(isinstance(policy, str) for policy in policies):
            raise ValueError(f"resolution.policies must be default or a list of resize policies, got {policies!r}")
        for policy in policies:
            if policy not in policy_names():
                raise ValueError(
                    f"resolution.policies: no encoding offers {policy!r}; {nearest(policy, policy_names())}"
                )
        if interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"resolution.interpolation must be one of {', '.join(INTERPOLATIONS)}, got {interpolation!r}"
            )
        arrays: Arrays = {
            "image_size": np.array(subject.size),
            "patch_size": np.array(subject.patch),
            "interpolation": np.array(interpolation),
        }
        placed = hasattr(subject.images, "place")
        render: dict[str, Callable[[Tensor, Size], Tensor]] = {
            "upsample": lambda images, size: upsample(images, size, interpolation),
            "canvas": extend,
            "zoom": lambda images, size: zoom(images, size, interpolation, not placed),
        }
        for kind in KINDS:
            given = options["upsample"] if kind == "zoom" and options["zoom"] == "auto" else options[kind]
            if given == "none":
                continue
            if kind == "canvas" and not placed:
                arrays["canvas/not_applicable"] = np.array(
                    "a larger canvas needs a data set on a blank canvas (digits)"
                )
                continue
            sizes = resolve_sizes(given, "canvas" if kind == "canvas" else "upsample", subject.size, subject.patch)
            if kind == "zoom":
                reasons = cut_off(subject, sizes, interpolation) if placed else {}
            else:
                reasons = {size: reason for size in sizes if (reason := subject.accepts(size))}
            run = [size for size in sizes if size not in reasons]
            rows, found = [], []
            models = [(policy, cool) for policy in policies for cool in (False, True)[: 1 + options["logn"]]]
            if kind == "zoom":
                models = [("default", False)]  # on the grid of training there is no policy and no temperature
            for policy, cool in models:
                try:
                    model, name = self._model(subject, policy, cool)
                except NotApplicable as reason:
                    arrays[f"{kind}/not_applicable"] = np.array(str(reason))
                    continue
                found.append(subject.sweep(run, render[kind], f"{kind}, {name}", model=model))
                rows += [(size, "-" if kind == "zoom" else name) for size in run]
            if found:
                arrays |= {
                    f"{kind}/sizes": np.array([size for size, _ in rows]),
                    f"{kind}/policies": np.array([name for _, name in rows]),
                } | {
                    f"{kind}/{key}": np.concatenate([columns[key] for columns in found])
                    for key in ("pred", "confidence", "entropy")
                }
            if reasons:
                arrays[f"{kind}/refused_sizes"] = np.array(list(reasons))
                arrays[f"{kind}/refused_why"] = np.array(list(reasons.values()))
        return arrays

    @staticmethod
    def _model(subject: Subject, policy: str, cool: bool) -> tuple[nn.Module | None, str]:
        """The model under a policy, with the temperature if `cool`, and what its rows are called."""
        model = None if policy == "default" else subject.with_policy(policy)
        name = subject.resize_policy(model)
        if not cool:
            return model, name
        base: Any = subject.positioned() if model is None else model
        if "logn" in base.position.spec.names:
            raise NotApplicable("the model has logn already")
        with torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore", vitpos.backbone.ColdSwapWarning)  # on its own grid it changes nothing
            return vitpos.attach(copy.deepcopy(base), "native + logn"), f"{name}, ln N"

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        native = arrays["image_size"]
        result: dict[str, Any] = {"image_size": native.tolist(), "kinds": {}}
        if "patch_size" in arrays:  # not stored by early versions
            result["patch_size"] = arrays["patch_size"].tolist()
        if "interpolation" in arrays:
            result["interpolation"] = str(arrays["interpolation"])
        for kind in KINDS:
            entry: dict[str, Any] = {}
            if f"{kind}/not_applicable" in arrays:
                entry["not_applicable"] = str(arrays[f"{kind}/not_applicable"])
            if f"{kind}/pred" in arrays:
                columns = (arrays[f"{kind}/{key}"] for key in ("sizes", "policies", "pred"))
                certain = arrays.get(f"{kind}/confidence"), arrays.get(f"{kind}/entropy")
                entry["rows"] = [
                    {
                        "size": size.tolist(),
                        "scale": [round(float(s / n), 4) for s, n in zip(size, native)],
                        "policy": str(policy),
                        "accuracy": stats.accuracy(pred == truth).as_dict(),
                        **_calibration(pred == truth, *(None if c is None else c[k] for c in certain)),
                    }
                    for k, (size, policy, pred) in enumerate(zip(*columns))
                ]
            if f"{kind}/refused_sizes" in arrays:
                refused = zip(arrays[f"{kind}/refused_sizes"].tolist(), arrays[f"{kind}/refused_why"].tolist())
                entry["refused"] = [{"size": size, "why": why} for size, why in refused]
            if entry:
                result["kinds"][kind] = entry
        if all(f"{kind}/pred" in arrays for kind in ("upsample", "zoom")):
            result["grid_effect"] = _grid_effect(arrays, truth)
        return result

    def views(self, summary: dict[str, Any]) -> list[View]:
        found: list[View] = []
        rows = []
        for kind, entry in summary["kinds"].items():
            for row in entry.get("rows", []):
                if "ece" in row:
                    size = "x".join(map(str, row["size"]))
                    error = row.get("ece_interval") or row["ece"]  # early versions have no interval
                    rows.append([kind, size, row["policy"], row["accuracy"], error, row["entropy"]])
        if rows:
            note = (
                f"Images resized by {summary['interpolation']} interpolation. Expected calibration error (some is "
                "found for a calibrated model too: an interval from 0 says that it may be one) and mean entropy of the "
                "probabilities."
            )
            heads = {"kind": "", "size": "", "policy": "", "accuracy": "percent", "calibration error": "percent",
                     "entropy (nats)": ""}  # fmt: skip
            found.append(table("calibration", "Certainty by size", note, heads, rows))
        if summary.get("grid_effect"):
            note = (
                "Objects of one size on the larger grid (upsample) and on the grid of training (zoom). A gain that "
                "zoom has too comes from the size of the objects. The difference is no encoding's alone, since zoom "
                "changes the share of background: read it beside none."
            )
            heads = {"size": "", "upsample": "percent", "zoom": "percent", "upsample - zoom": "percent"}
            rows = [["x".join(map(str, row["size"])), row["upsample"], row["zoom"], row["difference"]]
                    for row in summary["grid_effect"]]  # fmt: skip
            found.append(table("grid-effect", "Larger objects or a larger grid", note, heads, rows))
        return found

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score]:
        """By size, under the first policy listed."""
        found: dict[str, stats.Score] = {}
        for kind in KINDS:
            if f"{kind}/pred" in arrays:
                for (height, width), pred in zip(arrays[f"{kind}/sizes"].tolist(), arrays[f"{kind}/pred"]):
                    found.setdefault(f"{kind}/{height}x{width}", stats.Score(pred == truth))
        return found


def policy_names() -> list[str]:
    """The resize policies that any encoding offers, beside the common ones."""
    found = {"default", "extrapolate", "interpolate", "normalized"}
    for name in list_encodings():
        option = spec_options(name).get("resize")
        found |= {choice for kind in (option.kinds if option else ()) for choice in get_args(kind)}
    return sorted(found)


def cut_off(subject: Subject, sizes: Sequence[Size], interpolation: str) -> dict[Size, str]:
    """The sizes at which a zoom from the corner would cut content off the canvas, with the reason."""
    h, w = subject.size
    lost = set()
    for _, pixels in subject.loaded():
        for size in (s for s in sizes if (s[0] > h or s[1] > w) and s not in lost):
            large = upsample(pixels, size, interpolation)
            if large[..., h:, :].any() or large[..., w:].any():
                lost.add(size)
    return {size: f"content enlarged to {size[0]}x{size[1]} px would leave the {h}x{w} canvas" for size in sizes
            if size in lost}  # fmt: skip


def _calibration(correct: NDArray[np.bool_], confidence: Any, entropy: Any) -> dict[str, Any]:
    if confidence is None:  # not stored by early versions
        return {}
    interval = stats.calibration_interval(correct, confidence)
    mean = stats.ratio(entropy) if len(entropy) > 1 else None
    return {
        "ece": stats.calibration_error(correct, confidence),
        "ece_interval": interval.as_dict() if interval else None,
        "entropy": mean.as_dict() if mean else None,
    }


def _grid_effect(arrays: Arrays, truth: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Upsample (under the first policy) beside zoom, at the sizes that both have, but the native one."""
    known: dict[Size, NDArray[np.int64]] = {}
    for size, pred in zip(arrays["upsample/sizes"].tolist(), arrays["upsample/pred"]):
        known.setdefault(tuple(size), pred)
    rows = []
    for size, pred in zip(arrays["zoom/sizes"].tolist()[1:], arrays["zoom/pred"][1:]):
        if tuple(size) in known:
            larger = known[tuple(size)] == truth
            rows.append(
                {
                    "size": size,
                    "upsample": stats.accuracy(larger).as_dict(),
                    "zoom": stats.accuracy(pred == truth).as_dict(),
                    "difference": stats.paired_difference(larger, pred == truth).as_dict(),
                }
            )
    return rows
