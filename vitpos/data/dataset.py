"""One split of a dataset: what training, probes and checkpoints need of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitpos import seeds

SPLITS = ("train", "val", "test")
Size = tuple[int, int]  # (h, w) in pixels
TOGETHER = 256  # images that are augmented in one go: enough to share the cost of a call, few enough for the cache


@dataclass(frozen=True)
class Info:
    """What a model and a checkpoint card need to know of a dataset; img_size is (h, w) in pixels."""

    name: str
    classes: list[str]
    in_chans: int
    img_size: tuple[int, int]
    mean: list[float]
    std: list[float]


def normalize(x: Tensor, info: Info) -> Tensor:
    """(x - mean) / std per channel; x: [b, C, H, W] in 0..1."""
    mean, std = (torch.tensor(v, dtype=x.dtype, device=x.device)[:, None, None] for v in (info.mean, info.std))
    return (x - mean) / std


class Dataset(ABC):
    """One split of N samples. ``labels``: int64 [N]; ``ids``: N stable sample ids; see the methods for images.

    Where images are augmented, index i + k N stands for the k-th further copy of sample i, with draws of its own.
    """

    def __init__(self, info: Info, labels: np.ndarray, ids: list[str]):
        self.info = info
        self.labels = torch.from_numpy(np.ascontiguousarray(labels, dtype=np.int64))
        self.ids = ids
        self.keys = seeds.sample_keys(ids)
        self.device = torch.device("cpu")

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> Dataset:
        """Batches come out on ``device`` from now on; returns self."""
        self.device = torch.device(device)
        return self

    @abstractmethod
    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        """float32 [b, C, H, W] in 0..1 at info.img_size: no augmentation, not normalised."""

    @abstractmethod
    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int, size: Size | None = None) -> Tensor:
        """Like `batch`, with this epoch's training augmentation, and at another (h, w) in pixels where one is given."""

    def iterate(
        self,
        batches: Sequence[Tensor],
        *,
        seed: int = 0,
        epoch: int | None = None,
        sizes: Sequence[Size | None] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) for each batch of indices in turn; augmented, at the sizes given, when an epoch is."""
        sizes = sizes or [None] * len(batches)
        per_call = 1 if epoch is None or not batches else max(1, TOGETHER // len(batches[0]))
        for start in range(0, len(batches), per_call):
            some = batches[start : start + per_call]
            x = self.batch(some[0]) if epoch is None else self.augmented(torch.cat(list(some)), seed, epoch)
            for images, indices, size in zip(x.split([len(i) for i in some]), some, sizes[start:]):
                yield resized(images, size), self._labels(indices)

    def _labels(self, indices: Tensor) -> Tensor:
        return self.labels[indices % len(self)].to(self.device)

    def _keys(self, indices: Tensor) -> np.ndarray:
        """uint64 [b]: what the draws of these samples, or copies of them, are keyed by."""
        copies, samples = np.divmod(indices.numpy(), len(self))
        return self.keys[samples] + copies.astype(np.uint64)

    def _draw(self, indices: Tensor, stream: int, highs: tuple[int, ...]) -> Tensor:
        """int64 [b, len(highs)] on the device: column j uniform in 0..highs[j]-1, keyed by sample."""
        return torch.from_numpy(seeds.integers(stream, self._keys(indices), highs)).to(self.device)


def check_probability(option: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"data.{option}={value} must lie in [0, 1]")


def resized(x: Tensor, size: Size | None) -> Tensor:
    """Images [b, C, H, W] at ``size`` (h, w), whatever their aspect ratio was."""
    if size is None or x.shape[-2:] == size:
        return x
    return F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)


def fingerprint(*parts: Dataset) -> str:
    """Hash of the sample ids of each part, in order: it says whether two runs train and validate on the same."""
    return hashlib.blake2b("\n\n".join("\n".join(p.ids) for p in parts).encode(), digest_size=16).hexdigest()
