"""Generated images for the examples: bright squares and discs on noise, with their masks and boxes."""

import torch
from torch import Tensor

CLASSES = ("background", "square", "disc")


def shapes(
    count: int, size: tuple[int, int], generator: torch.Generator, objects: int = 2
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Images [count, 3, H, W], class masks [count, H, W], and of each image its boxes [n, 4] (x, y, x, y) and labels.

    Objects do not overlap: one that would is left out.
    """
    height, width = size
    y, x = torch.arange(height)[:, None], torch.arange(width)[None, :]
    images = 0.3 * torch.randn(count, 3, height, width, generator=generator)
    masks = torch.zeros(count, height, width, dtype=torch.long)
    targets = []
    for image, mask in zip(images, masks):
        boxes, labels = [], []
        for _ in range(objects):
            side, label = (int(torch.randint(*bounds, (1,), generator=generator)) for bounds in ((16, 29), (1, 3)))
            top, left = (int(torch.randint(0, s - side, (1,), generator=generator)) for s in size)
            inside = (y >= top) & (y < top + side) & (x >= left) & (x < left + side)
            if mask[inside].any():
                continue
            if label == 2:
                middle = (side - 1) / 2
                inside = inside & ((y - top - middle) ** 2 + (x - left - middle) ** 2 <= (side / 2) ** 2)
            mask[inside] = label
            image[:, inside] += 1
            boxes.append([left, top, left + side, top + side])
            labels.append(label)
        targets.append({"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)})
    return images, masks, targets
