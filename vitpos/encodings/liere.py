"""LieRE: rotations by the exponential of learned generators that need not commute."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Geometry, Rotary, Rotations
from vitpos.encodings._rotary import block_width, skew
from vitpos.positions import Positions, vector
from vitpos.spec import register


@register("liere")
class Liere(Rotary):
    """q and k turn by exp(p_y A_y + p_x A_x), with learned skew-symmetric A_y and A_x of each layer and head.

    The generators consist of blocks of ``block`` adjacent channels, which must divide the head width: by default
    its largest divisor of at most 8 (8 at the usual widths); the head width itself gives the dense form. Entries
    above the diagonal start uniform in [0, 2 pi), those below are their negatives. Blocks of A_y and A_x do not
    commute, so that R(p)^T R(q) is not R(q - p): this rotary encoding is not relative, and no law holds.

    p = i / (T - 1) on the training side T. ``resize``: ``linspace`` spaces the S positions of another grid from 0
    to S / T, as the paper's code does; ``extrapolate`` keeps the training grid's steps; ``interpolate`` scales
    into the training grid. Class and register tokens are not rotated; ``free_prefix`` as in ``rope_axial``.

    Two channels, A_y = [[0, a], [-a, 0]] with a = pi/2: one row down on a 2 x 2 grid is a quarter turn back.

    >>> encoding = Liere(Geometry(dim=2, heads=1, head_dim=2, depth=1, grid=(2, 2)))
    >>> _ = encoding.upper.data.copy_(torch.tensor([torch.pi / 2, 5.0]).view(1, 2, 1, 1))  # [head, (y, x), block, 1]
    >>> pos = Positions(torch.tensor([[[1.0, 0.0]]]), extent=(2, 2))
    >>> encoding.angles(pos).matrix.view(2, 2).round().int().tolist()
    [[0, 1], [-1, 0]]
    """

    summary = "q and k turn by the exponential of learned generators of row and column, which do not commute"
    paper = "Ostmeier et al. 2024, LieRE, arXiv:2406.10322, R(p) = exp(A(p)); the released code"
    variants = {"free_prefix=True": frozenset()}
    per_layer = True
    zeros = ("upper",)

    def __init__(
        self,
        geometry: Geometry,
        *,
        block: int | None = None,
        resize: Literal["linspace", "extrapolate", "interpolate"] = "linspace",
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, free_prefix=free_prefix)
        self.block = block_width(geometry.head_dim, block, self.name)
        blocks = geometry.head_dim // self.block
        self.upper = nn.Parameter(torch.empty(geometry.heads, 2, blocks, self.block * (self.block - 1) // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.upper, 0, 2 * torch.pi)

    def placed(self, pos: Positions) -> Tensor:
        if self.resize == "linspace":
            steps = [side / (trained * max(side - 1, 1)) for side, trained in zip(pos.extent, self.geometry.grid)]
        else:
            steps = [1 / max(trained - 1, 1) for trained in self.geometry.grid]
        return super().placed(pos) * vector(steps, pos.coords)

    def angles(self, pos: Positions) -> Rotations:
        y, x = self.placed(pos)[:, None, :, None, None, None].unbind(-1)  # each [1 | B, 1, N, 1, 1, 1]
        generators = skew(self.upper.to(pos.coords.dtype), self.block).unsqueeze(2)  # [h, 2, 1, d/b, b, b]
        a_y, a_x = generators.unbind(1)
        return Rotations(torch.linalg.matrix_exp(y * a_y + x * a_x), self.free_prefix)
