"""An offset table written out for all pairs of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitpos.kernels.when import eager

BY_INDEX = 512  # patches up to which a dense bias is gathered by an index; above, runs of it are copied


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
