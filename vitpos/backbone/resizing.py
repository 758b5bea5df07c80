"""The encodings of a model, also behind a wrapper, and the resize policies in force."""

from __future__ import annotations

from typing import Any

from timm.models._features import FeatureGetterNet
from torch import nn

from vitpos.composition import Position


def resize_policy(model: nn.Module) -> str:
    """The resize policy in force, one an encoding, joined by `` + ``; ``-`` where there is nothing to resize."""
    position = position_of(model)
    found = {e.name: e.resize or "-" for e in position.encodings()}
    return " + ".join(found[name] for name in position.spec.names)


def set_resize(model: nn.Module, policy: str) -> nn.Module:
    """Switch the resize policy of all of a model's encodings, in place; ``default`` is that of its spec.

    ``extrapolate``: coordinates run on; ``interpolate``: they are scaled into the training grid, or a table is
    resampled; ``normalized``: they are fractions of the image by definition. Some encodings have more of their
    own (``ntk``, ``linspace``, ``fractional``), described with them.

    It holds until it is switched again and is not saved: what is stored is the spec that was trained.
    Raises ValueError where an encoding does not offer the policy; nothing is then changed.
    """
    encodings = [e for e in position_of(model).encodings() if e.resize is not None]
    wanted = {e: e.default_resize if policy == "default" else policy for e in encodings}
    for encoding, choice in wanted.items():
        if choice not in encoding.resize_choices():
            known = ", ".join((*encoding.resize_choices(), "default"))
            raise ValueError(f"{encoding.name} does not offer the resize policy {policy!r}; it knows {known}")
    for encoding, choice in wanted.items():
        encoding.resize = choice
    return model


def position_of(model: Any) -> Position:
    """The encodings of a model, compiled and ``features_only`` too; TypeError if vitpos gave it none."""
    position = getattr(unwrapped(model), "position", None)
    if isinstance(position, Position):
        return position
    for name, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(getattr(unwrapped(part), "position", None), Position):
            kind = type(model).__name__
            raise TypeError(f"{kind} has no vitpos encoding itself; pass model.get_submodule({name!r}), which has one")
    raise TypeError(f"{type(model).__name__} has no vitpos encoding; attach one with vitpos.attach(model, spec)")


def unwrapped(model: Any) -> Any:
    """The model that is inside ``torch.compile``, timm's ``features_only`` or both; else the model itself."""
    model = uncompiled(model)
    return uncompiled(model.model) if isinstance(model, FeatureGetterNet) else model


def uncompiled(model: Any) -> Any:
    """What ``torch.compile`` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)
