"""Kernels for a CPU in eager mode: each does what a plain path does, in fewer passes over memory.

``split`` cuts q, k and v out of their packed projection and rotates them in place, with one packed gradient;
``dense_bias`` writes an offset table out for all pairs of tokens; ``attend`` is attention whose bias learns, or in
bfloat16. Whoever calls them asks ``eager`` first, and has a plain path for when it says no. What was measured is in
docs/speed.md, by benchmarks/kernels.py. Legend as in ``attention.py``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from vitpos.encoding import Layout

BY_INDEX = 512  # patches up to which a dense bias is gathered by an index; above, runs of it are copied
BRIEF = (600, 1100)  # tokens up to which bfloat16 attention is written out: without gradients, with them
REMEMBERED = 2**22  # entries up to which a dense bias is kept from one forward to the next
CACHED = 200_000  # numbers of one image from which a batch is rotated image by image
CHUNK = 350_000  # logits that are worked on at a time, so that they stay in the cache


def eager(*tensors: Tensor) -> bool:
    """Whether kernels may serve: plain tensors on a CPU, and nothing that records, compiles or transforms."""
    if not (_undisturbed() if _settled.choice is None else _settled.choice):
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_cpu or torch._C._functorch.is_legacy_batchedtensor(tensor):
            return False
    return True


_PLAIN = (Tensor, nn.Parameter)


def _undisturbed() -> bool:
    if torch.compiler.is_compiling() or torch._C._is_tracing() or is_in_torch_dispatch_mode():
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_function_stack():
        return False
    return forward_ad._current_level < 0


class _Settled(threading.local):
    choice: bool | None = None


_settled = _Settled()


def settled(block: Callable[..., Any]) -> Callable[..., Any]:
    """A block for checkpointing: when it is run again for the gradient, maybe under other modes than the first time, it
    takes the same path, so that it keeps the same tensors."""
    if torch.compiler.is_compiling():
        return block
    choice = _undisturbed()

    def run(*given: Any, **named: Any) -> Any:
        before, _settled.choice = _settled.choice, choice
        try:
            return block(*given, **named)
        finally:
            _settled.choice = before

    return run


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
        return cos_sin((y.unsqueeze(-2) + x.unsqueeze(-3)).flatten(-3, -2))
    of_y, of_x = units or (unit(y), unit(x))
    return _Turns.apply(y, x, of_y, of_x) if torch.is_grad_enabled() else _turns(of_y, of_x)


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


def dense_bias(table: Tensor, beside: Tensor | None, prefix: int) -> Tensor:
    """The bias [1, h, T, T] of an offset table [1 | h, 2H-1, 2W-1]; see ``OffsetTable``.

    ``beside`` [1 | h, 3]: the bias of a prefix query to a patch, of a patch to a prefix key, of two prefix tokens; None
    for 0.
    """
    beside = table.new_zeros(len(table), 3) if beside is None else beside.to(table.dtype)
    heads = max(len(table), len(beside))
    table, beside = table.expand(heads, -1, -1), beside.expand(heads, -1)
    height, width = ((side + 1) // 2 for side in table.shape[1:])
    if height * width > BY_INDEX:
        return _Dense.apply(table, beside, prefix)
    tokens = prefix + height * width
    entries = torch.cat([table.flatten(1), beside], dim=1).index_select(1, _index(height, width, prefix))
    return entries.view(1, heads, tokens, tokens)


class Memory:
    """What one block was told in its latest evaluation, or all blocks alike, by the values it was made from: dense
    biases, and signals that follow from plain numbers.

    Values are compared, since optimizers change weights without a trace; what somebody wrote to is dropped, unless
    through ``.data`` or NumPy, which leave no trace either. Copies and pickles begin empty.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor | None, int, Tensor, int]] = {}
        self._signal: tuple[Any, Any, list[tuple[Tensor, int]]] | None = None

    def __reduce__(self) -> Any:
        return Memory, ()

    def forget(self) -> None:
        self._held.clear()
        self._signal = None

    def signal(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, an ``attention.Signal``, or returned when the key was the same."""
        if self._signal is not None:
            held, found, tensors = self._signal
            if held == key and all(tensor._version == version for tensor, version in tensors):
                return found
        with torch.inference_mode(False), torch.no_grad():  # what is made under inference mode has no version
            found = make()
        parts = (found.bias, getattr(found.rotation, "turn", None), *(graded.bias for graded in found.graded))
        made = [t for t in parts if t is not None]
        if sum(tensor.numel() for tensor in made) <= REMEMBERED and not found.contextual:
            self._signal = key, found, [(tensor, tensor._version) for tensor in made]
        return found

    def dense_bias(self, place: int, table: Tensor, beside: Tensor | None, prefix: int) -> Tensor:
        """``dense_bias`` of the bias that is the ``place``-th of its block."""
        if torch.is_grad_enabled():
            return dense_bias(table, beside, prefix)
        held = self._held.get(place)
        if held is not None:
            old_table, old_beside, old_prefix, dense, version = held
            same = old_prefix == prefix and _same(old_table, table) and _same(old_beside, beside)
            if same and dense._version == version:
                return dense
        with torch.inference_mode(False), torch.no_grad():  # what is made under inference mode has no version
            table, beside = table.clone(), None if beside is None else beside.clone()
            dense = dense_bias(table, beside, prefix)
            if dense.numel() <= REMEMBERED:
                self._held[place] = (table, beside, prefix, dense, dense._version)
        return dense


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def offsets(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Where in a flat table of offsets [(2H-1)(2W-1)] each query and key find their entry, [N, N].

    The difference of two vectors, of which compilers make a fast loop; from four axes they take the indices of each
    pair apart again.
    """
    patch = torch.arange(height * width, device=device)
    at = patch + patch // width * (width - 1)  # y (2W-1) + x
    return at.unsqueeze(1) - at + ((height - 1) * (2 * width - 1) + width - 1)


@lru_cache(maxsize=8)
def _index(height: int, width: int, prefix: int) -> Tensor:
    """The same for all tokens, flat, [T T], where three values for prefix tokens follow the table."""
    with torch.inference_mode(False):
        index, end = offsets(height, width), (2 * height - 1) * (2 * width - 1)
        before = torch.full((prefix, prefix + height * width), end + 2)
        before[:, prefix:] = end
        return torch.cat([before, F.pad(index, (prefix, 0), value=end + 1)]).flatten()


class _Dense(torch.autograd.Function):
    """By copies of runs: each column of a row of queries sees one window of H W entries of its strip."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, beside: Tensor, prefix: int) -> Tensor:
        heads, height, width = table.shape[0], (table.shape[1] + 1) // 2, (table.shape[2] + 1) // 2
        ctx.sizes, ctx.prefix = (heads, height, width), prefix
        ctx.save_for_backward(table, beside)
        flipped = table.flip(1, 2)
        strips = torch.stack([flipped[:, :, width - 1 - j : 2 * width - 1 - j] for j in range(width)], dim=1).flatten(2)
        tokens = prefix + height * width
        dense = table.new_empty(1, heads, tokens, tokens)
        for part, values in zip(_beside(dense[0], prefix), beside.unbind(1)):
            part.copy_(values[:, None, None])
        for window, rows in _windows(strips, dense[0, :, prefix:, prefix:], height, width):
            rows.copy_(window)
        return dense

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (heads, height, width), prefix = ctx.sizes, ctx.prefix
        if torch.is_grad_enabled() or not eager(grad):
            table, beside = ctx.saved_tensors
            index = _index.__wrapped__(height, width, prefix)
            flat = torch.cat([torch.zeros_like(table).flatten(1), torch.zeros_like(beside)], dim=1)
            flat = flat.index_add(1, index, grad[0].flatten(1))
            return flat[:, :-3].view_as(table), flat[:, -3:], None
        grad = grad[0]
        grad_beside = torch.stack([part.sum((1, 2)) for part in _beside(grad, prefix)], dim=1)
        strips = grad.new_zeros(heads, width, (2 * height - 1) * width)
        for window, rows in _windows(strips, grad[:, prefix:, prefix:], height, width):
            window.add_(rows)
        flipped = grad.new_zeros(heads, 2 * height - 1, 2 * width - 1)
        for j, strip in enumerate(strips.unflatten(2, (-1, width)).unbind(1)):
            flipped[:, :, width - 1 - j : 2 * width - 1 - j].add_(strip)
        return flipped.flip(1, 2), grad_beside, None


def _beside(dense: Tensor, prefix: int) -> list[Tensor]:
    """The parts of [h, T, T] that ``beside`` fills, in its order."""
    return [dense[:, :prefix, prefix:], dense[:, prefix:, :prefix], dense[:, :prefix, :prefix]]


def _windows(strips: Tensor, patches: Tensor, height: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each row of queries: its window of the strips, and its part of [h, N, N]."""
    for i, rows in enumerate(patches.split(width, dim=1)):
        start = (height - 1 - i) * width
        yield strips[:, :, start : start + height * width], rows


def attends_faster(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether ``attend`` may stand in for the fused kernel, and was measured to be faster."""
    trains = torch.is_grad_enabled()
    if q.dtype == torch.bfloat16:
        if q.shape[-2] > BRIEF[trains] or not _bfloat16_in_hardware():
            return False
    elif not (trains and bias is not None and bias.requires_grad) or torch.is_autocast_enabled("cpu"):
        return False
    if not (q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype and eager(q, k, v)):
        return False
    return bias is None or (bias.ndim == 4 and bias.shape[-2:] == (q.shape[-2],) * 2 and eager(bias))


@lru_cache(maxsize=1)
def _bfloat16_in_hardware() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def sloped(bias: Tensor, slope: float) -> Tensor:
    """``slope * bias``."""
    return bias if slope == 1.0 else bias * slope


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, slope: float = 1.0) -> Tensor:
    """softmax(scale q k^T + slope bias) v, [B, h, T, d], with a gradient for ``bias`` [1 | B, 1 | h, T, T] too.

    Written out piece by piece, where the fused kernel refuses a bias that learns. Logits and softmax are in float32 or
    better; the softmax is kept, in q's dtype, for the gradient: [B, h, T, T]. At least one key must be allowed to each
    query.
    """
    return _Attend.apply(q, k, v, bias, scale, slope).transpose(1, 2)


def explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, slope: float = 1.0) -> Tensor:
    """The plain path of ``attend``."""
    return _soft(q, k, bias, scale, slope) @ v


def _soft(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, slope: float) -> Tensor:
    logits = (q * scale) @ k.mT
    return (logits if bias is None else logits + sloped(bias, slope).to(q.dtype)).softmax(dim=-1)


def _plain_gradients(
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None], scale: float, slope: float, grad: Tensor, learns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of q, k, v and the bias in ``saved``, to be differentiated or batched."""
    q, k, v, bias = saved
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
        soft = q.new_empty(batch, heads, tokens, tokens) if learns else None
        out = q.new_empty(batch, tokens, heads, width)
        kind = torch.promote_types(q.dtype, torch.float32)
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
                here = soft[some].flatten(0, 1) if soft is not None and kind == q.dtype else logits
                torch.softmax(logits, dim=-1, out=here)
                if kind != q.dtype:
                    here = here.to(q.dtype) if soft is None else soft[some].flatten(0, 1).copy_(here)
                out.transpose(1, 2)[some] = torch.bmm(here, values).view_as(q[some])
        ctx.save_for_backward(q, k, v, bias, soft)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, bias, soft = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad[:4], grad.transpose(1, 2)
        if torch.is_grad_enabled() or not eager(grad):  # the gradient is itself to be differentiated, or batched
            return *_plain_gradients((q, k, v, bias), ctx.scale, ctx.slope, grad, needs[3]), None, None
        of_q, of_k, of_v = (q.new_empty(q.shape) for _ in range(3))
        of_bias = None
        if needs[3]:
            kind = torch.promote_types(bias.dtype, torch.float32)
            of_bias = torch.empty_like(bias, dtype=kind) if len(q) else torch.zeros_like(bias, dtype=kind)
        with torch.autocast("cpu", enabled=False):
            for pairs, rows, (of_soft, room) in _pieces(q, q.dtype, scratch=2):
                some = (*pairs, rows)
                queries, here, of_out = (t[some].flatten(0, 1) for t in (q, soft, grad))
                keys, values = k[pairs].flatten(0, 1), v[pairs].flatten(0, 1)
                torch.bmm(of_out, values.mT, out=of_soft)
                part = None if of_bias is None else _part(of_bias, some)
                first = bias is not None and all(s > 1 or pair.start == 0 for s, pair in zip(bias.shape, pairs))
                in_place = first and part is not None and (part.shape, part.dtype) == (soft[some].shape, q.dtype)
                of_logits = room if part is None or not in_place else part.flatten(0, 1)
                torch._softmax_backward_data(of_soft, here, -1, here.dtype, grad_input=of_logits)
                if part is not None and not in_place:
                    summed = of_logits.view_as(soft[some]).sum_to_size(part.shape)
                    part.copy_(summed) if first else part.add_(summed)
                _product(of_q[some], of_logits, keys, ctx.scale)
                _product(of_k[pairs], of_logits.mT, queries, ctx.scale, more=rows.start > 0)
                _product(of_v[pairs], here.mT, of_out, more=rows.start > 0)
        of_bias = None if of_bias is None else sloped(of_bias, ctx.slope).to(bias.dtype)
        return of_q, of_k, of_v, of_bias, None, None


def remakes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slope: float) -> bool:
    """Whether ``attend_fused`` may stand in for the fused kernel, and spares memory."""
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
            return *_plain_gradients((q, k, v, bias), q.shape[-1] ** -0.5, ctx.slope, grad, False), None
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
    rows = math.ceil(tokens / math.ceil(tokens**2 / CHUNK))
    count = max(1, CHUNK // tokens**2)  # of heads
    images, some = (count // heads, heads) if count >= heads else (1, count)
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
