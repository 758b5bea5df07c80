"""Tests of differences, worked by hand and against statsmodels; ranks that hold for all encodings at once."""

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from vitpos import coverage, significance
from vitpos.coverage import Setting


def test_mcnemar_hand_worked():
    a, b = np.zeros(50), np.zeros(50)
    a[:10], b[10:12] = 1, 1
    # Of 12 images that one alone has right, 2 or fewer are one's: 2 (1 + 12 + 66) / 2^12.
    assert significance.mcnemar(a, b) == pytest.approx(158 / 4096)
    assert significance.mcnemar(b, a) == pytest.approx(158 / 4096)
    assert significance.mcnemar(a, a) == 1
    assert significance.mcnemar(np.ones(50), np.ones(50)) == 1


def test_signs_of_few_seeds_cannot_be_significant():
    assert significance.sign_flip([0.1, 0.2, 0.3]) == significance.smallest_p(3) == 0.25
    assert significance.sign_flip([0.1, 0.2, -0.3]) == 1.0  # the mean is 0
    assert significance.sign_flip([0.1] * 6) == significance.smallest_p(6) == pytest.approx(1 / 32)
    # Of eight assignments of signs to 1, 2, 4 two give 5 or more: 1 + 4 + 2 and 4 + 2 - 1; both tails double it.
    assert significance.sign_flip([-1, 2, 4]) == pytest.approx(0.5)
    assert significance.sign_flip([3.0]) == 1.0
    assert significance.sign_flip(np.full(20, 0.1)) < 0.001


def test_holm_is_statsmodels():
    rng = np.random.default_rng(0)
    for p in (rng.random(9) ** 4, np.array([0.01, 0.01, 0.04])):
        np.testing.assert_allclose(significance.holm(p), multipletests(p, method="holm")[1])
    np.testing.assert_allclose(significance.holm([0.04, 0.01, 0.03]), [0.06, 0.03, 0.06])
    many = rng.random((4, 5))
    np.testing.assert_allclose(significance.holm(many), [significance.holm(row) for row in many])
    assert significance.holm([]).shape == (0,)


def test_ranks_hand_worked():
    rng = np.random.default_rng(1)
    scores = rng.random((4, 5, 400)) < np.array([0.2, 0.9, 0.55, 0.56])[:, None, None]
    first, second, third, fourth = significance.ranks(scores)
    assert (first.value, first.low, first.high, first.of) == (4, 4, 4, 4)
    assert (second.value, second.low, second.high) == (1, 1, 1)
    assert (third.low, third.high) == (fourth.low, fourth.high) == (2, 3)
    assert {third.value, fourth.value} == {2, 3}
    same = significance.ranks(np.repeat(scores[:1], 3, axis=0))
    assert [(r.value, r.low, r.high) for r in same] == [(1, 1, 3)] * 3


def test_ranks_of_other_scales_are_as_those_of_shares():
    scores = np.random.default_rng(1).random((3, 5, 400)) * np.array([0.2, 0.9, 0.55])[:, None, None]
    assert significance.ranks(100 * scores - 7, bounded=False) == significance.ranks(scores)
    with pytest.raises(ValueError, match=r"0\.\.1"):
        significance.ranks(100 * scores)


def test_ranks_cover_by_simulation_and_a_bootstrap_does_not():
    setting = Setting(3, 200, 0.9)
    for study in (coverage.ranks_of_equals, coverage.ranks_apart):
        assert coverage.coverage(study, setting, 400) >= 0.92
    assert coverage.coverage(coverage.naive_ranks, setting, 60) < 0.7


@pytest.mark.parametrize(
    "call",
    [
        lambda: significance.mcnemar([1, 0], [1]),
        lambda: significance.mcnemar([0.5], [1]),
        lambda: significance.mcnemar([], []),
        lambda: significance.sign_flip([]),
        lambda: significance.sign_flip([[1]]),
        lambda: significance.ranks(np.ones((1, 3, 10))),
        lambda: significance.ranks(np.ones((3, 1, 10))),
    ],
)
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError, match="expected"):
        call()
