"""Intervals for per-image results, each labelled with what it is over.

Every function takes arrays in which one column (the last axis) is one test image, because the image is the
unit that was sampled: positions, sizes and shifts of one image are repeated measurements, never independent
samples. What comes back speaks of *this model on images like these*; it says nothing about the encoding in
general, for which several training runs (seeds) are needed.

Shapes: S shifts or positions, N images.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import DegenerateDataWarning, norm
from scipy.stats import bootstrap as resample
from scipy.stats import t as student
from statsmodels.stats.proportion import proportion_confint

OVER_IMAGES = "images, for this model"
LEVEL = 0.95
RESAMPLES = 1000
BATCH = 50_000  # images of resamples that are looked at in one go: what the cache holds
BINS = 15  # of confidence, in the calibration error


@dataclass(frozen=True)
class Estimate:
    """A number with its interval. `over` says which repetition the interval is about; `n` counts the
    images."""

    value: float
    low: float
    high: float
    n: int
    method: str
    over: str = OVER_IMAGES
    level: float = LEVEL

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def through(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of a monotone function of the quantity."""
        low, high = sorted((function(self.low), function(self.high)))
        return replace(self, value=function(self.value), low=low, high=high)


@dataclass(frozen=True, eq=False)
class Score:
    """One quantity of each image, values [N]: what a comparison over seeds and images starts from.

    A `bounded` one lies in 0..1, the average of `repeats` measurements; any other is a number on a scale of its own.
    `unit` is how it is shown: "percent" for shares, else what it is in ("" for none). `images` [N] are the places of
    its images among all test images, None for all of them.
    """

    values: NDArray[Any]
    repeats: int = 1
    bounded: bool = True
    unit: str = "percent"
    images: NDArray[np.int64] | None = None


def _scores(values: ArrayLike, ndim: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != ndim or 0 in array.shape:
        axes = "[N images]" if ndim == 1 else "[S positions, N images]"
        raise ValueError(f"expected a non-empty array {axes}, got shape {array.shape}")
    if array.min() < 0 or array.max() > 1:
        raise ValueError(f"expected scores in 0..1, got {array.min():g}..{array.max():g}")
    return array


def _wilson(p: float, n: float, level: float) -> tuple[float, float]:
    low, high = proportion_confint(p * n, n, alpha=1 - level, method="wilson")
    # At p = 0 and p = 1 the closed form misses the point itself by one rounding.
    return min(max(float(low), 0.0), p), max(min(float(high), 1.0), p)


def accuracy(correct: ArrayLike, level: float = LEVEL) -> Estimate:
    """Share of right answers, correct [N] -> Wilson score interval (Wilson 1927, JASA 22)."""
    values = _scores(correct, 1)
    p, n = float(values.mean()), len(values)
    return Estimate(p, *_wilson(p, n, level), n, "wilson", level=level)


def mean_over_images(scores: ArrayLike, repeats: int, level: float = LEVEL) -> Estimate:
    """Mean of per-image scores in 0..1, scores [N], each the average of `repeats` measurements of that image.

    Wilson interval at the effective sample size n p (1 - p) / s^2 (the design-effect correction of survey
    statistics; Franco et al. 2019, J. Survey Stat. Methodol. 7), s^2 the variance between images: clustered
    by image. It lies between n (each image answers all or nothing) and n * repeats (independent answers); if
    all images score alike it is n, so that agreement everywhere still has an interval.
    """
    values = _scores(scores, 1)
    p, n = float(values.mean()), len(values)
    variance = float(values.var(ddof=1)) if n > 1 else 0.0
    effective = float(n)
    if variance > 1e-12:
        effective = float(np.clip(n * p * (1 - p) / variance, n, n * max(repeats, 1)))
    return Estimate(p, *_wilson(p, effective, level), n, "wilson, clustered by image", level=level)


def ratio(numerator: ArrayLike, denominator: ArrayLike | None = None, level: float = LEVEL) -> Estimate | None:
    """Sum of per-image numerators over sum of per-image denominators, both [N]; without these, a mean.

    Interval by linearisation, clustered by image: r = a/b has the variance of the mean of (a_i - r b_i) over the
    squared mean of b, taken as t-distributed (Cochran 1977, Sampling Techniques, chapter 6). None where the
    denominators add up to 0.
    """
    found = _linearised(numerator, denominator)
    if found is None:
        return None
    value, away = found
    n = len(away)
    reach = float(student.ppf(0.5 + level / 2, n - 1) * away.std(ddof=1) / np.sqrt(n))
    return Estimate(value, value - reach, value + reach, n, "linearised ratio, t, by image", level=level)


def _linearised(above: ArrayLike, below: ArrayLike | None) -> tuple[float, NDArray[np.float64]] | None:
    """r = sum of a / sum of b over images, and each image's part in its error, (a_i - r b_i) / mean b [N]; these add up
    to 0."""
    a = np.asarray(above, dtype=np.float64)
    b = np.ones_like(a) if below is None else np.asarray(below, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or len(a) < 2:
        raise ValueError(f"expected two arrays [N >= 2 images], got shapes {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("expected finite numbers")
    mean = float(b.mean())
    if mean == 0:
        return None
    value = float(a.mean()) / mean
    return value, (a - value * b) / mean


@dataclass(frozen=True, eq=False)
class Ratio:
    """A ratio of sums over images as in `ratio`, or (`root`) its square root, stated once: `estimate` is of one model,
    `score` is what encodings are compared by. `unit` as in `Score`."""

    numerator: ArrayLike
    denominator: ArrayLike | None = None
    unit: str = ""
    root: bool = False

    def estimate(self, level: float = LEVEL) -> Estimate | None:
        """Its interval over images; None where the denominators add up to 0."""
        found = ratio(self.numerator, self.denominator, level)
        return found.through(lambda r: max(r, 0.0) ** 0.5) if found and self.root else found

    def summary(self) -> dict[str, Any] | None:
        """The estimate as a dict."""
        found = self.estimate()
        return None if found is None else found.as_dict()

    def score(self, images: NDArray[np.int64] | None = None) -> Score | None:
        """Linearised scores: r + (a_i - r b_i) / mean b, or by the delta method those of its root. Their mean is the
        estimate's value, their variance that of its interval."""
        found = _linearised(self.numerator, self.denominator)
        if found is None:
            return None
        value, away = found
        if self.root:
            value = max(value, 0.0) ** 0.5
            away = away / (2 * value) if value > 0 else np.zeros_like(away)  # squares that add up to 0 are all 0
        return Score(value + away, bounded=False, unit=self.unit, images=images)


def bootstrap(
    statistic: Callable[..., NDArray[Any]], *columns: ArrayLike, seed: int = 0, level: float = LEVEL
) -> Estimate | None:
    """A quantity without a formula for its interval: statistic(*columns, axis=-1), columns [N] with an entry an image.

    Images are drawn again, with all their columns, `RESAMPLES` times; `statistic` gets columns [B, N] and reduces
    the last axis. The draws depend on N and `seed` only. The interval is the basic one, 2 value - quantile (Davison &
    Hinkley 1997, Bootstrap Methods and their Application, section 5.2.1), which takes off as much bias as resampling
    adds; it may miss `value` where that is much. None where resamples tell nothing of the spread: of one image, where
    they all have one value (all images alike), or where one has none (not finite).
    """
    arrays = [np.asarray(column) for column in columns]
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or arrays[0].ndim != 1 or len(arrays[0]) == 0:
        raise ValueError(f"expected columns [N >= 1 images] of one length, got shapes {[a.shape for a in arrays]}")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("expected finite numbers")
    n = len(arrays[0])
    if n < 2:
        return None
    value = float(statistic(*arrays, axis=-1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # a resample without a value: None, below
        found = resample(
            arrays, statistic, paired=True, vectorized=True, method="basic", n_resamples=RESAMPLES,
            batch=max(1, BATCH // n), confidence_level=level, rng=np.random.default_rng(seed),
        )  # fmt: skip
    drawn, (low, high) = found.bootstrap_distribution, found.confidence_interval
    if not np.isfinite(drawn).all() or np.allclose(drawn, drawn[0], rtol=1e-12, atol=0):
        return None
    return Estimate(value, float(low), float(high), n, "basic bootstrap, by image", level=level)


def calibration_error(correct: ArrayLike, confidence: ArrayLike) -> float:
    """Expected calibration error, correct and confidence [N] in 0..1: |accuracy - confidence| in each of `BINS` bins
    of equal width, weighted by its share of images (Guo et al. 2017, arXiv:1706.04599, equation 3)."""
    return float(_binned(*_gaps(correct, confidence)))


def calibration_interval(
    correct: ArrayLike, confidence: ArrayLike, seed: int = 0, level: float = LEVEL
) -> Estimate | None:
    """`calibration_error` with its interval, by `bootstrap`; None where that is.

    Chance makes the error of a calibrated model positive, the more the fewer images. Of one that errs no more than such
    a model would (with every answer right by chance as likely as its confidence says, up to the level's upper quantile;
    consistency resampling, Bröcker & Smith 2007, Weather and Forecasting 22, with normal sums of each bin) the interval
    begins at 0. It always holds the error itself. docs/statistics.md says where it holds the truth.
    """
    gaps, bins = _gaps(correct, confidence)
    found = bootstrap(_binned, gaps, bins, seed=seed, level=level)
    if found is None:
        return None
    sure = np.asarray(confidence, np.float64)
    spread = np.sqrt(np.bincount(bins, sure * (1 - sure), minlength=BINS))
    chance = np.abs(np.random.default_rng([seed, 1]).standard_normal((RESAMPLES, BINS)) * spread).sum(axis=-1) / len(
        bins
    )
    by_chance = found.value <= np.quantile(chance, 0.5 + level / 2)
    low, high = 0.0 if by_chance else max(found.low, 0.0), min(max(found.high, found.value), 1.0)
    return replace(found, low=min(low, found.value), high=high, method="basic bootstrap, from 0 if as by chance")


def _gaps(correct: ArrayLike, confidence: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Right or not less confidence, and the bin of each image."""
    right, sure = _scores(correct, 1), _scores(confidence, 1)
    if right.shape != sure.shape:
        raise ValueError(f"expected as many answers as confidences, got shapes {right.shape} and {sure.shape}")
    return right - sure, np.clip(np.ceil(sure * BINS).astype(np.intp) - 1, 0, BINS - 1)


def _binned(gaps: NDArray[Any], bins: NDArray[Any], axis: int = -1) -> NDArray[Any]:
    """Sum of the bins' absolute gaps over the number of images, [..., N] -> [...]."""
    n = bins.shape[axis]
    places = bins.reshape(-1, n) + BINS * np.arange(bins.size // n)[:, None]
    sums = np.bincount(places.ravel(), gaps.ravel(), minlength=BINS * len(places))
    return np.abs(sums).reshape(*bins.shape[:-1], BINS).sum(axis=-1) / n


def worst_of_grid(correct: ArrayLike, seed: int = 0, level: float = LEVEL) -> tuple[Estimate, tuple[int, int]]:
    """Accuracy at the worst position, correct [S, N] -> (estimate, the position that each half chose).

    The plain minimum over S positions is biased low: it picks noise. Here the worst position is chosen on one
    half of the images and scored on the other; the two directions are averaged. The halves depend on N and
    `seed` only, so that all models evaluated on the same images are split alike. What is estimated is the
    accuracy at the position that half of the images point to, which is the true minimum or slightly above it,
    never below. The interval is Wilson's, for the positions that were chosen, at N images less what the two directions
    have in common (`_in_common`).
    """
    values = _scores(correct, 2)
    n = values.shape[1]
    halves, chosen = _chosen(values, seed)
    p = float(values[chosen[0], halves[1]].mean() + values[chosen[1], halves[0]].mean()) / 2
    effective = n / (1 + _in_common(values))
    estimate = Estimate(p, *_wilson(p, effective, level), n, "split halves, wilson", level=level)
    return estimate, (chosen[0], chosen[1])


def _in_common(values: NDArray[np.float64]) -> float:
    """Correlation of the two directions' scores, values [S, N].

    Each half is scored at the position where the other is lowest. Of K positions that are about equal both choose the
    same one in 1 of K cases, and both are low; else each is scored a little above its mean. With m the expected lowest
    of K standard normals (Blom 1958, Statistical Estimates and Transformed Beta-variables) the covariance is
    m^2 / K + (K - 1) / K (m / (K - 1))^2 = m^2 / (K - 1), in units of the variance between positions of one image. K
    is the number of positions within two standard errors of the lowest.
    """
    n, means = values.shape[1], values.mean(axis=1)
    within = float(values.var(axis=0, ddof=1).mean()) if len(values) > 1 else 0.0
    near = int((means <= means.min() + 2 * np.sqrt(2 * within / (n / 2))).sum())
    if near < 2 or within == 0:
        return 0.0
    lowest = float(norm.ppf((near - 0.375) / (near + 0.25)))
    return min(1.0, within / float(values.var(axis=1).mean())) * lowest**2 / (near - 1)


def worst_scores(correct: ArrayLike, seed: int = 0) -> NDArray[np.float64]:
    """Per image, correct or not at the position that the other half of the images chose: [S, N] -> [N]. Their mean is
    `worst_of_grid`, but for halves that differ by one image."""
    values = _scores(correct, 2)
    halves, chosen = _chosen(values, seed)
    scores = np.empty(values.shape[1])
    scores[halves[1]], scores[halves[0]] = values[chosen[0], halves[1]], values[chosen[1], halves[0]]
    return scores


def _chosen(values: NDArray[np.float64], seed: int) -> tuple[list[NDArray[np.intp]], list[int]]:
    """Two halves of the images, and the worst position of each."""
    n = values.shape[1]
    if n < 2:
        raise ValueError(f"the worst position needs at least 2 images (one half chooses, one scores), got {n}")
    order = np.random.default_rng(seed).permutation(n)
    halves = [order[: n // 2], order[n // 2 :]]
    return halves, [int(values[:, half].mean(axis=1).argmin()) for half in halves]


def pairwise_agreement(predictions: ArrayLike) -> NDArray[np.float64]:
    """Per image, the share of unordered pairs of distinct shifts with the same decision: [S, N] -> [N]."""
    labels = np.asarray(predictions)
    if labels.ndim != 2 or labels.shape[0] < 2:
        raise ValueError(f"pairwise agreement needs decisions [S >= 2, N], got shape {labels.shape}")
    count, n = labels.shape
    classes, codes = np.unique(labels, return_inverse=True)
    votes = np.zeros((n, len(classes)))
    np.add.at(votes, (np.broadcast_to(np.arange(n), (count, n)), codes.reshape(count, n)), 1)
    return (votes * (votes - 1)).sum(axis=1) / (count * (count - 1))


def reference_agreement(predictions: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    """Per image, the share of shifts whose decision is the reference decision: [S, N], [N] -> [N]."""
    labels, base = np.asarray(predictions), np.asarray(reference)
    if labels.ndim != 2 or labels.shape[0] < 1 or base.shape != labels.shape[1:]:
        raise ValueError(f"expected decisions [S >= 1, N] and a reference [N], got {labels.shape} and {base.shape}")
    return (labels == base).mean(axis=0)


def paired_difference(correct: ArrayLike, baseline: ArrayLike, level: float = LEVEL) -> Estimate:
    """Accuracy of one model minus that of another on the same images, both [N] of 0 or 1.

    Interval of Agresti & Min 2005 (Stat. Med. 24): half a count added to each cell of the 2x2 table, then
    Wald.
    """
    a, b = _scores(correct, 1), _scores(baseline, 1)
    if a.shape != b.shape or not np.isin(np.concatenate([a, b]), (0, 1)).all():
        raise ValueError(f"expected two arrays of 0 or 1 over the same images, got shapes {a.shape} and {b.shape}")
    n, gained, lost = len(a), float(((a == 1) & (b == 0)).sum()), float(((a == 0) & (b == 1)).sum())
    centre = (gained - lost) / (n + 2)
    spread = np.sqrt(gained + lost + 1 - (gained - lost) ** 2 / (n + 2)) / (n + 2)
    z = float(norm.ppf(0.5 + level / 2))
    value = (gained - lost) / n
    low, high = max(-1.0, centre - z * spread), min(1.0, centre + z * spread)
    return Estimate(
        value, min(float(low), value), max(float(high), value), n, "paired by image, agresti-min",
        over="the same images, for these two models", level=level,
    )  # fmt: skip
