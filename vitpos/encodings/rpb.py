"""Learned table of relative position biases."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Bias, Geometry, OffsetBias, OffsetTable, require_at_least
from vitpos.positions import Extent, Positions, sample_plane, surely_equal
from vitpos.spec import register


@register("rpb")
class RelativePositionBias(OffsetBias):
    """Logit of (query, key) += T[head, dy, dx] with (dy, dx) = query - key, one learned table a layer.

    The table has (2H-1)(2W-1) entries a head for a training grid of H x W. Pairs with a prefix token get 0, or,
    with ``prefix``, three learned values a head: for a prefix query, a prefix key, and two prefix tokens (timm
    knows one such token, here all share them).

    ``resize``: on another grid offsets are scaled into the training grid and the table is read bilinearly, so that
    the bias of a place in the image stays (much as under Swin's bicubic resizing of the whole table); or they are
    taken as they are, beyond the table clamped to its edge, so that the bias of a whole offset stays (much as under
    BEiT's geometric interpolation, which timm uses). With ``wrap`` offsets are the shorter way around the sides of
    the grid, and the table has H W entries a head. ``std`` is the standard deviation at initialization.

    On a 1 x 2 grid the table holds the offsets -1, 0 and 1; the first patch sees the second at -1:

    >>> from vitpos.positions import Positions
    >>> encoding = RelativePositionBias(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(1, 2)))
    >>> _ = encoding.table.data.copy_(torch.tensor([[[5.0, 6.0, 7.0]]]))
    >>> encoding.bias(Positions(torch.tensor([[[0.0, 0.0], [0.0, 1.0]]]), extent=(1, 2))).values.tolist()
    [[[[6.0, 5.0], [7.0, 6.0]]]]
    """

    summary = "learned logit bias for each offset between query and key, per layer and head"
    paper = "Liu et al. 2021, Swin Transformer, arXiv:2103.14030, eq. 4"
    laws = frozenset({"offset"})
    variants = {"prefix=True": frozenset({"offset"}), "wrap=True": frozenset({"offset", "circular"})}
    per_layer = True
    zeros = ("table", "prefix")

    def __init__(
        self,
        geometry: Geometry,
        *,
        std: float = 0.02,
        prefix: bool = False,
        resize: Literal["interpolate", "extrapolate"] = "interpolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)
        require_at_least("std", std, 0, self.name)
        self.std = std
        height, width = geometry.grid if wrap else (2 * side - 1 for side in geometry.grid)
        self.table = nn.Parameter(torch.empty(geometry.heads, height, width))
        self.prefix = nn.Parameter(torch.empty(geometry.heads, 3)) if prefix and geometry.prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.std)

    def prefix_bias(self) -> Tensor | None:
        return self.prefix

    def bias(self, pos: Positions) -> Bias:
        if pos.full and not self.wrap and surely_equal(pos.extent, self.geometry.grid):
            return OffsetTable(self.table, self.prefix)  # what reading it at each offset gives
        return super().bias(pos)

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        centre = offset.new_tensor([side // 2 for side in self.table.shape[1:]])
        entries = sample_plane(self.table.permute(1, 2, 0), self.placed_offset(offset, extent) + centre)
        return entries.movedim(-1, 0)
