"""Of which grid the tables of a checkpoint are: stated by what is saved with them or by the caller, never guessed.

timm resamples tables of positions while it loads weights into a model of another size. Where nothing states their grid
it takes them for square, and where the number of rows happens to fit it loads them as they are, so that a table of
2 x 8 enters a model of 4 x 4. Here a model is built on the grid of its weights, which leaves nothing to resample while
loading; its size is changed afterwards, and each forward resamples the tables from their own grid.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg, clean_state_dict
from torch import Tensor

from vitpos.composition import GRID, flat_tables
from vitpos.positions import Extent

KERNEL = "patch_embed.proj.weight"
FOREIGN = ("mask_token", "encoder", "visual.class_embedding")  # in layouts that timm converts: published, square grids
_FOLDER = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Weights:
    """What a checkpoint says of itself: its tables, its patch size, the grid or the image size that it was trained at.

    ``encoding`` names a parameter of a vitpos encoding that it holds, if any.
    """

    where: str
    tables: dict[str, Tensor] = field(default_factory=dict)
    kernel: Extent | None = None
    grid: Extent | None = None
    image: Extent | None = None
    encoding: str | None = None


def find_weights(name: str, kwargs: Mapping[str, Any]) -> Weights | None:
    """The checkpoint that timm would load for these arguments of ``create_model``; None if it is not a file at hand.

    Raises FileNotFoundError for a ``checkpoint_path`` that leads nowhere.
    """
    path, given = kwargs.get("checkpoint_path"), None
    if not path and kwargs.get("pretrained"):
        config = kwargs.get("pretrained_cfg")
        config = config.to_dict() if isinstance(config, PretrainedCfg) else config if isinstance(config, dict) else {}
        config = {**config, **(kwargs.get("pretrained_cfg_overlay") or {})}
        given, path = config.get("state_dict"), config.get("file")
        if name.startswith("local-dir:"):
            folder = Path(name.removeprefix("local-dir:"))
            path = next((folder / file for file in _FOLDER if (folder / file).is_file()), None)
    if given:
        return _described("the state_dict", given)
    if not path or str(path).endswith((".npz", ".npy")):  # (JAX's layout: published, square grids)
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    return _read_safetensors(path) if str(path).endswith(".safetensors") else _described(path, _read_torch(path))


def without_loading(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``create_model`` for the bare model of the same shape."""
    left_out = ("pretrained", "checkpoint_path", "features_only", "out_indices", "feature_cls")
    return {key: value for key, value in kwargs.items() if key not in left_out}


def without_sizes(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``create_model`` for the bare model of the size that its name, or folder, stands for."""
    return {key: value for key, value in without_loading(kwargs).items() if key not in ("img_size", "patch_size")}


def take_tables(model: Any, weights: Weights) -> None:
    """The tables as they are in the checkpoint, where timm resampled them though their shape fits."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, table in weights.tables.items():
            if name in own and own[name].shape == table.shape:
                own[name].copy_(table)


def _read_safetensors(path: Any) -> Weights:
    try:
        with safe_open(path, framework="pt") as file:
            keys = file.keys()
            wanted = {k: file.get_tensor(k) if k == KERNEL or flat_tables({k: 0}) else None for k in keys}
            card = (file.metadata() or {}).get("vitpos")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error})") from None
    return _described(path, wanted, json.loads(card)["grid"] if card else None)


def _read_torch(path: Any) -> Any:
    """The file as it is, unread as far as possible; it may hold tensors and plain values only, as timm demands."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of older versions cannot be read in part
            return torch.load(path, map_location="cpu", weights_only=True)


def _described(where: Any, checkpoint: Any, grid: Any = None) -> Weights:
    """timm's nesting of checkpoints taken apart, in its order."""
    args, state = None, checkpoint
    for key in ("state_dict_ema", "model_ema", "state_dict", "model", "module"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            args, state = args or state.get("args"), state[key]
    if not isinstance(state, dict):
        raise ValueError(f"{where} holds {type(state).__name__}, not a state_dict")
    stated = [entry[GRID] for entry in getattr(state, "_metadata", {}).values() if GRID in entry]
    grid = grid or next(iter(stated), None)
    cleaned = clean_state_dict(state)
    kernel = cleaned.get(KERNEL)
    return Weights(
        where=str(where),
        tables={} if any(key in cleaned for key in FOREIGN) else flat_tables(cleaned),
        image=_image_size(args),
        kernel=None if kernel is None or kernel.ndim != 4 else tuple(kernel.shape[-2:]),
        grid=None if grid is None else tuple(grid),
        encoding=next((key for key in cleaned if key.startswith("position.")), None),
    )


def _image_size(args: Any) -> Extent | None:
    """The image size among the arguments that timm's training script saves with its weights."""
    args = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    size = (args.get("model_kwargs") or {}).get("img_size") or args.get("img_size") or args.get("input_size")
    return None if not size else (size, size) if isinstance(size, int) else (size[-2], size[-1])


def source_grid(weights: Weights | None, nominal: Any, asked: Extent, given: Extent | None = None) -> Extent:
    """The grid (H, W), in patches, of the tables in ``weights``.

    ``nominal`` is a model of the name that the weights are for, at its own size: what is published under the name has
    its grid (``weights`` is then None), and so has a file with as many rows, unless the grid that is ``asked`` for has
    as many too. ``given`` is what the caller says.

    Raises ValueError where nothing says it, or two things say it differently.
    """
    published: Extent = tuple(nominal.patch_embed.grid_size)
    said: Extent | None = published if weights is None else weights.grid
    if said is None and weights is not None and weights.image and weights.kernel:
        patch = nominal.patch_embed
        step = [r * k / own for r, k, own in zip(patch.feat_ratio(False), weights.kernel, patch.patch_size)]
        said = (int(weights.image[0] / step[0]), int(weights.image[1] / step[1]))
    if given and said and given != said:
        where = "their configuration" if weights is None else weights.where
        raise ValueError(f"checkpoint_grid={given}, but by {where} the weights are of a grid of {said}")
    grid = given or said or published
    own = flat_tables(nominal.state_dict())
    for name, table in weights.tables.items() if weights else ():
        axis = 1 if name.endswith("pos_embed") else 0
        if name in own:
            count = table.shape[axis] - own[name].shape[axis] + _rows(name, published)
            either = not (given or said) and asked != grid and count == _rows(name, asked)
            if either or count != _rows(name, grid):
                raise ValueError(_unknown(name, count, weights.where, given or said))  # type: ignore[union-attr]
    return grid


def _rows(name: str, grid: Extent) -> int:
    """How many rows a table of this name has for patches of a ``grid``."""
    return math.prod(grid) if name.endswith("pos_embed") else math.prod(2 * side - 1 for side in grid)


def _unknown(name: str, count: int, where: str, said: Extent | None) -> str:
    pairs = [(d, count // d) for d in range(1, count + 1) if count % d == 0]
    if not name.endswith("pos_embed"):
        pairs = [((a + 1) // 2, (b + 1) // 2) for a, b in pairs if count % 2]
    pairs.sort(key=lambda sides: abs(math.log(sides[0] / sides[1])))
    could = ", ".join(map(str, pairs[:5])) + (", ..." if len(pairs) > 5 else "") or "no grid"
    if said:
        return f"{name} in {where} has {count} rows for patches, not those of a grid of {said}; it could be {could}"
    return (
        f"{name} in {where} has {count} rows for patches and nothing says of which grid; pass checkpoint_grid=(H, W): "
        f"{could}. Files of vitpos.save, folders of timm.models.save_for_hf and checkpoints of timm's training script "
        "say it themselves"
    )
