"""Shifts beyond crop and roll, and what the translation probe makes of them, on known answers."""

import itertools

import numpy as np
import pytest
import torch
from fakes import Brightness, Constant, Scenes, Squares
from probing import encoded, probe, subject

from vitpos import probes, stats
from vitpos.probes import _shifts, translation


def test_reflection_mirrors_at_the_border_pixel():
    x = torch.arange(1, 16.0).view(1, 1, 3, 5)
    padded = np.pad(x[0, 0].numpy(), ((2, 2), (4, 4)), mode="reflect")
    for dy, dx in itertools.product(range(-2, 3), range(-4, 5)):
        moved = _shifts.reflect_shift(x, (dy, dx))[0, 0].numpy()
        np.testing.assert_array_equal(moved, padded[2 - dy : 5 - dy, 4 - dx : 9 - dx])
    assert not np.array_equal(_shifts.reflect_shift(x, (1, 0))[0, 0], np.roll(x[0, 0], 1, 0))


@pytest.mark.parametrize("move", [_shifts.bilinear_shift, _shifts.fourier_shift])
def test_fractional_shifts_are_exact_at_whole_pixels_and_identical_at_none(move):
    for size in ((5, 6), (6, 7), (4, 4)):
        x = torch.rand(2, 3, *size, dtype=torch.float64)
        assert torch.equal(move(x, (0.0, 0.0)), x)
        for shift in ((1, 0), (-2, 3), (0, 1)):
            torch.testing.assert_close(move(x, shift), torch.roll(x, shift, (-2, -1)), atol=1e-12, rtol=0)
        assert (move(x, (0.5, 0.5)) - x).abs().max() > 0.05


def test_fractional_shifts_are_those_of_their_formulas():
    x = torch.tensor([[[[0.0, 1.0, 0.0, 3.0]]]], dtype=torch.float64)
    assert _shifts.bilinear_shift(x, (0, 0.25)).flatten().tolist() == [0.75, 0.75, 0.25, 2.25]
    at = torch.arange(8, dtype=torch.float64)
    for frequency in (1, 2, 3):  # a wave below the Nyquist frequency is moved without change
        wave = torch.cos(2 * torch.pi * frequency * at / 8 + 0.3).view(1, 1, 1, 8)
        moved = torch.cos(2 * torch.pi * frequency * (at - 0.3) / 8 + 0.3).view(1, 1, 1, 8)
        torch.testing.assert_close(_shifts.fourier_shift(wave, (0, 0.3)), moved, atol=1e-12, rtol=0)
        assert (_shifts.bilinear_shift(wave, (0, 0.3)) - moved).abs().max() > 1e-2
    nyquist = torch.cos(torch.pi * at).view(1, 1, 1, 8)
    torch.testing.assert_close(_shifts.fourier_shift(nyquist, (0, 0.3)), nyquist * np.cos(0.3 * np.pi))
    assert _shifts.fourier_shift(nyquist, (0, 0.5)).abs().max() < 1e-12
    step = torch.zeros(1, 1, 1, 32, dtype=torch.float64)
    step[..., 8:24] = 1
    assert _shifts.fourier_shift(step, (0, 0.5)).max() > 1.05  # it rings; nothing is clipped


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("size", [(5, 8), (224, 200)])  # rounding of coordinates grows with the side
def test_a_bilinear_shift_is_a_mean_of_whole_ones(size, dtype, within):
    x = torch.rand(2, 3, *size, dtype=dtype)
    for shift in ((0.25, 0), (0, -0.3), (-0.4, 1.7), (-3.1, -0.2), (0.5, 0.5)):
        expected = x.double()
        for dim, by in zip((-2, -1), shift):
            low, part = int(np.floor(by)), by - np.floor(by)
            expected = (1 - part) * expected.roll(low, dim) + part * expected.roll(low + 1, dim)
        moved = _shifts.bilinear_shift(x, shift)
        assert (moved.dtype, moved.device) == (x.dtype, x.device)
        torch.testing.assert_close(moved.double(), expected, atol=within, rtol=0)
    assert torch.equal(_shifts.bilinear_shift(x, (-2.0, 3.0)), x.roll((-2, 3), (-2, -1)))


def test_phases_run_along_the_diagonal():
    assert _shifts.phase_shifts((4, 4), (99, 99)) == [(k, k) for k in range(9)]
    assert _shifts.phase_shifts((16, 16), (99, 99)) == [(2 * k, 2 * k) for k in range(17)]
    assert (4, 8) in _shifts.phase_shifts((4, 8), (5, 99))
    assert _shifts.phase_shifts((4, 8), (5, 99))[-1] == (5, 10)
    assert _shifts.phase_shifts((4, 4), (3, 99))[-1] == (3, 3)


def translated(model, images=None, **options):
    return probe("translation", model, images or Squares(textured=True), options=options)


def test_agreement_peaks_at_whole_patches():
    found, _ = translated(encoded("none"), variants=["canvas"])
    phase = found["variants"]["canvas"]["phase"]
    assert phase["shifts"] == [[k, k] for k in range(9)]
    by = {tuple(row["phase"]): row for row in phase["by_phase"]}
    assert by[0, 0]["shifts"] == 2
    assert by[0, 0]["vs_reference"]["value"] == 1
    change = np.array(probe("translation", encoded("none"), Squares(textured=True))[1]["canvas/phase/logit_change"])
    assert change[[4, 8]].max() < 1e-5
    assert change[[1, 2, 3, 5, 6, 7]].max(axis=1).min() > 1e-3


def test_drift_is_nothing_without_position_and_something_with_it():
    for pos, moves in (("none", False), ("rpb(wrap=True)", False), ("ape1d", True)):
        group = translated(encoded(pos, std=0.3), variants=["circular"])[0]["variants"]["circular"]["patch"]
        assert (group["logit_drift"]["value"] > 1e-3) == moves
        assert (group["true_logit_variance"]["value"] > 1e-6) == moves
    constant = translated(Constant(), variants=["circular"])[0]["variants"]["circular"]["patch"]
    assert constant["true_logit_variance"]["value"] == 0
    assert constant["every"]["value"] == constant["worst"]["value"] == 0.25


def test_fractions_leave_an_exact_pixel_and_the_reference():
    _, arrays = translated(encoded("ape1d"), variants=["canvas", "circular"])
    for variant in ("canvas", "circular"):
        for name in translation.FRACTIONAL:
            shifts, change = arrays[f"{variant}/{name}/shifts"], arrays[f"{variant}/{name}/logit_change"]
            assert shifts[0].tolist() == [0, 0]
            assert shifts[-1].tolist() == [1, 1]
            assert change[0].max() == 0
            assert change[2].max() > 1e-3
    np.testing.assert_array_equal(arrays["circular/fourier/pred"][0], arrays["circular/patch/pred"][0])
    np.testing.assert_allclose(
        arrays["circular/bilinear/true_logit"][-1], arrays["circular/fourier/true_logit"][-1], atol=1e-3
    )
    for variant, name in itertools.product(("canvas", "circular"), translation.FRACTIONAL):  # and the same way
        assert arrays[f"{variant}/phase/shifts"][1].tolist() == [1, 1]
        pixel, whole = (arrays[f"{variant}/{group}/true_logit"][k] for group, k in ((name, -1), ("phase", 1)))
        np.testing.assert_allclose(pixel, whole, atol=1e-3)


@pytest.mark.parametrize("variant", ["crop", "circular", "reflect"])
def test_logits_are_those_of_the_shifted_raw_image(variant):
    """What is filled in is black before normalisation: 0 after it would be the mean colour."""
    model, images = encoded("ape1d"), Squares(n=16, textured=True)
    _, arrays = translated(model, images, variants=[variant], zhang=0, fractional=False)
    sub, at = subject(model, images), torch.arange(16)
    for group in ("patch", "subpatch"):
        phases = arrays[f"{variant}/{group}/shifts"][1:] % 4
        assert (phases == 0).all() if group == "patch" else phases.any(axis=1).all()  # the two are never pooled
        for s in (1, -1):
            shift = tuple(arrays[f"{variant}/{group}/shifts"][s].tolist())
            with torch.inference_mode():
                logits = sub.logits(translation.MOVES[variant](images.batch(at), shift))
            np.testing.assert_array_equal(arrays[f"{variant}/{group}/true_logit"][s], logits[at, images.labels])


VARIANTS = ["canvas", "crop", "circular", "reflect", "window"]


def test_zhang_draws_one_pair_a_batch_or_an_image():
    images = Squares(n=40, textured=True)
    for each in (False, True):
        found, arrays = translated(Constant(), images, variants=VARIANTS, zhang_per_image=each, phase=False)
        for variant in VARIANTS:
            entry, shifts = found["variants"][variant]["zhang"], arrays[f"{variant}/zhang/shifts"]
            assert entry["consistency"]["value"] == 1
            assert entry["accuracy"]["value"] == 0.25
            assert entry["per_image"] == each
            assert entry["pairs"] == 5 * 40
            assert shifts.shape == (5, 2, 40, 2)
            high = (9, 13) if variant == "canvas" else (2, 2)  # object of 4 px on 12x16; a seventh of the side
            assert entry["reach"] == list(high)
            assert (shifts.max((0, 1, 2)) < high).all()
            alike = [len({tuple(d) for d in shifts[p, k, part]}) == 1 for p in range(5) for k in (0, 1)
                     for part in (slice(0, 16), slice(16, 32))]  # fmt: skip
            assert all(alike) == (not each)


def test_zhang_is_agreement_at_the_shifts_that_are_stored():
    model, images = encoded("ape1d"), Squares(n=40, textured=True)
    _, arrays = translated(model, images, variants=["crop"], zhang=2, zhang_per_image=True)
    sub = subject(model, images)
    shifts = arrays["crop/zhang/shifts"]
    with torch.inference_mode():
        for p, k, i in ((0, 0, 3), (1, 1, 39), (0, 1, 20)):
            moved = _shifts.crop_shift(images.batch([i]), tuple(shifts[p, k, i].tolist()))
            assert sub.logits(moved).argmax().item() == arrays["crop/zhang/pred"][p, k, i]


def test_windows_of_the_enlarged_image():
    x = torch.rand(1, 1, 12, 16)
    big = torch.nn.functional.interpolate(x, (14, 18), mode="bilinear", antialias=True)
    assert torch.equal(translation.window(x, (1, 0), (2, 2)), big[..., 1:13, :16])
    assert translation.reach((224, 224)) == (32, 32)
    found, _ = translated(Constant(), Scenes(), variants="auto")
    assert set(found["variants"]) == {"crop", "circular", "window"}
    assert set(found["variants"]["window"]) == {"zhang"}


def test_always_right_is_right_under_reflection_of_what_stays():
    group = translated(Brightness(), Scenes(), variants=["reflect"], steps=1)[0]["variants"]["reflect"]["patch"]
    assert group["every"]["value"] == 1  # a square in the middle is seen whole or mirrored wherever the window lies


def test_groups_can_be_left_out_and_files_of_before_are_read():
    found, arrays = translated(Constant(), phase=False, fractional=False, subpatch=False, zhang=0)
    assert set(found["variants"]["canvas"]) == {"patch"}
    early = {key: array for key, array in arrays.items() if key.split("/")[-1] not in translation.DRIFT}
    labels = Squares(textured=True).labels.numpy()
    again = probes.get("translation").summarize(early, labels)
    assert "logit_drift" not in again["variants"]["canvas"]["patch"]
    with pytest.raises(ValueError, match="zhang must be 0"):
        translated(Constant(), zhang=-1)


TRUTH = np.array([1, 1, 2, 0])
PRED = np.array([[1, 1, 2, 2], [1, 0, 2, 2], [1, 0, 0, 1]])  # [3 shifts, 4 images]; the last one is wrong


def stored(**zhang):
    return {
        "patch_size": np.array([4, 4]), "patch_source": np.array("given"), "image_size": np.array([12, 16]),
        "crop/patch/shifts": np.array([[0, 0], [0, 4], [4, 0]]), "crop/patch/pred": PRED,
        "crop/patch/logit_change": np.array([[0.0] * 4, [0, 2, 0, 1], [0, 3, 1, 5]]),
        "crop/patch/logit_drift": np.array([[0.0] * 4, [1, 2, 3, 2], [3, 4, 1, 0]]),
        "crop/patch/logit_norm": np.array([4.0, 4, 4, 4]),
        "crop/patch/true_logit": np.array([[1.0, 1, 2, 0], [3, 1, 2, 0], [2, 1, 2, 3]]),
    } | {f"crop/zhang/{key}": np.array(value) for key, value in zhang.items()}  # fmt: skip


def test_numbers_of_stored_decisions_worked_by_hand():
    group = probes.get("translation").summarize(stored(), TRUTH)["variants"]["crop"]["patch"]
    consistency = {name: entry["value"] for name, entry in group["consistency"].items()}
    # pairs of shifts that agree, of three, by image: 3, 1, 1, 1; with the reference, of two: 2, 0, 1, 1
    assert consistency["pairwise"] == pytest.approx((3 + 1 + 1 + 1) / 12)
    assert consistency["vs_reference"] == pytest.approx((2 + 0 + 1 + 1) / 8)
    assert consistency["pairwise_given_correct"] == pytest.approx((3 + 1 + 1) / 9)
    assert consistency["vs_reference_given_correct"] == pytest.approx((2 + 0 + 1) / 6)
    assert [entry["value"] for entry in group["accuracy"]] == [0.75, 0.5, 0.25]
    assert (group["mean"]["value"], group["mean_shifted"]["value"]) == (0.5, 0.375)
    assert (group["every"]["value"], group["reference"]["value"]) == (0.25, 0.75)
    assert [entry["value"] for entry in group["agreement"]] == [0.75, 0.25]
    assert group["logit_drift"]["value"] == pytest.approx((2 + 3 + 2 + 1) / 16)
    assert group["true_logit_variance"]["value"] == pytest.approx((2 / 3 + 0 + 0 + 2) / 4)
    assert group["logit_change"]["largest"] == 5
    views = probes.get("translation").views({"variants": {"crop": {"patch": group}}})
    (row,) = next(view for view in views if view["key"] == "stability")["rows"]
    assert row[:3] == ["crop", "patch", 2]
    shown = "pairwise", "pairwise_given_correct", "vs_reference"
    assert row[3:6] == [group["consistency"][key] for key in shown]
    assert row[6:] == [group[key] for key in ("every", "logit_drift", "true_logit_variance")]
    assert (group["logit_change"]["differing_decisions"], group["logit_change"]["decisions"]) == (4, 8)
    assert [(row["distance"], row["shifts"], row["accuracy"]["value"]) for row in group["by_distance"]] == [
        (0, 1, 0.75), (4, 2, 0.375),
    ]  # fmt: skip


def test_phases_are_parted_into_whole_patches_and_between():
    arrays = stored()
    for key in ("pred", "logit_change"):
        arrays[f"crop/phase/{key}"] = np.concatenate([arrays[f"crop/patch/{key}"], arrays[f"crop/patch/{key}"][1:2]])
    arrays["crop/phase/shifts"] = np.array([[0, 0], [2, 2], [4, 4], [6, 6]])  # of patches of 4 px
    phase = probes.get("translation").summarize(arrays, TRUTH)["variants"]["crop"]["phase"]
    assert [(row["phase"], row["shifts"]) for row in phase["by_phase"]] == [([0, 0], 1), ([2, 2], 2)]
    for name, count, accuracy, agreement in (("whole", 1, 0.25, 0.25), ("between", 2, 0.5, 0.75)):
        assert phase[name]["shifts"] == count
        assert (phase[name]["accuracy"]["value"], phase[name]["vs_reference"]["value"]) == (accuracy, agreement)
    views = {view["key"]: view for view in probes.get("translation").views({"variants": {"crop": {"phase": phase}}})}
    assert [row[:3] for row in views["phase-parts"]["rows"]] == [["crop", "whole patches", 1], ["crop", "between", 2]]


def test_scores_over_seeds_are_of_the_same_quantities():
    drawn = [[[1, 1, 2, 0], [1, 0, 2, 1]], [[1, 1, 0, 0], [0, 1, 2, 2]]]  # [2 passes, 2 draws, 4 images]
    scores = probes.get("translation").scores(stored(pred=drawn), TRUTH)
    found = {name: score.values.tolist() for name, score in scores.items()}
    assert found["crop/patch/pairwise"] == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert found["crop/patch/vs_reference"] == [1, 0, 0.5, 0.5]
    assert found["crop/patch/mean_shifted"] == [1, 0, 0.5, 0]
    assert found["crop/patch/every"] == [True, False, False, False]
    assert found["crop/zhang"] == [0.5, 0.5, 0.5, 0]
    assert scores["crop/zhang"].repeats == 2
    assert found["crop/patch/worst"] == stats.worst_scores(PRED == TRUTH).tolist()
    assert {name: scores[f"crop/patch/{name}"].repeats for name in ("pairwise", "vs_reference", "mean_shifted")} == {
        "pairwise": 3, "vs_reference": 2, "mean_shifted": 2,
    }  # fmt: skip


def test_zhang_is_agreement_of_the_two_draws():
    drawn = [[[1, 1, 2, 0], [1, 0, 2, 1]], [[1, 1, 0, 0], [1, 1, 2, 0]]]  # [2 passes, 2 draws, 4 images]
    zhang = {"pred": drawn, "per_image": False, "reach": [2, 2]}
    entry = probes.get("translation").summarize(stored(**zhang), TRUTH)["variants"]["crop"]["zhang"]
    assert entry["consistency"]["value"] == pytest.approx((2 + 1 + 1 + 1) / 8)
    assert entry["accuracy"]["value"] == pytest.approx((4 + 3 + 3 + 3) / 16)
    assert (entry["passes"], entry["pairs"]) == (2, 8)
