"""Data that hold some of a model's classes: folders named by wnid find their logits, or are refused."""

import re

import numpy as np
import pytest
import timm
import torch
from evaluating import make_run
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo

from vitpos import labels, report, sources

NAME = "vit_tiny_patch16_224"
WNIDS = ["n01440764", "n02102040", "n03888257", "n02979186"]  # by hand: logits 0, 217, 701, 482
LOGITS = [0, 217, 701, 482]
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
ARGS = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2}
QUICK = ["probes=[translation]", "translation.subpatch=false", "translation.phase=false", "translation.zhang=0"]


def make_folder(root, names=WNIDS, per_class=3):
    """Images of one colour a class, in class folders."""
    for name, colour in zip(names, COLOURS):
        (root / "val" / name).mkdir(parents=True), (root / "train" / name).mkdir(parents=True)
        for i in range(per_class):
            for part in ("train", "val"):
                Image.new("RGB", (40, 40), colour).save(root / part / name / f"{i}.png")
    return root


def planted(count=1000, logits=LOGITS, louder=None):
    """Weights of a ViT that answers by colour: its tokens carry the mean colour, its head knows the four classes. In
    `louder`, a logit that no folder has, is always largest."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=count, class_token=False, global_pool="avg", **ARGS)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.startswith("blocks"):
                weight.zero_()
        for block in model.blocks:  # so that the tokens pass unchanged
            block.attn.proj.weight.zero_(), block.attn.proj.bias.zero_()
            block.mlp.fc2.weight.zero_(), block.mlp.fc2.bias.zero_()
        model.patch_embed.proj.weight[:3] = torch.eye(3)[:, :, None, None]
        model.fc_norm.weight.fill_(1.0)
        for place, colour in zip(logits, COLOURS):
            centred = torch.tensor(colour) / 255 - 0.5
            model.head.weight[place, :3] = centred / centred.norm()
        if louder is not None:
            model.head.bias[louder] = 100.0
    return model.state_dict()


def evaluated(tmp_path, evaluate, weights, *words, folder=None, img_size="32", data_size="data.img_size=32"):
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    root = folder or make_folder(tmp_path / "images")
    args = f"{{img_size: {img_size}, patch_size: 16, embed_dim: 24, depth: 1, num_heads: 2, class_token: false"
    args += f", global_pool: avg, num_classes: {len(weights['head.bias'])}}}"
    given = ["data=folder", f"data.root={root}", data_size, "data.workers=0", *QUICK, *words]
    code, out, err = evaluate(
        f"model={NAME}", f"weights={path}", f"model_args={args}", f"out={tmp_path / 'out'}", *given
    )
    if code:
        return err
    return report.read(tmp_path / "out" / "results.json")["runs"][0], out


def test_wnids_find_their_logits(tmp_path, evaluate):
    run, out = evaluated(tmp_path, evaluate, planted())
    assert run["accuracy"]["value"] == 1.0
    assert run["decision"] == {"among": 1000, "known": 1000, "classes": 4, "names": "imagenet-1k"}
    assert run["data"]["interpolation"] == "bicubic", "the model's own"
    assert run["data"]["crop_pct"] == 1.0
    assert run["checkpoint"].endswith("weights.safetensors")
    assert run["trained"]
    assert "4 of 1000 (imagenet-1k), decided among all 1000" in " ".join(out.split())
    with np.load(tmp_path / "out" / "predictions.npz") as file:
        assert sorted(set(file["labels"].tolist())) == sorted(LOGITS)


@pytest.mark.parametrize("wrong", [[0, 1, 2, 3], [1, 218, 702, 483], [217, 0, 701, 482]])
def test_a_head_of_another_order_is_wrong(tmp_path, evaluate, wrong):
    run, _ = evaluated(tmp_path, evaluate, planted(logits=wrong))
    assert run["accuracy"]["value"] <= 0.5


def test_all_logits_are_in_it_unless_restricted(tmp_path, evaluate):
    folder = make_folder(tmp_path / "images")
    run, _ = evaluated(tmp_path, evaluate, planted(louder=5), folder=folder)
    assert run["accuracy"]["value"] == 0.0
    run, out = evaluated(tmp_path, evaluate, planted(louder=5), "restrict=true", folder=folder)
    assert run["accuracy"]["value"] == 1.0
    assert run["decision"]["among"] == 4
    assert "decided among these 4" in " ".join(out.split())


@pytest.mark.parametrize(("subset", "count"), [("imagenet-12k", 11821), ("imagenet-22k-ms", 21842)])
def test_other_label_sets(tmp_path, evaluate, subset, count):
    order = ImageNetInfo(subset).label_names()
    run, _ = evaluated(tmp_path, evaluate, planted(count, [order.index(wnid) for wnid in WNIDS]))
    assert run["accuracy"]["value"] == 1.0
    assert run["decision"]["names"] == subset


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tench", *WNIDS[1:]], r"'tench' \(1 of 4 classes .* no class of model .*imagenet-1k.* n01440764 \(tench\)"),
        (["n01440765", *WNIDS[1:]], "'n01440765' .* did you mean n01440764"),
        (["a", "b", "c", "d"], "'a' .4 of 4 classes.* whose 1000 are named like 'n01440764'"),
    ],
)
def test_folders_of_other_names_are_refused(tmp_path, evaluate, names, message):
    folder = make_folder(tmp_path / "images", names)
    err = evaluated(tmp_path, evaluate, planted(), folder=folder)
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("img_size", ["32", "[32, 32]"])
def test_the_size_of_the_model_is_that_of_its_images(tmp_path, evaluate, img_size):
    """Not the one that timm's configuration of its name says (224), unless the command says another."""
    run, _ = evaluated(tmp_path, evaluate, planted(), img_size=img_size, data_size="data.val_fraction=0.1")
    assert run["accuracy"]["value"] == 1.0
    assert run["data"]["img_size"] == 32


def test_a_size_that_is_no_square_is_asked_for(tmp_path, evaluate):
    err = evaluated(tmp_path, evaluate, planted(), img_size="[32, 48]", data_size="data.val_fraction=0.1")
    assert "model_args.img_size=[32, 48]: images are read as squares; give their side, data.img_size=" in err


def test_weights_that_do_not_fit_are_refused(tmp_path, evaluate, monkeypatch):
    folder = make_folder(tmp_path / "images")
    headless = planted() | {"head.weight": torch.zeros(10, 24)}
    found = evaluated(tmp_path, evaluate, headless, folder=folder)
    assert "could not be made with its weights" in found
    assert "size mismatch for head.weight" in found  # what is wrong, not only that something is
    base = [f"model={NAME}", "data=folder", f"data.root={folder}"]
    (tmp_path / "junk.pth").write_text("junk")
    for words, message in (
        (["weights=nowhere.pth"], "weights=nowhere.pth: no such file"),
        ([f"weights={tmp_path / 'junk.pth'}"], "could not be made with its weights"),
        (
            ["pretrained=true", "model_args={num_classes: 10}"],
            "num_classes=10 would give .* random head",
        ),
        (["restrict=true", "model_args={num_classes: 4}"], "here they are the same ones"),
    ):
        code, _, err = evaluate(*base, *words, f"out={tmp_path / 'out'}")
        assert code == 2
        assert re.search(message, err), err
    assert not (tmp_path / "out").exists()


def test_a_run_on_some_of_its_classes(tmp_path):
    """By name, in the order of the run's classes; equal sets in another order stay refused."""
    folder = make_folder(tmp_path / "images")
    config = {"name": "folder", "root": str(folder), "img_size": 24, "workers": 0}
    more = {"preprocessing": None, "extra": {"data": config, "run": "r"}}
    run = make_run(tmp_path / "run", "none", classes=["x", *WNIDS, *"01234"], model={"in_chans": 3}, **more)
    source = sources.from_checkpoint(run, {}, "cpu")
    assert source.places == [1, 2, 4, 3], "folders come sorted"
    assert source.about["decision"]["known"] == 10
    with pytest.raises(ValueError, match="trained on other classes"):
        sources._check_classes(source.images, WNIDS, 4, "a run")


def test_the_order_of_every_label_set_is_timms():
    for subset, count in (("imagenet-1k", 1000), ("imagenet-21k-goog", 21843), ("imagenet-21k-miil", 11221)):
        model = torch.nn.Module()
        model.num_classes = count
        known, name = labels.label_set(model)
        assert (name, known) == (subset, ImageNetInfo(subset).label_names())
    model.num_classes = 10
    assert labels.label_set(model) == ([], "")
    model.pretrained_cfg = {"label_names": [*"abcdefghij"]}
    assert labels.label_set(model)[0] == [*"abcdefghij"]
