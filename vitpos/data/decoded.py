"""Images that are decoded and cropped in worker processes as they are needed, whatever they are stored in."""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torchvision.transforms import v2

from vitpos import seeds
from vitpos.augment import erase
from vitpos.data.dataset import Dataset, Info, Size, check_probability
from vitpos.data.workers import read_batches

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass
class DecodedConfig:
    """Size and augmentation of images that are stored as files."""

    name: str = "folder"
    root: str | None = None
    img_size: int = 224
    val_fraction: float = 0.1
    min_crop_area: float = 0.25  # of a random resized crop, as a fraction of the image
    flip: bool = True
    augment: str | None = None  # in timm's notation: rand-m9-mstd0.5-inc1, 3a (DeiT III), augmix-m5-w4, ...
    color_jitter: float = 0.0  # of brightness, contrast and saturation, after augment
    erase: float = 0.0  # of an image to have a box erased
    interpolation: str = "bilinear"  # or bicubic
    crop_pct: float = 1.0  # of evaluation: side of the centre crop as a share of the resized shorter side
    workers: int = 2


class Decoded(Dataset):
    """RGB images of any size, cropped to the training size; for evaluation the shorter side is resized to it
    (over crop_pct) and the centre is cut out.

    An item of work is (index, stream, size): augmented as (stream, sample) says, or clean when stream is None.
    """

    def __init__(self, cfg: DecodedConfig, classes: list[str], labels: np.ndarray, ids: list[str]):
        info = Info(cfg.name, classes, 3, (cfg.img_size, cfg.img_size), IMAGENET_MEAN, IMAGENET_STD)
        super().__init__(info, labels, ids)
        self.cfg, self.workers = cfg, cfg.workers
        kind = v2.InterpolationMode(cfg.interpolation)
        shorter = math.floor(cfg.img_size / cfg.crop_pct)  # timm's rounding
        self.clean = v2.Compose([v2.Resize(shorter, kind, antialias=True), v2.CenterCrop(info.img_size)])

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Image ``index``, RGB. ValueError, with its name, if it cannot be decoded."""

    def _read(self, item: tuple[int, int | None, Size | None]) -> Tensor:
        """uint8 [3, h, w]"""
        index, stream, size = item
        image = self.image(index % len(self))
        if stream is None:
            return v2.functional.pil_to_tensor(self.clean(image))
        start = seeds.stream(stream, "sample", int(self._keys(torch.tensor([index]))[0]))
        with seeds.global_generators(start):
            x = augmentation(self.cfg, size or self.info.img_size)(image)
        box = seeds.stream(start, "erase")
        if box / seeds.MASK63 < self.cfg.erase:
            x = erase(x[None], [box], self.info.mean, self.info.std)[0]
        return x

    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        return self._stack(indices, None, None)

    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int, size: Size | None = None) -> Tensor:
        return self._stack(indices, seeds.stream(seed, "augment", epoch), size)

    def _stack(self, indices: Sequence[int] | Tensor, stream: int | None, size: Size | None) -> Tensor:
        x = torch.stack([self._read((int(i), stream, size)) for i in indices])
        return x.to(self.device).float() / 255

    def iterate(
        self,
        batches: Sequence[Tensor],
        *,
        seed: int = 0,
        epoch: int | None = None,
        sizes: Sequence[Size | None] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        stream = None if epoch is None else seeds.stream(seed, "augment", epoch)
        wanted = [
            [(int(i), stream, size) for i in indices] for indices, size in zip(batches, sizes or [None] * len(batches))
        ]
        decoded = read_batches(self._read, wanted, self.workers, pin_memory=self.device.type == "cuda")
        # they come first: read to their end they close the workers here, not in __del__, where an interrupt is lost
        for images, indices in zip(decoded, batches):
            yield images.to(self.device, non_blocking=True).float() / 255, self._labels(indices)


def check_options(cfg: DecodedConfig) -> None:
    """ValueError for a value out of its range."""
    if cfg.img_size < 1:
        raise ValueError(f"data.img_size={cfg.img_size} must be a positive number of pixels")
    if cfg.workers < 0:
        raise ValueError(f"data.workers={cfg.workers} must be 0 or more processes")
    if not 0 < cfg.min_crop_area <= 1:
        raise ValueError(f"data.min_crop_area={cfg.min_crop_area} must lie in (0, 1]")
    if not 0 < cfg.crop_pct <= 1:
        raise ValueError(f"data.crop_pct={cfg.crop_pct} must lie in (0, 1]")
    if not cfg.color_jitter >= 0:
        raise ValueError(f"data.color_jitter={cfg.color_jitter} must be 0 or more")
    if cfg.interpolation not in INTERPOLATIONS:
        raise ValueError(f"data.interpolation={cfg.interpolation!r} must be one of {', '.join(INTERPOLATIONS)}")
    check_probability("erase", cfg.erase)
    augmentation(cfg, (cfg.img_size, cfg.img_size))


def augmentation(cfg: DecodedConfig, size: Size) -> Any:
    """timm's training transforms, from a PIL image to uint8 [3, h, w] at ``size``; they draw from global generators.

    Crops have the aspect ratio of ``size``, times 3/4 to 4/3.
    """
    return _augmentation(size, cfg.min_crop_area, cfg.flip, cfg.augment, cfg.color_jitter, cfg.interpolation)


def _to_no_bits(transforms: Any) -> Any:
    """timm's transforms, with posterizing down to no bits, black, as published; Pillow 13 refuses it."""
    for transform in transforms.transforms:
        policy = [*getattr(transform, "ops", ()), *itertools.chain(*getattr(transform, "policy", ()))]
        for op in policy:
            if getattr(op, "aug_fn", None) is auto_augment.posterize:
                op.aug_fn = _posterize
    return transforms


def _posterize(image: Image.Image, bits: int, **ignored: Any) -> Image.Image:
    return auto_augment.posterize(image, bits) if bits else image.point(lambda value: 0)


@functools.cache
def _augmentation(size: Size, area: float, flip: bool, augment: str | None, jitter: float, interpolation: str) -> Any:
    shape = size[1] / size[0]
    try:
        return _to_no_bits(
            transforms_imagenet_train(
                size,
                scale=(area, 1.0),
                ratio=(3 / 4 * shape, 4 / 3 * shape),
                hflip=0.5 if flip else 0.0,
                color_jitter=jitter or None,  # type: ignore[arg-type]
                force_color_jitter=True,
                auto_augment=augment,
                interpolation=interpolation,
                use_prefetcher=True,  # ends with uint8 tensors
            )
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"data.augment={augment!r} is not in timm's notation, such as rand-m9-mstd0.5-inc1 or 3a ({error})"
        ) from None
