"""Learned absolute embedding, factorized into rows and columns."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Encoding, Geometry, require_at_least
from vitpos.positions import Positions, into, sample_line, scale, vector
from vitpos.spec import register


@register("ape2d")
class Ape2d(Encoding):
    """x_ij += R[i] + C[j], with one learned vector a row and one a column of the training grid.

    ``mode`` says what the tables are a function of, and so how they are read, linearly, on another grid. In
    ``absolute`` entry k belongs to row k of the training grid: the table is resampled, patch centres at the same
    place of the image being equal. In ``fractional`` it belongs to the fraction r = k / H0 of the side, and the
    patch in row i of H lies at r = i / H: the first row is always at 0, the last short of 1, where the table
    ends. On the training grid both are the same; NaViT's ``absolute`` has no vectors for unseen rows, here it
    interpolates. ``std`` is the standard deviation at initialization.

    >>> from vitpos.positions import grid
    >>> encoding = Ape2d(Geometry(dim=1, heads=1, head_dim=1, depth=1, grid=(2, 3)))
    >>> _ = encoding.rows.data.copy_(torch.tensor([[0.0], [10.0]]))
    >>> _ = encoding.columns.data.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
    >>> encoding.tokens(grid(2, 3)).flatten().tolist()
    [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]

    On four rows the second lies a quarter of the way from row 0 to row 1 by its centre, halfway by its fraction:

    >>> second = Positions(torch.tensor([[[1.0, 0.0]]]), extent=(4, 3))
    >>> encoding.tokens(second).item()
    3.5
    >>> fractional = Ape2d(encoding.geometry, mode="fractional")
    >>> _ = fractional.load_state_dict(encoding.state_dict())
    >>> fractional.tokens(second).item()
    6.0
    """

    summary = "learned vector for each row plus learned vector for each column"
    paper = "Dehghani et al. 2023, Patch n' Pack (NaViT), arXiv:2307.06304, section 2.1 (additive)"
    variants = {"mode='fractional'": frozenset()}
    zeros = ("rows", "columns")

    def __init__(
        self, geometry: Geometry, *, mode: Literal["absolute", "fractional"] = "absolute", std: float = 0.02
    ) -> None:
        super().__init__(geometry, resize="interpolate" if mode == "absolute" else "fractional")
        require_at_least("std", std, 0, self.name)
        self.mode = mode
        self.std = std
        self.rows = nn.Parameter(torch.empty(geometry.grid[0], geometry.dim))
        self.columns = nn.Parameter(torch.empty(geometry.grid[1], geometry.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rows, std=self.std)
        nn.init.normal_(self.columns, std=self.std)

    def tokens(self, pos: Positions) -> Tensor:
        if self.mode == "absolute":
            at = into(pos.coords, pos.extent, self.geometry.grid)
        else:
            at = pos.coords * vector(scale(pos.extent, self.geometry.grid), pos.coords)
        return sample_line(self.rows, at[..., 0]) + sample_line(self.columns, at[..., 1])
