"""From a spec to the encodings of one model, and from positions to what each block is told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitpos import easing, kernels
from vitpos.attention import Part, Signal, exact
from vitpos.encoding import AnyAngles, Bias, Contextual, Encoding, Geometry, LinearRotary, SeparableAngles
from vitpos.positions import Positions
from vitpos.spec import Spec, Term, lookup

GRID = "position_grid"  # under which the metadata of a model's state_dict hold its training grid
Held = Mapping[str, Any]  # parameters and modules that timm's own model holds of its encodings, by name


def why_not(first: str, second: str, native_rotates: bool = False) -> str | None:
    """The reason why two encodings make no sense together, or None if they combine.

    ``native_rotates``: what ``native`` stands for rotates q and k.
    """
    if first == second:
        return f"{first} is named twice; each encoding can be used once"
    if {first, second} == {"none", "native"}:
        return "none means no position at all and native what the model has: use one"
    if "none" in (first, second):
        other = second if first == "none" else first
        return f"none means no position at all, so it combines with nothing; write {other!r}"
    if all("angles" in lookup(n).sites() or (n == "native" and native_rotates) for n in (first, second)):
        return (
            f"{first} and {second} both rotate q and k; two rotations of the same channels are one other rotation, "
            "not both: use one"
        )
    return None


def flat_tables(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's parameters by name those of which no shape says what grid they are for: rows of one flat list."""
    return {k: v for k, v in state.items() if k.rpartition(".")[2] in ("pos_embed", "relative_position_bias_table")}


def check_combination(spec: Spec, native_rotates: bool = False) -> None:
    """ValueError, with the reason, for encodings that make no sense together, or not gated or fading."""
    for term in spec.terms:
        if term.modifier == "gated" and lookup(term.name).beginning(dict(term.options)) != "gate":
            raise ValueError(f"{term.name} has no gate: its own weights can begin at 0")
        if term.modifier == "fading" and lookup(term.name).sites() != ("tokens",):
            raise ValueError(f"{term.name} cannot fade; only what is added to the tokens can, such as ape1d")
    for first, second in itertools.combinations(spec.names, 2):
        if reason := why_not(first, second, native_rotates):
            raise ValueError(reason)


class Position(nn.Module):
    """The encodings of one model: ``shared`` by all layers, and in ``layers`` one set for each block.

    Legend as in ``attention.py``. ``spec`` is what was asked for; the training grid lies in ``geometry``; ``native``
    are the classes that ``native`` stands for, where the model holds an encoding in modules of its own. Of the
    encodings named in ``fading`` a share is left that a schedule sets, ``faded`` (see ``easing``).
    """

    faded: Tensor

    def __init__(self, spec: Spec, geometry: Geometry, native: Sequence[type[Encoding]] = ()) -> None:
        super().__init__()
        check_combination(spec, any("angles" in cls.sites() for cls in native))
        self.spec = spec
        self.geometry = geometry
        self.native = tuple(native)
        self.fading = {t.name for t in spec.terms if t.modifier == "fading"}
        if self.fading:
            self.register_buffer("faded", torch.zeros((), dtype=torch.int64))
        chosen = [(t, cls) for t in spec.terms for cls in self._classes(t)]
        self.sites = {site for _, cls in chosen for site in cls.sites()}
        self.timms = "native" in spec.names or spec.names == ("ape1d",)  # whose logits come out as they are
        self.shared = nn.ModuleDict({t.name: _build(cls, t, geometry) for t, cls in chosen if not cls.per_layer})
        own = [(t, cls) for t, cls in chosen if cls.per_layer]
        self.memories = [kernels.Memory() for _ in range(geometry.depth + 1)]  # of each layer, then of what all share
        self.layers = nn.ModuleList(
            nn.ModuleDict({t.name: _build(cls, t, replace(geometry, layer=layer)) for t, cls in own})
            for layer in range(geometry.depth if own else 0)
        )

    @property
    def resolved(self) -> str:
        """The spec with every option written out, those too that followed from the model (``None`` in the spec)."""
        one = {encoding.name: encoding for encoding in self.encodings()}
        terms = []
        for term in self.spec.terms:
            found = {key: getattr(one[term.name], key, None) if value is None else value for key, value in term.options}
            terms.append(replace(term, options=tuple(found.items())).resolved)
        return " + ".join(terms)

    def _classes(self, term: Term) -> Sequence[type[Encoding]]:
        return self.native if term.name == "native" and self.native else (lookup(term.name),)

    @property
    def silent(self) -> bool:
        """Whether blocks are told nothing about position, and may attend as they like."""
        return not (self.timms or self.sites & {"angles", "bias", "scale"})

    @property
    def alike(self) -> bool:
        """Whether all blocks are told the same."""
        return not (len(self.layers) or self.native or any(map(_graded, _encodings(self.shared))))

    def encodings(self) -> Iterator[Encoding]:
        """All encodings: the shared ones, then layer by layer."""
        for group in (self.shared, *self.layers):
            yield from _encodings(group)

    def train(self, mode: bool = True) -> Position:
        """As any module; training needs the room that dense biases were kept in."""
        for memory in self.memories if mode else ():
            memory.forget()
        return super().train(mode)

    def adopt(self, other: Position, names: Iterable[str]) -> None:
        """Take the encodings of these names, weights and all, from ``other``, which has them too."""
        for group, before in zip((self.shared, *self.layers), (other.shared, *other.layers)):
            for name in set(names) & set(group):  # type: ignore[arg-type]
                group[name] = before[name]  # type: ignore[index]
        if self.fading & other.fading:
            self.faded = other.faded

    def forward(self, what: str, *given: Any) -> Any:
        """One of the methods below, by name: a call of the module, which tools that follow calls take as one step."""
        return getattr(self, what)(*given)

    def add_tokens(self, x: Tensor, pos: Positions, held: Held, dtype: torch.dtype) -> Tensor:
        """The patch tokens [B, N, D] with what encodings add to them in ``dtype``."""
        vectors = self.tokens(pos, held)
        return x if vectors is None else x + vectors.to(dtype)

    def tokens(self, pos: Positions, held: Held) -> Tensor | None:
        """What is added to the patch tokens [1 | B, N, D]."""
        total = None
        with _full_precision(pos):
            for encoding in _encodings(self.shared):
                if "tokens" not in encoding.sites():
                    continue
                vectors = _gated(encoding, encoding.tokens(pos, *held_by(encoding, held)))
                if encoding.name in self.fading:
                    vectors = vectors * easing.left(self.faded, vectors)
                total = vectors if total is None else total + vectors
        return total

    def mix(self, x: Tensor, pos: Positions, prefix: int) -> Tensor:
        """The tokens [B, T, D] after the first block, with their patches changed by encodings that mix them."""
        for encoding in _encodings(self.shared):
            if "mix" in encoding.sites():
                x = torch.cat([x[:, :prefix], encoding.mix(x[:, prefix:], pos)], dim=1)
        return x

    def shared_signal(self, pos: Positions, prefix: int, held: Held | None = None, depth: int | None = None) -> Signal:
        """The part of the signal that is the same in every layer, expanded once; and what is made for the first
        ``depth`` layers (all) in one call."""
        memory = None if self.training else self.memories[-1]
        key = None if memory is None else _constants(self.shared, pos)

        def make() -> Signal:
            with _full_precision(pos):
                return _signal(Signal(prefix=prefix, plain=self.timms), self.shared, pos, held or {}, memory).expand()

        shared = make() if key is None else memory.signal((prefix, *key), make)  # type: ignore[union-attr]
        with _full_precision(pos):
            angles = _angles_by_layer(list(self.layers)[:depth], pos)
        return shared.but(angles_by_layer=angles) if angles else shared

    def signal(self, layer: int, pos: Positions, shared: Signal, held: Held | None = None) -> Signal:
        """The signal of one block; ``held`` is what this block holds."""
        shared = shared.of_layer(layer)
        if not len(self.layers):
            return shared
        with _full_precision(pos):
            return _signal(shared, self.layers[layer], pos, held or {}, None if self.training else self.memories[layer])

    def tell(
        self,
        pos: Positions,
        prefix: int,
        held: Held,
        held_by_blocks: Sequence[Held],
        mask: Tensor | None,
        is_causal: bool,
    ) -> Told:
        """What each block is told, of as many as ``held_by_blocks`` says what they hold.

        All at once where that is small: calls in a row are much faster than calls between matrix products.
        """
        depth = len(held_by_blocks)
        shared = self.shared_signal(pos, prefix, held, depth)

        def make(layer: int) -> Signal | None:
            return self.told(layer, pos, shared, held_by_blocks[layer], mask, is_causal)

        first = make(0)
        if self.alike:
            return Told(make, [first] * depth)
        return Told(make, [first, *map(make, range(1, depth))] if first is None or first.small else [first])

    def told(
        self, layer: int, pos: Positions, shared: Signal, held: Held, mask: Tensor | None, is_causal: bool
    ) -> Signal | None:
        """The signal of one block with the caller's mask; None if there is nothing to tell."""
        signal = self.signal(layer, pos, shared, held)
        if mask is not None or is_causal:
            signal = signal.but(mask=mask, causal=is_causal)
        return None if signal.empty else signal


@dataclass(frozen=True)
class Told:
    """What each block is told: what is ``ready``, and the rest when it is asked for."""

    make: Callable[[int], Signal | None]
    ready: list[Signal | None]

    def take(self, layer: int) -> Signal | None:
        """To be asked once a layer: what it is told is not held on to."""
        if layer >= len(self.ready):
            return self.make(layer)
        found, self.ready[layer] = self.ready[layer], None
        return found


def _encodings(group: nn.Module) -> Iterator[Encoding]:
    return iter(cast(nn.ModuleDict, group).values())  # type: ignore[arg-type]


def _build(cls: type[Encoding], term: Term, geometry: Geometry) -> Encoding:
    encoding = cls(geometry, **dict(term.options))
    if term.modifier == "gated":
        encoding.gate = nn.Parameter(torch.zeros(1 if "tokens" in cls.sites() else geometry.heads))
    return encoding


def _gated(encoding: Encoding, given: Any) -> Any:
    return given if encoding.gate is None else easing.gated(given, encoding.gate)


def held_by(encoding: Encoding, held: Held) -> list[Any]:
    """What timm's model holds of an encoding, as further arguments of its sites."""
    return [held[encoding.model_parameter]] if encoding.model_parameter else []


def _signal(signal: Signal, encodings: nn.Module, pos: Positions, held: Held, memory: kernels.Memory | None) -> Signal:
    if not len(encodings):  # type: ignore[arg-type]
        return signal
    told: dict[str, Any] = {"memory": memory}
    for encoding in _encodings(encodings):
        if "angles" in encoding.sites() and signal.angles is None:
            told["angles"] = _gated(encoding, encoding.angles(pos, *held_by(encoding, held)))
        if "bias" in encoding.sites():
            bias = _gated(encoding, encoding.bias(pos, *held_by(encoding, held)))
            part = Part(bias, _slope(encoding, bias))
            told["biases"] = (*told.get("biases", signal.biases), part)
        if "scale" in encoding.sites():
            told["scale"] = told.get("scale", signal.scale) * encoding.scale(pos)
    return signal.but(**told)


def _graded(encoding: Encoding) -> bool:
    return type(encoding).slope_of is not Encoding.slope_of


def _slope(encoding: Encoding, bias: Bias) -> float | tuple[float, ...]:
    """That of its layer, or of each layer if one encoding serves all."""
    if not _graded(encoding):
        return 1.0
    if isinstance(bias, Contextual):
        raise TypeError(f"{encoding.name}: a contextual bias takes no slope; multiply its vectors")
    geometry = encoding.geometry
    slopes = [encoding.slope_of(at) for at in ([geometry.layer] if encoding.per_layer else range(geometry.depth))]
    for slope in slopes:
        if not isinstance(slope, (int, float)):
            raise TypeError(f"{encoding.name}: the slope of a layer must be a number, got {type(slope).__name__}")
        if not 0 < slope < math.inf:
            raise ValueError(f"{encoding.name}: the slope of a layer must be a number above 0, got {slope}")
    return slopes[0] if encoding.per_layer else tuple(slopes)


def _states(encoding: Encoding, promise: str) -> bool:
    """Whether the class makes a promise itself: what derives from it may break it."""
    return bool(vars(type(encoding)).get(promise))


def _numbers(encoding: Encoding) -> list[Any] | None:
    """The class and all plain attributes of an encoding but its own place; None if there are others."""
    found: list[Any] = [type(encoding)]
    for name, value in vars(encoding).items():
        if name == "geometry":
            found.append(replace(value, layer=0))
        elif isinstance(value, (type(None), bool, int, float, str)):
            found.append((name, value))
        elif name not in _OF_MODULES:
            return None
    return found


_OF_MODULES = frozenset(vars(nn.Module()))  # where modules keep parameters, buffers, parts, hooks


def _constants(encodings: nn.Module, pos: Positions) -> list[Any] | None:
    """All that the data of these encodings follow from on a full grid, if that is plain numbers alone; else None."""
    if not (pos.full and pos.cells and len(encodings) and kernels.eager(pos.coords)):  # type: ignore[arg-type]
        return None
    found: list[Any] = [pos.extent, pos.coords.dtype]
    for encoding in _encodings(encodings):
        numbers = _numbers(encoding) if _states(encoding, "constant") else None
        if numbers is None or encoding._parameters or encoding._buffers or encoding._modules:  # such as a gate
            return None
        found.append(numbers)
    return found


def _angles_by_layer(layers: Sequence[nn.Module], pos: Positions) -> tuple[AnyAngles, ...]:
    """The angles of each layer, made in one call where only frequencies tell the layers' encodings apart; else none."""
    encodings: list[Any] = [
        next((e for e in _encodings(layer) if isinstance(e, LinearRotary)), None) for layer in layers
    ]
    if not pos.full or not encodings or not all(e is not None and _states(e, "by_frequencies") for e in encodings):
        return ()
    first, numbers = encodings[0], _numbers(encodings[0])
    if numbers is None or any(_numbers(encoding) != numbers for encoding in encodings[1:]):
        return ()
    if any(encoding.gate is not None for encoding in encodings):
        return ()
    frequencies = [encoding.frequencies(pos) for encoding in encodings]
    if not kernels.eager(*frequencies):
        return ()
    phases = first.phases_by_axis(pos, torch.stack(frequencies))  # [layers, h, H | W, d/2]
    units = [kernels.unit(phase).unbind() for phase in phases]
    return tuple(
        SeparableAngles(y, x, first.layout, None, first.free_prefix, both)
        for y, x, both in zip(*(phase.unbind() for phase in phases), zip(*units))
    )


def _full_precision(pos: Positions) -> AbstractContextManager[object]:
    """Positions and phases are not for autocast to round."""
    return exact(pos.coords)
