"""bfloat16, by autocast and outright: what timm computes, and one dtype of the residual stream for every encoding."""

import copy

import pytest
import timm
import torch
from common import ENCODINGS, images, relative_change, tiny
from test_models import ALL, ROTARY, build, size
from test_models import images as images_of

import vitpos
from vitpos import positions

# timm rounds what its small networks of relative position say; here autocast rounds no bias.
NETWORKS = [k for k in ALL if "relpos" in k and "table" not in k]
# Where neither a table nor a prefix token meets the patches, timm's stream is that of its convolution.
BARE = ["vit_srelpos_small_patch16_224", "vit_relpos_base_patch16_rpn_224", "relpos shared table", "relpos swin"]


def autocast(model, x):
    """Logits under autocast to bfloat16, and the dtypes of what enters each block."""
    dtypes = []
    hooks = [b.register_forward_pre_hook(lambda _, given: dtypes.append(given[0].dtype)) for b in model.blocks]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    for hook in hooks:
        hook.remove()
    return logits, dtypes


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # (of norms of q and k)
@pytest.mark.parametrize("key", ALL)
def test_native_under_autocast_is_timms(key):
    plain = build(key)
    x = images_of(key)
    expected, dtypes = autocast(plain, x)
    assert dtypes[0] == (torch.bfloat16 if key in BARE else torch.float32)
    for pos in ("native", "ape1d"):
        if pos == "ape1d" and (getattr(plain, "pos_embed", None) is None or getattr(plain, "rope", None) is not None):
            continue
        logits, dtypes = autocast(vitpos.attach(copy.deepcopy(plain), pos), x)
        assert set(dtypes) == {torch.float32}
        if key not in (*NETWORKS, *BARE) and (pos == "native" or "beit" not in key):
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", ENCODINGS)
def test_one_dtype_of_the_residual_stream(name, prefix):
    """That of the weights, whatever is added to the tokens: else comparisons in bfloat16 would compare dtypes."""
    model = tiny(name, (3, 5), prefix).float()
    x = images((4, 6), dtype=torch.float32)
    assert set(autocast(model, x)[1]) == {torch.float32}
    assert set(autocast(model.bfloat16(), x.bfloat16())[1]) == {torch.bfloat16}


def test_timms_stream_depends_on_what_is_added():
    """The control: timm's model without class token has another dtype with a table than without."""
    kwargs = {"img_size": 32, "class_token": False, "global_pool": "avg", "depth": 1}
    seen = [
        autocast(timm.create_model("vit_tiny_patch16_224", pos_embed=table, **kwargs), torch.randn(1, 3, 32, 32))[1]
        for table in ("learn", "none")
    ]
    assert seen == [[torch.float32], [torch.bfloat16]]


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", ["ape1d", "sincos1d", "rpb"])
def test_tables_on_another_grid_in_a_bfloat16_model(name, prefix):
    """Antialiased bicubic resampling has no kernel in bfloat16 on a CPU; features of size 1 stay near float32's."""
    model = tiny(name, (3, 5), prefix, heads=2, dim=24).float()
    x = images((4, 6), batch=4, dtype=torch.float32)
    with torch.no_grad():
        expected = model.forward_features(x)
        assert expected.abs().mean() > 0.3
        low = copy.deepcopy(model).bfloat16().forward_features(x.bfloat16())
        assert low.dtype == torch.bfloat16
        assert relative_change(low.float(), expected) < 1e-2
        without = vitpos.attach(model, "none").forward_features(x)
    assert relative_change(without, expected) > 5e-2


HELD = [key for key in ROTARY if getattr(build(key), "rope", None) is not None]


def turns(model, grid):
    """Cosines and sines of a model's own rotary tables, of the last layer."""
    pos = positions.grid(*grid)
    shared = model.position.shared_signal(pos, model.num_prefix_tokens, model.own())
    rotation = model.position.signal(len(model.blocks) - 1, pos, shared).expand().rotation
    return rotation.turn


@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (4, 8)])
@pytest.mark.parametrize("key", HELD)
def test_own_rotary_tables_of_a_bfloat16_model(key, grid):
    """On any grid they are timm's resized, bit for bit; back in float32 they are one rounding of the table away."""
    plain = build(key)
    model = vitpos.attach(copy.deepcopy(plain), "native")
    with torch.no_grad():
        expected = turns(model, grid)
        plain, model = plain.bfloat16(), model.bfloat16()
        plain.set_input_size(img_size=size(ALL[key][0], grid))
        x = images_of(key, grid).bfloat16()
        assert torch.equal(model(x), plain(x))
        back = turns(model.float(), grid)
        if "mixed" in key:  # its frequencies are weights, and rounded with all others, as timm's are
            fresh = build(key)
            fresh.rope.freqs.copy_(fresh.rope.freqs.bfloat16())
            expected = turns(vitpos.attach(fresh, "native"), grid)
    assert back.dtype == torch.float32
    assert (back - expected).abs().max() <= 2e-3
    assert (turns(model, grid[::-1]) - expected).abs().max() > 0.1


def test_phases_in_bfloat16_would_be_seen():
    """The control: the angle of the last of 8 patches at the fastest frequency, computed in bfloat16."""
    angle = torch.tensor(7.0) * torch.tensor(0.9)
    assert (angle.bfloat16().float().sin() - angle.sin()).abs() > 2e-3


@pytest.mark.slow
def test_compiled_under_autocast_with_gradients():
    """Compiled, the table is resampled by two products of matrices, which autocast must not round either."""
    model = tiny("ape1d + cpb", (3, 5), 0, depth=1, heads=2, dim=24).float()
    x = images((4, 6), dtype=torch.float32)
    torch._dynamo.reset()
    found = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = forward(x)
        out.float().pow(2).sum().backward()
        found.append([out.detach().float(), *(p.grad for n, p in model.named_parameters() if n.startswith("pos"))])
    torch._dynamo.reset()
    assert all(relative_change(a, b) < 3e-2 for a, b in zip(*found, strict=True))

    pos, tables = positions.grid(4, 6), []
    for tokens in (model.position.tokens, torch.compile(model.position.tokens, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tables.append(tokens(pos, {"pos_embed": model.pos_embed}))
    torch._dynamo.reset()
    assert relative_change(*tables) < 1e-6
