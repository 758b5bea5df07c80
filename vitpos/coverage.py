"""How often the intervals hold the truth, by simulation: `python -m vitpos.coverage` prints the table of
docs/statistics.md.

The generating model: the logit of a right answer is a level, plus a normal effect of the seed, of the image, and of
both together. It is no assumption of any interval. The seeds' effect is such that a seed's accuracy has a standard
deviation of 0.24 in its logit (about 4 points at 80%). Two encodings share most of what makes an image hard, and a
part of what makes a seed lucky.

Ratios of sums over images (linearised scores) have a model of their own, skewed where answers are not: an image has a
log-normal norm, and an error relative to it that is log-normal too and larger where the norm is; the ratio of a seed's
sums has the seed's effect as a factor. Shapes: D draws, K encodings, R seeds, N images.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import norm

from vitpos import hierarchy, significance, stats

SEED, IMAGE, BOTH = 0.24, 2.5, 1.0  # standard deviations in logits; that of the seed is of its accuracy
SHARED_SEED, SHARED_IMAGE = 0.3, 0.8  # share of variance that encodings have in common
POSITIONS = 9
CHUNK = 2_000_000  # answers that are drawn at once
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(61)
Array = NDArray[Any]


@dataclass(frozen=True)
class Setting:
    """What is simulated: R seeds, N images, and the expected accuracy of (the first) encoding."""

    seeds: int
    images: int
    accuracy: float
    seed_sd: float = SEED


def expected(function: Callable[[Array], Array], level: float, spread: float) -> float:
    """Mean of a function of a right answer's probability, the logit normal around `level`."""
    return float((WEIGHTS * function(expit(level + spread * NODES))).sum() / WEIGHTS.sum())


def levels(accuracy: float, seed_sd: float) -> tuple[float, float]:
    """(level, standard deviation of the seeds' effect) that give this accuracy over all, and this standard deviation
    of a seed's accuracy in logits."""
    inner = np.hypot(IMAGE, BOTH)

    def level(spread: float) -> float:
        return float(brentq(lambda m: expected(lambda p: p, m, spread) - accuracy, -30, 30))

    at = level(inner)
    slope = expected(lambda p: p * (1 - p), at, inner) / (accuracy * (1 - accuracy))
    seed = seed_sd / slope
    return level(np.hypot(inner, seed)), seed


def chances(rng: np.random.Generator, draws: int, setting: Setting, accuracies: Sequence[float]) -> Array:
    """Probability of a right answer [D, K, R, N], for encodings of these expected accuracies."""
    count, shape = len(accuracies), (draws, 1, setting.seeds, setting.images)

    def normal(encodings: int, seeds: int, images: int) -> Array:
        return rng.standard_normal((draws, encodings, seeds, images), dtype=np.float32)

    own = count > 1
    seed = np.sqrt(SHARED_SEED if own else 1) * normal(1, shape[2], 1)
    image = np.sqrt(SHARED_IMAGE if own else 1) * normal(1, 1, shape[3])
    if own:
        seed = seed + np.sqrt(1 - SHARED_SEED) * normal(count, shape[2], 1)
        image = image + np.sqrt(1 - SHARED_IMAGE) * normal(count, 1, shape[3])
    at = np.array([levels(accuracy, setting.seed_sd) for accuracy in accuracies], dtype=np.float32)
    level, spread = at[:, 0, None, None], at[:, 1, None, None]
    return expit(level + spread * seed + np.float32(IMAGE) * image + np.float32(BOTH) * normal(count, *shape[2:]))


def answers(rng: np.random.Generator, draws: int, setting: Setting, accuracies: Sequence[float]) -> Array:
    chance = chances(rng, draws, setting, accuracies)
    return (rng.random(chance.shape, dtype=np.float32) < chance).astype(np.float64)


def chunks(draws: int, size: int) -> Iterator[int]:
    each = max(1, CHUNK // size)
    yield from (min(each, draws - start) for start in range(0, draws, each))


def held(low: Array, high: Array, truth: float) -> Array:
    return (low <= truth) & (truth <= high)


def mean_of_one(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """An encoding's mean accuracy."""
    _, low, high = hierarchy.mean_bounds(answers(rng, draws, setting, [setting.accuracy])[:, 0])
    return held(low, high, setting.accuracy)


def naive_mean(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """The same from one seed's interval over images, which is what not to do."""
    table = answers(rng, draws, setting, [setting.accuracy])[:, 0, 0]
    bounds = np.array([(e.low, e.high) for e in map(stats.accuracy, table)])
    return held(bounds[:, 0], bounds[:, 1], setting.accuracy)


def lower(accuracy: float) -> float:
    """A second encoding's accuracy, a quarter of a logit below."""
    return float(expit(logit(accuracy) - 0.25))


def difference_of_two(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """Difference of two encodings, paired by seed and image."""
    pair = setting.accuracy, lower(setting.accuracy)
    table = answers(rng, draws, setting, pair)
    low, high = hierarchy.difference_bounds(hierarchy.paired(table[:, 0], table[:, 1]))
    return held(low, high, pair[0] - pair[1])


def consistency(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """Mean pairwise agreement of decisions at nine positions, out of two classes."""
    chance = chances(rng, draws, setting, [setting.accuracy])[:, 0]
    right = rng.binomial(POSITIONS, chance.astype(np.float64))
    wrong = POSITIONS - right
    score = (right * (right - 1) + wrong * (wrong - 1)) / (POSITIONS * (POSITIONS - 1))
    level, seed = levels(setting.accuracy, setting.seed_sd)
    truth = expected(lambda p: p**2 + (1 - p) ** 2, level, float(np.linalg.norm([IMAGE, BOTH, seed])))
    _, low, high = hierarchy.mean_bounds(score, POSITIONS)
    return held(low, high, truth)


def worst_position(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """Accuracy at the worst of nine positions that are equally good, chosen on one half of the images and scored on the
    other."""
    chance = chances(rng, draws, setting, [setting.accuracy])[:, 0, :, None]  # [D, R, 1, N]
    right = rng.random((draws, setting.seeds, POSITIONS, setting.images), dtype=np.float32) < chance
    score = np.array([[stats.worst_scores(one) for one in draw] for draw in right])
    _, low, high = hierarchy.mean_bounds(score)
    return held(low, high, setting.accuracy)


def plain_minimum(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """The same at the position where each seed's model is worst, which is what not to do."""
    chance = chances(rng, draws, setting, [setting.accuracy])[:, 0, :, None]
    right = rng.random((draws, setting.seeds, POSITIONS, setting.images), dtype=np.float32) < chance
    at = right.mean(axis=-1).argmin(axis=-1)[..., None, None]
    _, low, high = hierarchy.mean_bounds(np.take_along_axis(right, at, axis=2)[:, :, 0].astype(np.float64))
    return held(low, high, setting.accuracy)


def _ranks(rng: np.random.Generator, draws: int, setting: Setting, gaps: Sequence[float]) -> Array:
    truth = [float(expit(logit(setting.accuracy) - gap)) for gap in gaps]
    table = answers(rng, draws, setting, truth)
    wins = significance.better(table)
    false = np.array([[a <= b for b in truth] for a in truth])
    return ~(wins & false).any(axis=(1, 2))


def ranks_of_equals(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """Ranks of four equal encodings, all at once: each may have any."""
    return _ranks(rng, draws, setting, [0, 0, 0, 0])


def ranks_apart(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """Ranks of four encodings 0.25 or 0.5 logits apart, all at once."""
    return _ranks(rng, draws, setting, [0, 0.25, 0.25, 0.75])


def naive_ranks(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """Ranks of four equal encodings from the middle 95% of bootstrap samples of seeds and images, which is what not to
    do."""
    table = answers(rng, draws, setting, [setting.accuracy] * 4)  # [D, K, R, N]
    means = hierarchy.resampled_means(table, seed=int(rng.integers(2**32)))  # [D, K, B]
    places = 1 + (means[:, None] > means[:, :, None]).sum(axis=2)
    low, high = np.quantile(places, [0.025, 0.975], axis=-1, method="nearest")
    return (low == 1).all(axis=-1) & (high == 4).all(axis=-1)


def bootstrap_mean(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """An encoding's mean accuracy, from the middle 95% of bootstrap samples of seeds and images."""
    table = answers(rng, draws, setting, [setting.accuracy])[:, 0]
    _, low, high = hierarchy.bootstrap_bounds(table, seed=int(rng.integers(2**32)))
    return held(low, high, setting.accuracy)


def one_model(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """One model's accuracy over images (Wilson)."""
    right = rng.random((draws, setting.images)) < setting.accuracy
    bounds = np.array([(e.low, e.high) for e in map(stats.accuracy, right)])
    return held(bounds[:, 0], bounds[:, 1], setting.accuracy)


def one_model_clustered(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """One model's mean accuracy over nine positions (Wilson, clustered by image)."""
    level, _ = levels(setting.accuracy, 0.0)
    inner = np.hypot(IMAGE, BOTH)
    right = rng.binomial(POSITIONS, expit(level + inner * rng.standard_normal((draws, setting.images)))) / POSITIONS
    bounds = np.array([(e.low, e.high) for e in (stats.mean_over_images(score, POSITIONS) for score in right)])
    return held(bounds[:, 0], bounds[:, 1], setting.accuracy)


def one_model_worst(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """One model's accuracy at the worst of nine equally good positions (split halves)."""
    level, _ = levels(setting.accuracy, 0.0)
    chance = expit(level + np.hypot(IMAGE, BOTH) * rng.standard_normal((draws, 1, setting.images)))
    right = rng.random((draws, POSITIONS, setting.images)) < chance
    bounds = np.array([(e.low, e.high) for e, _ in map(stats.worst_of_grid, right)])
    return held(bounds[:, 0], bounds[:, 1], setting.accuracy)


def _calibration(rng: np.random.Generator, draws: int, setting: Setting, factor: float) -> Array:
    """Confidence has the logit of a right answer, times a factor: 1 is calibrated, more is too sure. The truth is the
    error over the same bins of all images that there could be."""
    level, _ = levels(setting.accuracy, 0.0)
    inner = np.hypot(IMAGE, BOTH)
    everything = level + inner * norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    truth = stats.calibration_error(expit(everything), expit(factor * everything))
    at = level + inner * rng.standard_normal((draws, setting.images))
    right = rng.random(at.shape) < expit(at)
    found = [stats.calibration_interval(*one, seed=k) for k, one in enumerate(zip(right, expit(factor * at)))]
    return np.array([one is not None and one.low <= truth <= one.high for one in found])


def calibrated(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """One model's calibration error (bootstrap), calibrated."""
    return _calibration(rng, draws, setting, 1)


def slightly_too_sure(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """The same with logits 1.25 times too large."""
    return _calibration(rng, draws, setting, 1.25)


def clearly_too_sure(rng: np.random.Generator, draws: int, setting: Setting) -> Array:
    """The same with logits twice too large."""
    return _calibration(rng, draws, setting, 2)


Study = Callable[[np.random.Generator, int, Setting], Array]
OVER_SEEDS: dict[str, Study] = {
    "mean of one encoding": mean_of_one,
    "difference of two encodings": difference_of_two,
    "consistency of one encoding": consistency,
    "worst position of one encoding": worst_position,
    "ranks of four equal encodings (at least)": ranks_of_equals,
    "ranks of four encodings apart (at least)": ranks_apart,
}
OVER_IMAGES: dict[str, Study] = {
    "one model: Wilson": one_model,
    "one model: Wilson, clustered by image": one_model_clustered,
    "one model: worst position": one_model_worst,
    "one model: calibration error, calibrated": calibrated,
    "one model: calibration error, 1.25 times too sure": slightly_too_sure,
    "one model: calibration error, twice too sure": clearly_too_sure,
    "not to be done: one seed's Wilson for the encoding": naive_mean,
}
BOOTSTRAP: dict[str, Study] = {"not to be done: mean of one encoding by bootstrap": bootstrap_mean}
NAIVE: dict[str, Study] = {
    "not to be done: plain minimum over positions": plain_minimum,
    "not to be done: ranks of four equals by bootstrap": naive_ranks,
}


def coverage(study: Study, setting: Setting, draws: int = 2000, seed: int = 0) -> float:
    """Share of draws in which the interval holds the truth."""
    rng = np.random.default_rng([seed, setting.seeds, setting.images, round(1000 * setting.accuracy)])
    encodings = 4 if "ranks" in study.__name__ else 2
    by_position = (worst_position, plain_minimum, one_model_worst)
    size = (POSITIONS if study in by_position else encodings) * setting.seeds * setting.images
    return float(np.mean(np.concatenate([study(rng, count, setting) for count in chunks(draws, size)])))


def table(draws: int = 2000) -> Iterator[str]:
    """The lines of the table in docs/statistics.md."""
    accuracies, images = (0.5, 0.9, 0.98), (360, 1000)
    yield "| interval | seeds | " + " | ".join(f"{a:g}, {n} images" for n in images for a in accuracies) + " |\n"
    yield "|" + " --- |" * (2 + len(images) * len(accuracies)) + "\n"
    for studies, seeds in ((OVER_SEEDS, (3, 5, 10)), (OVER_IMAGES, (1,)), (BOOTSTRAP, (3, 5, 10)), (NAIVE, (3,))):
        for name, study in studies.items():
            for count in seeds:
                found = [coverage(study, Setting(count, n, a), draws) for n in images for a in accuracies]
                yield f"| {name} | {count} | " + " | ".join(f"{100 * share:.1f}" for share in found) + " |\n"


NORM, ERROR_SEED, ERROR_BOTH, TIED = 0.5, 0.2, 0.3, 0.5  # standard deviations of logarithms; correlation of both


@dataclass(frozen=True)
class Skewed:
    """What is simulated of ratios: R seeds, N images, and the images' standard deviation of the log of the error."""

    seeds: int
    images: int
    spread: float


def sums(rng: np.random.Generator, draws: int, setting: Skewed, factors: Sequence[float]) -> tuple[Array, Array]:
    """Numerators and denominators [D, K, R, N] of encodings whose ratios are as these factors."""
    count = len(factors)

    def shared(share: float, seeds: int, images: int) -> Array:
        common, own = (rng.standard_normal((draws, k, seeds, images)) for k in (1, count))
        return np.sqrt(share) * common + np.sqrt(1 - share) * own

    of_norm, of_error = shared(SHARED_IMAGE, 1, setting.images), shared(SHARED_IMAGE, 1, setting.images)
    of_error = TIED * of_norm + np.sqrt(1 - TIED**2) * of_error
    both = shared(0, setting.seeds, setting.images)
    below = np.exp(NORM * of_norm + np.zeros_like(both))
    error = setting.spread * of_error + ERROR_SEED * shared(SHARED_SEED, setting.seeds, 1) + ERROR_BOTH * both
    return np.array(factors)[:, None, None] * below * np.exp(error), below


def expected_ratio(setting: Skewed, factor: float, root: bool) -> float:
    """Mean over seeds of the ratio of expected sums, or of its root."""
    inside = setting.spread**2 + 2 * TIED * NORM * setting.spread + ERROR_BOTH**2
    power = 0.5 if root else 1.0
    return float((factor * np.exp(inside / 2)) ** power * np.exp((power * ERROR_SEED) ** 2 / 2))


def _linearised(above: Array, below: Array, root: bool) -> Array:
    pairs = zip(above.reshape(-1, above.shape[-1]), below.reshape(-1, below.shape[-1]))
    found = [score.values for a, b in pairs if (score := stats.Ratio(a, b, root=root).score())]
    return np.array(found).reshape(above.shape)


def mean_of_ratio(rng: np.random.Generator, draws: int, setting: Skewed, root: bool) -> Array:
    above, below = sums(rng, draws, setting, [1.0])
    _, low, high = hierarchy.mean_bounds(_linearised(above, below, root)[:, 0], bounded=False)
    return held(low, high, expected_ratio(setting, 1.0, root))


def difference_of_ratios(rng: np.random.Generator, draws: int, setting: Skewed, root: bool) -> Array:
    """Of two encodings, one with errors three quarters of the other's."""
    factors = 1.0, 0.75
    scores = _linearised(*sums(rng, draws, setting, factors), root)
    low, high = hierarchy.difference_bounds(hierarchy.paired(scores[:, 0], scores[:, 1], bounded=False))
    first, second = (expected_ratio(setting, factor, root) for factor in factors)
    return held(low, high, first - second)


RATIOS: dict[str, Callable[[np.random.Generator, int, Skewed, bool], Array]] = {
    "mean of one encoding": mean_of_ratio,
    "difference of two encodings": difference_of_ratios,
}


def coverage_of_ratio(name: str, setting: Skewed, root: bool, draws: int = 2000, seed: int = 0) -> float:
    """Share of draws in which the interval of a ratio, or of its root, holds the truth."""
    rng = np.random.default_rng([seed, setting.seeds, setting.images, round(1000 * setting.spread)])
    each = chunks(draws, 8 * setting.seeds * setting.images)
    return float(np.mean(np.concatenate([RATIOS[name](rng, count, setting, root) for count in each])))


def table_of_ratios(draws: int = 2000) -> Iterator[str]:
    """The lines of the table of ratios in docs/statistics.md."""
    spreads, images = (0.4, 0.8), (32, 96, 360)
    yield "| interval | seeds | " + " | ".join(f"{s:g}, {n} images" for n in images for s in spreads) + " |\n"
    yield "|" + " --- |" * (2 + len(images) * len(spreads)) + "\n"
    for name, root, seeds in itertools.product(RATIOS, (False, True), (3, 5, 10)):
        found = [coverage_of_ratio(name, Skewed(seeds, n, s), root, draws) for n in images for s in spreads]
        shares = " | ".join(f"{100 * share:.1f}" for share in found)
        yield f"| {'root of a ratio' if root else 'ratio'}, {name} | {seeds} | {shares} |\n"


if __name__ == "__main__":
    sys.stdout.writelines([*table(), "\n", *table_of_ratios()])
