"""Two-dimensional rotary embedding with learned frequencies that mix the axes."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Geometry, LinearRotary
from vitpos.spec import register


@register("rope_mixed")
class RopeMixed(LinearRotary):
    """Channel pair k rotates by y f_y + x f_x with learned frequencies, one set a layer and head.

    They start with magnitudes theta^(-4k/d), k = 0 .. d/4 - 1: the first half of the pairs in a direction drawn
    per layer and head, the second half at a right angle to it. Pairs are interleaved channels. ``resize`` as in
    ``rope_axial``. Class and register tokens are not rotated.

    >>> from vitpos.positions import Positions
    >>> encoding = RopeMixed(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4)))
    >>> _ = encoding.weight.data.copy_(torch.tensor([[[10.0, 1.0], [0.0, 0.5]]]))  # [head, pair, (y, x)]
    >>> pos = Positions(torch.tensor([[[2.0, 3.0]]]), extent=(4, 4))
    >>> encoding.angles(pos).phase.flatten().tolist()  # 2 * 10 + 3 * 1 and 2 * 0 + 3 * 0.5
    [23.0, 1.5]
    """

    summary = "q and k rotate by learned mixtures of row and column, per layer and head"
    paper = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer, arXiv:2403.13298, eq. 8-9"
    laws = frozenset({"offset (no prefix)"})
    per_layer = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float = 10.0,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
    ) -> None:
        super().__init__(geometry, resize=resize)
        self.theta = theta
        self.weight = nn.Parameter(torch.empty(geometry.heads, geometry.head_dim // 2, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        d = self.geometry.head_dim
        magnitude = self.weight.new_tensor([self.theta ** (-4 * k / d) for k in range(d // 4)])
        with torch.no_grad():
            direction = 2 * math.pi * torch.rand(self.geometry.heads, 1, device=self.weight.device)
            phi = torch.cat([direction.expand(-1, d // 4), direction.expand(-1, d // 4) + math.pi / 2], dim=-1)
            self.weight.copy_(torch.stack([phi.sin(), phi.cos()], dim=-1) * magnitude.repeat(2).unsqueeze(-1))

    def frequencies(self, like: Tensor) -> Tensor:
        return self.weight
