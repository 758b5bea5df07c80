"""Logarithmic kernel of the distance with two learned numbers a head."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpos.encoding import Geometry, OffsetBias
from vitpos.positions import Extent
from vitpos.spec import register


@register("kerple")
class Kerple(OffsetBias):
    """Logit of (query, key) += -r1 ln(1 + r2 |query - key|), the Euclidean distance in patches; r1, r2 > 0 learned.

    One pair (r1, r2) a head, shared by all layers; pairs with a prefix token get 0. They start uniform in (0, 2)
    and (0, 1), as in the source. Our deviations: two-dimensional distances, and positive by softplus where the
    source clamps at 0.01. ``resize``: distances run on, or are scaled into the training grid. With ``wrap`` they
    are the shorter way around the sides of the grid.

    With raw weights 0, r1 = r2 = ln 2 = 0.693; at distance 5 that is -0.693 ln(4.466):

    >>> encoding = Kerple(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(8, 8)))
    >>> _ = nn.init.zeros_(encoding.raw)
    >>> round(encoding.at(torch.tensor([3.0, 4.0]), (8, 8)).item(), 4)
    -1.0372
    """

    summary = "logits fall with the logarithm of the Euclidean distance, two learned numbers a head"
    paper = "Chi et al. 2022, KERPLE, arXiv:2205.09921, the logarithmic variant"
    laws = frozenset({"offset", "transpose"})
    variants = {"wrap=True": frozenset({"offset", "circular", "transpose"})}

    def __init__(
        self,
        geometry: Geometry,
        *,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)
        self.raw = nn.Parameter(torch.empty(2, geometry.heads))  # softplus of it: r1, r2
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            start = torch.rand_like(self.raw) * self.raw.new_tensor([[2.0], [1.0]])
            self.raw.copy_(start.clamp(min=0.01).expm1().log())

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        distance = torch.linalg.vector_norm(self.placed_offset(offset, extent), dim=-1)
        r1, r2 = F.softplus(self.raw.to(distance.dtype)).view(2, -1, *[1] * distance.ndim)
        return -r1 * (r2 * distance).log1p()
