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
    ``repeats`` a batch holds so many copies of each of its samples (Hoffer et al. 2020, arXiv:1901.09335), copy k as
    index + k n, and an epoch, as long as before, sees that much fewer of the samples.
    """
    if batch_size % world:
        raise ValueError(f"train.batch_size={batch_size} cannot be split evenly among {world} processes")
    if not 1 <= batch_size <= n:
        raise ValueError(f"train.batch_size={batch_size} must lie in 1..{n}, the number of training images")
    if repeats < 1 or batch_size % repeats:
        raise ValueError(f"train.repeats={repeats} does not divide train.batch_size={batch_size}")
    order = torch.randperm(n, generator=seeds.generator(seed, "order", epoch))
    share, samples = batch_size // world, batch_size // repeats
    copies = n * torch.arange(repeats)[:, None]
    batches = [(order[i * samples : (i + 1) * samples] + copies).flatten() for i in range(n // batch_size)]
    return [batch[rank * share : (rank + 1) * share] for batch in batches]


def eval_batches(n: int, batch_size: int) -> list[Tensor]:
    """All indices 0..n-1 in order, in batches of at most batch_size."""
    return list(torch.arange(n).split(batch_size))
