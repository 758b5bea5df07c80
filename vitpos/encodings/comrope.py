"""ComRoPE: rotations by the exponential of learned generators that commute."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitpos.encoding import NO_PREFIX, Geometry, Rotary, Rotations
from vitpos.encodings._rotary import block_width
from vitpos.positions import Positions, vector
from vitpos.spec import register


@register("comrope")
class ComRope(Rotary):
    """Block k of the channels turns by exp(t_k (P_k - P_k^T)), with a learned P_k of each layer and head.

    ``kind="ap"`` (axial partition): t_k = p_y for even k, p_x for odd k. ``kind="ld"`` (linearly dependent):
    t_k = theta_y,k p_y + theta_x,k p_x with learned theta, shared by the heads of a layer. P and theta start
    standard normal. All generators commute, so that R(p)^T R(q) = R(q - p). ``block`` must cut the head width into
    at least two blocks; by default it is the largest possible width of at most 8 (8 at the usual widths).

    p = ((y + 1/2) / H, (x + 1/2) / W) on the current grid: the one resize policy is ``normalized``, as published.
    Deviation: the paper's code rotates the class token as if at (1/2, 1/2); here class and register tokens are
    not rotated, as if at the image's corner p = (0, 0), or free of position with ``free_prefix`` (see
    ``rope_axial``). Its jitter of coordinates in training is no part of the encoding.

    Two blocks of two channels; at (1, 0) of a 2 x 2 grid p = (3/4, 1/4), and P - P^T = [[0, a], [-a, 0]] with
    a = 2 pi turns the first block by -3/4 of a circle and the second by -1/4:

    >>> encoding = ComRope(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(2, 2)))
    >>> _ = encoding.weight.data.copy_(torch.tensor([[0.0, 2 * torch.pi], [0.0, 0.0]]).expand(1, 2, 2, 2))
    >>> pos = Positions(torch.tensor([[[1.0, 0.0]]]), extent=(2, 2))
    >>> encoding.angles(pos).matrix.round().int().flatten(0, 3).tolist()
    [[[0, -1], [1, 0]], [[0, 1], [-1, 0]]]
    """

    summary = "q and k turn by the exponential of learned generators of row and column, which commute"
    paper = "Yu et al. 2025, ComRoPE, arXiv:2506.03737, ComRoPE-AP and ComRoPE-LD"
    laws = frozenset({"offset" + NO_PREFIX})
    variants = {
        "kind='ld'": frozenset({"offset" + NO_PREFIX}),
        "free_prefix=True": frozenset({"offset"}),
        "kind='ld', free_prefix=True": frozenset({"offset"}),
    }
    per_layer = True
    zeros = ("weight",)

    def __init__(
        self,
        geometry: Geometry,
        *,
        kind: Literal["ap", "ld"] = "ap",
        block: int | None = None,
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, resize="normalized", free_prefix=free_prefix)
        self.kind = kind
        self.block = width = block_width(geometry.head_dim, block, self.name, blocks=2)
        blocks = geometry.head_dim // width
        self.weight = nn.Parameter(torch.empty(geometry.heads, blocks, width, width))
        self.theta = nn.Parameter(torch.empty(2, blocks)) if kind == "ld" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def placed(self, pos: Positions) -> Tensor:
        return (pos.coords + 0.5) / vector(pos.extent, pos.coords)

    def angles(self, pos: Positions) -> Rotations:
        weight = self.weight.to(pos.coords.dtype)
        generators = (weight - weight.mT).unsqueeze(1)  # [h, 1, d/b, b, b]

        def turn(t: Tensor) -> Tensor:
            """[1 | B, h, N, d/b, b, b] from t [1 | B, N, d/b]."""
            return torch.linalg.matrix_exp(t[:, None, :, :, None, None] * generators)

        p = self.placed(pos)
        if self.theta is None:
            even = torch.arange(self.weight.shape[1], device=p.device) % 2 == 0
            theta = torch.stack([even, ~even]).to(p.dtype)
        else:
            theta = self.theta.to(p.dtype)  # [(y, x), d/b]
        if not pos.full:
            return Rotations(turn((p.unsqueeze(-1) * theta).sum(-2)), self.free_prefix)
        height, width = pos.extent
        cells = p.view(1, height, width, 2)
        rows = turn(cells[:, :, 0, :1] * theta[0])  # [1, h, H, d/b, b, b]
        columns = turn(cells[:, 0, :, 1:] * theta[1])
        return Rotations((rows.unsqueeze(3) @ columns.unsqueeze(2)).flatten(2, 3), self.free_prefix)
