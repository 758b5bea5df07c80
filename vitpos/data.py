"""Datasets to batches: digits on a canvas, CIFAR-10/100, and any folder of class folders.

Train, validation and test are apart. Validation is carved from train, stratified, by the run's seed; the test
set depends on nothing. Every random draw (placement, crop, flip) is keyed by (seed, epoch, sample id), so a
sample's augmentation is the same whatever the batch, the encoding, the number of workers or of processes.

Shapes: b images, C channels, H, W pixels, (y, x) order. Pixels are float32 in 0..1 until `normalize`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torchvision import datasets as tv_datasets
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from vitpos import seeds
from vitpos.spec import nearest

SPLITS = ("train", "val", "test")
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CIFAR_STATS = {
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}


@dataclass
class DigitsConfig:
    """scikit-learn's 8x8 digits, enlarged to object_size and placed on a black square canvas (pixels)."""

    name: str = "digits"
    canvas: int = 24
    object_size: int = 12
    patch: int = 4
    placement: str = "home"  # of training images. home: corner at 0..patch-1 on each axis; uniform: anywhere
    val_fraction: float = 0.15


@dataclass
class CifarConfig:
    """CIFAR-10 or -100: torchvision's archive, or a {train,test}/<class>/*.png tree, below root."""

    name: str = "cifar10"
    root: str | None = None
    download: bool = False
    val_fraction: float = 0.1
    crop_padding: int = 4
    flip: bool = True


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


DataConfig = DigitsConfig | CifarConfig | FolderConfig
CONFIGS: dict[str, type] = {
    "digits": DigitsConfig, "cifar10": CifarConfig, "cifar100": CifarConfig, "folder": FolderConfig,
}  # fmt: skip


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


def load(cfg: DataConfig | Mapping[str, Any], split: str = "train", seed: int = 0) -> Dataset:
    """The dataset that ``cfg`` describes (a config object, or a mapping as stored in a checkpoint's card).

    Raises ValueError or TypeError for a bad value, FileNotFoundError where images are missing.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split; {nearest(str(split), SPLITS)}")
    cfg = resolve(cfg)
    kind = {DigitsConfig: Digits, CifarConfig: Cifar, FolderConfig: Folder}[type(cfg)]
    return kind(cfg, split, seed)


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
        if key in values and not 0 < values[key] < 1:
            raise ValueError(f"data.{key}={values[key]} must lie between 0 and 1, both excluded")
    return kind(**values)


class Dataset(ABC):
    """One split. ``labels``: int64 [N]; ``ids``: N stable sample ids; see the methods for images."""

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
    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int) -> Tensor:
        """Like `batch`, with this epoch's training augmentation."""

    def iterate(
        self, batches: Sequence[Tensor], *, seed: int = 0, epoch: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) for each batch of indices in turn; augmented when an epoch is given."""
        for indices in batches:
            x = self.batch(indices) if epoch is None else self.augmented(indices, seed, epoch)
            yield x, self.labels[indices].to(self.device)

    def _draw(self, indices: Tensor, stream: int, highs: tuple[int, ...]) -> Tensor:
        """int64 [b, len(highs)] on the device: column j uniform in 0..highs[j]-1, keyed by sample."""
        return torch.from_numpy(seeds.integers(stream, self.keys[indices.numpy()], highs)).to(self.device)


def fingerprint(*parts: Dataset) -> str:
    """Hash of the sample ids of each part, in order: it says whether two runs train and validate on the same."""
    return hashlib.blake2b("\n\n".join("\n".join(p.ids) for p in parts).encode(), digest_size=16).hexdigest()


def epoch_batches(n: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world: int = 1) -> list[Tensor]:
    """This epoch's batches of indices, each int64 [batch_size / world]; an incomplete last one is dropped.

    Each global batch is the same for every number of processes; rank r takes the r-th of its equal parts.
    """
    if batch_size % world:
        raise ValueError(f"train.batch_size={batch_size} cannot be split evenly among {world} processes")
    if not 1 <= batch_size <= n:
        raise ValueError(f"train.batch_size={batch_size} must lie in 1..{n}, the number of training images")
    order = torch.randperm(n, generator=seeds.generator(seed, "order", epoch))
    share = batch_size // world
    return [
        order[start + rank * share : start + (rank + 1) * share] for start in range(0, n - batch_size + 1, batch_size)
    ]


def eval_batches(n: int, batch_size: int) -> list[Tensor]:
    """All indices 0..n-1 in order, in batches of at most batch_size."""
    return list(torch.arange(n).split(batch_size))


def stratified(labels: np.ndarray, keys: np.ndarray, size: int, base: int) -> np.ndarray:
    """bool [N]: ``size`` samples drawn by (base, key), classes in proportion (one at least, never all)."""
    chosen = np.zeros(len(labels), bool)
    rank = seeds.uniform(base, keys, 1)[:, 0]
    classes, totals = np.unique(labels, return_counts=True)
    if totals.min() < 2:
        raise ValueError(f"class {classes[totals.argmin()]} has a single image; a split needs at least 2 a class")
    exact = totals * size / len(labels)
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: size - counts.sum()]] += 1  # largest remainders
    for label, count in zip(classes, np.clip(counts, 1, totals - 1)):
        members = np.flatnonzero(labels == label)
        chosen[members[np.argsort(rank[members], kind="stable")[:count]]] = True
    return chosen


def _carve(labels: np.ndarray, ids: list[str], fraction: float, seed: int, split: str) -> np.ndarray:
    """Indices of the train or the val part of the training images."""
    size = round(fraction * len(ids))
    in_val = stratified(labels, seeds.sample_keys(ids), size, seeds.stream(seed, "split"))
    return np.flatnonzero(in_val if split == "val" else ~in_val)


class Digits(Dataset):
    """Real handwritten digits whose place on the canvas is under control: "where" apart from "what".

    Images are [1, canvas, canvas]. The test set is 360 of scikit-learn's 1797 digits, stratified, the same
    for every seed. ``batch`` puts each sample at its own fixed home offset (0..patch-1 on each axis).
    """

    def __init__(self, cfg: DigitsConfig, split: str, seed: int):
        from sklearn.datasets import load_digits

        if not 1 <= cfg.patch <= cfg.canvas:
            raise ValueError(f"data.patch={cfg.patch} must lie in 1..{cfg.canvas}, the canvas")
        if not 1 <= cfg.object_size <= cfg.canvas - cfg.patch + 1:
            raise ValueError(
                f"data.object_size={cfg.object_size} does not fit: with patch {cfg.patch} on a canvas of "
                f"{cfg.canvas} it must lie in 1..{cfg.canvas - cfg.patch + 1}"
            )
        if cfg.placement not in ("home", "uniform"):
            raise ValueError(
                f"data.placement={cfg.placement!r} is no placement; {nearest(cfg.placement, ('home', 'uniform'))}"
            )
        digits = load_digits()
        ids = [f"digits/{i:04d}" for i in range(len(digits.target))]
        in_test = stratified(digits.target, seeds.sample_keys(ids), 360, seeds.stream(0, "split"))
        part = np.flatnonzero(in_test if split == "test" else ~in_test)
        if split != "test":
            part = part[_carve(digits.target[part], [ids[i] for i in part], cfg.val_fraction, seed, split)]
        info = Info("digits", [str(c) for c in range(10)], 1, (cfg.canvas, cfg.canvas), [0.08], [0.21])
        super().__init__(info, digits.target[part], [ids[i] for i in part])
        small = torch.from_numpy(digits.images[part]).float()[:, None] / 16  # [N, 1, 8, 8]
        side = cfg.object_size
        self.objects = F.interpolate(small, (side, side), mode="bilinear", align_corners=False)
        self.object_size, self.patch, self.canvas = side, cfg.patch, (cfg.canvas, cfg.canvas)
        self.placement = cfg.placement
        self.home = seeds.integers(seeds.stream(0, "placement"), self.keys, (cfg.patch, cfg.patch))  # [N, 2]

    def to(self, device: torch.device | str) -> Dataset:
        self.objects = self.objects.to(device)
        return super().to(device)

    def place(
        self,
        indices: Sequence[int] | Tensor,
        offset: tuple[int, int] | Tensor,
        canvas: tuple[int, int] | None = None,
    ) -> Tensor:
        """float32 [b, 1, Hc, Wc]: each object with its top-left pixel at offset (dy, dx) on a black canvas.

        offset: one for all or int64 [b, 2]; canvas: (Hc, Wc), the training canvas by default.
        Raises ValueError where an object would leave the canvas.
        """
        indices = torch.as_tensor(indices)
        height, width = canvas or self.canvas
        offsets = torch.as_tensor(offset, device=self.device).expand(len(indices), 2)
        side = self.object_size
        low, high = offsets.amin(0).tolist(), offsets.amax(0).tolist()
        if min(low) < 0 or high[0] + side > height or high[1] + side > width:
            raise ValueError(
                f"offset {high if min(low) >= 0 else low} puts a {side} px object outside the {height}x{width} canvas"
            )
        x = torch.zeros(len(indices), height, width, device=self.device)
        span = torch.arange(side, device=self.device)
        rows, columns = offsets[:, :1] + span, offsets[:, 1:] + span  # [b, side]
        which = torch.arange(len(indices), device=self.device)[:, None, None]
        x[which, rows[:, :, None], columns[:, None, :]] = self.objects[indices.to(self.device), 0]
        return x[:, None]

    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        indices = torch.as_tensor(indices)
        return self.place(indices, torch.from_numpy(self.home[indices.numpy()]))

    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int) -> Tensor:
        indices = torch.as_tensor(indices)
        positions = self.patch if self.placement == "home" else self.canvas[0] - self.object_size + 1
        stream = seeds.stream(seed, "placement", epoch)
        return self.place(indices, self._draw(indices, stream, (positions, positions)))


class Cifar(Dataset):
    """CIFAR in memory, uint8 [N, 3, 32, 32] on the device; random crop and flip one batch at a time."""

    def __init__(self, cfg: CifarConfig, split: str, seed: int):
        root = _existing(cfg.root, cfg.name, may_be_new=cfg.download)
        if cfg.crop_padding < 0:
            raise ValueError(f"data.crop_padding={cfg.crop_padding} must be 0 or more pixels")
        source, labels, classes, ids = _read_cifar(cfg, root, "test" if split == "test" else "train")
        wanted = int(cfg.name.removeprefix("cifar"))
        if len(classes) != wanted:
            raise ValueError(f"{root} holds {len(classes)} classes, {cfg.name} has {wanted}")
        if split != "test":
            part = _carve(labels, ids, cfg.val_fraction, seed, split)
            source, labels, ids = [source[i] for i in part], labels[part], [ids[i] for i in part]
        images = np.stack([_pixels(image, cfg.name) for image in source])  # uint8 [N, 32, 32, 3]
        super().__init__(Info(cfg.name, classes, 3, (32, 32), *CIFAR_STATS[cfg.name]), labels, ids)
        self.images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()  # [N, 3, 32, 32]
        self.padding, self.flip = cfg.crop_padding, cfg.flip

    def to(self, device: torch.device | str) -> Dataset:
        self.images = self.images.to(device)
        return super().to(device)

    def batch(self, indices: Sequence[int] | Tensor) -> Tensor:
        return self.images[torch.as_tensor(indices).to(self.device)].float() / 255

    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int) -> Tensor:
        indices = torch.as_tensor(indices)
        stream = seeds.stream(seed, "augment", epoch)
        shifts = 2 * self.padding + 1
        dy, dx, flip = self._draw(indices, stream, (shifts, shifts, 2)).unbind(1)  # [b] each
        x = F.pad(self.images[indices.to(self.device)], [self.padding] * 4)  # [b, 3, 32 + 2p, 32 + 2p]
        span = torch.arange(32, device=self.device)
        columns = torch.where((flip[:, None] == 1) & self.flip, 31 - span, span) + dx[:, None]  # [b, 32]
        rows = span + dy[:, None]
        which = torch.arange(len(indices), device=self.device)[:, None, None]
        x = x.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]  # [b, 32, 32, 3]
        return x.permute(0, 3, 1, 2).contiguous().float() / 255


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
    classes = _class_folders(root / part)
    paths, labels = _scan(root / part, classes, () if part == "test" else ("train", "val"))
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
    decoded = _decode(image)
    if decoded.size != (32, 32):
        raise ValueError(f"{image} is {decoded.size[0]}x{decoded.size[1]} pixels, {name} images are 32x32")
    return np.asarray(decoded)


class Folder(Dataset):
    """A tree of class folders, decoded and cropped in worker processes as it is needed.

    Splits: train/, val/ and test/ are taken as they are. With val/ or test/ alone beside train/, that one is
    the test set and validation is carved from train/. A single tree (root/<class>/...) is carved into all
    three, its test part independent of the seed.
    """

    def __init__(self, cfg: FolderConfig, split: str, seed: int):
        root = _existing(cfg.root, cfg.name)
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
        classes = _class_folders(base)
        if len(given) == 3 or (given and split == "test"):
            part = root / (split if split in given else given[1])
            if _class_folders(part) != classes:
                odd = sorted(set(classes) ^ set(_class_folders(part)))
                raise ValueError(f"{part} and {base} hold different classes: {', '.join(odd[:5])} in one only")
            return *_scan(part, classes), classes
        if given:
            parts: tuple[str, ...] = ("train", "val")
        else:
            parts = ("train and val", "test") if split == "test" else SPLITS
        paths, labels = _scan(base, classes, parts)
        ids = [p.relative_to(root).as_posix() for p in paths]
        if not given:
            size = round(cfg.test_fraction * len(ids))
            in_test = stratified(labels, seeds.sample_keys(ids), size, seeds.stream(0, "split"))
            kept = np.flatnonzero(in_test if split == "test" else ~in_test)
            paths, labels, ids = [paths[i] for i in kept], labels[kept], [ids[i] for i in kept]
        if split != "test":
            kept = _carve(labels, ids, cfg.val_fraction, seed, split)
            paths, labels = [paths[i] for i in kept], labels[kept]
        return paths, labels, classes

    def _image(self, index: int, stream: int | None) -> Tensor:
        """uint8 [3, H, W]; augmented as (stream, sample) says, or clean when stream is None."""
        image = _decode(self.paths[index])
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
        x = torch.stack([self._image(int(i), stream) for i in indices])
        return x.to(self.device).float() / 255

    def iterate(
        self, batches: Sequence[Tensor], *, seed: int = 0, epoch: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        stream = None if epoch is None else seeds.stream(seed, "augment", epoch)
        loader = torch.utils.data.DataLoader(
            _Stream(self, stream),
            batch_sampler=[b.tolist() for b in batches],
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_interrupts,
        )
        with _signals_wait():
            decoded = iter(loader)
        # they come first: read to their end they close the workers here, not in __del__, where an interrupt is lost
        for images, indices in zip(decoded, batches):
            if isinstance(images, Exception):
                raise images
            x = images.to(self.device, non_blocking=True).float() / 255
            yield x, self.labels[indices].to(self.device)


class _Stream(torch.utils.data.Dataset):
    def __init__(self, folder: Folder, stream: int | None):
        self.folder, self.stream = folder, stream

    def __getitem__(self, index: int) -> Tensor | Exception:
        try:
            return self.folder._image(index, self.stream)
        except ValueError as error:  # raised in a worker, it would reach the user inside a traceback
            return error


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM are handled after the block: an exception raised while a process forks is lost."""
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield
        return
    arrived: list[int] = []
    handlers = {n: signal.signal(n, lambda n, _: arrived.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the main one ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collate(items: list[Tensor | Exception]) -> Tensor | Exception:
    return next((i for i in items if isinstance(i, Exception)), None) or torch.stack(items)  # type: ignore[arg-type]


def _existing(root: str | None, name: str, may_be_new: bool = False) -> Path:
    if root is None:
        raise ValueError(f"data={name} needs data.root=FOLDER, where its images are")
    path = Path(os.path.expanduser(root))
    if not path.is_dir() and not may_be_new:
        raise FileNotFoundError(f"data.root={root} is not a folder")
    return path


def _class_folders(base: Path) -> list[str]:
    try:
        classes = sorted(e.name for e in os.scandir(base) if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        _unreadable(error)
    if len(classes) < 2:
        raise ValueError(f"{base} holds {len(classes)} class folders; expected one folder a class, at least 2")
    return classes


def _unreadable(error: OSError) -> NoReturn:
    raise ValueError(f"cannot read folder {error.filename}: {error.strerror}") from None


def _scan(base: Path, classes: list[str], parts: Sequence[str] = ()) -> tuple[list[Path], np.ndarray]:
    """Image paths of every class, in sorted order, and their labels int64 [N]; enough of each to carve ``parts``."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            Path(folder, f)
            for folder, _, files in os.walk(base / name, onerror=_unreadable)
            for f in files
            if f.lower().endswith(IMG_EXTENSIONS)
        )
        if not found:
            raise ValueError(f"class folder {base / name} holds no image ({', '.join(IMG_EXTENSIONS)})")
        if len(found) < len(parts):
            raise ValueError(
                f"class folder {base / name} holds {len(found)} image{'s' * (len(found) > 1)}; at least {len(parts)} "
                f"are needed to carve {', '.join(parts[:-1])} and {parts[-1]} from it"
            )
        paths += found
        labels += [label] * len(found)
    return paths, np.array(labels, np.int64)


def _decode(path: Path) -> Image.Image:
    """RGB, upright as its EXIF orientation says; transparent pixels are laid on white, 16-bit grey becomes 8-bit."""
    try:
        with Image.open(path) as image:
            mode = image.mode
            if mode in ("I", "F"):
                raise ValueError(f"its pixels are of mode {mode}, whose range is unknown; convert it to 8 or 16 bits")
            upright: Any = ImageOps.exif_transpose(image)
            if mode.startswith("I;16"):
                upright = Image.fromarray(np.round(np.asarray(upright) / 257).astype(np.uint8))
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
            return upright.convert("RGB")
    except Exception as error:  # Pillow raises many kinds: OSError, SyntaxError, struct.error, ...
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot decode image {path}: {reason}; replace or remove it") from None
