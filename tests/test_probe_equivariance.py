"""Equivariance: features that move along have no error, those that do not are caught, borders show where they act; the
identities hold for the encodings that have them, and fail for the others."""

import numpy as np
import pytest
import torch
from fakes import Constant, Scenes, Squares
from probing import encoded, probe
from torch import nn

from vitpos.probes import _exact, equivariance

CELLS = 4


class Maps(Constant):
    """Puts out one map of the image's patches: their mean, changed by `change`."""

    def __init__(self, change=lambda maps: maps):
        super().__init__()
        self.change = change

    def forward_intermediates(self, x, intermediates_only):
        fine = nn.functional.pixel_unshuffle(x, CELLS)  # [b, 16, h, w]: every pixel of a patch
        return [self.change(fine)]


def only(model, images=None, **options):
    found, arrays = probe("equivariance", model, images or Squares(textured=True), options=options)
    return found["features"]["layers"][0], arrays


@pytest.mark.parametrize("shift", ["crop", "circular"])
def test_features_that_move_along_have_no_error(shift):
    layer, arrays = only(Maps(), shift=shift)
    assert layer["error"]["value"] == layer["border"]["value"] == layer["interior"]["value"] == 0
    assert layer["cosine"]["value"] == pytest.approx(1)
    assert layer["unrelated"]["value"] > 0.1
    assert [bool(e) for e in layer["by_distance"]] == [True, True]
    assert arrays["features/error"].shape == (1, 2, 40)


def place(maps):
    """Features that are a function of the place alone."""
    table = torch.randn(16, *maps.shape[-2:], generator=torch.Generator().manual_seed(0))
    return table.expand(len(maps), -1, -1, -1)


def test_features_that_do_not_are_caught():
    layer, _ = only(Maps(place))
    assert layer["error"]["value"] > 0.8 * layer["unrelated"]["value"]
    turns = iter(range(10**6))
    rolled, _ = only(Maps(lambda maps: torch.roll(maps, (next(turns) % 3, 0), (2, 3))))  # by another amount each time
    assert rolled["error"]["value"] > 0.3 * rolled["unrelated"]["value"]


def test_the_error_is_relative_to_the_features():
    """Features that move along and are half as large again have an error of one half, of whatever size they are."""
    for size in (1.0, 100.0):
        calls = iter(range(-1, 10**6))  # the grid of the layers; then of each batch the image and its eight shifts
        scaled = Maps(lambda maps, calls=calls, size=size: size * maps * (1.0 if next(calls) % 9 == 0 else 1.5))
        layer, _ = only(scaled)
        for kind in ("error", "border", "interior"):
            assert layer[kind]["value"] == pytest.approx(0.5, rel=1e-5)
        assert layer["cosine"]["value"] == pytest.approx(1)
        assert 0.1 < layer["unrelated"]["value"] < 3


def test_a_border_shows_where_it_acts():
    torch.manual_seed(0)
    convolution = nn.Conv2d(16, 4, 3, padding=1)
    layer, _ = only(Maps(convolution))
    assert layer["interior"]["value"] < 1e-6
    assert layer["border"]["value"] > 1e-2
    wrapping = nn.Conv2d(16, 4, 3, padding=1, padding_mode="circular")
    layer, _ = only(Maps(wrapping), shift="circular")
    assert layer["border"]["value"] < 1e-6


class Stages(Constant):
    """Puts out maps of every pixel of each patch, and of each two by two patches."""

    def forward_intermediates(self, x, intermediates_only):
        return [nn.functional.pixel_unshuffle(x, CELLS), nn.functional.pixel_unshuffle(x, 2 * CELLS)]


def test_shifts_are_whole_in_the_coarsest_stage():
    images = Squares(n=6, textured=True)
    images.canvas = (16, 24)
    found, arrays = probe("equivariance", Stages(), images)
    assert arrays["features/grids"].tolist() == [[4, 6], [2, 3]]
    assert (arrays["features/shifts"] % 8 == 0).all()
    assert [layer["error"]["value"] for layer in found["features"]["layers"]] == [0, 0]
    images.canvas = (8, 8)  # one cell of the coarse map: nothing can be shifted by it
    assert "8x8 px is not two" in probe("equivariance", Stages(), images)[0]["features"]["not_applicable"]


def test_pairs_correspond_as_written():
    before = torch.arange(12.0).view(1, 1, 3, 4)
    (a, b), distance = equivariance.corresponding(before, torch.roll(before, (1, -1), (2, 3)), (1, -1), wrap=False)
    assert torch.equal(a, b)
    assert a.flatten().tolist() == [1, 2, 3, 5, 6, 7]  # rows 0 and 1, columns 1 to 3
    assert distance.tolist() == [0, 0, 0, 0, 0, 0]
    (a, b), distance = equivariance.corresponding(before, before, (0, 1), wrap=False)
    assert distance.tolist() == [0] * 3 + [0, 1, 0] + [0] * 3
    assert equivariance.corresponding(before, before, (0, 1), wrap=True)[1].shape == (12,)
    maps = torch.randn(2, 3, 2, 2)
    flat = maps.flatten(2)
    pairs = [(flat[..., i] - flat[..., j]).square().sum(1) for i in range(4) for j in range(4) if i != j]
    torch.testing.assert_close(equivariance.spread(maps), torch.stack(pairs).mean(0))


EVERY, REFUSED = ("offset", "offset_fractional", "circular", "permutation"), "refused"
HAS = {  # the identities that hold, by encoding and readout
    "none": EVERY,
    "ape1d": ("permutation",),
    "sincos2d": ("permutation",),
    "rope_axial": ("offset", "offset_fractional", "permutation"),
    "rpb(wrap=True)": ("offset", "offset_fractional", "circular", "permutation"),
    "alibi2d": ("offset", "offset_fractional", "permutation"),
    "cpe": ("offset", "permutation"),
    "cpe(padding='circular')": ("offset", "circular", "permutation"),
}


@pytest.mark.parametrize("pos", HAS)
def test_identities_hold_for_those_that_have_them(pos):
    found, arrays = probe("equivariance", encoded(pos), Squares(n=8, textured=True), options={"exact_images": 3})
    held = tuple(name for name, entry in found["identities"].items() if entry.get("holds"))
    assert held == HAS[pos]
    for name, entry in found["identities"].items():
        if "cpe" in pos and name == "offset_fractional":
            assert "whole numbers" in entry["not_applicable"]
        else:
            assert arrays[f"{name}/change"].shape[1] == 3
            assert entry["holds"] or entry["largest"] > 1e-6


def test_a_constant_model_is_told_from_one_that_has_the_identities():
    images = Squares(n=8, textured=True)
    for model, constant in ((Constant(), True), (encoded("none"), False)):
        found, _ = probe("equivariance", model, images)
        assert found["identities"]["circular"]["holds"]
        assert found["constant"] == constant
        verdicts = {row[0]: row[1] for row in equivariance.Equivariance().views(found)[0]["rows"]}
        assert verdicts["image rolled by whole patches"] == "holds" + " (a constant model)" * constant


def test_a_certificate_is_of_the_largest_change_and_strict():
    held = _exact.certificate([[1e-13, 0.0], [3e-13, 1e-14]])
    assert (held["holds"], held["largest"], held["trials"], held["images"]) == (True, 3e-13, 2, 2)
    assert _exact.verdict(held) == "holds"
    failed = _exact.certificate([[0.0, 0.0], [0.0, 2e-12]])  # one image in one trial
    assert _exact.verdict(failed) == "fails"
    logits = torch.tensor([[1.0, -4.0], [0.0, 0.0]], dtype=torch.float64)
    change = _exact.relative_change(logits + torch.tensor([[0.0, 1e-3], [1e-3, 0.0]]), logits)
    np.testing.assert_allclose(change, [1e-3 / 4, 1e-3])  # over the largest logit; absolute where all are 0


def test_an_unrotated_class_token_leaks_the_position():
    images = Squares(n=8, textured=True)
    leaky = encoded("rope_axial", class_token=True, global_pool="token")
    assert not probe("equivariance", leaky, images)[0]["identities"]["offset"]["holds"]
    mended = encoded("rope_axial(free_prefix=True)", class_token=True, global_pool="token")
    assert probe("equivariance", mended, images)[0]["identities"]["offset"]["holds"]


class Ordered(nn.Module):
    def forward(self, x):
        return x * torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


def test_a_model_that_reads_the_order_of_its_tokens_is_caught():
    model = encoded("none")
    model.norm_pre = Ordered()
    found, _ = probe("equivariance", model, Squares(n=8, textured=True))
    assert not found["identities"]["permutation"]["holds"]
    assert found["identities"]["offset"]["holds"]


def test_what_does_not_apply_is_said_and_the_rest_is_measured():
    found, _ = probe("equivariance", Constant(), Scenes())
    assert "forward_intermediates" in found["features"]["not_applicable"]
    assert "no coordinates" in found["identities"]["offset"]["not_applicable"]
    assert found["identities"]["circular"]["holds"]
    with pytest.raises(ValueError, match=r"shift must be one of \['crop', 'circular'\]"):
        probe("equivariance", Constant(), options={"shift": "canvas"})
    np.testing.assert_array_equal(probe("equivariance", Maps())[1]["features/images"], np.arange(40))
