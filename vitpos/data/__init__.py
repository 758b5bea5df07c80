"""Datasets to batches: digits on a canvas, CIFAR-10/100, any folder of class folders, and tar shards.

Train, validation and test are apart. Validation is carved from train, stratified, by the run's seed; the test
set depends on nothing. Every random draw (placement, crop, flip) is keyed by (seed, epoch, sample id), so a
sample's augmentation is the same whatever the batch, the encoding, the number of workers or of processes.

Shapes: b images, C channels, H, W pixels, (y, x) order. Pixels are float32 in 0..1 until `normalize`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vitpos.data.batches import epoch_batches, eval_batches
from vitpos.data.cifar import Cifar, CifarConfig
from vitpos.data.dataset import SPLITS, Dataset, Info, fingerprint, normalize
from vitpos.data.digits import Digits, DigitsConfig
from vitpos.data.folder import Folder, FolderConfig
from vitpos.data.splits import stratified
from vitpos.data.webdataset import Webdataset, WebdatasetConfig
from vitpos.spec import nearest

__all__ = [
    "CONFIGS",
    "SPLITS",
    "Cifar",
    "CifarConfig",
    "DataConfig",
    "Dataset",
    "Digits",
    "DigitsConfig",
    "Folder",
    "FolderConfig",
    "Info",
    "Webdataset",
    "WebdatasetConfig",
    "epoch_batches",
    "eval_batches",
    "fingerprint",
    "load",
    "normalize",
    "resolve",
    "stratified",
]  # fmt: skip

DataConfig = DigitsConfig | CifarConfig | FolderConfig | WebdatasetConfig
CONFIGS: dict[str, type] = {
    "digits": DigitsConfig, "cifar10": CifarConfig, "cifar100": CifarConfig, "folder": FolderConfig,
    "webdataset": WebdatasetConfig,
}  # fmt: skip


def load(cfg: DataConfig | Mapping[str, Any], split: str = "train", seed: int = 0) -> Dataset:
    """The dataset that ``cfg`` describes (a config object, or a mapping as stored in a checkpoint's card).

    Raises ValueError or TypeError for a bad value, FileNotFoundError where images are missing.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split; {nearest(str(split), SPLITS)}")
    cfg = resolve(cfg)
    kinds: Any = {DigitsConfig: Digits, CifarConfig: Cifar, FolderConfig: Folder, WebdatasetConfig: Webdataset}
    return kinds[type(cfg)](cfg, split, seed)


def resolve(cfg: DataConfig | Mapping[str, Any]) -> Any:
    """``cfg`` as its dataclass, names and types checked, defaults filled in."""
    if dataclasses.is_dataclass(cfg):
        values = dataclasses.asdict(cfg)  # type: ignore[arg-type]
    else:
        values = dict(cfg.items())  # type: ignore[union-attr]
    name = values.get("name")
    if name not in CONFIGS:
        raise ValueError(f"unknown dataset {name!r}; {nearest(str(name), CONFIGS)}")
    kind = CONFIGS[name]
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(f"data={name} has no option {key!r}; {nearest(str(key), fields)}")
        wanted = str(fields[key].type)
        if wanted == "float" and type(value) is int:
            values[key] = float(value)
        elif type(value).__name__ not in wanted.replace("None", "NoneType").split(" | "):
            raise TypeError(f"data.{key}={value!r} is {type(value).__name__}, expected {wanted}")
    for key in ("val_fraction", "test_fraction"):
        if key in values and not 0 < values[key] < 1 and (key, values[key]) != ("test_fraction", 1):
            raise ValueError(f"data.{key}={values[key]} must lie between 0 and 1, both excluded")
    return kind(**values)
