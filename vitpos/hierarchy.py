"""Intervals and tests over seeds and images, for statements about an encoding instead of one model.

Scores are a table [R seeds, N images]: every seed's model answered the same images, so that seeds and images are
crossed, and neither is nested in the other. With y = mean + seed + image + (seed x image) the variance of the grand
mean is that of the seeds' means over R, plus that of the images' means over N, minus the interaction that both hold
(two-way random effects; Searle, Casella & McCulloch 1992, Variance Components, chapter 4). Its two parts have R - 1
and N - 1 degrees of freedom, and the quantile is the mean of the two t quantiles weighted by the parts (Cochran & Cox
1957, Experimental Designs, section 4.14). Satterthwaite's degrees of freedom were tried and dropped: at three seeds
such an interval covers less than it says (docs/statistics.md has the measured figures).

Shares in 0..1 have Wilson's interval at the effective sample size. Scores on another scale (`bounded=False`: linearised
ratios, pixels) have a t interval on that scale, from the same variance and quantile; nothing is cut off at 0, 1 or -1.

What comes back speaks of *this encoding under this recipe*: of other seeds, on other images like these. One seed
cannot say it. Shapes: R seeds, N images; `...` are leading axes that are computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from vitpos.stats import BATCH, LEVEL, RESAMPLES, Estimate

ROUNDING = 1e-6  # of a quantity about as large as 1
OVER_SEEDS = "seeds and images, for this encoding under this recipe"
OVER_PAIRED_SEEDS = "seeds and images, paired by both, for these two encodings under this recipe"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class SeedEstimate(Estimate):
    """An estimate over `seeds` seeds and `n` images."""

    seeds: int = 0


@dataclass(frozen=True)
class Crossed:
    """A grand mean [...] with the two parts of its variance, each [...]: from the seeds (with the interaction), and
    from the images beyond that. `bounded`: of scores in 0..1, or of their differences."""

    mean: Array
    seed_part: Array
    image_part: Array
    seeds: int
    images: int
    bounded: bool = True

    @property
    def variance(self) -> Array:
        return self.seed_part + self.image_part

    def quantile(self, tail: ArrayLike) -> Array:
        """What the mean exceeds by chance with probability `tail`, in standard errors."""
        tail = np.asarray(tail, dtype=np.float64)
        of_seeds, of_images = -stdtrit(self.seeds - 1, tail), -stdtrit(self.images - 1, tail)
        total = self.variance
        share = np.divide(self.seed_part, total, out=np.zeros_like(total), where=total > 0)
        return share * of_seeds + (1 - share) * of_images

    def beyond(self, gap: Array) -> Array:
        """Probability that chance alone puts the mean this far up, |gap|, or further."""
        error = np.sqrt(self.variance)
        distance = np.abs(gap)
        t = np.divide(distance, error, out=np.where(distance > 0, np.inf, 0.0), where=error > 0)
        low, high = np.full_like(t, -690), np.full_like(t, np.log(0.5))  # of the logarithm, by bisection
        for _ in range(60):
            middle = (low + high) / 2
            further = self.quantile(np.exp(middle)) < t
            low, high = np.where(further, low, middle), np.where(further, middle, high)
        return np.exp(high)


def _table(scores: ArrayLike, bounded: bool) -> Array:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim < 2 or array.shape[-2] < 2 or array.shape[-1] < 2:
        raise ValueError(f"expected scores [R >= 2 seeds, N >= 2 images], got shape {array.shape}")
    if bounded and not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"expected scores in 0..1, got {array.min():g}..{array.max():g}")
    if not np.isfinite(array).all():
        raise ValueError("expected finite scores")
    return array


def crossed(table: Array, *, bounded: bool = True) -> Crossed:
    """The crossed analysis of variance of scores [..., R, N], or of their differences."""
    seeds, images = table.shape[-2:]
    by_seed, by_image = table.mean(axis=-1), table.mean(axis=-2)
    mean = by_seed.mean(axis=-1)
    of_seeds, of_images = by_seed.var(axis=-1, ddof=1), by_image.var(axis=-1, ddof=1)
    away = table - mean[..., None, None]  # first, lest a mean far from 0 hide small differences
    squares = np.einsum("...rn,...rn->...", away, away)
    rest = squares - images * (seeds - 1) * of_seeds - seeds * (images - 1) * of_images
    interaction = np.maximum(rest, 0) / ((seeds - 1) * (images - 1))
    # The seeds' part is theirs whole; the images' may come out below 0, where it is none.
    image_part = np.maximum(of_images / images - interaction / (seeds * images), 0)
    return Crossed(mean, of_seeds / seeds, image_part, seeds, images, bounded)


def _wilson(p: Array, n: Array, quantile: Array) -> tuple[Array, Array]:
    square = quantile**2 / n
    centre = (p + square / 2) / (1 + square)
    reach = np.sqrt(square * p * (1 - p) + square**2 / 4) / (1 + square)
    return np.minimum(np.maximum(centre - reach, 0), p), np.maximum(np.minimum(centre + reach, 1), p)


def _reach(parts: Crossed, level: float) -> Array:
    return parts.quantile((1 - level) / 2) * np.sqrt(parts.variance)


def mean_bounds(
    table: Array, repeats: int = 1, level: float = LEVEL, *, bounded: bool = True
) -> tuple[Array, Array, Array]:
    """`mean` of many tables at once: scores [..., R, N] -> (value, low, high), each [...]."""
    parts = crossed(table, bounded=bounded)
    if not bounded:
        reach = _reach(parts, level)
        return parts.mean, parts.mean - reach, parts.mean + reach
    p, most = parts.mean, parts.seeds * parts.images * max(repeats, 1)
    binomial = p * (1 - p)
    quantile = parts.quantile((1 - level) / 2)
    # Never more than the answers could be worth if all were independent.
    variance = np.maximum(parts.variance, binomial / most)
    n = np.divide(binomial, variance, out=np.full_like(p, parts.images), where=variance > 0)
    low, high = _wilson(p, n, quantile)
    return p, low, high


def mean(scores: ArrayLike, repeats: int = 1, level: float = LEVEL, *, bounded: bool = True) -> SeedEstimate:
    """Mean of an encoding's scores over seeds and images, scores [R, N], in 0..1 if `bounded`.

    Wilson's interval at the effective sample size p (1 - p) / variance, with the crossed variance and its quantile.
    Where all seeds are right on all images (or wrong) nothing varies: it is Wilson's at N images, one answer an image.
    `repeats` is how many measurements each score averages. Scores on another scale have the interval of t, of no width
    where nothing varies: there is no least disagreement that could stand for it.
    """
    table = _table(scores, bounded)
    value, low, high = mean_bounds(table, repeats, level, bounded=bounded)
    return SeedEstimate(
        float(value), float(low), float(high), table.shape[1],
        f"{'wilson' if bounded else 't'}, seeds crossed with images", OVER_SEEDS, level, table.shape[0],
    )  # fmt: skip


def resampled_means(table: Array, seed: int = 0) -> Array:
    """Grand means [..., B] of scores [..., R, N] whose seeds and images are drawn again, `RESAMPLES` times, alike for
    all leading axes. The draws depend on R, N and `seed` only."""
    rng = np.random.default_rng(seed)
    seeds, images = table.shape[-2:]
    times = _times(rng, seeds, RESAMPLES)
    each = max(1, BATCH // images)
    sums = [table @ _times(rng, images, min(each, RESAMPLES - start)).T for start in range(0, RESAMPLES, each)]
    return np.einsum("...rb,br->...b", np.concatenate(sums, axis=-1), times) / (seeds * images)


def _times(rng: np.random.Generator, count: int, draws: int) -> Array:
    """How often each of `count` is drawn, of as many draws with replacement: [draws, count]."""
    drawn = rng.integers(count, size=(draws, count)) + count * np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=draws * count).reshape(draws, count).astype(np.float64)


def bootstrap_bounds(table: Array, seed: int = 0, level: float = LEVEL) -> tuple[Array, Array, Array]:
    """`bootstrap` of many tables at once: scores [..., R, N] -> (value, low, high), each [...]."""
    low, high = np.quantile(resampled_means(table, seed), [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return table.mean(axis=(-2, -1)), low, high


def bootstrap(scores: ArrayLike, seed: int = 0, level: float = LEVEL, *, bounded: bool = True) -> SeedEstimate:
    """Mean of an encoding's scores [R, N], in 0..1 if `bounded`, with the middle `level` of the means of bootstrap
    samples of seeds and of images (`resampled_means`). For comparison with papers that do so: `mean` is preferable.

    It is too sure, as a sample of few seeds varies less than seeds do: over accuracies of 0.5 to 0.98 and 360 or 1,000
    images it held the truth in 82.0 to 97.0% of 2,000 draws with 3 seeds, 89.2 to 98.3% with 5, 93.0 to 97.9% with 10
    (`vitpos/coverage.py`). Where nothing varies it has no width.
    """
    table = _table(scores, bounded)
    if table.ndim != 2:
        raise ValueError(f"expected scores [R >= 2 seeds, N >= 2 images], got shape {table.shape}")
    value, low, high = bootstrap_bounds(table, seed, level)
    return SeedEstimate(
        float(value), float(low), float(high), table.shape[1], "percentile bootstrap of seeds and images", OVER_SEEDS,
        level, table.shape[0],
    )  # fmt: skip


def paired(scores: ArrayLike, baseline: ArrayLike, *, bounded: bool = True) -> Crossed:
    """The analysis of scores minus a baseline's, both [..., R, N], in 0..1 if `bounded`, row by row the same seed.

    Two encodings that answered alike everywhere are not known to be equal: where nothing varies, one image's worth of
    disagreement stands for the variance, as Agresti & Min 2005 (Stat. Med. 24) have it for two models. Scores on
    another scale come from float32: what is as small as its rounding is no difference, however regular.
    """
    table, base = _table(scores, bounded), _table(baseline, bounded)
    if table.shape != base.shape:
        raise ValueError(f"expected scores of the same seeds and images, got shapes {table.shape} and {base.shape}")
    parts = crossed(table - base, bounded=bounded)
    least = np.where(parts.variance > 0, 0, 1 / (parts.images + 2) ** 2) if bounded else np.float64(ROUNDING**2)
    return replace(parts, image_part=parts.image_part + least)


def difference_bounds(parts: Crossed, level: float = LEVEL) -> tuple[Array, Array]:
    reach = _reach(parts, level)
    most = 1 if parts.bounded else np.inf
    return np.maximum(parts.mean - reach, -most), np.minimum(parts.mean + reach, most)


def difference(scores: ArrayLike, baseline: ArrayLike, level: float = LEVEL, *, bounded: bool = True) -> SeedEstimate:
    """Mean score of one encoding minus that of another, both [R, N]: a row is one seed, a column one image."""
    parts = paired(scores, baseline, bounded=bounded)
    low, high = difference_bounds(parts, level)
    return SeedEstimate(
        float(parts.mean), float(low), float(high), parts.images, "t, seeds crossed with images, paired by both",
        OVER_PAIRED_SEEDS, level, parts.seeds,
    )  # fmt: skip


def different(parts: Crossed) -> Array:
    """Two-sided p [...] of a difference being 0, over seeds and images."""
    return 2 * parts.beyond(parts.mean)


def equivalent(parts: Crossed, margin: float) -> Array:
    """p [...] of two one-sided tests (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15): small where the difference lies
    within -margin..margin, in units of the scores. The margin is to be fixed before the results are seen."""
    if not margin > 0:
        raise ValueError(f"an equivalence margin must be above 0, got {margin}")
    nearer = margin - np.abs(parts.mean)  # to the nearer bound; below 0 beyond it
    tail = parts.beyond(nearer)
    return np.where(nearer > 0, tail, 1 - tail)
