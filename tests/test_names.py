"""Every encoding under names in timm's registry: what timm does with a name works with these."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from common import ENCODINGS, randomize_
from timm.models import get_pretrained_cfg
from timm.models._features import FeatureGetterNet

import vitpos
from vitpos import hub, names
from vitpos.backbone import position_of

SMALL = {"img_size": (32, 48), "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 3}
SIZES = ["tiny", "small", "base"]
ROOT = Path(vitpos.__file__).parent.parent


def small(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **kwargs}).eval()


def test_every_encoding_has_its_names():
    wanted = {f"vitpos_{size}_patch16_224_{name}" for size in SIZES for name in ENCODINGS} | {"vitpos_model"}
    assert set(timm.list_models("vitpos_*")) == wanted
    assert set(timm.list_models(module="names")) == wanted
    assert not timm.list_models("vitpos_*", pretrained=True)
    assert not any("native" in name for name in wanted)


@pytest.mark.parametrize("name", ENCODINGS)
def test_each_name_is_timms_model_with_the_encoding(name):
    for size in SIZES:
        full, base = f"vitpos_{size}_patch16_224_{name}", f"vit_{size}_patch16_224"
        torch.manual_seed(4)
        with torch.device("meta"):
            model = timm.create_model(full, depth=1)
            plain = timm.create_model(base, depth=1)
        assert str(model.position.spec) == name
        assert model.embed_dim == plain.embed_dim
        ours, theirs = get_pretrained_cfg(full), get_pretrained_cfg(base)
        for key in ("input_size", "mean", "std", "interpolation", "pool_size", "classifier", "first_conv"):
            assert getattr(ours, key) == getattr(theirs, key), key
        assert not ours.has_weights
        assert theirs.has_weights
        assert ours.architecture == model.pretrained_cfg["architecture"] == full
        assert model.feature_info == plain.feature_info
        assert model.get_submodule(ours.classifier) is model.head
        assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 224, 224)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_name_gives_what_create_model_gives(name):
    model = small(f"vitpos_tiny_patch16_224_{name}", num_classes=5)
    torch.manual_seed(0)
    other = vitpos.create_model("vit_tiny_patch16_224", pos=name, num_classes=5, **SMALL).eval()
    for a, b in zip(model.state_dict().items(), other.state_dict().items()):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    x = torch.randn(2, 3, 64, 32)
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("name", ENCODINGS)
def test_features_only(name):
    full = f"vitpos_small_patch16_224_{name}"
    features = small(full, features_only=True, out_indices=(0, 2), in_chans=1)
    assert isinstance(features, FeatureGetterNet)
    assert (features.feature_info.channels(), features.feature_info.reduction()) == ([48, 48], [16, 16])
    x = torch.randn(2, 1, 64, 96)
    maps = features(x)
    assert [tuple(m.shape) for m in maps] == [(2, 48, 4, 6)] * 2
    whole = small(full, in_chans=1)
    for a, b in zip(maps, whole.forward_intermediates(x, [0, 2], intermediates_only=True)):
        assert torch.equal(a, b)


def test_what_timm_does_with_a_name(tmp_path):
    name = "vitpos_tiny_patch16_224_rope_mixed"
    x = torch.randn(2, 1, 64, 32)
    model = small(name, num_classes=0, in_chans=1, global_pool="avg")
    assert model(x).shape == (2, 48)
    model = small(name, in_chans=1, num_classes=7, drop_path_rate=0.1, reg_tokens=4, dynamic_img_size=True)
    assert model(x).shape == (2, 7)
    model = small(name, dynamic_img_pad=True)
    assert model(torch.randn(1, 3, 33, 50)).shape == (1, 1000)
    with pytest.raises(ValueError, match="not a multiple of the patch size"):
        small(name)(torch.randn(1, 3, 33, 50))
    model = small(name, pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3), "num_classes": 4})
    assert timm.data.resolve_input_data_config(model)["mean"] == (0.1, 0.2, 0.3)
    assert model.num_classes == 4

    randomize_float(model)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    again = small(name, num_classes=4, checkpoint_path=str(tmp_path / "weights.pth"))
    x = torch.randn(2, 3, 64, 32)
    assert torch.equal(again(x), model(x))
    overlay = {"file": str(tmp_path / "weights.pth"), "num_classes": 4}
    again = small(name, pretrained=True, pretrained_cfg_overlay=overlay)
    assert torch.equal(again(x), model(x))
    gray = small(name, pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, num_classes=2)
    assert torch.equal(gray.position.layers[1]["rope_mixed"].weight, model.position.layers[1]["rope_mixed"].weight)
    assert gray(x[:, :1]).shape == (2, 2)


def randomize_float(model):
    randomize_(model.double())
    model.float()


def test_the_weights_of_another_encoding_are_refused(tmp_path):
    """timm loads leniently where the number of classes differs: then too."""
    torch.save(small("vitpos_tiny_patch16_224_rpb").state_dict(), tmp_path / "rpb.pth")
    overlay = {"file": str(tmp_path / "rpb.pth")}
    for kwargs in ({}, {"num_classes": 3}):
        with pytest.raises(ValueError, match=r"not those of 'rope_axial': position\.layers\.0\.rpb\.table is"):
            small("vitpos_tiny_patch16_224_rope_axial", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
        small("vitpos_tiny_patch16_224_rpb", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


def test_no_weights_are_published():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for vitpos_tiny_patch16_224_rpb"):
        small("vitpos_tiny_patch16_224_rpb", pretrained=True)


def test_pos_holds_a_spec_with_options():
    model = small("vitpos_tiny_patch16_224_rope_axial", pos="rope_axial(theta=50.0) + ape1d")
    assert str(position_of(model).spec) == "rope_axial(theta=50.0) + ape1d"
    assert model.pretrained_cfg["architecture"] == "vitpos_model"  # no name says both
    with pytest.raises(ValueError, match=r"has the encoding rope_axial; pos='rpb' lacks it"):
        small("vitpos_tiny_patch16_224_rope_axial", pos="rpb")
    with pytest.raises(ValueError, match="rope_axial has no option 'tetha'; did you mean theta"):
        small("vitpos_tiny_patch16_224_rope_axial", pos="rope_axial(tetha=5.0)")


def test_the_generic_name():
    model = small("vitpos_model", architecture="vit_tiny_patch16_224", pos="rpb + rope_axial", num_classes=3)
    assert str(model.position.spec) == "rpb + rope_axial"
    features = small("vitpos_model", architecture="deit3_small_patch16_224", pos="rpb", features_only=True)
    assert str(features.model.position.spec) == "rpb"
    with pytest.raises(ValueError, match="vitpos_model needs architecture="):
        timm.create_model("vitpos_model", pos="rpb")
    for wrong, words in [
        ("vit_tinny_patch16_224", "nearest: vit_tiny_patch16_224"),
        ("vitpos_model", "must be a timm model"),
        ("vitpos_tiny_patch16_224_rpb", "must be a timm model"),
        ("hf-hub:someone/something", "must be a timm model"),
        ("local-dir:/tmp", "must be a timm model"),
        (3, "must be a timm model"),
    ]:
        with pytest.raises(ValueError, match=words):
            timm.create_model("vitpos_model", architecture=wrong, pos="rpb")


def test_the_name_follows_the_encoding():
    """Attach and convert change what timm would write; each name is one that rebuilds the model."""
    model = small("vitpos_tiny_patch16_224_rope_axial")
    assert model.pretrained_cfg["architecture"] == model.default_cfg["architecture"]
    for spec, name in [
        ("rpb", "vitpos_tiny_patch16_224_rpb"),
        ("rpb + ape1d", "vitpos_model"),
        ("none", "vitpos_tiny_patch16_224_none"),
        ("string", "vitpos_tiny_patch16_224_string"),
    ]:
        vitpos.attach(model, spec)
        assert model.pretrained_cfg["architecture"] == name
        assert hub.timm_name(model) == "vit_tiny_patch16_224"
        assert ("architecture" in model._model_args) == (name == "vitpos_model")
        assert model._model_args["pos"] == vitpos.parse(spec).resolved
    vitpos.convert(model, "rope_mixed")
    assert model.pretrained_cfg["architecture"] == "vitpos_tiny_patch16_224_rope_mixed"
    assert vitpos.parse(model._model_args["pos"]).names == ("rope_mixed",)
    other = copy.deepcopy(model)
    vitpos.attach(other, "rpb")
    assert model.pretrained_cfg["architecture"] == "vitpos_tiny_patch16_224_rope_mixed"
    assert timm.create_model("vit_tiny_patch16_224", depth=1).pretrained_cfg["architecture"] == "vit_tiny_patch16_224"


@pytest.mark.parametrize("pos", ["native", "native + rope_axial"])
def test_native_keeps_the_weights_and_the_grid(pos):
    model = small("vitpos_tiny_patch16_224_ape1d", pos="ape1d(std=0.1) + rpb + alibi2d")
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    model.set_input_size(img_size=(64, 64))
    vitpos.attach(model, pos)
    assert model.position.geometry.grid == (2, 3)
    for key, value in weights.items():
        assert torch.equal(model.state_dict()[key], value), key
    vitpos.attach(model, "rpb")  # by its name it starts anew
    assert not torch.equal(model.position.layers[0]["rpb"].table, weights["position.layers.0.rpb.table"])


def test_registering_twice_changes_nothing():
    before = timm.list_models()
    names.register_names()
    assert timm.list_models() == before


def test_a_new_encoding_gets_its_names(tmp_path):
    code = '''
"""x"""
from vitpos.encoding import Encoding
from vitpos.spec import register

@register("newcomer")
class Newcomer(Encoding):
    summary = "nothing"
    paper = "none"
'''
    shutil.copytree(ROOT / "vitpos", tmp_path / "vitpos", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "vitpos" / "encodings" / "newcomer.py").write_text(code)
    program = "import timm, vitpos; m = timm.create_model('vitpos_tiny_patch16_224_newcomer', depth=1, img_size=32)"
    program += "; print(m.position.spec, len(timm.list_models('vitpos_*newcomer')))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "newcomer 3\n", run.stderr
