"""Two-dimensional rotary embedding with learned frequencies that mix the axes."""

import math

import torch
from torch import Tensor, nn

from vitpos.encoding import NO_PREFIX, Geometry
from vitpos.encodings._rotary import PatchRotary, Resize, bands, radians, stretch
from vitpos.positions import Positions, vector
from vitpos.spec import register


@register("rope_mixed")
class RopeMixed(PatchRotary):
    """Channel pair k rotates by y f_y + x f_x with learned frequencies, one set a layer and head.

    They start with magnitudes theta^(-4k/d), k = 0 .. d/4 - 1: the first half of the pairs in a direction drawn
    per layer and head, the second half at a right angle to it. Pairs are interleaved channels. ``resize`` and
    ``free_prefix`` as in ``rope_axial`` (``ntk`` takes k from a pair's place, not from what its frequency has
    become); class and register tokens are not rotated.

    With ``wrap`` the image is a torus: frequencies are whole cycles around a side. The learned weights are then
    cycles, rounded to integers with a straight-through gradient; they start with magnitudes K^(1 - k/(d/4 - 1)),
    K = max(1, S // 2) of the training grid's longer side S. On another grid the number of cycles is kept
    (``interpolate``, then the default) or grows with the side (``extrapolate``).

    >>> encoding = RopeMixed(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4)))
    >>> _ = encoding.weight.data.copy_(torch.tensor([[[10.0, 1.0], [0.0, 0.5]]]))  # [head, pair, (y, x)]
    >>> pos = Positions(torch.tensor([[[2.0, 3.0]]]), extent=(4, 4))
    >>> encoding.angles(pos).phase.flatten().tolist()  # 2 * 10 + 3 * 1 and 2 * 0 + 3 * 0.5
    [23.0, 1.5]
    """

    summary = (
        "q and k rotate by learned mixtures of row and column, per layer and head; with wrap by whole cycles around "
        "a side, of which S patches tell 0 .. S // 2 apart (up to sign)"
    )
    paper = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer, arXiv:2403.13298, eq. 8-9"
    laws = frozenset({"offset" + NO_PREFIX})
    variants = {
        "free_prefix=True": frozenset({"offset"}),
        "wrap=True": frozenset({"offset" + NO_PREFIX, "circular" + NO_PREFIX}),
        "wrap=True, free_prefix=True": frozenset({"offset", "circular"}),
    }
    per_layer = True
    by_frequencies = True
    zeros = ("weight",)

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float = 10.0,
        resize: Resize | None = None,
        wrap: bool = False,
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, theta=theta, resize=resize, wrap=wrap, free_prefix=free_prefix)
        self.weight = nn.Parameter(torch.empty(geometry.heads, geometry.head_dim // 2, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        quarter = self.geometry.head_dim // 4
        if self.wrap:
            most = max(1, max(self.geometry.grid) // 2)
            magnitude = [most ** (1 - k / max(quarter - 1, 1)) for k in range(quarter)]
        else:
            magnitude = bands(self.theta, quarter)
        with torch.no_grad():
            direction = 2 * math.pi * torch.rand(self.geometry.heads, 1, device=self.weight.device)
            phi = torch.cat([direction.expand(-1, quarter), direction.expand(-1, quarter) + math.pi / 2], dim=-1)
            self.weight.copy_(torch.stack([phi.sin(), phi.cos()], dim=-1) * phi.new_tensor(magnitude * 2).unsqueeze(-1))

    def frequencies(self, pos: Positions) -> Tensor:
        if not self.wrap and self.resize != "ntk":
            return self.weight.to(pos.coords.dtype)
        if not self.wrap:
            factors = stretch(self, pos, self.geometry.head_dim // 4).repeat(1, 2).mT  # [d/2, (y, x)]
            return self.weight.to(pos.coords.dtype) * factors
        cycles = self.weight.to(pos.coords.dtype)
        if self.resize == "extrapolate":
            cycles = cycles * vector(pos.extent, cycles) / cycles.new_tensor(self.geometry.grid)
        return radians(cycles + (cycles.round() - cycles).detach(), pos.extent)
