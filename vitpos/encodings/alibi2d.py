"""Linear biases of the Euclidean distance."""

import math
from typing import Literal

import torch
from torch import Tensor

from vitpos.encoding import Geometry, OffsetBias
from vitpos.positions import Extent
from vitpos.spec import register


def slopes(heads: int) -> list[float]:
    """The slope of each head: powers 2^(-8k/h), k = 1 .. h; heads beyond a power of two are dealt between.

    >>> slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> slopes(3)  # those of 2 heads, then the first of 4
    [0.0625, 0.00390625, 0.25]
    """
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    return first if power == heads else first + slopes(2 * power)[0::2][: heads - power]


@register("alibi2d")
class Alibi2d(OffsetBias):
    """Logit of (query, key) += -m_h |query - key|, the Euclidean distance in patches; nothing is learned.

    The slopes m_h are those of ALiBi; pairs with a prefix token get 0. ``resize``: distances run on, or are
    scaled into the training grid. With ``wrap`` they are the shorter way around the sides of the grid.

    One head has slope 1/256; the offset (3, 4) lies at distance 5:

    >>> encoding = Alibi2d(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(8, 8)))
    >>> encoding.at(torch.tensor([3.0, 4.0]), (8, 8)).item() * 256
    -5.0
    """

    summary = "logits fall linearly with the Euclidean distance between query and key, one slope a head"
    paper = "Fuller et al. 2023 (CROMA), arXiv:2311.00566, section 3; slopes: Press et al. 2022, arXiv:2108.12409"
    laws = frozenset({"offset", "transpose"})
    constant = True
    variants = {"wrap=True": frozenset({"offset", "circular", "transpose"})}

    def __init__(
        self,
        geometry: Geometry,
        *,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        distance = torch.linalg.vector_norm(self.placed_offset(offset, extent), dim=-1)
        slope = distance.new_tensor(slopes(self.geometry.heads))
        return -slope.view(-1, *[1] * distance.ndim) * distance
