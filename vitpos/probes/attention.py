"""Attention: how far it looks, whether heads differ, and what of its logits is content, position, or both.

Distance and diversity (every layer, patches to patches, each query's weights rescaled to sum 1 without prefix tokens):

- distance: d[l, head] = mean over images and queries q of sum_k a[q, k] |p_q - p_k|, in pixels between patch centres.
  Its null is the mean distance of all pairs, what uniform attention has; distance / uniform compares grids of any size.
- diversity: generalised Jensen-Shannon divergence of the heads, H(mean over heads of a[q]) - mean over heads of
  H(a[q]), mean over queries and images, as a share of its greatest value, ln(heads).

The logits of the first layer, split (encodings that add to tokens; in float64). With content c, position p, x = c + p
and pre-normalisation u = gamma * (C c + C p) / sigma(x) + beta (C centres), q and k are sums of three parts, linear in
c, in p, and constant; sigma is that of the whole token. Hence exactly

    logit = content-content + content-position + position-content + position-position + rest

(query first; rest: everything with a constant in it, which beta and biases make). Given are each term's variance over
pairs and images, as a share of the sum of the five (they covary, so these are no parts of the variance of the logit),
and of each term the share that depends on the offset between query and key alone: explained by the mean over the pairs
at an offset in the other images, so that few images do not inflate it.

The encoding's own similarity by offset, s(D) = mean over pairs at offset D = query - key of: p_q . p_k for what is
added to tokens; trace(R_q^T R_k) / d for a rotation (what q = k give on average); the bias itself (both of the first
layer, mean over heads). Of each: `anisotropy` s(0, 1) / s(1, 0) (of a bias the falls s(0) - s instead); `aliasing`, the
largest s(D) / s(0) at |D| beyond half the longer side (not of a bias); `rises`, share of the steps outward along the
axes at which s grows (a monotone decay has 0); `offset_only`, the share of the pairs' variance that the offset
explains. `norm_ratio`: mean |p| / mean |c| over the tokens that enter the first layer.

Source: Dosovitskiy et al. 2021, arXiv:2010.11929, appendix D.7 (distance); Fuller et al. 2024, LookHere,
arXiv:2405.13985 (divergence of heads); Ke et al. 2021, Rethinking Positional Encoding, arXiv:2006.15595 (four terms);
Wang et al. 2021, On Position Embeddings in BERT, ICLR (properties of p_q . p_k). The frozen sigma and the share by
offset are ours.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import vitpos
from vitpos import positions, stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._views import View, curves, maps, table

TERMS = ("content-content", "content-position", "position-content", "position-position", "rest")
KERNELS = ("tokens", "rotation", "bias")
Extent = tuple[int, int]


def distances(grid: Extent, patch: tuple[int, int]) -> Tensor:
    """Between all pairs of patch centres [N, N], in pixels."""
    centres = positions.grid(*grid).coords[0] * torch.tensor(patch, dtype=torch.float32)
    return torch.cdist(centres, centres)


def divergence(weights: Tensor) -> Tensor:
    """Generalised Jensen-Shannon divergence of heads, attention [b, h, Q, K] -> [b] in nats, mean over queries."""

    def entropy(p: Tensor) -> Tensor:
        return -torch.special.xlogy(p, p).sum(-1)

    return (entropy(weights.mean(1)) - entropy(weights).mean(1)).mean(-1)


def offset_index(grid: Extent) -> Tensor:
    """For all pairs [N, N] the index of query minus key into a flattened table [2H-1, 2W-1]."""
    h, w = grid
    cells = positions.grid(h, w).coords[0].long()
    y, x = (cells[:, None] - cells[None]).unbind(-1)
    return (y + h - 1) * (2 * w - 1) + x + w - 1


def offset_shares(term: Tensor, grid: Extent) -> tuple[Tensor, Tensor]:
    """Of values [n, N, N] of n images: squares about their mean, summed over pairs [n], and the part of these that the
    offset explains [n], by the mean over the pairs at that offset in the other images."""
    index, count = offset_index(grid), (2 * grid[0] - 1) * (2 * grid[1] - 1)
    pairs = by_offset(torch.ones_like(term[0]), index, count)
    term = term - term.mean()
    means = by_offset(term, index, count) / pairs  # [n, offsets]
    others = (means.sum(0) - means) / (len(means) - 1)
    return term.square().sum((1, 2)), (pairs * means * others).sum(1)


def by_offset(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums over the pairs of each offset: values [..., N, N] -> [..., count]."""
    out = values.new_zeros(*values.shape[:-2], count)
    return out.index_add(-1, index.flatten().to(values.device), values.flatten(-2))


@register(
    "attention",
    definitions={
        "distance": "Mean distance between a query and what it attends to, patches only, in pixels; over uniform: over "
        "what uniform attention has on this grid.",
        "diversity": "Generalised Jensen-Shannon divergence between the heads of a layer, as a share of its greatest "
        "value.",
        "terms": "Variance of each part of the first layer's logits (query first), as a share of the sum of the five. "
        "rest: everything with a constant (bias) in it.",
        "relative": "Share of a term that the offset between query and key explains.",
        "norm_ratio": "Mean norm of what the encoding adds over the mean norm of the content, at the first layer.",
        "anisotropy": "Similarity one step to the right over that one step down; of a bias, of the falls.",
        "aliasing": "Largest similarity beyond half the image, over that at the same place.",
        "rises": "Share of the steps outward along the axes at which the similarity grows; a monotone decay has none.",
        "offset_only": "Share of the similarity's variance over pairs that the offset explains.",
    },
)
class Attention:
    """Options: `images` whose attention is read (0: all), `exact_images` whose logits are split."""

    defaults: ClassVar[dict[str, Any]] = {"images": 32, "exact_images": 8}

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        if options["exact_images"] < 2:
            raise ValueError(f"attention.exact_images must be at least 2, got {options['exact_images']}")
        if not _attentions(subject.model):
            raise NotApplicable(f"{type(subject.model).__name__} has no attention over patches in `blocks`")
        grid = _grid(subject)
        arrays = self._weights(subject, grid, options["images"])
        parts = {
            "kernel": lambda: self._kernels(subject, grid),
            "terms": lambda: self._terms(subject, grid, options["exact_images"]),
        }
        for name, measure in parts.items():
            try:
                found = measure()
            except NotApplicable as reason:
                found = {"not_applicable": np.array(str(reason))}
            arrays |= {f"{name}/{key}": array for key, array in found.items()}
        return arrays

    @staticmethod
    def _weights(subject: Subject, grid: Extent, images: int) -> Arrays:
        part, chosen = subject.some(images)
        with torch.inference_mode(False):
            model = copy.deepcopy(part.model)
        attentions, prefix = _attentions(model), getattr(model, "num_prefix_tokens", 0)
        n, patches = len(chosen), grid[0] * grid[1]
        apart = distances(grid, part.patch).to(part.device)
        found: dict[str, list[Tensor]] = {}
        columns: dict[str, list[NDArray[np.float32]]] = {"distance": [], "diversity": [], "on_patches": []}

        def read(name: str, weights: Tensor) -> None:
            queries, keys = weights.shape[-2:]
            if keys != patches + prefix or queries == prefix < patches:
                return
            a = weights[..., -patches:, prefix:]
            kept = a.sum(-1, keepdim=True)
            a = a / kept.clamp(min=torch.finfo(a.dtype).tiny)
            found[name] = [(a * apart).sum(-1).mean(-1), divergence(a)[:, None], kept.mean((-2, -1))]

        for name, module in attentions.items():
            module.fused_attn = False  # written out, so that its weights pass through attn_drop
            module.attn_drop.register_forward_hook(lambda _, __, out, name=name: read(name, out))
        advance = part.track("attention", n)
        for where, pixels in part.loaded():
            found.clear()
            part.logits(pixels, model)
            if len(found) != len(attentions):
                raise NotApplicable(f"its attention is not over all {patches} patches at once (windows, or none)")
            for key, k in (("distance", 0), ("diversity", 1), ("on_patches", 2)):
                columns[key].append(torch.stack([values[k] for values in found.values()]).movedim(1, 2).cpu().numpy())
            advance(where.stop - where.start)
        joined = {key: np.concatenate(parts, axis=-1) for key, parts in columns.items()}
        joined["diversity"] = joined["diversity"][:, 0]
        return joined | {
            "images": chosen, "layers": np.array(list(attentions)), "grid": np.array(grid),
            "uniform": np.array(apart.mean().item()),
        }  # fmt: skip

    @staticmethod
    def _terms(subject: Subject, grid: Extent, images: int) -> Arrays:
        exact, chosen = subject.precise().some(images)
        model: Any = exact.positioned()
        x = _entering(exact, model)
        with torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore", vitpos.backbone.ColdSwapWarning)
            bare = vitpos.attach(copy.deepcopy(model), "none")
        content = _entering(exact, bare)
        position = x - content
        if not position.any():
            raise NotApplicable("the encoding adds nothing to the tokens: position enters by rotation or bias alone")
        if (position - position[:1]).abs().max() > 1e-9 * position.abs().max():
            raise NotApplicable("what the encoding adds is changed by a normalisation before the first block")
        q, k, scale = _split(model.blocks[0], content, position)
        total, relative = (np.zeros((len(TERMS), len(chosen))) for _ in range(2))
        for head in range(q.shape[2]):
            cc, cp, pc, pp = (scale * q[i, :, head] @ k[j, :, head].mT for i in (0, 1) for j in (0, 1))
            rest = scale * q.sum(0)[:, head] @ k.sum(0)[:, head].mT - (cc + cp + pc + pp)
            for t, term in enumerate((cc, cp, pc, pp, rest)):
                squares, explained = offset_shares(term, grid)
                total[t] += squares.cpu().numpy()
                relative[t] += explained.cpu().numpy()
        return {
            "images": chosen, "total": total, "relative": relative,
            "content_norm": content.norm(dim=-1).mean(1).cpu().numpy(),
            "position_norm": np.array(position[0].norm(dim=-1).mean().item()),
        }  # fmt: skip

    @staticmethod
    def _kernels(subject: Subject, grid: Extent) -> Arrays:
        exact = subject.precise()
        model: Any = exact.positioned()
        pos = positions.grid(*grid, device=exact.device, dtype=torch.float64)
        prefix = model.num_prefix_tokens
        held = {} if model.pos_embed is None else {"pos_embed": model.pos_embed[:, model.prefix_rows :]}
        added = model.position("tokens", pos, held)
        shared = model.position("shared_signal", pos, prefix, model.own())
        signal = model.position("told", 0, pos, shared, model.own_of(model.blocks[0]), None, False)
        signal = None if signal is None else signal.expand()
        found: dict[str, Tensor] = {}
        if added is not None:
            found["tokens"] = added[0] @ added[0].mT
        if signal is not None and signal.rotation is not None:
            found["rotation"] = _overlap(signal.rotation, model.position.geometry, prefix)
        if signal is not None and signal.bias is not None:
            found["bias"] = signal.bias[0, :, prefix:, prefix:].mean(0)
        if not found:
            raise NotApplicable("the encoding adds nothing to tokens, rotates nothing and has no bias of its own")
        arrays: Arrays = {}
        index, size = offset_index(grid), (2 * grid[0] - 1, 2 * grid[1] - 1)
        pairs = by_offset(torch.ones(index.shape, dtype=torch.float64), index, size[0] * size[1])
        for name, values in found.items():
            values = values.detach().double().cpu()
            means = by_offset(values, index, size[0] * size[1]) / pairs
            about = values.var(correction=0)
            explained = (pairs * (means - values.mean()).square()).sum() / values.numel()
            arrays[f"{name}/map"] = means.view(size).numpy()
            arrays[f"{name}/offset_only"] = np.array((explained / about).item() if about > 0 else 1.0)
        return arrays

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        uniform = float(arrays["uniform"])
        layers = [
            {"layer": str(name), "diversity": None}  # of one head
            | {key: ratio.summary() for key, ratio in _of_layer(arrays, k).items()}
            | {
                "heads": (arrays["distance"][k].mean(1) / uniform).tolist(),
                "on_patches": float(arrays["on_patches"][k].mean()),
            }
            for k, name in enumerate(arrays["layers"])
        ]
        result: dict[str, Any] = {
            "images_used": len(arrays["images"]),
            "grid": arrays["grid"].tolist(),
            "uniform": uniform,
            "layers": layers,
        }
        if "kernel/not_applicable" in arrays:
            result["kernels"] = {"not_applicable": str(arrays["kernel/not_applicable"])}
        else:
            result["kernels"] = {
                name: _kernel(arrays[f"kernel/{name}/map"], float(arrays[f"kernel/{name}/offset_only"]), name)
                for name in KERNELS
                if f"kernel/{name}/map" in arrays
            }
        if "terms/not_applicable" in arrays:
            return result | {"terms": {"not_applicable": str(arrays["terms/not_applicable"])}}
        return result | {
            "terms": {
                name: {key: ratio.summary() for key, ratio in _of_term(arrays, t).items()}
                for t, name in enumerate(TERMS)
            },
            "norm_ratio": _norm_ratio(arrays).summary(),
        }

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score | None]:
        """By layer, and of the first layer's terms. The kernels are the weights' alone and have no images."""
        found = {
            f"{key}/{layer}": ratio.score()
            for k, layer in enumerate(arrays["layers"])
            for key, ratio in _of_layer(arrays, k).items()
        }
        if "terms/not_applicable" in arrays:
            return found
        images = arrays["terms/images"]
        for t, term in enumerate(TERMS):
            found |= {f"{key}/{term}": ratio.score(images) for key, ratio in _of_term(arrays, t).items()}
        return found | {"norm_ratio": _norm_ratio(arrays).score(images)}

    def views(self, summary: dict[str, Any]) -> list[View]:
        layers = summary["layers"]
        names = [layer["layer"] for layer in layers]
        lines = {
            "mean": (names, [layer["over_uniform"] for layer in layers]),
            "nearest head": (names, [min(layer["heads"]) for layer in layers]),
            "farthest head": (names, [max(layer["heads"]) for layer in layers]),
            "diversity": (names, [layer["diversity"] for layer in layers]),
        }
        note = (
            "Mean distance of attention over that of uniform attention (1: it looks everywhere alike), and how much "
            "heads differ (Jensen-Shannon divergence, share of its greatest value)."
        )
        rows = [[layer["layer"], layer["distance"], layer["over_uniform"], min(layer["heads"]), max(layer["heads"]),
                 layer["diversity"]] for layer in layers]  # fmt: skip
        heads = {"layer": "", "distance (pixels)": "", "over uniform": "", "nearest head": "", "farthest head": "",
                 "diversity": "percent"}  # fmt: skip
        found = [
            curves("distance", "How far attention looks", note, "layer", "share of uniform", lines, ""),
            table("layers", "Attention by layer", note, heads, rows),
        ]
        if "not_applicable" not in summary["terms"]:
            rows = [[name, entry["share"], entry["relative"]] for name, entry in summary["terms"].items()]
            found.append(
                table(
                    "terms", "The first layer's logits, split",
                    "Variance of each term as a share of the five, and the part of it that the offset alone explains.",
                    {"term": "", "share of variance": "percent", "by offset alone": "percent"}, rows,
                )
            )  # fmt: skip
        kernels = {name: entry for name, entry in summary["kernels"].items() if name in KERNELS}
        if kernels:
            rows = [[name, *(entry[key] for key in ("anisotropy", "aliasing", "rises", "offset_only"))]
                    for name, entry in kernels.items()]  # fmt: skip
            units = {"": "", "anisotropy": "", "aliasing": "", "rises": "percent", "by offset alone": "percent"}
            note = "First layer, mean over heads."
            if summary.get("norm_ratio"):
                norms = (f"{summary['norm_ratio'][key]:.3g}" for key in ("value", "low", "high"))
                note += " What is added has {} ({} to {}) times the norm of the content.".format(*norms)
            found.append(table("kernels", "The encoding's own similarity by offset", note, units, rows))
            decay = {
                f"{name}, {way}": (list(range(len(line))), line)
                for name, entry in kernels.items()
                for way, line in _outward(entry["scaled"]).items()
                if len(line) > 1
            }
            note = "Outward from offset 0 along the axes; a wave that comes back is aliasing."
            found.append(curves("decay", "Similarity by distance", note, "offset (patches)", "similarity", decay, ""))
            panels = {name: entry["scaled"] for name, entry in kernels.items()}
            found.append(
                maps(
                    "kernels", "Similarity by offset",
                    "Of what is added to tokens (over its value at offset 0), of a rotation, or a bias scaled to 0..1; "
                    "the centre is offset 0, rows and columns are query minus key.", panels, "",
                )
            )  # fmt: skip
        return found


def _of_layer(arrays: Arrays, k: int) -> dict[str, stats.Ratio]:
    """Means over images of one layer; one head has no diversity."""
    distance, heads = arrays["distance"][k].mean(0, dtype=np.float64), arrays["distance"].shape[1]
    found = {"distance": stats.Ratio(distance, unit="px"), "over_uniform": stats.Ratio(distance / arrays["uniform"])}
    if heads > 1:
        found["diversity"] = stats.Ratio(arrays["diversity"][k] / math.log(heads), unit="percent")
    return found


def _of_term(arrays: Arrays, t: int) -> dict[str, stats.Ratio]:
    """Shares of one term of the first layer's logits."""
    total, relative = arrays["terms/total"], arrays["terms/relative"]
    return {
        "share": stats.Ratio(total[t], total.sum(0), "percent"),
        "relative": stats.Ratio(relative[t], total[t], "percent"),
    }


def _norm_ratio(arrays: Arrays) -> stats.Ratio:
    content = arrays["terms/content_norm"]
    return stats.Ratio(np.full_like(content, arrays["terms/position_norm"]), content)


def _grid(subject: Subject) -> Extent:
    size, patch = subject.size, subject.patch
    if size[0] % patch[0] or size[1] % patch[1]:
        raise NotApplicable(f"{size[0]}x{size[1]} px are no whole number of patches of {patch[0]}x{patch[1]} px")
    return size[0] // patch[0], size[1] // patch[1]


def _attentions(model: Any) -> dict[str, Any]:
    """The modules of a model's blocks that attend, by name."""
    found = {}
    for i, block in enumerate(getattr(model, "blocks", []), 1):
        inside = [module for module in block.modules() if isinstance(getattr(module, "attn_drop", None), nn.Module)]
        for j, module in enumerate(inside):
            found[f"block {i}" + (f" ({j + 1})" if len(inside) > 1 else "")] = module
    return found


def _entering(subject: Subject, model: Any) -> Tensor:
    """The patch tokens [n, N, D] that enter the first block."""
    maps_by_layer = subject.features(subject.pixels(subject.indices), model)
    if "embedding" not in maps_by_layer:
        raise NotApplicable("the tokens that enter the first block cannot be read")
    return maps_by_layer["embedding"].flatten(2).mT


def _split(block: Any, content: Tensor, position: Tensor) -> tuple[Tensor, Tensor, float]:
    """q and k [3, n, h, N, d] of content, position and constants, whose sums are the block's own; and the scale."""
    attention: Any = getattr(block, "attn", None)
    norm = getattr(block, "norm1", None)
    if not hasattr(attention, "_heads") or type(block).__name__.startswith("ResPost"):
        raise NotApplicable(f"the attention of {type(block).__name__} does not take normalised tokens alone")
    if not isinstance(norm, nn.LayerNorm):
        raise NotApplicable(f"the split needs a LayerNorm before attention, this is {type(norm).__name__}")
    x = content + position
    sigma = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    gamma = torch.ones_like(x[0, 0]) if norm.weight is None else norm.weight
    beta = torch.zeros_like(gamma) if norm.bias is None else norm.bias
    parts = [gamma * (part - part.mean(-1, keepdim=True)) / sigma for part in (content, position)]

    def project(u: Tensor) -> Tensor:
        return torch.stack(attention._heads(u)[:2])  # [2, n, h, N, d]

    nothing = project(torch.zeros_like(x))
    split = [project(part) - nothing for part in parts]
    split.append(project(beta.expand_as(x)))
    whole = project(F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps))
    if (sum(split) - whole).abs().max() > 1e-9 * whole.abs().max():
        raise NotApplicable("q and k are no linear functions of the normalised tokens (they are normalised themselves)")
    q, k = torch.stack(split).unbind(1)
    return q, k, float(attention.scale)


def _overlap(rotation: Any, geometry: Any, prefix: int) -> Tensor:
    """trace(R_q^T R_k) / d for all pairs of patches [N, N], mean over heads."""
    device, tokens = (
        (rotation.matrix.device, rotation.matrix.shape[2])
        if hasattr(rotation, "matrix")
        else (rotation.turn.device, prefix + rotation.turn.shape[2])
    )
    units = torch.eye(geometry.head_dim, dtype=torch.float64, device=device)
    turned = (rotation(unit.expand(1, geometry.heads, tokens, -1))[0, :, prefix:] for unit in units)  # [h, N, d]
    return torch.stack([(t @ t.mT).mean(0) for t in turned]).mean(0)


def _outward(similarity: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """From offset 0 of [2H-1][2W-1] down and to the right."""
    h, w = len(similarity) // 2, len(similarity[0]) // 2
    return {"down": [row[w] for row in similarity[h:]], "right": list(similarity[h][w:])}


def _kernel(similarity: NDArray[np.float64], offset_only: float, name: str) -> dict[str, Any]:
    """Numbers of a similarity by offset [2H-1, 2W-1]."""
    h, w = (side // 2 for side in similarity.shape)
    at = similarity[h, w]
    right = similarity[h, w + 1] if w else None
    down = similarity[h + 1, w] if h else None
    fall = name == "bias"
    if right is not None and down is not None:
        above, below = (at - right, at - down) if fall else (right, down)
    else:
        above, below = 0.0, 0.0
    y, x = np.mgrid[-h : h + 1, -w : w + 1]
    far = np.hypot(y, x) > max(h + 1, w + 1) / 2
    lines = [similarity[h, w:], similarity[h, w::-1], similarity[h:, w], similarity[h::-1, w]]
    steps = np.concatenate([np.diff(line) for line in lines])
    low, high = float(similarity.min()), float(similarity.max())
    scaled = (similarity - low) / (high - low) if fall and high > low else similarity / at if at > 0 else similarity
    return {
        "anisotropy": float(above / below) if abs(below) > 1e-12 else None,
        "aliasing": float(similarity[far].max() / at) if not fall and at > 0 and far.any() else None,
        "rises": float((steps > 1e-9 * max(abs(low), abs(high))).mean()) if steps.size else 0.0,
        "offset_only": offset_only,
        "map": similarity.tolist(),
        "scaled": scaled.tolist(),
    }
