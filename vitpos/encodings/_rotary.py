"""What rotary encodings share: frequencies per axis, resize policies of frequencies, whole cycles, generators."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from vitpos.encoding import Geometry, LinearRotary, require_at_least
from vitpos.positions import Extent, Positions, scale, vector
from vitpos.spec import nearest

Resize = Literal["extrapolate", "interpolate", "ntk"]


def bands(theta: float, count: int) -> list[float]:
    """theta^(-k/count), k = 0 .. count - 1.

    >>> bands(100.0, 2)
    [1.0, 0.1]
    """
    return [theta ** (-k / count) for k in range(count)]


def axial(f_y: Tensor, f_x: Tensor) -> Tensor:
    """Frequencies [1, d/2, (y, x)] of pairs that each rotate by one axis: ``f_x`` [d/4], then ``f_y`` [d/4].

    >>> axial(torch.tensor([7.0]), torch.tensor([5.0])).tolist()
    [[[0.0, 5.0], [7.0, 0.0]]]
    """
    zero = torch.zeros_like(f_y)
    return torch.stack([torch.cat([zero, f_y]), torch.cat([f_x, zero])], dim=-1).unsqueeze(0)


def stretch(encoding: LinearRotary, pos: Positions, count: int) -> Tensor:
    """What the ``count`` frequencies of each axis are multiplied by, [(y, x), count].

    Under ``ntk`` frequency k gets s^(-k/(count - 1)), s the side of the grid in units of the training side: the
    highest stays, the lowest is what scaling the coordinates would make it. Other policies leave all as they are.
    """
    if encoding.resize != "ntk":
        return pos.coords.new_ones(2, count)
    power = 1.0 / max(count - 1, 1)
    factors = [step ** (k * power) for step in scale(pos.extent, encoding.geometry.grid) for k in range(count)]
    return vector(factors, pos.coords).view(2, count)


def ladder(pairs: int, side: int) -> list[int]:
    """Whole cycles around a side, for ``pairs`` channel pairs: k_m = round(K^(1 - m/(pairs-1))), K = max(1, side // 2).

    >>> ladder(4, 14)
    [7, 4, 2, 1]
    """
    most = max(1, side // 2)
    return [round(most ** (1 - m / max(pairs - 1, 1))) for m in range(pairs)]


def radians(cycles: Tensor, extent: Extent) -> Tensor:
    """Cycles [..., (y, x)] around the sides of ``extent`` as radians a patch."""
    return 2 * math.pi * cycles / vector(extent, cycles)


class PatchRotary(LinearRotary):
    """Linear rotary encodings at coordinates counted in patches, which may wrap around the sides of the grid."""

    def __init__(self, geometry: Geometry, *, theta: float, resize: str | None, wrap: bool, free_prefix: bool) -> None:
        super().__init__(geometry, resize=resize, free_prefix=free_prefix)
        require_at_least("theta", theta, 0, self.name, strictly=True)
        self.theta = theta
        self.wrap = wrap
        if resize is not None and resize not in self.resize_choices():
            known = nearest(resize, self.resize_choices())
            raise ValueError(f"{self.name}: with wrap=True frequencies are whole cycles, so resize={resize!r}; {known}")

    @classmethod
    def resolve(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "resize": given["resize"] or ("interpolate" if given["wrap"] else "extrapolate")}

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        if given["wrap"] and not cls.zeros:
            raise ValueError(f"{cls.name}(wrap=True) turns by whole cycles around a side, of which there is no part")
        return super().beginning(given)

    def resize_choices(self) -> tuple[str, ...]:
        return tuple(c for c in super().resize_choices() if not (self.wrap and c == "ntk"))

    def placed(self, pos: Positions) -> Tensor:
        return pos.coords if self.wrap else super().placed(pos)


def block_width(head_dim: int, block: int | None, name: str, blocks: int = 1) -> int:
    """The width of the blocks that ``head_dim`` channels are cut into, at least ``blocks`` of them.

    ``block``, or for None the largest width of at most 8 that is possible.

    >>> [block_width(d, None, "liere") for d in (64, 72, 12, 10)]
    [8, 8, 6, 5]
    """
    possible = [b for b in range(2, head_dim // blocks + 1) if head_dim % b == 0]
    if block is None and possible and possible[0] <= 8:
        return max(b for b in possible if b <= 8)
    if block not in possible:
        what = "block=None needs a divisor of" if block is None else f"block={block} does not cut"
        known = ", ".join(map(str, possible)) or "none"
        raise ValueError(f"{name}: {what} the {head_dim} channels of a head into blocks; possible: {known}")
    return block


def skew(upper: Tensor, side: int) -> Tensor:
    """The skew-symmetric matrices [..., side, side] whose upper triangles are ``upper`` [..., side (side - 1) / 2].

    >>> skew(torch.tensor([1.0, 2.0, 3.0]), 3).tolist()
    [[0.0, 1.0, 2.0], [-1.0, 0.0, 3.0], [-2.0, -3.0, 0.0]]
    """
    row, column = torch.triu_indices(side, side, 1, device=upper.device)
    matrix = upper.new_zeros(*upper.shape[:-1], side, side)
    matrix[..., row, column] = upper
    return matrix - matrix.mT
