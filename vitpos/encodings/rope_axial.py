"""Two-dimensional rotary embedding, half of the channels for each axis."""

from torch import Tensor

from vitpos.encoding import NO_PREFIX, Geometry
from vitpos.encodings._rotary import PatchRotary, Resize, axial, bands, ladder, radians, stretch
from vitpos.positions import Positions, vector
from vitpos.spec import register


@register("rope_axial")
class RopeAxial(PatchRotary):
    """Channel pairs rotate by x f_k (first half of the pairs) or y f_k (second half), f_k = theta^(-4k/d).

    k = 0 .. d/4 - 1; pairs are interleaved channels. ``resize``: coordinates run on (as published), are scaled
    into the training grid, or run on with f_k multiplied by s^(-k/(d/4 - 1)), s = side / training side of the
    axis (``ntk``: the highest frequency stays, the lowest is that of ``interpolate``). Class and register tokens
    are not rotated, which tells them where the origin is: shifting all coordinates leaves the output unchanged
    only without such tokens, or with ``free_prefix``, under which logits that involve them use unrotated q and k
    (a second attention call).

    With ``wrap`` the image is a torus: the frequencies are whole cycles around a side, 2 pi k_m / S, with
    k_m = round(K^(1 - m/(d/4 - 1))) and K = max(1, S // 2), so at most S // 2 distinct ones; theta is not used.
    On another grid the training side's cycles are kept (``interpolate``, then the default) or taken anew
    (``extrapolate``); there is no ``ntk``.

    At (i, j) = (2, 3), d = 8 and theta = 100 the frequencies are 1 and 0.1:

    >>> import torch
    >>> encoding = RopeAxial(Geometry(dim=8, heads=1, head_dim=8, depth=1, grid=(4, 4)))
    >>> pos = Positions(torch.tensor([[[2.0, 3.0]]]), extent=(4, 4))
    >>> [round(v, 3) for v in encoding.angles(pos).phase.flatten().tolist()]
    [3.0, 0.3, 2.0, 0.2]
    """

    summary = (
        "q and k rotate, half of the channel pairs by the column, half by the row; with wrap by whole cycles around "
        "a side, at most S // 2 distinct ones on S patches (3 on 6, 4 on 8, 7 on 14)"
    )
    paper = "Heo et al. 2024, Rotary Position Embedding for Vision Transformer, arXiv:2403.13298, eq. 6-7"
    laws = frozenset({"offset" + NO_PREFIX})
    constant = True
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
        resize: Resize | None = None,
        wrap: bool = False,
        free_prefix: bool = False,
    ) -> None:
        super().__init__(geometry, theta=theta, resize=resize, wrap=wrap, free_prefix=free_prefix)

    def frequencies(self, pos: Positions) -> Tensor:
        quarter = self.geometry.head_dim // 4
        if not self.wrap:
            f_y, f_x = pos.coords.new_tensor(bands(self.theta, quarter)) * stretch(self, pos, quarter)
            return axial(f_y, f_x)
        sides = self.geometry.grid if self.resize == "interpolate" else pos.extent
        cycles_y, cycles_x = (vector(ladder(quarter, side), pos.coords) for side in sides)
        return radians(axial(cycles_y, cycles_x), pos.extent)
