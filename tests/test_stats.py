"""Statistics against published values, and by simulation: what is claimed to cover is seen to cover."""

import numpy as np
import pytest

from vitpos import stats


def test_wilson_hand_worked():
    # Newcombe 1998, Stat. Med. 17, table I (method 3): 81 of 263 gives 0.2553..0.3662; 0 of 20 gives
    # 0..0.1611.
    e = stats.accuracy(np.arange(263) < 81)
    assert (round(e.low, 4), round(e.high, 4), e.n) == (0.2553, 0.3662, 263)
    e = stats.accuracy(np.zeros(20, bool))
    assert (e.low, round(e.high, 4)) == (0.0, 0.1611)
    assert stats.accuracy(np.ones(20)).high == 1.0
    assert e.over == "images, for this model"
    assert e.as_dict()["level"] == 0.95


def test_agreement_hand_worked():
    pred = np.array([[1, 1, 5], [1, 2, 6], [1, 2, 7]])  # [3 shifts, 3 images]
    np.testing.assert_allclose(stats.pairwise_agreement(pred), [1, 1 / 3, 0])
    np.testing.assert_allclose(stats.reference_agreement(pred[1:], pred[0]), [1, 0, 0])


def test_pairwise_agreement_equals_a_loop_over_pairs():
    pred = np.random.default_rng(0).integers(0, 4, (7, 11))
    loop = np.mean([pred[i] == pred[j] for i in range(7) for j in range(i)], axis=0)
    np.testing.assert_allclose(stats.pairwise_agreement(pred), loop)


def test_paired_difference_hand_worked():
    # 10 gained, 2 lost of 50: value 0.16; Agresti-Min: 8/52 -+ 1.96 sqrt(13 - 64/52)/52.
    a, b = np.zeros(50), np.zeros(50)
    a[:10], b[10:12] = 1, 1
    e = stats.paired_difference(a, b)
    half = 1.959964 * np.sqrt(13 - 64 / 52) / 52
    np.testing.assert_allclose([e.value, e.low, e.high], [0.16, 8 / 52 - half, 8 / 52 + half], atol=1e-6)
    same = stats.paired_difference(a, a)
    assert same.value == 0
    assert same.low < 0 < same.high


def test_calibration_error_hand_worked():
    # Two bins: 4 images at 0.95 of which 3 are right, 6 at 0.55 of which 3 are: 0.4 * 0.2 + 0.6 * 0.05.
    correct = np.array([1, 1, 1, 0, 1, 1, 1, 0, 0, 0], bool)
    confidence = np.array([0.95] * 4 + [0.55] * 6)
    assert stats.calibration_error(correct, confidence) == pytest.approx(0.4 * 0.2 + 0.6 * 0.05)
    # 15 bins of equal width, each with its upper end: 9/15 lies below 0.62, and 10/15 parts 0.62 from 0.68.
    right_and_wrong = np.array([True, False])
    assert stats.calibration_error(right_and_wrong, np.array([0.6, 0.62])) == pytest.approx((0.4 + 0.62) / 2)
    assert stats.calibration_error(right_and_wrong, np.array([0.62, 0.68])) == pytest.approx((0.38 + 0.68) / 2)
    assert stats.calibration_error(right_and_wrong, np.array([0.62, 0.66])) == pytest.approx(0.14)
    rng = np.random.default_rng(0)
    sure = rng.uniform(0.3, 1, 20000)
    calibrated = rng.random(20000) < sure
    assert stats.calibration_error(calibrated, sure) < 0.02
    assert stats.calibration_error(calibrated, np.clip(sure + 0.2, 0, 1)) > 0.1
    assert stats.calibration_error(np.ones(3, bool), np.ones(3)) == 0


def test_a_calibration_error_that_chance_explains_has_an_interval_from_zero():
    rng = np.random.default_rng(8)
    sure = rng.uniform(0.3, 1, 500)
    right = rng.random(500) < sure
    fair, bold = stats.calibration_interval(right, sure), stats.calibration_interval(right, (sure + 1) / 2)
    assert (fair.value, bold.value) == (
        stats.calibration_error(right, sure), stats.calibration_error(right, (sure + 1) / 2)
    )  # fmt: skip
    assert fair.low == 0 < fair.value <= fair.high
    assert 0.1 < bold.low < 0.175 < bold.high < 0.25  # the truth is (1 - 0.65) / 2
    assert bold.method == "basic bootstrap, from 0 if as by chance"
    for right in rng.random((10, 500)) < sure:  # resampling alone often says that it is less than was found
        fair = stats.calibration_interval(right, sure)
        assert fair.low <= fair.value <= fair.high
    right = rng.random(500) < sure
    bold = stats.calibration_interval(right, (sure + 1) / 2)
    wider = stats.calibration_interval(right, (sure + 1) / 2, level=0.99)
    assert wider.low < bold.low < bold.high < wider.high
    assert stats.calibration_interval([1, 0, 0], [1, 1, 1]).high == 1  # resamples alone would have 4 thirds
    assert stats.calibration_interval([1], [0.4]) is None


def mean(values, axis=-1):
    return values.mean(axis=axis)


def test_bootstrap_of_a_mean_is_that_of_theory():
    values = np.random.default_rng(6).exponential(size=400)
    e = stats.bootstrap(mean, values)
    reach = 1.96 * values.std() / np.sqrt(400)
    assert (e.value, e.n, e.over, e.level) == (values.mean(), 400, "images, for this model", 0.95)
    assert (e.value - e.low, e.high - e.value) == (pytest.approx(reach, rel=0.15), pytest.approx(reach, rel=0.15))
    # The basic interval turns the distribution of resamples over: of a skewed quantity the other side is the longer.
    top = stats.bootstrap(lambda x, axis: np.exp(10 * x.mean(axis=axis)), values)
    assert top.value - top.low > 1.2 * (top.high - top.value)


def test_bootstrap_keeps_columns_together_and_depends_on_its_seed_alone():
    rng = np.random.default_rng(7)
    x = rng.standard_normal(300)
    pair = x, x + 0.01 * rng.standard_normal(300)

    def gap(a, b, axis):
        return (a - b).mean(axis=axis)

    first = stats.bootstrap(gap, *pair)
    assert first.high - first.low < 0.01  # drawn apart it would be 0.3
    assert stats.bootstrap(gap, *pair) == first
    assert stats.bootstrap(gap, *pair, seed=1) != first


def test_bootstrap_of_what_tells_nothing_is_none():
    assert stats.bootstrap(mean, [0.3]) is None
    assert stats.bootstrap(mean, np.full(50, 0.1)) is None
    assert stats.bootstrap(lambda x, axis: np.where(x.mean(axis=axis) > 0.5, np.nan, 0.0), [0, 1]) is None
    for columns in ([], [[]], [[1, 2], [1]], [[[1, 2]]], [[1, np.nan]]):
        with pytest.raises(ValueError, match="expected"):
            stats.bootstrap(mean, *columns)
    with pytest.raises(ValueError, match="as many answers as confidences"):
        stats.calibration_interval([1, 0], [0.5])
    with pytest.raises(ValueError, match=r"in 0\.\.1"):
        stats.calibration_interval([1, 0], [0.5, 1.5])


def naive_minimum(correct):
    return correct.mean(axis=1).min()


def test_naive_minimum_is_biased_low_and_split_is_not():
    rng, truth = np.random.default_rng(1), 0.8
    draws = rng.random((400, 15, 360)) < truth
    naive = np.mean([naive_minimum(c) for c in draws])
    split = np.mean([stats.worst_of_grid(c)[0].value for c in draws])
    assert naive < truth - 0.025  # the reference gives 2.6 to 4 points
    assert abs(split - truth) < 4 * np.sqrt(truth * (1 - truth) / 360 / 400) + 1e-3


def test_worst_scores_are_those_of_the_worst_position():
    """Per image, for comparisons over seeds: the same choice, scored on the other half too."""
    rng = np.random.default_rng(7)
    for n in (40, 41):
        correct = rng.random((9, n)) < 0.7
        scores, (estimate, chosen) = stats.worst_scores(correct), stats.worst_of_grid(correct)
        assert ((scores == correct[chosen[0]]) | (scores == correct[chosen[1]])).all()
        assert scores.mean() == pytest.approx(estimate.value, abs=0 if n == 40 else 1 / n)
        assert scores.mean() > naive_minimum(correct)
    unbiased = np.mean([stats.worst_scores(c).mean() for c in rng.random((200, 15, 360)) < 0.8])
    assert abs(unbiased - 0.8) < 4 * np.sqrt(0.16 / 360 / 200) + 1e-3


def test_worst_of_grid_finds_a_clear_worst_position():
    rng = np.random.default_rng(2)
    correct = rng.random((6, 400)) < np.array([0.9, 0.9, 0.3, 0.9, 0.9, 0.9])[:, None]
    estimate, chosen = stats.worst_of_grid(correct)
    assert chosen == (2, 2)
    assert estimate.value == pytest.approx(correct[2].mean(), abs=1e-9)  # both halves together are all images


def coverage(estimates, truth):
    return np.mean([e.low <= truth <= e.high for e in estimates])


def test_intervals_cover_by_simulation():
    """2,000 draws each; the standard error of a coverage of 0.95 is 0.005."""
    rng, draws = np.random.default_rng(3), 2000
    for p in (0.5, 0.9, 0.97):
        assert 0.93 <= coverage((stats.accuracy(c) for c in rng.random((draws, 360)) < p), p) <= 0.975
    # Clustered: an image's rate varies (Beta, mean 0.75), 16 positions answer with that rate.
    rates = rng.beta(1.5, 0.5, (draws, 200))
    scores = rng.binomial(16, rates) / 16
    assert 0.93 <= coverage((stats.mean_over_images(s, 16) for s in scores), 0.75) <= 0.975
    # Negative control: all answers treated as independent, which is the mistake that clustering prevents.
    independent = (stats.accuracy(np.arange(200 * 16) < round(s.sum() * 16)) for s in scores)
    assert coverage(independent, 0.75) < 0.7
    # Worst of truly equal positions, correlated within an image.
    correct = rng.random((draws, 9, 200)) < rng.beta(4, 1, (draws, 1, 200))
    assert 0.93 <= coverage((stats.worst_of_grid(c)[0] for c in correct), 0.8) <= 0.97
    correlated = np.array([stats.worst_of_grid(c)[0].value for c in correct]).std() / np.sqrt(0.8 * 0.2 / 200)
    assert correlated > 1.07  # why N images are not enough: the two halves' scores go together
    assert np.mean([stats.accuracy(c[c.mean(axis=1).argmin()]).high < 0.8 for c in correct]) > 0.05  # naive
    # Paired difference of two correlated models: 0.1 apart.
    u = rng.random((draws, 300))
    noise = rng.random((draws, 300)) < 0.1
    a, b = (u < 0.8) ^ noise, (u < 0.675)
    truth = (0.8 * 0.9 + 0.2 * 0.1) - 0.675
    assert 0.93 <= coverage((stats.paired_difference(x, y) for x, y in zip(a, b)), truth) <= 0.975


def test_agreement_everywhere_still_has_an_interval():
    e = stats.mean_over_images(np.ones(100), repeats=16)
    assert e.value == e.high == 1
    assert e.low == pytest.approx(stats.accuracy(np.ones(100)).low)


def test_repeats_count_as_independent_answers_at_most():
    scores = np.tile([0.45, 0.55], 50)  # images that differ less than even independent answers would
    e = stats.mean_over_images(scores, repeats=4)
    most = stats.accuracy(np.arange(400) < 200)
    assert (e.low, e.high) == pytest.approx((most.low, most.high))
    assert e.low < stats.accuracy(np.arange(10**6) < 5 * 10**5).low - 0.03  # without a cap it would be sure


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.accuracy([]),
        lambda: stats.accuracy([0.5, 2]),
        lambda: stats.accuracy([[1, 0]]),
        lambda: stats.worst_of_grid([[1]]),
        lambda: stats.pairwise_agreement([[1, 2]]),
        lambda: stats.reference_agreement([[1, 2]], [1]),
        lambda: stats.paired_difference([1, 0], [1]),
        lambda: stats.paired_difference([0.5], [1]),
    ],
)
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError):
        call()


def test_ratio_hand_worked():
    # a = (1, 2, 6), b = (1, 2, 3): r = 9/6; residuals a - r b = (-0.5, -1, 1.5), sd sqrt(1.75); t(2) = 4.302653.
    e = stats.ratio([1, 2, 6], [1, 2, 3])
    reach = 4.302653 * np.sqrt(1.75) / np.sqrt(3) / 2
    np.testing.assert_allclose([e.value, e.low, e.high], [1.5, 1.5 - reach, 1.5 + reach], rtol=1e-6)
    mean = stats.ratio([1, 2, 6])  # without denominators the t interval of a mean
    np.testing.assert_allclose([mean.value, mean.high], [3, 3 + 4.302653 * np.sqrt(7 / 3)], rtol=1e-6)
    falling = e.through(lambda r: 1 - r)
    assert falling.low < falling.value == -0.5 < falling.high
    assert stats.ratio([1, 2], [0, 0]) is None
    for bad in ([1.0], [[1.0, 2.0]], [1.0, np.nan]):
        with pytest.raises(ValueError, match="expected"):
            stats.ratio(bad)


def test_interval_of_a_ratio_covers_by_simulation():
    """2,000 draws of 60 images whose denominators vary and go with their numerators; the truth is E a / E b = 2."""
    rng = np.random.default_rng(6)
    below = rng.gamma(4.0, 1.0, (2000, 60))
    above = 2 * below + rng.normal(0, 1.5, below.shape)
    assert 0.93 <= coverage((stats.ratio(a, b) for a, b in zip(above, below)), 2) <= 0.97
    # Negative control: the mean of ratios is another quantity, and its interval misses this one.
    assert coverage((stats.ratio(a / b + 1 / b) for a, b in zip(above, below)), 2) < 0.5


def test_linearised_scores_hand_worked():
    # r = 6 / 4; images miss it by (2 - 1.5) / 2 and (4 - 4.5) / 2.
    score = stats.Ratio([2, 4], [1, 3]).score()
    assert score.values.tolist() == [1.75, 1.25]
    assert (score.bounded, score.unit, score.images) == (False, "", None)
    root = stats.Ratio([2, 4], [1, 3], "px", root=True).score(np.array([0, 5]))
    assert root.values == pytest.approx(1.5**0.5 + np.array([0.25, -0.25]) / (2 * 1.5**0.5))
    assert (root.unit, root.images.tolist()) == ("px", [0, 5])
    assert stats.Ratio([0, 0], [1, 2], root=True).score().values.tolist() == [0, 0]
    assert stats.Ratio([1, 2]).score().values.tolist() == [1, 2]
    empty = stats.Ratio([1, 2], [0, 0])
    assert empty.score() is empty.estimate() is empty.summary() is None
    with pytest.raises(ValueError, match="finite"):
        stats.Ratio([1, np.nan], [1, 1]).score()


def test_scores_have_the_mean_and_the_interval_of_their_ratio():
    rng = np.random.default_rng(8)
    above, below = rng.lognormal(size=(2, 50))
    for root in (False, True):
        one = stats.Ratio(above, below, root=root)
        assert one.score().values.mean() == pytest.approx(one.estimate().value, rel=1e-14)
    e = stats.ratio(stats.Ratio(above, below).score().values)  # the interval of their plain mean
    wanted = stats.Ratio(above, below).summary()
    assert (e.value, e.low, e.high) == pytest.approx([wanted[key] for key in ("value", "low", "high")])
    assert stats.Ratio(above, below, root=True).estimate().low == pytest.approx(wanted["low"] ** 0.5)
    # by the delta method the root's variance is that of the ratio over 4 r
    spreads = [stats.Ratio(above, below, root=root).score().values.std() for root in (False, True)]
    assert spreads[1] == pytest.approx(spreads[0] / 2 / wanted["value"] ** 0.5)
