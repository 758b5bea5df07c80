"""Fixed sinusoids of row and column."""

from typing import Literal

import torch
from torch import Tensor

from vitpos.encoding import Encoding, Geometry, require_at_least, require_multiple
from vitpos.positions import Positions
from vitpos.spec import register


@register("sincos2d")
class SinCos2d(Encoding):
    """x_ij += sines and cosines of i w_k and j w_k, with w_k = T^(-k / (D/4)), k = 0 .. D/4 - 1; not learned.

    ``layout`` is the order of the four blocks of D/4 channels, which differs between codebases:
    ``timm`` sin i, sin j, cos i, cos j; ``moco`` sin i, cos i, sin j, cos j; ``mae`` sin j, cos j, sin i, cos i;
    ``big_vision`` as mae, but w_k = T^(-k / (D/4 - 1)). ``resize``: coordinates run on, or are scaled into the
    training grid.

    At (i, j) = (1, 0), D = 8 and T = 100 the frequencies are 1 and 0.1:

    >>> pos = Positions(torch.tensor([[[1.0, 0.0]]]), extent=(2, 2))
    >>> encoding = SinCos2d(Geometry(dim=8, heads=1, head_dim=8, depth=1, grid=(2, 2)), temperature=100.0)
    >>> [round(v, 3) for v in encoding.tokens(pos).flatten().tolist()]
    [0.841, 0.1, 0.0, 0.0, 0.54, 0.995, 1.0, 1.0]
    """

    summary = "fixed sines and cosines of row and column"
    paper = "Chen et al. 2021 (MoCo v3), arXiv:2104.02057; 1D form: Vaswani et al. 2017, arXiv:1706.03762, section 3.5"

    def __init__(
        self,
        geometry: Geometry,
        *,
        temperature: float = 10000.0,
        layout: Literal["timm", "mae", "moco", "big_vision"] = "timm",
        resize: Literal["extrapolate", "interpolate"] = "extrapolate",
    ) -> None:
        super().__init__(geometry, resize=resize)
        require_multiple("model width", geometry.dim, 4, self.name)
        require_at_least("temperature", temperature, 0, self.name, strictly=True)
        self.temperature = temperature
        self.layout = layout

    def tokens(self, pos: Positions) -> Tensor:
        y, x = self.phases(pos).squeeze(1).chunk(2, dim=-1)  # each [1 | B, N, D/4]
        blocks = {
            "timm": (y.sin(), x.sin(), y.cos(), x.cos()),
            "moco": (y.sin(), y.cos(), x.sin(), x.cos()),
        }.get(self.layout, (x.sin(), x.cos(), y.sin(), y.cos()))
        return torch.cat(blocks, dim=-1)

    def phases(self, pos: Positions) -> Tensor:
        bands = self.geometry.dim // 4
        last = max(bands - 1, 1) if self.layout == "big_vision" else bands
        coords = self.placed(pos)
        omega = coords.new_tensor([self.temperature ** (-k / last) for k in range(bands)])
        return (coords.unsqueeze(-1) * omega).flatten(-2).unsqueeze(1)  # first those of y, then those of x
