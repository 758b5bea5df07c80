"""timm's model classes with ``position`` as an argument of each block: one block loop, and what they differ in.

Legend: B batch, T tokens = P prefix tokens followed by N patches, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.fx
from timm.layers import PatchDropoutWithIndices, register_notrace_module
from timm.models import beit, deit, eva, vision_transformer, vision_transformer_relpos
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitpos import kernels, positions
from vitpos.backbone.parts import PARTS, HybridEmbed, PatchEmbed
from vitpos.composition import GRID, Position, flat_tables
from vitpos.hub import Described
from vitpos.positions import Positions


def _positions(
    x: Tensor, grid: positions.Extent, coords: Tensor | None, extent: positions.Extent | None, dtype: torch.dtype
) -> Positions:
    """The positions of patches ``x`` [B, N, D]: the cells of the image's ``grid``, or a caller's coordinates."""
    if coords is None and extent is None:
        if kernels.eager(x):
            return Positions(_cells(grid, dtype).clone(), grid, cells=True, full=True)
        return positions.grid(*grid, device=x.device, dtype=dtype)
    coords = positions.grid(*grid).coords if coords is None else coords
    pos = positions.explicit(coords, extent, grid, dtype, x.device)
    if pos.coords.shape[1] != x.shape[1] or pos.coords.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"coords of {pos.coords.shape[0]} x {pos.coords.shape[1]} patches for images of "
            f"{x.shape[0]} x {x.shape[1]}; give one (y, x) a patch, for one grid or each image"
        )
    return pos


@lru_cache(maxsize=16)
def _cells(grid: positions.Extent, dtype: torch.dtype) -> Tensor:
    """The cells of a grid, on the CPU."""
    with torch.inference_mode(False):
        return positions.grid(*grid, device=torch.device("cpu"), dtype=dtype).coords


# What timm's FX feature extraction takes as one step, because it decides by values that a symbolic trace has not.
for _module in (Position, PatchEmbed, HybridEmbed, *(new for new in PARTS.values() if hasattr(new, "attend"))):
    register_notrace_module(_module)
torch.fx.wrap("_positions")


def is_positional(name: str) -> bool:
    """Whether a parameter of this name belongs to an encoding."""
    return name == "pos_embed" or name.startswith("position.")


class PositionMixin(Described):
    """The forward passes of a timm transformer with ``position`` as an argument of each block.

    A subclass says in which argument its blocks take a signal, which prefix tokens it has, what happens between its
    embeddings and its blocks, and what it holds of encodings in modules of its own.
    """

    position: Position
    signal_argument: ClassVar[str] = "attn_mask"
    prefix_names: ClassVar[tuple[str, ...]] = ("cls_token", "reg_token")

    @property
    def prefix_rows(self: Any) -> int:
        """How many rows of ``pos_embed`` belong to prefix tokens."""
        return 0 if self.no_embed_class else self.num_prefix_tokens

    def prefix_tokens(self: Any) -> list[nn.Parameter]:
        """The class, distillation and register tokens [1, *, D], in order."""
        return [token for name in self.prefix_names if (token := getattr(self, name)) is not None]

    def own(self: Any) -> dict[str, Any]:
        """Modules of the model that hold an encoding for all layers, by the names in ``native.OWN``."""
        return {}

    def own_of(self: Any, block: Any) -> dict[str, Any]:
        """Modules of a block that hold an encoding."""
        return {}

    def drop_own(self: Any) -> None:
        """Remove all of these."""

    def __prepare_scriptable__(self) -> Any:
        raise TypeError("torch.jit.script cannot compile a vitpos model; use torch.export.export or torch.jit.trace")

    def enter(self: Any, x: Tensor, pos: Positions) -> tuple[Tensor, Positions]:
        """From embedded tokens to what the blocks see; dropout comes first, so that it is alike for every encoding."""
        x = self.pos_drop(x)
        if isinstance(self.patch_drop, PatchDropoutWithIndices):
            x, kept = self.patch_drop(x)
            pos = pos if kept is None else pos.keep(kept)
        return self.norm_pre(x), pos

    def _embed(
        self: Any, images: Tensor, coords: Tensor | None, extent: positions.Extent | None
    ) -> tuple[Tensor, Positions]:
        """Tokens [B, T, D] before the first block, and the positions of their patches.

        They have the dtype of the weights, under autocast too, so that it is alike for every encoding. That is what
        timm's models have as soon as a table or a prefix token meets the patches.
        """
        x = self.patch_embed(images)
        x = x if self.patch_embed.flatten else x.flatten(1, 2)
        dtype = _weight_dtype(self.blocks)
        x = x.to(torch.promote_types(x.dtype, dtype))
        grid = self.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
        pos = _positions(x, grid, coords, extent, torch.promote_types(dtype, torch.float32))
        table, rows = self.pos_embed, self.prefix_rows
        if "tokens" in self.position.sites:
            x = self.position("add_tokens", x, pos, {} if table is None else {"pos_embed": table[:, rows:]}, dtype)
        prefix = self.prefix_tokens()
        if prefix:
            before = prefix[0] if len(prefix) == 1 else torch.cat(prefix, dim=1)
            if table is not None and rows:
                before = before + table[:, :rows]
            x = torch.cat([before.expand(x.shape[0], -1, -1), x], dim=1)
        return self.enter(x, pos)

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
        silent = self.position.silent and attn_mask is None and not is_causal
        if not silent:
            held = [self.own_of(block) for block in itertools.islice(self.blocks, depth)]
            signals = self.position("tell", pos, self.num_prefix_tokens, self.own(), held, attn_mask, is_causal)
        for layer, block in enumerate(itertools.islice(self.blocks, depth)):
            told: Any = {self.signal_argument: None if silent else signals.take(layer)}
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(kernels.settled(block), x, use_reentrant=False, **told)
            else:
                x = block(x, **told)
            if layer == 0 and "mix" in self.position.sites:
                x = self.position("mix", x, pos, self.num_prefix_tokens)
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
        """Change the nominal input and patch size. Tables stay: each forward resamples them.

        Every parameter stays the same object, so that optimizers and averages made before go on; only a new patch
        size makes a new ``patch_embed.proj``.
        """
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def _save_to_state_dict(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As any module, with the training grid in the metadata that PyTorch keeps beside the names."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][GRID] = list(self.position.geometry.grid)

    def _load_from_state_dict(self: Any, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        """As any module; tables of another grid are refused even if they have as many rows."""
        super()._load_from_state_dict(state, prefix, metadata, *rest)  # type: ignore[misc]
        theirs, ours = tuple(metadata.get(GRID, ())), self.position.geometry.grid
        if theirs and theirs != ours and (tables := flat_tables(state)):
            rest[-1].append(
                f"{next(iter(tables))} is of a grid of {theirs}, the model's of {ours}; load it into a model built on "
                "its grid, then call set_input_size"
            )

    def no_weight_decay(self: Any) -> set[str]:
        """timm's names and all positional parameters, by themselves and behind a wrapper (``_orig_mod.pos_embed``)."""
        own = {n for n, _ in self.named_parameters() if n == "pos_embed" or n.startswith("position.")}
        return _with_wrapped(super().no_weight_decay() | own)  # type: ignore[misc]

    def group_matcher(self: Any, coarse: bool = False) -> dict[str, Any]:
        """timm's groups, with what is positional and lies outside the blocks in the stem; also behind a wrapper."""
        groups = super().group_matcher(coarse)  # type: ignore[misc]
        stem = groups["stem"] + r"|^position\.|^pos_embed|^rope\.|^rel_pos_bias\.|^shared_rel_pos\."
        return _behind_wrappers({**groups, "stem": stem})


def _weight_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's first weight; the copies of ``nn.DataParallel`` hold theirs as plain attributes."""
    found = _first_weight(module)
    if found is None:
        raise TypeError(f"{type(module).__name__} has no weights")
    return found.dtype


def _first_weight(module: nn.Module) -> Tensor | None:
    for weight in (vars(module).get("_former_parameters") or module._parameters).values():
        if weight is not None:
            return weight
    for part in module._modules.values():
        found = None if part is None else _first_weight(part)
        if found is not None:
            return found
    return None


def _with_wrapped(names: set[str]) -> set[str]:
    """The names, and as wildcards for timm what a compiled or distributed model makes of them."""
    return names | {f"*.{name}" for name in names}


def _behind_wrappers(patterns: Any) -> Any:
    """Expressions for names of parameters, made to match them there too."""
    if isinstance(patterns, dict):
        return {key: _behind_wrappers(value) for key, value in patterns.items()}
    if isinstance(patterns, (list, tuple)):
        return type(patterns)(map(_behind_wrappers, patterns))
    if isinstance(patterns, str):  # timm matches from the start, with or without ^
        return rf"(?:_orig_mod\.|module\.)*(?:{patterns.replace('^', '')})"
    return patterns


class VisionTransformer(PositionMixin, vision_transformer.VisionTransformer):
    """timm's ``VisionTransformer`` with an exchangeable position encoding."""


class VisionTransformerDistilled(PositionMixin, deit.VisionTransformerDistilled):
    """timm's ``VisionTransformerDistilled``, likewise: a distillation token follows the class token."""

    prefix_names = ("cls_token", "dist_token")

    @property
    def prefix_rows(self) -> int:
        return self.num_prefix_tokens  # timm's table has them, whatever no_embed_class says


class Eva(PositionMixin, eva.Eva):  # type: ignore[misc]  # (it asks for forward_intermediates of one result type)
    """timm's ``Eva``, likewise (EVA, EVA-02, DINOv3, Perception Encoder, rotary ViTs): it may hold rotary tables."""

    def own(self: Any) -> dict[str, Any]:
        return {} if self.rope is None else {"rope": self.rope}

    def drop_own(self: Any) -> None:
        self.rope = None
        self.rope_mixed = False

    def prune_intermediate_layers(self: Any, *args: Any, **kwargs: Any) -> list[int]:
        """As timm's; encodings of pruned blocks go too, mixed frequencies of the model's own among them."""
        kept = super().prune_intermediate_layers(*args, **kwargs)
        if self.rope is not None and self.rope_mixed:
            freqs = self.rope.freqs
            self.rope.freqs = nn.Parameter(freqs.data[:, : len(self.blocks)].clone(), freqs.requires_grad)
            self.rope.depth = len(self.blocks)
        return kept


class Beit(PositionMixin, beit.Beit):
    """timm's ``Beit``, likewise: it may hold tables of biases, in each block or for all."""

    signal_argument = "shared_rel_pos_bias"
    prefix_names = ("cls_token",)

    @property
    def prefix_rows(self) -> int:
        return self.num_prefix_tokens

    def own(self: Any) -> dict[str, Any]:
        return {} if self.rel_pos_bias is None else {"shared_bias": self.rel_pos_bias}

    def own_of(self: Any, block: Any) -> dict[str, Any]:
        return {} if block.attn.relative_position_bias_table is None else {"bias": block.attn}

    def drop_own(self: Any) -> None:
        self.rel_pos_bias = None
        for block in self.blocks:
            block.attn.relative_position_bias_table = None
            block.attn.relative_position_index = None
            block.attn.window_size = None

    def enter(self, x: Tensor, pos: Positions) -> tuple[Tensor, Positions]:
        return self.pos_drop(x), pos


class VisionTransformerRelPos(PositionMixin, vision_transformer_relpos.VisionTransformerRelPos):
    """timm's ``VisionTransformerRelPos``, likewise: it holds biases, in each block or for all."""

    signal_argument = "shared_rel_pos"
    prefix_names = ("cls_token",)
    prefix_rows = 0

    def own(self: Any) -> dict[str, Any]:
        return {} if self.shared_rel_pos is None else {"shared_bias": self.shared_rel_pos}

    def own_of(self: Any, block: Any) -> dict[str, Any]:
        return {} if block.attn.rel_pos is None else {"bias": block.attn.rel_pos}

    def drop_own(self: Any) -> None:
        self.shared_rel_pos = None
        for block in self.blocks:
            block.attn.rel_pos = None

    def enter(self, x: Tensor, pos: Positions) -> tuple[Tensor, Positions]:
        return x, pos

    def no_weight_decay(self) -> set[str]:
        """timm's names and all positional parameters, those of the model's own biases among them."""
        own = {name for name, _ in self.named_parameters() if "rel_pos." in name}
        return super().no_weight_decay() | _with_wrapped(own)

    def init_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        """As timm's; a table that vitpos gave the model is drawn too."""
        super().init_weights(*args, **kwargs)
        if getattr(self, "pos_embed", None) is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)


_VIT = vision_transformer
MODELS: dict[type, type[PositionMixin]] = {  # timm's class: the one that takes its place
    _VIT.VisionTransformer: VisionTransformer,
    deit.VisionTransformerDistilled: VisionTransformerDistilled,
    eva.Eva: Eva,
    beit.Beit: Beit,
    vision_transformer_relpos.VisionTransformerRelPos: VisionTransformerRelPos,
}
BLOCKS = (
    *(_VIT.Block, _VIT.ResPostBlock, _VIT.ParallelThingsBlock, _VIT.ParallelScalingBlock),
    *(eva.EvaBlock, eva.EvaBlockPostNorm, beit.Block),
    *(vision_transformer_relpos.RelPosBlock, vision_transformer_relpos.ResPostRelPosBlock),
)
