"""CIFAR-10 and -100 in memory, augmented one batch at a time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torchvision import datasets as tv_datasets

from vitpos import seeds
from vitpos.augment import RandAugment, erase
from vitpos.data.dataset import Dataset, Info, Size, check_probability, resized
from vitpos.data.files import class_folders, decode, existing, scan
from vitpos.data.splits import carve

CIFAR_STATS = {
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}


@dataclass
class CifarConfig:
    """CIFAR-10 or -100: torchvision's archive, or a {train,test}/<class>/*.png tree, below root."""

    name: str = "cifar10"
    root: str | None = None
    download: bool = False
    val_fraction: float = 0.1
    crop_padding: int = 4  # shifts by up to so many pixels along each axis; 0: none
    flip: bool = True
    augment: str | None = None  # rand-mM-nN, such as rand-m9-n2: see vitpos.augment.RandAugment
    erase: float = 0.0  # of an image to have a box erased


class Cifar(Dataset):
    """CIFAR in memory, on the device; augmented many images at a time."""

    def __init__(self, cfg: CifarConfig, split: str, seed: int):
        root = existing(cfg.root, cfg.name, may_be_new=cfg.download)
        if cfg.crop_padding < 0:
            raise ValueError(f"data.crop_padding={cfg.crop_padding} must be 0 or more pixels")
        check_probability("erase", cfg.erase)
        source, labels, classes, ids = _read_cifar(cfg, root, "test" if split == "test" else "train")
        wanted = int(cfg.name.removeprefix("cifar"))
        if len(classes) != wanted:
            raise ValueError(f"{root} holds {len(classes)} classes, {cfg.name} has {wanted}")
        if split != "test":
            part = carve(labels, ids, cfg.val_fraction, seed, split)
            source, labels, ids = [source[i] for i in part], labels[part], [ids[i] for i in part]
        images = np.stack([_pixels(image, cfg.name) for image in source])  # uint8 [N, 32, 32, 3]
        super().__init__(Info(cfg.name, classes, 3, (32, 32), *CIFAR_STATS[cfg.name]), labels, ids)
        self.padding, self.flip, self.erase = cfg.crop_padding, cfg.flip, cfg.erase
        self.padded = F.pad(torch.from_numpy(images).permute(0, 3, 1, 2), [cfg.crop_padding] * 4).contiguous()
        self.randaugment = None if cfg.augment is None else RandAugment(cfg.augment, self.info.mean)

    @property
    def images(self) -> Tensor:
        """uint8 [N, 3, 32, 32], a view of the padded ones."""
        return self.padded[:, :, self.padding :, self.padding :][:, :, :32, :32]

    def to(self, device: torch.device | str) -> Dataset:
        self.padded = self.padded.to(device)
        return super().to(device)

    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        return self.images[torch.as_tensor(indices).to(self.device)].float() / 255

    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int, size: Size | None = None) -> Tensor:
        indices = torch.as_tensor(indices)
        stream = seeds.stream(seed, "augment", epoch)
        shifts = 2 * self.padding + 1
        dy, dx, flip = self._draw(indices, stream, (shifts, shifts, 2)).unbind(1)  # [b] each
        x = self._cut((indices % len(self)).to(self.device), dy, dx)
        flipped = torch.nonzero(flip == 1).squeeze(1) if self.flip else flip[:0]
        x.index_copy_(0, flipped, x.index_select(0, flipped).flip(-1))
        return resized(self._distorted(x, indices, stream).float().div_(255), size)

    def _cut(self, indices: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
        """uint8 [b, 3, 32, 32]: of padded images, what begins at these rows and columns."""
        if self.device.type == "cpu":  # NumPy copies whole rows at a time, PyTorch one pixel
            windows = sliding_window_view(self.padded.numpy(), (32, 32), axis=(2, 3))
            return torch.from_numpy(windows[indices.numpy(), :, dy.numpy(), dx.numpy()])
        return self.padded.unfold(2, 32, 1).unfold(3, 32, 1)[indices, :, dy, dx]

    def _distorted(self, x: Tensor, indices: Tensor, stream: int) -> Tensor:
        """uint8 [b, 3, 32, 32], likewise, after RandAugment and erasing."""
        keys = self._keys(indices)
        if self.randaugment is not None:
            draws = seeds.uniform(seeds.stream(stream, "randaugment"), keys, 2 * self.randaugment.num_ops)
            x = self.randaugment.batch(x, draws)
        if self.erase > 0:
            start = seeds.stream(stream, "erase")
            chosen = np.flatnonzero(seeds.uniform(start, keys, 1)[:, 0] < self.erase)
            starts = [seeds.stream(start, "sample", int(keys[i])) for i in chosen]
            x[chosen] = erase(x[chosen], starts, self.info.mean, self.info.std)
        return x


def _read_cifar(cfg: CifarConfig, root: Path, part: str) -> tuple[Sequence[Any], np.ndarray, list[str], list[str]]:
    """(images or their paths, labels [N], class names, ids) from whichever of the two layouts is there."""
    kind = {"cifar10": tv_datasets.CIFAR10, "cifar100": tv_datasets.CIFAR100}[cfg.name]
    if cfg.download:
        _download(kind, cfg.name, root)
    if (root / kind.base_folder).is_dir():
        try:
            archive = kind(str(root), train=part == "train")
        except RuntimeError:
            raise ValueError(
                f"{root / kind.base_folder} is incomplete or corrupt; data.download=true fetches it again"
            ) from None
        ids = [f"{part}/{i:05d}" for i in range(len(archive.targets))]
        return archive.data, np.array(archive.targets), list(archive.classes), ids
    if not (root / part).is_dir():
        raise FileNotFoundError(
            f"no {cfg.name} below {root}: expected {kind.base_folder}/ (torchvision's archive; "
            f"data.download=true fetches it) or train/ and test/ with a folder a class"
        )
    classes = class_folders(root / part)
    paths, labels = scan(root / part, classes, () if part == "test" else ("train", "val"))
    return paths, labels, classes, [p.relative_to(root).as_posix() for p in paths]


def _download(kind: Any, name: str, root: Path) -> None:
    """torchvision's archive below root, or nothing new there."""
    new = [path for path in (root / kind.filename, root / kind.base_folder, root, *root.parents) if not path.exists()]
    try:
        kind(str(root), download=True)
    except BaseException as error:
        for path in filter(Path.exists, new):
            if path.is_file():
                path.unlink()
            elif path.name == kind.base_folder:
                shutil.rmtree(path)
            elif not any(path.iterdir()):
                path.rmdir()
        if not isinstance(error, (OSError, RuntimeError)):
            raise
        raise ValueError(
            f"{name} cannot be downloaded to {root}: {error}; fetch {kind.url} where there is a network and put "
            f"the file, or {kind.base_folder}/ from it, in data.root"
        ) from None


def _pixels(image: Path | np.ndarray, name: str) -> np.ndarray:
    """uint8 [32, 32, 3]"""
    if isinstance(image, np.ndarray):
        return image
    decoded = decode(image)
    if decoded.size != (32, 32):
        raise ValueError(f"{image} is {decoded.size[0]}x{decoded.size[1]} pixels, {name} images are 32x32")
    return np.asarray(decoded)
