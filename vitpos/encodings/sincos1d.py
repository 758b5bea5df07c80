"""Fixed sinusoids of the flattened index."""

from typing import Literal

import torch
from torch import Tensor

from vitpos.encoding import Encoding, Geometry, require_at_least, require_multiple
from vitpos.positions import Positions, sample_plane
from vitpos.spec import register


@register("sincos1d")
class SinCos1d(Encoding):
    """x_n += sin and cos of n w_k in channels 2k and 2k + 1, n = i W + j, w_k = T^(-2k / D); not learned.

    The flattened index hides the second dimension: the patch below is as far as W patches to the right, and what
    n means changes with W. ``resize``: the sinusoids of the training grid are a table, read bilinearly at the
    same place of the image (the default); or n is computed with the width of the current grid, which moves every
    row below the first to vectors of other places (the diagonal stripes known from such checkpoints).

    On a 2 x 3 grid (i, j) = (1, 0) is index 3; with D = 4 and T = 100 the frequencies are 1 and 0.1:

    >>> encoding = SinCos1d(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(2, 3)), temperature=100.0)
    >>> pos = Positions(torch.tensor([[[1.0, 0.0]]]), extent=(2, 3))
    >>> [round(v, 3) for v in encoding.tokens(pos).flatten().tolist()]
    [0.141, -0.99, 0.296, 0.955]
    """

    summary = "fixed sines and cosines of the index in the flattened grid"
    paper = "Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762, section 3.5"

    def __init__(
        self,
        geometry: Geometry,
        *,
        temperature: float = 10000.0,
        resize: Literal["interpolate", "extrapolate"] = "interpolate",
    ) -> None:
        super().__init__(geometry, resize=resize)
        require_multiple("model width", geometry.dim, 2, self.name)
        require_at_least("temperature", temperature, 0, self.name, strictly=True)
        self.temperature = temperature

    def tokens(self, pos: Positions) -> Tensor:
        if self.resize == "extrapolate":
            return _waves(self._turned(pos.coords[..., 0] * pos.extent[1] + pos.coords[..., 1]))
        height, width = self.geometry.grid
        table = self._turned(torch.arange(height * width, device=pos.coords.device, dtype=pos.coords.dtype))
        return sample_plane(_waves(table).unflatten(0, (height, width)), self.placed(pos))

    def phases(self, pos: Positions) -> Tensor:
        width = pos.extent[1] if self.resize == "extrapolate" else self.geometry.grid[1]
        at = self.placed(pos)
        return self._turned(at[..., 0] * width + at[..., 1]).unsqueeze(1)

    def _turned(self, index: Tensor) -> Tensor:
        """n w_k [..., D/2] of indices [...]."""
        dim = self.geometry.dim
        return index.unsqueeze(-1) * index.new_tensor([self.temperature ** (-2 * k / dim) for k in range(dim // 2)])


def _waves(phase: Tensor) -> Tensor:
    """Sines and cosines [..., D] in turn."""
    return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2)
