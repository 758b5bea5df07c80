"""Tests beside the intervals: which differences are real, which are small enough not to matter, who comes where.

Two models are compared by McNemar's test on the same images; two encodings by the crossed analysis over seeds and
images (`hierarchy.paired`). Many comparisons of one table are corrected together (Holm).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import permutation_test
from statsmodels.stats.contingency_tables import mcnemar as mcnemar_test

from vitpos import hierarchy

ALPHA = 0.05
MOST_FLIPS = 12  # seeds up to which all 2^R assignments of signs are counted; beyond, a sample of as many


def mcnemar(correct: ArrayLike, baseline: ArrayLike) -> float:
    """Two-sided exact p that two models, right or wrong on the same images [N], are equally accurate (McNemar 1947,
    Psychometrika 12). It speaks of these two models, not of what they were trained with."""
    a, b = np.asarray(correct), np.asarray(baseline)
    if a.ndim != 1 or a.shape != b.shape or not len(a) or not np.isin(np.concatenate([a, b]), (0, 1)).all():
        raise ValueError(f"expected two arrays of 0 or 1 over the same images, got shapes {a.shape} and {b.shape}")
    a, b = a.astype(bool), b.astype(bool)
    cells = [[(a & b).sum(), (a & ~b).sum()], [(~a & b).sum(), (~a & ~b).sum()]]
    return float(mcnemar_test(cells, exact=True).pvalue)


def smallest_p(seeds: int) -> float:
    """The smallest two-sided p that signs of R differences can give, 2^(1 - R): 0.25 at three seeds, so that 0.05 is
    not attainable below six."""
    return 2.0 ** (1 - seeds)


def sign_flip(differences: ArrayLike) -> float:
    """Two-sided p of the mean of R seeds' differences [R] under random signs (Fisher 1935, The Design of Experiments,
    section 21): free of any distribution, over seeds, for these images. Never below `smallest_p(R)`."""
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"expected differences [R seeds], got shape {values.shape}")
    if len(values) == 1:
        return 1.0
    count = np.inf if len(values) <= MOST_FLIPS else 2**MOST_FLIPS
    found = permutation_test(
        (values,), np.mean, permutation_type="samples", vectorized=True, n_resamples=count,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.pvalue)


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """p values [..., M] adjusted for each other, so that with probability 0.95 none at or below 0.05 is there by chance
    (Holm 1979, Scand. J. Stat. 6), whatever their dependence."""
    # Not statsmodels' multipletests: it collects the process's garbage at each call, a second where torch is loaded.
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, axis=-1)
    steps = np.take_along_axis(values, order, axis=-1) * np.arange(values.shape[-1], 0, -1)
    adjusted = np.minimum(np.maximum.accumulate(steps, axis=-1), 1)
    return np.take_along_axis(adjusted, np.argsort(order, axis=-1), axis=-1)


@dataclass(frozen=True)
class Rank:
    """A rank among `of` encodings, 1 the highest mean, and the ranks that the data leave possible."""

    value: int
    low: int
    high: int
    of: int


def better(scores: ArrayLike, alpha: float = ALPHA, *, bounded: bool = True) -> NDArray[np.bool_]:
    """[..., K, K]: has encoding j a higher mean than k, all pairs corrected together? From scores [..., K, R, N] at the
    same seeds, in 0..1 if `bounded`."""
    table = np.asarray(scores, dtype=np.float64)
    count = table.shape[-3]
    first, second = np.triu_indices(count, 1)
    parts = [hierarchy.paired(table[..., j, :, :], table[..., k, :, :], bounded=bounded) for j, k in zip(first, second)]
    p = holm(np.stack([hierarchy.different(part) for part in parts], axis=-1))
    ahead = np.stack([part.mean > 0 for part in parts], axis=-1)
    found = np.zeros((*table.shape[:-3], count, count), dtype=bool)
    found[..., first, second] = (p <= alpha) & ahead
    found[..., second, first] = (p <= alpha) & ~ahead
    return found


def ranks(scores: ArrayLike, alpha: float = ALPHA, *, bounded: bool = True) -> list[Rank]:
    """Ranks of K encodings by mean score, with intervals that hold for all of them at once, from scores [K, R, N], in
    0..1 if `bounded`.

    Encoding k comes after all that are better and before all that are worse, where that is certain after Holm's
    correction over all pairs (Mogstad, Romano, Shaikh & Wilhelm 2024, Rev. Econ. Stud. 91). A bootstrap of ranks is not
    used: with equal encodings it covers far less than it says.
    """
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 3 or len(table) < 2:
        raise ValueError(f"expected scores [K >= 2 encodings, R seeds, N images], got shape {table.shape}")
    means, wins, count = table.mean(axis=(1, 2)), better(table, alpha, bounded=bounded), len(table)
    return [
        Rank(1 + int((means > means[k]).sum()), 1 + int(wins[:, k].sum()), count - int(wins[k].sum()), count)
        for k in range(count)
    ]
