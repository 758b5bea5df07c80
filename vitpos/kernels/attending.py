"""Attention whose bias learns, or has a slope or another dtype than q, or in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from vitpos.kernels.when import eager

CHUNK = 350_000  # logits of a thread that are worked on at a time, so that they stay in its cache


def attends_faster(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether ``attend`` may stand in for the fused kernel, and was measured to be faster."""
    if torch.compiler.is_compiling():  # before the processor is asked
        return False
    graded = torch.is_grad_enabled()
    learns = graded and bias is not None and bias.requires_grad
    if q.dtype == torch.bfloat16:
        trains = graded and (q.requires_grad or k.requires_grad or v.requires_grad)
        faster = q.shape[-2] <= _most_tokens(trains, learns)
    else:
        faster = learns and not torch.is_autocast_enabled("cpu")
    if not (faster and q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype and eager(q, k, v)):
        return False
    return bias is None or (bias.ndim == 4 and bias.shape[-2:] == (q.shape[-2],) * 2 and eager(bias))


@lru_cache
def _most_tokens(trains: bool, learns: bool) -> float:
    """Up to which bfloat16 attention is faster written out on this processor; ``learns`` is the bias."""
    if not torch.cpu._is_avx512_bf16_supported():
        return 0
    if learns:  # which the fused kernel does not take
        return math.inf
    if torch.cpu._is_amx_tile_supported():  # the fused kernel multiplies tiles too, forwards
        return 750 if trains else 0
    return 1100 if trains else 600


def sloped(bias: Tensor, slope: float, total: Tensor | None = None) -> Tensor:
    """``slope * bias``, added to ``total``."""
    if total is None:
        return bias if slope == 1.0 else bias * slope
    if torch.compiler.is_compiling():  # which knows no alpha that a graph takes as an input
        return total + bias * slope
    return torch.add(total, bias, alpha=slope)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, slope: float = 1.0) -> Tensor:
    """softmax(scale q k^T + slope bias) v, [B, h, T, d], with a gradient for ``bias`` [1 | B, 1 | h, T, T] too.

    Written out piece by piece, where the fused kernel refuses a bias that learns. Logits and softmax are in float32 or
    better; the softmax [B, h, T, T] is kept for the gradient, likewise where the bias learns, else in q's dtype: as
    exact as what PyTorch has for either. At least one key must be allowed to each query.
    """
    return _Attend.apply(q, k, v, bias, scale, slope).transpose(1, 2)


def explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, slope: float = 1.0) -> Tensor:
    """The plain path of ``attend``."""
    return _soft(q, k, bias, scale, slope) @ v


def _soft(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, slope: float) -> Tensor:
    logits = (q * scale) @ k.mT
    return (logits if bias is None else logits + sloped(bias, slope).to(q.dtype)).softmax(dim=-1)


def _plain_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, slope: float, *, grad: Tensor, learns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of q, k, v and, if it ``learns``, the bias, to be differentiated or batched."""
    soft = _soft(q, k, bias, scale, slope)
    change = grad @ v.mT
    change = soft * (change - (change * soft).sum(-1, keepdim=True))
    of_bias = None
    if learns and bias is not None:
        of_bias = sloped(change, slope)
        for dim in (0, 1):
            of_bias = of_bias.sum(dim, keepdim=True) if bias.shape[dim] == 1 else of_bias
        of_bias = of_bias.to(bias.dtype)
    return change @ k * scale, change.mT @ q * scale, soft.mT @ grad, of_bias


class _Attend(torch.autograd.Function):
    """Returns [B, T, h, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, slope: float) -> Tensor:
        batch, heads, tokens, width = q.shape
        ctx.scale, ctx.slope, learns = scale, slope, any(ctx.needs_input_grad)
        kind = torch.promote_types(q.dtype, torch.float32)
        kept = kind if ctx.needs_input_grad[3] else q.dtype
        soft = q.new_empty(batch, heads, tokens, tokens, dtype=kept) if learns else None
        out = q.new_empty(batch, tokens, heads, width)
        with torch.autocast("cpu", enabled=False):
            for pairs, rows, (logits,) in _pieces(q, kind, scratch=1):
                some = (*pairs, rows)
                queries, keys, values = q[some].flatten(0, 1), k[pairs].flatten(0, 1), v[pairs].flatten(0, 1)
                base = logits
                if bias is not None:
                    shape = *q[some].shape[:3], tokens
                    base = _part(bias, some).to(kind).expand(shape).flatten(0, 1)
                beta = 0 if bias is None else slope
                torch.baddbmm(base, queries.to(kind), keys.to(kind).mT, beta=beta, alpha=scale, out=logits)
                here = soft[some].flatten(0, 1) if soft is not None and kept == kind else logits
                torch.softmax(logits, dim=-1, out=here)
                if soft is not None and kept != kind:
                    here = soft[some].flatten(0, 1).copy_(here)
                out.transpose(1, 2)[some] = torch.bmm(here.to(q.dtype), values).view_as(q[some])
        ctx.save_for_backward(q, k, v, bias, soft)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, bias, soft = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad[:4], grad.transpose(1, 2)
        if torch.is_grad_enabled() or not eager(grad):  # the gradient is itself to be differentiated, or batched
            return *_plain_gradients(q, k, v, bias, ctx.scale, ctx.slope, grad=grad, learns=needs[3]), None, None
        of_q, of_k, of_v = (q.new_empty(q.shape) for _ in range(3))
        of_bias = None
        if needs[3]:
            kind = torch.promote_types(bias.dtype, torch.float32)
            of_bias = (bias.new_empty if len(q) else bias.new_zeros)(bias.shape, dtype=kind)  # contiguous
        with torch.autocast("cpu", enabled=False):
            # The gradient of the logits is that of the bias, or is added to it from ``room``.
            for pairs, rows, (of_soft, room) in _pieces(q, soft.dtype, scratch=2):
                some = (*pairs, rows)
                queries, here, of_out = (t[some].flatten(0, 1) for t in (q, soft, grad))
                keys, values = k[pairs].flatten(0, 1), v[pairs].flatten(0, 1)
                if soft.dtype == q.dtype:
                    torch.bmm(of_out, values.mT, out=of_soft)
                else:
                    of_soft.copy_(torch.bmm(of_out, values.mT))
                part = None if of_bias is None else _part(of_bias, some)
                first = bias is not None and all(s > 1 or pair.start == 0 for s, pair in zip(bias.shape, pairs))
                in_place = first and part is not None and (part.shape, part.dtype) == (soft[some].shape, soft.dtype)
                of_logits = room if part is None or not in_place else part.flatten(0, 1)
                torch._softmax_backward_data(of_soft, here, -1, here.dtype, grad_input=of_logits)
                if part is not None and not in_place:
                    summed = of_logits.view_as(soft[some]).sum_to_size(part.shape)
                    part.copy_(summed) if first else part.add_(summed)
                of_logits, here = of_logits.to(q.dtype), here.to(q.dtype)
                _product(of_q[some], of_logits, keys, ctx.scale)
                _product(of_k[pairs], of_logits.mT, queries, ctx.scale, more=rows.start > 0)
                _product(of_v[pairs], here.mT, of_out, more=rows.start > 0)
        of_bias = None if of_bias is None else sloped(of_bias, ctx.slope).to(bias.dtype)
        return of_q, of_k, of_v, of_bias, None, None


def spares_memory(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slope: float) -> bool:
    """Whether ``attend_fused`` may stand in for the fused kernel, and spares memory: the bias does not learn, and what
    the kernel adds is not the bias itself but a multiple, or of another dtype."""
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return False
    if bias.requires_grad or (slope == 1.0 and bias.dtype == q.dtype) or not eager(q, k, v, bias):
        return False
    like = q.new_empty(()).expand(bias.shape)
    return bool(len(q)) and torch._fused_sdp_choice(q, k, v, like) == SDPBackend.FLASH_ATTENTION.value


def attend_fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slope: float = 1.0) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope bias) v, [B, h, T, d], by the fused kernel, for a ``bias`` that does not learn.

    What the kernel adds is made again for the gradient: layers that share a bias hold it once.
    """
    return _Fused.apply(q, k, v, bias, slope)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        mask = sloped(bias, slope).to(q.dtype)
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
        ctx.save_for_backward(q, k, v, bias, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, bias, out, logsumexp = ctx.saved_tensors
        if torch.is_grad_enabled() or not eager(grad):  # the gradient is itself to be differentiated, or batched
            return *_plain_gradients(q, k, v, bias, q.shape[-1] ** -0.5, ctx.slope, grad=grad, learns=False), None
        mask = sloped(bias, ctx.slope).to(q.dtype)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logsumexp, 0.0, False, attn_mask=mask
        )
        return *gradients, None, None


def _product(to: Tensor, left: Tensor, right: Tensor, scale: float = 1.0, more: bool = False) -> None:
    """Write ``scale * left @ right`` to a contiguous ``to``, or add it with ``more``."""
    to = to.flatten(0, 1)
    torch.baddbmm(to, left, right, beta=int(more), alpha=scale, out=to)


def _pieces(q: Tensor, kind: torch.dtype, scratch: int) -> Iterator[tuple[tuple[slice, slice], slice, list[Tensor]]]:
    """Some images, or some heads of one image, or some queries of one head, at a time; with room for their logits."""
    batch, heads, tokens, _ = q.shape
    most = max(1, batch)  # images
    size = CHUNK * min(torch.get_num_threads(), most * heads)
    rows = math.ceil(tokens / math.ceil(tokens**2 / size))
    count = max(1, size // tokens**2)  # of heads
    images, some = (min(count // heads, most), heads) if count >= heads else (1, count)
    room = [q.new_empty(images * some * rows * tokens, dtype=kind) for _ in range(scratch)]
    for b in range(0, batch, images):
        for h in range(0, heads, some):
            pairs = min(images, batch - b) * min(some, heads - h)
            for start in range(0, tokens, rows):
                shape = (pairs, min(rows, tokens - start), tokens)
                yield (
                    (slice(b, b + images), slice(h, h + some)),
                    slice(start, start + rows),
                    [part[: math.prod(shape)].view(shape) for part in room],
                )


def _part(bias: Tensor, some: tuple[slice, ...]) -> Tensor:
    """Of [1 | B, 1 | h, T, T]."""
    return bias[tuple(slice(None) if size == 1 else one for size, one in zip(bias.shape[:2], some))][:, :, some[2]]
