"""Linear biases of the distance along the flattened grid."""

from torch import Tensor

from vitpos.encoding import Geometry, OffsetBias
from vitpos.encodings.alibi2d import slopes
from vitpos.positions import Extent
from vitpos.spec import register


@register("alibi")
class Alibi(OffsetBias):
    """Logit of (query, key) += -m_h |n_q - n_k| with the flattened index n = y W + x; nothing is learned.

    The flattened control for ``alibi2d``: a step down a column counts as W steps along a row, and W is the width
    of the grid at hand, so that the same offset has another bias on a grid of another width (the index runs on,
    there is no other resize policy). The slopes m_h are those of ALiBi, here in both directions where the paper's
    are causal; pairs with a prefix token get 0.

    One head has slope 1/256. On a grid 8 wide, one row down and two columns back are 8 - 2 steps:

    >>> import torch
    >>> encoding = Alibi(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 8)))
    >>> encoding.at(torch.tensor([1.0, -2.0]), (4, 8)).item() * 256
    -6.0
    """

    summary = "logits fall linearly with the distance along the flattened grid, one slope a head"
    paper = "Press et al. 2022, Train Short, Test Long, arXiv:2108.12409, section 3"
    laws = frozenset({"offset"})
    constant = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry, resize="extrapolate")

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        distance = (offset[..., 0] * extent[1] + offset[..., 1]).abs()
        slope = distance.new_tensor(slopes(self.geometry.heads))
        return -slope.view(-1, *[1] * distance.ndim) * distance
