"""Handwritten digits on a canvas: their place is under control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitpos import seeds
from vitpos.data.dataset import Dataset, Info, Size, resized
from vitpos.data.splits import carve, stratified
from vitpos.spec import nearest


@dataclass
class DigitsConfig:
    """scikit-learn's 8x8 digits, enlarged to object_size and placed on a black square canvas (pixels)."""

    name: str = "digits"
    canvas: int = 24
    object_size: int = 12
    patch: int = 4
    placement: str = "home"  # of training images. home: corner at 0..patch-1 on each axis; uniform: anywhere
    val_fraction: float = 0.15


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
            part = part[carve(digits.target[part], [ids[i] for i in part], cfg.val_fraction, seed, split)]
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

    def augmented(self, indices: Sequence[int] | Tensor, seed: int, epoch: int, size: Size | None = None) -> Tensor:
        indices = torch.as_tensor(indices)
        positions = self.patch if self.placement == "home" else self.canvas[0] - self.object_size + 1
        stream = seeds.stream(seed, "placement", epoch)
        offsets = self._draw(indices, stream, (positions, positions))
        return resized(self.place(indices % len(self), offsets), size)
