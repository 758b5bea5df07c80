"""Intervals over seeds and images: worked by hand, dual to their tests, and covering what they say."""

from pathlib import Path

import numpy as np
import pytest

from vitpos import coverage, hierarchy, stats
from vitpos.coverage import Setting

TABLE = np.array([[1.0, 1, 0], [1, 0, 0]])  # [2 seeds, 3 images]


def test_crossed_variance_hand_worked():
    # Seeds' means 2/3, 1/3 have variance 1/18, over 2 seeds 1/36. Images' means 1, 1/2, 0 have variance 1/4, over 3
    # images 1/12. Residuals are -1/6, 1/3, -1/6 and their opposites: mean square (1/3) / 2, over 6 answers 1/36.
    parts = hierarchy.crossed(TABLE)
    assert parts.mean == pytest.approx(1 / 2)
    assert parts.seed_part == pytest.approx(1 / 36)
    assert parts.image_part == pytest.approx(1 / 12 - 1 / 36)
    # A third of the variance is the seeds': t is 12.7062 with one degree of freedom, 4.3027 with two.
    assert parts.quantile(0.025) == pytest.approx(12.7062 / 3 + 4.3027 * 2 / 3, abs=1e-4)


def test_mean_hand_worked():
    e = hierarchy.mean(TABLE)
    q, n = 12.7062 / 3 + 4.3027 * 2 / 3, 0.25 / (1 / 12)  # three answers' worth
    reach = q * np.sqrt(0.25 / n + q**2 / (4 * n**2)) / (1 + q**2 / n)
    assert (e.value, e.low, e.high) == pytest.approx((0.5, 0.5 - reach, 0.5 + reach), abs=1e-4)
    assert (e.n, e.seeds, e.level) == (3, 2, 0.95)
    assert e.over == "seeds and images, for this encoding under this recipe"
    assert e.as_dict()["seeds"] == 2


def test_difference_hand_worked():
    e = hierarchy.difference(TABLE, np.zeros((2, 3)))
    reach = (12.7062 / 3 + 4.3027 * 2 / 3) * np.sqrt(1 / 12)
    assert (e.value, e.low, e.high) == pytest.approx((0.5, max(-1, 0.5 - reach), min(1, 0.5 + reach)), abs=1e-4)
    assert "paired by both" in e.over


def test_many_tables_at_once_are_as_one_by_one():
    tables = np.random.default_rng(0).random((4, 3, 50)).round()
    together = np.stack(hierarchy.mean_bounds(tables))
    for i, table in enumerate(tables):
        e = hierarchy.mean(table)
        np.testing.assert_allclose(together[:, i], [e.value, e.low, e.high])


def test_bootstrap_resamples_seeds_and_images():
    """Of seeds' means and images' means that differ by so much the spread is known."""
    rng = np.random.default_rng(1)
    seeds = np.tile(np.linspace(0, 1, 40)[:, None], (1, 50))  # no image differs
    for table in (seeds, seeds.T):
        e = hierarchy.bootstrap(table)
        reach = 1.96 * np.linspace(0, 1, 40).std() / np.sqrt(40)
        assert (e.value - e.low, e.high - e.value) == (pytest.approx(reach, rel=0.12), pytest.approx(reach, rel=0.12))
        assert (e.value, e.n, e.seeds, e.level) == (pytest.approx(0.5), table.shape[1], table.shape[0], 0.95)
        assert (e.method, e.over) == ("percentile bootstrap of seeds and images", hierarchy.OVER_SEEDS)
    table = rng.random((3, 200)).round()  # more than one batch of resamples
    first = hierarchy.bootstrap(table)
    assert hierarchy.bootstrap(table) == first != hierarchy.bootstrap(table, seed=1)
    inner = hierarchy.bootstrap(table, level=0.5)
    assert first.low < inner.low < inner.high < first.high
    assert 0.5 < (first.high - first.low) / (2 * 1.96 * 0.5 / np.sqrt(table.size)) < 2.5
    together = np.stack(hierarchy.bootstrap_bounds(np.stack([table, 1 - table])))
    np.testing.assert_allclose(together[:, 0], [first.value, first.low, first.high])
    np.testing.assert_allclose(together[:, 1], 1 - together[[0, 2, 1], 0])  # drawn alike


def test_what_never_varies_still_has_an_interval():
    always = hierarchy.mean(np.ones((3, 100)))
    one_answer_an_image = stats.accuracy(np.ones(100))
    assert always.high == 1
    assert always.low == pytest.approx(one_answer_an_image.low, abs=2e-3)  # by t, not the normal
    assert hierarchy.mean(np.zeros((3, 100))).high == pytest.approx(1 - always.low)
    alike = hierarchy.difference(np.ones((3, 100)), np.ones((3, 100)))
    assert (alike.value, alike.high) == (0, pytest.approx(1.984 / 102, abs=1e-4))
    assert alike.low == -alike.high
    parts = hierarchy.paired(np.ones((3, 100)), np.ones((3, 100)))
    assert hierarchy.different(parts) == pytest.approx(1)


def test_answers_are_worth_no_more_than_if_all_were_independent():
    table = np.tile([[0.0, 1], [1, 0]], 50)  # seeds and images all have mean 1/2: nothing seems to vary
    e = hierarchy.mean(table)
    q = 1.984
    assert e.low == pytest.approx(0.5 - q * np.sqrt(0.25 / 200) / np.sqrt(1 + q**2 / 200), abs=2e-4)


def test_scores_on_their_own_scale_hand_worked():
    """The same variance and quantile, and nothing is cut off: at another place and scale all is moved along."""
    quantile, error = 12.7062 / 3 + 4.3027 * 2 / 3, np.sqrt(1 / 12)
    for scale, at in ((1, 0), (20, 3), (1e-3, 1e3)):
        e = hierarchy.mean(scale * TABLE + at, bounded=False)
        ends = at + scale * np.array([0.5, 0.5 - quantile * error, 0.5 + quantile * error])
        assert (e.value, e.low, e.high) == pytest.approx(ends, rel=1e-4 if at < 10 else 1e-9)
        d = hierarchy.difference(scale * TABLE + at, np.full((2, 3), at), bounded=False)
        assert (d.value, d.low, d.high) == pytest.approx(ends - at, rel=1e-4)
    assert e.method == "t, seeds crossed with images"
    assert hierarchy.difference(TABLE, np.zeros((2, 3))).low == -1  # shares are cut
    alike = hierarchy.paired(np.full((2, 3), 7.0), np.full((2, 3), 7.0), bounded=False)
    assert alike.variance == pytest.approx(1e-12)
    assert hierarchy.different(alike) == 1
    rounding = np.random.default_rng(0).uniform(1e-7, 2e-7, (5, 50))
    assert hierarchy.different(hierarchy.paired(3 * rounding, rounding, bounded=False)) > 0.05
    assert hierarchy.different(hierarchy.paired(3e3 * rounding, rounding, bounded=False)) < 1e-4


def test_a_difference_of_linearised_ratios_is_the_difference_of_the_ratios():
    """Paired by image: what makes an image large for both drops out."""
    rng = np.random.default_rng(5)
    below = rng.lognormal(size=(3, 200))
    above = below * rng.lognormal(sigma=0.1, size=(3, 200))
    mine, theirs = (
        np.stack([stats.Ratio(a, b).score().values for a, b in zip(top, below)]) for top in (above, 0.9 * above)
    )
    e = hierarchy.difference(mine, theirs, bounded=False)
    assert e.value == pytest.approx(0.1 * (above.sum(1) / below.sum(1)).mean())
    alone = hierarchy.mean(mine, bounded=False)
    assert e.high - e.low < 0.2 * (alone.high - alone.low)
    swapped = hierarchy.difference(mine, np.roll(theirs, 1, axis=1), bounded=False)
    assert swapped.high - swapped.low > 2 * (e.high - e.low)


def test_intervals_and_tests_agree():
    a, b = coverage.answers(np.random.default_rng(1), 1, Setting(4, 200, 0.8), [0.8, 0.7])[0]
    parts = hierarchy.paired(a, b)
    p = float(hierarchy.different(parts))
    assert 1e-6 < p < 0.5
    edges = hierarchy.difference(a, b, level=1 - p)
    assert min(abs(edges.low), abs(edges.high)) < 1e-9  # the interval at level 1 - p ends at 0
    assert float(hierarchy.different(hierarchy.paired(b, a))) == pytest.approx(p)
    low, high = hierarchy.difference_bounds(parts, level=0.9)
    for margin, within in ((1.001 * max(abs(low), abs(high)), True), (0.999 * max(abs(low), abs(high)), False)):
        assert (hierarchy.equivalent(parts, margin) < 0.05) == within  # 90% inside the margin: two tests at 5%
    assert hierarchy.equivalent(parts, abs(parts.mean) / 2) > 0.5


def test_far_away_is_all_but_certain():
    table = np.random.default_rng(2).random((5, 300)) < 0.9
    sure = hierarchy.paired(table, np.zeros(table.shape))
    assert 0 < hierarchy.different(sure) < 1e-6
    assert hierarchy.equivalent(sure, 0.1) > 1 - 1e-6


@pytest.mark.parametrize(
    "call",
    [
        lambda: hierarchy.mean([[1, 0, 1]]),  # one seed says nothing about seeds
        lambda: hierarchy.mean([1, 0]),
        lambda: hierarchy.bootstrap([[1, 0, 1]]),
        lambda: hierarchy.bootstrap([TABLE, TABLE]),
        lambda: hierarchy.mean([[1], [0]]),
        lambda: hierarchy.mean([[0, 2], [1, 1]]),
        lambda: hierarchy.mean([[0, np.nan], [1, 1]]),
        lambda: hierarchy.difference(TABLE, TABLE[:, :2]),
        lambda: hierarchy.mean([[0, np.inf], [1, 1]], bounded=False),
        lambda: hierarchy.difference(3 * TABLE, TABLE),
        lambda: hierarchy.equivalent(hierarchy.paired(TABLE, TABLE), 0),
    ],
)
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError, match=r"expected|above 0"):
        call()


def test_the_generating_model_is_what_it_says():
    rng, setting = np.random.default_rng(3), Setting(4, 2000, 0.9)
    chances = coverage.chances(rng, 60, setting, [0.9, 0.8])
    seeds = chances.mean(axis=-1)  # [60, 2, 4]
    np.testing.assert_allclose(seeds.mean(axis=(0, 2)), [0.9, 0.8], atol=0.006)
    spread = np.log(seeds / (1 - seeds)).std(axis=(0, 2))
    np.testing.assert_allclose(spread, coverage.SEED, rtol=0.2)
    same = np.corrcoef(seeds[:, 0].ravel(), seeds[:, 1].ravel())[0, 1]
    assert 0.1 < same < 0.55  # a part of a seed's luck is shared


# 2,000 draws have a standard error of 0.5 points; the full grid and its table are in docs/statistics.md (slow).
FAST = [
    (coverage.mean_of_one, Setting(3, 360, 0.9)),
    (coverage.mean_of_one, Setting(5, 360, 0.5)),
    (coverage.difference_of_two, Setting(3, 360, 0.9)),
    (coverage.difference_of_two, Setting(5, 200, 0.98)),
    (coverage.consistency, Setting(3, 200, 0.9)),
    (coverage.worst_position, Setting(3, 100, 0.9)),
    (coverage.mean_of_one, Setting(3, 360, 0.9, seed_sd=0.6)),  # seeds that differ more
    (coverage.difference_of_two, Setting(3, 360, 0.9, seed_sd=0.0)),  # and not at all
]


@pytest.mark.parametrize(("study", "setting"), FAST, ids=lambda v: getattr(v, "__name__", str(v)[8:-1]))
def test_intervals_cover_by_simulation(study, setting):
    assert 0.93 <= coverage.coverage(study, setting) <= 0.98


def test_the_simulation_sees_an_interval_that_is_too_sure():
    assert coverage.coverage(coverage.naive_mean, Setting(1, 360, 0.9), 1000) < 0.85
    assert coverage.coverage(coverage.plain_minimum, Setting(3, 100, 0.98), 500) < 0.88
    assert coverage.coverage(coverage.bootstrap_mean, Setting(3, 500, 0.5), 300) < 0.9
    assert coverage.coverage(coverage.slightly_too_sure, Setting(1, 100, 0.9), 200) < 0.91
    assert coverage.coverage(coverage.calibrated, Setting(1, 100, 0.9), 200) > 0.93  # which that is not

    def normal(rng, draws, setting):  # what the module does not do: the normal quantile at three seeds
        parts = hierarchy.crossed(coverage.answers(rng, draws, setting, [setting.accuracy])[:, 0])
        reach = 1.96 * np.sqrt(parts.variance)
        return coverage.held(parts.mean - reach, parts.mean + reach, setting.accuracy)

    assert coverage.coverage(normal, Setting(3, 360, 0.9)) < 0.93


def test_ratios_are_generated_as_they_say():
    setting = coverage.Skewed(40, 2000, 0.4)
    above, below = coverage.sums(np.random.default_rng(6), 25, setting, [1.0, 0.75])
    for power in (1.0, 0.5):
        found = ((above.sum(-1) / below.sum(-1)) ** power).mean(axis=(0, 2))
        wanted = [coverage.expected_ratio(setting, factor, power == 0.5) for factor in (1.0, 0.75)]
        np.testing.assert_allclose(found, wanted, rtol=0.02)
    assert 0.1 < np.corrcoef(*(above / below).mean(-1).swapaxes(0, 1).reshape(2, -1))[0, 1] < 0.5


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("name", coverage.RATIOS)
def test_intervals_of_ratios_cover_by_simulation(name, root):
    assert 0.93 <= coverage.coverage_of_ratio(name, coverage.Skewed(3, 360, 0.4), root, 1000) <= 0.98


def test_equivalence_is_wrongly_claimed_at_the_margin_in_one_of_twenty():
    rng, setting = np.random.default_rng(4), Setting(5, 360, 0.9)
    table = coverage.answers(rng, 600, setting, [0.9, 0.87])
    claimed = hierarchy.equivalent(hierarchy.paired(table[:, 0], table[:, 1]), 0.03) < 0.05
    assert claimed.mean() < 0.08
    inside = hierarchy.equivalent(hierarchy.paired(table[:, 0], table[:, 1]), 0.15) < 0.05
    assert inside.mean() > 0.5


@pytest.mark.slow
def test_the_documented_table_is_what_the_simulation_gives():
    """Some minutes. What lies outside of 93 to 97% is named in the text below the table."""
    text = (Path(__file__).parents[1] / "docs" / "statistics.md").read_text()
    lines = list(coverage.table())
    assert "".join(lines) in text
    assert "".join(coverage.table_of_ratios()) in text
    for line in lines[2:]:
        name, _, *shares = [part.strip() for part in line.strip("|\n").split("|")]
        for share in shares if "not to be done" not in name else []:
            named = share in text.split("Outside of 93 to 97%")[1]
            assert float(share) >= 93 or (named and "calibration error" in name), line
            assert float(share) <= 97 or "at least" in name or named, line
