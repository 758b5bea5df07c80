"""What timm writes about a model when it saves one: a registered name and arguments that rebuild it with its encoding.

timm's hub layout (``timm.models.save_for_hf``) and its checkpoints hold an architecture and its arguments. Those of
a model with a vitpos encoding must never be the plain timm architecture: it would load without a word, and compute
something else.
"""

from __future__ import annotations

from typing import Any

from vitpos.spec import Spec, lookup

GENERIC = "vitpos_model"  # takes the timm architecture as an argument
BASES = {f"vitpos_{size}_patch16_224": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")}


def registered_name(architecture: str, spec: Spec) -> str:
    """The name in timm's registry that stands for a timm architecture with an encoding."""
    for stem, base in BASES.items():
        if base == architecture and len(spec.terms) == 1:
            return f"{stem}_{spec.names[0]}"
    return GENERIC


def timm_name(model: Any) -> str | None:
    """The timm architecture below a model's encoding (without a tag), or None for a model not made by name."""
    architecture = getattr(model, "pretrained_cfg", {}).get("architecture")
    if architecture == GENERIC:
        return vars(model)["_model_args"]["architecture"]
    return next((base for stem, base in BASES.items() if str(architecture).startswith(f"{stem}_")), architecture)


def describe_for_timm(model: Any) -> None:
    """Write the registered name of a model with an encoding where timm looks for its architecture.

    A model that was not made by name stays without one.
    """
    base = timm_name(model)
    if base is None:
        return
    name = registered_name(base, model.position.spec)
    model.pretrained_cfg = dict(model.pretrained_cfg, architecture=name)
    model.default_cfg = model.pretrained_cfg  # timm's older name for it
    model._model_args = dict(vars(model).get("_model_args", {}), architecture=base)


class Described:
    """The arguments by which timm rebuilds a model, with its encoding as it is now, not as it was asked for."""

    @property
    def _model_args(self: Any) -> dict[str, Any]:
        spec = self.position.spec
        args = {
            **vars(self).get("_model_args", {}),
            "pos": self.position.resolved,
            "grid": list(self.position.geometry.grid),
            "versions": {name: lookup(name).version for name in spec.names},
        }
        if getattr(self, "pretrained_cfg", {}).get("architecture") != GENERIC:
            args.pop("architecture", None)
        return args

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        vars(self)["_model_args"] = args


def backbone_args(args: dict[str, Any]) -> dict[str, Any]:
    """Of a model's arguments those of the timm architecture alone."""
    return {key: value for key, value in args.items() if key not in ("architecture", "pos", "grid", "versions")}
