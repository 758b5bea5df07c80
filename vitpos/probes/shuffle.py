"""Shuffle: what is lost when the patches of an image change places.

The image is cut into blocks of k x k patches, and the blocks change places by a permutation drawn for each image:
S_pi x has block pi(n) of x at place n. Inside a block nothing changes, so small k destroys the arrangement and a
large k leaves parts of the object whole. Sensitivity = accuracy - accuracy shuffled, on the same images.

A transformer without position that reads no pixel beyond its patch computes a function of the set of patches: at
k = 1 it loses nothing. That is tried in float64 and reported as an identity that holds or fails. Any other model's
sensitivity mixes two things: how much it uses the arrangement, and how much of the class the arrangement holds.

Source: Naseer et al. 2021, Intriguing Properties of Vision Transformers, arXiv:2105.10497, section 3 (permuted blocks);
Ostmeier et al. 2024, LieRE, arXiv:2406.10322 (shuffled patches as a test of an encoding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpos import seeds, stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._exact import certificate, relative_change, verdict
from vitpos.probes._subject import Batch
from vitpos.probes._views import View, table

Block = tuple[int, int]  # pixels


def shuffle_blocks(images: Tensor, block: Block, order: Tensor) -> Tensor:
    """[b, C, H, W] with the blocks (row-major) in `order` [b, blocks]: place n shows block order[:, n]."""
    b, c, height, width = images.shape
    rows, columns = height // block[0], width // block[1]
    parts = images.view(b, c, rows, block[0], columns, block[1]).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = order.to(images.device)
    moved = parts[torch.arange(b, device=images.device)[:, None], order]  # [b, blocks, C, h, w]
    return moved.view(b, rows, columns, c, *block).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def orders(ids: Sequence[str], draw: int, side: int, count: int) -> Tensor:
    """A random permutation of `count` blocks a sample [b, count]; it depends on id, draw and block side alone."""
    numbers = seeds.uniform(seeds.stream(0, "probe-shuffle", side, draw), seeds.sample_keys(list(ids)), count)
    return torch.from_numpy(numbers.argsort(axis=1))


def block_sides(given: Any, grid: tuple[int, int]) -> list[int]:
    """Sides of blocks in patches; "auto": 1, 2, 4, ... as long as they divide the grid into two blocks or more."""
    if given == "auto":
        halves = [2**k for k in range(max(grid).bit_length())]
        return [k for k in halves if not (grid[0] % k or grid[1] % k) and grid[0] * grid[1] >= 2 * k * k]
    if not isinstance(given, list | tuple) or not given or not all(isinstance(k, int) and k >= 1 for k in given):
        raise ValueError(f"shuffle.blocks must be auto or a list of block sides in patches, got {given!r}")
    for k in given:
        if grid[0] % k or grid[1] % k or grid[0] * grid[1] < 2 * k * k:
            fitting = [j for j in range(1, max(grid) + 1) if not (grid[0] % j or grid[1] % j)]
            fitting = [j for j in fitting if grid[0] * grid[1] >= 2 * j * j]
            raise ValueError(
                f"shuffle.blocks: {k} does not cut a grid of {grid[0]}x{grid[1]} patches; fitting: {fitting}"
            )
    return list(given)


@register(
    "shuffle",
    definitions={
        "block": "Side of the square blocks that change places, in patches; inside a block nothing changes.",
        "shuffled": "Accuracy with the blocks of each image in a random order, averaged over several orders.",
        "sensitivity": "Accuracy minus accuracy shuffled, on the same images.",
        "vs_reference": "Consistency: share of shuffled images with the same decision as unshuffled.",
        "exact": "Largest relative change of a logit when single patches are shuffled, in float64. It is rounding "
        "error for a model that sees a set of patches, and for a constant one.",
    },
)
class Shuffle:
    """Options: `blocks` ("auto", or a list of block sides in patches), `draws`: permutations of each image,
    `images`: at most this many (0: all), `exact_images`: as many are also run in float64."""

    in_parts: ClassVar[bool] = True
    defaults: ClassVar[dict[str, Any]] = {"blocks": "auto", "draws": 3, "images": 0, "exact_images": 8}

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        patch, (height, width) = subject.patch, subject.size
        if height % patch[0] or width % patch[1] or height * width < 2 * patch[0] * patch[1]:
            raise NotApplicable(
                f"an image of {height}x{width} px is not two or more whole patches of {patch[0]}x{patch[1]} px"
            )
        if min(options["draws"], options["exact_images"]) < 1:
            raise ValueError(f"shuffle.draws and shuffle.exact_images must be at least 1, got {dict(options)}")
        grid = height // patch[0], width // patch[1]
        sides = block_sides(options["blocks"], grid)
        part, chosen = subject.some(options["images"])
        conditions = [(0, 0)] + [(side, draw) for side in sides for draw in range(options["draws"])]

        def render(batch: tuple[slice, Tensor], condition: tuple[int, int]) -> Tensor:
            (where, pixels), (side, draw) = batch, condition
            if side == 0:
                return pixels
            count = grid[0] * grid[1] // side**2
            return shuffle_blocks(
                pixels, (side * patch[0], side * patch[1]), orders(part.ids[where], draw, side, count)
            )

        def source(some: list[Batch]) -> Iterator[tuple[slice, Any]]:
            return ((where, (where, pixels)) for where, pixels in part.loaded(some))

        columns = part.sweep(conditions, render, "shuffle", source=source)

        exact, _ = part.precise().some(options["exact_images"])
        pixels = exact.pixels(exact.indices)
        order = orders(exact.ids, 0, 1, grid[0] * grid[1])
        change = relative_change(exact.logits(shuffle_blocks(pixels, patch, order)), exact.logits(pixels))
        return {
            "images": chosen,
            "grid": np.array(grid),
            "blocks": np.array([side for side, _ in conditions]),
            "pred": columns["pred"],
            "logit_change": columns["logit_change"],
            "exact/change": change,
        }

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        correct = arrays["pred"] == truth[arrays["images"]]
        blocks, pred = arrays["blocks"], arrays["pred"]
        rows = []
        for side in np.unique(blocks[blocks > 0]).tolist():
            drawn = blocks == side
            draws = int(drawn.sum())
            agreement = stats.reference_agreement(pred[drawn], pred[0])
            sensitivity = stats.ratio(correct[0] - correct[drawn].mean(axis=0))
            rows.append(
                {
                    "block": side,
                    "draws": draws,
                    "shuffled": stats.mean_over_images(correct[drawn].mean(axis=0), draws).as_dict(),
                    "sensitivity": sensitivity.as_dict() if sensitivity else None,
                    "vs_reference": stats.mean_over_images(agreement, draws).as_dict(),
                    "logit_change": float(arrays["logit_change"][drawn].max()),
                }
            )
        return {
            "images_used": len(arrays["images"]),
            "grid": arrays["grid"].tolist(),
            "unshuffled": stats.accuracy(correct[0]).as_dict(),
            "rows": rows,
            "exact": certificate(arrays["exact/change"]),
        }

    def scores(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, stats.Score]:
        correct, blocks = arrays["pred"] == truth[arrays["images"]], arrays["blocks"]
        return {
            f"{side}x{side}": stats.Score(correct[blocks == side].mean(axis=0), int((blocks == side).sum()))
            for side in np.unique(blocks[blocks > 0]).tolist()
        }

    def views(self, summary: dict[str, Any]) -> list[View]:
        grid = "x".join(map(str, summary["grid"]))
        exact = [verdict(summary["exact"]), summary["exact"]["largest"]]
        rows = [
            [f"{row['block']}x{row['block']}", summary["unshuffled"], row["shuffled"], row["sensitivity"],
             row["vs_reference"], *(exact if row["block"] == 1 else [None, None])]
            for row in summary["rows"]
        ]  # fmt: skip
        columns = {"block (patches)": "", "accuracy": "percent", "shuffled": "percent", "sensitivity": "percent",
                   "vs reference": "percent", "no change (float64)": "", "largest change": ""}  # fmt: skip
        note = (
            f"Blocks of patches change places at random on a grid of {grid} patches. Without position, and with "
            "patches that see nothing beyond themselves, shuffling single patches changes nothing."
        )
        return [table("shuffle", "Shuffled patches", note, columns, rows, brief=True)]
