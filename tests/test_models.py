"""timm's other vision transformers: served in place, equal to timm's where they keep what they came with."""

import copy
import itertools
import pickle
from pathlib import Path

import pytest
import timm
import torch
from common import coordinates, relative_change
from timm.optim import param_groups_layer_decay
from timm.utils import ModelEmaV3

import vitpos
from vitpos import backbone
from vitpos.backbone import parts, table

DOCS = Path(__file__).parent.parent / "docs" / "models.md"
GRID = (3, 5)
OTHER = "rope_axial + rpb + sincos2d"
NARROW = {"embed_dim": 48, "num_heads": 4}

# One name for each (model class, block class, attention class, patch embedding, prefix tokens, own encoding), and the
# options that make it small. The table in docs/models.md says which kinds there are.
MODELS = {
    "vit_tiny_patch16_224": NARROW,
    "vit_tiny_r_s16_p8_224": NARROW,
    "vit_base_mci_224": {"embed_dim": 768, "num_heads": 4},  # no projection: as wide as its stem
    "vit_small_patch16_18x2_224": NARROW,
    "vit_base_patch16_rpn_224": NARROW,
    "vit_base_patch16_xp_224": NARROW,
    "vit_base_patch16_siglip_gap_224": NARROW,
    "vit_base_patch14_reg1_tipsv2": NARROW,
    "vit_base_patch16_reg4_gap_256": NARROW,
    "vit_small_patch14_reg4_dinov2": NARROW,
    "vit_base_patch16_radio_v3": NARROW,
    "vit_so400m_patch16_radio_v4": NARROW,
    "deit_tiny_distilled_patch16_224": NARROW,
    "eva_giant_patch14_224": NARROW,
    "eva02_tiny_patch14_224": NARROW,
    "eva02_enormous_patch14_clip_224": NARROW,
    "vit_small_patch16_dinov3": NARROW,
    "vit_base_patch16_rope_reg1_gap_256": NARROW,
    "vit_betwixt_patch16_rope_reg4_gap_256": NARROW,
    "vit_base_patch16_sapiens2": {**NARROW, "num_kv_heads": 2},
    "vit_small_patch16_rope_224": NARROW,
    "vit_small_patch16_rope_mixed_224": NARROW,
    "vit_small_patch16_rope_mixed_ape_224": NARROW,
    "vit_pe_core_tiny_patch16_384": {**NARROW, "attn_pool_num_heads": 4},
    "vit_pe_spatial_gigantic_patch14_448": NARROW,
    "beit_base_patch16_224": NARROW,
    "vit_srelpos_small_patch16_224": NARROW,
    "vit_relpos_base_patch16_cls_224": NARROW,
    "vit_relpos_base_patch16_rpn_224": NARROW,
}
# Options that no registered name has, but the classes do.
VARIANTS = {
    "beit shared and own": ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True, "use_abs_pos_emb": True}),
    "relpos table": ("vit_relpos_base_patch16_cls_224", {"rel_pos_type": "bias"}),
    "relpos shared table": ("vit_srelpos_small_patch16_224", {"rel_pos_type": "bias"}),
    "relpos swin": ("vit_relpos_base_patch16_224", {"rel_pos_type": "mlp_swin"}),
    "eva dynamic": ("vit_small_patch16_dinov3", {"dynamic_img_size": True}),
    "eva mrope": ("vit_small_patch16_rope_224", {"rope_type": "mrope", "rope_grid_indexing": "ij"}),
    "eva gated, normalized": ("vit_small_patch16_rope_224", {"qk_norm": True, "scale_attn_inner": True}),
    "fused out projection": ("vit_base_patch16_xp_224", {"qkv_bias": True}),
}
ALL = {**{name: (name, {}) for name in MODELS}, **VARIANTS}
ROTARY = [k for k in ALL if "rope" in k or "eva" in k or k in ("vit_small_patch16_dinov3", "vit_base_patch16_sapiens2")]


def step_of(name):
    if name == "vit_tiny_r_s16_p8_224":
        return 64 // 2
    return 14 if "patch14" in name else 16


def size(name, grid):
    return tuple(side * step_of(name) for side in grid)


def build(key, seed=0, **kwargs):
    """A small model of timm's, every parameter random, so that no layer scale or zero table hides anything."""
    name, options = ALL[key]
    torch.manual_seed(seed)
    model = timm.create_model(
        name,
        **{"depth": 2, "img_size": size(name, GRID), "num_classes": 7, **MODELS.get(name, NARROW), **options, **kwargs},
    ).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            scaled = 0.5 * parameter.shape[-1] ** -0.5 if parameter.ndim in (2, 4) else 0.3
            parameter.add_(drawn * scaled)
    return model


def images(key, grid=GRID, batch=2):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, 3, *size(ALL[key][0], grid), generator=generator)


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in flat(v)]


def test_each_kind_is_represented():
    rows = [line.strip("| \n").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| ")][2:]
    kinds = {row[0]: tuple(row[1:]) for row in rows if "not served" not in row[-1]}
    assert set(kinds.values()) == {kinds[name] for name in MODELS}
    assert len(set(kinds.values())) == 26


@pytest.mark.parametrize("key", ALL)
def test_native_is_timms_bit_for_bit(key):
    plain = build(key)
    model = vitpos.attach(copy.deepcopy(plain), "native")
    x = images(key)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    for fused in (True, False):
        for module in (*plain.modules(), *model.modules()):
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        if key == "beit shared and own" and not fused:
            continue  # timm adds the two biases one after the other, here they are added first
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
            ours, theirs = (m.forward_intermediates(x, indices=1, norm=True) for m in (model, plain))
        assert all(torch.equal(a, b) for a, b in zip(flat(ours), flat(theirs), strict=True))
    expected = model(x)
    model(x).sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a position that is not read would pass all this
            if any(part in name for part in ("pos_embed", "rel_pos", "relative_position", "rope.freqs")):
                parameter.mul_(-1)
    if key not in ROTARY or "ape" in key or "mixed" in key or model.pos_embed is not None:
        assert relative_change(model(x), expected) > 1e-4
    if getattr(model, "rope", None) is not None:
        assert relative_change(vitpos.attach(model, "none")(x), expected) > 1e-4


@pytest.mark.parametrize(
    "key", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_ape_224", "beit_base_patch16_224"]
)
def test_native_in_bfloat16(key):
    plain = build(key).bfloat16()
    model = vitpos.attach(copy.deepcopy(plain), "native")
    x = images(key).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # in timm's own resizing
@pytest.mark.parametrize("grid", [(5, 3), (4, 8), (2, 8), (2, 2)])  # (tables of 3x5 and 2x8 have as many entries)
@pytest.mark.parametrize("key", ALL)
def test_native_at_other_sizes_is_timm_resized(key, grid):
    """timm needs surgery for another size; the model given its weights does not, and keeps its tables."""
    plain = build(key)
    model = vitpos.attach(copy.deepcopy(plain), "native")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images(key, grid)
    with torch.no_grad():
        ours = model(x)
        plain.set_input_size(img_size=size(ALL[key][0], grid))
        assert relative_change(ours, plain(x)) < 1e-5
        model.set_input_size(img_size=size(ALL[key][0], grid))
        assert torch.equal(model(x), ours)
        assert model(images(key, (1, 7))).isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("key", ALL)
def test_native_at_coordinates_is_the_grid(key):
    """The formula at given coordinates agrees with the tables that the grid itself takes; elsewhere it differs."""
    model = vitpos.attach(build(key), "native")
    x, cells = images(key), coordinates(GRID)
    with torch.no_grad():
        expected = model(x)
        assert relative_change(model(x, coords=cells), expected) < 1e-5
        assert relative_change(model(x, coords=cells.flip(-1)), expected) > 1e-5
        assert model(x, coords=cells + 0.25, extent=(4, 6)).isfinite().all()


@pytest.mark.parametrize("key", MODELS)
def test_another_encoding(key):
    """What the model had goes, whole; any grid runs; every parameter that is left has a gradient."""
    model = vitpos.attach(build(key), OTHER).train()
    names = [name for name, _ in model.named_parameters()]
    assert not [n for n in names if any(w in n for w in ("pos_embed", "rope.", "rel_pos", "relative_position"))]
    assert sum(n.startswith("position.") for n in names) == 2
    model.set_grad_checkpointing()
    (sum(model(images(key, grid)).sum() for grid in (GRID, (5, 3)))).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    model.eval()
    with torch.no_grad():
        maps = model.forward_intermediates(images(key, (4, 2)), 1, intermediates_only=True)
        assert maps[0].shape == (2, model.embed_dim, 4, 2)
        expected = model(images(key))
        other = copy.deepcopy(model)
        assert torch.equal(pickle.loads(pickle.dumps(model))(images(key)), expected)
        other.position.layers[0]["rpb"].table.normal_()
        assert relative_change(other(images(key)), expected) > 1e-6
        assert torch.equal(model(images(key)), expected)


@pytest.mark.parametrize("key", [key for key in MODELS if getattr(build(key), "pos_embed", None) is not None])
def test_removing_a_table_folds_its_prefix_rows(key):
    plain = build(key)
    model = vitpos.attach(copy.deepcopy(plain), "none")
    rows = plain.pos_embed.shape[1] - GRID[0] * GRID[1]
    assert rows in (0, plain.num_prefix_tokens)
    x = images(key)
    with torch.no_grad():
        expected = plain(x)
        plain.pos_embed[:, rows:] = 0
        plain.rope = None
        assert torch.equal(model(x), plain(x))
        assert relative_change(model(x), expected) > 1e-4


def test_both_of_beits_biases_stay():
    model = vitpos.attach(build("beit shared and own"), "native + alibi2d")
    assert str(model.position.spec) == "ape1d + native + alibi2d"
    assert set(model.position.shared) == {"ape1d", "native", "alibi2d"}
    assert all(set(layer) == {"native"} for layer in model.position.layers)
    vitpos.attach(model, "native")
    assert str(model.position.spec) == "ape1d + native + alibi2d"
    vitpos.attach(model, "ape1d")
    assert not [n for n, _ in model.named_parameters() if "rel" in n]
    with pytest.raises(ValueError, match="native"):
        vitpos.attach(build("vit_small_patch16_rope_224"), "native + rope_axial")


COUNTERPARTS = {
    "vit_small_patch16_rope_224": "rope_axial",
    "vit_small_patch16_rope_mixed_224": "rope_mixed",
    "vit_small_patch16_dinov3": "rope_dinov3",
    "relpos table": "rpb(prefix=True)",
    "beit_base_patch16_224": "rpb(prefix=True)",
}


def counterpart(key):
    """The model with its own encoding, and with the encoding of vitpos that has the same formula and weights."""
    ours = vitpos.attach(build(key), "native")
    other = vitpos.attach(build(key), COUNTERPARTS[key])
    with torch.no_grad():
        for layer, block in enumerate(ours.blocks):
            if COUNTERPARTS[key] == "rope_mixed":  # timm: [x | y, layer, head, pair]; ours: [head, pair, (y, x)]
                weight = ours.rope.freqs[:, layer].flip(0).permute(1, 2, 0)
                other.position.layers[layer]["rope_mixed"].weight.copy_(weight)
            elif COUNTERPARTS[key].startswith("rpb"):
                module = getattr(block.attn, "rel_pos", block.attn)
                rows = module.relative_position_bias_table
                rpb = other.position.layers[layer]["rpb"]
                rpb.table.copy_(rows[:-3].mT.unflatten(1, rpb.table.shape[1:]))
                rpb.prefix.copy_(rows[-3:].mT)
    return ours, other


@pytest.mark.parametrize("key", COUNTERPARTS)
def test_native_equals_the_encoding_of_the_same_formula(key):
    ours, other = counterpart(key)
    grids = [GRID] if "rpb" in COUNTERPARTS[key] else [GRID, (5, 3), (4, 8)]  # (tables resize by different policies)
    with torch.no_grad():
        for grid in grids:
            x = images(key, grid)
            assert relative_change(other(x), ours(x)) < 1e-5
        vitpos.attach(other, "rope1d")
        assert relative_change(other(x), ours(x)) > 1e-4


@pytest.mark.parametrize(
    "key", ["vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224", "vit_small_patch16_dinov3", "eva dynamic"]
)
@pytest.mark.parametrize("options", [{"patch_drop_rate": 0.4}, {"rope_shift_coords": 0.3, "rope_rescale_coords": 2.0}])
def test_training_draws_and_computes_what_timm_does(key, options):
    """Dropped patches take their rotation with them (as many images as heads); augmented grids are timm's."""
    plain = build(key, drop_path_rate=0.1, **options).train()
    model = vitpos.attach(copy.deepcopy(plain), "native")
    x = images(key, batch=4)
    losses = []
    for m in (plain, model):
        torch.manual_seed(5)
        losses.append(m(x).pow(2).sum())
        losses[-1].backward()
    assert torch.equal(*losses)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("key", ["vit_relpos_base_patch16_cls_224", "beit_base_patch16_224"])
def test_training_with_biases(key):
    plain = build(key, drop_path_rate=0.1, attn_drop_rate=0.1, proj_drop_rate=0.1).train()
    model = vitpos.attach(copy.deepcopy(plain), "native")
    outputs = []
    for m in (plain, model):
        torch.manual_seed(5)
        outputs.append(m(images(key)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "key", ["vit_small_patch16_rope_mixed_ape_224", "vit_relpos_base_patch16_rpn_224", "vit_base_patch16_xp_224"]
)
def test_checkpointing_and_several_grids(key):
    grads = []
    for enable in (False, True):
        model = vitpos.attach(build(key), "native")
        model.set_grad_checkpointing(enable)
        sum(model(images(key, grid)).pow(2).sum() for grid in [(4, 6), (6, 4), (3, 8)]).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(value, grads[1][name]) for name, value in grads[0].items())


@pytest.mark.parametrize("key", ["vit_small_patch16_rope_224", "eva02_tiny_patch14_224", "vit_base_patch16_xp_224"])
def test_callers_masks(key):
    plain = build(key)
    model = vitpos.attach(copy.deepcopy(plain), "native")
    x = images(key)
    count = GRID[0] * GRID[1] + plain.num_prefix_tokens
    allowed = (torch.rand(count, count) < 0.6) | torch.eye(count, dtype=torch.bool)
    with torch.no_grad():
        assert relative_change(model(x, attn_mask=allowed), plain(x, attn_mask=allowed)) < 1e-6
        assert relative_change(model(x, is_causal=True), plain(x, is_causal=True)) < 1e-6
        assert relative_change(model(x, attn_mask=allowed), model(x)) > 1e-4
    with pytest.raises(TypeError, match="Signal"):
        vitpos.attach(build("vit_small_patch16_rope_224"), "native").blocks[0](
            torch.zeros(1, 16, 48), torch.zeros(15, 24)
        )


def test_distilled():
    """Its distillation token is a prefix token: never dropped; both heads are classifiers."""
    model = vitpos.attach(build("deit_tiny_distilled_patch16_224", patch_drop_rate=0.75), "rope_axial").train()
    dropped, x = model.patch_drop, torch.randn(2, 17, 48)
    for _ in range(20):
        assert torch.equal(dropped(x)[0][:, :2], x[:, :2])
    dropped.num_prefix_tokens = 1  # as timm leaves it
    assert not all(torch.equal(dropped(x)[0][:, :2], x[:, :2]) for _ in range(20))
    dropped.num_prefix_tokens = 2
    assert model.get_classifier() == (model.head, model.head_dist)
    model.reset_classifier(3)
    model.set_distilled_training(True)
    assert [tuple(y.shape) for y in model(images("deit_tiny_distilled_patch16_224"))] == [(2, 3), (2, 3)]


@pytest.mark.parametrize("options", [{"no_embed_class": True}, {"pos_embed": "none"}], ids=str)
@pytest.mark.parametrize("pos", ["native", "rope_axial", "none"])
def test_options_of_the_distilled_model(options, pos):
    """timm's own fails with ``no_embed_class`` and keeps its table whatever ``pos_embed`` says."""
    key = "deit_tiny_distilled_patch16_224"
    model = vitpos.create_model(key, pos, depth=2, img_size=size(key, GRID), num_classes=7, **NARROW, **options).train()
    assert (model.pos_embed is not None) == (pos == "native")
    model.set_distilled_training(True)
    for grid in (GRID, (5, 2)):
        model.zero_grad()
        sum(logits.pow(2).sum() for logits in model(images(key, grid))).backward()
        assert not [n for n, p in model.named_parameters() if p.grad is None]
    with pytest.raises(RuntimeError, match="must match the size"):
        build(key, no_embed_class=True)(images(key))


def test_registers_that_nobody_uses_are_refused():
    plain = build("deit_tiny_distilled_patch16_224", reg_tokens=4)
    plain(images("deit_tiny_distilled_patch16_224")).sum().backward()
    assert plain.reg_token.grad is None
    with pytest.raises(ValueError, match="makes reg_tokens=4 and uses none of them"):
        vitpos.attach(plain, "native")
    assert type(plain) is timm.models.deit.VisionTransformerDistilled


@pytest.mark.parametrize("name", ["vit_relpos_base_patch16_cls_224", "vit_srelpos_small_patch16_224"])
@pytest.mark.parametrize("grid", [(1, 4), (3, 1), (1, 1)])
def test_a_network_of_offsets_on_one_row(name, grid):
    """timm divides Swin v2's offsets by the side less 1, so that on a single row or column its model says nan."""
    torch.manual_seed(0)
    options = {"rel_pos_type": "mlp_swin", "depth": 2, "num_classes": 7, **NARROW}
    plain = timm.create_model(name, img_size=size(name, grid), **options).eval()
    x = torch.randn(2, 3, *size(name, grid))
    with torch.no_grad():
        assert plain(x).isnan().all()
        model = vitpos.attach(plain, "native")
        assert model(x).isfinite().all()
        taller = vitpos.attach(timm.create_model(name, img_size=size(name, (3, 4)), **options).eval(), "native")
        taller.load_state_dict(model.state_dict())  # one network, whatever grid it was built for
        assert relative_change(model(x), taller(x)) < 1e-6


@pytest.mark.parametrize("pos", ["ape1d + rpb", "native + rpb"])
@pytest.mark.parametrize(
    "key",
    ["vit_small_patch16_rope_mixed_ape_224", "eva02_tiny_patch14_224", "beit shared and own",
     "vit_relpos_base_patch16_cls_224", "vit_srelpos_small_patch16_224", "relpos table"],
)  # fmt: skip
def test_init_weights_draws_anew(key, pos):
    """From any state and one seed the same weights, timm's and the encoding's, in classes that do it each its way."""
    states = []
    for value in (0.5, 2.0):
        model = vitpos.attach(build(key), pos)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        torch.manual_seed(7)
        model.init_weights()
        states.append(model.state_dict())
    kept = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    mixed = pos.startswith("native") and "mixed" in key
    assert kept == ["rope.freqs"] * mixed  # (which timm's own ``init_weights`` leaves too)
    assert states[0]["position.layers.1.rpb.table"].std() == pytest.approx(0.02, rel=0.3)
    assert model.pos_embed is None or model.state_dict()["pos_embed"].std() == pytest.approx(0.02, rel=0.3)
    if not mixed:
        assert model(images(key)).isfinite().all()


@pytest.mark.parametrize("key", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_no_method_is_bound_to_an_instance(key):
    """Whatever copies modules one by one, such as DataParallel, gets modules that run their own code."""
    model = vitpos.attach(build(key), "native + rpb")

    def bound(module):
        return [name for name, value in vars(module).items() if getattr(value, "__self__", None) is not None]

    for module in model.modules():
        assert not bound(module)
        replica = module._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica
    model.blocks[1].attn.forward = model.blocks[1].attn.forward
    replica = model.blocks[1].attn._replicate_for_data_parallel()
    assert bound(replica) == ["forward"]
    assert replica.forward.__self__ is not replica


def test_pruning_takes_mixed_frequencies_too():
    model = vitpos.attach(build("vit_small_patch16_rope_mixed_224"), "native")
    x = images("vit_small_patch16_rope_mixed_224")
    (expected,) = model.forward_intermediates(x, [0], intermediates_only=True)
    model.prune_intermediate_layers([0])
    (pruned,) = model.forward_intermediates(x, [0], intermediates_only=True)
    assert torch.equal(pruned, expected)
    pruned.sum().backward()
    assert model.rope.freqs.shape[1] == 1
    assert model.rope.freqs.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("vit_small_patch16_rope_mixed_ape_224", {"rope.freqs", "pos_embed"}),
        ("vit_srelpos_small_patch16_224", {"shared_rel_pos.mlp.fc1.weight"}),
        ("vit_relpos_base_patch16_cls_224", {"blocks.0.attn.rel_pos.mlp.fc1.weight"}),
        ("beit_base_patch16_224", {"blocks.1.attn.relative_position_bias_table"}),
        ("beit shared and own", {"rel_pos_bias.relative_position_bias_table", "pos_embed"}),
    ],
)
def test_optimizer_groups(key, held):
    model = vitpos.attach(build(key), "native + rpb")
    skip = model.no_weight_decay()
    assert held | {"position.layers.0.rpb.table"} <= skip
    assert "blocks.0.attn.qkv.weight" not in skip
    names = {id(p): n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.1, no_weight_decay_list=skip, layer_decay=0.5)
    scale = {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}
    stem = scale["patch_embed.proj.weight"]
    assert all(scale[n] == stem for n in {*held, "position.layers.0.rpb.table"} if not n.startswith("blocks."))


@pytest.mark.parametrize("pos", ["native", "native + rpb", "rope_axial + ape1d"])
@pytest.mark.parametrize("key", ["eva02_tiny_patch14_224", "beit_base_patch16_224", "vit_tiny_r_s16_p8_224"])
def test_save_and_load(key, pos, tmp_path):
    if (key, pos) == ("beit_base_patch16_224", "rope_axial + ape1d"):
        pos = "rope_axial"
    model = vitpos.attach(build(key), pos)
    model.set_input_size(img_size=size(ALL[key][0], (4, 4)))
    vitpos.save(model, tmp_path / "weights.safetensors")
    again = vitpos.load(tmp_path / "weights.safetensors")
    assert again.patch_embed.grid_size == (4, 4)
    assert again.position.geometry.grid == GRID
    for grid in (GRID, (4, 4)):
        assert torch.equal(again(images(key, grid)), model(images(key, grid)))
    assert torch.equal(ModelEmaV3(model).module(images(key)), model(images(key)))


@pytest.mark.parametrize("key", ["eva02_tiny_patch14_224", "beit_base_patch16_224", "vit_srelpos_small_patch16_224"])
def test_created_by_name_with_features_only(key):
    name, options = ALL[key]
    kwargs = {"depth": 2, "img_size": size(name, GRID), **MODELS[name], **options}
    features = vitpos.create_model(name, pos="native", features_only=True, out_indices=(0, 1), **kwargs)
    assert [tuple(f.shape) for f in features(images(key, (2, 4)))] == [(2, 48, 2, 4)] * 2


@pytest.mark.parametrize("key", ["vit_tiny_r_s16_p8_224", "vit_base_mci_224"])
def test_images_of_a_hybrid(key):
    model = vitpos.attach(build(key), "rope_axial")
    step = step_of(key)
    assert model(torch.randn(1, 3, 2 * step, 7 * step)).shape == (1, 7)
    with pytest.raises(ValueError, match=f"not a multiple of the patch size {step}x{step}; nearest"):
        model(torch.randn(1, 3, 2 * step, 7 * step - 8))
    with pytest.raises(ValueError, match=r"expected images \[B, 3, H, W\]"):
        model(torch.randn(1, 1, step, step))


def test_patch_size_changes_what_features_say():
    model = vitpos.attach(build("vit_tiny_patch16_224"), "rope_axial")
    model.set_input_size(patch_size=8)
    assert {info["reduction"] for info in model.feature_info} == {8}


REFUSED = {
    "vit_dwee_patch16_reg1_gap_256": "DiffAttention: it subtracts two softmaxes",
    "vit_dpwee_patch16_reg1_gap_256": "DiffParallelScalingBlock: it subtracts two softmaxes",
    "samvit_base_patch16": "VisionTransformerSAM: its blocks attend within windows",
    "swin_tiny_patch4_window7_224": "SwinTransformer: its blocks attend within shifted windows",
    "naflexvit_base_patch16_gap": "NaFlexVit: it takes patches of several images",
    "resnet18": "ResNet: served are timm's VisionTransformer, VisionTransformerDistilled, Eva, Beit",
    "cait_xxs24_224": "Cait: served are",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_says_why(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    before = {module: type(module) for module in model.modules()}
    with pytest.raises(TypeError, match=rf"cannot attach an encoding to timm\.[\w.]+\.{REFUSED[name]}"):
        vitpos.attach(model, "rope_axial")
    assert {module: type(module) for module in model.modules()} == before
    assert not hasattr(model, "position")


def test_a_refused_spec_leaves_the_model_as_it_was():
    plain = build("eva02_tiny_patch14_224", embed_dim=40, num_heads=4, use_rot_pos_emb=False)
    with pytest.raises(ValueError, match="multiple of 4, got 10"):
        vitpos.attach(plain, "rope_axial")
    assert type(plain) is timm.models.eva.Eva
    assert plain.pos_embed is not None
    assert not any(isinstance(m, backbone.PositionMixin) for m in plain.modules())


@pytest.mark.slow
def test_every_model_of_timm():
    """All names on the meta device: attach, run at the nominal and at another size; the page says what came out."""

    def run(model):
        step = model.patch_embed.feat_ratio(as_scalar=False)
        for image in (model.patch_embed.img_size, (2 * step[0], 3 * step[1])):
            tokens = model.forward_features(torch.empty(1, model.in_chans, *image))
            cells = (image[0] // step[0]) * (image[1] // step[1])
            assert tokens.shape == (1, cells + model.num_prefix_tokens, model.embed_dim)

    rows = [table.try_model(name, run) for name in table.names()]
    assert sum(not row.refusal for row in rows) == 276
    assert len(rows) == 279
    assert DOCS.read_text() == table.markdown(rows), "run make docs"


@pytest.mark.slow
@pytest.mark.parametrize("key", MODELS)
def test_every_encoding_in_every_kind_of_model(key, tmp_path):
    """The whole product: built, attached, forwards and backwards on two grids, saved and loaded again."""
    plain = build(key)
    grids = [images(key, grid) for grid in (GRID, (4, 2))]
    outputs = {}
    for name in vitpos.list_encodings():
        model = vitpos.attach(copy.deepcopy(plain), name, preserve=False).train()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.position.parameters():  # some begin at zero
                parameter.add_(torch.randn_like(parameter) * 0.3)
        torch.stack([model(x).square().sum() for x in grids]).sum().backward()
        silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not silent, (name, silent)
        again = vitpos.load(vitpos.save(model.eval(), tmp_path / f"{name}.safetensors"))
        assert again.position.resolved == model.position.resolved
        with torch.no_grad():
            outputs[name] = [model(x) for x in grids]
            for x, expected in zip(grids, outputs[name]):
                assert expected.isfinite().all()
                assert torch.equal(again(x), expected), name
    same = [{"native", SAME_AS_NATIVE.get(key) or str(vitpos.attach(plain, "native").position.spec)}]
    for name, other in itertools.combinations(outputs, 2):
        change = relative_change(outputs[name][1], outputs[other][1])
        assert (change < 1e-6) == ({name, other} in same), (name, other, change)


SAME_AS_NATIVE = {  # timm's own module has the formula and the default of an encoding
    "vit_small_patch16_dinov3": "rope_dinov3",
    "vit_base_patch16_sapiens2": "rope_dinov3",
    "vit_small_patch16_rope_224": "rope_axial",
}


def test_fewer_key_heads_are_as_many_equal_ones():
    """Grouped queries under rotations that differ by query head: the same model with its key heads written out."""
    key = "vit_base_patch16_sapiens2"
    grouped = vitpos.attach(build(key), "rope_mixed + rpb")
    full = vitpos.attach(build(key, num_kv_heads=4), "rope_mixed + rpb")
    state = grouped.state_dict()
    for name in [n for n in state if n.endswith((".k_proj.weight", ".v_proj.weight", ".k_proj.bias", ".v_proj.bias"))]:
        heads = state[name].unflatten(0, (2, 12))
        state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
        wrong = heads.repeat(2, *[1] * (heads.ndim - 1)).flatten(0, 1)
    full.load_state_dict(state)
    x = images(key)
    with torch.no_grad():
        assert relative_change(full(x), grouped(x)) < 1e-6
        full.load_state_dict({**state, name: wrong})
        assert relative_change(full(x), grouped(x)) > 1e-4


@pytest.mark.parametrize("fused", [False, True])
def test_the_block_that_attends_itself_by_hand(fused):
    """A ParallelScalingBlock under rotation and bias, token by token."""
    model = vitpos.attach(build("vit_base_patch16_xp_224"), "rope_axial + rpb(std=0.5)").double()
    block, prefix = model.blocks[0], model.num_prefix_tokens
    block.fused_attn = fused
    pos = vitpos.positions.grid(*GRID, dtype=torch.float64)
    shared = model.position.shared_signal(pos, prefix)
    x = torch.randn(1, prefix + 15, 48, dtype=torch.float64)
    with torch.no_grad():
        ours = block(x, attn_mask=model.position.signal(0, pos, shared))
        phase = [torch.zeros(6)] * prefix
        phase += [model.position.shared["rope_axial"].angles(at(cell)).phase[0, 0, 0] for cell in coordinates(GRID)]
        table_ = model.position.layers[0]["rpb"]
        mlp, q, k, v = block.in_proj(block.in_norm(x[0])).split(block.in_split, dim=-1)
        attended = torch.zeros(len(x[0]), 48, dtype=torch.float64)
        for h in range(4):
            part = slice(12 * h, 12 * h + 12)
            norm = [[block.q_norm(row[part]) for row in q], [block.k_norm(row[part]) for row in k]]
            turned_q, turned_k = ([turn(row, angle) for row, angle in zip(rows, phase)] for rows in norm)
            for a in range(len(x[0])):
                logits = torch.stack([turned_q[a] @ row / 12**0.5 for row in turned_k])
                for b in range(prefix, len(x[0]) if a >= prefix else 0):
                    (i, j), (m, n) = divmod(a - prefix, 5), divmod(b - prefix, 5)
                    logits[b] += table_.table[h, i - m + 2, j - n + 4]
                attended[a, part] = logits.softmax(0) @ v[:, part]
        mlp = block.mlp_act(mlp if block.mlp_bias is None else mlp + block.mlp_bias)
        expected = x[0] + block.ls(block.attn_out_proj(attended) + block.mlp_out_proj(mlp))
        assert relative_change(ours[0], expected) < 1e-12
        assert relative_change(block(x)[0], expected) > 1e-4


def at(cell):
    return vitpos.positions.Positions(cell.view(1, 1, 2), GRID)


def turn(row, angle):
    pairs = torch.view_as_complex(row.view(-1, 2).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(pairs).flatten()


def test_heads_may_be_wider_than_the_model():
    """timm's EvaAttention fails where heads x head width is not the model's width."""
    attention = parts.EvaAttention(48, 4, attn_head_dim=8, scale_norm=False).eval()
    x = torch.randn(2, 7, 48)
    assert attention(x).shape == (2, 7, 48)
    with pytest.raises(RuntimeError):
        timm.models.eva.EvaAttention.forward(attention, x)
