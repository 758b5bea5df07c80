"""Resolution's controls: zoom, calibration, temperature and interpolation, on known answers."""

import numpy as np
import pytest
import timm
import torch
from fakes import Brightness, Constant, Scenes, Squares
from probing import OTHERS, encoded, other, probe, subject
from torch.nn import functional as F

import vitpos
from vitpos.probes import resolution


def test_zoom_is_resizing_cut_or_filled_up():
    x = torch.rand(1, 1, 12, 16)
    large = F.interpolate(x, (24, 32), mode="bilinear", antialias=True)
    assert torch.equal(resolution.zoom(x, (24, 32), "bilinear", centred=True), large[..., 6:18, 8:24])
    assert torch.equal(resolution.zoom(x, (24, 32), "bilinear", centred=False), large[..., :12, :16])
    small = F.interpolate(x, (8, 8), mode="bilinear", antialias=True)
    found = resolution.zoom(x, (8, 8), "bilinear", centred=True)
    assert torch.equal(found[..., 2:10, 4:12], small)
    assert found.sum() == pytest.approx(small.sum().item(), rel=1e-5)
    assert torch.equal(resolution.zoom(x, (12, 16), "bilinear", centred=True), x)
    corner = resolution.zoom(x, (8, 32), "bilinear", centred=False)  # smaller in height, larger in width
    assert torch.equal(corner[..., :8, :], F.interpolate(x, (8, 32), mode="bilinear", antialias=True)[..., :16])
    assert corner[..., 8:, :].abs().max() == 0


def test_zoom_is_refused_where_it_would_cut_content_off_a_canvas():
    found, arrays = probe("resolution", Brightness(), Squares(), options={"upsample": [[20, 24], [36, 48]]})
    zoom = found["kinds"]["zoom"]  # an object of 4 px at offset 2 at most: 10 of 12 px fit, 18 do not
    assert [row["size"] for row in zoom["rows"]] == [[12, 16], [20, 24]]
    assert [row["size"] for row in zoom["refused"]] == [[36, 48]]
    assert "36x48 px would leave the 12x16 canvas" in zoom["refused"][0]["why"]
    assert {row["policy"] for row in zoom["rows"]} == {"-"}
    np.testing.assert_array_equal(arrays["zoom/pred"][0], arrays["upsample/pred"][0])
    effect = found["grid_effect"]
    assert [row["size"] for row in effect] == [[20, 24]]
    assert effect[0]["difference"]["value"] == 0  # it reads brightness, whatever the grid
    assert "zoom" not in probe("resolution", Brightness(), options={"zoom": "none"})[0]["kinds"]
    assert "zoom" not in probe("resolution", Brightness(), options={"upsample": "none"})[0]["kinds"]


class Seen(Constant):
    """Class 1 where there is anything in a window (rows, columns), else class 0."""

    def __init__(self, *window):
        super().__init__()
        self.rows, self.columns = window

    def decide(self, x):
        return (x[:, :, self.rows, self.columns].amax((1, 2, 3)) > 0.1).long()


def test_the_probe_zooms_about_the_centre_and_on_a_canvas_from_the_corner():
    options = {"upsample": "none", "canvas": "none", "zoom": [[8, 8]]}
    # 4x4 px in the middle of a scene of 12x16, shrunk to 8x8: rows 4.7 to 7.3, columns 6 to 8 about the centre
    middle, corner = Seen(slice(5, 7), slice(6, 8)), Seen(slice(0, 3), slice(0, 4))
    for images, window, elsewhere in ((Scenes(), middle, corner), (Squares(), corner, middle)):
        assert (probe("resolution", window, images, options)[1]["zoom/pred"][1] == 1).all()
        assert (probe("resolution", elsewhere, images, options)[1]["zoom/pred"][1] == 0).all()


class Narrow(Brightness):
    """Right at the native width alone: what a larger grid breaks, and larger objects do not."""

    def decide(self, x):
        return super().decide(x) if x.shape[-1] == 16 else torch.zeros(len(x), dtype=torch.long)


def test_a_model_that_only_the_grid_breaks_is_told_from_one_that_objects_break():
    found, _ = probe("resolution", Narrow(), Scenes(), options={"upsample": [[24, 32]]})
    (row,) = found["grid_effect"]
    assert row["zoom"]["value"] == 1
    assert row["upsample"]["value"] == 0.25
    assert row["difference"]["high"] < 0


def test_scores_over_seeds_are_by_size_under_the_first_policy():
    pred = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    arrays = {"upsample/sizes": np.array([[12, 16], [12, 24], [12, 16], [12, 24]]), "upsample/pred": pred}
    scores = resolution.Resolution().scores(arrays, np.ones(3))
    assert {key: score.values.tolist() for key, score in scores.items()} == {
        "upsample/12x16": [True, True, False], "upsample/12x24": [True, False, False],
    }  # fmt: skip


def test_each_size_has_its_own_certainty():
    arrays = {
        "image_size": np.array([12, 16]), "upsample/sizes": np.array([[12, 16], [24, 32]]),
        "upsample/policies": np.array(["-", "-"]), "upsample/pred": np.array([[1, 1], [1, 0]]),
        "upsample/confidence": np.array([[0.9, 0.9], [0.7, 0.5]]),
        "upsample/entropy": np.array([[0.1, 0.3], [0.6, 1.0]]),
    }  # fmt: skip
    native, large = resolution.Resolution().summarize(arrays, np.ones(2))["kinds"]["upsample"]["rows"]
    assert (native["scale"], large["scale"]) == ([1, 1], [2, 2])
    assert (native["ece"], large["ece"]) == (pytest.approx(0.1), pytest.approx((0.3 + 0.5) / 2))
    assert native["ece_interval"] is None  # two images alike
    assert large["ece_interval"]["value"] == large["ece"]
    assert large["ece_interval"]["over"] == "images, for this model"
    assert (native["entropy"]["value"], large["entropy"]["value"]) == (pytest.approx(0.2), pytest.approx(0.8))


def test_the_table_shows_the_interval_of_the_calibration_error():
    """A number alone where there is none, and in files of early versions."""
    probe_, rng = resolution.Resolution(), np.random.default_rng(0)
    sure = np.stack([np.full(40, 0.9), rng.uniform(0.3, 1, 40)])
    arrays = {
        "image_size": np.array([12, 16]), "upsample/sizes": np.array([[12, 16], [24, 32]]),
        "upsample/policies": np.array(["-", "-"]), "upsample/pred": np.ones((2, 40)), "upsample/confidence": sure,
        "upsample/entropy": 1 - sure, "interpolation": np.array("bilinear"),
    }  # fmt: skip
    summary = probe_.summarize(arrays, np.ones(40))
    native, large = summary["kinds"]["upsample"]["rows"]
    (view,) = probe_.views(summary)
    assert [row[4] for row in view["rows"]] == [native["ece"], large["ece_interval"]]
    assert large["ece_interval"]["low"] > 0  # too timid by half
    for row in native, large:
        del row["ece_interval"]
    assert [row[4] for row in probe_.views(summary)[0]["rows"]] == [native["ece"], large["ece"]]


def test_a_policy_that_no_encoding_offers_is_no_silent_gap():
    """Of a model without a vitpos encoding too, of which no policy applies."""
    assert {"default", "extrapolate", "interpolate", "normalized", "ntk"} <= set(resolution.policy_names())
    with pytest.raises(ValueError, match="offers 'interpolat'; did you mean interpolate"):
        probe("resolution", Constant(), options={"policies": ["interpolat"]})


def test_entropy_and_calibration_stand_beside_accuracy():
    found, arrays = probe("resolution", Constant(), Scenes(), options={"upsample": [[24, 32]]})
    for row in found["kinds"]["upsample"]["rows"]:
        log = torch.tensor([0.0, 1.0, 0.0, 0.0]).log_softmax(0)  # its logits, whatever the image
        assert row["entropy"]["value"] == pytest.approx(-(log.exp() * log).sum().item(), rel=1e-5)
        assert row["ece"] == pytest.approx(log.exp().max().item() - 0.25, abs=1e-6)
    early = {key: array for key, array in arrays.items() if key.split("/")[-1] not in ("confidence", "entropy")}
    again = resolution.Resolution().summarize(early, Scenes().labels.numpy())
    assert "ece" not in again["kinds"]["upsample"]["rows"][0]


def test_the_temperature_changes_larger_grids_alone():
    options = {"upsample": [[24, 32]], "canvas": "none", "zoom": "none", "logn": True}
    model = encoded("rpb")
    found, arrays = probe("resolution", model, Squares(textured=True), options=options)
    assert [(row["size"], row["policy"]) for row in found["kinds"]["upsample"]["rows"]] == [
        ([12, 16], "interpolate"), ([24, 32], "interpolate"), ([12, 16], "interpolate, ln N"),
        ([24, 32], "interpolate, ln N"),
    ]  # fmt: skip
    entropy = arrays["upsample/entropy"]
    np.testing.assert_allclose(entropy[0], entropy[2], atol=1e-5)
    assert np.abs(entropy[1] - entropy[3]).max() > 1e-3
    assert str(model.position.spec) == "rpb"
    has_it, _ = probe("resolution", encoded("rpb + logn"), options=options)
    assert "has logn already" in has_it["kinds"]["upsample"]["not_applicable"]
    assert len(has_it["kinds"]["upsample"]["rows"]) == 2


@pytest.mark.parametrize("interpolation", resolution.INTERPOLATIONS)
def test_the_interpolation_is_named_and_used(interpolation):
    found, _ = probe("resolution", Brightness(), Scenes(), options={"interpolation": interpolation})
    assert found["interpolation"] == interpolation
    x = torch.rand(1, 1, 12, 16)
    resized = resolution.upsample(x, (20, 24), interpolation)
    assert torch.equal(resolution.upsample(x, (12, 16), interpolation), x)
    assert 0 <= resized.min() <= resized.max() <= 1
    others = [resolution.upsample(x, (20, 24), other) for other in resolution.INTERPOLATIONS if other != interpolation]
    assert all((resized - other).abs().max() > 1e-3 for other in others)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("resnet10t", "-"),
        ("vit_tiny_patch16_224", "interpolate (timm)"),
        ("vit_relpos_small_patch16_224", "timm's own"),
        ("vit_small_patch16_rope_224", "timm's own"),
        ("vit_small_patch16_dinov3", "timm's own"),
        ("swin_tiny_patch4_window7_224", "timm's own"),
        ("naflexvit_base_patch16_gap", "timm's own"),
    ],
)
def test_a_policy_is_named_wherever_positions_matter(name, policy):
    """Also of encodings that timm's modules hold, attached as they are."""
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2, "in_chans": 1}
    model = other(name) if name in OTHERS else timm.create_model(name, **small)
    assert subject(model).resize_policy() == policy
    if name.startswith("vit_small"):
        native = vitpos.attach(model, "native")
        assert subject(native).resize_policy() == policy
        assert subject(vitpos.attach(native, "native + logn")).resize_policy() == f"{policy} + -"


def test_an_unknown_interpolation_is_refused():
    with pytest.raises(ValueError, match=r"resolution\.interpolation must be one of bilinear, bicubic, nearest-exact"):
        probe("resolution", Constant(), options={"interpolation": "lanczos"})
