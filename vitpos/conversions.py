"""Exact conversions: the same model, written with another encoding that contains the first.

- To ``rope_mixed`` from ``rope_axial`` and ``string`` (its basis folds into the weights of q and k): on every grid,
  or with ``wrap`` under ``extrapolate``, where the two count new cycles differently, on the training grid.
- To ``rpb`` from every bias that depends on the offset only, alone or several as their sum: on the training grid;
  on others the table's own resize policy holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitpos import easing, positions
from vitpos.attention import PositionedAttention
from vitpos.backbone import position_of, unwrapped
from vitpos.backbone.parts import Attention
from vitpos.composition import Position
from vitpos.encoding import Contextual, Encoding, OffsetBias, OffsetTable
from vitpos.hub import describe_for_timm
from vitpos.spec import Spec, Term

Sources = Sequence[Any]  # the encodings of one block that become one


@dataclass(frozen=True)
class Conversion:
    """What becomes of the encodings of one block: options and weights (by name, for a layer) of the new one.

    ``contains`` says of an encoding whether it can be converted, ``known`` in words which can. ``basis`` gives an
    orthogonal matrix [h, d, d] that goes into the weights of q and k, or None.
    """

    known: str
    contains: Callable[[Encoding], bool]
    options: Callable[[Sources], dict[str, Any]]
    weights: Callable[[Sources, int], dict[str, Tensor]]
    basis: Callable[[Sources], Tensor | None]


def convert(model: nn.Module, target: str) -> nn.Module:
    """Replace, in place, what ``target`` contains of a model's encodings by ``target``, and return the model.

    The model computes what it did, up to rounding (on which grids: see this module). Its other encodings stay as
    they are, and the global random state is untouched.

    Raises ValueError, naming what can be converted, where nothing can; where q and k are normalized or read by
    another encoding, so that a basis does not fold; for a bias with infinite entries. Nothing is then changed.
    TypeError for a model without an encoding of vitpos.
    """
    given, model = model, unwrapped(model)
    position = position_of(given)
    names = position.spec.names
    conversion = CONVERSIONS.get(target)
    one = {encoding.name: encoding for encoding in position.encodings()}  # of all layers, whose options are the same
    old = [name for name in names if conversion and (name == target or conversion.contains(one[name]))]
    if conversion is None or not set(old) - {target}:
        known = "; ".join(f"{conversion.known} to {name}" for name, conversion in CONVERSIONS.items())
        raise ValueError(f"nothing in {str(position.spec)!r} converts to {target!r}; known: {known}")
    depth = len(model.blocks)  # type: ignore[arg-type]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        every = [_in_block(position, layer) for layer in range(depth)]
        sources = [[block[name] for name in old] for block in every]
        bases = [conversion.basis(s) for s in sources]
        if bases[0] is not None:
            _check_foldable(model, [block[name] for block in every for name in names if name not in old])
        new = Term.build(target, conversion.options(sources[0]))
        terms = [new if t.name == old[0] else t for t in position.spec.terms if t.name not in old[1:]]
        changed = Position(Spec(tuple(terms)), replace(position.geometry, depth=depth), position.native)
        changed.to(next(model.blocks.parameters())).train(model.training)  # type: ignore[union-attr]
        for layer, source in enumerate(sources):
            fresh: Any = changed.layers[layer][target]  # type: ignore[index]
            if fresh.default_resize == source[0].default_resize:
                fresh.resize = source[0].resize  # which may have been switched
            for name, value in conversion.weights(source, layer).items():
                own = getattr(fresh, name)
                if own is not None:  # weights of prefix tokens, which the model may not have
                    own.copy_(value)
    changed.adopt(position, set(names) - {*old, target})
    for block, basis in zip(model.blocks, bases):  # type: ignore[arg-type]
        if basis is not None:
            _fold(block, basis)
    model.position = changed
    describe_for_timm(model)
    return given


def _in_block(position: Position, layer: int) -> dict[str, Any]:
    return {**position.shared, **(position.layers[layer] if len(position.layers) else {})}  # type: ignore[dict-item]


def _check_foldable(model: nn.Module, others: Sources) -> None:
    """ValueError if q and k have no weights in one piece, or something else than the logits sees what these give."""
    attentions: list[Any] = [m for m in model.modules() if isinstance(m, PositionedAttention)]
    if other := {type(m).__name__ for m in attentions if type(m) is not Attention}:
        raise ValueError(f"the basis of string folds into q and k of timm's Attention only, not of {', '.join(other)}")
    if any(not isinstance(m.q_norm, nn.Identity) for m in attentions):
        raise ValueError("the basis of string does not fold into q and k: the model normalizes them in between")
    for encoding in others:
        if "bias" in encoding.sites() and isinstance(encoding.bias(_training_grid(encoding)), Contextual):
            raise ValueError(f"the basis of string does not fold into q and k: {encoding.name} reads them")


@torch.no_grad()
def _fold(block: nn.Module, basis: Tensor) -> None:
    """Multiply the weights of q and k of a block's attentions by ``basis`` [h, d, d]."""
    for attention in (m for m in block.modules() if isinstance(m, PositionedAttention)):
        qkv: Any = attention.qkv  # type: ignore[attr-defined]
        for parameter in (qkv.weight, qkv.bias):
            if parameter is not None:
                rows = parameter.view(3, basis.shape[0], basis.shape[1], -1)  # [q | k | v, h, d, D | 1]
                rows[:2] = (basis.double() @ rows[:2].double()).to(rows.dtype)


def _training_grid(encoding: Encoding) -> positions.Positions:
    like = next(encoding.parameters(), torch.empty(0, dtype=torch.float64))
    return positions.grid(*encoding.geometry.grid, device=like.device, dtype=torch.float64)


def _mixed_options(sources: Sources) -> dict[str, Any]:
    (rotary,) = sources
    wrap = getattr(rotary, "wrap", False)
    return {"resize": rotary.default_resize, "free_prefix": rotary.free_prefix, "wrap": wrap}


def _mixed_weights(sources: Sources, layer: int) -> dict[str, Tensor]:
    (rotary,) = sources
    frequencies = rotary.frequencies(_training_grid(rotary))
    if rotary.gate is not None:
        frequencies = frequencies * rotary.gate.to(frequencies.dtype).view(-1, 1, 1)
    if getattr(rotary, "wrap", False):  # the weights of rope_mixed are then cycles around a side
        frequencies = (frequencies * frequencies.new_tensor(rotary.geometry.grid) / (2 * math.pi)).round()
    return {"weight": frequencies}


def _table_options(sources: Sources) -> dict[str, Any]:
    return {"prefix": any(bias.prefix_bias() is not None for bias in sources)}


def _table_weights(sources: Sources, layer: int) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for bias in sources:
        given: OffsetTable = bias.bias(_training_grid(bias))
        given = given if bias.gate is None else easing.gated(given, bias.gate)
        if not given.values.isfinite().all():
            raise ValueError(f"{bias.name} masks pairs with an infinite bias, which a learned table cannot hold")
        slope = bias.slope_of(layer)
        weights["table"] = weights.get("table", 0) + slope * given.values.cpu()
        if given.prefix is not None:
            weights["prefix"] = weights.get("prefix", 0) + slope * given.prefix.cpu()
    return weights


def _is_table(encoding: Encoding) -> bool:
    return isinstance(encoding, OffsetBias) and isinstance(encoding.bias(_training_grid(encoding)), OffsetTable)


CONVERSIONS = {
    "rope_mixed": Conversion(
        "rope_axial and string",
        lambda encoding: encoding.name in ("rope_axial", "string"),
        _mixed_options,
        _mixed_weights,
        lambda sources: sources[0].basis(),
    ),
    "rpb": Conversion(
        "biases that depend on the offset only", _is_table, _table_options, _table_weights, lambda sources: None
    ),
}
