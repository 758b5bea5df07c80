"""STRING: rotary embedding in a learned basis."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import NO_PREFIX, Geometry, LinearRotary, require_at_least
from vitpos.encodings._rotary import Resize, axial, bands, skew, stretch
from vitpos.positions import Positions
from vitpos.spec import register


@register("string")
class String(LinearRotary):
    """R(y, x) = P^T RoPE(y, x) P, with a learned orthogonal P = (I - S)(I + S)^-1 of each layer and head.

    S is skew-symmetric (the Cayley form of the paper); the outer P^T cancels between q and k. RoPE is that of
    ``rope_axial``: frequencies theta^(-4k/d), x before y, interleaved pairs; with ``learned`` each pair has its own
    learned frequency of y and of x, which starts there. ``resize`` as in ``rope_axial``. Class and register
    tokens are not rotated, but turned into the basis with the rest; ``free_prefix`` as in ``rope_axial``.

    The paper gives no initialization of S and no base for images: here S has standard deviation ``std`` (with 0
    it starts as ``rope_axial``), theta is 100. The circulant form is left out. Because P folds into the weights
    of q and k, this is no larger class of functions than RoPE with those frequencies (``vitpos.conversions``
    folds it): what it adds is another parametrization to learn in.

    For d = 2 channels out of 4, S = [[0, 1], [-1, 0]] gives P = [[0, -1], [1, 0]]:

    >>> encoding = String(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4)))
    >>> _ = encoding.upper.data.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    >>> encoding.basis()[0].round().int().tolist()
    [[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """

    summary = "q and k are turned into a learned basis, then rotate as in rope_axial, per layer and head"
    paper = "Schenck et al. 2025, Learning the RoPEs (STRING), arXiv:2502.02562, Cayley-STRING"
    laws = frozenset({"offset" + NO_PREFIX})
    variants = {
        "free_prefix=True": frozenset({"offset"}),
        "learned=True": frozenset({"offset" + NO_PREFIX}),
    }
    per_layer = True
    zeros = ("upper",)

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float = 100.0,
        learned: bool = False,
        std: float = 0.02,
        resize: Resize = "extrapolate",
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, resize=resize, free_prefix=free_prefix)
        require_at_least("theta", theta, 0, self.name, strictly=True)
        require_at_least("std", std, 0, self.name)
        self.theta = theta
        self.std = std
        heads, width = geometry.heads, geometry.head_dim
        self.upper = nn.Parameter(torch.empty(heads, width * (width - 1) // 2))
        self.weight = nn.Parameter(torch.empty(heads, width // 2, 2)) if learned else None
        self.reset_parameters()

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        return "gate"  # with the basis at the identity

    def reset_parameters(self) -> None:
        nn.init.normal_(self.upper, std=self.std)
        if self.weight is not None:
            with torch.no_grad():
                self.weight.copy_(self._axial(self.weight))

    def _axial(self, like: Tensor, factors: Any = 1.0) -> Tensor:
        f_y, f_x = like.new_tensor(bands(self.theta, self.geometry.head_dim // 4)).expand(2, -1) * factors
        return axial(f_y, f_x)

    def basis(self) -> Tensor:
        s = skew(self.upper, self.geometry.head_dim)
        one = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
        return torch.linalg.solve(one + s, one - s)  # the two commute; I + S is never singular

    def frequencies(self, pos: Positions) -> Tensor:
        factors = stretch(self, pos, self.geometry.head_dim // 4)
        if self.weight is None:
            return self._axial(pos.coords, factors)
        return self.weight.to(pos.coords.dtype) * factors.repeat(1, 2).mT
