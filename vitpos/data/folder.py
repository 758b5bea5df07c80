"""Any tree of class folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitpos import seeds
from vitpos.data.dataset import SPLITS
from vitpos.data.decoded import Decoded, DecodedConfig, check_options
from vitpos.data.files import class_folders, decode, existing, scan
from vitpos.data.splits import carve, stratified


@dataclass
class FolderConfig(DecodedConfig):
    """Any tree of class folders: train/ with val/ and/or test/ beside it, or one tree to be carved."""

    test_fraction: float = 0.2  # of a single tree (1: all of it); unused when val/ or test/ is there


class Folder(Decoded):
    """A tree of class folders.

    Splits: train/, val/ and test/ are taken as they are. With val/ or test/ alone beside train/, that one is
    the test set and validation is carved from train/. A single tree (root/<class>/...) is carved into all
    three, its test part independent of the seed.
    """

    def __init__(self, cfg: FolderConfig, split: str, seed: int):
        root = existing(cfg.root, cfg.name)
        check_options(cfg)
        self.paths, labels, classes = self._split(cfg, root, split, seed)
        super().__init__(cfg, classes, labels, [p.relative_to(root).as_posix() for p in self.paths])

    def image(self, index: int) -> Image.Image:
        return decode(self.paths[index])

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
        if not given and cfg.test_fraction == 1:
            if split != "test":
                raise ValueError("data.test_fraction=1 is for models trained elsewhere: nothing is left to train on")
            return *scan(base, classes), classes
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
