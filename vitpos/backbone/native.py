"""Encodings that timm's models hold in modules of their own: what ``native`` stands for beside ``pos_embed``.

The modules stay where timm has them, under their names; at each forward the model hands them to these classes,
which say what attention is told. On the model's own grid that is timm's value, bit for bit; on others, where timm
refuses the image, it is what timm's resizing of the model would give; anywhere else its formula. Autocast rounds what
timm's small networks of relative position say, but not here.

Legend as in ``encoding.py``; L layers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from timm import layers
from torch import Tensor

from vitpos.encoding import Bias, PairBias, Turns, offset_bias
from vitpos.encodings.none import Native
from vitpos.positions import Extent, Positions, sample_plane, sizes_left_open, surely_equal, vector

_Cat, _Mixed, _DinoV3 = layers.RotaryEmbeddingCat, layers.RotaryEmbeddingMixed, layers.RotaryEmbeddingDinoV3
_MRope = layers.RotaryEmbeddingMRope
ROTARY = (_Cat, _Mixed, _DinoV3, _MRope)


class OwnRotary(Native):
    """The rotary tables of an Eva model's module ``rope``."""

    model_parameter = "rope"

    def angles(self, pos: Positions, rope: Any) -> Turns:  # type: ignore[override]
        half = isinstance(rope, _MRope) or getattr(rope, "rotate_half", False)
        by_layer = isinstance(rope, _Mixed)
        frozen = isinstance(rope, _DinoV3) and sizes_left_open() and not rope.training  # its table freezes the sides
        if pos.cells and not frozen:
            sin, cos = _rotary_table(rope, pos.extent).chunk(2, dim=-1)  # [N, d] or [L, h, N, d], pairs twice
            pairs = slice(cos.shape[-1] // 2) if half else slice(None, None, 2)
            sin, cos = sin[..., pairs], cos[..., pairs]
            if pos.full:
                sin, cos = sin.unsqueeze(-4 if by_layer else 0), cos.unsqueeze(-4 if by_layer else 0)
            else:
                index = (pos.coords[..., 0] * pos.extent[1] + pos.coords[..., 1]).long()
                sin, cos = sin[..., index, :], cos[..., index, :]  # [B, N, d/2] or [L, h, B, N, d/2]
                if by_layer:
                    sin, cos = sin.transpose(1, 2), cos.transpose(1, 2)
        else:
            phase = _rotary_phase(rope, pos)  # [1 | B, N, d/2] or [L, h, 1 | B, N, d/2]
            phase = phase.transpose(1, 2) if by_layer else phase
            sin, cos = phase.sin(), phase.cos()
        if not by_layer:
            sin, cos = (t.reshape(-1, 1, *t.shape[-2:]) for t in (sin, cos))  # [1 | B, 1, N, d/2]
        return Turns(cos, sin, "half" if half else "interleaved", by_layer)


def _rotary_table(rope: Any, extent: Extent) -> Tensor:
    """timm's table of sines, then cosines, of a grid: [N, 2 d], or [L, h, N, 2 d] for mixed frequencies."""
    if getattr(rope, "feat_shape", None) is not None:
        if surely_equal(rope.feat_shape, extent):
            return rope.get_embed()
        kind = type(rope)
        if kind is _Cat:  # its get_embed ignores the shape where it has a table
            augment = rope.training and rope.aug_active
            dtype = None if augment else rope.pos_embed.dtype  # what timm's resizing keeps
            return rope._build_embed_cat(list(extent), rope.bands, dtype=dtype, augment=augment)
    return rope.get_embed(list(extent))


def _rotary_phase(rope: Any, pos: Positions) -> Tensor:
    """The same module's phases at any coordinates: [1 | B, N, d/2], or [L, h, 1 | B, N, d/2] for mixed frequencies."""
    at, sides = pos.coords, pos.extent
    kind = type(rope)
    if kind is _DinoV3:
        size = vector(sides, at)
        size = {"separate": size, "min": size.amin(), "max": size.amax()}[rope.normalize_coords]
        at = 2 * (at + 0.5 + rope.grid_offset) / size - 1
        bands = 2 * math.pi / rope.periods.to(at.dtype)
    elif kind is _MRope:
        return torch.cat([torch.zeros_like(at[..., :1]), at], dim=-1)[..., rope.axis] * rope.inv_freq.to(at.dtype)
    elif kind is _Cat:
        at = at + rope.grid_offset
        if rope.ref_feat_shape is not None:
            at = at / vector(sides, at) * at.new_tensor(rope.ref_feat_shape)
        bands = rope.bands.to(at.dtype)
    at = at.flip(-1) if rope.grid_indexing == "xy" else at
    if kind is _Mixed:
        first, second = rope.freqs.to(at.dtype)[..., None, None, :]  # [L, h, 1, 1, d/2]
        return at[..., :1] * first + at[..., 1:] * second
    return (at.unsqueeze(-1) * bands).flatten(-2)


class OwnBias(Native):
    """The biases of a block: a table (BEiT, relpos) or a small network of the offset (relpos)."""

    model_parameter = "bias"
    per_layer = True

    def bias(self, pos: Positions, module: Any) -> Bias:  # type: ignore[override]
        if isinstance(module, layers.RelPosMlp):
            divides = module.mode != "swin" or min(module.window_size) > 1  # timm's table is NaN for a side of 1
            if pos.full and divides and surely_equal(pos.extent, module.window_size):
                first = module.prefix_tokens
                return PairBias(module.get_bias()[:, :, first:, first:])
            return offset_bias(partial(_network, module), pos, None)
        height, width = (2 * side - 1 for side in module.window_size)
        table = module.relative_position_bias_table  # [(2H-1)(2W-1), then 0 or 3 rows for prefix tokens; h]
        prefix = table[height * width :].mT if len(table) > height * width else None
        plane = table[: height * width].unflatten(0, (height, width))
        return offset_bias(partial(_table, plane, tuple(module.window_size)), pos, prefix)


class OwnSharedBias(OwnBias):
    """The biases that all blocks of a model share."""

    model_parameter = "shared_bias"
    per_layer = False


OWN = {cls.model_parameter: cls for cls in (OwnRotary, OwnSharedBias, OwnBias)}  # by the name the model hands it under


def _network(module: Any, offset: Tensor, extent: Extent) -> Tensor:
    """[h, ...] of offsets [..., 2], in timm's order of operations (a side of 1 divides by 1, where timm's is NaN)."""
    if module.mode == "swin":
        reference = extent if module.pretrained_window_size[0] <= 0 else module.pretrained_window_size
        offset = offset / vector([max(side - 1, 1) for side in reference], offset) * 8
        spaced = offset.sign() * (1.0 + offset.abs()).log2() / math.log2(8)
    else:
        spaced = offset.sign() * (1.0 + offset.abs()).log()
    values = module.bias_act(module.mlp(spaced.to(module.mlp.fc1.weight.dtype)))
    values = values if module.bias_gain is None else module.bias_gain * values
    return values.movedim(-1, 0)


def _table(plane: Tensor, window: Extent, offset: Tensor, extent: Extent) -> Tensor:
    """[h, ...] of offsets [..., 2]: entries of ``plane`` [2H-1, 2W-1, h], between them bilinear.

    On a grid other than the ``window`` of the table, entry k away from the centre lies at an offset of
    1 + q + ... + q^(k-1), with q such that the last one reaches the end of the grid: timm's resizing, after BEiT's.
    """
    at = offset + offset.new_tensor(window) - 1
    if not surely_equal(extent, window):
        resized = torch.stack([_entry(offset[..., axis], window[axis], extent[axis]) for axis in (0, 1)], dim=-1)
        at = torch.where((vector(extent, at) == at.new_tensor(window)).all(), at, resized)
    return sample_plane(plane, at).movedim(-1, 0)


def _entry(offset: Tensor, source: int, target: int) -> Tensor:
    """Where in the 2 source - 1 entries of one axis an ``offset`` lies, as a real number."""
    q = _ratio(source, target)
    away = [0.0]
    for k in range(source - 1):
        away.append(away[-1] + q**k)
    places = vector(away, offset)
    if source == 1:
        return torch.zeros_like(offset)
    right = torch.bucketize(offset.abs(), places).clamp(1, source - 1)
    left = right - 1
    part = (offset.abs() - places[left]) / (places[right] - places[left])
    return source - 1 + offset.sign() * (left + part.clamp(0, 1))


def _ratio(source: int, target: int) -> Any:
    """The q of ``_table`` by bisection to 1e-6: a number, or a tensor where ``target`` is left open."""
    left_open = sizes_left_open()
    low: Any = 1.01
    high: Any = 1.5
    if left_open:
        low, high = torch.tensor([low, high], dtype=torch.float64)
    for _ in range(19):
        q = (low + high) / 2
        far = (1 - q ** (source - 1)) / (1 - q) > target - 1
        if left_open:
            low, high = torch.where(far, low, q), torch.where(far, q, high)
        else:
            low, high = (low, q) if far else (q, high)
    return q
