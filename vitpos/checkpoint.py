"""Weights with what is needed to rebuild their model: safetensors, with a JSON card in the file's metadata.

Loading runs no code from the file. The card holds the architecture and its arguments, the spec as written and
fully resolved, the version of each encoding, the training grid, the classes and the preprocessing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from timm.models import get_model_args
from torch import nn

from vitpos.backbone import position_of, uncompiled, unwrapped
from vitpos.backbone.models import MODELS as TIMM
from vitpos.composition import Position
from vitpos.hub import backbone_args, timm_name
from vitpos.names import features_of, rebuild, rebuild_features, rebuild_plain
from vitpos.spec import lookup, shortened

FORMAT = "vitpos/1"
CARD = {  # what loading needs, and of which type
    "architecture": str, "model_args": dict, "pos_resolved": str, "versions": dict, "grid": list, "dtype": str,
    "extra": dict,
}  # fmt: skip


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's weights and card to ``path`` (whole or not at all) and return the path.

    ``preprocessing`` holds mean, std, img_size and in_chans; ``extra`` anything that JSON can hold.
    A timm model that can have no vitpos encoding, such as a ResNet, is saved as it is (its card's grid is empty).
    A compiled model is saved as itself, one of ``features_only`` as what it is. Raises TypeError for a model that could
    have an encoding and has none or is another wrapper around one, ValueError for one that cannot be rebuilt by name.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give the name of a file, such as model.safetensors")
    card = {
        "format": FORMAT,
        **described(model),
        "classes": None if classes is None else list(classes),
        "preprocessing": None if preprocessing is None else dict(preprocessing),
        "extra": dict(extra or {}),
    }
    try:
        text = json.dumps(card)
    except TypeError as error:
        raise ValueError(f"the model's card cannot be written as JSON: {error}") from None
    state = {key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()}  # (torch.compile's)
    weights = {key: value.detach().contiguous().cpu() for key, value in state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        whole = Path(folder) / path.name
        whole.write_bytes(serialize(weights, metadata={"vitpos": text}))  # (save_file makes it private to its owner)
        os.replace(whole, path)
    return path


def described(model: nn.Module) -> dict[str, Any]:
    """The part of a card that `built` makes the model from. Raises as `save` does."""
    model, inner = uncompiled(model), unwrapped(model)
    holds = any(isinstance(part, Position) for part in model.modules())
    position = position_of(model) if holds or type(model) in TIMM else None
    features = features_of(model) if holds and inner is not model else None
    architecture = timm_name(model)
    if not architecture:
        raise ValueError("the model was not made by name (vitpos.create_model), so it cannot be rebuilt from a file")
    made, left = (len(inner.feature_info), len(inner.blocks)) if position is not None else (0, 0)
    if features is None and left != made:
        raise ValueError(
            f"the model was pruned to {left} of {made} blocks, so it cannot be "
            "rebuilt by name; save its state_dict() instead"
        )
    args = get_model_args(model)
    if features is not None:  # set_input_size of the model inside does not tell the one around it
        args |= {key: value for key, value in get_model_args(inner).items() if key in ("img_size", "patch_size")}
    return {
        "architecture": architecture,
        "model_args": backbone_args(args),
        "features": features,
        "pos": "native" if position is None else str(position.spec),
        "pos_resolved": "native" if position is None else position.resolved,
        "versions": {} if position is None else {name: lookup(name).version for name in position.spec.names},
        "grid": [] if position is None else list(position.geometry.grid),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def built(card: Mapping[str, Any]) -> nn.Module:
    """The model that a card describes, without its weights. ValueError where it cannot be built."""
    features = card.get("features")  # older cards do not say
    build: Any = rebuild if features is None else partial(rebuild_features, features=features)
    try:
        model: Any = (
            build(
                card["architecture"],
                card["pos_resolved"],
                grid=card["grid"],
                versions=card["versions"],
                **card["model_args"],
            )
            if card["grid"]
            else rebuild_plain(card["architecture"], **card["model_args"])
        )
        return model.to(getattr(torch, card["dtype"]))
    except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError, LookupError) as error:
        raise ValueError(f"cannot rebuild the model: {error}") from None


def read_card(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The card of a saved model. FileNotFoundError without a file, ValueError if it is not one of vitpos's."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("vitpos")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error})") from None
    if text is None:
        raise ValueError(f"{path} holds weights but no vitpos card; only files written by vitpos.save can be rebuilt")
    try:
        card = json.loads(text)
    except ValueError:
        raise ValueError(f"{path}: its card is not JSON; the file is damaged or was edited") from None
    found = card.get("format") if isinstance(card, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found!r}; this version of vitpos reads {FORMAT!r}")
    for key, kind in CARD.items():
        if not isinstance(card.get(key), kind):
            raise ValueError(f"{path}: {key!r} of its card is {card.get(key)!r}; the file is damaged or was edited")
    return card


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> nn.Module:
    """The model that was saved at ``path``, in evaluation mode.

    Raises FileNotFoundError, or ValueError for a damaged file, weights that do not fit their card, or an
    encoding whose numbers have changed since.
    """
    card = read_card(path)
    try:
        model: Any = built(card)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        model.load_state_dict(load_file(path))
    except (RuntimeError, SafetensorError) as error:
        first = " ".join(str(error).strip().splitlines()[:2])
        raise ValueError(f"the weights in {path} do not fit their card: {shortened(first, 300)}") from None
    if card["preprocessing"]:
        model.pretrained_cfg = dict(
            model.pretrained_cfg,
            **{k: tuple(card["preprocessing"][k]) for k in ("mean", "std") if k in card["preprocessing"]},
        )
    return model.to(device).eval()
