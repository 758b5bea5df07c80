"""bfloat16, by autocast and outright: what timm computes, and one dtype of the residual stream for every encoding."""

import copy

import pytest
import timm
import torch
from common import ENCODINGS, images, tiny
from test_models import ALL, build
from test_models import images as images_of

import vitpos
from vitpos import kernels

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
def test_native_under_autocast_is_timms(key, monkeypatch):
    monkeypatch.setattr(kernels, "attends_faster", lambda *given: False)  # (rounds elsewhere than timm's attention)
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
