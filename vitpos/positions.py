"""Where the patches are: coordinates of a grid, the resize policies, and learned tables at any coordinate.

Coordinates are (y, x), row-major, in units of patches: the patch in row i and column j is at (i, j).
Legend: B batch, N patches, H rows, W columns, D channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

Extent = tuple[int, int]


@dataclass(frozen=True)
class Positions:
    """The positions of one forward pass.

    ``coords`` [1 | B, N, 2] as (y, x), float32 or float64; ``extent`` (H, W) of the grid that they lie in.
    ``cells`` says that they are different cells of that grid, ``full`` that they are all of them in row-major
    order, which lets an encoding answer with a compact, structured value.
    """

    coords: Tensor
    extent: Extent
    cells: bool = False
    full: bool = False

    def keep(self, indices: Tensor) -> Positions:
        """The positions of the patches that stayed: ``indices`` [B, K] into N (patch dropout)."""
        coords = self.coords.expand(indices.shape[0], -1, -1)
        kept = coords.gather(1, indices.unsqueeze(-1).expand(-1, -1, 2))  # [B, K, 2]
        return replace(self, coords=kept, full=False)


def grid(
    height: int, width: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Positions:
    """All cells of a height x width grid, row-major.

    >>> grid(2, 3).coords[0].tolist()
    [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0], [1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    """
    y = torch.arange(height, device=device, dtype=dtype)
    x = torch.arange(width, device=device, dtype=dtype)
    coords = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).reshape(1, height * width, 2)
    return Positions(coords, (height, width), cells=True, full=True)


def explicit(
    coords: Tensor, extent: Extent | None, default: Extent, dtype: torch.dtype, device: torch.device | None = None
) -> Positions:
    """Positions from a user's ``coords`` [N, 2] or [1 | B, N, 2]; ``extent`` defaults to the image's own grid."""
    if not isinstance(coords, Tensor):
        raise TypeError(f"coords must be a tensor [N, 2] or [B, N, 2] as (y, x), got {type(coords).__name__}")
    if coords.ndim == 2:
        coords = coords.unsqueeze(0)
    if coords.ndim != 3 or coords.shape[-1] != 2:
        raise ValueError(f"coords must be [N, 2] or [B, N, 2] as (y, x), got shape {tuple(coords.shape)}")
    if not torch.compiler.is_compiling() and not coords.isfinite().all():
        raise ValueError("coords must be finite numbers")
    if extent is not None:
        check_grid("extent", extent)
    return Positions(coords.to(device, dtype), default if extent is None else (extent[0], extent[1]))


def check_grid(what: str, grid: Any) -> None:
    """ValueError unless ``grid`` is (H, W), two whole numbers of at least 1."""
    whole = isinstance(grid, (tuple, list)) and len(grid) == 2 and all(isinstance(side, int) for side in grid)
    if not (whole and min(grid) >= 1):
        raise ValueError(f"{what} must be two whole numbers (H, W) of at least 1, got {grid!r}")


def scale(extent: Extent, reference: Extent) -> tuple[float, float]:
    """How much a step of one patch on ``extent`` measures on the ``reference`` grid, per axis."""
    return reference[0] / extent[0], reference[1] / extent[1]


def sizes_left_open() -> bool:
    """Whether a graph is being made (compiled, exported, traced) that may serve other sizes than those at hand."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def vector(values: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers [n] as a tensor of the dtype and on the device of ``like``.

    ``new_tensor`` would write sizes that a compiled, exported or traced graph keeps open into it as constants.
    """
    if not sizes_left_open():
        return like.new_tensor(values)
    kind: Any = {"dtype": like.dtype, "device": like.device}
    return torch.stack([v.to(**kind) if isinstance(v, Tensor) else torch.scalar_tensor(v, **kind) for v in values])


def surely_equal(extent: Extent, other: Extent) -> bool:
    """Whether two extents are equal; False where that would tie a compiled, exported or traced graph to one size."""
    return not torch.jit.is_tracing() and all(statically_known_true(a == b) for a, b in zip(extent, other))


def into(coords: Tensor, extent: Extent, reference: Extent) -> Tensor:
    """Map coordinates [..., 2] on ``extent`` to the same place of the image on the ``reference`` grid.

    A patch covers [i - 1/2, i + 1/2), so the image's borders map to its borders.

    >>> into(torch.tensor([[0.0, 0.0], [3.0, 1.0]]), extent=(4, 2), reference=(2, 2)).tolist()
    [[-0.25, 0.0], [1.25, 1.0]]
    """
    factor = vector(scale(extent, reference), coords)
    return (coords + 0.5) * factor - 0.5


def augment(
    pos: Positions,
    *,
    shift: float = 0.0,
    stretch: float = 1.0,
    rescale: float = 1.0,
    jitter: float = 0.0,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Coordinates [samples, N, 2] for training, drawn anew at each call: one mechanism for every encoding.

    In coordinates that run from -1 to 1 over the image, in this order: both axes move by U(-shift, shift), are
    multiplied by a log-uniform factor in [1 / stretch, stretch] each and by one in [1 / rescale, rescale] together
    (DINOv3, arXiv:2508.10104); then each patch moves by a normal of standard deviation ``jitter`` patches, clamped
    to half a patch (ComRoPE, arXiv:2506.03737). One draw for a whole batch (``samples=1``) is the default; with a
    draw per sample, a bias takes memory B x heads x N x N instead of heads x N x N.

    >>> pos = grid(1, 2)
    >>> augment(pos).tolist()
    [[[0.0, 0.0], [0.0, 1.0]]]
    """
    for name, value, least in (
        ("shift", shift, 0),
        ("jitter", jitter, 0),
        ("stretch", stretch, 1),
        ("rescale", rescale, 1),
    ):
        if not least <= value < float("inf"):
            raise ValueError(f"coordinate augmentation: {name}={value!r} must be at least {least}")
    coords = pos.coords
    device = generator.device if generator is not None else coords.device

    def uniform(*shape: int) -> Tensor:
        drawn = 2 * torch.rand(*shape, generator=generator, device=device, dtype=coords.dtype) - 1
        return drawn.to(coords.device)

    side = vector(pos.extent, coords)
    unit = 2 * (coords + 0.5) / side - 1
    unit = unit + shift * uniform(samples, 1, 2)
    unit = unit * (math.log(stretch) * uniform(samples, 1, 2)).exp()
    unit = unit * (math.log(rescale) * uniform(samples, 1, 1)).exp()
    moved = torch.randn(samples, coords.shape[1], 2, generator=generator, device=device, dtype=coords.dtype)
    return (unit + 1) / 2 * side - 0.5 + (jitter * moved.to(coords.device)).clamp(-0.5, 0.5)


def sample_line(table: Tensor, at: Tensor) -> Tensor:
    """A learned table [S, D] at real coordinates ``at`` [...]: linear between entries, clamped at the ends.

    >>> sample_line(torch.tensor([[0.0], [10.0], [30.0]]), torch.tensor([0.0, 0.5, 1.25, 9.0])).flatten().tolist()
    [0.0, 5.0, 15.0, 30.0]
    """
    table = table.to(at.dtype)
    last = table.shape[0] - 1
    at = at.clamp(0, last)
    low = at.floor().clamp(max=max(last - 1, 0))
    weight = (at - low).unsqueeze(-1)
    low = low.long()
    return torch.lerp(table[low], table[(low + 1).clamp(max=last)], weight)


def sample_plane(table: Tensor, at: Tensor) -> Tensor:
    """A learned table [H, W, D] at real coordinates ``at`` [..., 2]: bilinear, clamped at the borders."""
    table = table.to(at.dtype)
    height, width, _ = table.shape
    y = at[..., 0].clamp(0, height - 1)
    x = at[..., 1].clamp(0, width - 1)
    top, left = y.floor().clamp(max=max(height - 2, 0)), x.floor().clamp(max=max(width - 2, 0))
    dy, dx = (y - top).unsqueeze(-1), (x - left).unsqueeze(-1)
    top, left = top.long(), left.long()
    bottom, right = (top + 1).clamp(max=height - 1), (left + 1).clamp(max=width - 1)
    upper = torch.lerp(table[top, left], table[top, right], dx)
    lower = torch.lerp(table[bottom, left], table[bottom, right], dx)
    return torch.lerp(upper, lower, dy)


def resample_plane(table: Tensor, extent: Extent) -> Tensor:
    """A learned table [H, W, D] resampled to ``extent``: bicubic with antialiasing, as timm does, in float32."""
    if surely_equal((table.shape[0], table.shape[1]), extent):
        return table
    image = table.permute(2, 0, 1).unsqueeze(0)  # [1, D, H, W]
    image = image if image.dtype == torch.float64 else image.float()
    if torch.compiler.is_compiling() and image.requires_grad and torch.is_grad_enabled():
        # PyTorch cannot compile the gradient of this operation for sizes left open; its weights have none.
        rows, columns = (torch.eye(side, dtype=image.dtype, device=image.device) for side in image.shape[-2:])
        down = _resample(rows[None, None], (extent[0], rows.shape[0]))  # [1, 1, H, H0]
        across = _resample(columns[None, None], (columns.shape[0], extent[1]))  # [1, 1, W0, W]
        image = down @ image @ across
    else:
        image = _resample(image, extent)
    return image[0].permute(1, 2, 0).to(table.dtype)


def _resample(image: Tensor, extent: Extent) -> Tensor:
    return F.interpolate(image, size=extent, mode="bicubic", antialias=True, align_corners=False)
