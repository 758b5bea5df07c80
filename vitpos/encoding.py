"""The interface of an encoding: coordinates in, data out.

An encoding sees ``Positions`` (coordinates and the extent of the grid they come from) and never timm, pixels
or a token count. It overrides one or more sites,

- ``tokens``: vectors added once to the patch tokens, after patch embedding;
- ``mix``: the patch tokens themselves, once, after the first block;
- ``angles``: q and k are rotated by them;
- ``bias``: added to the attention logits;
- ``scale``: a factor on the logits of q and k;

and ``attention.py`` applies what it returns. A site that is not overridden costs nothing. Values may be
structured (``SeparableAngles``, ``OffsetTable``, ``Contextual``), so that nothing of size N x N exists before it
is needed.

Legend: B batch, N patches, H rows, W columns, D width of the model, h heads, d width of a head.
Sign of an offset, everywhere: query minus key.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vitpos.positions import Extent, Positions, into, scale, vector
from vitpos.spec import Option, Term, lookup, options

Layout = Literal["interleaved", "half"]


@dataclass(frozen=True)
class Geometry:
    """What an encoding may know of the model: width, heads, depth, training grid, own layer, prefix tokens."""

    dim: int
    heads: int
    head_dim: int
    depth: int
    grid: Extent
    layer: int = 0
    prefix: int = 0


@dataclass(frozen=True)
class Angles:
    """Rotation angles ``phase`` [1 | B, 1 | h, N, d/2] in radians, one a channel pair.

    ``layout`` says which channels form a pair: (2k, 2k + 1) if interleaved, (k, k + d/2) if half. An orthogonal
    ``basis`` [1 | h, d, d], if given, is applied to q and k first: x becomes ``basis @ x``.
    With ``free_prefix`` every logit that involves a class or register token uses unrotated q and k.
    """

    phase: Tensor
    layout: Layout = "interleaved"
    basis: Tensor | None = None
    free_prefix: bool = False


@dataclass(frozen=True)
class SeparableAngles:
    """Angles on a full grid whose phase at (i, j) is ``y[i] + x[j]``: y [1 | h, H, d/2], x [1 | h, W, d/2].

    The rest as in ``Angles``. ``units`` may hold ``kernels.unit`` of both, where it was made for all layers at once.
    """

    y: Tensor
    x: Tensor
    layout: Layout = "interleaved"
    basis: Tensor | None = None
    free_prefix: bool = False
    units: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Turns:
    """Rotations of channel pairs by tables ``cos`` and ``sin`` [1 | B, 1 | h, N, d/2]; ``layout`` as in ``Angles``.

    With ``by_layer`` a first axis counts the layers, each of which takes its own part.
    """

    cos: Tensor
    sin: Tensor
    layout: Layout = "interleaved"
    by_layer: bool = False


@dataclass(frozen=True)
class Rotations:
    """Rotations by blocks of b adjacent channels: ``matrix`` [1 | B, 1 | h, N, d/b, b, b]; ``x`` becomes matrix @ x."""

    matrix: Tensor
    free_prefix: bool = False


@dataclass(frozen=True)
class OffsetTable:
    """A bias on a full grid that depends on the offset only: ``values`` [1 | h, 2H-1, 2W-1].

    The pair of query (i, j) and key (k, l) gets ``values[:, i - k + H - 1, j - l + W - 1]``. ``prefix`` [1 | h, 3]
    holds the bias of a prefix query to a patch, a patch to a prefix key, and of two prefix tokens; without it
    they get 0.
    """

    values: Tensor
    prefix: Tensor | None = None


@dataclass(frozen=True)
class PairBias:
    """A bias of each patch pair: ``values`` [1 | B, 1 | h, N, N]; ``prefix`` as in ``OffsetTable``."""

    values: Tensor
    prefix: Tensor | None = None


@dataclass(frozen=True)
class Contextual:
    """A bias that depends on content: s q_i . on_q[b_ij] + s k_j . on_k[b_ij], with s the logits' scale.

    ``buckets`` [1 | B, N, N] (int64) holds b_ij; ``on_q`` and ``on_k`` [1 | h, buckets + 1, d], the last row for
    pairs with a prefix token. q and k are taken before any rotation.
    """

    buckets: Tensor
    on_q: Tensor | None = None
    on_k: Tensor | None = None


AnyAngles = Angles | SeparableAngles | Turns | Rotations
Bias = OffsetTable | PairBias | Contextual

LAWS = {
    "offset": "the same vector added to all coordinates changes nothing",
    "circular": "moving the tokens circularly by whole patches changes nothing",
    "transpose": "exchanging y and x of every coordinate changes nothing",
}
NO_PREFIX = " (no prefix)"  # after a law's name: it holds for models without class and register tokens


class Encoding(nn.Module):
    """Base of all encodings. A subclass states ``summary``, ``paper``, ``laws`` and overrides its sites.

    ``laws`` holds keys of ``LAWS``, alone or followed by ``NO_PREFIX``: what the model's output is exactly
    invariant to. ``variants`` maps options, written as in a spec, to the laws that hold under them. The test
    suite confirms each law that is declared and sees each one fail that is not.
    ``per_layer`` says that every block has its own instance; otherwise one serves all, computed once a forward.
    ``version`` goes up when the same spec and weights would give other numbers.
    ``constant`` promises that what an encoding without weights returns follows from its plain attributes (numbers and
    strings; with others, such as lists, nothing is kept) and the positions alone, so that evaluation may keep it;
    ``by_frequencies`` that a rotary encoding's layers differ in ``frequencies`` alone, so that all are made in one
    call. Neither is inherited.
    ``zeros`` names parameters that, all at 0, make the encoding change nothing while they still learn.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    laws: ClassVar[frozenset[str]] = frozenset()
    variants: ClassVar[dict[str, frozenset[str]]] = {}
    per_layer: ClassVar[bool] = False
    version: ClassVar[int] = 1
    model_parameter: ClassVar[str | None] = None  # what timm's own model holds of it, passed to its sites
    zeros: ClassVar[tuple[str, ...]] = ()
    constant: ClassVar[bool] = False
    by_frequencies: ClassVar[bool] = False

    def __init__(self, geometry: Geometry, *, resize: str | None = None) -> None:
        super().__init__()
        self.geometry = geometry
        self.resize = self.default_resize = resize
        self.gate: nn.Parameter | None = None  # what the encoding's data are multiplied by, in a spec with gated(...)

    @classmethod
    def resolve(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Fill in options whose default depends on other options."""
        return given

    @classmethod
    def beginning(cls, given: Mapping[str, Any]) -> Literal["gate", "zeros", "nothing"]:
        """How the encoding of these options can begin with no effect on a model, to be learned from there.

        By a ``gate`` at 0, by its parameters ``zeros`` at 0, or by doing ``nothing``, since it has no effect on the
        training grid. Raises ValueError, with the reason, where there is no such beginning.
        """
        return "zeros" if cls.zeros else "gate"

    def reset_parameters(self) -> None:
        """Draw the encoding's own weights anew from the global random state."""

    def tokens(self, pos: Positions) -> Tensor:
        """[1 | B, N, D], added to the patch tokens."""
        raise TypeError(f"{self.name} adds nothing to the tokens")

    def mix(self, patches: Tensor, pos: Positions) -> Tensor:
        """The patch tokens [B, N, D] after the first block, changed."""
        raise TypeError(f"{self.name} does not mix the tokens")

    def angles(self, pos: Positions) -> AnyAngles:
        """The angles by which q and k rotate."""
        raise TypeError(f"{self.name} does not rotate q and k")

    def bias(self, pos: Positions) -> Bias:
        """What is added to the attention logits."""
        raise TypeError(f"{self.name} has no attention bias")

    def slope_of(self, layer: int) -> float:
        """What the bias, an ``OffsetTable`` or a ``PairBias``, is multiplied by in a layer: a number above 0 that does
        not learn. Overridden in a class.

        Layers that differ by such a number alone share one encoding, whose bias is made once a forward and held once.
        """
        return 1.0

    def scale(self, pos: Positions) -> float | Tensor:
        """The factor on the logits of q and k, beside 1 / sqrt(d)."""
        raise TypeError(f"{self.name} does not scale the logits")

    def phases(self, pos: Positions) -> Tensor | None:
        """The angles [1 | B, 1 | h, N, pairs] in radians whose sines and cosines enter, linear in the coordinates, one
        a pair of channels or features; None if there are none."""
        return None

    @classmethod
    def sites(cls) -> tuple[str, ...]:
        """The sites at which this encoding acts."""
        every = ("tokens", "mix", "angles", "bias", "scale")
        return tuple(site for site in every if getattr(cls, site) is not getattr(Encoding, site))

    def resize_choices(self) -> tuple[str, ...]:
        """The resize policies that this encoding offers."""
        option = options(self.name).get("resize")
        if option is None:
            return (self.default_resize,) if self.default_resize else ()
        return tuple(c for kind in option.kinds for c in typing.get_args(kind))

    def placed(self, pos: Positions) -> Tensor:
        """The coordinates [1 | B, N, 2] under the resize policy in force."""
        if self.resize == "interpolate":
            return into(pos.coords, pos.extent, self.geometry.grid)
        return pos.coords

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if isinstance(v, (str, float)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Encoding:
        """Move and cast as any module, but never below float32: positions and phases do not survive bfloat16."""

        def careful(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if not (out.is_floating_point() and out.dtype.itemsize < 4):
                return out
            return tensor.to(out.device, torch.float32)

        return super()._apply(careful, recurse)


class Rotary(Encoding):
    """Encodings that rotate q and k. ``free_prefix``: see ``Angles``; it costs a second attention call."""

    def __init__(self, geometry: Geometry, *, resize: str | None = None, free_prefix: bool = False) -> None:
        super().__init__(geometry, resize=resize)
        self.free_prefix = free_prefix


class LinearRotary(Rotary):
    """Rotary encodings whose phase is linear in the coordinates: phase = f_y y + f_x x.

    A subclass gives ``frequencies``. Because y and x enter apart, a full grid needs H + W sines, not H W.
    """

    layout: ClassVar[Layout] = "interleaved"
    pairs_multiple: ClassVar[int] = 4  # what the head width must be a multiple of

    def __init__(self, geometry: Geometry, *, resize: str | None = None, free_prefix: bool = False) -> None:
        super().__init__(geometry, resize=resize, free_prefix=free_prefix)
        require_multiple("head dimension (width / heads)", geometry.head_dim, self.pairs_multiple, self.name)

    def frequencies(self, pos: Positions) -> Tensor:
        """[1 | h, d/2, 2] in radians per unit of ``placed``, the last axis (y, x)."""
        raise TypeError(f"{type(self).__name__} must define frequencies")

    def phases(self, pos: Positions) -> Tensor:
        frequencies = self.frequencies(pos).to(pos.coords.dtype)  # [1 | h, d/2, 2]
        return (self.placed(pos)[:, None, :, None, :] * frequencies[:, None]).sum(-1)

    def basis(self) -> Tensor | None:
        """An orthogonal change of basis [1 | h, d, d] before the rotation, or None."""
        return None

    def angles(self, pos: Positions) -> AnyAngles:
        rest = (self.layout, self.basis(), self.free_prefix)
        if not pos.full:
            return Angles(self.phases(pos), *rest)
        y, x = self.phases_by_axis(pos, self.frequencies(pos))
        return SeparableAngles(y, x, *rest)

    def phases_by_axis(self, pos: Positions, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """On a full grid, for frequencies [..., d/2, 2]: what y [..., H, d/2] and what x [..., W, d/2] add."""
        height, width = pos.extent
        y, x = self.placed(pos).view(height, width, 2).unbind(-1)  # [H, W]
        of_y, of_x = frequencies.to(pos.coords.dtype).unsqueeze(-3).unbind(-1)  # [..., 1, d/2]
        return y[:, :1] * of_y, x[0, :, None] * of_x


class OffsetBias(Encoding):
    """Biases that depend on the offset query minus key only. A subclass gives ``at``.

    With ``wrap`` the image is a torus: each component of an offset is reduced to [-S/2, S/2) on the current grid.
    """

    def __init__(self, geometry: Geometry, *, resize: str | None = None, wrap: bool = False) -> None:
        super().__init__(geometry, resize=resize)
        self.wrap = wrap

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        """The bias [1 | h, ...] of each ``offset`` [..., 2] as (y, x), on a grid of ``extent``."""
        raise TypeError(f"{type(self).__name__} must define at")

    def prefix_bias(self) -> Tensor | None:
        """The bias [1 | h, 3] of pairs with a prefix token, as in ``OffsetTable``; None for 0."""
        return None

    def placed_offset(self, offset: Tensor, extent: Extent) -> Tensor:
        """Offsets [..., 2] reduced if they wrap, under the resize policy in force."""
        if self.wrap:
            side = vector(extent, offset)
            half = side.div(2, rounding_mode="floor")
            offset = offset - side * ((offset + half) / side).floor()
        if self.resize == "interpolate":
            offset = offset * vector(scale(extent, self.geometry.grid), offset)
        return offset

    def bias(self, pos: Positions) -> Bias:
        return offset_bias(self.at, pos, self.prefix_bias())


def offset_bias(at: Callable[[Tensor, Extent], Tensor], pos: Positions, prefix: Tensor | None) -> Bias:
    """The bias with the value ``at(offset, extent)``, as ``OffsetBias.at``, for each offset."""
    if not pos.cells:
        return PairBias(at(_between(pos.coords), pos.extent).transpose(0, 1), prefix)
    height, width = pos.extent
    like = pos.coords
    y = torch.arange(1 - height, height, device=like.device, dtype=like.dtype)
    x = torch.arange(1 - width, width, device=like.device, dtype=like.dtype)
    table = at(torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1), pos.extent)  # [1 | h, 2H-1, 2W-1]
    if pos.full:
        return OffsetTable(table, prefix)
    i, j = (_between(pos.coords).long() + torch.tensor([height - 1, width - 1], device=like.device)).unbind(-1)
    return PairBias(table[:, i, j].transpose(0, 1), prefix)


def _between(coords: Tensor) -> Tensor:
    """Query minus key for all pairs: [..., N, 2] to [..., N, N, 2]."""
    return coords.unsqueeze(-2) - coords.unsqueeze(-3)


def require_multiple(what: str, value: int, of: int, name: str) -> None:
    """ValueError unless ``value`` is a multiple of ``of``, naming the nearest that are."""
    if value % of or value < of:
        low = max(of, value // of * of)
        near = f"{low}" if low >= value else f"{low} or {low + of}"
        raise ValueError(f"{name} needs a {what} that is a multiple of {of}, got {value}; nearest: {near}")


def require_at_least(what: str, value: float, least: float, name: str, *, strictly: bool = False) -> None:
    """ValueError unless ``value`` is a finite number of at least (or above) ``least``."""
    if not (least < value < float("inf") if strictly else least <= value < float("inf")):
        raise ValueError(f"{name}: {what}={value!r} must be {'above' if strictly else 'at least'} {least}")


def describe(name: str) -> str:
    """What an encoding is, where it acts, its options with defaults, its laws and its source.

    Raises ValueError for an unknown name, with the nearest known ones.
    """
    cls: type[Encoding] = lookup(name)
    lines = [
        f"{name}: {cls.summary}",
        f"  acts on   {', '.join(cls.sites()) or 'nothing'}",
        f"  weights   {'one set a layer' if cls.per_layer else 'shared by all layers'}",
        *(f"  option    {_describe_option(name, option)}" for option in options(name).values()),
        *(f"  law       {law}: {law_state(cls.laws, law)}; {meaning}" for law, meaning in LAWS.items()),
    ]
    for given, laws in cls.variants.items():
        lines.append(f"  variant   {given}: " + "; ".join(f"{law} {law_state(laws, law)}" for law in LAWS))
    return "\n".join([*lines, f"  source    {cls.paper}"])


def law_state(laws: frozenset[str], law: str) -> str:
    """In words, whether ``law`` is among ``laws``."""
    if law in laws:
        return "holds"
    return "holds without class and register tokens" if law + NO_PREFIX in laws else "does not hold"


def _describe_option(name: str, option: Option) -> str:
    default = dict(Term.build(name, {}).options)[option.name]
    words = [repr(choice) for kind in option.kinds for choice in typing.get_args(kind)]
    words += ["None" if kind is type(None) else kind.__name__ for kind in option.kinds if not typing.get_args(kind)]
    return f"{option.name}={default!r}  ({' | '.join(words)})"
