"""Probes on models whose answer is known, beside controls that must fail."""

import copy
import itertools
import random
import sys
import warnings

import numpy as np
import pytest
import timm
import torch
from fakes import CLASSES, Brightness, Constant, Quadrant, Scenes, Squares, Window
from probing import POOLED, SMALL, encoded, large, subject

import vitpos
from vitpos import probes
from vitpos.probes import resolution, translation


def results(model, images=None, translation=None, resolution=None):
    arrays = probes.evaluate(subject(model, images), {"translation": translation or {}, "resolution": resolution or {}})
    return probes.summarize(arrays), arrays


def vit(pos_embed, **kwargs):
    torch.manual_seed(0)
    args = SMALL | POOLED | dict(pos_embed=pos_embed, dynamic_img_size=True) | kwargs
    # At its start the background outweighs the object: a position added to the tokens cancels in the mean, and all
    # images get one decision. So: large weights, and logits centred over the data set.
    model = large(timm.create_model("vit_tiny_patch16_224", **args))
    with torch.no_grad():
        model.head.bias -= model((Squares(textured=True).batch(range(40)) - 0.25) / 0.5).mean(0)
    return model


# --- shifts-------


def shifts_as_defined(shift):
    """Equals the definition, pixel by pixel, on a grid where no two pixels are alike."""
    images = torch.arange(1, 16.0).view(1, 1, 3, 5)
    for dy, dx in itertools.product(range(-4, 5), repeat=2):
        moved = torch.zeros_like(images)
        for i, j in itertools.product(range(3), range(5)):
            if 0 <= i - dy < 3 and 0 <= j - dx < 5:
                moved[..., i, j] = images[..., i - dy, j - dx]
        if not torch.equal(shift(images, (dy, dx)), moved):
            return False
    return True


def test_shifts_of_normalised_pixels_are_those_of_pixels():
    """Bit for bit, at shifts that leave nothing in view too; with another black they are not."""
    x = torch.rand(2, 3, 5, 7)
    sub = probes.Subject(Constant(), Squares(), mean=[0.3], std=[0.7])
    assert sub.black.shape == (1, 1, 1, 1)
    for shift in itertools.product(range(-8, 9, 2), repeat=2):
        after = sub.normalized(translation.crop_shift(x, shift))
        assert torch.equal(translation.crop_shift(sub.normalized(x), shift, sub.black), after)
        if shift != (0, 0):
            assert not torch.equal(translation.crop_shift(sub.normalized(x), shift), after)


def test_crop_shift_is_as_defined_and_broken_ones_are_caught():
    assert shifts_as_defined(translation.crop_shift)
    assert not shifts_as_defined(lambda x, d: torch.roll(x, d, (-2, -1)))
    assert not shifts_as_defined(lambda x, d: translation.crop_shift(x, (d[1], d[0])))
    assert not shifts_as_defined(lambda x, d: translation.crop_shift(x, (-d[0], -d[1])))


def test_circular_shift_moves_down_and_right_and_wraps():
    x = torch.arange(6.0).view(1, 1, 2, 3)
    assert translation.circular_shift(x, (1, 1)).flatten().tolist() == [5, 3, 4, 2, 0, 1]


def test_groups_never_mix_patch_and_subpatch():
    whole = translation.patch_shifts((4, 8), (12, 16), 2)
    assert whole[0] == (0, 0)
    assert all(dy % 4 == 0 and dx % 8 == 0 for dy, dx in whole)
    assert len(whole) == 5 * 3
    phases = translation.subpatch_shifts((4, 16))
    assert phases[0] == (0, 0)
    assert set(phases) == set(itertools.product(range(4), (0, 4, 8, 12)))
    groups = translation.canvas_positions(Squares(), (4, 4))
    assert groups["patch"] == list(itertools.product((0, 4, 8), (0, 4, 8, 12)))


# --- known answers


def test_constant_classifier_is_consistent_and_at_chance():
    out, _ = results(Constant())
    patch = out["probes"]["translation"]["variants"]["canvas"]["patch"]
    assert patch["consistency"]["pairwise"]["value"] == patch["consistency"]["vs_reference"]["value"] == 1
    assert patch["mean"]["value"] == patch["worst"]["value"] == out["accuracy"]["value"] == 0.25
    assert patch["logit_change"] | {"decisions": 0} == dict(
        largest=0, decisions=0, differing_decisions=0, images_with_a_difference=0
    )


def test_always_right_model_is_right_everywhere():
    out, _ = results(Brightness(), translation={"variants": ["canvas", "crop", "circular"], "steps": 1})
    for variant in ("canvas", "circular"):
        for name in ("patch", "subpatch", "phase"):
            group = out["probes"]["translation"]["variants"][variant][name]
            assert group["every"]["value"] == 1
            assert group["mean"]["value"] == group["worst"]["value"] == 1
    for kind in out["probes"]["resolution"]["kinds"].values():
        assert all(row["accuracy"]["value"] == 1 for row in kind["rows"] if min(row["scale"]) >= 1)
    crop = out["probes"]["translation"]["variants"]["crop"]["patch"]  # what left the frame cannot be read
    assert crop["mean"]["value"] < 1


def test_model_that_sees_one_pixel_is_right_exactly_there():
    out, _ = results(Window())
    patch = out["probes"]["translation"]["variants"]["canvas"]["patch"]
    seen = {tuple(d): a["value"] for d, a in zip(patch["shifts"], patch["accuracy"])}
    assert all(value == (1 if d == (4, 4) else 0.25) for d, value in seen.items())
    assert len(seen) == 12
    assert patch["mean_shifted"]["value"] == pytest.approx((1 + 10 * 0.25) / 11)
    assert patch["worst"]["value"] == 0.25
    assert [4, 4] not in patch["worst"]["shifts"]
    # Black at (5, 5) is black after padding too: were it filled after normalisation it would read 0.25 ->
    # class 0 still, so look at a canvas that grows: the object stays on its tokens.
    rows = out["probes"]["resolution"]["kinds"]["canvas"]["rows"]
    assert len({row["accuracy"]["value"] for row in rows}) == 1


def test_model_that_reads_position_only():
    out, arrays = results(Quadrant())
    patch = out["probes"]["translation"]["variants"]["canvas"]["patch"]
    pred = arrays["translation/canvas/patch/pred"]
    assert (pred == pred[:, :1]).all()  # the decision is a function of the place alone
    share = np.bincount(pred[:, 0], minlength=CLASSES)
    expected = (share * (share - 1)).sum() / (12 * 11)
    assert patch["consistency"]["pairwise"]["value"] == pytest.approx(expected)
    assert patch["mean"]["value"] == 0.25


@pytest.mark.parametrize("variant", ["canvas", "circular"])
def test_position_free_model_is_invariant_to_whole_patches_only(variant):
    images = Squares(textured=True)
    for pos_embed, invariant in (("none", True), ("learn", False)):
        out, arrays = results(vit(pos_embed), images, translation={"variants": [variant]})
        assert len(np.unique(arrays["plain/pred"])) == CLASSES
        groups = out["probes"]["translation"]["variants"][variant]
        change = groups["patch"]["logit_change"]
        assert (change["largest"] < 1e-5) == invariant
        assert (change["differing_decisions"] == 0) == invariant
        assert (groups["patch"]["consistency"]["pairwise"]["value"] == 1) == invariant
        assert groups["subpatch"]["logit_change"]["largest"] > 1e-3


# --- nothing but the condition changes ------------------------------


def test_zero_shift_and_native_size_are_plain_evaluation_bit_for_bit():
    model, images = vit("learn").eval(), Scenes(textured=True)
    sub = subject(model, images)
    with torch.inference_mode():
        expected = torch.cat([model((images.batch(i) - 0.25) / 0.5) for i in torch.arange(40).split(16)])
        got = torch.cat([sub.logits(sub.pixels(i)) for _, i in sub.batches()])
    assert torch.equal(got, expected)
    x = images.batch(torch.arange(5))
    for same in (
        translation.crop_shift(x, (0, 0)), translation.circular_shift(x, (0, 0)),
        resolution.upsample(x, (12, 16)), resolution.extend(x, (12, 16)),
    ):  # fmt: skip
        assert torch.equal(same, x)
    assert not torch.equal(resolution.upsample(x, (12, 20))[..., :16], x)
    _, arrays = results(model, images)
    for key in ("translation/crop/patch", "translation/circular/subpatch", "resolution/upsample"):
        np.testing.assert_array_equal(arrays[f"{key}/pred"][0], arrays["plain/pred"])
    np.testing.assert_array_equal(arrays["plain/pred"], expected.argmax(1).numpy())


def test_larger_canvas_keeps_the_tokens():
    images = Squares(textured=True)
    larger = resolution.extend(images.batch([1]), (16, 32))
    assert torch.equal(larger, images.place([1], (1, 1), canvas=(16, 32)))


def test_evaluation_leaves_the_model_and_the_random_state_as_they_were():
    model = vit("learn", proj_drop_rate=0.5).train()
    model.blocks[0].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002

    class Greedy(Squares):
        def batch(self, indices):
            torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
            return super().batch(indices)

    sub = subject(model, Greedy())
    torch.set_rng_state(states[0]), np.random.seed(0)  # noqa: NPY002
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = probes.evaluate(sub, {"translation": {"steps": 1}})
    again = probes.evaluate(sub, {"translation": {"steps": 1}})
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[2]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    for key in first:  # dropout is off, although the model is in training mode
        np.testing.assert_array_equal(first[key], again[key])
    assert model(torch.zeros(1, 1, 12, 16)).requires_grad


def test_numbers_come_from_the_stored_arrays_alone(tmp_path):
    out, arrays = results(vit("learn"), Squares(textured=True))
    np.savez(tmp_path / "p.npz", **arrays)
    with np.load(tmp_path / "p.npz", allow_pickle=False) as stored:
        again = probes.summarize(dict(stored))
    assert again == out
    changed = dict(arrays) | {"plain/pred": (arrays["plain/pred"] + 1) % CLASSES}
    assert probes.summarize(changed) != out


# --- what does not apply --------------------------------------------


def test_data_without_placement_says_why():
    out, _ = results(Constant(), Scenes(), translation={"variants": ["canvas", "crop"]})
    variants = out["probes"]["translation"]["variants"]
    assert "crop or circular" in variants["canvas"]["not_applicable"]
    assert "patch" in variants["crop"]
    assert "digits" in out["probes"]["resolution"]["kinds"]["canvas"]["not_applicable"]


def test_model_of_one_size_keeps_its_native_row_and_says_what_helps():
    out, _ = results(vit("learn", dynamic_img_size=False), Scenes())
    kind = out["probes"]["resolution"]["kinds"]["upsample"]
    assert [row["size"] for row in kind["rows"]] == [[12, 16]]
    assert "dynamic_img_size" in kind["refused"][0]["why"]
    assert len(kind["refused"]) == 7
    assert "refused" not in results(vit("learn"), Scenes())[0]["probes"]["resolution"]["kinds"]["upsample"]


def test_convolutional_network_by_its_stride():
    model = timm.create_model("resnet10t", in_chans=1, num_classes=CLASSES)
    out, _ = results(model, Scenes(n=8), resolution={"upsample": [32, [32, 64]]})
    assert out["probes"]["translation"]["patch_source"] == "total stride"
    assert out["probes"]["translation"]["patch_size"] == [32, 32]
    assert "patch" not in out["probes"]["translation"]["variants"]["crop"]  # 12x16 px have no whole shift of 32
    assert [r["size"] for r in out["probes"]["resolution"]["kinds"]["upsample"]["rows"]][1:] == [[32, 32], [32, 64]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": {"upsample": [14]}}, r"14 of size 14x14 is not a multiple of the patch \(4\): try 12 or 16"),
        ({"resolution": {"upsample": [[12, 2]]}}, "width 2 .* try 4"),
        ({"resolution": {"canvas": [8]}}, "only be larger"),
        ({"resolution": {"upsample": "24"}}, r"resolution\.upsample must be none, auto or a list.*'24'"),
        ({"resolution": {"upsample": [[1, 2, 3]]}}, "side or a"),
        ({"translation": {"variants": ["cropp"]}}, "variants"),
        ({"translation": {"steps": 0}}, "at least 1"),
        ({"translation": {"step": 1}}, "did you mean steps"),
        ({"translatoin": {}}, "did you mean translation"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        probes.evaluate(subject(Constant()), options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"translation": {"steps": "abc"}}, "translation.steps='abc' is str, expected int"),
        ({"translation": {"steps": True}}, "is bool, expected int"),
        ({"translation": {"subpatch": 1}}, "is int, expected bool"),
        ({"translation": {"variants": 5}}, "is int, expected str or list"),
        ({"resolution": {"policies": 5}}, "is int, expected str or list"),
    ],
)
def test_options_have_the_type_of_their_default(options, message):
    with pytest.raises(TypeError, match=message):
        probes.evaluate(subject(Constant()), options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"translation": {"variants": [["crop"]]}}, "auto or a list"),
        ({"resolution": {"policies": [5]}}, "list of resize policies"),
        ({"resolution": {"upsample": [24.0]}}, "a size is a side or a"),
    ],
)
def test_lists_hold_what_they_should(options, message):
    with pytest.raises(ValueError, match=message):
        probes.evaluate(subject(Constant()), options)


def test_one_image_is_refused_before_the_model_runs_over_positions():
    with pytest.raises(ValueError, match="at least 2 images"):
        probes.get("translation").collect(subject(Constant(), limit=1), probes.resolve("translation", {}))
    assert probes.evaluate(subject(Constant(), limit=1), {})["plain/pred"].shape == (1,)


class Travelling(Constant):
    def __init__(self):
        super().__init__()
        self.moves = []

    def to(self, device):
        self.moves.append(str(device))
        return self


def test_the_callers_model_is_put_back_where_it_was():
    model = Travelling()
    sub = subject(model, device="cpu:0")  # its weights are on "cpu"
    assert model.moves == []
    model.decide = lambda x: pytest.fail("the model ran elsewhere") if model.moves != ["cpu:0"] else x[9]
    with pytest.raises(IndexError):
        probes.evaluate(sub, {})
    assert model.moves == ["cpu:0", "cpu"]


def test_each_probe_says_what_patch_it_moved_by():
    out, _ = results(Constant())
    assert out["probes"]["resolution"]["patch_size"] == out["probes"]["translation"]["patch_size"] == [4, 4]


def test_bad_subjects():
    with pytest.raises(ValueError, match="batch_size"):
        probes.Subject(Constant(), Squares(), mean=[0], std=[1], batch_size=0)
    with pytest.raises(ValueError, match="channels"):
        probes.Subject(Constant(), Squares(), mean=[0] * 3, std=[1] * 3)
    with pytest.raises(ValueError, match="patch=") as error:
        probes.Subject(torch.nn.Identity(), Squares(), mean=[0], std=[1])
    assert "\n" not in str(error.value)


def test_limit_spreads_over_the_data_set():
    sub = subject(Constant(), limit=4)
    assert sub.ids == ["square-000", "square-010", "square-020", "square-030"]


def test_difference_to_a_baseline_is_over_the_same_images():
    _, a = results(Brightness())
    _, b = results(Constant())
    rows = probes.differences(a, b)
    assert all(r["difference"]["value"] == 0.75 for r in rows if r["kind"] in ("plain", "canvas"))
    assert {tuple(r["size"]) for r in rows if r["kind"] == "canvas"} == {
        (12, 16),
        (20, 24),
        (24, 32),
        (12, 24),
        (20, 16),
    }
    assert probes.differences(a, b | {"ids": b["ids"][::-1]}) == []


def test_a_difference_is_at_its_own_size_and_the_baselines_first_policy():
    truth = {"labels": np.zeros(4, int), "ids": np.arange(4).astype(str), "plain/pred": np.zeros(4, int)}
    sizes = np.array([[8, 8], [16, 16], [8, 8], [16, 16]])

    def at(*preds):
        key = "resolution/upsample/"
        return truth | {f"{key}sizes": sizes, f"{key}policies": np.array([*"aabb"]), f"{key}pred": np.array(preds)}

    mine = at([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1])
    theirs = at([0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1])
    rows = [row for row in probes.differences(mine, theirs) if row["kind"] == "upsample"]
    found = [(row["size"], row["policy"], row["difference"]["value"]) for row in rows]
    assert found == [([8, 8], "a", 0), ([16, 16], "a", 0.5), ([8, 8], "b", -0.5), ([16, 16], "b", 0)]
    assert [row["difference"]["p"] for row in rows] == [1, 0.5, 0.5, 1]


NEW_PROBE = """
import numpy as np
from vitpos.probes import register

@register("mine", definitions={"total": "a sum"})
class Mine:
    defaults = {"steps": 2}

    def collect(self, subject, options):
        return {"score": np.full(len(subject.ids), options["steps"])}

    def summarize(self, arrays, truth):
        return {"total": float(arrays["score"].sum())}
"""


def test_a_new_probe_is_one_new_file_and_a_duplicate_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(NEW_PROBE)
    before = probes.names()
    monkeypatch.setattr(probes, "__path__", [*probes.__path__, str(tmp_path)])
    try:
        probes.discover()
        assert probes.names() == sorted(["mine", *before])
        assert "mine" in probes.default_names()
        out = probes.summarize(probes.evaluate(subject(Constant()), {"mine": {"steps": 3}}))
        assert out["probes"]["mine"] == {"definitions": {"total": "a sum"}, "options": {"steps": 3}, "total": 120.0}
        with pytest.raises(ValueError, match="already registered"):
            probes.register("mine", definitions={})(type("Mine", (), {}))
    finally:
        probes.REGISTRY.pop("mine", None), probes.DEFINITIONS.pop("mine", None)
        sys.modules.pop("vitpos.probes.mine", None)
    assert probes.names() == before


def test_policies_are_compared_on_the_same_weights_and_put_back():
    model = encoded("rope_axial")
    policy, before = vitpos.resize_policy(model), copy.deepcopy(model.state_dict())
    options = {"policies": ["extrapolate", "interpolate"], "canvas": "none", "upsample": [[24, 32]]}
    arrays = probes.evaluate(subject(model, Squares(n=120, textured=True)), {"resolution": options})
    assert arrays["resolution/upsample/policies"].tolist() == ["extrapolate"] * 2 + ["interpolate"] * 2
    native, other = arrays["resolution/upsample/pred"][[0, 2]], arrays["resolution/upsample/pred"][[1, 3]]
    np.testing.assert_array_equal(native[0], native[1])  # no policy at the native size
    assert (other[0] != other[1]).any()
    assert vitpos.resize_policy(model) == policy
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    with pytest.raises(ValueError, match="stretch"):
        probes.evaluate(subject(model), {"resolution": {"policies": ["stretch"]}})
    out, _ = results(Constant(), Scenes(), resolution={"policies": ["interpolate"]})
    assert "no vitpos encoding" in out["probes"]["resolution"]["kinds"]["upsample"]["not_applicable"]


def test_no_warning_is_raised():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results(Quadrant(), Scenes(), translation={"steps": 1})


# --- precision ------------------------------------------------------


def test_bf16_is_computed_so_and_says_how_far_it_agrees():
    model = encoded("ape1d")
    exact = probes.evaluate(subject(model, Squares(textured=True)), {"translation": {}})
    low = probes.evaluate(subject(model, Squares(textured=True), precision="bf16"), {"translation": {}})
    assert "float32" not in probes.summarize(exact)
    found = probes.summarize(low)["float32"]
    np.testing.assert_array_equal(low["plain/float32"], exact["plain/pred"])
    assert found["accuracy"] == probes.summarize(exact)["accuracy"]
    assert found["agreement"]["value"] == (low["plain/pred"] == exact["plain/pred"]).mean()
    assert 1e-4 < found["logit_drift"]["value"] < 0.1
    key = "translation/canvas/patch/true_logit"
    assert 1e-4 < np.abs(low[key] - exact[key]).max() < 1.0


def test_what_is_exact_is_in_float64_whatever_the_precision():
    model, images = encoded("ape1d"), Squares(textured=True)
    x = images.batch(torch.arange(6))
    low, full = subject(model, images, precision="bf16"), subject(model, images)
    with torch.inference_mode():
        assert torch.equal(low.precise().logits(x), full.precise().logits(x))
        assert not torch.equal(low.logits(x), full.logits(x))
