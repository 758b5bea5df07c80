"""Attention with position: the one place that knows channel layout, prefix tokens, dtypes and kernels.

Legend: B batch, T tokens = P prefix tokens (class, registers) followed by N patches, h heads, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitpos.encoding import Angles, Bias, Layout, OffsetTable, SeparableAngles


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [1 | B, 1 | h, T, d/2] of all tokens; those of prefix tokens are 1 and 0."""

    cos: Tensor
    sin: Tensor
    layout: Layout


@dataclass(frozen=True)
class Signal:
    """What one block's attention is told about position: an argument of the block, stored on no module.

    ``angles`` and ``biases`` are what encodings returned, for patches only. ``expand`` turns them into
    ``rotation`` and ``bias`` [1 | B, 1 | h, T, T] over all tokens; doing so early shares the work between
    layers, doing so inside a block keeps what it is given small (gradient checkpointing stores that).
    ``mask`` is the caller's own attention mask: boolean (True: may attend) or added to the logits.
    """

    prefix: int = 0
    angles: Angles | SeparableAngles | None = None
    biases: tuple[Bias, ...] = ()
    rotation: Rotation | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None

    def expand(self) -> Signal:
        """The same signal with nothing structured left in it."""
        rotation, bias = self.rotation, self.bias
        if self.angles is not None:
            rotation = expand_angles(self.angles, self.prefix)
        for patches in self.biases:
            dense = F.pad(expand_bias(patches), (self.prefix, 0, self.prefix, 0))
            bias = dense if bias is None else bias + dense
        return replace(self, angles=None, biases=(), rotation=rotation, bias=bias)

    @property
    def empty(self) -> bool:
        return self.angles is None and not self.biases and self.rotation is None and self.bias is None


def expand_angles(angles: Angles | SeparableAngles, prefix: int) -> Rotation:
    """Cosines and sines of the angles of all patches, after ``prefix`` tokens that do not rotate."""
    if isinstance(angles, SeparableAngles):
        phase = (angles.y.unsqueeze(-2) + angles.x.unsqueeze(-3)).flatten(-3, -2).unsqueeze(0)  # [1, 1 | h, N, d/2]
    else:
        phase = angles.phase
    phase = F.pad(phase, (0, 0, prefix, 0))  # a prefix token has angle 0: its q and k stay bit for bit
    return Rotation(phase.cos(), phase.sin(), angles.layout)


def expand_bias(bias: Bias) -> Tensor:
    """The bias of all patch pairs [1 | B, 1 | h, N, N]; an offset table is read without an index tensor."""
    if not isinstance(bias, OffsetTable):
        return bias
    heads, rows, columns = bias.values.shape
    height, width = (rows + 1) // 2, (columns + 1) // 2
    # Window (a, b) of the table holds, at (k, l), the offset (a + k, b + l) - (H-1, W-1). Flipping the table's
    # result along k and l makes that (a - k', b - l'): query minus key.
    windows = bias.values.unfold(1, height, 1).unfold(2, width, 1)  # [1 | h, H, W, H, W]
    dense = windows.flip(-2, -1).reshape(heads, height * width, height * width)
    return dense.unsqueeze(0)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the channel pairs of x [B, h, T, d]; computed in the rotation's precision, returned in x's dtype."""
    pairs = x.to(rotation.cos.dtype)
    if rotation.layout == "interleaved":
        first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = pairs.chunk(2, dim=-1)
    turned = (
        first * rotation.cos - second * rotation.sin,
        first * rotation.sin + second * rotation.cos,
    )
    together = torch.stack(turned, dim=-1).flatten(-2) if rotation.layout == "interleaved" else torch.cat(turned, -1)
    return together.to(x.dtype)


def logit_bias(signal: Signal, is_causal: bool, q: Tensor) -> Tensor | None:
    """Position bias, caller's mask and causality as one tensor [1 | B, 1 | h, T, T] of q's dtype, or None."""
    bias = None if signal.bias is None else signal.bias.to(q.dtype)
    mask = signal.mask
    if is_causal:
        causal = q.new_ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        mask = (
            causal
            if mask is None
            else mask & causal
            if mask.dtype == torch.bool
            else mask.masked_fill(~causal, -torch.inf)
        )
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(q.dtype) if bias is None else bias + mask.to(q.dtype)


class PositionedAttention:
    """Mixed into timm's ``Attention``: the same parameters and options, and a ``Signal`` in ``attn_mask``."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | Signal | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, _ = x.shape
        signal = (attn_mask if isinstance(attn_mask, Signal) else Signal(mask=attn_mask)).expand()
        gate = None if self.gate is None else self.gate(x).sigmoid()

        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)  # [B, h, T, d]
        if signal.rotation is not None:
            q, k = rotate(q, signal.rotation).to(v.dtype), rotate(k, signal.rotation).to(v.dtype)
        bias = logit_bias(signal, is_causal, q)

        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
        else:
            logits = (q * self.scale) @ k.transpose(-2, -1)  # [B, h, T, T]
            logits = logits if bias is None else logits + bias
            x = self.attn_drop(logits.softmax(dim=-1)) @ v

        x = self.norm(x.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        x = x if gate is None else x * gate
        return self.proj_drop(self.proj(x))
