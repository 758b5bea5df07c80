"""A data set and models whose answers are known, for the probes.

The object of class c is a square of brightness (c + 1) / K, so that `Brightness` is always right wherever it
is, and `Window` is right exactly where the object covers one pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

CLASSES = 4


@dataclass(frozen=True)
class Info:
    name: str = "squares"
    classes: list[str] = field(default_factory=lambda: [str(c) for c in range(CLASSES)])
    in_chans: int = 1
    img_size: tuple[int, int] = (12, 16)
    mean: list[float] = field(default_factory=lambda: [0.25])
    std: list[float] = field(default_factory=lambda: [0.5])


class Squares:
    """N squares of 4x4 px on a black canvas of 12x16 px; home is offset (n % 3, n % 2); textured adds noise
    inside."""

    def __init__(self, n: int = 40, textured: bool = False) -> None:
        self.info = Info()
        self.object_size, self.canvas, self.patch = 4, self.info.img_size, (4, 4)
        self.labels = torch.arange(n) * 7 % CLASSES
        self.ids = [f"square-{i:03d}" for i in range(n)]
        self.objects = ((self.labels + 1) / CLASSES).view(-1, 1, 1, 1).repeat(1, 1, 4, 4)
        if textured:
            self.objects = torch.rand(self.objects.shape, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.labels)

    def place(self, indices, offset, canvas=None):
        h, w = canvas or self.canvas
        indices = torch.as_tensor(indices)
        images = torch.zeros(len(indices), 1, h, w)
        images[:, :, offset[0] : offset[0] + 4, offset[1] : offset[1] + 4] = self.objects[indices]
        return images

    def batch(self, indices):
        return torch.cat([self.place([i], (i % 3, i % 2)) for i in torch.as_tensor(indices).tolist()])


class Scenes(Squares):
    """The same images as an ordinary data set: nothing in it can be placed."""

    place = None

    def __getattribute__(self, name):
        if name == "place":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def batch(self, indices):
        images = torch.zeros(len(indices), 1, *self.canvas)
        images[:, :, 4:8, 4:8] = self.objects[torch.as_tensor(indices)]
        return images


class Model(nn.Module):
    """Undoes the normalisation (mean 0.25, std 0.5) and answers by `decide`, on raw pixels [b, 1, H, W] ->
    [b]."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.patch_size = (4, 4)
        self.inner = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return nn.functional.one_hot(self.decide(x * 0.5 + 0.25), CLASSES).float() * self.weight[0]


class Constant(Model):
    def decide(self, x):
        return torch.ones(len(x), dtype=torch.long)


class Brightness(Model):
    """Right wherever the whole object or a part of it is."""

    def decide(self, x):
        return (x.amax((1, 2, 3)) * CLASSES).round().long().clamp(1, CLASSES) - 1


class Window(Brightness):
    """Sees pixel (5, 5) only; black is class 0. Right where the object covers it, and for class 0."""

    def decide(self, x):
        return super().decide(x[:, :, 5:6, 5:6])


class Quadrant(Model):
    """Reads position only: the quadrant of the brightest pixel, whatever the class."""

    def decide(self, x):
        h, w = x.shape[-2:]
        place = x.flatten(1).argmax(1)
        return (place // w >= h // 2).long() * 2 + (place % w >= w // 2).long()
