"""Trained weights at another size or aspect: their tables keep their own grid, which is known or asked for."""

import argparse
import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from common import randomize_, relative_change
from safetensors.torch import save_file

import vitpos

SMALL = {"patch_size": 4, "embed_dim": 36, "depth": 1, "num_heads": 3, "num_classes": 5}
MOVES = [((2, 8), (4, 4)), ((4, 6), (6, 4)), ((8, 2), (4, 4)), ((4, 6), (4, 4)), ((4, 4), (10, 20))]
CLS = [{}, {"class_token": False, "global_pool": "avg"}]
PREFIXES = [
    {**cls, "reg_tokens": registers, "no_embed_class": apart}
    for cls, registers, apart in itertools.product(CLS, (0, 4), (False, True))
]


def side(grid, patch=4):
    return tuple(patch * cells for cells in grid)


def plain(grid, name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=side(grid, options.get("patch_size", 4)), **{**SMALL, **options}).eval()
    randomize_(model.double())
    return model.float()


def set_ramp(model, grid):
    """A table that counts rows, whatever the column."""
    table = model.pos_embed
    with torch.no_grad():
        ramp = torch.arange(grid[0], dtype=table.dtype).repeat_interleave(grid[1])
        table[:, table.shape[1] - len(ramp) :] = ramp[None, :, None]


def patches(table, grid):
    """The rows of a table [1, P + N, D] for a grid's patches, as an image [1, D, H, W]."""
    count = grid[0] * grid[1]
    return table[:, table.shape[1] - count :].unflatten(1, grid).permute(0, 3, 1, 2)


def interpolated(table, grid, new):
    return F.interpolate(patches(table, grid).detach().float(), size=new, mode="bicubic", antialias=True)


def added(model, grid):
    """What a model adds to the patches of a grid, [1, D, H, W]."""
    pos = vitpos.positions.grid(*grid)
    rows = model.pos_embed[:, model.prefix_rows :]
    return model.position.tokens(pos, {"pos_embed": rows})[0].unflatten(0, grid).permute(2, 0, 1)[None]


def write(model, path, how):
    """The checkpoint as others write it; what is left for the caller to say."""
    state = model.state_dict()
    if how == "bare":
        torch.save(dict(state), path)
        return {"checkpoint_grid": model.patch_embed.grid_size}
    if how == "safetensors":
        save_file(state, path)
        return {"checkpoint_grid": model.patch_embed.grid_size}
    if how == "timm's training script":
        args = argparse.Namespace(img_size=None, input_size=[3, *model.patch_embed.img_size], model_kwargs={})
        torch.save({"epoch": 3, "arch": "x", "state_dict": state, "args": args}, path)
    elif how == "timm's arguments":
        args = argparse.Namespace(input_size=None, model_kwargs={"img_size": model.patch_embed.img_size})
        wrapped = {f"module.{k}": v for k, v in state.items()}
        torch.save({"state_dict": {}, "state_dict_ema": wrapped, "args": args}, path)
    elif how == "vitpos.save":
        vitpos.save(vitpos.attach(model, "native"), path)
    else:
        torch.save(vitpos.attach(model, "native").state_dict(), path)  # PyTorch keeps the metadata of a state_dict
    return {}


WAYS = ["bare", "safetensors", "timm's training script", "timm's arguments", "vitpos.save", "vitpos state_dict"]


@pytest.mark.parametrize(
    ("how", "old", "new"),
    [(how, *move) for how in WAYS for move in (MOVES if how in ("bare", "vitpos.save") else MOVES[:2])],
    ids=str,
)
def test_a_checkpoint_is_resampled_from_its_own_grid(how, old, new, tmp_path):
    """By whatever route: loading, set_input_size, the forward at another size. Equal counts of rows decide nothing."""
    theirs = plain(old)
    path = tmp_path / f"weights.{'safetensors' if how in ('safetensors', 'vitpos.save') else 'pth'}"
    expected = interpolated(theirs.pos_embed, old, new)
    original = theirs.pos_embed.detach().clone()
    resized = vitpos.attach(plain(old), "ape1d")
    resized.set_input_size(img_size=side(new))
    told = write(theirs, path, how)
    ways = [{"checkpoint_path": path}, overlay(path)]
    loaded = [
        vitpos.create_model("vit_tiny_patch16_224", pos=pos, img_size=side(new), **SMALL, **way, **told).eval()
        for way, pos in zip(ways, ("native", "ape1d"))
    ]
    x = torch.randn(2, 3, *side(new))
    with torch.no_grad():
        for model in (*loaded, resized):
            assert model.position.geometry.grid == old
            assert model.patch_embed.grid_size == new
            assert torch.equal(model.pos_embed, original)
            torch.testing.assert_close(added(model, new), expected, atol=1e-5, rtol=0)
            assert torch.equal(model(x), resized(x))
            assert timm.data.resolve_input_data_config(model)["input_size"] == (3, *side(new))
        swapped = interpolated(original, old[::-1], new)
        assert (added(resized, new) - swapped).abs().max() > 0.1 or old == old[::-1]
        again = vitpos.load(vitpos.save(loaded[0], tmp_path / "again.safetensors"))
        assert torch.equal(again(x), loaded[0](x))


@pytest.mark.parametrize("options", PREFIXES, ids=str)
@pytest.mark.parametrize("how", ["bare", "timm's training script"])
def test_every_kind_of_prefix_loads_at_another_size(how, options, tmp_path):
    """224 px weights at 160 x 320: rows of prefix tokens bit for bit, ramps of rows stay such, constants constants."""
    old, new = (14, 14), (10, 20)
    theirs = plain(old, **options)
    set_ramp(theirs, old)
    told = write(theirs, tmp_path / "w.pth", how)
    given = dict(img_size=side(new), checkpoint_path=tmp_path / "w.pth", **SMALL, **options)
    model = vitpos.create_model("vit_tiny_patch16_224", pos="native", **given, **told).eval()
    rows = 0 if options["no_embed_class"] else theirs.num_prefix_tokens
    assert model.prefix_rows == rows
    assert torch.equal(model.pos_embed[:, :rows], theirs.pos_embed[:, :rows])
    with torch.no_grad():
        ramp = added(model, new)
        assert ramp.std(dim=3).max() < 1e-6
        assert ramp.std(dim=2).min() > 1
        torch.testing.assert_close(ramp, interpolated(theirs.pos_embed, old, new), atol=1e-5, rtol=0)
        assert model(torch.randn(1, 3, *side(new))).shape == (1, 5)
        assert model.forward_features(torch.randn(1, 3, *side(new))).shape[1] == 200 + theirs.num_prefix_tokens
        model.pos_embed[:, rows:] = 0.7
        assert (added(model, new) - 0.7).abs().max() < 1e-6


def test_timm_alone_is_silent(tmp_path):
    """The control: what the checks above would say of timm's loader."""
    theirs = plain((2, 8))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    for given in ({"checkpoint_path": tmp_path / "w.pth"}, overlay(tmp_path / "w.pth")):
        given = {k: str(v) if k == "checkpoint_path" else v for k, v in given.items()}
        model = timm.create_model("vit_tiny_patch16_224", img_size=16, **SMALL, **given)
        wrong = (patches(model.pos_embed, (4, 4)) - interpolated(theirs.pos_embed, (2, 8), (4, 4))).abs().max()
        assert wrong > 0.1


def overlay(path, **more):
    return {"pretrained": True, "pretrained_cfg_overlay": {"file": path, "num_classes": 5, **more}}


@pytest.mark.parametrize(
    ("pos", "old", "new"),
    [
        ("native", (2, 8), (4, 4)),
        ("native", (4, 4), (4, 4)),
        ("ape1d + rope_axial", (4, 6), (4, 6)),
        ("rope_axial", (3, 5), (6, 6)),
    ],
)
def test_a_grid_that_nothing_says_is_asked_for(pos, old, new, tmp_path):
    """A number of rows that fits the model, or that is a square, says nothing about the aspect."""
    torch.save(plain(old).state_dict(), tmp_path / "w.pth")
    for given in ({"checkpoint_path": tmp_path / "w.pth"}, overlay(tmp_path / "w.pth")):
        kwargs = {"img_size": side(new), "preserve": False, **SMALL, **given}
        with pytest.raises(
            ValueError, match=rf"{old[0] * old[1]} rows .* nothing says of which grid; pass checkpoint_"
        ):
            vitpos.create_model("vit_tiny_patch16_224", pos=pos, **kwargs)
        with pytest.raises(ValueError, match=r"rows for patches, not those of a grid of \(3, 3\); it could be"):
            vitpos.create_model("vit_tiny_patch16_224", pos=pos, checkpoint_grid=(3, 3), **kwargs)
        model = vitpos.create_model("vit_tiny_patch16_224", pos=pos, checkpoint_grid=old, **kwargs)
        assert model.position.geometry.grid == (new if pos == "rope_axial" else old)


def test_the_size_of_a_name_is_known(tmp_path):
    """196 rows under a name that stands for 14 x 14 are 14 x 14, unless it is said otherwise."""
    theirs = plain((14, 14), patch_size=16)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    small = {**SMALL, "patch_size": 16}
    for given in ({"checkpoint_path": tmp_path / "w.pth"}, overlay(tmp_path / "w.pth")):
        model = vitpos.create_model("vit_tiny_patch16_224", img_size=(160, 320), **small, **given)
        assert model.position.geometry.grid == (14, 14)
        assert torch.equal(model.pos_embed, theirs.pos_embed)
        model = vitpos.create_model("vit_tiny_patch16_224", img_size=96, checkpoint_grid=(7, 28), **small, **given)
        assert model.position.geometry.grid == (7, 28)
        assert torch.equal(model.pos_embed, theirs.pos_embed)
    said = overlay(tmp_path / "w.pth", input_size=(3, 112, 448))
    assert vitpos.create_model("vit_tiny_patch16_224", img_size=96, **small, **said).position.geometry.grid == (7, 28)
    write(theirs, tmp_path / "said.pth", "timm's training script")
    given = {"checkpoint_path": tmp_path / "said.pth", "checkpoint_grid": (7, 28)}
    with pytest.raises(ValueError, match=r"checkpoint_grid=\(7, 28\), but by .*said.pth the weights are of a grid of"):
        vitpos.create_model("vit_tiny_patch16_224", **given, **small)


def test_another_patch_size(tmp_path):
    """timm resamples the patches' kernel; the table is of the grid that it was trained on."""
    theirs = plain((2, 8))
    write(theirs, tmp_path / "w.pth", "timm's training script")
    small = {**SMALL, "patch_size": 8}
    model = vitpos.create_model("vit_tiny_patch16_224", img_size=32, **small, **overlay(tmp_path / "w.pth")).eval()
    assert model.position.geometry.grid == (2, 8)
    assert model.patch_embed.grid_size == (4, 4)
    assert torch.equal(model.pos_embed, theirs.pos_embed)


def test_timms_hub_layout_of_a_plain_model(tmp_path):
    theirs = plain((2, 8))
    timm.models.save_for_hf(theirs, tmp_path)
    model = vitpos.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=16).eval()
    assert model.position.geometry.grid == (2, 8)
    assert model.patch_embed.grid_size == (4, 4)
    with torch.no_grad():
        expected = interpolated(theirs.pos_embed, (2, 8), (4, 4))
        torch.testing.assert_close(added(model, (4, 4)), expected, atol=1e-5, rtol=0)
        own = vitpos.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        x = torch.randn(1, 3, *side((2, 8)))
        assert torch.equal(own(x), theirs(x))


def test_features_only(tmp_path):
    theirs = plain((2, 8))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    features = vitpos.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        features_only=True,
        out_indices=[0],
        checkpoint_grid=(2, 8),
        **SMALL,
        **overlay(tmp_path / "w.pth"),
    )
    assert features.model.position.geometry.grid == (2, 8)
    assert features(torch.randn(1, 3, 16, 16))[0].shape == (1, 36, 4, 4)
    assert timm.data.resolve_input_data_config(features)["input_size"] == (3, 16, 16)


BIASED = {
    "beit_base_patch16_224": {},
    "vit_relpos_base_patch16_cls_224": {"rel_pos_type": "bias"},
    "vit_srelpos_small_patch16_224": {"rel_pos_type": "bias"},
}


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # in timm's own resizing
@pytest.mark.parametrize(("old", "new"), [((2, 8), (3, 5)), ((2, 14), (5, 5)), ((3, 5), (6, 4)), ((4, 4), (4, 4))])
@pytest.mark.parametrize("name", BIASED)
def test_tables_of_biases_likewise(name, old, new, tmp_path):
    """2 x 8 and 3 x 5 both have 45 offsets, 2 x 14 and 5 x 5 both 81; timm would take the last for square."""
    theirs = plain(old, name, **BIASED[name])
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    tables = {k: v.clone() for k, v in theirs.state_dict().items() if k.endswith("bias_table")}
    assert tables
    x = torch.randn(2, 3, *side(new))
    with torch.no_grad():
        theirs.set_input_size(img_size=side(new))
        expected = theirs(x)
    for given in ({"checkpoint_path": tmp_path / "w.pth"}, overlay(tmp_path / "w.pth")):
        kwargs = {"img_size": side(new), **SMALL, **BIASED[name], **given}
        model = vitpos.create_model(name, checkpoint_grid=old, **kwargs).eval()
        for key, table in tables.items():
            assert torch.equal(model.state_dict()[key], table)
        with torch.no_grad():
            assert relative_change(model(x), expected) < 1e-5
        with pytest.raises(ValueError, match="nothing says of which grid"):
            vitpos.create_model(name, **kwargs)


def test_a_state_dict_of_another_grid_is_refused():
    """PyTorch's own metadata of a state_dict holds the grid; what needs none loads across grids."""
    model, other = (vitpos.attach(plain(grid), "ape1d") for grid in ((2, 8), (4, 4)))
    with pytest.raises(RuntimeError, match=r"pos_embed is of a grid of \(2, 8\), the model's of \(4, 4\)"):
        other.load_state_dict(model.state_dict())
    other = vitpos.attach(plain((2, 8)), "ape1d")
    other.set_input_size(img_size=16)
    other.load_state_dict(model.state_dict())
    model, other = (vitpos.attach(plain(grid), "rope_mixed + cpb", preserve=False) for grid in ((2, 8), (4, 4)))
    other.load_state_dict(model.state_dict())
    assert list(model.state_dict()) == [*dict(model.named_parameters())]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_224"])
@pytest.mark.parametrize("classes", [5, 3])
def test_weights_of_an_encoding_do_not_get_lost(name, classes, tmp_path):
    """timm drops names with "rope" from Eva's checkpoints, and any where the number of classes differs."""
    model = vitpos.attach(plain((4, 4), name), "rope_mixed", preserve=False)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    kwargs = {"img_size": 16, **SMALL, "num_classes": classes}
    lost = timm.create_model(name, **kwargs, **overlay(tmp_path / "w.pth")) if name.endswith("rope_224") else None
    assert lost is None or not hasattr(lost, "position")  # timm alone says nothing
    for given in ({"checkpoint_path": tmp_path / "w.pth"}, overlay(tmp_path / "w.pth")):
        with pytest.raises(ValueError, match=r"holds position\.layers\.0\.rope_mixed\.weight of a vitpos encoding"):
            vitpos.create_model(name, pos="rope_mixed", **kwargs, **given)
    same = vitpos.create_model(name, pos="rope_mixed", img_size=16, **SMALL).eval()
    same.load_state_dict(torch.load(tmp_path / "w.pth"))
    x = torch.randn(1, 3, 16, 16)
    assert torch.equal(same(x), model(x))


def test_preserve_keeps_the_table_that_fades(tmp_path):
    """The encoding that a model is to leave keeps its own grid, too."""
    theirs = plain((2, 8))
    write(theirs, tmp_path / "w.pth", "timm's training script")
    kwargs = {"img_size": 16, "checkpoint_path": tmp_path / "w.pth", **SMALL}
    model, kept = (
        vitpos.create_model("vit_tiny_patch16_224", pos=pos, preserve=True, **kwargs).eval()
        for pos in ("rope_mixed", "native")
    )
    assert model.position.geometry.grid == (2, 8)
    assert torch.equal(model.pos_embed[:, 1:], theirs.pos_embed[:, 1:])  # (the class token has taken its row)
    x = torch.randn(1, 3, 16, 16)
    assert relative_change(model(x), kept(x)) < 1e-6


def test_names_of_vitpos(tmp_path):
    """The same under names of vitpos, with a file in place of published weights."""
    theirs = vitpos.attach(plain((2, 8)), "ape1d + rpb", preserve=False)
    torch.save(theirs.state_dict(), tmp_path / "said.pth")
    torch.save(dict(theirs.state_dict()), tmp_path / "bare.pth")
    name, kwargs = "vitpos_tiny_patch16_224_rpb", {"pos": "ape1d + rpb", "img_size": 16, **SMALL}
    x = torch.randn(1, 3, 16, 16)
    model = timm.create_model(name, **kwargs, **overlay(tmp_path / "said.pth")).eval()
    assert model.position.geometry.grid == (2, 8)
    assert torch.equal(model(x), theirs(x))
    with pytest.raises(ValueError, match="nothing says of which grid"):
        timm.create_model(name, **kwargs, **overlay(tmp_path / "bare.pth"))


def test_names_of_vitpos_with_a_path(tmp_path):
    theirs = vitpos.attach(plain((2, 8)), "ape1d")
    torch.save(dict(theirs.state_dict()), tmp_path / "w.pth")
    name, given = "vitpos_tiny_patch16_224_ape1d", {"img_size": 16, "checkpoint_path": tmp_path / "w.pth", **SMALL}
    model = vitpos.create_model(name, checkpoint_grid=(2, 8), **given).eval()
    assert model.position.geometry.grid == (2, 8)
    x = torch.randn(1, 3, 16, 16)
    assert torch.equal(model(x), theirs(x))
    with pytest.raises(ValueError, match="nothing says of which grid"):
        vitpos.create_model(name, **given)


def test_what_is_wrong_is_said(tmp_path):
    for wrong in ((2, 0), (2.0, 8), 16, (2, 8, 1)):
        with pytest.raises(ValueError, match="checkpoint_grid must be two whole numbers"):
            vitpos.create_model("vit_tiny_patch16_224", checkpoint_path="x", checkpoint_grid=wrong)
    with pytest.raises(ValueError, match="checkpoint_grid is the grid of trained weights; give checkpoint_path"):
        vitpos.create_model("vit_tiny_patch16_224", checkpoint_grid=(2, 8))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere"):
        vitpos.create_model("vit_tiny_patch16_224", checkpoint_path=tmp_path / "nowhere.pth")
    (tmp_path / "w.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        vitpos.create_model("vit_tiny_patch16_224", checkpoint_path=tmp_path / "w.safetensors")
    torch.save([1, 2], tmp_path / "w.pth")
    with pytest.raises(ValueError, match="holds list, not a state_dict"):
        vitpos.create_model("vit_tiny_patch16_224", checkpoint_path=tmp_path / "w.pth")
    write(plain((2, 8)), tmp_path / "w.pth", "timm's training script")
    with pytest.raises(ValueError, match="not a multiple of the patch size 4x4; nearest: 16 x 12 or 16"):
        vitpos.create_model("vit_tiny_patch16_224", img_size=(16, 15), checkpoint_path=tmp_path / "w.pth", **SMALL)


@pytest.mark.parametrize("size", [16, (8, 32)])
def test_looking_draws_nothing(size, tmp_path):
    """Models that are built only to learn their sizes leave the global random state alone."""
    torch.save(plain((2, 8)).state_dict(), tmp_path / "w.pth")
    drawn = []
    for make, more in [(timm.create_model, {}), (vitpos.create_model, {"checkpoint_grid": (2, 8), "encoding_seed": 0})]:
        torch.manual_seed(7)
        given = overlay(tmp_path / "w.pth", num_classes=9)  # the head is drawn anew
        model = make("vit_tiny_patch16_224", img_size=size, **SMALL, **given, **more)
        drawn.append((model.head.weight, torch.rand(1)))
    for ours, theirs in zip(*drawn):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("spec", ["ape1d", "rpb + rope_mixed"])
def test_timms_checkpoint_functions_need_no_resampling(spec, tmp_path):
    """A model's tables have the size that they were trained with whatever its input size, so that plain loading and
    resuming fit; timm's own model of another size does not load."""
    model = vitpos.create_model("vit_tiny_patch16_224", pos=spec, img_size=side((2, 8)), **SMALL).eval()
    torch.save({"state_dict": model.state_dict(), "epoch": 4, "version": 2}, tmp_path / "w.pth")
    x = torch.randn(1, 3, *side((3, 4)))
    for load in (timm.models.load_checkpoint, timm.models.resume_checkpoint):
        other = vitpos.create_model("vit_tiny_patch16_224", pos=spec, img_size=side((2, 8)), **SMALL).eval()
        other.set_input_size(img_size=side((3, 5)))
        load(other, str(tmp_path / "w.pth"))
        assert torch.equal(other(x), model(x))
    theirs = plain((2, 8))
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    theirs.set_input_size(img_size=side((3, 5)))
    with pytest.raises(RuntimeError, match="size mismatch for pos_embed"):
        timm.models.load_checkpoint(theirs, str(tmp_path / "theirs.pth"))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vitpos_tiny_patch16_224_ape1d"])
def test_a_number_of_rows_that_two_grids_have_is_asked_about(name, tmp_path):
    """The grid of the name and the one asked for: 14 x 14 and 7 x 28."""
    small = {"embed_dim": 36, "depth": 1, "num_heads": 3, "num_classes": 5}
    source = timm.create_model("vit_tiny_patch16_224", img_size=(112, 448), **small).eval()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    make = vitpos.create_model if name == "vit_tiny_patch16_224" else timm.create_model
    with pytest.raises(ValueError, match=r"196 rows for patches and nothing says of which grid"):
        make(name, img_size=(112, 448), **small, **overlay(tmp_path / "w.pth"))
    square = make(name, **small, **overlay(tmp_path / "w.pth"))  # as published, which this file is not
    assert square.position.geometry.grid == (14, 14)
