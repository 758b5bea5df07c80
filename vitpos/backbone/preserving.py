"""From one encoding to another without a cold start: the new begins at zero, the old stays and fades."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitpos import easing
from vitpos.backbone.resizing import position_of
from vitpos.composition import Position
from vitpos.spec import Spec, Term, lookup


def preserved(spec: Spec, found: Sequence[Term], kept: Position | None) -> Spec:
    """``spec`` as a model with the encodings ``found`` must have it so that nothing changes.

    Raises ValueError, with the reason, for an encoding that has no beginning without effect, or for one found that
    can be neither kept nor faded.
    """
    old = {term.name: term for term in found if term.name != "none"}
    new = {term.name: term for term in spec.terms if term.name != "none"}
    terms = []
    for name, term in new.items():
        if name not in old:
            how = lookup(name).beginning(dict(term.options))
            terms.append(replace(term, modifier="gated" if how == "gate" else ""))
        elif term.options != old[name].options and name != "ape1d":  # whose one option is how a table is drawn
            raise ValueError(f"preserve=True keeps {old[name]} as it is, so that it cannot become {term}")
        else:
            terms.append(term if term.modifier == "fading" and not old[name].modifier else old[name])
    for name, term in old.items():
        if name in new or (term.modifier == "fading" and kept is not None and _share(kept) == 0):
            continue
        if name == "native" or lookup(name).sites() != ("tokens",):
            what = "the model's own encoding" if name == "native" else str(term)
            raise ValueError(
                f"preserve=True cannot give up {what}, which acts in every block: only what is added to the tokens can "
                f"fade. Keep it beside the new one (native + {spec}) or see vitpos.convert"
            )
        terms.append(replace(term, modifier="fading"))
    fading = {term.name for term in terms if term.modifier == "fading"}
    if kept is not None and kept.fading & fading and fading - kept.fading and _share(kept) < 1:
        raise ValueError(
            f"{', '.join(sorted(kept.fading & fading))} has faded to {_share(kept):g} and {', '.join(sorted(fading))} "
            "would fade together from there; set_fade(model, 0) first drops the one, set_fade(model, 1) restores it"
        )
    return Spec(tuple(terms)) if terms else spec


@torch.no_grad()
def begin(position: Position, names: Iterable[str]) -> None:
    """Set the encodings of these names to where they change nothing (a gate is there already)."""
    chosen = set(names)
    for encoding in position.encodings():
        if encoding.name in chosen:
            for name, parameter in encoding.named_parameters():
                if name in encoding.zeros:
                    parameter.zero_()


def freeze_fading(model: Any) -> None:
    """What fades learns no more: it would grow against its schedule, and the model would lean on it to the end."""
    for encoding in model.position.encodings():
        if encoding.name in model.position.fading:
            encoding.requires_grad_(False)
            if encoding.model_parameter == "pos_embed":
                model.pos_embed.requires_grad_(False)


def changed(found: Sequence[Term], terms: Sequence[Term]) -> bool:
    """Whether a model that had ``found`` and now has ``terms`` may compute something else."""

    def effective(every: Sequence[Term]) -> set[str]:
        """The encodings, whatever the options of ``ape1d``, less those without effect on the training grid."""
        return {
            f"{term.modifier} {term.name}" if term.name == "ape1d" else term.resolved
            for term in every
            if term.name == "native" or not set(lookup(term.name).sites()) <= {"scale"}
        }

    return effective(found) != effective(terms)


def redrawn(before: Position, after: Position) -> bool:
    """Whether something that was learned in encodings of ``before`` is begun anew in ``after``."""
    names = {encoding.name for encoding in after.encodings()}
    return any(encoding.name in names and any(True for _ in encoding.parameters()) for encoding in before.encodings())


def set_fade(model: nn.Module, share: float) -> nn.Module:
    """Set how much is left, 1 to 0, of the encodings that a spec calls ``fading``, and return the model.

    For a schedule of fine-tuning after ``attach(..., preserve=True)``: call it before each step, down to 0. It is a
    buffer: saved with the weights and, counted in whole 65536ths, copied by an average of weights (timm's
    ``ModelEmaV3``), not averaged. At 0, ``attach(model, spec, preserve=True)`` drops what has faded.

    Raises ValueError for a share outside 0..1 or a model in which nothing fades, TypeError for one without an
    encoding of vitpos or a share that is no number.
    """
    fade_of(model)  # may refuse
    position_of(model).faded.fill_(easing.parts(share))
    return model


def fade_of(model: nn.Module) -> float:
    """How much is left, 1 to 0, of the encodings of a model that fade. ValueError where none does."""
    position = position_of(model)
    if not position.fading:
        raise ValueError(f"nothing fades in {str(position.spec)!r}; attach(model, spec, preserve=True) makes it so")
    return _share(position)


def _share(position: Position) -> float:
    return 1 - position.faded.item() / easing.WHOLE
