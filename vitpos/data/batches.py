"""The batches of an epoch: which samples, in which order, on which process."""

from __future__ import annotations

import torch
from torch import Tensor

from vitpos import seeds


def epoch_batches(
    n: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world: int = 1, repeats: int = 1
) -> list[Tensor]:
    """This epoch's batches of indices, each int64 [batch_size / world]; an incomplete last one is dropped.

    Each global batch is the same for every number of processes; rank r takes the r-th of its equal parts. With
    ``repeats`` each sample comes so many times in a row (Hoffer et al. 2020, arXiv:1901.09335), copy k as index + k n,
    and an epoch, as long as before, sees that much fewer of the samples. Batches are sorted by copy, so that copies
    are spread over processes.
    """
    if batch_size % world:
        raise ValueError(f"train.batch_size={batch_size} cannot be split evenly among {world} processes")
    if not 1 <= batch_size <= n:
        raise ValueError(f"train.batch_size={batch_size} must lie in 1..{n}, the number of training images")
    order = torch.randperm(n, generator=seeds.generator(seed, "order", epoch))
    place = torch.arange(n // batch_size * batch_size)
    copy = place % repeats
    batches = (order[place // repeats] + n * copy).view(-1, batch_size)
    batches = batches.gather(1, copy.view_as(batches).argsort(dim=1, stable=True))
    share = batch_size // world
    return list(batches[:, rank * share : (rank + 1) * share])


def eval_batches(n: int, batch_size: int) -> list[Tensor]:
    """All indices 0..n-1 in order, in batches of at most batch_size."""
    return list(torch.arange(n).split(batch_size))
