"""What people do with timm models, over the registry: re-initialize, build without memory, distribute, group."""

import os
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from common import ENCODINGS, images, tiny
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from torch.nn.parallel import DistributedDataParallel

import vitpos

SMALL = {"img_size": (32, 48), "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}


@pytest.mark.parametrize("mode", ["", "jax", "moco"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_init_weights_draws_everything_anew(name, mode):
    """From any state, and from one seed the same weights: nothing keeps what it had."""
    states = []
    for std in (0.5, 2.0):
        model = vitpos.create_model("vit_tiny_patch16_224", pos=name, **SMALL)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(std)
        torch.manual_seed(7)
        model.init_weights(mode)
        states.append(model.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
        assert not (value == 0.5).all(), key
    assert model(torch.randn(1, 3, 32, 48)).isfinite().all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_built_without_memory_then_loaded(name):
    """On the meta device, then filled by assignment, or by to_empty and a copy."""
    source = vitpos.create_model("vit_tiny_patch16_224", pos=name, **SMALL).eval()
    x = torch.randn(2, 3, 48, 32)
    expected = source(x)
    for assign in (True, False):
        with torch.device("meta"):
            model = timm.create_model(f"vitpos_tiny_patch16_224_{name}", **SMALL).eval()
        assert {p.device.type for p in model.parameters()} == {"meta"}
        if not assign:
            model = model.to_empty(device="cpu")
        model.load_state_dict(source.state_dict(), assign=assign)
        assert torch.equal(model(x), expected)
    with torch.device("meta"):
        plain = timm.create_model("vit_tiny_patch16_224", **SMALL)
    assert {p.device.type for p in vitpos.attach(plain, name).parameters()} == {"meta"}


OWN_ROTARY = ["vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224", "vit_small_patch16_dinov3"]


@pytest.mark.parametrize("name", [*OWN_ROTARY, "vit_relpos_base_patch16_cls_224", "beit_base_patch16_224"])
def test_tables_that_are_no_weights_are_made_again(name):
    """timm's own rotary tables and indices lie in buffers that no file holds; vitpos's encodings have none."""
    small = {**SMALL, "num_heads": 4}
    source = vitpos.create_model(name, pos="native", **small).eval()
    x = torch.randn(2, 3, 48, 32)
    with torch.device("meta"):
        model = vitpos.create_model(name, pos="native", **small).eval()
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(3)
    model.load_state_dict(source.state_dict())
    wrong = [n for n, b in model.named_buffers() if not torch.equal(b, dict(source.named_buffers())[n])]
    reinit_non_persistent_buffers(model)
    assert all(torch.equal(b, dict(source.named_buffers())[n]) for n, b in model.named_buffers())
    assert wrong or not list(source.buffers())
    assert torch.equal(model(x), source(x))
    assert not list(vitpos.attach(model, "rope_axial + rpb", preserve=False).position.buffers())


def test_trained_weights_are_not_drawn_again(tmp_path):
    """A loaded model keeps its weights whatever is attached beside them; only ``init_weights`` starts anew."""
    source = vitpos.create_model("vit_tiny_patch16_224", pos="ape1d", **SMALL)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    given = {"checkpoint_path": tmp_path / "w.pth", "preserve": False, **SMALL}
    for pos in ("native", "ape1d", "native + rpb", "native + rope_mixed"):
        model = vitpos.create_model("vit_tiny_patch16_224", pos=pos, **given)
        for key, value in source.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), (pos, key)
    model.init_weights()
    assert not torch.equal(model.pos_embed, source.pos_embed)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = Path(tmp_path_factory.mktemp("ddp")) / "store"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(model, count=2):
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(count):
        optimizer.zero_grad()
        wrapped(images((4, 5), seed=step)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of dimensions of size 1: no copy, no other number
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("name", ENCODINGS)
def test_ddp_uses_every_parameter(name, prefix, one_process):
    model = tiny(name, prefix=prefix, patch_drop_rate=0.0 if name == "cpe" else 0.3).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    steps(model)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
    moved = {k: not torch.equal(before[k], v) for k, v in model.state_dict().items()}
    positional = [moved[k] for k in moved if k.startswith("pos")]
    assert any(positional) or not positional  # (a bias between patches in the last block moves no class token)


def test_ddp_complains_of_an_unused_parameter(one_process):
    model = tiny("rpb").train()
    model.unused = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        steps(model)


@pytest.mark.parametrize("name", ENCODINGS)
def test_layer_decay_through_timms_optimizer(name):
    """Positional parameters are of the first layer group and are not decayed; the head keeps the full rate."""
    model = timm.create_model(f"vitpos_tiny_patch16_224_{name}", **SMALL)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    named = {id(p): n for n, p in model.named_parameters()}
    groups = {named[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert set(groups) == set(named.values())
    stem = groups["patch_embed.proj.weight"]["lr_scale"]
    assert stem < groups["blocks.0.attn.qkv.weight"]["lr_scale"] < groups["head.weight"]["lr_scale"] == 1.0
    for key, group in groups.items():
        if key.startswith(("position.", "pos_embed")):
            assert (group["lr_scale"], group["weight_decay"]) == (stem, 0.0), key


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel: nothing of the model but its parameters."""

    def __init__(self, module):
        super().__init__()
        self.module = module


KINDS = {"vit_tiny_patch16_224": "ape1d + rpb", "vit_relpos_base_patch16_cls_224": "native + rope_mixed",
         "vit_small_patch16_rope_mixed_ape_224": "native + cpb"}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_parameter_groups_behind_wrappers(name):
    """Positional parameters are neither decayed nor trained at the head's rate, whoever wraps the model first."""
    small = {**SMALL, "num_heads": 4}
    model = vitpos.create_model(name, pos=KINDS[name], **small)
    plain = timm.create_model(name, **small)
    layered = {"weight_decay": 0.1, "layer_decay": 0.5}

    def settings(module, optimizer):
        names = {id(p): n.removeprefix("_orig_mod.").removeprefix("module.") for n, p in module.named_parameters()}
        groups = getattr(optimizer, "param_groups", optimizer)
        return {names[id(p)]: (g.get("lr_scale"), g["weight_decay"]) for g in groups for p in g["params"]}

    wanted = settings(model, create_optimizer_v2(model, opt="adamw", lr=1.0, **layered))
    positional = [n for n in wanted if any(part in n for part in ("position.", "pos_embed", "rel_pos", "rope."))]
    assert positional
    assert {wanted[n][1] for n in positional} == {0.0}
    assert wanted["blocks.1.attn.qkv.weight"][1] == 0.1
    compiled = torch.compile(model)
    assert settings(compiled, create_optimizer_v2(compiled, opt="adamw", lr=1.0, **layered)) == wanted
    control = torch.compile(plain)  # timm's own: everything at the head's rate
    scales = settings(control, create_optimizer_v2(control, opt="adamw", lr=1.0, **layered))
    assert {scale for scale, _ in scales.values()} == {1.0}

    wrapped = Wrapper(model)  # knows no method of the model: pass what the model says
    listed = param_groups_weight_decay(wrapped, 0.1, no_weight_decay_list=model.no_weight_decay())
    assert {n: decay for n, (_, decay) in settings(wrapped, listed).items()} == {n: d for n, (_, d) in wanted.items()}
    unlisted = settings(wrapped, param_groups_weight_decay(wrapped, 0.1))
    assert any(unlisted[n][1] for n in positional)
