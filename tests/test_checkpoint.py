import json

import pytest
import timm
import torch
from common import SPECS, images, tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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
