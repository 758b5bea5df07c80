"""Conditional position encoding: a convolution over the grid of patches."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpos.encoding import Encoding, Geometry, require_at_least
from vitpos.positions import Extent, Positions, vector
from vitpos.spec import register


def surround(image: Tensor, by: int, padding: str) -> Tensor:
    """``image`` [B, D, H, W] continued by ``by`` patches on each side: on a torus, or mirrored at its last patches.

    Any side will do: it is continued as often as it takes, and a single row is its own mirror image.

    >>> row = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    >>> surround(row, 1, "circular")[0, 0, 1].tolist(), surround(row, 1, "reflect")[0, 0, 1].tolist()
    ([3.0, 1.0, 2.0, 3.0, 1.0], [2.0, 1.0, 2.0, 3.0, 2.0])
    """
    for dim in (2, 3):
        side = image.shape[dim]
        index = torch.arange(-by, side + by, device=image.device)
        if padding == "circular":
            index = index % side
        else:
            period = max(2 * side - 2, 1)
            index = torch.minimum(index % period, period - index % period)
        image = image.index_select(dim, index)
    return image


@register("cpe")
class ConditionalEncoding(Encoding):
    """x <- x + DWConv(x) + b after the first block: a depthwise convolution of the patches on their grid.

    Class and register tokens pass by. Position comes in through the border only: ``padding`` with zeros (as
    published) tells it, ``circular`` makes the grid a torus that has none (circular shifts by patches then change
    nothing, exactly), ``reflect`` mirrors at the last patch. ``kernel`` is the side of the filter, odd. The
    weights start as those of a torch convolution.

    Dropped patches are zeros in the grid. Neighbours are patches whose coordinates differ by whole steps: explicit
    coordinates must be whole numbers, no two patches at one place (ValueError otherwise). They may lie anywhere: a
    grid of ``extent`` is moved by the fewest steps that make it hold them all (ValueError if they span more), so
    the same whole vector added to all coordinates of an image changes nothing.

    A filter that takes the right neighbour (its entry at dy = 0, dx = 1), on one row:

    >>> from vitpos.positions import grid
    >>> encoding = ConditionalEncoding(Geometry(dim=1, heads=1, head_dim=1, depth=1, grid=(1, 3)))
    >>> _, _ = encoding.conv.weight.data.zero_(), encoding.conv.bias.data.zero_()
    >>> encoding.conv.weight.data[0, 0, 1, 2] = 1.0
    >>> encoding.mix(torch.tensor([[[1.0], [2.0], [4.0]]]), grid(1, 3)).flatten().tolist()  # 1 + 2, 2 + 4, 4 + 0
    [3.0, 6.0, 4.0]
    """

    summary = "depthwise convolution of the patches after the first block (PEG); position comes from the border"
    paper = "Chu et al. 2021, Conditional Positional Encodings for Vision Transformers, arXiv:2102.10882, section 3.2"
    laws = frozenset({"offset"})
    variants = {
        "padding='circular'": frozenset({"offset", "circular"}),
        "padding='reflect'": frozenset({"offset"}),
    }
    zeros = ("conv.weight", "conv.bias")

    def __init__(
        self,
        geometry: Geometry,
        *,
        padding: Literal["zeros", "circular", "reflect"] = "zeros",
        kernel: int = 3,
    ) -> None:
        super().__init__(geometry)
        require_at_least("kernel", kernel, 1, self.name)
        if kernel % 2 == 0:
            raise ValueError(f"{self.name}: kernel={kernel} must be odd; nearest: {kernel - 1} or {kernel + 1}")
        self.padding = padding
        self.conv = nn.Conv2d(geometry.dim, geometry.dim, kernel, groups=geometry.dim)

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()

    def mix(self, patches: Tensor, pos: Positions) -> Tensor:
        if pos.full:
            return patches + self._convolved(patches, pos.extent)
        batch, count, dim = patches.shape
        index = self._cells(pos).unsqueeze(-1).expand(batch, count, dim)
        cells = patches.new_zeros(batch, pos.extent[0] * pos.extent[1], dim).scatter(1, index, patches)
        return patches + self._convolved(cells, pos.extent).gather(1, index)

    def _convolved(self, cells: Tensor, extent: Extent) -> Tensor:
        """The convolution of all cells [B, H W, D] of a grid, in their dtype."""
        image = cells.mT.unflatten(2, extent)  # [B, D, H, W]
        margin = self.conv.kernel_size[0] // 2
        if self.padding != "zeros":
            image, margin = surround(image, margin, self.padding), 0
        given: Any = self.conv  # its bias is there
        weight, bias = given.weight.to(cells.dtype), given.bias.to(cells.dtype)
        return F.conv2d(image, weight, bias, padding=margin, groups=image.shape[1]).flatten(2).mT.to(cells.dtype)

    def _cells(self, pos: Positions) -> Tensor:
        """The index [1 | B, N] of each patch into the cells of a grid of ``pos.extent`` that holds them all."""
        if pos.cells:
            return (pos.coords[..., 0] * pos.extent[1] + pos.coords[..., 1]).long()
        off = pos.coords - pos.coords.round() != 0  # also true of inf and nan
        if off.any():
            raise ValueError(
                f"{self.name} convolves a grid of patches, so coordinates must be whole numbers; "
                f"got {pos.coords[off][0].item()}"
            )
        side = vector(pos.extent, pos.coords)
        low, high = pos.coords.amin(1, keepdim=True), pos.coords.amax(1, keepdim=True)
        span = (high - low).amax((0, 1)) + 1
        if (span > side).any():
            raise ValueError(
                f"{self.name}: coordinates span {int(span[0])}x{int(span[1])} patches, more than the grid of "
                f"{pos.extent[0]}x{pos.extent[1]}; give a larger extent"
            )
        origin = torch.zeros_like(low).clamp(high - side + 1, low)
        y, x = (pos.coords - origin).long().unbind(-1)
        index = y * pos.extent[1] + x
        if (index.sort(dim=1).values.diff(dim=1) == 0).any():
            raise ValueError(f"{self.name}: two patches have the same coordinates, so the grid has no room for both")
        return index
