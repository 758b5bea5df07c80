"""Every encoding under names in timm's registry, for code that takes a name and nothing else.

``vitpos_{tiny,small,base}_patch16_224_{encoding}`` stand for timm's ``vit_{size}_patch16_224``; ``pos`` holds a full
spec with options. ``vitpos_model(architecture=..., pos=...)`` stands for any other timm architecture.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import Format
from timm.models import build_model_with_cfg, get_model_args, get_pretrained_cfg, register_model
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from vitpos.backbone import attach, create_model, position_of, unwrapped
from vitpos.backbone.loading import find_weights, source_grid, without_loading, without_sizes
from vitpos.hub import BASES, GENERIC, backbone_args, describe_for_timm, timm_name
from vitpos.spec import list_encodings, lookup, parse

default_cfgs: dict[str, dict[str, Any]] = {}  # timm reads it from the module of an entry point
_SOURCES = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def rebuild(
    architecture: str,
    pos: str,
    *,
    grid: Sequence[int] | None = None,
    versions: Mapping[str, int] | None = None,
    encoding_seed: int | None = None,
    **kwargs: Any,
) -> nn.Module:
    """The model that a file describes, without its weights: nothing is loaded, and no code but timm's and ours runs.

    ``grid`` (H, W) is the training grid, in patches, where the nominal ``img_size`` does not say it; ``versions`` of
    the encodings are compared with this vitpos; ``encoding_seed`` as in ``vitpos.create_model``.

    Raises ValueError for an architecture that is not one of timm's own, for arguments that would load something, and
    for an encoding whose numbers have changed since.
    """
    _check_source(architecture, kwargs)
    for name, version in (versions or {}).items():
        if lookup(name).version != version:
            raise ValueError(
                f"the weights were saved with version {version} of {name}; this vitpos has version "
                f"{lookup(name).version}, which gives other numbers"
            )
    build = partial(create_model, architecture, pos=pos, encoding_seed=encoding_seed)
    if grid is None:
        return build(**kwargs)
    with torch.device("meta"):
        nominal = unwrapped(timm.create_model(architecture, **kwargs)).patch_embed
    if tuple(nominal.grid_size) == tuple(grid):
        return build(**kwargs)
    size = tuple(cells * step for cells, step in zip(grid, nominal.feat_ratio(as_scalar=False)))
    model = build(**{**kwargs, "img_size": size})
    unwrapped(model).set_input_size(img_size=nominal.img_size)
    update_model_input_size(model, nominal.img_size)  # which may be around it
    return model


def rebuild_features(architecture: str, pos: str, features: Mapping[str, Any], **kwargs: Any) -> nn.Module:
    """Likewise with timm's ``features_only``, as ``features_of`` describes it.

    The encoding counts the blocks that there were when it was attached, before or after timm pruned the others.
    """
    depth, blocks = features["depth"], features["blocks"]
    model: Any = rebuild(architecture, pos, **{**kwargs, "out_indices": [depth - 1]})
    if blocks < depth:
        model.model.prune_intermediate_layers([blocks - 1])
    model.out_indices = features["out_indices"]
    model.feature_info = model.feature_info.from_other(features["out_indices"])
    model.output_fmt, model.norm = Format(features["output_fmt"]), features["norm"]
    return model


def features_of(model: Any) -> dict[str, Any]:
    """What ``rebuild_features`` needs to know of a model with ``features_only`` besides its arguments."""
    inner = unwrapped(model)
    return {
        "depth": position_of(model).geometry.depth,
        "blocks": len(inner.blocks),
        "out_indices": list(model.out_indices),
        "output_fmt": Format(model.output_fmt).value,
        "norm": model.norm,
    }


def rebuild_plain(architecture: str, **kwargs: Any) -> nn.Module:
    """Likewise timm's own model of a class that vitpos gives no encoding, such as a ResNet."""
    _check_source(architecture, kwargs)
    return timm.create_model(architecture, **kwargs)


def renew(model: Any, *, encoding_seed: int | None = None, **changes: Any) -> nn.Module:
    """A model of the same architecture and encoding, timm's or ours, with new weights from the global random state.

    ``changes`` are arguments that differ: ``num_classes``, ``in_chans``, ``img_size`` (ignored where the architecture
    has none; else the training grid follows it). Nothing is loaded. Raises ValueError for a model not made by name.
    """
    architecture = timm_name(model)
    if not architecture:
        raise ValueError(f"this {type(model).__name__} was not made by name, so no second one can be made")
    args = backbone_args(get_model_args(model))
    sized = "img_size" in args and "img_size" in changes
    args |= {key: value for key, value in changes.items() if key != "img_size" or sized}
    position = getattr(model, "position", None)
    if position is None:
        return rebuild_plain(architecture, **args)
    if sized:
        return rebuild(architecture, str(position.spec), encoding_seed=encoding_seed, **args)
    grid = position.geometry.grid
    return rebuild(architecture, position.resolved, grid=grid, encoding_seed=encoding_seed, **args)


def _check_source(architecture: str, kwargs: Mapping[str, Any]) -> None:
    _check_architecture(architecture)
    if loads := [key for key in _SOURCES if kwargs.get(key)]:
        raise ValueError(f"the arguments of a model to be rebuilt must not load anything, got {', '.join(loads)}")


def _check_architecture(name: Any) -> None:
    """ValueError unless ``name`` is a model of timm's own registry: never a path, the network or one of ours."""
    if isinstance(name, str) and not set(name) & set(":/\\") and timm.is_model(name) and not name.startswith("vitpos_"):
        return
    known = [model for model in timm.list_models() if not model.startswith("vitpos_")]
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3)
    raise ValueError(
        f"architecture={name!r} must be a timm model; nearest: {', '.join(close) or 'see timm.list_models()'}"
    )


def _check_weights(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of another encoding must not pass, even where timm loads leniently (another number of classes)."""

    def positional(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        return {k: tuple(v.shape) for k, v in state.items() if k.startswith("position.") or k == "pos_embed"}

    found, wanted = positional(weights), positional(model.state_dict())
    wrong = sorted(key for key in {**found, **wanted} if found.get(key) != wanted.get(key))
    if wrong:
        key = wrong[0]
        raise ValueError(
            f"the weights are not those of {str(position_of(model).spec)!r}: {key} is {found.get(key, 'absent')} in "
            f"the file and {wanted.get(key, 'absent')} in the model"
        )
    return weights


def _build(name: str, architecture: str, pos: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """Let timm build, load and wrap a model of ours as it does its own."""
    saved = (kwargs.get("pretrained_model_args") or {}).get("pos", pos)
    given: dict[str, Any] = {}
    if pretrained and not kwargs.get("pretrained_model_args"):  # (a folder's own arguments hold the grid)
        weights = find_weights(name, {**kwargs, "pretrained": True})
        if weights is not None and (weights.tables or weights.grid):
            with torch.device("meta"):
                made: Any = [
                    timm.create_model(architecture, **{k: v for k, v in args.items() if k not in _SOURCES})
                    for args in (without_sizes(kwargs), without_loading(kwargs))
                ]
                given["grid"] = source_grid(weights, made[0], tuple(made[1].patch_embed.grid_size))
    model = build_model_with_cfg(
        partial(rebuild, architecture, saved if pretrained else pos, **given),
        name,
        pretrained,
        pretrained_filter_fn=_check_weights,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **kwargs,
    )
    inner = unwrapped(model)
    if pretrained and parse(saved) != parse(pos):
        attach(inner, pos)
    describe_for_timm(inner)
    return model


def _entry(stem: str, encoding: str) -> Callable[..., nn.Module]:
    """The entry point of one registered name."""
    name = f"{stem}_{encoding}"

    def entry(pretrained: bool = False, *, pos: str = encoding, **kwargs: Any) -> nn.Module:
        if encoding not in parse(pos).names and not kwargs.get("pretrained_model_args"):
            raise ValueError(
                f"{name} has the encoding {encoding}; pos={pos!r} lacks it: use {GENERIC}, or a name of it"
            )
        return _build(name, BASES[stem], pos, pretrained, **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"timm's ``{BASES[stem]}`` with the encoding ``{encoding}``; ``pos`` may hold a spec with options."
    return entry


def vitpos_model(
    pretrained: bool = False, *, architecture: str | None = None, pos: str = "native", **kwargs: Any
) -> nn.Module:
    """Any timm architecture that is served, with any encoding: ``vitpos.create_model`` under a name.

    ``pretrained`` loads timm's weights of the architecture, or those of the folder that the name came from.
    """
    if architecture is None:
        raise ValueError(f"{GENERIC} needs architecture=, a timm model such as 'vit_small_patch16_224'")
    _check_architecture(architecture)
    if not kwargs.get("pretrained_cfg"):
        return create_model(architecture, pos=pos, pretrained=pretrained, **kwargs)
    return _build(GENERIC, architecture, pos, pretrained, **kwargs)


def register_names() -> None:
    """Enter the names of all known encodings that have none yet in timm's registry."""
    for encoding in list_encodings():
        for stem, base in BASES.items():
            name = f"{stem}_{encoding}"
            if encoding == "native" or timm.is_model(name):
                continue
            entry = _entry(stem, encoding)
            config: Any = get_pretrained_cfg(base)
            empty = {"url": None, "hf_hub_id": None, "tag": None, "custom_load": False, "architecture": name}
            default_cfgs[name] = dataclasses.replace(config, **empty).to_dict()
            globals()[name] = entry
            register_model(entry)


register_names()
register_model(vitpos_model)
