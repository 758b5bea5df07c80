"""What is done to training images besides cropping and flipping: by libraries' functions, from draws of ours.

Images are uint8 [b, C, H, W]. What an image gets depends on its own draws alone, not on the batch that it is in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2

from vitpos import seeds


class RandAugment(v2.RandAugment):
    """torchvision's RandAugment (Cubuk et al. 2020, arXiv:1909.13719), a batch at a time.

    ``text`` is timm's notation for it, ``rand-mM-nN``: N operations an image, each at magnitude M of 10. Images
    that drew the same operation go through it together; ``mean`` (0..1 a channel) fills what moves into view.
    """

    def __init__(self, text: str, mean: Sequence[float]):
        found = re.fullmatch(r"rand-m(\d+(?:\.\d+)?)-n(\d+)", text)
        if not found or float(found[1]) > 10 or int(found[2]) < 1:
            raise ValueError(
                f"data.augment={text!r} must be rand-mM-nN for images in memory, such as rand-m9-n2: N operations at "
                "magnitude M, at most 10 (image folders take all of timm's)"
            )
        super().__init__(int(found[2]), round(3 * float(found[1])), fill=[round(255 * m) for m in mean])

    def batch(self, x: Tensor, draws: np.ndarray) -> Tensor:
        """``x`` [b, C, H, W] (overwritten) with the operations of ``draws``, float [b, 2 num_ops] in [0, 1)."""
        kinds = list(self._AUGMENTATION_SPACE.items())
        for k in range(self.num_ops):
            chosen = (draws[:, 2 * k] * len(kinds)).astype(int)
            negative = draws[:, 2 * k + 1] < 0.5
            for kind, (name, (magnitudes, signed)) in enumerate(kinds):
                values = magnitudes(self.num_magnitude_bins, *x.shape[-2:])
                size = 0.0 if values is None else float(values[self.magnitude])
                for sign in (1, -1) if signed else (1,):
                    which = chosen == kind
                    if signed:
                        which &= negative == (sign < 0)
                    if name != "Identity" and which.any():
                        index = torch.from_numpy(np.flatnonzero(which)).to(x.device)
                        some = x.index_select(0, index)
                        some = self._apply_image_or_video_transform(
                            some, name, sign * size, interpolation=self.interpolation, fill=self._fill
                        )
                        x.index_copy_(0, index, some)
        return x


_ERASE = RandomErasing(probability=1.0, mode="pixel", device="cpu")


def erase(x: Tensor, starts: Sequence[int], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """timm's random erasing (Zhong et al. 2020, arXiv:1708.04896) of one box in each of ``x`` [b, C, H, W].

    Image i draws from the stream ``starts[i]``. The box becomes normal noise around ``mean`` with ``std`` (0..1 a
    channel), as far as pixels reach.
    """
    shift, scale = (255 * torch.tensor(v, device=x.device)[:, None, None] for v in (mean, std))
    noisy = (x.float() - shift) / scale
    for image, start in zip(noisy, starts):
        with seeds.global_generators(start):
            _ERASE(image)
    return (noisy * scale + shift).round().clamp(0, 255).to(torch.uint8)
