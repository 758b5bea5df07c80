"""Location: planted codes are found whole, content alone is not, and the share of position is that which was mixed."""

import numpy as np
import pytest
import torch
from fakes import Constant, Squares
from probing import encoded, probe
from sklearn.linear_model import Ridge

from vitpos.probes import location

H, W = 3, 4
QUIET = {"folds": 2, "images": 0}


class Planted(Constant):
    """Puts out maps [b, 8, 3, 4]: a linear code of the place times `code`, what is alike in an image, and noise."""

    def __init__(self, code=0.0, image=0.0, noise=0.0, roll=False):
        super().__init__()
        self.code, self.image, self.noise, self.roll = code, image, noise, roll

    def forward_intermediates(self, x, intermediates_only):
        generator = torch.Generator().manual_seed(int(1e4 * x.sum().abs()))  # of these images, whichever call it is
        grid = torch.stack(torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")).float()  # [2, H, W]
        grid = (grid - grid.mean((1, 2), keepdim=True)) / grid.std((1, 2), keepdim=True, unbiased=False)
        mixing = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        mixing = mixing / mixing.square().sum().sqrt() * 2  # total variance of the code: 4 over 8 channels
        maps = self.code * torch.einsum("dk,khw->dhw", mixing, grid).expand(len(x), 8, H, W).clone()
        if self.roll:
            shifts = torch.randint(100, (len(x), 2), generator=generator).tolist()
            maps = torch.stack([torch.roll(one, shift, (1, 2)) for one, shift in zip(maps, shifts)])
        alike = torch.randn(len(x), 8, 1, 1, generator=generator) * 0.5**0.5
        noise = torch.randn(len(x), 8, H, W, generator=generator) * 0.5**0.5
        return [maps + self.image * alike + self.noise * noise, (maps + 2 * noise) * 3 + 7]


def layer(model, n=40, k=0, **options):
    found, arrays = probe("location", model, Squares(n=n), options={**QUIET, **options})
    return found["nets"]["trained"]["layers"][k], arrays


def test_a_planted_linear_code_is_found_whole():
    entry, arrays = layer(Planted(code=1.0), alpha=1e-3)
    for axis in ("row", "column"):
        assert entry[axis]["value"] == pytest.approx(1, abs=1e-6)
    assert entry["cells"]["value"] == 1
    assert entry["position_share"]["value"] == pytest.approx(1, abs=1e-6)
    assert arrays["trained/row"].shape == (2, 40)


def test_codes_that_move_with_the_content_are_caught():
    entry, _ = layer(Planted(code=1.0, roll=True))
    for axis in ("row", "column"):
        assert entry[axis]["value"] < 0.1
    assert entry["position_share"]["value"] < 0.1
    entry, _ = layer(Planted(image=1.0, noise=1.0))
    assert max(entry["row"]["value"], entry["column"]["value"]) < 0.05
    assert entry["cells"]["high"] < 0.5


def test_the_share_of_position_is_what_was_mixed():
    half, _ = layer(Planted(code=1.0, image=0.5, noise=0.75**0.5))  # variances 4, 1 and 3
    assert half["position_share"]["low"] < 0.5 < half["position_share"]["high"]
    assert half["position_share"]["value"] == pytest.approx(0.5, abs=0.08)
    # Few images do not inflate it, as they do the plain plug-in estimate: between images and places all is noise here.
    none = [layer(Planted(noise=1.0), n=n)[0]["position_share"]["value"] for n in range(4, 12)]
    assert abs(np.mean(none)) < 0.1
    noise = np.random.default_rng(0).normal(size=(4, H * W, 8))
    assert noise.mean(0).var(0).sum() / noise.reshape(-1, 8).var(0).sum() > 0.15


def test_ridge_from_sums_is_scikit_learns():
    rng = np.random.default_rng(0)
    z = rng.normal(3, 2, (12, H * W, 5)) * np.array([1, 10, 0.1, 1, 1])
    z[..., 3] = 4.0  # a constant feature
    places = np.array([[i, j] for i in range(H) for j in range(W)], float)
    z[..., 0] += places[:, 0]
    folds = torch.arange(12) % 3
    ridge = location.Ridge(3, 5, (H, W), torch.device("cpu"))
    ridge.add(torch.from_numpy(z[:7]), folds[:7])
    ridge.add(torch.from_numpy(z[7:]), folds[7:])
    ridge.solve(alpha=2.5)
    error, hit = ridge.score(torch.from_numpy(z), folds)
    for fold in range(3):
        train, test = z[folds != fold], z[folds == fold]
        mean, spread = train.reshape(-1, 5).mean(0), train.reshape(-1, 5).std(0)
        spread[3] = 1
        fitted = Ridge(alpha=2.5).fit((train.reshape(-1, 5) - mean) / spread, np.tile(places, (len(train), 1)))
        found = fitted.predict((test.reshape(-1, 5) - mean) / spread).reshape(-1, H * W, 2)
        np.testing.assert_allclose(error[folds == fold].numpy(), ((found - places) ** 2).sum(1), rtol=1e-9)
        right = found.round() == places  # row and column both
        np.testing.assert_allclose(hit[folds == fold].numpy(), right.all(-1).mean(1))
        assert (right[..., 0].mean() - right.all(-1).mean()) > 0.1


def test_pixels_of_patches():
    x = torch.arange(2 * 12 * 16.0).view(1, 2, 12, 16)
    found = location.patches(x, (4, 8))["pixels"]
    assert found.shape == (1, 64, 3, 2)
    assert torch.equal(found[0, :, 1, 1], x[0, :, 4:8, 8:16].flatten())
    assert location.patches(torch.rand(1, 3, 64, 64), (32, 32))["pixels"].shape == (1, 3 * 16 * 16, 2, 2)


def test_an_encoding_is_read_off_its_tokens_and_nulls_stand_beside_it():
    images = Squares(textured=True)
    found, _ = probe("location", encoded("sincos2d"), images, options=QUIET)
    layers = found["nets"]["trained"]["layers"]
    assert [entry["layer"] for entry in layers] == ["embedding", "block 1", "block 2"]
    assert layers[0]["row"]["value"] > 0.8
    assert layers[0]["position_share"]["value"] > layers[-1]["position_share"]["value"]
    assert max(found["nets"]["no_encoding"]["layers"][0][key]["value"] for key in ("row", "column")) < 0.5
    assert found["nets"]["random"]["layers"][0]["row"]["value"] > 0.8
    # Its weights are new ones, and the same again: not those that are evaluated, which are large.
    _, arrays = probe("location", encoded("sincos2d", std=2.0), images, options=QUIET)
    _, others = probe("location", encoded("sincos2d", std=0.1), images, options=QUIET)
    np.testing.assert_array_equal(arrays["random/row"], others["random/row"])
    assert np.abs(arrays["trained/row"] - others["trained/row"]).max() > 1
    np.testing.assert_array_equal(arrays["pixels/row"], others["pixels/row"])
    assert abs(layers[0]["selectivity"]) < 0.2  # untrained: nearly all of it is in the null of random weights
    none, _ = probe("location", encoded("none"), images, options=QUIET)
    assert none["nets"]["trained"]["layers"][0]["row"]["value"] < 0.5
    assert none["nets"]["no_encoding"] == {"not_applicable": "the model has no encoding to take away"}


def test_what_does_not_apply():
    assert "forward_intermediates" in probe("location", Constant())[0]["not_applicable"]
    assert "need 8 images" in probe("location", encoded("none"), Squares(n=6))[0]["not_applicable"]
    found, _ = probe("location", Planted(code=1.0), options=QUIET)
    assert "not made by name" in found["nets"]["random"]["not_applicable"]
    assert "no coordinates" in found["nets"]["no_encoding"]["not_applicable"]
    with pytest.raises(ValueError, match="folds"):
        probe("location", Planted(), options={"folds": 1})
