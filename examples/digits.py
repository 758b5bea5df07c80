"""scikit-learn's handwritten digits for the examples: embedded data, no download."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [1347, 1, 16, 16] in 0..1 and labels, then test images [450, ...] and labels."""
    data = load_digits()
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, scale_factor=2.0)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1347], order[1347:]
    return images[train], labels[train], images[test], labels[test]


def place(images: Tensor, canvas: int, generator: torch.Generator) -> Tensor:
    """Each image at a random place of a black canvas: [B, 1, canvas, canvas]."""
    room = canvas - images.shape[-1] + 1
    out = images.new_zeros(len(images), 1, canvas, canvas)
    for row, image, (top, left) in zip(out, images, torch.randint(room, (len(images), 2), generator=generator)):
        row[:, top : top + image.shape[-2], left : left + image.shape[-1]] = image
    return out
