"""Images in tar shards, in the format of webdataset: too many for a folder, or for memory.

Shards are indexed once and then read at any place, so that order, copies, splits and a resumed run are those of any
other dataset, whatever the number of processes and workers. They lie on a disk, local or shared.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitpos.data.decoded import Decoded, DecodedConfig, check_options
from vitpos.data.files import decode, existing
from vitpos.data.splits import carve


@dataclass
class WebdatasetConfig(DecodedConfig):
    """Shards below root, by patterns: samples of an image and a .cls file with the number of its class."""

    name: str = "webdataset"
    train: str = "train/*.tar"
    val: str | None = None  # null: carved from train
    test: str = "val/*.tar"


class Webdataset(Decoded):
    """A sample's id is SHARD/KEY. Class names are the lines of root/classes.txt, or else the classes' numbers."""

    def __init__(self, cfg: WebdatasetConfig, split: str, seed: int):
        root = existing(cfg.root, cfg.name)
        check_options(cfg)
        pattern = {"train": cfg.train, "val": cfg.val or cfg.train, "test": cfg.test}[split]
        shards = sorted(root.glob(pattern))
        if not shards:
            raise FileNotFoundError(f"no shard {pattern} below {root} (data.train, data.val and data.test name them)")
        self.shards: list[Path] = []
        ids: list[str] = []
        rows: list[tuple[int, int, int]] = []  # label, offset, length
        for shard in shards:
            for key, row in _index(shard).items():
                self.shards.append(shard)
                ids.append(f"{shard.relative_to(root).as_posix()}/{key}")
                rows.append(row)
        labels, offsets, lengths = np.array(rows, np.int64).T
        kept = np.arange(len(ids))
        if split != "test" and cfg.val is None:
            kept = carve(labels, ids, cfg.val_fraction, seed, split)
        self.shards, self.offsets, self.lengths = [self.shards[i] for i in kept], offsets[kept], lengths[kept]
        super().__init__(cfg, _classes(root, labels), labels[kept], [ids[i] for i in kept])

    def image(self, index: int) -> Image.Image:
        with open(self.shards[index], "rb") as file:
            file.seek(self.offsets[index])
            return decode(io.BytesIO(file.read(self.lengths[index])), self.ids[index])


def _index(shard: Path) -> dict[str, tuple[int, int, int]]:
    """Of each sample by its key: label, and where its image begins and how long it is, in bytes."""
    labels: dict[str, int] = {}
    images: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # (it would keep them all)
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                key = f"{folder}{slash}{stem}"
                if f".{extension.lower()}" in IMG_EXTENSIONS:
                    images[key] = member.offset_data, member.size
                elif extension == "cls":
                    labels[key] = int(archive.extractfile(member).read())  # type: ignore[union-attr]
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ValueError(f"{shard} is not an uncompressed tar file of samples, or not a whole one: {error}") from None
    odd = sorted(images.keys() ^ labels.keys())
    if odd or not images:
        lacks = f"sample {odd[0]} has no {'.cls' if odd[0] in images else 'image'}" if odd else "it holds no sample"
        raise ValueError(f"{shard}: {lacks}; each sample is an image and a .cls file with the number of its class")
    return {key: (labels[key], *place) for key, place in images.items()}


def _classes(root: Path, labels: np.ndarray) -> list[str]:
    path = root / "classes.txt"
    names = path.read_text().split("\n") if path.is_file() else [str(i) for i in range(labels.max() + 1)]
    names = names[:-1] if names[-1] == "" else names
    if not 0 <= labels.min() <= labels.max() < len(names):
        raise ValueError(f"{path} names {len(names)} classes, shards have those from {labels.min()} to {labels.max()}")
    return names
