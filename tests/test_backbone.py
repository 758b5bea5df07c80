"""What comes back is a timm model: equal to timm's where timm has the encoding, and usable as one everywhere."""

import copy
import pickle

import pytest
import timm
import torch
from common import ENCODINGS, PATCH, SPECS, coordinates, images, randomize_, relative_change, tiny
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3

import vitpos
from vitpos import backbone
from vitpos.backbone.parts import PARTS
from vitpos.composition import Position
from vitpos.encoding import Geometry
from vitpos.spec import parse

TIMM = "vit_tiny_patch16_224"
SMALL = {"img_size": (48, 80), "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}


def timm_model(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model(TIMM, **{**SMALL, **kwargs}).eval()
    randomize_(model)
    return model


OPTIONS = [
    {},
    {"class_token": False, "global_pool": "avg"},
    {"reg_tokens": 4},
    {"reg_tokens": 4, "no_embed_class": True},
    {"class_token": False, "reg_tokens": 2, "global_pool": "avg"},
    {"dynamic_img_size": True},
    {"qk_norm": True, "init_values": 0.5},
    {"pre_norm": True},
    {"global_pool": "map", "class_token": False},
    {"block_fn": timm.models.vision_transformer.ResPostBlock},
    {"block_fn": timm.models.vision_transformer.ParallelThingsBlock},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pos", ["ape1d", "native"])
def test_ape1d_changes_no_bit(options, pos):
    plain = timm_model(**options)
    model = vitpos.attach(copy.deepcopy(plain), pos)
    x = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        ours = model.forward_intermediates(x, indices=2, return_prefix_tokens=True, norm=True)
        theirs = plain.forward_intermediates(x, indices=2, return_prefix_tokens=True, norm=True)
    for a, b in zip(flat(ours), flat(theirs)):
        assert torch.equal(a, b)
    assert list(model.state_dict()) == list(plain.state_dict())


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in flat(v)]


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_none_folds_the_prefix_rows_and_drops_the_rest(options):
    plain = timm_model(**options)
    model = vitpos.attach(copy.deepcopy(plain), "none")
    x = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        rows = 0 if plain.no_embed_class else plain.num_prefix_tokens
        plain.pos_embed[:, rows:] = 0
        assert torch.equal(model(x), plain(x))
    assert model.pos_embed is None
    assert model.forward_features(x).shape[1] == 15 + model.num_prefix_tokens


@pytest.mark.parametrize("size", [(80, 48), (48, 64), (96, 160), (16, 240)])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_ape1d_at_other_sizes_is_timms_dynamic_model(size, options):
    plain = timm_model(dynamic_img_size=True, **options)
    model = vitpos.attach(timm_model(**options), "ape1d")
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


def test_ape1d_keeps_row_ramps_as_rows():
    """From (2, 8) to (4, 4): the token count stays, the grid does not. A swap of axes would mix the ramps."""
    model = tiny("ape1d", (2, 8), 0)
    cells = coordinates((2, 8))
    with torch.no_grad():
        model.pos_embed[0] = cells[:, :1].expand(-1, model.embed_dim)
    encoding = model.position.shared["ape1d"]
    out = encoding.tokens(vitpos.positions.grid(4, 4, dtype=torch.float64), model.pos_embed)[0].unflatten(0, (4, 4))
    assert out.std(dim=1).max() < 1e-6
    assert (out[1:] - out[:-1]).min() > 0.01


def rope_pair(name, pos):
    torch.manual_seed(0)
    theirs = timm.create_model(name, depth=3, img_size=(160, 224), dynamic_img_size=True).eval()
    torch.manual_seed(0)
    ours = vitpos.create_model("vit_small_patch16_224", pos=pos, depth=3, img_size=(160, 224), init_values=1e-5).eval()
    state = {k: v for k, v in theirs.state_dict().items() if not k.startswith("rope.")}
    for i in range(3):  # timm's EvaAttention keeps the same weights under other names
        for key in (f"blocks.{i}.gamma_1", f"blocks.{i}.gamma_2"):
            state[key.replace("gamma_", "ls") + ".gamma"] = state.pop(key)
    with torch.no_grad():
        for i in range(len(ours.blocks)):
            if pos == "rope_mixed":  # timm: [x | y, layer, head, pair]; ours: [head, pair, (y, x)]
                ours.position.layers[i]["rope_mixed"].weight.copy_(theirs.rope.freqs[:, i].flip(0).permute(1, 2, 0))
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(k.startswith("position.") for k in missing)
    with torch.no_grad():
        for model in (theirs, ours):
            for name, parameter in model.named_parameters():
                if "gamma" in name:
                    parameter.fill_(1.0)  # at their initial 1e-5 any encoding would pass
                if "qkv.weight" in name:
                    parameter.mul_(10.0)  # and with nearly uniform attention almost any
    return ours, theirs


@pytest.mark.parametrize("size", [(160, 224), (224, 160), (96, 256)])
@pytest.mark.parametrize(
    ("name", "pos"),
    [("vit_small_patch16_rope_224", "rope_axial"), ("vit_small_patch16_rope_mixed_224", "rope_mixed")],
)
def test_rotary_equals_timm(name, pos, size):
    ours, theirs = rope_pair(name, pos)
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        expected = theirs.forward_features(x)
        assert relative_change(ours.forward_features(x), expected) < 1e-5
        vitpos.attach(ours, "rope_axial(theta=90.0)")
        assert relative_change(ours.forward_features(x), expected) > 1e-3


@pytest.mark.parametrize("name", ENCODINGS)
def test_any_multiple_of_the_patch_is_accepted(name):
    model = tiny(name, (3, 5), 1)
    for grid in [(4, 6), (6, 4), (3, 8), (2, 12), (1, 1), (1, 9), (5, 3)]:
        x = images(grid, batch=1)
        with torch.no_grad():
            assert model(x).isfinite().all()
            maps = model.forward_intermediates(x, 1, intermediates_only=True)
        assert maps[0].shape == (1, 36, *grid)


@pytest.mark.parametrize("size", [(47, 80), (48, 79), (8, 8)])
def test_other_sizes_are_refused_with_the_nearest(size):
    model = vitpos.create_model(TIMM, pos="rope_axial", **SMALL)
    with pytest.raises(ValueError, match="not a multiple of the patch size 16x16; nearest"):
        model(torch.randn(1, 3, *size))
    with pytest.raises(ValueError, match="nearest: 32 or 48"):
        vitpos.create_model(TIMM, pos="rope_axial", img_size=(47, 48), patch_size=16)
    padded = vitpos.create_model(TIMM, pos="rope_axial", dynamic_img_pad=True, **SMALL)
    assert padded(torch.randn(1, 3, *size)).shape == (1, 7)


@pytest.mark.parametrize("pos", ["ape1d", "rope_axial", "rpb", "sincos2d"])
def test_padding_is_black_pixels_below_and_to_the_right(pos):
    """70 x 96 becomes 80 x 96, a grid of 5 x 6 patches: none of the image moves, none is cut, none is masked."""
    model = vitpos.create_model(TIMM, pos=pos, dynamic_img_pad=True, **SMALL).eval()
    x = torch.randn(1, 3, 70, 96)
    below, above = (torch.nn.functional.pad(x, (0, 0, *rows)) for rows in ((0, 10), (10, 0)))
    with torch.no_grad():
        maps = model.forward_intermediates(x, 1, intermediates_only=True)
        assert maps[0].shape == (1, 48, 5, 6)
        assert torch.equal(model(x), model(below))
        assert relative_change(model(above), model(x)) > 1e-4


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_heads": 5}, "timm cannot build vit_tiny_patch16_224 with num_heads=5"),
        ({"depth": 0}, "no blocks"),
        ({"img_size": "224"}, "timm cannot build"),
        ({"foo": 1}, "foo"),
        ({"encoding_seed": "a"}, "encoding_seed must be"),
        ({"encoding_seed": -1}, "encoding_seed must be"),
    ],
    ids=str,
)
def test_models_that_cannot_be_built(kwargs, words):
    with pytest.raises(ValueError, match=words):
        vitpos.create_model(TIMM, pos="rope_axial", **kwargs)


def test_bad_images_and_coordinates():
    with pytest.raises(TypeError, match="coords must be a tensor"):
        tiny("rope_axial")(images((3, 5)), coords=[[1, 2]])
    with pytest.raises(ValueError, match="image size 0x10"):
        tiny("rope_axial")(torch.zeros(1, 3, 0, 10, dtype=torch.float64))
    model = tiny("rope_axial")
    with pytest.raises(ValueError, match=r"expected images \[B, 3, H, W\]"):
        model(torch.zeros(2, 1, 6, 10, dtype=torch.float64))
    x = images((3, 5))
    for coords in (torch.zeros(14, 2), torch.zeros(3, 15, 2), torch.zeros(15, 3), torch.zeros(15)):
        with pytest.raises(ValueError, match="coords"):
            model(x, coords=coords)
    with pytest.raises(ValueError, match="extent"):
        model(x, coords=torch.zeros(15, 2), extent=(0, 5))


@pytest.mark.parametrize("pos", ["rope_axial", "rope_mixed"])
def test_head_width_that_rotary_cannot_serve(pos):
    plain = timm.create_model(TIMM, img_size=32, embed_dim=30, num_heads=3, depth=1)
    with pytest.raises(ValueError, match="multiple of 4, got 10; nearest: 8 or 12"):
        vitpos.attach(plain, pos)
    assert type(plain) is timm.models.vision_transformer.VisionTransformer
    assert plain.pos_embed is not None


LEARNED = [n for n in ENCODINGS if list(Position(parse(n), Geometry(36, 3, 12, 1, (2, 3))).parameters())]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: ModelEmaV3(model).module], ids=["deepcopy", "average"])
@pytest.mark.parametrize("name", [*LEARNED, "rpb + ape1d"])
def test_the_encoding_of_a_copy_is_its_own(name, copied):
    """Its weights alone change: the copy says something else, the model does not; and the other way round."""
    model = tiny(name, (3, 5), 0)
    x = images((4, 6))
    with torch.no_grad():
        expected = model(x)
        for changed, kept in ((copied(model), model), (model, copied(model))):
            named = dict(changed.named_parameters())
            positional = [named[key] for key in named if key == "pos_embed" or key.startswith("position.")]
            assert positional
            for parameter in positional:
                parameter.mul_(-1.5)
            assert relative_change(changed(x), expected) > 1e-6
            assert torch.equal(kept(x), expected)


@pytest.mark.parametrize("name", [*ENCODINGS, "ape1d + rpb"])
def test_another_size_keeps_every_parameter(name):
    """The same objects, so that an optimizer made before still trains them; another patch size makes a projection."""
    model = tiny(name, (3, 5), 1).train()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_input_size(img_size=(12, 8))
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[key] is parameter for key, parameter in before.items())
    tables = {key: p.clone() for key, p in before.items() if key == "pos_embed" or "layers.0.rpb" in key}
    model(images((6, 4))).pow(2).sum().backward()
    optimizer.step()
    assert not [key for key, value in tables.items() if torch.equal(after[key], value)]
    model.set_input_size(patch_size=4)
    anew = {key for key, p in model.named_parameters() if p is not before[key]}
    assert anew == {"patch_embed.proj.weight", "patch_embed.proj.bias"}


def test_timms_resizing_leaves_an_optimizer_behind():
    """The control: timm's own model has another table afterwards."""
    plain = timm_model()
    table = plain.pos_embed
    plain.set_input_size(img_size=(96, 64))
    assert plain.pos_embed is not table


@pytest.mark.parametrize("name", ENCODINGS)
def test_copies_are_their_own(name, tmp_path):
    model = tiny(name, prefix=1)
    x = images((3, 5))
    model.train()(x).sum().backward()  # what a forward leaves behind must not be in the way
    model.eval()
    expected = model(x)
    torch.save(model, tmp_path / "whole.pt")
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "whole.pt", weights_only=False),
        ModelEmaV3(model).module,
        model._replicate_for_data_parallel(),
    ]
    for other in copies[:-1]:
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        assert not torch.equal(other(x), expected)
    assert torch.equal(model(x), expected)
    assert copies[-1].forward.__self__ is copies[-1]
    assert not any(callable(v) for v in vars(model).values() if not isinstance(v, type))


@pytest.mark.parametrize("name", [*ENCODINGS, "rope_mixed + rpb + ape1d"])
def test_checkpointing_changes_no_gradient(name):
    """Two grids of one token count before one backward: state kept on modules would mix them up."""
    grads = []
    for enable in (False, True):
        model = tiny(name, (4, 6), 1).train()
        model.set_grad_checkpointing(enable)
        loss = sum(model(images(grid)).pow(2).sum() for grid in [(4, 6), (6, 4), (3, 8)])
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for key, value in grads[0].items():
        assert torch.equal(value, grads[1][key]), key


@pytest.mark.parametrize("name", ENCODINGS)
def test_optimizer_groups_know_positional_parameters(name):
    model = tiny(name, prefix=1)
    positional = [n for n, _ in model.named_parameters() if n.startswith("position.") or n == "pos_embed"]
    names = {id(p): n for n, p in model.named_parameters()}
    for group in param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay()):
        for parameter in group["params"]:
            if names[id(parameter)] in positional:
                assert group["weight_decay"] == 0.0
    scales = {}
    for group in param_groups_layer_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5):
        for parameter in group["params"]:
            scales[names[id(parameter)]] = (group["lr_scale"], group["weight_decay"])
    for n in positional:
        assert scales[n] == (scales["patch_embed.proj.weight"][0], 0.0)
    assert scales["blocks.1.attn.qkv.weight"][1] == 0.1


@pytest.mark.parametrize("name", ENCODINGS)
def test_timm_methods(name):
    model = tiny(name, prefix=1)
    x = images((3, 5))
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        first = model.forward_intermediates(x, [0], intermediates_only=True)[0]
        pruned.prune_intermediate_layers([0])
        assert torch.equal(pruned.forward_intermediates(x, [0], intermediates_only=True)[0], first)
        assert len(pruned.position.layers) in (0, 1)
        layers = model.get_intermediate_layers(x, n=2, reshape=True, norm=True)
        assert torch.equal(layers[-1].flatten(2).mT, model.forward_features(x)[:, 1:])
        as_dict = model.forward_intermediates(x, output_dict=True, return_prefix_tokens=True)
        assert set(as_dict) == {"image_intermediates", "image_intermediates_prefix", "image_features"}
        table = None if model.pos_embed is None else model.pos_embed.clone()
        before = model(images((6, 4)))
        model.set_input_size(img_size=(6 * PATCH, 4 * PATCH))
        assert torch.equal(model(images((6, 4))), before)
        assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 12, 8)
        if table is not None:
            assert torch.equal(model.pos_embed, table)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    features = vitpos.create_model(TIMM, pos=name, features_only=True, out_indices=(0, 2), **SMALL)
    assert [tuple(f.shape) for f in features(torch.randn(1, 3, 64, 48))] == [(1, 48, 4, 3)] * 2


def test_a_new_model_is_timms():
    """Where its class token's position row went does not show."""
    torch.manual_seed(3)
    theirs = timm.create_model(TIMM, **SMALL).eval()
    torch.manual_seed(3)
    ours = vitpos.create_model(TIMM, pos="ape1d", **SMALL).eval()
    x = torch.randn(1, 3, 48, 80)
    assert torch.equal(ours(x), theirs(x))


def test_backbone_weights_do_not_depend_on_the_encoding():
    states = {}
    for name in [*ENCODINGS, "native", "rope_mixed + ape1d"]:
        torch.manual_seed(5)
        model = vitpos.create_model(TIMM, pos=name, encoding_seed=9, **SMALL)
        after = torch.rand(1)
        states[name] = {k: v for k, v in model.state_dict().items() if not k.startswith("pos")} | {"after": after}
    torch.manual_seed(6)
    other = vitpos.create_model(TIMM, pos="none", encoding_seed=9, **SMALL).state_dict()
    for name, state in states.items():
        for key, value in state.items():
            assert torch.equal(value, states["none"][key]), (name, key)
    assert not torch.equal(other["head.weight"], states["none"]["head.weight"])


def test_encoding_seed_draws_the_encoding():
    weights = [
        vitpos.create_model(TIMM, pos="rpb", encoding_seed=seed, **SMALL).position.layers[0]["rpb"].table
        for seed in (1, 1, 2)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("name", ["ape1d", "ape2d", "rpb"])
def test_initial_scale_is_an_option(name):
    for std in (0.02, 0.5):
        model = vitpos.create_model(TIMM, pos=f"{name}(std={std})", img_size=224, depth=2)
        (table, *_) = [p for n, p in model.named_parameters() if n.startswith(("position.", "pos_embed"))]
        assert table.std().item() == pytest.approx(std, rel=0.1)


def test_parameter_counts():
    count = sum(p.numel() for p in vitpos.create_model("vit_base_patch16_224", pos="rpb").position.parameters())
    assert count == 104_976
    model = vitpos.create_model("vit_base_patch16_224", pos="rope_mixed")
    assert sum(p.numel() for p in model.position.parameters()) == 12 * 768


@pytest.mark.parametrize("name", ENCODINGS)
def test_low_precision(name):
    """Autocast does not touch what encodings compute; a bfloat16 model runs and stays near float32."""
    model = tiny(name, (3, 5), 1, randomize=False).float()
    x = images((4, 6), dtype=torch.float32)
    pos = vitpos.positions.grid(4, 6)
    with torch.no_grad():
        expected = model(x)
        plain = model.position.shared_signal(pos, 1).of_layer(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = model.position.shared_signal(pos, 1).of_layer(1)
            torch.testing.assert_close(model(x).float(), expected, atol=0.05, rtol=0.05)
        for a, b in [(plain.bias, inside.bias)] + (
            [(plain.rotation.turn, inside.rotation.turn)] if plain.rotation else []
        ):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        low = model.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ENCODINGS)
def test_nothing_derived_is_stored(name):
    """The state holds parameters only, of the size of the training grid whatever was run in between."""
    model = tiny(name)
    before = {k: v.shape for k, v in model.state_dict().items()}
    with torch.no_grad():
        for grid in [(4, 6), (6, 4), (2, 12)]:
            model(images(grid))
    assert {k: v.shape for k, v in model.state_dict().items()} == before
    assert set(before) == {n for n, _ in model.named_parameters()}


def test_resize_policies_switch_in_place():
    model = tiny("rope_axial + rpb")
    x = images((6, 10))
    with torch.no_grad():
        default = model(x)
        assert vitpos.resize_policy(model) == "extrapolate + interpolate"
        switched = vitpos.set_resize(model, "interpolate")(x)
        assert vitpos.resize_policy(model) == "interpolate + interpolate"
        assert relative_change(switched, default) > 1e-4
        expected = tiny("rope_axial(resize='interpolate') + rpb")
        expected.load_state_dict(model.state_dict())
        assert torch.equal(expected(x), switched)
        assert torch.equal(vitpos.set_resize(model, "default")(x), default)
    mixed = tiny("rope_axial + ape1d")
    with pytest.raises(ValueError, match="ape1d does not offer the resize policy 'extrapolate'; it knows interpolate"):
        vitpos.set_resize(mixed, "extrapolate")
    assert vitpos.resize_policy(mixed) == "extrapolate + interpolate"
    with pytest.raises(TypeError, match="int has no vitpos encoding"):
        vitpos.set_resize(3, "interpolate")
    with pytest.raises(TypeError, match="no vitpos encoding"):
        vitpos.resize_policy(timm_model())
    assert vitpos.resize_policy(tiny("none")) == "-"


def test_attach_again():
    """Swapping keeps the backbone; an absolute table stays with its own grid."""
    model = tiny("rope_axial", prefix=1)
    x = images((3, 5))
    with torch.no_grad():
        expected = model(x)
        vitpos.attach(model, "rpb")
        assert relative_change(model(x), expected) > 1e-4
        vitpos.attach(model, "rope_axial")
        assert torch.equal(model(x), expected)
        vitpos.attach(model, "native")
        assert str(model.position.spec) == "rope_axial"
        vitpos.attach(model, "native + rpb(std=0.0)")
        assert torch.equal(model(x), expected)
        vitpos.attach(model, "ape1d(std=0.5)")
        assert model.pos_embed.shape == (1, 16, 36)
        table = model.pos_embed.clone()
        model.set_input_size(img_size=(12, 12))
        expected = model(x)
        vitpos.attach(model, "native")
        assert torch.equal(model.pos_embed, table)
        assert torch.equal(model(x), expected)
    assert type(model) is backbone.VisionTransformer
    assert isinstance(model, timm.models.vision_transformer.VisionTransformer)


def test_a_gate_is_applied():
    """timm's gated attention: its output is multiplied by the gate, as in timm's own."""
    torch.manual_seed(0)
    plain = timm.layers.Attention(24, num_heads=2, gated=True, qkv_bias=True)
    ours = copy.deepcopy(plain)
    ours.__class__ = PARTS[timm.layers.Attention]
    x = torch.randn(2, 5, 24)
    assert torch.equal(ours(x), plain(x))
    ours.gate = None
    assert not torch.allclose(ours(x), plain(x))


@pytest.mark.parametrize("rates", [{"attn_drop_rate": 0.5}, {"pos_drop_rate": 0.5}, {"proj_drop_rate": 0.5}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_dropout_is_that_of_timm(rates, fused):
    """The same draws, so bit for bit; none in evaluation; and the masks are alike whatever the encoding."""
    plain = timm_model(**rates)
    model = vitpos.attach(copy.deepcopy(plain), "ape1d")
    other = vitpos.attach(copy.deepcopy(plain), "rope_axial")
    x = torch.randn(2, 3, 48, 80)

    def draw(net):
        for block in net.blocks:
            block.attn.fused_attn = fused
        torch.manual_seed(11)
        out = net.train()(x)
        return out, torch.rand(1)

    (ours, after), (theirs, expected), (_, elsewhere) = draw(model), draw(plain), draw(other)
    assert torch.equal(ours, theirs)
    assert torch.equal(after, expected)
    assert torch.equal(after, elsewhere)
    assert not torch.equal(ours, model.eval()(x))
    assert torch.equal(model(x), plain.eval()(x))


def test_stop_early_runs_no_further_block():
    model = tiny("rope_mixed", depth=3)
    model.blocks[2].mlp = None  # a block that cannot run
    x = images((3, 5))
    assert len(model.forward_intermediates(x, [0, 1], stop_early=True, intermediates_only=True)) == 2
    with pytest.raises(TypeError):
        model.forward_intermediates(x, [0, 1], intermediates_only=True)


def test_the_encoding_takes_the_models_mode_and_device():
    for training in (True, False):
        model = vitpos.attach(timm_model().train(training), "rpb")
        assert model.position.training is training
    with torch.device("meta"):
        plain = timm.create_model(TIMM, **SMALL)
    assert {p.device.type for p in vitpos.attach(plain, "rpb + rope_mixed").parameters()} == {"meta"}


@pytest.mark.parametrize("name", SPECS)
def test_native_keeps_what_the_model_has(name):
    """Weights, a switched policy and all: attaching ``native`` changes no bit."""
    model = tiny(name, (3, 5), 1)
    x = images((4, 6))
    with torch.no_grad():
        expected = model(x)
        vitpos.attach(model, "native")
        assert torch.equal(model(x), expected)
        if name != "none":
            vitpos.attach(model, "native + logn")
            assert relative_change(model(x), expected) > 1e-6 or name == "logn"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["ape1d", "rope_axial", "rope_mixed", "rpb", "alibi2d", "irpe", "cpe"])
def test_compiles_without_a_break(name, dtype):
    """The whole model is one graph (the backend that only traces is enough to see that)."""
    torch._dynamo.reset()
    model = tiny(name, (3, 5), 1, depth=1, heads=2, dim=24, randomize=False).to(dtype)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for grid in ((3, 5), (4, 6)):
        x = images(grid, dtype=dtype)
        with torch.no_grad():
            bound = 1e-12 if dtype == torch.float64 else 0.05
            assert relative_change(compiled(x).double(), model(x).double()) < bound
    torch._dynamo.reset()


@pytest.mark.parametrize("table", ["", "none", "learn"])
@pytest.mark.parametrize("pos", ["none", "rope_axial", "rpb", "ape1d"])
def test_no_table_is_no_reason_to_skip_what_follows(table, pos):
    """timm's model without a table skips the dropout of positions; here prefix tokens, dropout and order stay."""
    plain = timm_model(pos_embed=table, pos_drop_rate=0.5, reg_tokens=4)
    model = vitpos.attach(plain, pos, preserve=False)
    x = torch.randn(2, 3, 48, 80)
    tokens, _ = model._embed(x, None, None)
    assert tokens.shape == (2, 5 + 15, 48)
    if pos != "ape1d":
        assert torch.equal(tokens[:, :5], torch.cat([model.cls_token, model.reg_token], dim=1).expand(2, -1, -1))
    assert not (tokens == 0).any()
    dropped = (model.train()._embed(x, None, None)[0] == 0).float().mean()
    assert 0.4 < dropped < 0.6
    theirs = timm_model(pos_embed=table, pos_drop_rate=0.5).train()
    assert ((theirs._pos_embed(theirs.patch_embed(x)) == 0).float().mean() > 0.4) == (table == "learn")


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 4}, {"class_token": False, "reg_tokens": 2}], ids=str)
@pytest.mark.parametrize("apart", [True, False])
def test_tables_of_patches_leave_prefix_tokens_alone(options, apart):
    """With ``no_embed_class`` no table reaches the class token and registers before block 0; without, its rows do."""
    pooled = {} if options.get("class_token", True) else {"global_pool": "avg"}
    model = vitpos.attach(timm_model(no_embed_class=apart, **options, **pooled), "ape1d")
    count = model.num_prefix_tokens
    x = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        before, _ = model._embed(x, None, None)
        model.pos_embed.add_(1.0)
        after, _ = model._embed(x, None, None)
    assert torch.equal(before[:, :count], after[:, :count]) == apart
    assert not torch.equal(before[:, count:], after[:, count:])


def test_timms_resolver_knows_the_size():
    """What evaluators ask for: the size the model was built at, and after each change."""
    model = vitpos.create_model(TIMM, pos="ape1d + rpb", **{**SMALL, "img_size": (160, 320)})
    assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 160, 320)
    model.set_input_size(img_size=(192, 96))
    assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 192, 96)
    assert model._model_args["img_size"] == (192, 96)
    assert model.position.geometry.grid == (10, 20)
    model.set_input_size(patch_size=8)
    assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 192, 96)
    assert model(torch.randn(1, 3, 24, 48)).shape == (1, 7)


def test_a_model_that_was_not_made_by_name(tmp_path):
    """timm's class called directly has neither arguments nor a configuration; only saving needs them."""
    plain = timm.models.vision_transformer.VisionTransformer(
        **{k: v for k, v in SMALL.items() if k != "num_heads"}, num_heads=3
    ).eval()
    assert not hasattr(plain, "_model_args")
    assert not hasattr(plain, "pretrained_cfg")
    model = vitpos.attach(copy.deepcopy(plain), "ape1d + rope_axial", preserve=False)
    vitpos.attach(model, "native")
    model.set_input_size(img_size=(80, 48))
    x = torch.randn(1, 3, 80, 48)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 80, 48)
    with pytest.raises(ValueError, match="not made by name"):
        vitpos.save(model, tmp_path / "m.safetensors")


def held(model):
    """What every module holds beside parameters and buffers, by place; and those that are tensors."""
    found = {(n, key): value for n, module in model.named_modules() for key, value in vars(module).items()}
    return {place: id(v) for place, v in found.items()}, [p for p, v in found.items() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_kept_from_one_forward_to_the_next(name):
    """No cache, and no tensor that is neither parameter nor buffer (``.to`` leaves it behind, deepcopy may fail)."""
    model = tiny(name, (3, 5), 1).train()
    before, loose = held(model)
    for grid in ((4, 6), (6, 4), (3, 5)):
        model(images(grid)).sum().backward()
    assert held(model) == (before, loose)
    assert not loose
    assert list(model.state_dict()) == [n for n, _ in model.named_parameters()]
    assert not list(model.buffers())


def test_the_check_sees_what_is_kept():
    model = tiny("rope_mixed", (3, 5), 1)
    before, _ = held(model)
    model.position.layers[0]["rope_mixed"].cached = torch.zeros(3)
    after, loose = held(model)
    assert loose == [("position.layers.0.rope_mixed", "cached")]
    assert after != before


@pytest.mark.parametrize("name", ENCODINGS)
def test_dtype_and_device_change_between_forwards(name):
    """Forward, move, forward: what a fresh model says in that dtype, and no tensor of the old device."""
    model = tiny(name, (3, 5), 1)
    x = images((4, 6))
    with torch.no_grad():
        expected = model(x)
        rounded = tiny(name, (3, 5), 1).float()(x.float())
        assert torch.equal(model.float()(x.float()), rounded)
        assert relative_change(model.double()(x), expected) < 1e-4
        assert model.to("meta")(x.to("meta")).device.type == "meta"


@pytest.mark.parametrize("name", [*ENCODINGS, "native"])
def test_averaged_weights_pair_up(name):
    """timm's averages pair entries of the state_dict by order: every one is a parameter, before and after forwards."""
    torch.manual_seed(0)
    if name == "native":
        model = timm.create_model("vit_small_patch16_rope_mixed_224", **{**SMALL, "num_heads": 4})
        model = vitpos.attach(model, "native")
    else:
        model = vitpos.create_model(TIMM, pos=name, **SMALL)
    ema = ModelEmaV3(model, decay=0.0)  # takes the weights over, entry by entry
    for size in ((48, 80), (80, 48)):
        model.train()(torch.randn(2, 3, *size)).sum().backward()
    model.set_input_size(img_size=(80, 80))
    assert list(model.state_dict()) == [n for n, _ in model.named_parameters()] == list(ema.module.state_dict())
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.fill_(float(i))
    ema.update(model)
    for (key, ours), theirs in zip(ema.module.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key


def replicate(module):
    """What ``nn.DataParallel`` makes of a model on each of its devices: parameters that are plain attributes."""
    copies = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, copied in copies.items():
        copied._former_parameters = {}
        for name, child in part._modules.items():
            setattr(copied, name, copies.get(child))
        for name, weight in part._parameters.items():
            if weight is not None:
                setattr(copied, name, weight.clone())
                copied._former_parameters[name] = getattr(copied, name)
            else:
                copied._parameters[name] = None
        for name, buffer in part._buffers.items():
            copied._buffers[name] = buffer
    return copies[module]


@pytest.mark.parametrize("name", ENCODINGS)
def test_replicas_run(name):
    model = tiny(name, (3, 5), 1).float()
    x = images((3, 5)).float()
    replica = replicate(model)
    assert not list(replica.parameters())
    assert torch.equal(replica(x), model(x))
    replica(x).sum().backward()
    assert all(p.grad is not None for p in model.blocks.parameters())


@pytest.mark.parametrize("wrap", ["compiled", "features_only", "both"])
def test_what_takes_a_model_looks_through_a_wrapper(wrap):
    """Each call does to the model inside what it does to the model itself, and returns what it was given."""

    def make():
        torch.manual_seed(0)
        given = {} if wrap == "compiled" else {"features_only": True, "out_indices": (0, 1)}
        model = vitpos.create_model(TIMM, pos="rope_axial + ape1d", **{**SMALL, "depth": 2}, **given).eval()
        return model, model if wrap == "features_only" else torch.compile(model, backend="eager")

    def bare(model):
        return model if wrap == "compiled" else model.model

    x = torch.randn(1, 3, 64, 48)
    calls = [
        (lambda m: vitpos.set_resize(m, "interpolate"), "interpolate + interpolate"),
        (lambda m: vitpos.convert(m, "rope_mixed"), "rope_mixed + ape1d"),
        (lambda m: vitpos.attach(m, "rope_mixed + rpb", preserve=True), "rope_mixed + rpb + fading(ape1d)"),
        (lambda m: vitpos.set_fade(m, 0.5), 0.5),
        (lambda m: vitpos.attach(m, "rpb", preserve=False), "rpb"),
    ]
    (inside, outside), (alone, _) = make(), make()
    for call, expected in calls:
        before = outside(x)
        with torch.random.fork_rng():
            assert call(outside) is outside
        with torch.random.fork_rng():
            call(bare(alone))
        position = backbone.position_of(outside)
        assert position is bare(inside).position
        found = (str(position.spec), vitpos.resize_policy(outside), position.fading and vitpos.fade_of(outside))
        assert expected in found
        after = outside(x)
        torch.testing.assert_close(after, alone(x))  # compiled, it rotates by other means
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after, before)  # what the last call did
