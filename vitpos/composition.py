"""From a spec to the encodings of one model, and from positions to what each block is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from vitpos.attention import Signal, exact
from vitpos.encoding import Encoding, Geometry
from vitpos.positions import Positions
from vitpos.spec import Spec, Term, lookup


def why_not(first: str, second: str) -> str | None:
    """The reason why two encodings make no sense together, or None if they combine."""
    if first == second:
        return f"{first} is named twice; each encoding can be used once"
    if "none" in (first, second):
        other = second if first == "none" else first
        return f"none means no position at all, so it combines with nothing; write {other!r}"
    if all("angles" in lookup(name).sites() for name in (first, second)):
        return (
            f"{first} and {second} both rotate q and k; two rotations of the same channels are one other rotation, "
            "not both: use one"
        )
    return None


def check_combination(spec: Spec) -> None:
    """ValueError, with the reason, for encodings that make no sense together."""
    for first, second in itertools.combinations(spec.names, 2):
        if reason := why_not(first, second):
            raise ValueError(reason)


class Position(nn.Module):
    """The encodings of one model: ``shared`` by all layers, and in ``layers`` one set for each block.

    Legend as in ``attention.py``. ``spec`` is what was asked for; the training grid lies in ``geometry``.
    """

    def __init__(self, spec: Spec, geometry: Geometry) -> None:
        super().__init__()
        check_combination(spec)
        self.spec = spec
        self.geometry = geometry
        self.shared = nn.ModuleDict({t.name: _build(t, geometry) for t in spec.terms if not lookup(t.name).per_layer})
        own = [t for t in spec.terms if lookup(t.name).per_layer]
        self.layers = nn.ModuleList(
            nn.ModuleDict({t.name: _build(t, replace(geometry, layer=layer)) for t in own})
            for layer in range(geometry.depth if own else 0)
        )

    @property
    def resolved(self) -> str:
        """The spec with every option written out, those too that followed from the model (``None`` in the spec)."""
        one = {encoding.name: encoding for encoding in self.encodings()}
        terms = []
        for term in self.spec.terms:
            found = {key: getattr(one[term.name], key, None) if value is None else value for key, value in term.options}
            terms.append(Term(term.name, tuple(found.items())).resolved)
        return " + ".join(terms)

    def encodings(self) -> Iterator[Encoding]:
        """All encodings: the shared ones, then layer by layer."""
        for group in (self.shared, *self.layers):
            yield from _encodings(group)

    def adopt(self, other: Position, names: Iterable[str]) -> None:
        """Take the encodings of these names, weights and all, from ``other``, which has them too."""
        for group, before in zip((self.shared, *self.layers), (other.shared, *other.layers)):
            for name in set(names) & set(group):  # type: ignore[arg-type]
                group[name] = before[name]  # type: ignore[index]

    def tokens(self, pos: Positions, owned: Mapping[str, Tensor]) -> Tensor | None:
        """What is added to the patch tokens [1 | B, N, D]; ``owned`` holds tables that the model keeps."""
        total = None
        with _full_precision(pos):
            for encoding in _encodings(self.shared):
                if "tokens" not in encoding.sites():
                    continue
                own = encoding.model_parameter
                vectors = encoding.tokens(pos, *([owned[own]] if own else []))
                total = vectors if total is None else total + vectors
        return total

    def mix(self, x: Tensor, pos: Positions, prefix: int) -> Tensor:
        """The tokens [B, T, D] after the first block, with their patches changed by encodings that mix them."""
        for encoding in _encodings(self.shared):
            if "mix" in encoding.sites():
                x = torch.cat([x[:, :prefix], encoding.mix(x[:, prefix:], pos)], dim=1)
        return x

    def shared_signal(self, pos: Positions, prefix: int) -> Signal:
        """The part of the signal that is the same in every layer, expanded once."""
        with _full_precision(pos):
            return _signal(Signal(prefix=prefix), self.shared, pos).expand()

    def signal(self, layer: int, pos: Positions, shared: Signal) -> Signal:
        """The signal of one block."""
        if not len(self.layers):
            return shared
        with _full_precision(pos):
            return _signal(shared, self.layers[layer], pos)


def _encodings(group: nn.Module) -> Iterator[Encoding]:
    return iter(cast(nn.ModuleDict, group).values())  # type: ignore[arg-type]


def _build(term: Term, geometry: Geometry) -> Encoding:
    return lookup(term.name)(geometry, **dict(term.options))


def _signal(signal: Signal, encodings: nn.Module, pos: Positions) -> Signal:
    for encoding in _encodings(encodings):
        if "angles" in encoding.sites():
            signal = replace(signal, angles=encoding.angles(pos))
        if "bias" in encoding.sites():
            signal = replace(signal, biases=(*signal.biases, encoding.bias(pos)))
        if "scale" in encoding.sites():
            signal = replace(signal, scale=signal.scale * encoding.scale(pos))
    return signal


def _full_precision(pos: Positions) -> AbstractContextManager[object]:
    """Positions and phases are not for autocast to round."""
    return exact(pos.coords)
