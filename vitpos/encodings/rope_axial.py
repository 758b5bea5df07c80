"""Two-dimensional rotary embedding, half of the channels for each axis."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from vitpos.encoding import NO_PREFIX, Geometry, LinearRotary, require_at_least
from vitpos.positions import Positions
from vitpos.spec import register


def ladder(pairs: int, side: int) -> list[int]:
    """Whole cycles around a side, for ``pairs`` channel pairs: k_m = round(K^(1 - m/(pairs-1))), K = max(1, side // 2).

    >>> ladder(4, 14)
    [7, 4, 2, 1]
    """
    most = max(1, side // 2)
    return [round(most ** (1 - m / max(pairs - 1, 1))) for m in range(pairs)]


@register("rope_axial")
class RopeAxial(LinearRotary):
    """Channel pairs rotate by x f_k (first half of the pairs) or y f_k (second half), f_k = theta^(-4k/d).

    k = 0 .. d/4 - 1; pairs are interleaved channels. ``resize``: coordinates run on (as published), or are
    scaled into the training grid. Class and register tokens are not rotated, which tells them where the
    origin is: shifting all coordinates leaves the output unchanged only without such tokens, or with
    ``free_prefix``, under which logits that involve them use unrotated q and k (a second attention call).

    With ``wrap`` the image is a torus: the frequencies are whole cycles around a side, 2 pi k_m / S, with the
    k_m of ``ladder`` (at most S // 2 distinct ones; theta is not used). On another grid the training side's
    cycles are kept (``interpolate``, then the default) or taken anew (``extrapolate``).

    At (i, j) = (2, 3), d = 8 and theta = 100 the frequencies are 1 and 0.1:

    >>> encoding = RopeAxial(Geometry(dim=8, heads=1, head_dim=8, depth=1, grid=(4, 4)))
    >>> pos = Positions(torch.tensor([[[2.0, 3.0]]]), extent=(4, 4))
    >>> [round(v, 3) for v in encoding.angles(pos).phase.flatten().tolist()]
    [3.0, 0.3, 2.0, 0.2]
    """

    summary = "q and k rotate, half of the channel pairs by the column, half by the row"
    paper = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer, arXiv:2403.13298, eq. 6-7"
    laws = frozenset({"offset" + NO_PREFIX})
    variants = {
        "free_prefix=True": frozenset({"offset"}),
        "wrap=True": frozenset({"offset" + NO_PREFIX, "circular" + NO_PREFIX}),
        "wrap=True, free_prefix=True": frozenset({"offset", "circular"}),
    }

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float = 100.0,
        resize: Literal["extrapolate", "interpolate"] | None = None,
        wrap: bool = False,
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, free_prefix=free_prefix)
        require_at_least("theta", theta, 0, self.name, strictly=True)
        self.theta = theta
        self.wrap = wrap

    @classmethod
    def resolve(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "resize": given["resize"] or ("interpolate" if given["wrap"] else "extrapolate")}

    def placed(self, pos: Positions) -> Tensor:
        return pos.coords if self.wrap else super().placed(pos)

    def frequencies(self, pos: Positions) -> Tensor:
        quarter = self.geometry.head_dim // 4
        if self.wrap:
            sides = self.geometry.grid if self.resize == "interpolate" else pos.extent
            cycles = pos.coords.new_tensor([ladder(quarter, side) for side in sides])  # [(y, x), d/4]
            f_y, f_x = 2 * math.pi * cycles / pos.coords.new_tensor(pos.extent).unsqueeze(-1)
        else:
            f_y = f_x = pos.coords.new_tensor([self.theta ** (-k / quarter) for k in range(quarter)])
        zero = torch.zeros_like(f_y)
        return torch.stack([torch.cat([zero, f_y]), torch.cat([f_x, zero])], dim=-1).unsqueeze(0)  # [1, d/2, (y, x)]
