"""Attention with position: the one place that knows channel layout, prefix tokens, dtypes and kernels.

Legend: B batch, T tokens = P prefix tokens (class, registers) then N patches, h heads, d width of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from vitpos import kernels
from vitpos.encoding import (
    AnyAngles,
    Contextual,
    Layout,
    OffsetTable,
    PairBias,
    Rotations,
    SeparableAngles,
    Turns,
)


def exact(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast rounds nothing on the device of ``tensor``."""
    kind = tensor.device.type
    rounds = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if rounds else nullcontext()


@dataclass(frozen=True)
class PairRotation:
    """Rotations of channel pairs by ``turn`` [1 | B, 1 | h, N, d/2, (cos, sin)]; the first ``prefix`` tokens stay.

    ``by_layer`` as in ``Turns``.
    """

    turn: Tensor
    prefix: int
    layout: Layout
    basis: Tensor | None = None
    free_prefix: bool = False
    by_layer: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [B, h, T, d]: computed in the higher precision of the two, returned in x's dtype."""
        precise = x
        if self.basis is not None:
            precise = x.to(torch.promote_types(x.dtype, self.turn.dtype))
            with exact(precise):
                precise = precise @ self.basis.to(precise.dtype).mT
        return kernels.rotated(precise, self.turn, self.layout, self.prefix).to(x.dtype)


@dataclass(frozen=True)
class BlockRotation:
    """Rotations of blocks of channels: ``matrix`` [1 | B, 1 | h, T, d/b, b, b], the identity for prefix tokens."""

    matrix: Tensor
    free_prefix: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [B, h, T, d]: computed in the rotation's precision, returned in x's dtype."""
        blocks = x.to(self.matrix.dtype).unflatten(-1, (-1, self.matrix.shape[-1], 1))
        with exact(blocks):
            return (self.matrix @ blocks).flatten(-3).to(x.dtype)


@dataclass(frozen=True)
class Part:
    """A part of the bias: in ``Signal.biases`` what an encoding returned, in ``Signal.parts`` [1 | B, 1 | h, T, T].

    It is multiplied by ``slope``. Of what all layers share that may be a number for each of them, until a layer takes
    its own.
    """

    bias: Any  # Bias or Tensor
    slope: Any = 1.0  # float or tuple[float, ...]


@dataclass(frozen=True)
class Signal:
    """What one block's attention is told about position: an argument of the block, stored on no module.

    ``angles`` and ``biases`` are what encodings returned, for patches only. ``expand`` turns them into
    ``rotation``, ``parts`` of the bias over all tokens (one without a slope comes first) and ``contextual``. Doing so
    early shares the work between layers; doing so inside a block keeps what it is given small (gradient checkpointing
    stores that).
    ``scale`` multiplies the logits of q and k. ``mask`` is the caller's own attention mask: boolean (True: may
    attend) or added to the logits; ``causal``: no token sees those after it. ``memory``: where dense biases may be kept
    from one forward to the next. ``plain``: without kernels of our own, so that timm's values come out bit for bit.
    ``angles_by_layer``: those of each layer, where they were made in one call.
    """

    prefix: int = 0
    angles: AnyAngles | None = None
    biases: tuple[Part, ...] = ()
    contextual: tuple[Contextual, ...] = ()
    rotation: PairRotation | BlockRotation | None = None
    parts: tuple[Part, ...] = ()
    scale: float | Tensor = 1.0
    mask: Tensor | None = None
    causal: bool = False
    memory: kernels.Memory | None = None
    plain: bool = False
    angles_by_layer: tuple[AnyAngles, ...] = ()

    def of_layer(self, layer: int) -> Signal:
        """What one layer is told, where all layers' angles, or slopes of a bias, are here."""
        changes: dict[str, Any] = {}
        rotation = self.rotation
        if self.angles_by_layer:
            changes["angles"], changes["angles_by_layer"] = self.angles_by_layer[layer], ()
        elif isinstance(rotation, PairRotation) and rotation.by_layer:
            changes["rotation"] = replace(rotation, turn=rotation.turn[layer], by_layer=False)
        if any(isinstance(part.slope, tuple) for part in self.parts):
            slopes = [part.slope[layer] if isinstance(part.slope, tuple) else part.slope for part in self.parts]
            changes["parts"] = tuple(replace(part, slope=slope) for part, slope in zip(self.parts, slopes))
        return self.but(**changes) if changes else self

    def but(self, **changes: Any) -> Signal:
        """The same signal with other values in some fields, as ``dataclasses.replace`` makes it, in a tenth of its
        time."""
        other = object.__new__(Signal)
        vars(other).update(vars(self), **changes)
        return other

    def expand(self) -> Signal:
        """The same signal with ``angles`` and ``biases`` turned into what attention applies."""
        if self.angles is None and not self.biases:
            return self
        rotation, contextual, parts = self.rotation, self.contextual, self.parts
        if self.angles is not None:
            rotation = expand_angles(self.angles, self.prefix)
        for place, part in enumerate(self.biases):
            if isinstance(part.bias, Contextual):
                contextual = (*contextual, part.bias)
                continue
            dense = expand_bias(part.bias, self.prefix, self.memory, place, self.plain)
            if part.slope != 1.0:
                parts = (*parts, replace(part, bias=dense))
            elif len(parts) and parts[0].slope == 1.0:
                parts = (Part(parts[0].bias + dense), *parts[1:])
            else:
                parts = (Part(dense), *parts)
        return self.but(angles=None, biases=(), contextual=contextual, rotation=rotation, parts=parts)

    @property
    def bias(self) -> Tensor | None:
        """The whole bias of an expanded signal of one layer, [1 | B, 1 | h, T, T]."""
        total = None
        for part in self.parts:
            total = kernels.sloped(part.bias, part.slope, total)
        return total

    @property
    def bias_and_slope(self) -> tuple[Tensor | None, float]:
        """The same, not multiplied out where it need not be: some kernels do that by the way."""
        if len(self.parts) == 1:
            return self.parts[0].bias, self.parts[0].slope
        return self.bias, 1.0

    @property
    def small(self) -> bool:
        """Whether what is still to be expanded takes little memory."""
        tables = all(isinstance(part.bias, OffsetTable) for part in self.biases)
        return tables and isinstance(self.angles, (type(None), SeparableAngles))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        nothing = self.angles is None and self.rotation is None and self.mask is None
        nothing = nothing and len(self.biases) + len(self.contextual) + len(self.parts) == 0
        return nothing and not (self.causal or self.plain) and not isinstance(self.scale, Tensor) and self.scale == 1.0


def expand_angles(angles: AnyAngles, prefix: int) -> PairRotation | BlockRotation:
    """The rotation of all tokens: prefix tokens turn by angle 0, so that their q and k stay bit for bit."""
    if isinstance(angles, Rotations):
        matrix = angles.matrix
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        before = identity.expand(*matrix.shape[:2], prefix, *matrix.shape[3:])
        return BlockRotation(torch.cat([before, matrix], dim=2), angles.free_prefix)
    if isinstance(angles, Turns):
        return PairRotation(
            torch.stack([angles.cos, angles.sin], dim=-1), prefix, angles.layout, by_layer=angles.by_layer
        )
    if isinstance(angles, SeparableAngles):
        turn = kernels.turns(angles.y, angles.x, angles.units).unsqueeze(0)
    else:
        turn = kernels.cos_sin(angles.phase)
    return PairRotation(turn, prefix, angles.layout, angles.basis, angles.free_prefix)


def expand_bias(
    bias: OffsetTable | PairBias,
    prefix: int,
    memory: kernels.Memory | None = None,
    place: int = 0,
    plain: bool = False,
) -> Tensor:
    """The bias of all token pairs [1 | B, 1 | h, T, T]; ``memory`` and ``place``: see ``kernels.Memory``."""
    if isinstance(bias, OffsetTable):
        heads, rows, columns = bias.values.shape
        if not plain and kernels.eager(bias.values):
            if memory is not None:
                return memory.dense_bias(place, bias.values, bias.prefix, prefix)
            return kernels.dense_bias(bias.values, bias.prefix, prefix)
        index, flat = kernels.offsets((rows + 1) // 2, (columns + 1) // 2, bias.values.device), bias.values.flatten(1)
        if torch.compiler.is_compiling():  # the faster of the two in generated code, and only there
            dense = flat[:, index].unsqueeze(0)
        else:
            dense = flat.index_select(1, index.flatten()).reshape(1, heads, *index.shape)
    else:
        dense = bias.values
    if not prefix:
        return dense
    if bias.prefix is None:
        return F.pad(dense, (prefix, 0, prefix, 0))
    from_prefix, to_prefix, between = bias.prefix.to(dense.dtype)[None, :, :, None, None].unbind(2)  # [1, 1 | h, 1, 1]
    batch, heads, count, _ = dense.shape
    heads = max(heads, from_prefix.shape[1])
    dense = dense.expand(-1, heads, -1, -1)
    left = torch.cat(
        [between.expand(batch, heads, prefix, prefix), to_prefix.expand(batch, heads, count, prefix)], dim=2
    )
    right = torch.cat([from_prefix.expand(batch, heads, prefix, count), dense], dim=2)
    return torch.cat([left, right], dim=3)


def contextual_bias(bias: Contextual, prefix: int, q: Tensor, k: Tensor) -> Tensor:
    """The bias [B, h, T, T] of q (already scaled) and k (likewise) against the vectors of each pair's bucket."""
    vectors = bias.on_q if bias.on_q is not None else bias.on_k
    if vectors is None:
        raise TypeError("a contextual bias needs vectors for q, for k, or both")
    buckets = F.pad(bias.buckets, (prefix, 0, prefix, 0), value=vectors.shape[1] - 1).unsqueeze(1)
    buckets = buckets.expand(q.shape[0], q.shape[1], -1, -1)  # [B, h, T, T]
    parts = []
    if bias.on_q is not None:
        parts.append((q @ bias.on_q.to(q.dtype).mT).gather(-1, buckets))
    if bias.on_k is not None:
        parts.append((k @ bias.on_k.to(k.dtype).mT).gather(-1, buckets.mT).mT)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def with_mask(bias: Tensor | None, mask: Tensor | None, is_causal: bool, q: Tensor) -> Tensor | None:
    """Position bias, caller's mask and causality as one tensor [1 | B, 1 | h, T, T], or None; of q's dtype where there
    is a mask."""
    if is_causal:
        causal = q.new_ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        if mask is None:
            mask = causal
        else:
            mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(q.dtype) if bias is None else bias.to(q.dtype) + mask.to(q.dtype)


def as_signal(given: Signal | Tensor | None, causal: bool = False) -> Signal:
    """What an attention was given, where a tensor is a caller's mask."""
    if isinstance(given, Signal):
        return given
    return Signal(mask=given, causal=causal) if given is not None or causal else _NOTHING_TOLD


_NOTHING_TOLD = Signal()


class PositionedAttention:
    """Mixed into what holds timm's attention parameters: softmax attention that takes a ``Signal``."""

    def attend(
        self: Any, q: Tensor, k: Tensor, v: Tensor, signal: Signal | Tensor | None, rotated: bool = False
    ) -> Tensor:
        """q, k and v [B, h, T, d], normalized if they are to be, to [B, T, h d]; a tensor is a caller's mask.

        ``rotated``: q and k are so already.
        """
        batch, heads, tokens, width = q.shape
        signal = as_signal(signal).expand()
        if isinstance(signal.scale, Tensor) or signal.scale != 1.0:
            q = q * signal.scale
        rotation, prefix = signal.rotation, signal.prefix
        apart = rotation is not None and not rotated and rotation.free_prefix and prefix
        plain = signal.plain or signal.mask is not None or signal.causal  # a query may be left without a key
        bias, slope = signal.bias_and_slope
        if bias is not None and (signal.contextual or signal.mask is not None or signal.causal or apart):
            bias, slope = kernels.sloped(bias, slope).to(q.dtype), 1.0
        for contextual in signal.contextual:
            scaled = contextual_bias(contextual, signal.prefix, q * self.scale, k * (self.scale * signal.scale))
            bias = scaled if bias is None else bias + scaled
        bias = with_mask(bias, signal.mask, signal.causal, q)
        if rotation is None or rotated:
            x = self._attend(q, k, v, bias, plain, slope)
        elif not apart:
            x = self._attend(rotation(q).to(v.dtype), rotation(k).to(v.dtype), v, bias, plain, slope)
        else:
            # Patches see each other rotated, and prefix keys (zero here) through logits supplied as a bias. A mask may
            # have been one of keys for all queries.
            bias = None if bias is None else bias.expand(*bias.shape[:-2], tokens, tokens)
            to_prefix = self.scale * q[:, :, prefix:] @ k[:, :, :prefix].mT  # [B, h, N, P]
            supplied = F.pad(to_prefix, (0, tokens - prefix))
            patches_bias = supplied if bias is None else supplied + bias[..., prefix:, :]
            rotated_k = F.pad(rotation(k)[:, :, prefix:], (0, 0, prefix, 0))
            patches = self._attend(rotation(q)[:, :, prefix:].to(v.dtype), rotated_k.to(v.dtype), v, patches_bias)
            before = self._attend(q[:, :, :prefix], k, v, None if bias is None else bias[..., :prefix, :])
            x = torch.cat([before, patches], dim=2)
        x = x.transpose(1, 2)
        if torch.compiler.is_exporting():  # what lowers the graph later may pick a kernel of another memory layout
            x = x.clone(memory_format=torch.contiguous_format)
        return x.reshape(batch, tokens, heads * width)

    def _attend(
        self: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plain: bool = False, slope: float = 1.0
    ) -> Tensor:
        """Softmax attention [B, h, queries, d] by the fused kernel or written out, as timm's switch says."""
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            if not (dropout or plain):
                if kernels.attends_faster(q, k, v, bias):
                    return kernels.attend(q, k, v, bias, q.shape[-1] ** -0.5, slope)
                if bias is not None and kernels.spares_memory(q, k, v, bias, slope):
                    return kernels.attend_fused(q, k, v, bias, slope)
            mask = None if bias is None else kernels.sloped(bias, slope).to(q.dtype)
            if kernels.transformed():  # some rules are not there for what the next line would choose
                return torch._scaled_dot_product_attention_math(q, k, v, attn_mask=mask, dropout_p=dropout)[0]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        logits = (q * self.scale) @ k.transpose(-2, -1)
        logits = logits if bias is None else logits + kernels.sloped(bias, slope).to(q.dtype)
        return self.attn_drop(logits.softmax(dim=-1)) @ v


_NOTHING = (type(None), nn.Identity)


class SelfAttention(PositionedAttention):
    """Mixed into timm's attention classes: their parameters and options, in their order of operations.

    q, k and v come from one projection ``qkv`` or from three, with a bias in one piece or in three; the norms of
    q and k, the norm of the output and a gate on it are there or not; key heads may be fewer than query heads.
    """

    def respond(self: Any, x: Tensor, signal: Signal | Tensor | None) -> Tensor:
        """Tokens [B, T, D] to what attention adds to them."""
        parts = self._modules  # asked itself, since a module looks long for an attribute that it has not
        gate = None if parts.get("gate") is None else self.gate(x).sigmoid()
        signal = as_signal(signal).expand()
        rotated = self._splits(x, signal)
        q, k, v = self._split(x, signal.rotation) if rotated else self._heads(x)
        x = self.attend(q, k, v, signal, rotated)
        x = x if parts.get("norm") is None else self.norm(x)
        x = x if gate is None else x * gate
        return self.proj_drop(self.proj(x))

    def _splits(self: Any, x: Tensor, signal: Signal) -> bool:
        """Whether q and k can be rotated where the projection has left them."""
        rotation = signal.rotation
        parts = self._modules
        normed = not (isinstance(parts.get("q_norm"), _NOTHING) and isinstance(parts.get("k_norm"), _NOTHING))
        if parts.get("qkv") is None or normed or signal.contextual or (signal.plain and rotation is not None):
            return False
        if rotation is None:
            return kernels.eager(x)
        if not isinstance(rotation, PairRotation) or rotation.basis is not None:
            return False
        return not (rotation.free_prefix and rotation.prefix) and kernels.eager(x, rotation.turn)

    def _split(self: Any, x: Tensor, rotation: PairRotation | None) -> tuple[Tensor, Tensor, Tensor]:
        packed = self._packed(x)
        if rotation is None:
            return kernels.split(packed)
        if _has_readers(self.qkv):
            packed = packed.clone(memory_format=torch.contiguous_format)
        return kernels.split(packed, rotation.turn, rotation.layout, rotation.prefix)

    def _heads(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [B, h, T, d] each."""
        batch, tokens, _ = x.shape
        if self.qkv is not None:
            q, k, v = self._packed(x).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
            q, k, v = (part.reshape(batch, tokens, -1, self.head_dim).transpose(1, 2) for part in parts)
        if self._modules.get("q_norm") is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if k.shape[1] != self.num_heads:  # grouped queries: rotations may differ by query head, so expand before them
            k, v = (t.repeat_interleave(self.num_heads // t.shape[1], dim=1) for t in (k, v))
        return q, k, v

    def _packed(self: Any, x: Tensor) -> Tensor:
        """q, k and v in one, [B, T, 3, h, d]."""
        fused = self._fused(x)
        batch, tokens, width = fused.shape
        return fused.reshape(batch, tokens, 3, self.num_heads, width // (3 * self.num_heads))

    def _fused(self: Any, x: Tensor) -> Tensor:
        return self.qkv(x)


class SplitBiasAttention(SelfAttention):
    """The same, whose projection may have its bias in three pieces."""

    def _fused(self: Any, x: Tensor) -> Tensor:
        if self.q_bias is None:
            return self.qkv(x)
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        return self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)


_linear = nn.Linear.forward  # as it is now: whoever replaces it may keep what it returns


def _has_readers(module: nn.Module) -> bool:
    """Whether someone beside attention may hold on to what the module returns."""
    hooks = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks, _global_forward_hooks)
    replaced = type(module) is not nn.Linear or "forward" in vars(module) or nn.Linear.forward is not _linear
    return replaced or any(hooks)
