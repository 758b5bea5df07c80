"""Learned absolute embedding, one vector for each index of the flattened grid."""

import torch
from torch import Tensor, nn

from vitpos.encoding import Encoding, Geometry, require_at_least
from vitpos.positions import Positions, into, resample_plane, sample_plane
from vitpos.spec import register


@register("ape1d")
class Ape1d(Encoding):
    """x_n += P[n], with n = i W + j and P learned: timm's own ``pos_embed``.

    On another grid the table is resampled from the training grid (bicubic, antialiased, as timm does); at
    explicit or dropped positions it is read bilinearly. ``std`` is the standard deviation at initialization.
    Inside a timm model the table is the model's own parameter ``pos_embed``, so that weights move freely
    between timm and vitpos; its rows for class and register tokens are the model's affair.

    >>> from vitpos.positions import grid
    >>> encoding = Ape1d(Geometry(dim=1, heads=1, head_dim=1, depth=1, grid=(2, 3)))
    >>> table = torch.tensor([0.0, 1.0, 2.0, 10.0, 11.0, 12.0]).view(1, 6, 1)
    >>> encoding.tokens(grid(2, 3), table).flatten().tolist()  # row 1, column 0 is index 3
    [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    >>> between = Positions(torch.tensor([[[0.5, 1.0]]]), extent=(2, 3))  # halfway from index 1 to index 4
    >>> encoding.tokens(between, table).item()
    6.0
    """

    summary = "learned vector for each index of the flattened grid (timm's own pos_embed)"
    paper = "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, arXiv:2010.11929, eq. 1"
    model_parameter = "pos_embed"
    zeros = ("table",)

    def __init__(self, geometry: Geometry, *, std: float = 0.02) -> None:
        super().__init__(geometry, resize="interpolate")
        require_at_least("std", std, 0, self.name)
        self.std = std
        height, width = geometry.grid
        self.table: nn.Parameter | None = nn.Parameter(torch.empty(1, height * width, geometry.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.table is not None:
            nn.init.normal_(self.table, std=self.std)

    def tokens(self, pos: Positions, table: Tensor | None = None) -> Tensor:
        """[1 | B, N, D] from ``table`` [1, H0 W0, D] of the training grid (default: the encoding's own)."""
        table = self.table if table is None else table
        if table is None:
            raise ValueError("ape1d: the table belongs to the model and must be passed to tokens()")
        plane = table[0].unflatten(0, self.geometry.grid)  # [H0, W0, D]
        if pos.full:
            return resample_plane(plane, pos.extent).flatten(0, 1).unsqueeze(0)
        return sample_plane(plane, into(pos.coords, pos.extent, self.geometry.grid))
