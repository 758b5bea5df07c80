"""Learned table of relative position biases."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Geometry, OffsetBias
from vitpos.positions import Extent, sample_plane
from vitpos.spec import register


@register("rpb")
class RelativePositionBias(OffsetBias):
    """Logit of (query, key) += T[head, dy, dx] with (dy, dx) = query - key, one learned table a layer.

    The table has (2H-1)(2W-1) entries a head for a training grid of H x W; pairs with a prefix token get 0.
    ``resize``: on another grid offsets are scaled into the training grid and the table is read bilinearly, or
    taken as they are and clamped at its edge. ``std`` is the standard deviation at initialization.

    On a 1 x 2 grid the table holds the offsets -1, 0 and 1; the first patch sees the second at -1:

    >>> from vitpos.positions import Positions
    >>> encoding = RelativePositionBias(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(1, 2)))
    >>> _ = encoding.table.data.copy_(torch.tensor([[[5.0, 6.0, 7.0]]]))
    >>> encoding.bias(Positions(torch.tensor([[[0.0, 0.0], [0.0, 1.0]]]), extent=(1, 2))).tolist()
    [[[[6.0, 5.0], [7.0, 6.0]]]]
    """

    summary = "learned logit bias for each offset between query and key, per layer and head"
    paper = "Liu et al. 2021, Swin Transformer, arXiv:2103.14030, eq. 4"
    laws = frozenset({"offset", "offset (no prefix)"})
    per_layer = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        std: float = 0.02,
        resize: Literal["interpolate", "extrapolate"] = "interpolate",
    ) -> None:
        super().__init__(geometry, resize=resize)
        self.std = std
        height, width = geometry.grid
        self.table = nn.Parameter(torch.empty(geometry.heads, 2 * height - 1, 2 * width - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        height, width = self.geometry.grid
        centre = offset.new_tensor([height - 1, width - 1])
        entries = sample_plane(self.table.permute(1, 2, 0), self.placed_offset(offset, extent) + centre)
        return entries.movedim(-1, 0)
