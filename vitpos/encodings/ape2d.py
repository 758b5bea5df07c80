"""Learned absolute embedding, factorized into rows and columns."""

import torch
from torch import Tensor, nn

from vitpos.encoding import Encoding, Geometry, require_at_least
from vitpos.positions import Positions, into, sample_line
from vitpos.spec import register


@register("ape2d")
class Ape2d(Encoding):
    """x_ij += R[i] + C[j], with one learned vector a row and one a column.

    On another grid both tables are read linearly at the coordinates scaled into the training grid. ``std`` is
    the standard deviation at initialization.

    >>> from vitpos.positions import grid
    >>> encoding = Ape2d(Geometry(dim=1, heads=1, head_dim=1, depth=1, grid=(2, 3)))
    >>> _ = encoding.rows.data.copy_(torch.tensor([[0.0], [10.0]]))
    >>> _ = encoding.columns.data.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
    >>> encoding.tokens(grid(2, 3)).flatten().tolist()
    [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]
    """

    summary = "learned vector for each row plus learned vector for each column"
    paper = "Dehghani et al. 2023, Patch n' Pack (NaViT), arXiv:2307.06304, section 2.1 (additive, absolute)"

    def __init__(self, geometry: Geometry, *, std: float = 0.02) -> None:
        super().__init__(geometry, resize="interpolate")
        require_at_least("std", std, 0, self.name)
        self.std = std
        self.rows = nn.Parameter(torch.empty(geometry.grid[0], geometry.dim))
        self.columns = nn.Parameter(torch.empty(geometry.grid[1], geometry.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rows, std=self.std)
        nn.init.normal_(self.columns, std=self.std)

    def tokens(self, pos: Positions) -> Tensor:
        at = into(pos.coords, pos.extent, self.geometry.grid)
        return sample_line(self.rows, at[..., 0]) + sample_line(self.columns, at[..., 1])
