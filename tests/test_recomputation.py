"""Gradient checkpointing with a caller's mask: every block is run twice, and nothing that is computed changes."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from common import images, tiny
from test_models import build
from test_models import images as images_of
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError
from torch.utils.flop_counter import FlopCounterMode

import vitpos
from vitpos import kernels

DEPTH = 2
GRIDS = [(4, 6), (6, 4)]
MODELS = {
    "ViT": lambda: (tiny("rope_mixed + rpb + ape1d", (4, 6), 1, depth=DEPTH), images),
    "Eva": lambda: native("vit_small_patch16_rope_mixed_ape_224"),
    "Beit": lambda: native("beit_base_patch16_224"),
    "RelPos": lambda: native("vit_relpos_base_patch16_cls_224"),
}


def native(key):
    return vitpos.attach(build(key, depth=DEPTH), "native"), lambda grid: images_of(key, grid)


def masks(dtype):
    """For 24 patches and one class token; patch rows and columns far from symmetric, no row without a key."""
    allowed = torch.rand(25, 25, generator=torch.Generator().manual_seed(4)) < 0.6
    allowed |= torch.eye(25, dtype=torch.bool)
    added = torch.randn(25, 25, generator=torch.Generator().manual_seed(5), dtype=dtype)
    return {
        "none": {},
        "boolean": {"attn_mask": allowed},
        "added": {"attn_mask": added},
        "causal": {"is_causal": True},
    }


def counted(model):
    """How often each block is begun from now on (recomputing stops where all is there that the gradient needs)."""
    runs = [0] * len(model.blocks)

    def count(layer):
        def hook(module, given):
            runs[layer] += 1

        return hook

    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(count(layer))
    return runs


@pytest.mark.parametrize("mask", ["none", "boolean", "added", "causal"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_mask_is_recomputed_too(kind, mask):
    """Two grids of one token count before one backward."""
    found = []
    for enable in (False, True):
        model, make = MODELS[kind]()
        model.train().set_grad_checkpointing(enable)
        runs = counted(model)
        given = masks(next(model.parameters()).dtype)[mask]
        logits = [model(make(grid), **given) for grid in GRIDS]
        assert runs == [2] * DEPTH
        sum(out.pow(2).sum() for out in logits).backward()
        assert runs == [4 if enable else 2] * DEPTH
        found.append([*logits, *(p.grad for p in model.parameters())])
        if given:
            with torch.no_grad():
                assert not torch.equal(model(make(GRIDS[0])), logits[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mask", ["none", "boolean", "causal"])
@pytest.mark.parametrize("kind", MODELS)
def test_features_on_the_way_are_checkpointed_too(kind, mask):
    model, make = MODELS[kind]()
    model.train().set_grad_checkpointing(True)
    runs = counted(model)
    final, maps = model.forward_intermediates(make(GRIDS[0]), 1, **masks(next(model.parameters()).dtype)[mask])
    (final.sum() + maps[0].pow(2).sum()).backward()
    assert runs == [2] * DEPTH


@pytest.mark.parametrize("mask", ["none", "boolean"])
def test_timms_own_forgets_to_with_a_mask(mask):
    """The control: with a mask timm's plain model runs every block once."""
    plain = build("vit_tiny_patch16_224", depth=DEPTH, img_size=(64, 96)).train()
    plain.set_grad_checkpointing(True)
    runs = counted(plain)
    plain(images_of("vit_tiny_patch16_224", (4, 6)), **masks(torch.float32)[mask]).sum().backward()
    assert runs == [2 if mask == "none" else 1] * DEPTH


@pytest.mark.parametrize("spec", ["rope_axial", "rpb", "lookhere"])
@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), forward_ad.dual_level])
@pytest.mark.parametrize("first", [True, False])
def test_modes_may_differ_between_forward_and_backward(spec, first, mode, monkeypatch):
    """Counting what one of the two costs disturbs neither: a block run again keeps the same tensors."""
    model = tiny(spec, (3, 5), 1).float().train()
    for block in model.blocks:
        block.attn.fused_attn = True
    x = images((3, 5)).float()

    def gradients():
        model.zero_grad()
        disturbing = mode()
        with disturbing if first else nullcontext():
            out = model(x).sum()
        with nullcontext() if first else disturbing:
            out.backward()
        assert not isinstance(disturbing, FlopCounterMode) or disturbing.get_total_flops() > 0
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    model.set_grad_checkpointing(True)
    for a, b in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(kernels, "settled", lambda block: block)
    with pytest.raises(CheckpointError):
        gradients()


def test_another_thread_is_not_settled():
    """While one thread runs a block again, others choose for themselves."""
    answers = []

    def elsewhere(question):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(question).result()

    with FlopCounterMode(display=False):
        inside = kernels.settled(lambda: answers.extend([kernels.eager(), elsewhere(kernels.eager)]))
    inside()
    assert answers == [False, True]
    assert kernels.eager()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of PyTorch's compiler
@pytest.mark.parametrize("spec", ["rope_axial", "rpb", "lookhere"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_compiled_is_checkpointed_without_a_break(spec, whole):
    model = tiny(spec, (3, 5), 1)
    expected = torch.autograd.grad(model(images((3, 5))).sum(), model.head.weight)
    model.set_grad_checkpointing(True)
    for compiled in [model] if whole else model.blocks:
        compiled.compile(fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(model(images((3, 5))).sum(), model.head.weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_that_differ_by_a_slope_share_a_compiled_block():
    model = tiny("lookhere", (3, 5), 1, depth=12).eval()
    graphs = CompileCounter()
    for block in model.blocks:
        block.compile(backend=graphs)
    torch._dynamo.reset()
    model(images((3, 5)))
    assert graphs.frame_count <= 2  # one, and one that takes the slope as a number of the call
