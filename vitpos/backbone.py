"""timm's vision transformers with a position encoding that can be exchanged: the only module that reaches into timm.

An existing model becomes vitpos's by changing the class of the model, of its patch embedding and of its
attentions, in place, to real subclasses defined here. Parameters, options and names stay timm's.

Legend: B batch, T tokens = P prefix tokens followed by N patches, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
from timm.layers import Attention as TimmAttention
from timm.layers import PatchDropout as TimmPatchDropout
from timm.layers import PatchDropoutWithIndices
from timm.layers import PatchEmbed as TimmPatchEmbed
from timm.models import vision_transformer as timm_vit
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitpos import positions
from vitpos.attention import PositionedAttention
from vitpos.composition import Position
from vitpos.encoding import Geometry
from vitpos.hub import Described, describe_for_timm
from vitpos.positions import Positions
from vitpos.spec import Spec, Term, lookup, nearest, parse


class Attention(PositionedAttention, TimmAttention):
    """timm's ``Attention`` that takes a ``Signal``."""


class PatchEmbed(TimmPatchEmbed):
    """timm's ``PatchEmbed`` for any image whose sides are multiples of the patch size."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, N, D], or to [B, h, w, D] where timm's options ask for that."""
        if x.ndim != 4 or x.shape[1] != self.proj.in_channels:
            raise ValueError(f"expected images [B, {self.proj.in_channels}, H, W], got shape {tuple(x.shape)}")
        height, width = x.shape[-2:]
        patch_height, patch_width = self.patch_size
        if self.dynamic_img_pad:
            x = nn.functional.pad(x, (0, -width % patch_width, 0, -height % patch_height))
        elif (height % patch_height or width % patch_width) and (height, width) != self.img_size:
            raise ValueError(_not_a_multiple((height, width), self.patch_size))
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1))


def _not_a_multiple(size: Sequence[int], patch: Sequence[int]) -> str:
    near = " x ".join(
        str(s) if s % p == 0 else f"{s // p * p} or {s // p * p + p}" if s >= p else str(p) for s, p in zip(size, patch)
    )
    return (
        f"image size {size[0]}x{size[1]} is not a multiple of the patch size {patch[0]}x{patch[1]}; nearest: {near} "
        "(or build the model with dynamic_img_pad=True)"
    )


class PositionMixin(Described):
    """The forward passes of a timm transformer with ``position`` as an argument of each block."""

    position: Position

    def _embed(
        self: Any, images: Tensor, coords: Tensor | None, extent: positions.Extent | None
    ) -> tuple[Tensor, Positions]:
        """Tokens [B, T, D] before the first block, and the positions of their patches."""
        x = self.patch_embed(images)
        x = x.flatten(1, 2) if x.ndim == 4 else x
        weight = self.patch_embed.proj.weight
        precision = torch.promote_types(weight.dtype, torch.float32)
        grid = self.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
        if coords is None and extent is None:
            pos = positions.grid(*grid, device=x.device, dtype=precision)
        else:
            coords = positions.grid(*grid).coords if coords is None else coords
            pos = positions.explicit(coords.to(x.device), extent, grid, precision)
            if pos.coords.shape[1] != x.shape[1] or pos.coords.shape[0] not in (1, x.shape[0]):
                raise ValueError(
                    f"coords of {pos.coords.shape[0]} x {pos.coords.shape[1]} patches for images of "
                    f"{x.shape[0]} x {x.shape[1]}; give one (y, x) a patch, for one grid or each image"
                )

        prefix = [t for t in (self.cls_token, self.reg_token) if t is not None]
        table = self.pos_embed
        owned = {} if table is None else {"pos_embed": table[:, self._prefix_rows :]}
        vectors = self.position.tokens(pos, owned)
        if vectors is not None:
            x = x + vectors.to(weight.dtype)
        if prefix:
            before = torch.cat(prefix, dim=1)
            if table is not None and self._prefix_rows:
                before = before + table[:, : self._prefix_rows]
            x = torch.cat([before.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
        if vectors is not None:
            x = self.pos_drop(x)

        if isinstance(self.patch_drop, PatchDropoutWithIndices):
            x, kept = self.patch_drop(x)
            pos = pos if kept is None else pos.keep(kept)
        return self.norm_pre(x), pos

    @property
    def _prefix_rows(self: Any) -> int:
        """How many rows of ``pos_embed`` belong to prefix tokens."""
        return 0 if self.no_embed_class else self.num_prefix_tokens

    def _blocks(
        self: Any,
        x: Tensor,
        pos: Positions,
        attn_mask: Tensor | None,
        is_causal: bool,
        depth: int,
        take: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the first ``depth`` blocks; also return what comes out of those in ``take``."""
        taken = []
        shared = self.position.shared_signal(pos, self.num_prefix_tokens)
        for layer, block in enumerate(self.blocks[:depth]):
            signal = self.position.signal(layer, pos, shared)
            if attn_mask is not None:
                signal = replace(signal, mask=attn_mask)
            told = None if signal.empty else signal
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, told, is_causal, use_reentrant=False)
            else:
                x = block(x, attn_mask=told, is_causal=is_causal)
            if layer == 0:
                x = self.position.mix(x, pos, self.num_prefix_tokens)
            if layer in take:
                taken.append(x)
        return x, taken

    def forward_features(
        self: Any,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        coords: Tensor | None = None,
        extent: positions.Extent | None = None,
    ) -> Tensor:
        """Images [B, C, H, W] to normalized tokens [B, T, D].

        ``coords`` [N, 2] or [1 | B, N, 2] as (y, x) in patches replaces the positions of the image's own grid,
        ``extent`` (H, W) the size of the grid that they lie in. ``cpe`` takes whole numbers only.
        """
        x, pos = self._embed(x, coords, extent)
        x, _ = self._blocks(x, pos, attn_mask, is_causal, len(self.blocks))
        return self.norm(x)

    def forward(
        self: Any,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        coords: Tensor | None = None,
        extent: positions.Extent | None = None,
    ) -> Tensor:
        """Images [B, C, H, W] to logits [B, classes]; ``coords`` and ``extent`` as in ``forward_features``."""
        return self.forward_head(self.forward_features(x, attn_mask, is_causal, coords=coords, extent=extent))

    def forward_intermediates(
        self: Any,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        coords: Tensor | None = None,
        extent: positions.Extent | None = None,
    ) -> Any:
        """Outputs of chosen blocks, with the arguments and results of timm's method of this name."""
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.blocks), indices)
        batch = x.shape[0]
        height, width = self.patch_embed.dynamic_feat_size(tuple(x.shape[-2:]))
        x, pos = self._embed(x, coords, extent)
        x, taken = self._blocks(x, pos, attn_mask, is_causal, last + 1 if stop_early else len(self.blocks), take)

        taken = [self.norm(t) for t in taken] if norm else taken
        count = self.num_prefix_tokens
        prefix = [t[:, :count] for t in taken]
        taken = [t[:, count:] for t in taken]
        if output_fmt == "NCHW":
            taken = [t.reshape(batch, height, width, -1).permute(0, 3, 1, 2).contiguous() for t in taken]

        with_prefix = return_prefix_tokens and count > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": taken}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        chosen = list(zip(taken, prefix)) if with_prefix else taken
        return chosen if intermediates_only else (self.norm(x), chosen)

    def prune_intermediate_layers(self: Any, *args: Any, **kwargs: Any) -> list[int]:
        """As timm's; encodings of pruned blocks go too."""
        kept = super().prune_intermediate_layers(*args, **kwargs)  # type: ignore[misc]
        self.position.layers = self.position.layers[: len(self.blocks)]
        return kept

    def set_input_size(self: Any, img_size: Any = None, patch_size: Any = None) -> None:
        """Change the nominal input and patch size. Tables stay: each forward resamples them."""
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def no_weight_decay(self: Any) -> set[str]:
        """timm's names and all positional parameters."""
        return super().no_weight_decay() | {f"position.{name}" for name, _ in self.position.named_parameters()}  # type: ignore[misc]

    def group_matcher(self: Any, coarse: bool = False) -> dict[str, Any]:
        """timm's groups, with all positional parameters in the stem."""
        groups = super().group_matcher(coarse)  # type: ignore[misc]
        return {**groups, "stem": groups["stem"] + r"|^position\."}


class VisionTransformer(PositionMixin, timm_vit.VisionTransformer):
    """timm's ``VisionTransformer`` with an exchangeable position encoding."""


_MODELS = {timm_vit.VisionTransformer: VisionTransformer}
_PARTS: dict[type, type] = {
    TimmAttention: Attention,
    TimmPatchEmbed: PatchEmbed,
    TimmPatchDropout: PatchDropoutWithIndices,
}
_BLOCKS = (timm_vit.Block, timm_vit.ResPostBlock, timm_vit.ParallelThingsBlock)


def create_model(
    name: str, pos: str | Spec = "native", *, encoding_seed: int | None = None, **kwargs: Any
) -> nn.Module:
    """A timm model of this name with the position encoding ``pos``.

    ``kwargs`` are those of ``timm.create_model``. The backbone draws its weights as timm does, whatever the
    encoding; the encoding draws after it, from ``encoding_seed`` if given (the global random state is then
    untouched by it).

    Raises ValueError for an unknown model, encoding or option, an image size that is no multiple of the patch
    size, a width that the encoding cannot serve; TypeError for a model or option of a kind that is not served.
    """
    spec = parse(pos)
    if not isinstance(name, str) or not timm.is_model(name):
        plain = str(name).split(".")[0].split("/")[-1]
        if not isinstance(name, str) or not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
            raise ValueError(f"unknown timm model {name!r}; {nearest(plain, timm.list_models(f'{plain[:4]}*'))}")
    trained = bool(kwargs.get("pretrained") or kwargs.get("checkpoint_path"))
    if kwargs.get("weight_init") == "skip" and not trained:
        raise ValueError("weight_init='skip' leaves pos_embed and tokens uninitialized; use 'reset' for PyTorch's own")
    model = timm.create_model(name, **kwargs)
    target: Any = model if isinstance(model, timm_vit.VisionTransformer) else getattr(model, "model", model)
    if kwargs.get("img_size") is not None and not kwargs.get("dynamic_img_pad") and hasattr(target, "patch_embed"):
        size, patch = target.patch_embed.img_size, target.patch_embed.patch_size
        if any(s % p for s, p in zip(size, patch)):
            raise ValueError(_not_a_multiple(size, patch))
    with torch.random.fork_rng(enabled=encoding_seed is not None):
        if encoding_seed is not None:
            torch.manual_seed(encoding_seed)
        _attach(target, spec, trained=trained)
    return model


def attach(model: nn.Module, pos: str | Spec) -> nn.Module:
    """Exchange the position encoding of a timm vision transformer, in place, and return the model.

    An absolute table that goes away first leaves its rows for class and register tokens in those tokens. A
    table that stays (``ape1d``, ``native``) changes no logit at the model's own size.
    """
    _attach(model, parse(pos), trained=True)
    return model


def _attach(model: Any, spec: Spec, trained: bool) -> None:
    _check_served(model)
    kept = getattr(model, "position", None) if "native" in spec.names else None  # with its weights
    spec = _resolve_native(model, spec)
    weight = model.patch_embed.proj.weight
    attention = next(m for m in model.modules() if isinstance(m, TimmAttention))
    geometry = Geometry(
        dim=model.embed_dim,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        depth=len(model.blocks),
        grid=_training_grid(model) if kept is None else kept.geometry.grid,
        prefix=model.num_prefix_tokens,
    )
    with weight.device:
        position = Position(spec, geometry).to(weight.dtype)  # may refuse: the model is still as it was

    if kept is not None:
        position.adopt(kept, set(kept.spec.names) & set(position.spec.names))
    _move_table(model, position, trained or kept is not None)
    model.position = position
    model.position.train(model.training)
    for module in model.modules():
        module.__class__ = _PARTS.get(type(module), type(module))
    model.__class__ = _MODELS.get(type(model), type(model))
    describe_for_timm(model)


def _training_grid(model: Any) -> positions.Extent:
    """The grid that the model's table was made for; without a table, the model's nominal grid."""
    if model.pos_embed is not None and hasattr(model, "position"):
        return model.position.geometry.grid
    return tuple(model.patch_embed.grid_size)


def _check_served(model: nn.Module) -> None:
    def refuse(module: Any, why: str) -> None:
        raise TypeError(f"cannot attach an encoding to {type(module).__module__}.{type(module).__name__}: {why}")

    if type(model) not in (*_MODELS, *_MODELS.values()):
        refuse(model, "served are timm's VisionTransformer models")
    if type(model.patch_embed) not in (TimmPatchEmbed, PatchEmbed):
        refuse(model.patch_embed, "the patch embedding must be timm's PatchEmbed")
    for block in model.blocks:  # type: ignore[union-attr]
        if type(block) not in _BLOCKS:
            refuse(block, f"blocks must be one of {', '.join(b.__name__ for b in _BLOCKS)}")
        attentions = [m for m in block.modules() if isinstance(m, TimmAttention)]
        if not attentions or any(type(a) not in (TimmAttention, Attention) for a in attentions):
            refuse(block, "its attention must be timm's Attention")


def _resolve_native(model: Any, spec: Spec) -> Spec:
    """``native`` spelled out: what the model has now."""
    if "native" not in spec.names:
        return spec
    if hasattr(model, "position"):
        found = model.position.spec.terms
    else:
        found = (Term.build("none" if model.pos_embed is None else "ape1d", {}),)
    terms = [t for term in spec.terms for t in (found if term.name == "native" else (term,))]
    if len(terms) > 1:
        terms = [t for t in terms if t.name != "none"]
    return parse(" + ".join(map(str, terms)))


def _move_table(model: Any, position: Position, trained: bool) -> None:
    """Give the model's ``pos_embed`` to ``ape1d``, or take it away; or make one where there was none.

    Before a table goes away its rows for prefix tokens move into those tokens. In a new model they do so even if
    it stays, so that class and register tokens start alike, bit for bit, whatever the encoding.
    """
    table = model.pos_embed
    rows = 0 if model.no_embed_class else model.num_prefix_tokens
    stays = "ape1d" in position.shared
    if table is not None and rows and not (trained and stays):
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
    """Move the table's rows [1, P, D] into the class and register tokens they are added to."""
    with torch.no_grad():
        start = 0
        for token in (model.cls_token, model.reg_token):
            if token is not None:
                token.add_(rows[:, start : start + token.shape[1]])
                start += token.shape[1]
        rows.zero_()


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
    """The encodings of a model; TypeError if vitpos gave it none."""
    position = getattr(model, "position", None)
    if not isinstance(position, Position):
        raise TypeError(f"{type(model).__name__} has no vitpos encoding; attach one with vitpos.attach(model, spec)")
    return position
