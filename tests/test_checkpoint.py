import copy
import json
import pickle

import pytest
import timm
import torch
from common import SPECS, images, randomize_, tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models._features import FeatureGetterNet
from timm.utils import ModelEmaV3
from torch import nn

import vitpos
from vitpos.spec import REGISTRY


@pytest.mark.parametrize("name", [*SPECS, "rope_mixed(theta=20.0) + ape1d", "rpb(std=0.1, resize='extrapolate')"])
def test_round_trip(name, tmp_path):
    model = tiny(name, (3, 5), 5).float()
    model.reset_classifier(4)
    path = vitpos.save(model, tmp_path / "m.safetensors", classes=list("abcd"), extra={"seed": 3})
    again = vitpos.load(path)
    x = images((4, 6), dtype=torch.float32)
    assert torch.equal(again(x), model(x))
    assert not again.training
    assert again.position.geometry.grid == (3, 5)
    card = vitpos.read_card(path)
    assert card["pos"] == str(vitpos.parse(name))
    assert card["pos_resolved"] == model.position.resolved
    assert card["grid"] == [3, 5]
    assert card["classes"] == list("abcd")
    assert card["extra"] == {"seed": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors"]


def test_the_training_grid_is_kept_when_the_input_size_changes(tmp_path):
    """A 2x8 and a 4x4 grid have tables of one size: only the stored grid tells them apart."""
    model = tiny("ape1d", (2, 8)).float()
    model.set_input_size(img_size=(8, 8))
    again = vitpos.load(vitpos.save(model, tmp_path / "m.safetensors"))
    assert again.position.geometry.grid == (2, 8)
    assert again.patch_embed.img_size == (8, 8)
    for grid in [(4, 4), (2, 8)]:
        x = images(grid, dtype=torch.float32)
        assert torch.equal(again(x), model(x))
    wrong = tiny("ape1d", (4, 4)).float()
    wrong.load_state_dict(dict(model.state_dict()))  # without PyTorch's metadata
    assert not torch.equal(wrong(x), model(x))
    with pytest.raises(RuntimeError, match=r"pos_embed is of a grid of \(2, 8\), the model's of \(4, 4\)"):
        wrong.load_state_dict(model.state_dict())


def test_an_attached_model_is_not_reloaded_as_a_plain_one(tmp_path):
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    vitpos.attach(plain, "rope_axial")
    again = vitpos.load(vitpos.save(plain.eval(), tmp_path / "m.safetensors"))
    x = torch.randn(1, 3, 32, 48)
    assert torch.equal(again(x), plain(x))
    assert str(again.position.spec) == "rope_axial"


def test_a_changed_default_does_not_change_an_old_file(tmp_path, monkeypatch):
    path = vitpos.save(tiny("rope_axial").float(), tmp_path / "m.safetensors")
    monkeypatch.setitem(REGISTRY["rope_axial"].__init__.__kwdefaults__, "theta", 7.0)
    assert vitpos.load(path).position.shared["rope_axial"].theta == 100.0
    assert tiny("rope_axial").position.shared["rope_axial"].theta == 7.0


def test_another_version_of_an_encoding_is_refused(tmp_path, monkeypatch):
    path = vitpos.save(tiny("rope_axial").float(), tmp_path / "m.safetensors")
    monkeypatch.setattr(REGISTRY["rope_axial"], "version", 2)
    with pytest.raises(ValueError, match="version 1 of rope_axial; this vitpos has version 2"):
        vitpos.load(path)


def test_preprocessing_reaches_timm(tmp_path):
    model = tiny("rope_axial").float()
    prep = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "img_size": [6, 10], "in_chans": 3}
    again = vitpos.load(vitpos.save(model, tmp_path / "m.safetensors", preprocessing=prep))
    config = timm.data.resolve_input_data_config(again)
    assert (config["mean"], config["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert config["input_size"] == (3, 6, 10)


def test_bad_files_say_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        vitpos.load(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        vitpos.load(tmp_path / "text.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="no vitpos card"):
        vitpos.load(tmp_path / "plain.safetensors")
    whole = vitpos.save(tiny("rpb").float(), tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        vitpos.load(tmp_path / "cut.safetensors")
    with safe_open(whole, framework="pt") as file:
        card = json.loads(file.metadata()["vitpos"])
    weights = load_file(whole)
    cases = [
        ({"format": "vitpos/9"}, "reads 'vitpos/1'"),
        ({"grid": [4, 4]}, "do not fit their card"),
        ({"grid": "x"}, "'grid' of its card"),
        ({"versions": None}, "'versions' of its card"),
        ({"model_args": {"num_heads": 5}}, "cannot rebuild"),
        ({"dtype": "float1"}, "cannot rebuild"),
    ]
    for text in ("{", "[1]"):
        save_file(weights, tmp_path / "other.safetensors", metadata={"vitpos": text})
        with pytest.raises(ValueError, match=r"card is not JSON|has format None"):
            vitpos.load(tmp_path / "other.safetensors")
    for change, words in cases:
        other = tmp_path / "other.safetensors"
        save_file(weights, other, metadata={"vitpos": json.dumps({**card, **change})})
        with pytest.raises(ValueError, match=words) as caught:
            vitpos.load(other)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_precision_is_kept(dtype, tmp_path):
    model = tiny("rope_mixed", (3, 5), 1).to(dtype)
    again = vitpos.load(vitpos.save(model, tmp_path / "m.safetensors"))
    assert again.head.weight.dtype == dtype
    x = images((4, 6), dtype=dtype)
    assert torch.equal(again(x), model(x))


def test_a_pruned_model_is_refused(tmp_path):
    model = tiny("lookhere", (3, 5), 1)
    model.prune_intermediate_layers([0])
    with pytest.raises(ValueError, match="pruned to 1 of 2 blocks"):
        vitpos.save(model, tmp_path / "m.safetensors")
    features = vitpos.create_model("vit_tiny_patch16_224", "rope_axial", features_only=True, out_indices=[0], depth=2)
    with pytest.raises(ValueError, match="pruned to 1 of 2 blocks"):  # before the encoding was attached
        vitpos.save(features.model, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize("path", ["", ".", "folder"])
def test_a_folder_is_no_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="is a folder; give the name of a file"):
        vitpos.save(tiny("none").float(), path)


def test_nothing_half_written(tmp_path):
    path = tmp_path / "m.safetensors"
    vitpos.save(tiny("rpb").float(), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        vitpos.save(tiny("rpb").float(), path, extra={"bad": object()})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    with pytest.raises(TypeError, match="no vitpos encoding"):
        vitpos.save(timm.create_model("vit_tiny_patch16_224", depth=1), path)


def test_a_model_that_can_have_no_encoding_is_saved_as_it_is(tmp_path):
    """Running statistics of its normalisation too; its card builds timm's model and nothing else."""
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=3, in_chans=1, channels=(8, 8, 16, 16), output_stride=8)
    x = torch.randn(4, 1, 24, 24)
    model.train()(x)
    path = vitpos.save(model.eval(), tmp_path / "m.safetensors", classes=["a", "b", "c"])
    again = vitpos.load(path)
    assert type(again) is type(model)
    assert torch.equal(again(x), model(x))
    card = vitpos.read_card(path)
    assert (card["architecture"], card["pos"], card["grid"]) == ("resnet10t", "native", [])
    model.bn1.reset_running_stats()
    assert not torch.equal(again(x), model(x))


SMALL = {"img_size": (48, 80), "embed_dim": 48, "num_heads": 4}


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def features(pos, out_indices=(0, 2), depth=4, **kwargs):
    """Feature maps: timm prunes the model, which then gets its encoding."""
    torch.manual_seed(0)
    kwargs = {**SMALL, "depth": depth, "features_only": True, "out_indices": out_indices, **kwargs}
    return randomized(vitpos.create_model("vit_tiny_patch16_224", pos=pos, **kwargs))


def named_features(encoding, **kwargs):
    """Feature maps of a name in timm's registry: timm prunes the model with its encoding."""
    torch.manual_seed(0)
    kwargs = {**SMALL, "depth": 4, "features_only": True, **kwargs}
    return randomized(timm.create_model(f"vitpos_tiny_patch16_224_{encoding}", **kwargs))


def randomized(model):
    randomize_(model.model.double())
    return model.float().eval()


MAPS = {
    "as in the README": lambda: named_features("rope_axial"),
    "a name, pruned": lambda: named_features("lookhere", out_indices=(0, 1)),
    "all blocks": lambda: features("rope_axial + ape1d", 4),
    "pruned": lambda: features("lookhere", (0, 1)),
    "from the end": lambda: features("rpb", (-3,)),
    "one channel": lambda: features("rope_mixed", in_chans=1),
    "the generic name": lambda: randomized(
        timm.create_model(
            "vitpos_model", architecture="vit_tiny_patch16_224", pos="cpe", features_only=True, depth=3, **SMALL
        )
    ),
    "timm's own rotation by layer, pruned": lambda: randomized(
        vitpos.create_model(
            "vit_small_patch16_rope_mixed_224", features_only=True, out_indices=(0, 1), depth=4, **SMALL
        )
    ),
}


@pytest.mark.parametrize("key", MAPS)
@pytest.mark.parametrize("through", [lambda model: model, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_feature_maps_round_trip(key, through, tmp_path):
    model = through(MAPS[key]())
    again = vitpos.load(vitpos.save(model, tmp_path / "m.safetensors"))
    assert isinstance(again, FeatureGetterNet)
    assert again.model.position.resolved == model.model.position.resolved
    assert again.out_indices == model.out_indices
    assert again.feature_info.channels() == model.feature_info.channels()
    assert again.feature_info.module_name() == model.feature_info.module_name()
    for size in [(48, 80), (64, 48)]:
        x = torch.randn(2, model.in_chans, *size)
        assert same(again(x), model(x))
    for old, new in zip(model.state_dict().values(), again.state_dict().values()):
        assert old.dtype == new.dtype
    x = torch.randn(2, model.in_chans, 48, 80)
    assert same(vitpos.load(vitpos.save(again, tmp_path / "n.safetensors"))(x), model(x))
    with torch.no_grad():
        again.model.blocks[0].attn.proj.bias.add_(1)
    assert not same(again(x), model(x))


def test_feature_maps_keep_what_was_set_later(tmp_path):
    model = features("ape1d + rpb")
    model.model.set_input_size(img_size=(64, 64), patch_size=8)
    model.out_indices, model.output_fmt, model.norm = [1], "NLC", True
    again = vitpos.load(vitpos.save(model, tmp_path / "m.safetensors"))
    assert again.model.position.geometry.grid == (3, 5)
    assert again.model.patch_embed.img_size == (64, 64)
    assert again.norm
    assert timm.data.resolve_input_data_config(again)["input_size"] == (3, 64, 64)
    x = torch.randn(1, 3, 64, 64)
    assert again(x)[0].shape == (1, 64, 48)
    assert same(again(x), model(x))


def test_timms_feature_maps_are_saved_as_they_are(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=(0, 2), depth=4, **SMALL).eval()
    path = vitpos.save(model, tmp_path / "m.safetensors")
    x = torch.randn(1, 3, 48, 80)
    assert same(vitpos.load(path)(x), model(x))
    assert vitpos.read_card(path)["grid"] == []
    vitpos.attach(model.model, "rpb", preserve=False)
    path = vitpos.save(model, path)
    assert same(vitpos.load(path)(x), model(x))
    assert vitpos.read_card(path)["pos"] == "rpb"
    edited = {**vitpos.read_card(path), "features": {}}
    save_file(load_file(path), path, metadata={"vitpos": json.dumps(edited)})
    with pytest.raises(ValueError, match="cannot rebuild the model: 'depth'"):
        vitpos.load(path)


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (lambda model: nn.Sequential(model, nn.Linear(7, 2)), "0"),
        (lambda model: nn.Sequential(nn.Sequential(model)), "0.0"),
        (ModelEmaV3, "module"),
        (nn.DataParallel, "module"),
        (lambda model: nn.Sequential(features("rope_axial")), "0"),
        (lambda model: nn.DataParallel(torch.compile(model, backend="eager")), "module"),
    ],
)
def test_a_wrapper_does_not_lose_an_encoding(wrap, inside, tmp_path):
    wrapped = wrap(tiny("rope_axial").float())
    wrapped.pretrained_cfg = {"architecture": "vit_tiny_patch16_224"}  # which timm's wrappers have
    words = rf"{type(wrapped).__name__} has no vitpos encoding itself; pass model\.get_submodule\('{inside}'\)"
    with pytest.raises(TypeError, match=words):
        vitpos.save(wrapped, tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match=words):
        vitpos.set_resize(wrapped, "interpolate")
    vitpos.save(wrapped.get_submodule(inside), tmp_path / "m.safetensors")


def test_maps_that_were_not_made_by_name_are_refused(tmp_path):
    model = FeatureGetterNet(tiny("rope_axial").float(), [0])
    with pytest.raises(ValueError, match="not made by name"):
        vitpos.save(model, tmp_path / "m.safetensors")


def test_a_compiled_model_is_saved_as_itself(tmp_path):
    model = tiny("rope_axial + ape1d").float()
    x = images((4, 6), dtype=torch.float32)
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    plain = vitpos.save(model, tmp_path / "plain.safetensors").read_bytes()
    path = vitpos.save(compiled, tmp_path / "m.safetensors")
    assert path.read_bytes() == plain
    assert torch.equal(vitpos.load(path)(x), expected)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert vitpos.save(model, path).read_bytes() == plain
    maps = features("rope_axial")
    plain = vitpos.save(maps, path).read_bytes()
    assert vitpos.save(torch.compile(maps, backend="eager"), path).read_bytes() == plain
    maps.model = torch.compile(maps.model, backend="eager")
    assert vitpos.save(maps, path).read_bytes() == plain
    assert vitpos.attach(maps, "rpb", preserve=False) is maps
    with pytest.raises(TypeError, match="no vitpos encoding; attach one"):
        vitpos.save(torch.compile(timm.create_model("vit_tiny_patch16_224", depth=1)), path)
