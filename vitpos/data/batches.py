"""The batches of an epoch: which samples, in which order, on which process."""

from __future__ import annotations

import torch
from torch import Tensor

from vitpos import seeds


def epoch_batches(n: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world: int = 1) -> list[Tensor]:
    """This epoch's batches of indices, each int64 [batch_size / world]; an incomplete last one is dropped.

    Each global batch is the same for every number of processes; rank r takes the r-th of its equal parts.
    """
    if batch_size % world:
        raise ValueError(f"train.batch_size={batch_size} cannot be split evenly among {world} processes")
    if not 1 <= batch_size <= n:
        raise ValueError(f"train.batch_size={batch_size} must lie in 1..{n}, the number of training images")
    order = torch.randperm(n, generator=seeds.generator(seed, "order", epoch))
    share = batch_size // world
    return [
        order[start + rank * share : start + (rank + 1) * share] for start in range(0, n - batch_size + 1, batch_size)
    ]


def eval_batches(n: int, batch_size: int) -> list[Tensor]:
    """All indices 0..n-1 in order, in batches of at most batch_size."""
    return list(torch.arange(n).split(batch_size))
