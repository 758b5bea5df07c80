"""From a timm model to one with a position encoding: by name, or in place."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import timm
import torch
from timm.layers import PatchDropoutWithIndices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from vitpos import positions
from vitpos.backbone.loading import Weights, find_weights, source_grid, take_tables, without_loading, without_sizes
from vitpos.backbone.models import BLOCKS, MODELS
from vitpos.backbone.native import OWN, ROTARY
from vitpos.backbone.parts import PARTS, PATCH_EMBEDS, attentions_of, not_a_multiple
from vitpos.backbone.preserving import begin, changed, freeze_fading, preserved, redrawn
from vitpos.backbone.resizing import unwrapped
from vitpos.composition import Position, check_combination, flat_tables
from vitpos.encoding import Geometry
from vitpos.hub import describe_for_timm
from vitpos.positions import check_grid
from vitpos.spec import Spec, Term, lookup, parse, shortened

WHY_NOT = {  # classes of timm whose refusal has a better reason than being unknown
    "DiffAttention": "it subtracts two softmaxes, and no encoding says what the logits of each should get",
    "DiffParallelScalingBlock": "it subtracts two softmaxes, and no encoding says what the logits of each should get",
    "VisionTransformerSAM": "its blocks attend within windows and add decomposed biases of their own",
    "SwinTransformer": "its blocks attend within shifted windows, whose grid is not that of the image",
    "SwinTransformerV2": "its blocks attend within shifted windows, whose grid is not that of the image",
    "NaFlexVit": "it takes patches of several images in one sequence, with coordinates and masks of its own",
}


class ColdSwapWarning(UserWarning):
    """A trained model was given another encoding, and now computes something else."""


def create_model(
    name: str,
    pos: str | Spec = "native",
    *,
    preserve: bool | None = None,
    encoding_seed: int | None = None,
    checkpoint_grid: Sequence[int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A timm model of this name with the position encoding ``pos``.

    ``kwargs`` are those of ``timm.create_model``; ``preserve`` is that of ``attach``. The backbone draws its weights
    as timm does, whatever the encoding; the encoding draws after it, from ``encoding_seed`` if given (the global
    random state is then untouched by it).

    Trained weights (``pretrained``, ``checkpoint_path``) may be of any size and aspect: tables that the encoding keeps
    are loaded as they are, with their own grid as the training grid, and each forward resamples them.
    ``checkpoint_grid`` (H, W), in patches, says which grid that is, where a file does not.

    Raises ValueError for an unknown model, encoding or option, an image size that is no multiple of the patch
    size, a width that the encoding cannot serve, tables of an unknown grid; TypeError for a model or option of a kind
    that is not served; FileNotFoundError.
    """
    spec = parse(pos)
    if not (encoding_seed is None or (isinstance(encoding_seed, int) and encoding_seed >= 0)):
        raise ValueError(f"encoding_seed must be None or a whole number of at least 0, got {encoding_seed!r}")
    if not isinstance(name, str) or not timm.is_model(name):
        if not isinstance(name, str):
            raise TypeError(f"the name of a timm model is a string, got {type(name).__name__} {name!r}")
        if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
            near = difflib.get_close_matches(name.split(".")[0], timm.list_models(), n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models('vit*') lists them"
            raise ValueError(f"unknown timm model {shortened(name)!r}; {hint}")
    trained = bool(kwargs.get("pretrained") or kwargs.get("checkpoint_path"))
    if kwargs.get("weight_init") == "skip" and not trained:
        raise ValueError("weight_init='skip' leaves pos_embed and tokens uninitialized; use 'reset' for PyTorch's own")
    if checkpoint_grid is not None:
        check_grid("checkpoint_grid", checkpoint_grid)
        if not trained:
            raise ValueError("checkpoint_grid is the grid of trained weights; give checkpoint_path or pretrained=True")
    weights = find_weights(name, kwargs) if trained else None
    wanted, size = _sizes(name, kwargs, weights, checkpoint_grid) if trained else (None, None)
    model = _build(name, kwargs if wanted is None else {**kwargs, "img_size": size})
    target = unwrapped(model)
    if kwargs.get("img_size") is not None and not kwargs.get("dynamic_img_pad") and type(target) in MODELS:
        size, step = wanted or target.patch_embed.img_size, target.patch_embed.feat_ratio(as_scalar=False)
        if any(side % s for side, s in zip(size, step)):
            raise ValueError(not_a_multiple(size, step))
    if weights is not None and type(target) in MODELS:
        take_tables(target, weights)
    if wanted is not None and not (preserve or _keeps_tables(target, spec)):
        target.patch_embed.set_input_size(img_size=wanted)  # the encoding is a new one, for the new size
    with torch.random.fork_rng(enabled=encoding_seed is not None):
        if encoding_seed is not None:
            torch.manual_seed(encoding_seed)
        _attach(target, spec, trained=trained, preserve=preserve)
    if wanted is not None:
        target.set_input_size(img_size=wanted)
        if target is not model:
            update_model_input_size(model, wanted)
    return model


def _build(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        return timm.create_model(name, **kwargs)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, StopIteration, TypeError) as error:
        given = ", ".join(f"{key}={shortened(repr(value))}" for key, value in kwargs.items())
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"timm cannot build {name} with {given}: {shortened(reason, 400)}") from error


def _sizes(
    name: str, kwargs: dict[str, Any], weights: Weights | None, given: Sequence[int] | None
) -> tuple[Any, Any] | tuple[None, None]:
    """The image size asked for, and the one at which tables of these weights fit; None if they are the same."""
    resized = any(kwargs.get(key) is not None for key in ("img_size", "patch_size"))
    if not resized and weights is None and given is None:
        return None, None
    with torch.device("meta"):
        nominal = _build(name, without_sizes(kwargs))
        asked = _build(name, without_loading(kwargs)) if resized else nominal
    plain = type(nominal) in MODELS
    if not plain and not (hasattr(nominal, "position") and kwargs.get("checkpoint_path")):
        return None, None  # not served, or a name of vitpos that sees to it itself
    if plain and weights is not None and weights.encoding:
        raise ValueError(
            f"{weights.where} holds {weights.encoding} of a vitpos encoding, for which timm's {name} has no place; use "
            "vitpos.load for a file of vitpos.save, else load_state_dict of a model with the encoding"
        )
    patch = asked.patch_embed
    stated = None if given is None else (given[0], given[1])
    folder = ":" in name  # whose configuration says the grid of its weights
    other = nominal.patch_embed if folder else patch
    grid = source_grid(weights, nominal, tuple(other.grid_size), stated)
    if tuple(patch.grid_size) == grid or not flat_tables(nominal.state_dict()):
        return None, None
    return patch.img_size, tuple(cells * step for cells, step in zip(grid, patch.feat_ratio(as_scalar=False)))


def _keeps_tables(model: Any, spec: Spec) -> bool:
    return "native" in spec.names or ("ape1d" in spec.names and getattr(model, "pos_embed", None) is not None)


def attach(model: nn.Module, pos: str | Spec, *, preserve: bool | None = None) -> nn.Module:
    """Exchange the position encoding of a timm vision transformer, in place, and return the model.

    A compiled model and one of ``features_only`` are seen through, as by all functions of vitpos that take a model.

    ``native`` keeps what the model has and changes no logit at its own size; what else it has of its own (an
    absolute table, rotary tables, biases) goes away unless ``pos`` names it. An absolute table that goes first
    leaves its rows for class and register tokens in those tokens. ``ape1d`` keeps the model's table.

    With ``preserve=True`` the model computes what it did, to the last bit where q and k rotate and to rounding where
    the logits get a bias (with ``logn``, on the training grid), and is fine-tuned from there: a new encoding begins at
    zero (its weights, or a gate: the spec then says ``gated``), what was added to the tokens stays and is ``fading``,
    until ``set_fade`` has taken it away. ``docs/encodings`` lists how each encoding begins, and which cannot. Without
    it a trained model must be fine-tuned before it is of use: a ``ColdSwapWarning`` says so, unless ``preserve=False``
    says that this is meant.

    Raises TypeError for a model of a kind that is not served, with the class that is in the way and why; ValueError
    for a spec that makes no sense or does not fit the model. Nothing is then changed.
    """
    _attach(unwrapped(model), parse(pos), trained=True, preserve=preserve)
    return model


def _attach(model: Any, spec: Spec, trained: bool, preserve: bool | None) -> None:
    _check_served(model)
    check_combination(spec)
    kept = getattr(model, "position", None) if preserve or "native" in spec.names else None  # with its weights
    kind: Any = MODELS.get(type(model), type(model))
    own = [OWN[name] for name in (*kind.own(model), *kind.own_of(model, model.blocks[0]))]
    found = _found(model, own=bool(own))
    spec = _resolve_native(spec, found)
    if preserve:
        spec = preserved(spec, found, kept)
    attention = attentions_of(model.blocks[0])[0]
    geometry = Geometry(
        dim=model.embed_dim,
        heads=attention.num_heads,
        head_dim=getattr(attention, "head_dim", model.embed_dim // attention.num_heads),
        depth=len(model.blocks),
        grid=_training_grid(model, own=bool(own)) if kept is None else kept.geometry.grid,
        prefix=model.num_prefix_tokens,
    )
    weight = next(model.blocks.parameters())
    with weight.device:
        position = Position(spec, geometry, own).to(weight.dtype)  # may refuse: the model is still as it was

    before = getattr(model, "position", None)
    anew = kept is None and before is not None and redrawn(before, position)
    if kept is not None:
        position.adopt(kept, set(kept.spec.names) & set(position.spec.names))
    if preserve:
        begin(position, set(position.spec.names) - {term.name for term in found})
    for module in model.modules():
        module.__class__ = PARTS.get(type(module), type(module))
        if isinstance(module, PatchDropoutWithIndices):
            module.num_prefix_tokens = model.num_prefix_tokens  # (timm's distilled model leaves it at 1 of 2)
    model.__class__ = kind
    _move_table(model, position, trained or kept is not None)
    if "native" not in spec.names:
        model.drop_own()
    thawed = "ape1d" in getattr(getattr(model, "position", None), "fading", ()) and "ape1d" in position.shared
    model.position = position
    if thawed:
        model.pos_embed.requires_grad_(True)
    freeze_fading(model)
    model.position.train(model.training)
    describe_for_timm(model)
    if trained and preserve is None and (anew or changed(found, spec.terms)):
        had = " + ".join(map(str, found))
        warnings.warn(
            f"{type(model).__name__} had {had} and has {spec} now: it computes something else, so fine-tune it before "
            "use. attach(..., preserve=True) begins where the model was; preserve=False says that a cold swap is meant",
            ColdSwapWarning,
            stacklevel=3,
        )


def _training_grid(model: Any, own: bool) -> positions.Extent:
    """The grid that the model's tables were made for; without any, the model's nominal grid."""
    if hasattr(model, "position") and (own or model.pos_embed is not None):
        return model.position.geometry.grid
    return tuple(model.patch_embed.grid_size)


def _check_served(model: Any) -> None:
    def refuse(module: Any, why: str) -> NoReturn:
        cls = type(module)
        why = WHY_NOT.get(cls.__name__, why)
        raise TypeError(f"cannot attach an encoding to {cls.__module__}.{cls.__name__}: {why}")

    if type(model) not in (*MODELS, *MODELS.values()):
        refuse(model, f"served are timm's {_listed(MODELS)}")
    if type(model.patch_embed) not in PATCH_EMBEDS:
        refuse(model.patch_embed, "the patch embedding must be timm's PatchEmbed or HybridEmbed")
    if len(model.blocks) == 0:
        raise ValueError("the model has no blocks (depth=0), so there is nothing to tell about position")
    for block in model.blocks:
        if type(block) not in (*BLOCKS, *PARTS.values()):
            refuse(block, f"blocks must be one of timm's {_listed(BLOCKS)}")
        if not attentions_of(block):
            attention = getattr(block, "attn", None)
            refuse(block if attention is None else attention, f"attention must be one of timm's {_listed(PARTS)}")
    kind: Any = MODELS.get(type(model), type(model))
    if getattr(model, "reg_token", None) is not None and "reg_token" not in kind.prefix_names:
        raise ValueError(
            f"timm's {kind.__name__} makes reg_tokens={model.reg_token.shape[1]} and uses none of them, so that they "
            "would get no gradient; build it without reg_tokens"
        )
    if getattr(model, "rope", None) is not None and type(model.rope) not in ROTARY:
        refuse(model.rope, f"rotary tables must be one of timm's {_listed(ROTARY)}")


def _listed(classes: Any) -> str:
    return ", ".join(dict.fromkeys(cls.__name__ for cls in classes))


def _found(model: Any, own: bool) -> Sequence[Term]:
    """The encodings that a model has now; ``native`` stands for one that it holds in modules of its own."""
    if hasattr(model, "position"):
        return model.position.spec.terms
    names = ["ape1d"] * (getattr(model, "pos_embed", None) is not None) + ["native"] * own
    return [Term.build(name, {}) for name in names or ["none"]]


def _resolve_native(spec: Spec, found: Sequence[Term]) -> Spec:
    """``native`` spelled out: what the model has now. It stays a term where the model holds an encoding itself."""
    if "native" not in spec.names:
        return spec
    terms = [t for term in spec.terms for t in (found if term.name == "native" else (term,))]
    terms = [t for i, t in enumerate(terms) if not (t in found and t in terms[:i])]  # "ape1d + native" names it twice
    if len(terms) > 1:
        terms = [t for t in terms if t.name != "none"]
    return parse(" + ".join(map(str, terms)))


def _move_table(model: Any, position: Position, trained: bool) -> None:
    """Give the model's ``pos_embed`` to ``ape1d``, or take it away; or make one where there was none.

    Before a table goes away its rows for prefix tokens move into those tokens. In a new model they do so even if
    it stays, so that class and register tokens start alike, bit for bit, whatever the encoding; and where the table
    fades, since they do not.
    """
    table = getattr(model, "pos_embed", None)
    rows = model.prefix_rows
    stays = "ape1d" in position.shared
    if table is not None and rows and not (trained and stays and "ape1d" not in position.fading):
        _fold_prefix(model, table[:, :rows])
    if not stays:
        model.pos_embed = None
        return
    encoding: Any = position.shared["ape1d"]
    if table is None:
        before = encoding.table.new_zeros(1, rows, encoding.table.shape[-1])
        model.pos_embed = nn.Parameter(torch.cat([before, encoding.table.data], dim=1))
    elif not trained:
        timm_std = lookup("ape1d")(encoding.geometry).std
        with torch.no_grad():
            table[:, rows:].mul_(encoding.std / timm_std)
    encoding.table = None


def _fold_prefix(model: Any, rows: Tensor) -> None:
    """Move the table's rows [1, P, D] into the prefix tokens they are added to."""
    with torch.no_grad():
        start = 0
        for token in model.prefix_tokens():
            token.add_(rows[:, start : start + token.shape[1]])
            start += token.shape[1]
        rows.zero_()
