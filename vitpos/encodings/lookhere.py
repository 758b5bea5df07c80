"""Heads that look in one direction each, with biases of the distance."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from vitpos.encoding import Geometry, OffsetBias, require_at_least
from vitpos.positions import Extent
from vitpos.spec import register

RAYS = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]  # (right, up), an eighth of a turn apart
FIRST_RAY = {  # of eight heads' fields of view, in the order of the source
    180: (0, 4, 2, 6, 7, 1, 5, 3),  # up, down, left, right; up-right, up-left, down-right, down-left
    90: (2, 0, 4, 6, 1, 5, 3, 7),  # up-left, up-right, down-left, down-right; up, down, left, right
    45: (2, 5, 3, 0, 1, 6, 4, 7),  # the eighths next to up, down (left side), left, right (upper side); the others
}
FREE_SLOPES = (1 / 2, 1 / 8, 1 / 32, 1 / 128)
ON_THE_EDGE = 1e-3  # patches: so near to the edge of a field of view, rounding would decide


@register("lookhere")
class LookHere(OffsetBias):
    """Logit of (query, key) += -g s_l s_h |query - key| where the head sees the key, else -inf; nothing is learned.

    A directed head sees the keys in a field of view of ``kind`` degrees around its direction, edges (to a thousandth
    of a patch) and itself included; a free head sees all. s_l falls linearly over the layers from 1.5 to 0.5; s_h
    is 1 for directed heads, 1/2, 1/8, 1/32, 1/128 for free ones; g is ``global_slope``. Pairs with a prefix token
    get 0.

    The source has 12 heads, 8 directed and 4 free. For other numbers the rule is ours: two thirds (rounded down)
    are directed, at least one is free; directions and free slopes are dealt in the order of the source, over
    again where there are more heads. The source writes g = 2 with all s_h halved, and a large finite number for
    -inf. ``resize``: distances run on (as published), or are scaled into the training grid. With ``wrap`` offsets
    are the shorter way around the sides of the grid.

    All layers share one bias, which each multiplies by its s_l (``slope_of``). Of three heads with kind=90 the first
    looks up and left, the second up and right, the third is free. The key at distance 5, four up and three to the
    left, is seen by the first and third:

    >>> encoding = LookHere(Geometry(dim=12, heads=3, head_dim=4, depth=3, grid=(8, 8)))
    >>> encoding.at(torch.tensor([4.0, 3.0]), (8, 8)).tolist()
    [-5.0, -inf, -2.5]
    >>> [encoding.slope_of(layer) for layer in range(3)]
    [1.5, 1.0, 0.5]
    """

    summary = "each head sees one direction only, its logits falling with the distance"
    paper = "Fuller et al. 2024, LookHere, arXiv:2405.13985, section 3"
    laws = frozenset({"offset"})
    variants = {
        "kind=180": frozenset({"offset"}),
        "kind=45": frozenset({"offset"}),
        "wrap=True": frozenset({"offset", "circular"}),
    }
    constant = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        kind: Literal[180, 90, 45] = 90,
        global_slope: float = 1.0,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)
        require_at_least("global_slope", global_slope, 0, self.name)
        self.global_slope = global_slope
        self.kind = kind

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        raise ValueError(f"{cls.name} hides keys outside of each head's field of view, which no gate takes back")

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        heads, shape = self.geometry.heads, (-1, *[1] * (offset.ndim - 1))
        directed = min(2 * heads // 3, heads - 1)
        offset = self.placed_offset(offset, extent)
        distance = torch.linalg.vector_norm(offset, dim=-1)
        free = [FREE_SLOPES[head % 4] for head in range(heads - directed)]
        slope = offset.new_tensor([1.0] * directed + free)
        bias = -self.global_slope * slope.view(shape) * distance  # [h, ...]

        up, right = offset[..., 0], -offset[..., 1]  # where the key is, seen from the query
        first = [FIRST_RAY[self.kind][head % 8] for head in range(directed)]
        rays = [(RAYS[ray], RAYS[(ray + self.kind // 45) % 8]) for ray in first]  # right and left edge of each view
        edges = offset.new_tensor(rays).view(-1, 2, 2)
        (from_x, from_y), (to_x, to_y) = ([c.view(shape) for c in edge.unbind(-1)] for edge in edges.unbind(1))
        seen = (from_x * up - from_y * right >= -ON_THE_EDGE) & (right * to_y - up * to_x >= -ON_THE_EDGE)
        return torch.cat([bias[:directed].masked_fill(~seen, -torch.inf), bias[directed:]])

    def slope_of(self, layer: int) -> float:
        return 1.5 - layer / max(self.geometry.depth - 1, 1)
