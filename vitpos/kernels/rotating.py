"""Rotations of q and k where their projection has left them, and the tables of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vitpos.encoding import Layout
from vitpos.kernels.when import eager

CACHED = 200_000  # numbers of one image from which a batch is rotated image by image


def split(
    qkv: Tensor, turn: Tensor | None = None, layout: Layout = "interleaved", prefix: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, views [B, h, T, d] of ``qkv`` [B, T, 3, h, d], with q and k of the patches rotated there.

    ``turn`` [1 | B, 1 | h, N, d/2, (cos, sin)], pairs of norm 1; the first ``prefix`` tokens stay as they are.
    ``qkv`` is overwritten, so nobody else may read it. Rotations are computed in the higher precision of the two.
    """
    if torch.is_grad_enabled():
        return _Split.apply(qkv, turn, layout, prefix)
    return _split(qkv, turn, layout, prefix)


def _split(qkv: Tensor, turn: Tensor | None, layout: Layout, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    if turn is not None:
        patches = qkv.narrow(1, prefix, qkv.shape[1] - prefix).narrow(2, 0, 2)
        _rotate(patches, turn.transpose(1, 2).unsqueeze(2), layout, out=patches)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turn: Tensor | None, layout: Layout, prefix: int) -> tuple[Tensor, ...]:
        ctx.layout, ctx.prefix = layout, prefix
        q, k, v = _split(qkv, turn, layout, prefix)
        ctx.save_for_backward(turn, *((q, k) if ctx.needs_input_grad[1] else ()))
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        turn, *turned = ctx.saved_tensors
        start, layout = ctx.prefix, ctx.layout
        pairs = [(y[:, :, start:], g[:, :, start:]) for y, g in zip(turned, grads)]
        simple = torch.is_grad_enabled() or not eager(*grads)  # the gradient is to be differentiated, or batched
        if simple or not len(grads[0]):
            grad_turn = _plain_turn_gradient(turn, pairs, layout) if pairs else None
            q, k, v = grads
            if turn is not None:
                q, k = (rotated(g, backwards(turn), layout, start) for g in (q, k))
            return torch.stack([g.transpose(1, 2) for g in (q, k, v)], dim=2), grad_turn, None, None
        grad_turn = _turn_gradient(turn, pairs, layout) if pairs else None
        batch, heads, tokens, width = grads[0].shape
        grad = grads[0].new_empty(batch, tokens, 3, heads, width)
        back = None if turn is None else backwards(turn).transpose(1, 2)
        for i, given in enumerate(g.transpose(1, 2) for g in grads):
            if back is None or i == 2:
                grad[:, :, i] = given
            else:
                grad[:, :start, i] = given[:, :start]
                _rotate(given[:, start:], back, layout, out=grad[:, start:, i])
        return grad, grad_turn, None, None


def _rotate(x: Tensor, turn: Tensor, layout: Layout, out: Tensor) -> None:
    """Write x [..., d], rotated by ``turn`` [..., d/2, 2], to ``out`` of x's dtype, which may be x."""
    if layout == "interleaved" and x.dtype == turn.dtype in _COMPLEX and _in_pairs(x) and _in_pairs(out):  # most often
        kind = _COMPLEX[x.dtype]
        torch.mul(x.view(kind), torch.view_as_complex(turn), out=out.view(kind))
        return
    kind = torch.promote_types(x.dtype, turn.dtype)
    if kind != x.dtype and len(x) > 1 and x[0].numel() > CACHED:  # image by image: the precise copy stays in the cache
        for i in range(len(x)):
            _rotate(x[i : i + 1], turn[i : i + 1] if len(turn) > 1 else turn, layout, out[i : i + 1])
        return
    turn = turn.to(kind)
    if layout == "half":
        (first, second), (cos, sin) = x.to(kind).chunk(2, dim=-1), turn.unbind(-1)
        turned = (first * cos).addcmul_(second, sin, value=-1), (first * sin).addcmul_(second, cos)
        for part, to in zip(turned, out.chunk(2, dim=-1)):
            to.copy_(part)
        return
    if kind != x.dtype:
        target = precise = x.to(kind, memory_format=torch.contiguous_format)
    else:
        precise = x
        target = out if _in_pairs(out) else torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(_complex(precise, layout), torch.view_as_complex(turn), out=_complex(target, layout))
    if target is not out:
        out.copy_(target)


_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def rotated(x: Tensor, turn: Tensor, layout: Layout, prefix: int) -> Tensor:
    """x [B, h, T, d] with its patches rotated: the plain path of what ``split`` does to q and k."""
    precise = x.to(torch.promote_types(x.dtype, turn.dtype))
    cos, sin = turn.unbind(-1)
    before, patches = precise[:, :, :prefix], precise[:, :, prefix:]
    first, second = _halves(patches, layout)
    parts = (first * cos - second * sin, first * sin + second * cos)
    joined = torch.stack(parts, dim=-1) if layout == "interleaved" else torch.cat(parts, dim=-1)
    patches = joined.reshape(patches.shape)
    return (torch.cat([before, patches], dim=2) if prefix else patches).to(x.dtype)


def _halves(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The first and the second channel of each pair."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def backwards(turn: Tensor) -> Tensor:
    """The inverse rotation."""
    return torch.view_as_real(torch.view_as_complex(turn).conj_physical())


def _turn_gradient(turn: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], layout: Layout) -> Tensor:
    """What (y, g), the rotated patches x c and their gradient [B, h, N, d], give as the gradient of c: the sum of
    conj(x) g = conj(y) g c, as |c| = 1. Image by image, so that what is summed stays in the cache.
    """
    c = torch.view_as_complex(turn)

    def products() -> Iterator[Tensor]:
        for y, g in pairs:
            y, g = (_complex(t.to(torch.promote_types(t.dtype, turn.dtype)), layout) for t in (y, g))
            yield from (a.conj_physical().mul_(b) for a, b in (zip(y, g) if len(c) == 1 else [(y, g)]))

    parts = products()
    total = next(parts)
    for part in parts:
        total.add_(part)
    total = total.unsqueeze(0) if len(c) == 1 else total
    total = total.sum(1, keepdim=True) if c.shape[1] == 1 else total
    return torch.view_as_real((total * c).to(c.dtype))


def _plain_turn_gradient(turn: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], layout: Layout) -> Tensor:
    """The same in real numbers, to be differentiated or batched."""
    cos, sin = turn.unbind(-1)
    total = torch.zeros_like(turn)
    for y, g in pairs:
        (a, b), (c, d) = (_halves(t.to(torch.promote_types(t.dtype, turn.dtype)), layout) for t in (y, g))
        real, imaginary = a * c + b * d, a * d - b * c
        both = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        for dim in (0, 1):
            both = both.sum(dim, keepdim=True) if turn.shape[dim] == 1 else both
        total = total + both.to(turn.dtype)
    return total


def _complex(x: Tensor, layout: Layout) -> Tensor:
    """Channel pairs as complex numbers, a view where pairs lie side by side."""
    if layout == "half":
        return torch.complex(*x.chunk(2, dim=-1))
    x = x if _in_pairs(x) else x.contiguous()
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _in_pairs(x: Tensor) -> bool:
    """Whether channel pairs lie in memory as complex numbers must."""
    return bool(x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and not any(step % 2 for step in x.stride()[:-1]))


def turns(y: Tensor, x: Tensor, units: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Cosines and sines [1 | h, H W, pairs, 2] of the phases y [1 | h, H, pairs] plus x [1 | h, W, pairs].

    From H + W of each instead of H W, by the product of complex numbers; ``units`` are ``unit`` of both, if known.
    """
    if not eager(y, x):
        return plain_turns(y, x)
    of_y, of_x = units or (unit(y), unit(x))
    return _Turns.apply(y, x, of_y, of_x) if torch.is_grad_enabled() else _turns(of_y, of_x)


def plain_turns(y: Tensor, x: Tensor) -> Tensor:
    """The plain path of ``turns``, in real numbers. (A sum of phases would be rounded before its cosine is taken.)"""
    of_y, of_x = cos_sin(y).unsqueeze(-3), cos_sin(x).unsqueeze(-4)  # [1 | h, H, 1, pairs, 2], [1 | h, 1, W, pairs, 2]
    (cos_y, sin_y), (cos_x, sin_x) = of_y.unbind(-1), of_x.unbind(-1)
    turn = torch.stack([cos_y * cos_x - sin_y * sin_x, sin_y * cos_x + cos_y * sin_x], dim=-1)
    return turn.flatten(-4, -3)


@torch.no_grad()
def unit(phase: Tensor) -> Tensor:
    """exp(i phase) of phases [..., 1 | h, S, pairs] as [..., S, 1 | h, pairs]: heads side by side in memory, as q and k
    have them."""
    phase = phase.transpose(-3, -2).contiguous()
    return torch.complex(phase.cos(), phase.sin())


def _turns(of_y: Tensor, of_x: Tensor) -> Tensor:
    return torch.view_as_real((of_y.unsqueeze(1) * of_x).flatten(0, 1).transpose(0, 1))


def cos_sin(phase: Tensor) -> Tensor:
    """[..., (cos, sin)]"""
    return torch.stack([phase.cos(), phase.sin()], dim=-1)


class _Turns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, of_y: Tensor, of_x: Tensor) -> Tensor:
        turn = _turns(of_y, of_x)
        ctx.save_for_backward(turn)
        ctx.sides = (y.shape[1], x.shape[1])
        return turn

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (turn,) = ctx.saved_tensors
        cos, sin = turn.unbind(-1)
        phase = cos * grad[..., 1] - sin * grad[..., 0]
        phase = phase.reshape(len(phase), *ctx.sides, phase.shape[-1])
        return phase.sum(2), phase.sum(1), None, None
