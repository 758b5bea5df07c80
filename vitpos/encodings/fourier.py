"""Learnable Fourier features."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpos.encoding import Encoding, Geometry, require_at_least, require_multiple
from vitpos.positions import Positions
from vitpos.spec import register


@register("fourier")
class Fourier(Encoding):
    """x_p += W2 GELU(W1 r + b1) + b2, r = [cos(W_r p), sin(W_r p)] / sqrt(F), everything learned.

    ``features`` is F, ``hidden`` the width of the MLP. W_r [F/2, 2] starts as N(0, gamma^-2), so that r_p . r_q is
    near exp(-|p - q|^2 / (2 gamma^2)) / 2. gamma^-2 is a variance, as in the paper: W_r has standard deviation
    1 / gamma. (A widespread third-party implementation takes gamma^-2 for the standard deviation.)

    p = (i, j) is the place in the image, measured in patches of the training grid, so that gamma is a distance in
    patches; in units of the image's side, gamma = 10 would leave the encoding almost constant. ``resize``: the
    same place of the image stays at the same p, or coordinates run on. The paper gives no initialization of the
    MLP; here Glorot-uniform weights and zero biases.

    With F = 2 and W_r = (0, pi/2) the patch at (0, 1) has phase pi/2 and r = (0, 1) / sqrt(2). Let W1 = (0, sqrt 2),
    W2 = 2 and b2 = 1: the result is 2 GELU(1) + 1, where GELU(1) is the normal distribution function at 1, 0.8413.

    >>> encoding = Fourier(Geometry(dim=1, heads=1, head_dim=1, depth=1, grid=(2, 2)), features=2, hidden=1)
    >>> _ = encoding.frequencies.data.copy_(torch.tensor([[0.0, math.pi / 2]]))
    >>> _ = encoding.inner.weight.data.copy_(torch.tensor([[0.0, math.sqrt(2)]]))
    >>> _, _ = encoding.outer.weight.data.fill_(2.0), encoding.outer.bias.data.fill_(1.0)
    >>> round(encoding.tokens(Positions(torch.tensor([[[0.0, 1.0]]]), extent=(2, 2))).item(), 4)
    2.6827
    """

    summary = "learned Fourier features of the place in the image, through an MLP"
    paper = "Li et al. 2021, Learnable Fourier Features, arXiv:2106.02795, eq. 2 and 6, algorithm 1"
    zeros = ("outer.weight", "outer.bias")

    def __init__(
        self,
        geometry: Geometry,
        *,
        features: int = 768,
        hidden: int = 32,
        gamma: float = 10.0,
        resize: Literal["interpolate", "extrapolate"] = "interpolate",
    ) -> None:
        super().__init__(geometry, resize=resize)
        require_multiple("number of features", features, 2, self.name)
        require_at_least("hidden", hidden, 1, self.name)
        require_at_least("gamma", gamma, 0, self.name, strictly=True)
        self.gamma = gamma
        self.frequencies = nn.Parameter(torch.empty(features // 2, 2))  # the last axis (y, x)
        self.inner = nn.Linear(features, hidden)
        self.outer = nn.Linear(hidden, geometry.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.frequencies, std=1 / self.gamma)
        for layer in (self.inner, self.outer):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def tokens(self, pos: Positions) -> Tensor:
        phase = self.phases(pos).squeeze(1)  # [1 | B, N, F/2]
        waves = torch.cat([phase.cos(), phase.sin()], dim=-1) / math.sqrt(2 * phase.shape[-1])
        return self.outer(F.gelu(self.inner(waves)))

    def phases(self, pos: Positions) -> Tensor:
        return F.linear(self.placed(pos), self.frequencies).unsqueeze(1)
