"""A temperature of the attention that follows the number of patches."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from vitpos.encoding import LAWS, Encoding, Geometry
from vitpos.positions import Positions, sizes_left_open, vector
from vitpos.spec import register


@register("logn")
class LogN(Encoding):
    """Logits of q and k are multiplied by ln N / ln N0, with N patches now and N0 in the training grid.

    The entropy of a softmax over more keys is higher; this factor counters it, and is 1 on the training grid. It
    holds no position: combine it with an encoding (``rope_axial + logn``), alone it is ``none`` with a temperature.
    Logit biases are not scaled. N counts patches (kept ones, under patch dropout) and at least 2.

    From 4 x 4 to 16 x 16 patches:

    >>> from vitpos.positions import grid
    >>> LogN(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4))).scale(grid(16, 16))
    2.0
    """

    summary = "attention temperature ln N / ln N0 for N patches instead of the N0 of training; no position"
    paper = "Chiang & Cholak 2022, Overcoming a Theoretical Limitation of Self-Attention, arXiv:2202.12172, section 5.3"
    laws = frozenset(LAWS)

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        return "nothing"  # the factor is 1 on the training grid

    def scale(self, pos: Positions) -> float | Tensor:
        trained = math.log(max(self.geometry.grid[0] * self.geometry.grid[1], 2))
        count = pos.coords.shape[1]
        if sizes_left_open():
            return vector([count], pos.coords.double())[0].clamp(min=2).log() / trained
        return math.log(max(count, 2)) / trained
