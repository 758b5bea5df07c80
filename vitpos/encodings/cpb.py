"""A small network of the log-spaced offset."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpos.encoding import Geometry, OffsetBias, require_at_least
from vitpos.positions import Extent
from vitpos.spec import register


@register("cpb")
class ContinuousPositionBias(OffsetBias):
    """Logit of (query, key) += 16 sigmoid(W2 relu(W1 c + b)) - 8, with c = sign(u) log2(1 + |u|) / log2(8) per axis.

    u = 8 (query - key) / (side - 1) with the sides of the training grid, so that an offset has one bias on every
    grid (a side of 1 divides by 1). One network of 2, ``hidden`` and h units a layer, the last without bias;
    ``std`` is the standard deviation of its weights at initialization. This is Swin v2's bias, not its cosine
    attention: q and k are left alone.

    ``center``: the 8 is subtracted, which changes nothing between patches and keeps pairs with a prefix token,
    which get 0, at the level of the others (Swin v2 has no such tokens). Without it the bias is the published
    16 sigmoid(...), and prefix tokens start some 8 below: a class token then hardly sees, or is seen.
    ``resize``: offsets are taken as they are (as published), or scaled into the training grid. With ``wrap`` they
    are the shorter way around the sides of the grid.

    With weights 1 and one hidden unit the offset (3, 0) of a 4 x 4 grid, u = 8, gives 16 sigmoid(log2(9)/3) - 8:

    >>> encoding = ContinuousPositionBias(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4)), hidden=1)
    >>> for weight in (encoding.inner, encoding.outer): _ = nn.init.ones_(weight)
    >>> round(encoding.at(torch.tensor([3.0, 0.0]), (4, 4)).item(), 4)
    3.8728
    """

    summary = "logit bias from a small network of the log-spaced offset, per layer"
    paper = "Liu et al. 2022, Swin Transformer V2, arXiv:2111.09883, eq. 3-4"
    laws = frozenset({"offset"})
    variants = {"wrap=True": frozenset({"offset", "circular"}), "center=False": frozenset({"offset"})}
    per_layer = True
    zeros = ("outer",)

    def __init__(
        self,
        geometry: Geometry,
        *,
        hidden: int = 512,
        std: float = 0.02,
        center: bool = True,
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
        wrap: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, wrap=wrap)
        require_at_least("hidden", hidden, 1, self.name)
        require_at_least("std", std, 0, self.name)
        self.std = std
        self.center = center
        self.inner = nn.Parameter(torch.empty(hidden, 2))  # from (y, x)
        self.inner_bias = nn.Parameter(torch.empty(hidden))
        self.outer = nn.Parameter(torch.empty(geometry.heads, hidden))
        self.reset_parameters()

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        if not given["center"]:
            raise ValueError(f"{cls.name}(center=False) begins 8 above pairs with a class or register token")
        return super().beginning(given)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.inner, std=self.std)
        nn.init.zeros_(self.inner_bias)
        nn.init.trunc_normal_(self.outer, std=self.std)

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        side = offset.new_tensor([max(side - 1, 1) for side in self.geometry.grid])
        u = 8 * self.placed_offset(offset, extent) / side
        c = u.sign() * u.abs().log1p() / math.log(8)
        inner, inner_bias, outer = (p.to(c.dtype) for p in (self.inner, self.inner_bias, self.outer))
        z = F.linear(F.linear(c, inner, inner_bias).relu(), outer)
        return (16 * z.sigmoid() - (8 if self.center else 0)).movedim(-1, 0)
