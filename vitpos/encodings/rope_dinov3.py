"""Rotary embedding of coordinates normalized by the sides of the grid, as in DINOv3."""

import math
from typing import Literal

from torch import Tensor

from vitpos.encoding import NO_PREFIX, Geometry, LinearRotary, require_at_least
from vitpos.encodings._rotary import axial, bands
from vitpos.positions import Positions, vector
from vitpos.spec import register


@register("rope_dinov3")
class RopeDinov3(LinearRotary):
    """Pair k rotates by 2 pi c_y base^(-4k/d) (first half of the pairs) or 2 pi c_x base^(-4k/d) (second half).

    c_y = 2 (y + 1/2) / H - 1 and c_x = 2 (x + 1/2) / W - 1; ``normalize``: H and W are the sides of the current
    grid, or both its shorter (``min``) or longer one (``max``). k = 0 .. d/4 - 1; channel k pairs with k + d/2.
    So the borders of every image have the same angles: its one resize policy is ``normalized``, the default and
    only one of the source. Class and register tokens are not rotated, as if they sat at the image's centre (with
    ``min`` and ``max``, where c = 0); ``free_prefix`` as in ``rope_axial``. The source's shift, jitter and rescaling
    of coordinates in training are no part of the encoding.

    At (i, j) = (1, 0) of a 2 x 2 grid c = (1/2, -1/2); d = 8 has the frequencies 1 and 0.1:

    >>> import torch
    >>> encoding = RopeDinov3(Geometry(dim=8, heads=1, head_dim=8, depth=1, grid=(4, 4)))
    >>> pos = Positions(torch.tensor([[[1.0, 0.0]]]), extent=(2, 2))
    >>> [round(v / math.pi, 3) for v in encoding.angles(pos).phase.flatten().tolist()]
    [1.0, 0.1, -1.0, -0.1]
    """

    summary = "q and k rotate, half of the channel pairs by the row, half by the column, relative to the image's size"
    paper = "Siméoni et al. 2025, DINOv3, arXiv:2508.10104; the code's layers/rope_position_encoding.py"
    laws = frozenset({"offset" + NO_PREFIX})
    constant = True
    variants = {
        "free_prefix=True": frozenset({"offset"}),
        "normalize='min'": frozenset({"offset" + NO_PREFIX}),
        "normalize='max'": frozenset({"offset" + NO_PREFIX}),
    }
    layout = "half"

    def __init__(
        self,
        geometry: Geometry,
        *,
        base: float = 100.0,
        normalize: Literal["separate", "min", "max"] = "separate",
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, resize="normalized", free_prefix=free_prefix)
        require_at_least("base", base, 0, self.name, strictly=True)
        self.base = base
        self.normalize = normalize

    def placed(self, pos: Positions) -> Tensor:
        sides = vector(pos.extent, pos.coords)
        sides = {"separate": sides, "min": sides.amin(), "max": sides.amax()}[self.normalize]
        return 2 * (pos.coords + 0.5) / sides - 1

    def frequencies(self, pos: Positions) -> Tensor:
        f = 2 * math.pi * pos.coords.new_tensor(bands(self.base, self.geometry.head_dim // 4))
        return axial(f_y=f, f_x=f).flip(-1)  # the first half of the pairs turns by y
