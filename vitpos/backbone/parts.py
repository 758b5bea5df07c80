"""The parts of timm's models that vitpos gives another class: patch embeddings, attentions, and what drops patches.

Every attention takes a ``Signal`` in the argument that its block already hands to it. Legend as in ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm import layers
from timm.models import beit, eva, vision_transformer, vision_transformer_relpos
from torch import Tensor, nn

from vitpos.attention import PositionedAttention, SelfAttention, Signal, SplitBiasAttention, as_signal


class PatchEmbed(layers.PatchEmbed):
    """timm's ``PatchEmbed`` for any image whose sides are multiples of the patch size."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, N, D], or to [B, h, w, D] where timm's options ask for that."""
        _check_images(x, self.proj.in_channels)
        height, width = x.shape[-2:]
        patch_height, patch_width = self.patch_size
        if self.dynamic_img_pad:
            x = nn.functional.pad(x, (0, -width % patch_width, 0, -height % patch_height))
        elif (min(height, width) < 1 or height % patch_height or width % patch_width) and (
            height,
            width,
        ) != self.img_size:
            raise ValueError(not_a_multiple((height, width), self.patch_size))
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1))


class HybridEmbed(layers.HybridEmbed):
    """timm's ``HybridEmbed`` (patches of a convolutional network's features), likewise.

    Sides must be multiples of the network's stride times the patch size; with ``dynamic_img_pad``, which pads the
    features, of the stride.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As ``PatchEmbed.forward``."""
        _check_images(x, self.in_chans)
        size = tuple(x.shape[-2:])
        step: Any = self.feature_ratio if self.dynamic_img_pad else self.feat_ratio(as_scalar=False)
        if any(side % s for side, s in zip(size, step)) and size != tuple(self.img_size):
            raise ValueError(not_a_multiple(size, step))
        return super().forward(x)


def _check_images(x: Tensor, channels: int) -> None:
    if x.ndim != 4 or x.shape[1] != channels:
        raise ValueError(f"expected images [B, {channels}, H, W], got shape {tuple(x.shape)}")


def not_a_multiple(size: Sequence[int], patch: Sequence[int]) -> str:
    """What is wrong with an image size, and the nearest that are right."""
    near = " x ".join(
        str(s) if s % p == 0 and s else f"{s // p * p} or {s // p * p + p}" if s >= p else str(p)
        for s, p in zip(size, patch)
    )
    return (
        f"image size {size[0]}x{size[1]} is not a multiple of the patch size {patch[0]}x{patch[1]}; nearest: {near} "
        "(or build the model with dynamic_img_pad=True)"
    )


class Attention(SelfAttention, layers.Attention):
    """timm's ``Attention`` that takes a ``Signal``, or a caller's mask."""

    def forward(self, x: Tensor, attn_mask: Tensor | Signal | None = None, is_causal: bool = False) -> Tensor:
        return self.respond(x, as_signal(attn_mask, is_causal))


class AttentionRope(SelfAttention, layers.AttentionRope):
    """timm's ``AttentionRope`` that takes a ``Signal`` in place of rotary tables, or a caller's mask."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | Signal | None = None, is_causal: bool = False
    ) -> Tensor:
        _check_no_tables(rope)
        return self.respond(x, as_signal(attn_mask, is_causal))


class EvaAttention(SplitBiasAttention, eva.EvaAttention):
    """timm's ``EvaAttention``, likewise."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | Signal | None = None, is_causal: bool = False
    ) -> Tensor:
        _check_no_tables(rope)
        return self.respond(x, as_signal(attn_mask, is_causal))


class BeitAttention(SplitBiasAttention, beit.Attention):
    """timm's ``Attention`` of BEiT that takes a ``Signal``; its table of biases is read outside."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | Signal | None = None) -> Tensor:
        return self.respond(x, shared_rel_pos_bias)


class RelPosAttention(SelfAttention, vision_transformer_relpos.RelPosAttention):
    """timm's ``RelPosAttention``, likewise."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | Signal | None = None) -> Tensor:
        return self.respond(x, shared_rel_pos)


class ParallelScalingBlock(PositionedAttention, vision_transformer.ParallelScalingBlock):
    """timm's ``ParallelScalingBlock``, which holds its attention itself, that takes a ``Signal`` or a mask."""

    def forward(self, x: Tensor, attn_mask: Tensor | Signal | None = None, is_causal: bool = False) -> Tensor:
        mlp, q, k, v = self.in_proj(self.in_norm(x)).split(self.in_split, dim=-1)
        mlp = mlp if self.mlp_bias is None else mlp + self.mlp_bias
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in (q, k, v))  # [B, T, h, d]
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        attended = self.attend(q, k, v, as_signal(attn_mask, is_causal))
        mlp = self.mlp_drop(self.mlp_act(mlp))
        if self.out_proj is not None:
            y = self.out_proj(torch.cat([attended, mlp], dim=-1))
        else:
            y = self.attn_out_proj(attended) + self.mlp_out_proj(mlp)
        return x + self.drop_path(self.ls(y))


def _check_no_tables(rope: Any) -> None:
    if rope is not None:
        raise TypeError("this attention takes its rotation from a Signal in attn_mask, not as a table in rope")


PARTS: dict[type, type] = {  # timm's class: the one that takes its place
    layers.Attention: Attention,
    layers.AttentionRope: AttentionRope,
    eva.EvaAttention: EvaAttention,
    beit.Attention: BeitAttention,
    vision_transformer_relpos.RelPosAttention: RelPosAttention,
    vision_transformer.ParallelScalingBlock: ParallelScalingBlock,
    layers.PatchEmbed: PatchEmbed,
    layers.HybridEmbed: HybridEmbed,
    layers.PatchDropout: layers.PatchDropoutWithIndices,
}
PATCH_EMBEDS = (layers.PatchEmbed, layers.HybridEmbed, PatchEmbed, HybridEmbed)
ATTENTIONS = tuple(kind for old, new in PARTS.items() if issubclass(new, PositionedAttention) for kind in (old, new))


def attentions_of(block: nn.Module) -> list[Any]:
    """What attends in a block: its attention, several, or the block itself."""
    return [module for module in block.modules() if type(module) in ATTENTIONS]
