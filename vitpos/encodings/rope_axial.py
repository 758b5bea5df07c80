"""Two-dimensional rotary embedding, half of the channels for each axis."""

from typing import Literal

import torch
from torch import Tensor

from vitpos.encoding import Geometry, LinearRotary
from vitpos.spec import register


@register("rope_axial")
class RopeAxial(LinearRotary):
    """Channel pairs rotate by x f_k (first half of the pairs) or y f_k (second half), f_k = theta^(-4k/d).

    k = 0 .. d/4 - 1; pairs are interleaved channels. ``resize``: coordinates run on (as published), or are
    scaled into the training grid. Class and register tokens are not rotated, which tells them where the
    origin is: shifting all coordinates leaves the output unchanged only without such tokens.

    At (i, j) = (2, 3), d = 8 and theta = 100 the frequencies are 1 and 0.1:

    >>> from vitpos.positions import Positions
    >>> encoding = RopeAxial(Geometry(dim=8, heads=1, head_dim=8, depth=1, grid=(4, 4)))
    >>> pos = Positions(torch.tensor([[[2.0, 3.0]]]), extent=(4, 4))
    >>> [round(v, 3) for v in encoding.angles(pos).phase.flatten().tolist()]
    [3.0, 0.3, 2.0, 0.2]
    """

    summary = "q and k rotate, half of the channel pairs by the column, half by the row"
    paper = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer, arXiv:2403.13298, eq. 6-7"
    laws = frozenset({"offset (no prefix)"})

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float = 100.0,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
    ) -> None:
        super().__init__(geometry, resize=resize)
        self.theta = theta

    def frequencies(self, like: Tensor) -> Tensor:
        d = self.geometry.head_dim
        f = like.new_tensor([self.theta ** (-4 * k / d) for k in range(d // 4)])
        zero = torch.zeros_like(f)
        return torch.stack([torch.cat([zero, f]), torch.cat([f, zero])], dim=-1).unsqueeze(0)  # [1, d/2, (y, x)]
