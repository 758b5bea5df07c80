"""An elliptic function of the place in the image."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpos.encoding import Encoding, Geometry, require_at_least
from vitpos.positions import Positions, vector
from vitpos.spec import register

HALF_PERIOD = 2.62205755429212  # Gamma(1/4)^2 / (2 sqrt(2 pi))
REACH = 12  # lattice points 2 (m + i n) HALF_PERIOD with |m|, |n| up to this
POLE = 1.5e-7  # nearer to a lattice point its term is left out


def elliptic(x: Tensor, y: Tensor) -> Tensor:
    """The Weierstrass function and its derivative at z = x + i y [...]: Re P, Im P, Re P', Im P' [..., 4].

    P(z) = 1/z^2 + sum over w of 1/(z - w)^2 - 1/w^2, P'(z) = -2/z^3 - sum over w of 2/(z - w)^3, w through the 624
    points of a square lattice with |m|, |n| <= 12 but the origin. Over a square the terms 1/w^2 cancel: w and i w.

    At a half-period P is sqrt(g2) / 2 and P' is 0:

    >>> [round(v, 3) for v in elliptic(torch.tensor(HALF_PERIOD), torch.tensor(0.0)).tolist()]
    [0.25, 0.0, -0.0, 0.0]
    """
    steps = torch.arange(-REACH, REACH + 1, device=x.device, dtype=x.dtype) * (2 * HALF_PERIOD)
    dx, dy = x[..., None, None] - steps[:, None], y[..., None, None] - steps  # [..., 25, 1] and [..., 1, 25]
    square = dx * dx + dy * dy
    away = square > POLE**2
    inverse = away / square.where(away, 1)
    re, im = dx * inverse, -dy * inverse  # 1 / (z - w)
    re2, im2 = re * re - im * im, 2 * re * im
    parts = (re2, im2, -2 * (re2 * re - im2 * im), -2 * (re2 * im + im2 * re))
    return torch.stack([part.sum((-2, -1)) for part in parts], dim=-1)


@register("weierstrass")
class Weierstrass(Encoding):
    """x_p += s LN(A tanh(alpha [Re P, Im P, Re P', Im P'](z)) + b), with P the Weierstrass elliptic function.

    z = 0.8 w1 u + 0.8 i w3 v at the fractions u = (j + 1/2) / W and v = (i + 1/2) / H of the image, so that any grid
    is covered; s, alpha, w3 and the layers A, b, LN are learned. ``alpha`` and ``gain`` are the initial alpha and s;
    w3 starts at softplus(0.12) = 0.755 and is limited to 0.02 .. 8.

    As the authors' code has it. Their lattice is square and fixed: 2 w1 (m + i n) with w1 = 2.62206, whatever w3
    is, and only |m|, |n| <= 12 enter. They label it g2 = 1, g3 = 0, but this lattice has g2 = 1/4; g2 = 1 would need
    w1 = 1.85407. While w3 is below 3.28, z stays inside a quarter of a period cell, so that the periodicity does not
    come into play; tanh saturates near the pole at the corner of the image.

    Deviations: the class token has no vector of its own here (it is learned anyway); alpha is not limited (in the
    code to 0.002 .. 0.8, where it gets no gradient); computed in float32, or float64 in a float64 model, instead of
    complex128; single terms are not limited, which matters outside the image only.

    >>> from vitpos.positions import grid
    >>> encoding = Weierstrass(Geometry(dim=2, heads=1, head_dim=2, depth=1, grid=(1, 1)), alpha=1.0, gain=0.5)
    >>> _ = encoding.project.weight.data.copy_(torch.tensor([[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    >>> [round(v, 3) for v in encoding.tokens(grid(1, 1)).flatten().tolist()]  # Im P < 0; LN gives (-1, 1)
    [-0.5, 0.5]
    """

    summary = "the Weierstrass elliptic function of the place in the image, through a linear layer"
    paper = "Weierstrass Elliptic Function Positional Encoding (WEF-PE) 2025, arXiv:2508.19167, as in its code"
    zeros = ("gain",)

    def __init__(self, geometry: Geometry, *, alpha: float = 0.15, gain: float = 0.8) -> None:
        super().__init__(geometry, resize="normalized")
        require_at_least("alpha", alpha, 0, self.name, strictly=True)
        require_at_least("gain", gain, 0, self.name)
        self.initial = (math.log(alpha), 0.12, gain)
        self.log_alpha = nn.Parameter(torch.empty(1))
        self.aspect = nn.Parameter(torch.empty(1))  # softplus of it is w3
        self.gain = nn.Parameter(torch.empty(1))
        self.project = nn.Linear(4, geometry.dim)
        self.norm = nn.LayerNorm(geometry.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter, value in zip((self.log_alpha, self.aspect, self.gain), self.initial):
            nn.init.constant_(parameter, value)
        nn.init.trunc_normal_(self.project.weight, std=0.02)
        nn.init.zeros_(self.project.bias)
        self.norm.reset_parameters()

    def tokens(self, pos: Positions) -> Tensor:
        v, u = ((pos.coords + 0.5) / vector(pos.extent, pos.coords)).unbind(-1)  # each [1 | B, N]
        w3 = F.softplus(self.aspect).clamp(0.02, 8.0)
        features = elliptic(0.8 * HALF_PERIOD * u, 0.8 * w3 * v).clamp(-1e4, 1e4)
        return self.gain * self.norm(self.project(torch.tanh(self.log_alpha.exp() * features)))
