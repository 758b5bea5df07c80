"""Any tree of class folders, decoded and cropped as it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from vitpos import seeds
from vitpos.data.dataset import SPLITS, Dataset, Info
from vitpos.data.files import class_folders, decode, existing, scan
from vitpos.data.splits import carve, stratified
from vitpos.data.workers import read_batches

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@dataclass
class FolderConfig:
    """Any tree of class folders: train/ with val/ and/or test/ beside it, or one tree to be carved."""

    name: str = "folder"
    root: str | None = None
    img_size: int = 224
    val_fraction: float = 0.1
    test_fraction: float = 0.2  # of a single tree; unused when val/ or test/ is there
    min_crop_area: float = 0.25  # of a random resized crop, as a fraction of the image
    flip: bool = True
    workers: int = 2


class Folder(Dataset):
    """A tree of class folders, decoded and cropped in worker processes as it is needed.

    Splits: train/, val/ and test/ are taken as they are. With val/ or test/ alone beside train/, that one is
    the test set and validation is carved from train/. A single tree (root/<class>/...) is carved into all
    three, its test part independent of the seed.
    """

    def __init__(self, cfg: FolderConfig, split: str, seed: int):
        root = existing(cfg.root, cfg.name)
        if cfg.img_size < 1:
            raise ValueError(f"data.img_size={cfg.img_size} must be a positive number of pixels")
        if cfg.workers < 0:
            raise ValueError(f"data.workers={cfg.workers} must be 0 or more processes")
        if not 0 < cfg.min_crop_area <= 1:
            raise ValueError(f"data.min_crop_area={cfg.min_crop_area} must lie in (0, 1]")
        paths, labels, classes = self._split(cfg, root, split, seed)
        info = Info("folder", classes, 3, (cfg.img_size, cfg.img_size), IMAGENET_MEAN, IMAGENET_STD)
        super().__init__(info, labels, [p.relative_to(root).as_posix() for p in paths])
        self.paths, self.workers = paths, cfg.workers
        size = (cfg.img_size, cfg.img_size)
        self.clean = v2.Compose([v2.Resize(cfg.img_size, antialias=True), v2.CenterCrop(size)])
        crop = v2.RandomResizedCrop(size, scale=(cfg.min_crop_area, 1.0), antialias=True)
        self.augment = v2.Compose([crop, v2.RandomHorizontalFlip(0.5 if cfg.flip else 0.0)])

    @staticmethod
    def _split(cfg: FolderConfig, root: Path, split: str, seed: int) -> tuple[list[Path], np.ndarray, list[str]]:
        given = [part for part in SPLITS if (root / part).is_dir()]
        if given == ["train"] or (given and given[0] != "train"):
            raise FileNotFoundError(f"{root} has {', '.join(given)}/ only; expected train/ and val/ or test/ beside it")
        base = root / "train" if given else root
        classes = class_folders(base)
        if len(given) == 3 or (given and split == "test"):
            part = root / (split if split in given else given[1])
            if class_folders(part) != classes:
                odd = sorted(set(classes) ^ set(class_folders(part)))
                raise ValueError(f"{part} and {base} hold different classes: {', '.join(odd[:5])} in one only")
            return *scan(part, classes), classes
        if given:
            parts: tuple[str, ...] = ("train", "val")
        else:
            parts = ("train and val", "test") if split == "test" else SPLITS
        paths, labels = scan(base, classes, parts)
        ids = [p.relative_to(root).as_posix() for p in paths]
        if not given:
            size = round(cfg.test_fraction * len(ids))
            in_test = stratified(labels, seeds.sample_keys(ids), size, seeds.stream(0, "split"))
            kept = np.flatnonzero(in_test if split == "test" else ~in_test)
            paths, labels, ids = [paths[i] for i in kept], labels[kept], [ids[i] for i in kept]
        if split != "test":
            kept = carve(labels, ids, cfg.val_fraction, seed, split)
            paths, labels = [paths[i] for i in kept], labels[kept]
        return paths, labels, classes

    def _read(self, item: tuple[int, int | None]) -> Tensor:
        """uint8 [3, H, W] of (index, stream): augmented as (stream, sample) says, or clean when stream is None."""
        index, stream = item
        image = decode(self.paths[index])
        if stream is None:
            image = self.clean(image)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeds.stream(stream, "sample", int(self.keys[index])))
                image = self.augment(image)
        return v2.functional.pil_to_tensor(image)

    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        return self._stack(indices, None)

    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int) -> Tensor:
        return self._stack(indices, seeds.stream(seed, "augment", epoch))

    def _stack(self, indices: Sequence[int] | Tensor, stream: int | None) -> Tensor:
        x = torch.stack([self._read((int(i), stream)) for i in indices])
        return x.to(self.device).float() / 255

    def iterate(
        self, batches: Sequence[Tensor], *, seed: int = 0, epoch: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        stream = None if epoch is None else seeds.stream(seed, "augment", epoch)
        wanted = [[(int(i), stream) for i in indices] for indices in batches]
        decoded = read_batches(self._read, wanted, self.workers, pin_memory=self.device.type == "cuda")
        # they come first: read to their end they close the workers here, not in __del__, where an interrupt is lost
        for images, indices in zip(decoded, batches):
            x = images.to(self.device, non_blocking=True).float() / 255
            yield x, self.labels[indices].to(self.device)
