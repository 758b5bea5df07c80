"""timm's hub layout: what is saved there comes back with its encoding, or not at all, and never as a plain model."""

import json
import subprocess
import sys
from functools import partial

import pytest
import timm
import torch
from common import ENCODINGS, randomize_, relative_change
from safetensors.torch import load_file
from timm.models import get_model_args, load_state_dict, save_for_hf

import vitpos
from vitpos.names import rebuild
from vitpos.spec import REGISTRY

SMALL = {"img_size": (32, 48), "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
WAYS = ["create_model", "attach", "name", "generic"]


def made(way, pos, architecture="vit_tiny_patch16_224", **kwargs):
    """A model with random weights everywhere, made in one of the ways that there are."""
    kwargs = {**SMALL, **kwargs}
    if way == "create_model":
        model = vitpos.create_model(architecture, pos=pos, **kwargs)
    elif way == "attach":
        model = vitpos.attach(timm.create_model(architecture, **kwargs), pos)
    elif way == "name":
        first = vitpos.parse(pos).names[0]
        model = timm.create_model(f"vitpos_tiny_patch16_224_{first}", pos=pos, **kwargs)
    else:
        model = timm.create_model("vitpos_model", architecture=architecture, pos=pos, **kwargs)
    randomize_(model.double())
    return model.float().eval()


def saved(model, folder, safe=True):
    save_for_hf(model, folder, safe_serialization=safe)
    return json.loads((folder / "config.json").read_text())


def loaded(folder, **kwargs):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **kwargs).eval()


def same(a, b):
    """Equal logits, at the nominal size and at others."""
    images = [torch.randn(2, a.patch_embed.proj.in_channels, *size) for size in [(32, 48), (64, 32), (48, 96)]]
    with torch.no_grad():
        return all(torch.equal(a(x), b(x)) for x in images)


@pytest.mark.parametrize(
    ("pos", "way"),
    [(name, "attach") for name in ENCODINGS]
    + [(pos, way) for pos in ("ape1d", "rpb", "rope_mixed(theta=20.0) + ape1d") for way in WAYS if way != "attach"],
)
def test_it_comes_back_with_its_encoding(pos, way, tmp_path):
    model = made(way, pos)
    config = saved(model, tmp_path)
    assert config["architecture"].startswith("vitpos_")
    assert config["model_args"]["pos"] == model.position.resolved
    again = loaded(tmp_path)
    assert type(again) is type(model)
    assert same(again, model)
    with torch.no_grad():
        other = vitpos.attach(again, "none" if pos != "none" else "rope_axial")
        x = torch.randn(2, 3, 64, 96)  # (logn is none at the training size)
        assert relative_change(other(x), model(x)) > 1e-4  # the check can fail
    assert same(vitpos.load(vitpos.save(model, tmp_path / "m.safetensors")), model)


@pytest.mark.parametrize("safe", [True, False, "both"])
def test_both_kinds_of_weights(safe, tmp_path):
    model = made("attach", "rpb")
    saved(model, tmp_path, safe)
    assert same(loaded(tmp_path), model)


@pytest.mark.parametrize("architecture", ["deit3_small_patch16_224", "vit_small_patch16_36x1_224"])
def test_other_architectures(architecture, tmp_path):
    model = made("attach", "rope_mixed", architecture)
    config = saved(model, tmp_path)
    assert config["architecture"] == "vitpos_model"
    assert config["model_args"]["architecture"] == architecture
    again = loaded(tmp_path)
    assert same(again, model)
    assert saved(again, tmp_path / "second") == config
    assert same(loaded(tmp_path / "second"), model)


def test_the_training_grid_comes_back(tmp_path):
    """Tables of 2x8 and 4x4 are of one size: only the stored grid tells them apart."""
    model = made("attach", "ape1d + rpb", img_size=(32, 128))
    model.set_input_size(img_size=(64, 64))
    config = saved(model, tmp_path)
    assert config["model_args"]["grid"] == [2, 8]
    assert config["model_args"]["img_size"] == [64, 64]
    again = loaded(tmp_path)
    assert again.position.geometry.grid == (2, 8)
    assert again.patch_embed.img_size == (64, 64)
    assert same(again, model)
    larger = loaded(tmp_path, img_size=(96, 96))
    assert larger.position.geometry.grid == (2, 8)
    assert larger.patch_embed.img_size == (96, 96)
    assert same(larger, model)


def test_what_can_be_changed_on_loading(tmp_path):
    model = made("name", "rpb")
    saved(model, tmp_path)
    x = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        headless = loaded(tmp_path, num_classes=0)
        assert torch.equal(headless(x), model.forward_head(model.forward_features(x), pre_logits=True))
        maps = loaded(tmp_path, features_only=True, out_indices=(0, 1))(x)
        for a, b in zip(maps, model.forward_intermediates(x, [0, 1], intermediates_only=True)):
            assert torch.equal(a, b)
        assert loaded(tmp_path, in_chans=1)(x[:, :1]).shape == (2, 5)
        swapped = loaded(tmp_path, pos="alibi2d")
        vitpos.attach(model, "alibi2d")
        assert torch.equal(swapped(x), model(x))
    random = timm.create_model(f"local-dir:{tmp_path}")  # as timm does: the architecture only
    assert str(random.position.spec) == "rpb"
    assert vitpos.create_model(f"local-dir:{tmp_path}", pos="rope_axial").position.spec.names == ("rope_axial",)


def test_what_was_changed_after_loading_is_saved(tmp_path):
    """Arguments are written as they are at saving, not as the model was asked for."""
    saved(made("name", "rope_axial(theta=50.0)"), tmp_path)
    model = loaded(tmp_path)
    model.reset_classifier(3)
    vitpos.attach(model, "string + ape1d")
    again = loaded_after(model, tmp_path / "second")
    assert same(again, model)
    vitpos.convert(model, "rope_mixed")
    again = loaded_after(model, tmp_path / "third")
    assert same(again, model)
    assert again.position.spec.names == ("rope_mixed", "ape1d")


def loaded_after(model, folder):
    saved(model, folder)
    return loaded(folder)


def test_a_changed_default_does_not_change_what_was_saved(tmp_path, monkeypatch):
    for way in WAYS:
        saved(made(way, "rope_axial"), tmp_path / way)
    monkeypatch.setitem(REGISTRY["rope_axial"].__init__.__kwdefaults__, "theta", 7.0)
    for way in WAYS:
        assert loaded(tmp_path / way).position.shared["rope_axial"].theta == 100.0
    assert made("name", "rope_axial").position.shared["rope_axial"].theta == 7.0


def test_another_version_of_an_encoding_is_refused(tmp_path, monkeypatch):
    saved(made("attach", "rope_axial"), tmp_path)
    monkeypatch.setattr(REGISTRY["rope_axial"], "version", 2)
    with pytest.raises(ValueError, match="version 1 of rope_axial; this vitpos has version 2"):
        loaded(tmp_path)


def test_weights_of_another_encoding_are_refused(tmp_path):
    saved(made("attach", "rpb"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for args in ({"pos": "rope_axial"}, {"grid": [3, 3]}):
        other = {**config, "model_args": {**config["model_args"], **args, "versions": {}}}
        (tmp_path / "config.json").write_text(json.dumps(other))
        for kwargs in ({}, {"num_classes": 2}):
            with pytest.raises(ValueError, match="the weights are not those of"):
                loaded(tmp_path, **kwargs)


def test_a_plain_timm_model_stays_plain(tmp_path):
    plain = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    assert saved(plain, tmp_path)["architecture"] == "vit_tiny_patch16_224"
    assert type(loaded(tmp_path)) is timm.models.vision_transformer.VisionTransformer


def test_without_vitpos_it_does_not_load(tmp_path):
    """A process that never imported vitpos gets timm's error, not a plain model with the rest of the weights."""
    saved(made("attach", "rope_axial"), tmp_path)
    program = f"import timm; timm.create_model('local-dir:{tmp_path}', pretrained=True)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "Unknown model (vitpos_tiny_patch16_224_rope_axial)" in run.stderr


def test_a_description_loads_nothing(tmp_path):
    """What a file says cannot reach for a path or the network."""
    torch.save(timm.create_model("vit_tiny_patch16_224", **SMALL).state_dict(), tmp_path / "w.pth")
    for args in (
        {"checkpoint_path": str(tmp_path / "w.pth")},
        {"pretrained": True},
        {"pretrained_cfg_overlay": {"file": str(tmp_path / "w.pth")}},
    ):
        with pytest.raises(ValueError, match="must not load anything, got"):
            rebuild("vit_tiny_patch16_224", "rpb", **SMALL, **args)
    for architecture in ("hf-hub:a/b", f"local-dir:{tmp_path}", "../x", "vitpos_model"):
        with pytest.raises(ValueError, match="must be a timm model"):
            rebuild(architecture, "rpb")
    saved(made("generic", "rpb + rope_axial"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for args in ({"architecture": "hf-hub:a/b"}, {"pos": "__import__('os').system('true')"}, {"checkpoint_path": "w"}):
        other = {**config, "model_args": {**config["model_args"], **args}}
        (tmp_path / "config.json").write_text(json.dumps(other))
        with pytest.raises((ValueError, FileNotFoundError)):
            loaded(tmp_path)


def test_the_weights_of_both_layouts_are_the_same(tmp_path):
    model = made("attach", "rpb")
    saved(model, tmp_path)
    ours = load_file(vitpos.save(model, tmp_path / "ours.safetensors"))
    theirs = load_state_dict(str(tmp_path / "model.safetensors"))
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("pos", ENCODINGS)
def test_what_timm_writes_is_plain_json(pos):
    """No class, function or tensor among the arguments: timm's export would demand a replacement for it."""
    args = get_model_args(made("attach", pos))
    assert json.loads(json.dumps(args)) == {k: list(v) if isinstance(v, tuple) else v for k, v in args.items()}


def test_a_class_among_the_arguments_is_named(tmp_path):
    """timm takes attention and blocks as classes, which no file can hold; of other things it makes no model."""
    model = vitpos.create_model("vit_tiny_patch16_224", pos="rpb", attn_layer=timm.layers.Attention, **SMALL)
    assert model(torch.randn(1, 3, 32, 48)).shape == (1, 5)
    with pytest.raises(ValueError, match="card cannot be written as JSON: Object of type type"):
        vitpos.save(model, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises((ValueError, TypeError), match="attn_layer"):
        save_for_hf(model, tmp_path)
    with pytest.raises(ValueError, match=r"timm cannot build vit_tiny_patch16_224 with .*attn_layer"):
        vitpos.create_model("vit_tiny_patch16_224", pos="rpb", attn_layer=partial(timm.layers.Attention), **SMALL)
