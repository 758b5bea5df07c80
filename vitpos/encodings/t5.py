"""Learned biases of bucketed row and column offsets."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Geometry, OffsetBias, require_at_least, require_multiple
from vitpos.positions import Extent
from vitpos.spec import register


def bucket(distance: int, count: int, max_distance: int) -> int:
    """T5's bucket, of ``count``, of a whole distance: one each below count/2, then logarithmic up to the maximum.

    >>> [bucket(d, 16, 128) for d in (0, 7, 8, 9, 16, 32, 127, 500)]
    [0, 7, 8, 8, 10, 12, 15, 15]
    """
    exact = count // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(count - 1, exact + math.floor(share * (count - exact) + 1e-9))  # whole shares are not for rounding


@register("t5")
class T5Bias(OffsetBias):
    """Logit of (query, key) += rows[head, bucket(dy)] + columns[head, bucket(dx)] with (dy, dx) = query - key.

    Half of the ``num_buckets`` of an axis are for keys after the query (dy < 0), half for the others: one for each
    offset below num_buckets / 4, then logarithmic up to ``max_distance``, beyond which all share the last. Tables
    are shared by all layers, as in T5. Offsets that are no whole numbers are rounded. Pairs with a prefix token
    get 0. ``std`` is the standard deviation at initialization, by default 1 / sqrt(width).

    Our deviations: T5 is one-dimensional, has a maximum of 128 (here by default twice the longer side of the
    training grid) and does not divide its logits by sqrt(d). ``resize``: offsets are taken as they are, or scaled
    into the training grid. With ``wrap`` they are the shorter way around the sides of the grid.

    With 8 buckets and a maximum of 8, an axis has the distances 0, 1, 2-3 and 4 up, twice. A key two rows below and
    one column to the left of its query is at (-2, 1): row bucket 4 + 2, column bucket 1:

    >>> geometry = Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4))
    >>> encoding = T5Bias(geometry, num_buckets=8, max_distance=8)
    >>> _ = encoding.rows.data.copy_(torch.arange(8.0)), encoding.columns.data.copy_(10 * torch.arange(8.0))
    >>> encoding.at(torch.tensor([-2.0, 1.0]), (4, 4)).item()
    16.0
    """

    summary = "learned logit bias for each bucket of row and column offsets, per head, shared by all layers"
    paper = "Raffel et al. 2020, T5, arXiv:1910.10683, section 2.1"
    laws = frozenset({"offset"})
    variants = {"wrap=True": frozenset({"offset", "circular"})}
    zeros = ("rows", "columns")

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_buckets: int = 32,
        max_distance: int | None = None,
        std: float | None = None,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)
        require_multiple("num_buckets", num_buckets, 4, self.name)
        exact = num_buckets // 4
        farthest = max(2 * max(geometry.grid), 2 * exact) if max_distance is None else max_distance
        require_at_least("max_distance", farthest, exact, f"{self.name} with {num_buckets} buckets", strictly=True)
        if farthest > 10_000:
            raise ValueError(f"{self.name}: max_distance={farthest} patches is beyond any image; use at most 10000")
        self.max_distance = farthest
        self.std = geometry.dim**-0.5 if std is None else std
        require_at_least("std", self.std, 0, self.name)
        self.buckets = [bucket(d, num_buckets // 2, farthest) for d in range(farthest + 1)]
        self.rows = nn.Parameter(torch.empty(geometry.heads, num_buckets))
        self.columns = nn.Parameter(torch.empty(geometry.heads, num_buckets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rows, std=self.std)
        nn.init.normal_(self.columns, std=self.std)

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        whole = self.placed_offset(offset, extent).round()
        of_distance = torch.tensor(self.buckets, device=offset.device)
        index = of_distance[whole.abs().clamp(max=len(self.buckets) - 1).long()]
        rows, columns = (index + (whole < 0) * (self.rows.shape[1] // 2)).unbind(-1)
        return self.rows[:, rows] + self.columns[:, columns]
