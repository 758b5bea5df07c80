"""Where an evaluation's models come from: run folders and weights files of vitpos, and timm's models by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import timm
import timm.data
import yaml
from hydra.core.hydra_config import HydraConfig
from torch import nn

import vitpos
from vitpos import data, labels, seeds
from vitpos.composition import Position
from vitpos.config import MOVABLE
from vitpos.data.decoded import INTERPOLATIONS
from vitpos.spec import nearest, shortened

WEIGHTS = "last.safetensors"


@dataclass
class Source:
    """A model, its test images, its preprocessing, and what a table row says about it."""

    model: nn.Module
    images: data.Dataset
    mean: list[float]
    std: list[float]
    about: dict[str, Any]
    places: list[int] | None = None  # the logit of each class of the images, where the model knows others too


def roots_of(key: str, folders: str) -> list[Path]:
    """The folders that runs= or results= (`key`) names, parted by commas; a comma belongs to a name where such a folder
    exists."""
    parts, found = folders.split(","), []
    while parts:
        names = [",".join(parts[:count]).strip() for count in range(len(parts), 0, -1)]
        if not names[-1]:
            raise ValueError(f"{key}={folders}: a name between the commas is empty")
        name = next((name for name in names if Path(name).is_dir()), names[-1])
        found.append(Path(name))
        parts = parts[len(names) - names.index(name) :]
    return found


def find_runs(folders: str) -> list[Path]:
    """Every run folder (one that holds last.safetensors) at or below these folders, sorted."""
    found: list[Path] = []
    for root in roots_of("runs", folders):
        if not root.is_dir():
            raise FileNotFoundError(f"runs={root}: no such folder")
        below = sorted(path.parent for path in root.rglob(WEIGHTS))
        if not below:
            raise FileNotFoundError(f"runs={root}: no run folder below it (none holds {WEIGHTS})")
        found += below
    return list(dict.fromkeys(found))


def weights_of(path: Path) -> tuple[Path, Path]:
    """(weights file, folder of its results) for a run folder or a weights file."""
    if path.is_dir():
        if not (path / WEIGHTS).is_file():
            raise FileNotFoundError(f"checkpoint={path}: the folder holds no {WEIGHTS}")
        return path / WEIGHTS, path / "eval"
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint={path}: no such file or folder")
    return path, path.parent / ("eval" if path.name == WEIGHTS else f"{path.stem}-eval")


def label_of(card: Mapping[str, Any], weights: Path) -> str:
    return str((card["extra"] or {}).get("run") or weights.parent.name)


def _test_images(config: Mapping[str, Any], device: str, seed: int = 0) -> tuple[data.Dataset, dict[str, Any]]:
    resolved = data.resolve(config)
    return data.load(resolved, "test", seed=seed).to(device), asdict(resolved)


def _check_classes(images: data.Dataset, classes: list[str] | None, count: int | None, who: str) -> None:
    ours = images.info.classes
    if count is not None and count != len(ours):
        raise ValueError(
            f"{who} has {count} classes, data {images.info.name} has {len(ours)}: they must be the same ones"
        )
    if classes is not None and list(classes) != list(ours):
        odd = next(f"{a!r} and {b!r}" for a, b in zip(classes, ours) if a != b)
        raise ValueError(f"{who} was trained on other classes than data {images.info.name} has (first: {odd})")


def _decision(places: list[int] | None, images: data.Dataset, known: int, names: str, restrict: bool) -> dict[str, Any]:
    """What a run says of the classes that were decided among: nothing where they are those of the images."""
    if places is None:
        if restrict:
            raise ValueError("restrict=true is for data of some of a model's classes; here they are the same ones")
        return {}
    count = len(images.info.classes)
    return {"decision": {"among": count if restrict else known, "known": known, "classes": count, "names": names}}


def from_checkpoint(path: Path, overrides: Mapping[str, Any], device: str, restrict: bool = False) -> Source:
    """A model saved by vitpos, on the data that it was trained on, unless overrides say otherwise. Data may hold some
    of the model's classes, by their names."""
    weights, _ = weights_of(path)
    card = vitpos.read_card(weights)
    extra, preprocessing = card["extra"] or {}, card["preprocessing"] or {}
    trained_on = extra.get("data") or {}
    config = dict(overrides) if "name" in overrides else {**trained_on, **overrides}
    if "name" not in config:
        raise ValueError(f"{weights} does not say what data it was trained on: name some, e.g. data=digits")
    images, config = _test_images(config, device, extra.get("seed") or 0)
    classes, found = card["classes"], None
    if classes and set(images.info.classes) < set(classes):
        found = labels.places(images.info.classes, classes, str(weights))
    else:
        _check_classes(images, classes, len(classes) if classes else None, str(weights))
    decision = _decision(found, images, len(classes or ()), "the model's own", restrict)
    model = vitpos.load(weights, device=device)
    about = {
        "label": label_of(card, weights),
        "encoding": card["pos"],
        "placement": trained_on.get("placement"),
        "seed": extra.get("seed"),
        "epochs": extra.get("epochs"),
        "architecture": card["architecture"],
        "checkpoint": str(weights),
        "trained": True,
        "data": config,
        "recipe": recipe_of(weights.parent),
    }
    mean, std = (list(preprocessing.get(key) or getattr(images.info, key)) for key in ("mean", "std"))
    return Source(model, images, mean, std, about | decision | _counted(model), found)


def recipe_of(folder: Path) -> dict[str, Any] | None:
    """How a run was trained: its configuration without encoding, seed, placement and what changes no result; None where
    the folder has none."""
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    stored = yaml.safe_load(path.read_text())
    for key in (*MOVABLE, "pos", "seed", "data.placement"):
        group, _, leaf = key.rpartition(".")
        ((stored.get(group) or {}) if group else stored).pop(leaf, None)
    return stored | {"init": stored.get("init") is not None}  # which weights it began from differs by seed


def from_timm(
    name: str, config: Mapping[str, Any], *, pretrained: bool, model_args: Mapping[str, Any], device: str,
    weights: str | None = None, given: Collection[str] = (), restrict: bool = False,
) -> Source:  # fmt: skip
    """A timm model by name, with `weights` of a local file or, if `pretrained`, timm's.

    Untrained ones take the data's size, channels and classes, and have the random weights of seed 0. Trained ones read
    files at their own size (that in `model_args`, else the one they were published at) and interpolation (but for keys
    of data in `given`), and data that is named as the model's classes are, such as by ImageNet's wnids, may hold some
    of them.
    """
    if "name" not in config:
        raise ValueError(f"model={name} needs to be told its images: data=digits, or data=folder data.root=...")
    bare = name.split(".")[0]
    if not timm.is_model(bare):
        raise ValueError(f"unknown timm model {name!r}; {nearest(bare, timm.list_models())[:120]}")
    kwargs, trained = dict(model_args), pretrained or weights is not None
    if trained:
        kwargs = _with_weights(name, kwargs, weights)
        free = config.keys() - given
        own_size = model_args.get("img_size") if "img_size" in free else None
        config = {**config, **{key: value for key, value in _own_images(name, own_size).items() if key in free}}
    images, config = _test_images(config, device)
    info = images.info
    if not trained:
        kwargs = {"num_classes": len(info.classes), "in_chans": info.in_chans, "img_size": info.img_size} | kwargs
    with seeds.global_generators(seeds.stream(0, "backbone")):  # random weights are the same again, in every process
        model = _create(name, trained, kwargs).to(device).eval()
    (known, names), found = labels.label_set(model), None
    if set(known) & set(info.classes) or (known and len(known) != len(info.classes)):
        found = labels.places(info.classes, known, f"model {name} ({names})")
    else:
        _check_classes(images, None, getattr(model, "num_classes", None), f"model {name}")
    prepared = timm.data.resolve_model_data_config(model)
    own = trained and len(prepared["mean"]) == info.in_chans
    mean, std = (list(prepared[key]) if own else list(getattr(info, key)) for key in ("mean", "std"))
    about = {
        "label": name,
        "encoding": str(model.position.spec) if isinstance(getattr(model, "position", None), Position) else "native",
        "placement": None,
        "seed": None,
        "epochs": None,
        "architecture": name,
        "checkpoint": weights,
        "trained": trained,
        "data": config,
        "recipe": None,
    }
    decision = _decision(found, images, len(known), names, restrict)
    return Source(model, images, mean, std, about | decision | _counted(model), found)


def data_keys() -> set[str]:
    """The keys of data that the command line gives."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return {key.removeprefix("data.") for word in given if (key := word.partition("=")[0].lstrip("+"))[:5] == "data."}


def _own_images(name: str, size: Any) -> dict[str, Any]:
    """How timm reads the images of a pretrained model, as keys of data; at ``size`` if the model was given one."""
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    if height != width:
        raise ValueError(
            f"model_args.img_size={size}: images are read as squares; give their side, data.img_size=SIDE, and "
            "model_args.dynamic_img_size=true"
        )
    own: Any = timm.get_pretrained_cfg(name)
    if own is None:
        return {}
    found: dict[str, Any] = {"img_size": own.input_size[-1]} if own.input_size[1] == own.input_size[2] else {}
    found = found if size is None else {"img_size": height}
    return found | ({"interpolation": own.interpolation} if own.interpolation in INTERPOLATIONS else {})


def _with_weights(name: str, kwargs: dict[str, Any], weights: str | None) -> dict[str, Any]:
    """The arguments that make timm load a local file, if there is one, whose head is the model's."""
    count = kwargs.get("num_classes")
    if weights is None:
        own: Any = timm.get_pretrained_cfg(name)
        if count is not None and own is not None and count != own.num_classes:
            raise ValueError(
                f"pretrained=true: the weights of {name} have {own.num_classes} classes, "
                f"model_args.num_classes={count} would give them a random head"
            )
        return kwargs
    if not Path(weights).is_file():
        raise FileNotFoundError(f"weights={weights}: no such file")
    overlay = {"file": weights} | ({} if count is None else {"num_classes": count})
    return {**kwargs, "pretrained_cfg_overlay": {**kwargs.get("pretrained_cfg_overlay", {}), **overlay}}


def _counted(model: nn.Module) -> dict[str, int]:
    return {"parameters": sum(p.numel() for p in model.parameters())}


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> Any:
    if pretrained and "pretrained_cfg_overlay" not in kwargs:
        _check_hub(name)
    try:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except TypeError as error:
        if "img_size" not in str(error) or "img_size" not in kwargs:
            raise ValueError(f"model={name}: {error}") from None
        # Convolutional networks take any size and know no img_size.
        return _create(name, pretrained, {key: value for key, value in kwargs.items() if key != "img_size"})
    except Exception as error:  # an unreadable file can raise anything
        lines = [line.strip() for line in str(error).split("\n") if line.strip()]
        told = next((line for line in lines if not line.endswith(":")), type(error).__name__)  # not a heading
        reason = shortened(told, 120)
        raise ValueError(
            f"model={name} could not be made{' with its weights' if pretrained else ''}: {reason}"
        ) from None


def _check_hub(name: str) -> None:
    """Fail at once, not after minutes of retries, where the weights' hub cannot be reached and nothing is
    cached."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return
    repository = (timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg()).hf_hub_id
    if repository and isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
        return
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        raise ValueError(
            f"pretrained=true: the weights of {name} are not cached and their hub cannot be reached; "
            "go online once, or give a local file: weights=PATH"
        ) from None
