"""Learned vectors for buckets of offsets, met by queries or keys."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import Bias, Contextual, Geometry, OffsetBias, require_at_least
from vitpos.positions import Extent, Positions
from vitpos.spec import register

RATIOS = {"product": 1.9, "euclidean": 20.0}


def index(distance: int, ratio: float) -> int:
    """The paper's piecewise index of a whole distance: itself up to ratio, then logarithmic up to 2 ratio at 8 ratio.

    >>> [index(d, 1.9) for d in range(9)]
    [0, 1, 2, 2, 3, 3, 3, 3, 3]
    """
    if distance <= ratio:
        return distance
    return int(min(2 * ratio, round(ratio + math.log(distance / ratio) / math.log(8) * ratio)))


@register("irpe")
class ImageRpe(OffsetBias):
    """Logit of (query i, key j) += s q_i . K[b(i - j)], or s k_j . Q[b(j - i)], or both, or a plain P[b(i - j)].

    ``on`` says which: ``k`` (relative position on keys, as recommended), ``q``, ``qk``, ``bias``; s = 1 / sqrt(d).
    Buckets b by ``method``: ``product``, the pair of the piecewise indices of dy and dx (49 at the published
    ``ratio`` 1.9); ``euclidean``, that of the rounded distance (41 at ratio 20). One more bucket, the last, is for
    pairs with a prefix token. With ``shared_head`` the heads have the same vectors (as published) or biases.
    ``std`` is the standard deviation at initialization; the source starts from zeros.

    Mind that Q is read at key minus query and that P is not divided by sqrt(d), as in the published code (in the
    paper P is). Deviations: components of offsets that are no whole numbers are rounded (product); the source
    reserves 2 beta + 1 Euclidean buckets, of which distances use the beta + 1 here. Its terms on values are left
    out. ``resize``: offsets are taken as they are (far ones share the last buckets), or scaled into the training
    grid. With ``wrap`` they are the shorter way around the sides.

    Seven indices an axis, -3 .. 3: the offset (-1, 4) has bucket (3 - 1) 7 + (3 + 3), its opposite (3 + 1) 7 + 0:

    >>> encoding = ImageRpe(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(8, 8)))
    >>> encoding.bucket(torch.tensor([[-1.0, 4.0], [1.0, -4.0]])).tolist()
    [20, 28]
    """

    summary = "queries (or keys) meet a learned vector for each bucket of offsets, per layer"
    paper = "Wu et al. 2021, Image Relative Position Encoding (iRPE), arXiv:2107.14222, section 3; index: eq. 18"
    laws = frozenset({"offset"})
    variants = {
        "on='qk', method='euclidean'": frozenset({"offset", "transpose"}),
        "on='q'": frozenset({"offset"}),
        "on='bias', shared_head=False": frozenset({"offset"}),
        "wrap=True": frozenset({"offset", "circular"}),
    }
    per_layer = True
    zeros = ("keys", "queries", "biases")

    def __init__(
        self,
        geometry: Geometry,
        *,
        on: Literal["k", "q", "qk", "bias"] = "k",
        method: Literal["product", "euclidean"] = "product",
        ratio: float | None = None,
        shared_head: bool = True,
        std: float = 0.0,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)
        ratio = RATIOS[method] if ratio is None else ratio
        require_at_least("ratio", ratio, 0.5, self.name)
        require_at_least("std", std, 0, self.name)
        self.method = method
        self.std = std
        self.beta = int(2 * ratio)
        self.indices = [index(d, ratio) for d in range(math.ceil(8 * ratio) + 1)]
        buckets = 1 + ((2 * self.beta + 1) ** 2 if method == "product" else self.beta + 1)
        heads = 1 if shared_head else geometry.heads
        vectors = (heads, buckets, geometry.head_dim)
        self.keys = nn.Parameter(torch.empty(vectors)) if on in ("k", "qk") else None
        self.queries = nn.Parameter(torch.empty(vectors)) if on in ("q", "qk") else None
        self.biases = nn.Parameter(torch.empty(heads, buckets)) if on == "bias" else None
        self.reset_parameters()

    @classmethod
    def resolve(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "ratio": RATIOS[given["method"]] if given["ratio"] is None else given["ratio"]}

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.std)

    def bucket(self, offset: Tensor) -> Tensor:
        """The bucket (int64) of each offset [..., 2]."""
        of_distance = torch.tensor(self.indices, device=offset.device)
        if self.method == "euclidean":
            distance = torch.linalg.vector_norm(offset, dim=-1).round()
            return of_distance[distance.clamp(max=len(self.indices) - 1).long()]
        whole = offset.round()
        signed = of_distance[whole.abs().clamp(max=len(self.indices) - 1).long()] * whole.sign().long()
        row, column = (signed + self.beta).unbind(-1)
        return row * (2 * self.beta + 1) + column

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        if self.biases is None:
            return super().at(offset, extent)
        return self.biases[:, self.bucket(self.placed_offset(offset, extent))]

    def prefix_bias(self) -> Tensor | None:
        return None if self.biases is None else self.biases[:, -1:].expand(-1, 3)

    def bias(self, pos: Positions) -> Bias:
        if self.biases is not None:
            return super().bias(pos)
        offset = pos.coords.unsqueeze(2) - pos.coords.unsqueeze(1)  # [1 | B, N, N, 2]
        on_k: Tensor | None = self.queries
        if on_k is not None and self.method == "product":  # minus the offset has the bucket counted from the other end
            on_k = torch.cat([on_k[:, :-1].flip(1), on_k[:, -1:]], dim=1)
        return Contextual(self.bucket(self.placed_offset(offset, pos.extent)), on_q=self.keys, on_k=on_k)
