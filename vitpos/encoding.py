"""The interface of an encoding: coordinates in, data out, at three sites.

An encoding sees ``Positions`` (coordinates and the extent of the grid they come from) and never timm, pixels
or a token count. It overrides one or more of

- ``tokens``: vectors added once to the patch tokens, after patch embedding;
- ``angles``: q and k are rotated by them;
- ``bias``: added to the attention logits;

and ``attention.py`` applies what it returns. A site that is not overridden costs nothing. Values may be
structured (``SeparableAngles``, ``OffsetTable``), so that nothing of size N x N exists before it is needed.

Legend: B batch, N patches, H rows, W columns, D width of the model, h heads, d width of a head.
Sign of an offset, everywhere: query minus key.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from vitpos.positions import Extent, Positions, into, scale
from vitpos.spec import Option, lookup, options

Layout = Literal["interleaved", "half"]


@dataclass(frozen=True)
class Geometry:
    """What an encoding may know of the model: its width, heads, depth, training grid and its own layer."""

    dim: int
    heads: int
    head_dim: int
    depth: int
    grid: Extent
    layer: int = 0


@dataclass(frozen=True)
class Angles:
    """Rotation angles ``phase`` [1 | B, 1 | h, N, d/2] in radians, one a channel pair.

    ``layout`` says which channels form a pair: (2k, 2k + 1) if interleaved, (k, k + d/2) if half.
    """

    phase: Tensor
    layout: Layout = "interleaved"


@dataclass(frozen=True)
class SeparableAngles:
    """Angles on a full grid whose phase at (i, j) is ``y[i] + x[j]``: y [1 | h, H, d/2], x [1 | h, W, d/2]."""

    y: Tensor
    x: Tensor
    layout: Layout = "interleaved"


@dataclass(frozen=True)
class OffsetTable:
    """A bias on a full grid that depends on the offset only: ``values`` [1 | h, 2H-1, 2W-1].

    The pair of query (i, j) and key (k, l) gets ``values[:, i - k + H - 1, j - l + W - 1]``.
    """

    values: Tensor


Bias = Tensor | OffsetTable  # a tensor is [1 | B, 1 | h, N, N]

LAWS = {
    "offset": "the same vector added to all coordinates changes nothing",
    "offset (no prefix)": "as offset, but only without class and register tokens",
    "circular": "moving the tokens circularly by whole patches changes nothing (mean pooling)",
    "transpose": "exchanging y and x of every coordinate changes nothing",
}


class Encoding(nn.Module):
    """Base of all encodings. A subclass states ``summary``, ``paper``, ``laws`` and overrides its sites.

    ``laws`` holds keys of ``LAWS``: what the model's output is exactly invariant to. The test suite confirms
    each one that is declared and sees each one fail that is not.
    ``per_layer`` says that every block has its own instance; otherwise one serves all, computed once a forward.
    ``version`` goes up when the same spec and weights would give other numbers.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    laws: ClassVar[frozenset[str]] = frozenset()
    per_layer: ClassVar[bool] = False
    version: ClassVar[int] = 1
    model_parameter: ClassVar[str | None] = None  # a parameter that timm's own model holds, passed to ``tokens``

    def __init__(self, geometry: Geometry, *, resize: str | None = None) -> None:
        super().__init__()
        self.geometry = geometry
        self.resize = self.default_resize = resize

    def reset_parameters(self) -> None:
        """Draw the encoding's own weights anew from the global random state."""

    def tokens(self, pos: Positions) -> Tensor:
        """[1 | B, N, D], added to the patch tokens."""
        raise TypeError(f"{self.name} adds nothing to the tokens")

    def angles(self, pos: Positions) -> Angles | SeparableAngles:
        """The angles by which q and k rotate."""
        raise TypeError(f"{self.name} does not rotate q and k")

    def bias(self, pos: Positions) -> Bias:
        """What is added to the attention logits of patch pairs. Pairs with a prefix token get 0."""
        raise TypeError(f"{self.name} has no attention bias")

    @classmethod
    def sites(cls) -> tuple[str, ...]:
        """The sites at which this encoding acts: some of tokens, angles, bias."""
        return tuple(s for s in ("tokens", "angles", "bias") if getattr(cls, s) is not getattr(Encoding, s))

    def resize_choices(self) -> tuple[str, ...]:
        """The resize policies that this encoding offers."""
        option = options(self.name).get("resize")
        return typing.get_args(option.annotation) if option else (self.default_resize,) if self.default_resize else ()

    def placed(self, pos: Positions) -> Tensor:
        """The coordinates [1 | B, N, 2] under the resize policy in force."""
        if self.resize == "interpolate":
            return into(pos.coords, pos.extent, self.geometry.grid)
        return pos.coords

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if isinstance(v, (str, int, float)))


class LinearRotary(Encoding):
    """Rotary encodings whose phase is linear in the coordinates: phase = f_y y + f_x x.

    A subclass gives ``frequencies``. Because y and x enter apart, a full grid needs H + W sines, not H W.
    """

    layout: ClassVar[Layout] = "interleaved"

    def __init__(self, geometry: Geometry, *, resize: str | None = None) -> None:
        super().__init__(geometry, resize=resize)
        require_multiple("head dimension (width / heads)", geometry.head_dim, 4, self.name)

    def frequencies(self, like: Tensor) -> Tensor:
        """[1 | h, d/2, 2] in radians per patch, the last axis (y, x), on the device of ``like``."""
        raise TypeError(f"{type(self).__name__} must define frequencies")

    def angles(self, pos: Positions) -> Angles | SeparableAngles:
        frequencies = self.frequencies(pos.coords).to(pos.coords.dtype)
        coords = self.placed(pos)
        if not pos.full:
            phase = coords[:, None, :, None, :] * frequencies[:, None]  # [1 | B, 1 | h, N, d/2, 2]
            return Angles(phase.sum(-1), self.layout)
        height, width = pos.extent
        y = coords.view(height, width, 2)[:, 0, 0]  # [H]
        x = coords.view(height, width, 2)[0, :, 1]  # [W]
        frequencies_y, frequencies_x = frequencies.unsqueeze(1).unbind(-1)  # each [1 | h, 1, d/2]
        return SeparableAngles(y[:, None] * frequencies_y, x[:, None] * frequencies_x, self.layout)


class OffsetBias(Encoding):
    """Biases that depend on the offset query minus key only. A subclass gives ``at``."""

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        """The bias [1 | h, ...] of each ``offset`` [..., 2] as (y, x), on a grid of ``extent``."""
        raise TypeError(f"{type(self).__name__} must define at")

    def placed_offset(self, offset: Tensor, extent: Extent) -> Tensor:
        """Offsets [..., 2] under the resize policy in force."""
        if self.resize == "interpolate":
            return offset * offset.new_tensor(scale(extent, self.geometry.grid))
        return offset

    def bias(self, pos: Positions) -> Bias:
        if not pos.full:
            offset = pos.coords.unsqueeze(2) - pos.coords.unsqueeze(1)  # [1 | B, N, N, 2]
            return self.at(offset, pos.extent).transpose(0, 1)  # [1 | B, 1 | h, N, N]
        height, width = pos.extent
        like = pos.coords
        y = torch.arange(1 - height, height, device=like.device, dtype=like.dtype)
        x = torch.arange(1 - width, width, device=like.device, dtype=like.dtype)
        return OffsetTable(self.at(torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1), pos.extent))


def require_multiple(what: str, value: int, of: int, name: str) -> None:
    """ValueError unless ``value`` is a multiple of ``of``, naming the nearest that are."""
    if value % of or value < of:
        low = max(of, value // of * of)
        near = f"{low}" if low >= value else f"{low} or {low + of}"
        raise ValueError(f"{name} needs a {what} that is a multiple of {of}, got {value}; nearest: {near}")


def describe(name: str) -> str:
    """What an encoding is, where it acts, its options with defaults, its laws and its source.

    Raises ValueError for an unknown name, with the nearest known ones.
    """
    cls: type[Encoding] = lookup(name)
    lines = [
        f"{name}: {cls.summary}",
        f"  acts on   {', '.join(cls.sites()) or 'nothing'}",
        f"  weights   {'one set a layer' if cls.per_layer else 'shared by all layers'}",
        *(f"  option    {_describe_option(option)}" for option in options(name).values()),
        *(f"  law       {law}: {'holds' if law in cls.laws else 'does not hold'}; {LAWS[law]}" for law in LAWS),
        f"  source    {cls.paper}",
    ]
    return "\n".join(lines)


def _describe_option(option: Option) -> str:
    choices = typing.get_args(option.annotation)
    kind = " | ".join(map(repr, choices)) if choices else option.annotation.__name__
    return f"{option.name}={option.default!r}  ({kind})"
