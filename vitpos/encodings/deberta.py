"""Disentangled attention: content meets relative position in both directions."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Contextual, Geometry, OffsetBias, require_at_least
from vitpos.positions import Positions
from vitpos.spec import register


@register("deberta")
class Deberta(OffsetBias):
    """Logit of (query i, key j) = (q_i . k_j + q_i . K[b] + k_j . Q[b]) / sqrt(3d), with b the bucket of i - j.

    A bucket is the offset per axis, clipped to [-s, s - 1]; ``span`` is s, by default the training grid's side.
    With ``table="axes"`` vectors are the sum of one for dy and one for dx, with ``joint`` there is one for each
    pair. Pairs with a prefix token have a bucket of their own, the last. ``terms``: content to position (c2p, with
    K), position to content (p2c, with Q) or both; the scale counts them. ``std`` is the standard deviation at
    initialization.

    Q is read at the same bucket as K, as the published code does; the paper writes i and j exchanged. Two
    dimensions are our adaptation. DeBERTa projects one table that all layers share to K and Q in each; here every
    layer learns its K and Q outright. Components of offsets that are no whole numbers are rounded. ``resize``:
    offsets are taken as they are and clipped, or scaled into the training grid. With ``wrap`` they are the
    shorter way around the sides of the grid.

    On a 2 x 3 grid s is (2, 3), with 4 row and 6 column buckets; (1, -1) lies at (1 + 2) 6 + (-1 + 3):

    >>> encoding = Deberta(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(2, 3)))
    >>> encoding.bucket(torch.tensor([1.0, -1.0])).item()
    20
    """

    summary = "queries and keys meet learned vectors of the clipped offset, per layer and head (our 2D adaptation)"
    paper = "He et al. 2021, DeBERTa, arXiv:2006.03654, eq. 4"
    laws = frozenset({"offset"})
    variants = {
        "table='joint'": frozenset({"offset"}),
        "terms='c2p'": frozenset({"offset"}),
        "wrap=True": frozenset({"offset", "circular"}),
    }
    per_layer = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        table: Literal["axes", "joint"] = "axes",
        terms: Literal["both", "c2p", "p2c"] = "both",
        span: int | None = None,
        std: float = 0.02,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)
        self.spans = geometry.grid if span is None else (span, span)
        self.span = span or (self.spans[0] if self.spans[0] == self.spans[1] else None)
        require_at_least("span", min(self.spans), 1, self.name)
        require_at_least("std", std, 0, self.name)
        self.table = table
        self.std = std
        rows, columns = (2 * span for span in self.spans)
        entries = 1 + (rows + columns if table == "axes" else rows * columns)
        shape = (geometry.heads, entries, geometry.head_dim)
        self.keys = nn.Parameter(torch.empty(shape)) if terms != "p2c" else None
        self.queries = nn.Parameter(torch.empty(shape)) if terms != "c2p" else None
        self.reset_parameters()

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        raise ValueError(f"{cls.name} divides the logits by sqrt(3 d) or sqrt(2 d), a model without it by sqrt(d)")

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.std)

    def bucket(self, offset: Tensor) -> Tensor:
        """The bucket (int64) of each offset [..., 2]."""
        span = torch.tensor(self.spans, device=offset.device)
        row, column = (offset.round().long() + span).clamp(torch.zeros_like(span), 2 * span - 1).unbind(-1)
        return row * (2 * self.spans[1]) + column

    def vectors(self, table: Tensor | None) -> Tensor | None:
        """One vector for each bucket and the prefix's [h, buckets + 1, d]."""
        if table is None or self.table == "joint":
            return table
        rows, columns, prefix = table.split([2 * self.spans[0], 2 * self.spans[1], 1], dim=1)
        return torch.cat([(rows.unsqueeze(2) + columns.unsqueeze(1)).flatten(1, 2), prefix], dim=1)

    def bias(self, pos: Positions) -> Contextual:
        offset = pos.coords.unsqueeze(2) - pos.coords.unsqueeze(1)  # [1 | B, N, N, 2]
        buckets = self.bucket(self.placed_offset(offset, pos.extent))
        return Contextual(buckets, on_q=self.vectors(self.keys), on_k=self.vectors(self.queries))

    def scale(self, pos: Positions) -> float:
        return (1 + sum(table is not None for table in (self.keys, self.queries))) ** -0.5
