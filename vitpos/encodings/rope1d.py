"""Rotary embedding of the flattened index: the one-dimensional control."""

import torch
from torch import Tensor

from vitpos.encoding import NO_PREFIX, Geometry, LinearRotary, require_at_least
from vitpos.encodings._rotary import Resize, bands, stretch
from vitpos.positions import Positions
from vitpos.spec import register


@register("rope1d")
class Rope1d(LinearRotary):
    """Channel pair k rotates by n theta^(-2k/d), k = 0 .. d/2 - 1, with the flattened index n = y W + x.

    Pairs are interleaved channels. To this encoding the last patch of a row and the first of the next are
    neighbours, and n means another place as soon as W changes. W is the width of the current grid, or of the
    extent that explicit coordinates lie in. ``resize``: n is counted anew on another grid (as published for
    sequences), or positions are scaled into the training grid and counted there; ``ntk`` goes, axis by axis,
    from the first at the highest frequency to the second at the lowest in equal ratios (ours). Class and
    register tokens are not rotated; ``free_prefix`` as in ``rope_axial``.

    At (i, j) = (1, 2) on a grid of width 4, n = 6; d = 4 and theta = 100 have the frequencies 1 and 0.1:

    >>> encoding = Rope1d(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4)), theta=100.0)
    >>> pos = Positions(torch.tensor([[[1.0, 2.0]]]), extent=(4, 4))
    >>> [round(v, 3) for v in encoding.angles(pos).phase.flatten().tolist()]
    [6.0, 0.6]
    """

    summary = "q and k rotate by the flattened index"
    paper = "Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 14-15"
    laws = frozenset({"offset" + NO_PREFIX})
    constant = True
    variants = {"free_prefix=True": frozenset({"offset"})}
    pairs_multiple = 2

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float = 10000.0,
        resize: Resize = "extrapolate",
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, free_prefix=free_prefix)
        require_at_least("theta", theta, 0, self.name, strictly=True)
        self.theta = theta

    def frequencies(self, pos: Positions) -> Tensor:
        half = self.geometry.head_dim // 2
        width = self.geometry.grid[1] if self.resize == "interpolate" else pos.extent[1]
        stretch_y, stretch_x = stretch(self, pos, half)
        f_x = pos.coords.new_tensor(bands(self.theta, half)) * stretch_x
        f_y = width * stretch_y * f_x  # a row is W columns, and W itself is stretched
        return torch.stack([f_y, f_x], dim=-1).unsqueeze(0)  # [1, d/2, (y, x)]
