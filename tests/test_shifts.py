"""Shifts beyond crop and roll, and what the translation probe makes of them, on known answers."""

import itertools

import numpy as np
import pytest
import torch
from fakes import Brightness, Constant, Scenes, Squares
from probing import encoded, probe, subject

from vitpos import probes
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
