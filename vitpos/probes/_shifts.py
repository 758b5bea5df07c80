"""Ways to move images [b, C, H, W] by (dy, dx) pixels, down and right positive, and lists of shifts. Not a probe.

Whole pixels: `crop_shift`, `circular_shift`, `reflect_shift`. Fractions, on a torus: `bilinear_shift`, `fourier_shift`.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

Shift = tuple[int, int]


def crop_shift(images: Tensor, shift: Shift, black: Tensor | float = 0.0) -> Tensor:
    """A window that slides over an image lying on black: vacated pixels are `black` ([1, C, 1, 1] where it differs by
    channel), content that leaves is lost."""
    (dy, dx), (h, w) = shift, images.shape[-2:]
    if shift == (0, 0):
        return images
    top, left = (min(max(d, 0), side) for d, side in zip((dy, dx), (h, w)))
    bottom, right = (max(min(side + d, side), 0) for d, side in zip((dy, dx), (h, w)))
    out = torch.empty_like(images)
    out[..., :top, :] = out[..., bottom:, :] = black
    out[..., top:bottom, :left] = out[..., top:bottom, right:] = black
    out[..., top:bottom, left:right] = images[..., top - dy : bottom - dy, left - dx : right - dx]
    return out


def circular_shift(images: Tensor, shift: Shift) -> Tensor:
    """What leaves on one side comes in on the other, with a seam."""
    return torch.roll(images, shift, dims=(-2, -1))


def reflect_shift(images: Tensor, shift: Shift) -> Tensor:
    """Vacated pixels show the image mirrored at its border pixels (which are not repeated)."""
    for dim, by in zip((-2, -1), shift):
        side = images.shape[dim]
        period = max(2 * side - 2, 1)
        index = (torch.arange(side, device=images.device) - by) % period
        images = images.index_select(dim, torch.minimum(index, period - index))
    return images


def bilinear_shift(images: Tensor, shift: tuple[float, float]) -> Tensor:
    """Fractions by linear interpolation between the two nearest whole shifts of each axis; wraps. It blurs: at half a
    pixel the finest detail is gone, so that part of any change is the blur's. Whole shifts are exact."""
    whole = [math.floor(by) for by in shift]
    y, x = (by - low for by, low in zip(shift, whole))
    images = torch.roll(images, whole, dims=(-2, -1))
    if not (y or x):
        return images
    from kornia.geometry.transform import translate  # here: it takes a quarter of a second to import

    # In float64 (on the CPU where the device has none): kornia's coordinates lie in -1..1, and rounding them in float32
    # costs 3e-5 at 224 pixels. The pixel that comes in on each side is the torus's own, and cut off again.
    device = "cpu" if images.device.type == "mps" else images.device
    padded = F.pad(images.to(device, torch.float64), (1, 0, 1, 0), mode="circular")
    moved = translate(padded, padded.new_tensor([[x, y]]))[..., 1:, 1:]
    return moved.to(images.device, images.dtype)


def fourier_shift(images: Tensor, shift: tuple[float, float]) -> Tensor:
    """Fractions by a phase ramp exp(-2 pi i f d) on each axis's spectrum: the shift of the band-limited image, without
    blur. The image is taken as periodic, so edges that do not meet ring along that seam, and values may leave 0..1. At
    the Nyquist frequency of an even side, where the direction of a wave is unknown, the factor is cos(pi d), the mean
    of both directions: real, and lost at half a pixel."""
    for dim, by in zip((-2, -1), shift):
        if by == 0:
            continue
        side = images.shape[dim]
        waves = torch.fft.rfftfreq(side, device=images.device, dtype=images.dtype) * side
        angle = -2 * math.pi * by / side * waves
        factor = torch.polar(torch.ones_like(angle), angle)
        if side % 2 == 0:
            factor[-1] = math.cos(math.pi * by)
        shape = [-1 if d == dim % images.ndim else 1 for d in range(images.ndim)]
        images = torch.fft.irfft(torch.fft.rfft(images, dim=dim) * factor.view(shape), n=side, dim=dim)
    return images


def subpatch_shifts(patch: tuple[int, int]) -> list[Shift]:
    """(0, 0) and the quarter-patch phases (every pixel if the patch has four or fewer)."""
    rows, columns = (range(0, p, max(1, p // 4)) for p in patch)
    return list(itertools.product(rows, columns))


def patch_shifts(patch: tuple[int, int], size: tuple[int, int], steps: int) -> list[Shift]:
    """(0, 0), then all whole-patch shifts up to `steps` patches each way that leave part of the image in
    view."""
    rows, columns = ([k * p for k in range(-steps, steps + 1) if abs(k * p) < s] for p, s in zip(patch, size))
    return sorted(itertools.product(rows, columns), key=lambda d: (d != (0, 0), d))


def phase_shifts(patch: tuple[int, int], room: tuple[int, int]) -> list[Shift]:
    """Along the diagonal from (0, 0) to two patches by eighths of a patch (every pixel of small ones), up to `room`."""
    parts = min(max(patch), 8)
    found = [(round(k * patch[0] / parts), round(k * patch[1] / parts)) for k in range(2 * parts + 1)]
    return list(dict.fromkeys(d for d in found if d[0] <= room[0] and d[1] <= room[1]))
