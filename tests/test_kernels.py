"""Each kernel against its plain path: values, gradients, their gradients; and that it steps aside where it must."""

import copy
import itertools
import pickle

import pytest
import timm
import torch
from common import images, tiny
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import vitpos
from vitpos import kernels, positions
from vitpos.attention import expand_bias
from vitpos.encoding import OffsetTable

GRIDS = [(3, 5), (7, 11), (13, 2)]
FORWARD, GRADIENT = 1e-6, 2e-6  # relative to the largest value, in float32


def apart(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def gradients(function, *given):
    """What comes out, and its gradient by each given tensor that learns."""
    given = [t.clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in given]
    out = function(*[t.clone() if isinstance(t, torch.Tensor) else t for t in given])
    out = out if isinstance(out, torch.Tensor) else torch.stack(out)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    learned = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, learned, weight)]


def agree(kernel, plain, *given):
    ours, theirs = gradients(kernel, *given), gradients(plain, *given)
    assert len(ours) == len(theirs) > 1
    assert apart(ours[0], theirs[0]) < FORWARD
    for a, b in zip(ours[1:], theirs[1:]):
        assert apart(a, b) < GRADIENT


def packed(tokens, heads, width, batch=2, dtype=torch.float32):
    return torch.randn(batch, tokens, 3, heads, width, dtype=dtype, requires_grad=True)


def turning(count, heads, pairs, batch=1, dtype=torch.float32):
    phase = torch.randn(batch, heads, count, pairs, dtype=dtype) * 3
    return kernels.cos_sin(phase).requires_grad_()


def plain_split(qkv, turn, layout, prefix):
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if turn is not None:
        q, k = (kernels.rotated(x, turn, layout, prefix) for x in (q, k))
    return q, k, v


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(("grid", "prefix", "width"), list(zip(GRIDS, (0, 1, 5), (32, 64, 128))))
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_split_rotates(grid, prefix, width, layout, batch, heads):
    count = grid[0] * grid[1]
    turn = turning(count, heads, width // 2, batch)
    agree(kernels.split, plain_split, packed(prefix + count, 3, width), turn, layout, prefix)
    agree(kernels.split, plain_split, packed(prefix + count, 3, width), turn.detach(), layout, prefix)


def test_split_without_a_rotation():
    agree(kernels.split, plain_split, packed(6, 3, 8), None, "interleaved", 0)


def test_a_rotation_the_other_way_is_seen():
    qkv, turn = packed(15, 3, 8).detach(), turning(15, 3, 4).detach()
    ours = torch.stack(kernels.split(qkv.clone(), kernels.backwards(turn)))
    assert apart(ours, torch.stack(plain_split(qkv, turn, "interleaved", 0))) > 0.1


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_gradients_of_gradients_of_split(layout):
    """By finite differences, in float64, through the angles."""
    qkv = packed(5, 2, 4, dtype=torch.float64)
    y, x = (torch.randn(2, side, 2, dtype=torch.float64, requires_grad=True) for side in (2, 2))

    def run(qkv, y, x):
        turn = kernels.turns(y, x).unsqueeze(0)
        return tuple(t * 1.0 for t in kernels.split(qkv.clone(), turn, layout, 1))

    assert torch.autograd.gradcheck(run, (qkv, y, x))
    assert torch.autograd.gradgradcheck(run, (qkv, y, x))


@pytest.mark.parametrize("each", [False, True])  # image has rotations of its own
@pytest.mark.parametrize("cached", [100, 10**6])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_bfloat16_is_rotated_in_float32(layout, cached, each, monkeypatch):
    monkeypatch.setattr(kernels.rotating, "CACHED", cached)
    qkv = packed(16, 3, 32).detach().bfloat16().requires_grad_()
    turn = turning(15, 1, 16, batch=2 if each else 1).detach()
    for ours, theirs in zip(*(gradients(f, qkv, turn, layout, 1) for f in (kernels.split, plain_split))):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs)


def test_turns_of_large_phases():
    """Also where a sum of phases would be rounded, before its cosine is taken, by more than is allowed."""
    y, x = (torch.randn(2, side, 6) * 30 for side in (23, 29))
    exact = kernels.cos_sin((y.double()[:, :, None] + x.double()[:, None]).flatten(1, 2))
    for turns in (kernels.turns, kernels.rotating.plain_turns):
        assert apart(turns(y, x), exact) < 5e-7
    assert apart(kernels.cos_sin((y[:, :, None] + x[:, None]).flatten(1, 2)), exact) > FORWARD
    agree(kernels.turns, kernels.rotating.plain_turns, y.requires_grad_(), x.requires_grad_())


@pytest.mark.parametrize("count", [1, 3])
def test_turns_of_a_sum(count):
    y, x = (torch.randn(count, side, 6, requires_grad=True) * 4 for side in (7, 11))
    agree(
        kernels.turns, lambda y, x: kernels.cos_sin((y[:, :, None] + x[:, None]).flatten(1, 2)),
        y.detach().requires_grad_(), x.detach().requires_grad_(),
    )  # fmt: skip
    with torch.no_grad():
        turn = kernels.turns(y, x)
        assert torch.equal(turn, kernels.turns(y.requires_grad_(), x))
    assert turn.transpose(0, 1).is_contiguous()  # heads side by side, as those of q and k: one run of memory for all
    assert apart(turn, kernels.turns(-y, x)) > 0.1


def plain_bias(table, beside, prefix):
    """Pair by pair."""
    height, width = ((side + 1) // 2 for side in table.shape[1:])
    rows = []
    for a in range(-prefix, height * width):
        row = []
        for b in range(-prefix, height * width):
            if a < 0 or b < 0:
                row.append(beside[:, 2 if a < 0 and b < 0 else 0 if a < 0 else 1])
            else:
                (i, j), (k, m) = divmod(a, width), divmod(b, width)
                row.append(table[:, i - k + height - 1, j - m + width - 1])
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2).unsqueeze(0)


@pytest.mark.parametrize("by_index", [0, 512])
@pytest.mark.parametrize(("grid", "prefix"), [*zip(GRIDS, (0, 1, 5)), ((1, 1), 1), ((1, 6), 0)])
def test_dense_bias(grid, prefix, by_index, monkeypatch):
    monkeypatch.setattr(kernels.dense, "BY_INDEX", by_index)
    table = torch.randn(3, 2 * grid[0] - 1, 2 * grid[1] - 1, requires_grad=True)
    beside = torch.randn(3, 3, requires_grad=True)
    if prefix:
        agree(kernels.dense_bias, plain_bias, table, beside, prefix)
    else:
        agree(kernels.dense_bias, plain_bias, table, beside.detach(), prefix)
    mirrored = kernels.dense_bias(table.flip(1), beside, prefix)
    assert grid[0] == 1 or apart(mirrored, plain_bias(table, beside, prefix)) > 0.1


def test_gradients_of_gradients_of_a_dense_bias(monkeypatch):
    monkeypatch.setattr(kernels.dense, "BY_INDEX", 0)
    table, beside = (torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (3,)))
    assert torch.autograd.gradcheck(lambda t, b: kernels.dense_bias(t, b, 1), (table, beside))
    assert torch.autograd.gradgradcheck(lambda t, b: kernels.dense_bias(t, b, 1), (table, beside))


@pytest.mark.parametrize(("grid", "prefix"), [*zip(GRIDS, (0, 1, 5)), ((1, 6), 0), ((5, 1), 2)])
def test_an_expanded_bias_takes_the_kernel_and_equals_the_compiled_path(grid, prefix, monkeypatch):
    table = torch.randn(2, 2 * grid[0] - 1, 2 * grid[1] - 1)
    for beside in (torch.randn(2, 3), torch.randn(1, 3)):
        given = OffsetTable(table, beside)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "dense_bias", lambda *given: "the kernel")
            assert expand_bias(given, prefix) == "the kernel"
            patch.setattr(kernels.when, "_undisturbed", lambda: False)
            plain = expand_bias(given, prefix)
        assert torch.equal(plain, expand_bias(given, prefix))
        assert torch.equal(plain, plain_bias(table, beside.expand(2, 3), prefix))
        assert not torch.equal(plain, plain_bias(table.flip(1, 2), beside.expand(2, 3), prefix))


@pytest.mark.parametrize("chunk", [1, 700, 40_000, 10**6])  # some queries, heads, images at a time
@pytest.mark.parametrize("shape", [(1, 3), (1, 1), (4, 3), (4, 1)])
@pytest.mark.parametrize(
    ("tokens", "width", "scale"), [(2, 32, 0.3), (82, 32, 0.3), (13, 64, 1 / 8), (78, 128, 128**-0.5)]
)
def test_attend(tokens, width, scale, shape, chunk, monkeypatch):
    monkeypatch.setattr(kernels.attending, "CHUNK", chunk)
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in packed(tokens, 3, width, batch=4).unbind(2))
    bias = torch.randn(*shape, tokens, tokens, requires_grad=True)
    agree(kernels.attend, kernels.explicit, q, k, v, bias, scale)
    agree(kernels.attend, kernels.explicit, q, k, v, bias.detach(), scale)
    agree(kernels.attend, kernels.explicit, q, k, v, None, scale)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert apart(kernels.attend(q, k, v, bias, width**-0.5), out) < FORWARD
    assert apart(kernels.attend(q, k, v, -bias, width**-0.5), out) > 1e-2


@pytest.mark.parametrize(("threads", "pieces"), [(1, 12), (2, 8), (3, 4), (6, 2), (30, 1)])
def test_attend_has_a_head_at_hand_for_each_thread(threads, pieces, monkeypatch):
    """Where a head fills the cache of one: else all but one would wait, or share what is too small to share."""
    monkeypatch.setattr(kernels.attending, "CHUNK", 13**2)
    calls = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda *given, **options: calls.append(1) or softmax(*given, **options))
    q, k, v = (t.transpose(1, 2) for t in packed(13, 3, 32, batch=4).unbind(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    agree(kernels.attend, kernels.explicit, *(t.detach().requires_grad_() for t in (q, k, v)), None, 0.3)
    assert len(calls) == pieces
    for chunk in (10, 13**2, 10**6):
        monkeypatch.setattr(kernels.attending, "CHUNK", chunk)
        _, _, (room,) = next(kernels.attending._pieces(q, torch.float32, 1))
        assert room.untyped_storage().nbytes() <= 4 * 12 * min(chunk, 13**2)  # no more than 12 heads have to do


LAYOUTS = {  # of a bias in memory, as encodings and what they are added to leave it
    "heads last": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "transposed": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[..., :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 3), (1, 1), (4, 3)])
@pytest.mark.parametrize("batch", [1, 4])
def test_attend_with_a_bias_of_another_layout(shape, layout, batch, monkeypatch):
    """Its gradient is written in pieces, which must not depend on how the bias lies in memory."""
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in packed(13, 3, 32, batch=batch).unbind(2))
    bias = LAYOUTS[layout](torch.randn(min(shape[0], batch), shape[1], 13, 13)).detach().requires_grad_()
    for chunk in (1, 700, 10**6):
        monkeypatch.setattr(kernels.attending, "CHUNK", chunk)
        ours, theirs = (
            torch.autograd.grad(attention(q, k, v, bias, 0.3).sin().sum(), (q, k, v, bias))
            for attention in (kernels.attend, kernels.explicit)
        )
        for a, b in zip(ours, theirs, strict=True):
            assert apart(a, b) < GRADIENT


@pytest.mark.parametrize("shape", [(1, 3), (1, 1)])
def test_attend_in_bfloat16_adds_an_exact_bias(shape):
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in packed(13, 3, 32, batch=1).unbind(2))
    bias = torch.randn(*shape, 13, 13, requires_grad=True)
    exact = gradients(kernels.explicit, q, k, v, bias, 0.3)
    ours = gradients(kernels.attend, *(t.detach().bfloat16().requires_grad_() for t in (q, k, v)), bias, 0.3)
    assert ours[-1].dtype == torch.float32
    for a, b in zip(ours, exact, strict=True):
        assert apart(a.float(), b) < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learns", [True, False])
def test_gradients_of_sharp_attention_are_as_exact_as_pytorchs(dtype, learns):
    """A weight that rounds to 1 would leave of the gradient of its logit what rounding makes of it."""
    k = torch.nn.functional.normalize(torch.randn(2, 3, 97, 32), dim=-1)
    given = [t.to(dtype) for t in (k * 12 * 32**0.5, k, torch.randn(2, 3, 97, 32))]
    bias, weight = torch.randn(1, 3, 97, 97) * 0.1, torch.randn(2, 3, 97, 32)

    def errors(attention):
        found = []
        for kind in (torch.float64, dtype):
            learned = [t.to(kind).requires_grad_() for t in given]
            of_bias = bias.to(torch.promote_types(kind, torch.float32)).requires_grad_(learns)
            out = attention(*learned, of_bias)
            found.append(torch.autograd.grad(out, [*learned, *([of_bias] if learns else [])], weight.to(kind)))
        return [((b.double() - a).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]

    def pytorchs(q, k, v, bias):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))

    ours = errors(lambda q, k, v, bias: kernels.attend(q, k, v, bias, 32**-0.5))
    for mine, theirs in zip(ours, errors(pytorchs), strict=True):
        assert mine < 3 * theirs
    assert (max(ours) < 5e-3) == learns  # else PyTorch's too are rough


def test_a_memory_does_not_take_no_bias_of_prefix_tokens_for_another():
    memory, table = kernels.Memory(), torch.randn(2, 5, 9)
    with torch.no_grad():
        for beside in (None, torch.randn(2, 3), torch.randn(2, 3), None):
            found = memory.dense_bias(0, table, beside, 2)
            assert torch.equal(found, kernels.dense_bias(table, beside, 2))
            assert memory.dense_bias(0, table, beside, 2) is found


def test_gradients_of_gradients_of_attend(monkeypatch):
    monkeypatch.setattr(kernels.attending, "CHUNK", 1)
    given = [torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: kernels.attend(*t, 0.5), (*given, bias))
    assert torch.autograd.gradgradcheck(lambda *t: kernels.attend(*t, 0.5), (*given, bias))


def test_attend_keeps_a_masked_key_out():
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    bias = torch.zeros(1, 1, 5, 5).index_fill_(3, torch.tensor([2]), -torch.inf).requires_grad_()
    out = kernels.attend(q, k, v, bias, 0.3)
    v[:, :, 2] = 1e6
    assert torch.equal(kernels.attend(q, k, v, bias, 0.3), out)


SPECS = ["none", "rope_axial", "rope_mixed + rpb(prefix=True)", "rope_dinov3 + alibi2d", "rope_axial(free_prefix=True)"]


def outputs(spec, prefix, dtype=torch.float32):
    """A model's output and all gradients; the model is the same each time."""
    model = tiny(spec, (7, 11), prefix, heads=2, dim=32).to(dtype)
    for block in model.blocks:
        block.attn.fused_attn = True
    out = model.forward_features(images((7, 11)).to(dtype))
    (out * torch.linspace(-1, 1, out.numel()).sin().view(out.shape).to(dtype)).sum().backward()
    return [out.detach(), *(p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None)]


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_models_agree(spec, prefix, monkeypatch):
    called = []
    apply = kernels.rotating._Split.apply
    monkeypatch.setattr(kernels.rotating._Split, "apply", lambda *given: called.append(given) or apply(*given))
    ours = outputs(spec, prefix)
    assert bool(called) == (not ("free_prefix" in spec and prefix))
    monkeypatch.setattr(kernels.when, "_undisturbed", lambda: False)
    theirs = outputs(spec, prefix)
    scale = max(t.abs().max() for t in theirs[1:])
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 2e-5 * max(b.abs().max(), scale * 1e-2)


@pytest.mark.parametrize("spec", ["rpb", "lookhere + cpb", "gated(alibi2d)"])
@pytest.mark.parametrize("given", [{}, {"coords": torch.rand(2, 15, 2, dtype=torch.float64) * 3, "extent": (3, 5)}])
def test_models_agree_where_each_image_has_its_own_bias(spec, given, monkeypatch):
    """Patches that are dropped, or have coordinates, other ones in each image."""
    model = tiny(spec, (3, 5), 0, patch_drop_rate=0.0 if given else 0.4).train()

    def gradients():
        torch.manual_seed(3)
        model.zero_grad()
        model(images((3, 5)), **given).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for block in model.blocks:
        block.attn.fused_attn = True
    ours = gradients()
    monkeypatch.setattr(kernels.when, "_undisturbed", lambda: False)
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)


def test_a_hook_on_the_projection_sees_what_it_projected():
    """What a feature extractor holds on to is not rotated under its hands."""
    model = tiny("rope_axial", (3, 5), 0).float()
    expected, seen = [], []
    attention = model.blocks[0].attn
    attention.register_forward_pre_hook(lambda module, given: expected.append(module.qkv(given[0]).detach()))
    out = model(images((3, 5)).float())
    expected.clear()
    attention.qkv.register_forward_hook(lambda module, given, result: seen.append(result))
    assert torch.equal(model(images((3, 5)).float()), out)
    assert torch.equal(seen[-1], expected[-1])


def test_a_hook_on_every_module_sees_what_the_projection_projected():
    model, x = tiny("rope_axial", (3, 5), 0).float(), images((3, 5)).float()
    plain, seen = {}, {}
    for found in (plain, seen):  # of results as they are when they come, and as they are at the end

        def keep(module, given, result, found=found):
            if isinstance(module, torch.nn.Linear):
                found[module] = result.detach().clone() if found is plain else result

        with torch.nn.modules.module.register_module_forward_hook(keep):
            model(x)
    for block in model.blocks:
        assert torch.equal(plain[block.attn.qkv], seen[block.attn.qkv])


def test_a_projection_of_another_class_keeps_what_it_returned():
    class Remembering(torch.nn.Linear):
        def forward(self, x):
            self.returned = super().forward(x)
            self.copied = self.returned.detach().clone()
            return self.returned

    model = tiny("rope_axial", (3, 5), 0).float()
    model.blocks[0].attn.qkv.__class__ = Remembering
    model(images((3, 5)).float())
    assert torch.equal(model.blocks[0].attn.qkv.returned, model.blocks[0].attn.qkv.copied)


def test_training_after_inference_mode_on_a_new_grid():
    """The index is made once, and what inference mode makes may not be part of a gradient."""
    kernels.dense._index.cache_clear()
    table = torch.randn(2, 5, 9, requires_grad=True)
    with torch.inference_mode():
        expected = kernels.dense_bias(table, None, 1)
    out = kernels.dense_bias(table, None, 1)
    out.sum().backward()
    assert torch.equal(out, expected)


def test_kernels_step_aside():
    x = torch.randn(3)
    answers = []
    assert kernels.eager(x, torch.nn.Parameter(x))
    torch.func.vmap(lambda t: answers.append(kernels.eager(t)) or t)(x)
    torch.func.grad(lambda t: answers.append(kernels.eager(t)) or t.sum())(x)
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.jit.trace(lambda t: answers.append(kernels.eager(t)) or t + 1, (x,), check_trace=False)
    with forward_ad.dual_level():
        answers.append(kernels.eager(x))
    with FlopCounterMode(display=False):
        answers.append(kernels.eager(x))
    with TorchFunctionMode():
        answers.append(kernels.eager(x))
    answers.append(kernels.eager(x.to("meta")))
    assert answers == [False] * len(answers)
    assert len(answers) >= 7
    q, bias = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 5, requires_grad=True)
    assert kernels.attends_faster(q, q, q, bias)
    with torch.autocast("cpu"):  # which rounds what attention is given
        assert not kernels.attends_faster(q, q, q, bias)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(t):
        return t + (1 if kernels.eager(t) or kernels.attends_faster(t, t, t, None) else 2)

    x = torch.randn(1, 1, 3, 8)
    for t in (x, x.bfloat16()):  # nor is the processor asked what it can do
        assert torch.equal(compiled(t), t + 2)


@pytest.mark.parametrize(
    ("bfloat16", "tiles", "frozen", "trained", "learned"),  # tokens up to which bfloat16 attention is written out
    [(False, False, 0, 0, 0), (True, False, 600, 1100, 5000), (True, True, 0, 750, 5000)],
)
def test_bfloat16_attention_is_written_out_where_that_was_faster(
    bfloat16, tiles, frozen, trained, learned, monkeypatch
):
    """As measured (docs/speed.md): with tiles the forward of PyTorch's fused kernel is faster."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(kernels.attending, "_most_tokens", kernels.attending._most_tokens.__wrapped__)
    for tokens in (1, 600, 601, 750, 751, 1100, 1101, 5000):
        q = torch.empty((), dtype=torch.bfloat16).expand(1, 1, tokens, 8)
        bias = torch.empty(()).expand(1, 1, tokens, tokens)
        for kept in (None, bias):
            assert kernels.attends_faster(q, q, q, kept) == (tokens <= frozen)
            for i in range(3):
                given = [q.detach().requires_grad_(i == j) for j in range(3)]
                assert kernels.attends_faster(*given, kept) == (tokens <= trained)
        learning = bias.detach().requires_grad_()
        assert kernels.attends_faster(q, q, q, learning) == (tokens <= learned)
        with torch.no_grad():
            assert kernels.attends_faster(q, q.detach().requires_grad_(), q, learning) == (tokens <= frozen)


def test_dropout_of_attention_is_not_forgotten(monkeypatch):
    """A bias that learns takes the kernel, but not where attention weights are dropped."""
    calls = []
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *given: calls.append(1) or attend(*given))
    for rate, expected in itertools.product((0.0, 0.5), (True, False)):
        model = tiny("rpb", (3, 5), 0, depth=1).float().train(expected)
        model.blocks[0].attn.fused_attn = True
        model.blocks[0].attn.attn_drop.p = rate
        calls.clear()
        model(images((3, 5)).float())
        assert bool(calls) == (rate == 0.0 or not expected)


def test_a_bias_is_remembered_while_nothing_changes(monkeypatch):
    """In evaluation without gradients; the memory looks at values, which fused optimizers change unseen."""
    made = []
    dense = kernels.dense_bias
    monkeypatch.setattr(kernels, "dense_bias", lambda *given: made.append(1) or dense(*given))
    monkeypatch.setattr(kernels.memory, "dense_bias", kernels.dense_bias)
    model = tiny("rpb", (3, 5), 1, depth=2).float().eval()
    x = images((3, 5)).float()

    def new():
        made.clear()
        with torch.no_grad():
            return model(x), len(made)

    first, count = new()
    assert count == 2
    again, count = new()
    assert count == 0
    assert torch.equal(first, again)
    model.position.layers[0]["rpb"].table.data[0, 2, 4] += 1.0
    moved, count = new()
    assert count == 1
    assert not torch.equal(moved, first)
    with torch.inference_mode():
        made.clear()
        assert torch.equal(model(x), moved)
        model(images((5, 3)).float())
        assert len(made) == 2  # another grid
    model(x).sum().backward()  # with gradients
    assert len(made) == 4
    for _ in range(2):
        assert torch.equal(new()[0], moved)
    model.double()
    made.clear()
    with torch.no_grad():
        model(x.double())
    assert len(made) == 2
    model.float().train()
    assert new()[1] == new()[1] == 2
    assert len(pickle.dumps(copy.deepcopy(model.eval()))) == len(pickle.dumps(model))
    monkeypatch.setattr(kernels.memory, "REMEMBERED", 10)
    new()
    assert new()[1] == 2


def test_training_has_the_room_of_what_was_remembered():
    model = tiny("rpb + alibi2d", (3, 5), 1).float().eval()

    def held():
        return [len(memory._held) for memory in model.position.memories]

    with torch.no_grad():
        model(images((3, 5)).float())
    assert held() == [1, 1, 1]
    model.eval()
    assert held() == [1, 1, 1]
    model.train()
    assert held() == [0, 0, 0]


def test_what_a_model_has_of_its_own_is_left_to_timms_kernels(monkeypatch):
    """So that ``native`` changes no logit."""
    for module, name in ((kernels.rotating, "_rotate"), (kernels, "attend"), (kernels, "dense_bias")):
        monkeypatch.setattr(module, name, lambda *given, **options: pytest.fail("a kernel of ours"))
    sizes = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 4}
    for model in ("vit_small_patch16_rope_224", "beit_base_patch16_224"):
        vitpos.create_model(model, "native", **sizes)(torch.randn(1, 3, 32, 32)).sum().backward()
    with pytest.raises(pytest.fail.Exception):
        vitpos.create_model("vit_small_patch16_rope_224", "rope_axial", **sizes)(torch.randn(1, 3, 32, 32))


# what a review found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_may_lie_in_any_order(dtype):
    """As matrix products leave that of k: channels are not next to each other."""
    qkv, turn = packed(6, 2, 8, dtype=torch.float32).detach().to(dtype), turning(5, 1, 4).detach()
    weight = torch.randn(2, 2, 8, 6, dtype=dtype).mT
    for i in (0, 1):
        grads = []
        for function in (kernels.split, plain_split):
            given = qkv.clone().requires_grad_()
            (function(given * 1, turn, "interleaved", 1)[i] * weight).sum().backward()
            grads.append(given.grad)
        assert apart(*grads) < 1e-6


def test_a_projection_may_return_any_strides():
    class Convolution(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return torch.nn.functional.conv1d(x.mT, self.linear.weight[..., None], self.linear.bias).mT

    for grid, prefix in (((3, 5), 0), ((3, 5), 1)):  # an odd and an even number of tokens
        model = tiny("rope_axial", grid, prefix).float().eval()
        x = images(grid).float()
        with torch.no_grad():
            expected = model(x)
            for block in model.blocks:
                block.attn.qkv = Convolution(block.attn.qkv)
            assert apart(model(x), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_without_a_key_gets_nothing(dtype):
    """As from PyTorch's kernel, and not NaN: images that are padded have such rows."""
    model = tiny("rpb", (3, 5), 0).to(dtype)
    allowed = torch.ones(2, 15, dtype=torch.bool)
    allowed[1, 9:] = False
    out = model.forward_features(images((3, 5)).to(dtype), attn_mask=(allowed[:, None] & allowed[:, :, None])[:, None])
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_anything():
    """vmap over what lies behind, over one layer, over a bias; and backward passes of several gradients at once."""
    x = images((3, 5)).float()
    model = tiny("rpb(prefix=True) + rope_axial", (3, 5), 1).float().eval()
    weights = torch.randn(3, 7, 2)
    many = torch.func.vmap(lambda w: model(x) @ w)(weights)
    torch.testing.assert_close(many[1], model(x) @ weights[1])
    ends = ("rpb.prefix", "blocks.1.attn.qkv.weight")
    for end in ends:
        some = {n: torch.stack([p, 2 * p]).detach() for n, p in model.named_parameters() if n.endswith(end)}
        with torch.no_grad():
            before = model(x)
            both = torch.func.vmap(lambda p: torch.func.functional_call(model, p, (x,)))(some)
            torch.testing.assert_close(both[0], before)
            assert apart(both[1], before) > 1e-4
            assert torch.equal(model(x), before)
    for spec in ("none", "rope_axial", "rope_mixed", "rpb", "rope_dinov3 + cpb"):
        model = tiny(spec, (3, 5), 1, depth=1).float()
        jacobians = [
            torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x, vectorize=vectorize)  # noqa: B023
            for vectorize in (True, False)
        ]
        assert apart(*jacobians) < 1e-5


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("batch", [1, 2])
def test_several_gradients_of_angles_at_once(layout, batch):
    y, x = (torch.randn(3, side, 4, requires_grad=True) for side in (2, 5))
    phase = torch.randn(batch, 3, 10, 4, requires_grad=True)
    qkv = packed(11, 3, 8)
    separable = kernels.turns(y, x).unsqueeze(0)
    for turn, learned in ((separable, (qkv, y, x)), (kernels.cos_sin(phase), (qkv, phase))):
        q, k, _ = kernels.split(qkv * 1, turn, layout, 1)
        out = (q * k).sum((1, 2))
        together = torch.autograd.grad(
            out, learned, torch.eye(16).view(16, 2, 8), is_grads_batched=True, retain_graph=True
        )
        for i in (0, 11):
            alone = torch.autograd.grad(out[i // 8, i % 8], learned, retain_graph=True)
            for a, b in zip(together, alone, strict=True):
                assert apart(a[i], b) < GRADIENT
                assert apart(a[i - 1], b) > 0.1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pos", ["native", "ape1d"])
def test_timms_own_table_keeps_timms_logits_in_bfloat16(pos, autocast):
    plain = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4).eval()
    ours = vitpos.attach(copy.deepcopy(plain), pos)
    x = torch.randn(2, 3, 64, 64)
    if not autocast:
        plain, ours, x = plain.bfloat16(), ours.bfloat16(), x.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert torch.equal(ours(x), plain(x))


def test_a_remembered_bias_that_was_written_to_is_made_again():
    model = tiny("alibi", (3, 5), 0).float().eval()
    x = images((3, 5)).float()

    def spoil(module, args, kwargs):
        kwargs["attn_mask"].bias[..., 3] = -1e9

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected = model(x)
            hook = model.blocks[0].attn.register_forward_pre_hook(spoil, with_kwargs=True)
            assert apart(model(x), expected) > 1e-4
            hook.remove()
            assert torch.equal(model(x), expected)


def test_a_replaced_forward_of_the_projection_keeps_what_it_returned():
    model = tiny("rope_axial", (3, 5), 0).float()
    projection, seen = model.blocks[0].attn.qkv, []
    x = images((3, 5)).float()
    expected = model(x)
    old = projection.forward
    projection.forward = lambda z: seen.append(old(z)) or seen[-1]
    assert torch.equal(model(x), expected)
    projection.forward = lambda z: seen[0]
    assert torch.equal(model(x), expected)
    projection.forward = lambda z: old(z).tanh()
    model(x).sum().backward()


def test_bfloat16_attention_is_as_exact_as_pytorchs():
    q, k, v = (torch.randn(2, 3, 197, 64, dtype=torch.float64) for _ in range(3))
    for spread in (1.0, 4.0, 25.0):
        given = [(q * spread).bfloat16(), k.bfloat16(), v.bfloat16()]
        exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in given))
        theirs = apart(torch.nn.functional.scaled_dot_product_attention(*given).double(), exact)
        assert apart(kernels.attend(*given, None, 64**-0.5).double(), exact) < 2 * theirs


def test_no_images():
    q = torch.randn(0, 2, 5, 8, requires_grad=True)
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    kernels.attend(q, q, q, bias, 0.3).sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))
    for spec in ("none", "rope_axial", "rope_mixed + rpb(prefix=True)", "rope_dinov3 + cpb"):
        model = tiny(spec, (3, 5), 1).float()
        none = model.forward_features(images((3, 5)).float()[:0])
        assert none.shape == (0, 16, 36)
        none.sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.blocks.parameters())
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.position.parameters())


def test_the_output_of_attention_may_be_edited():
    model = tiny("rpb", (3, 5), 0).float()
    model.blocks[0].attn.proj.register_forward_pre_hook(lambda module, given: (given[0].mul_(2),))
    model(images((3, 5)).float()).sum().backward()


def recalled(model, grid=(3, 5), dtype=torch.float64):
    """How often an encoding of the model makes angles or a bias in one evaluation, and the logits."""
    calls = []
    encoding = next(iter(model.position.shared.values()))
    cls, site = type(encoding), "angles" if "angles" in encoding.sites() else "bias"
    made = getattr(cls, site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, site, lambda self, *given: calls.append(1) or made(self, *given))
        return len(calls), model(images(grid, dtype=dtype)), len(calls)


@pytest.mark.parametrize("pos", ["rope_axial", "alibi2d", "rope_axial + alibi2d"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_follows_from_numbers_is_made_once(pos, mode):
    model = tiny(pos, prefix=2).eval()
    plain = copy.deepcopy(model).train()
    with mode():
        for grid in ((3, 5), (5, 4), (3, 5)):
            first, second = recalled(model, grid), recalled(model, grid)
            assert (first[2], second[2]) == (1, 0)
            assert torch.equal(first[1], second[1])
            assert apart(first[1], plain(images(grid))) < 1e-13
    assert recalled(plain)[2] == recalled(plain)[2] == 1  # in training never


@pytest.mark.parametrize("pos", ["rope_axial", "alibi2d"])
def test_what_was_made_is_dropped_when_a_number_changes(pos):
    model = tiny(pos).eval()
    encoding, x = model.position.shared[pos], images((5, 4))
    before = model(x)
    vitpos.set_resize(model, "interpolate")
    after = model(x)
    assert apart(after, before) > 1e-6
    assert torch.equal(after, model(x))
    vitpos.set_resize(model, "extrapolate")
    assert torch.equal(model(x), before)
    for extra in (torch.zeros(1), [1.0], {0: 1.0}):  # these are no numbers: nothing is kept
        encoding.extra = extra
        assert recalled(model)[2] == recalled(model)[2] == 1


def test_what_was_made_is_dropped_when_it_is_written_to():
    model = tiny("rope_axial").eval()
    before = model(images((3, 5)))
    _, held, _ = model.position.memories[-1]._signal
    held.rotation.turn.zero_()
    assert torch.equal(model(images((3, 5))), before)
    for empty in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.train()):
        assert empty.position.memories[-1]._signal is None


def test_what_learns_or_is_too_large_is_not_kept(monkeypatch):
    assert recalled(tiny("rope_axial").eval())[2] == 1
    learned = tiny("gated(rope_axial)").eval()
    assert recalled(learned)[2] == recalled(learned)[2] == 1
    monkeypatch.setattr(kernels.memory, "REMEMBERED", 10)
    large = tiny("alibi2d").eval()
    assert recalled(large)[2] == recalled(large)[2] == 1


def test_without_an_encoding_of_attention_blocks_are_told_nothing(monkeypatch):
    monkeypatch.setattr(vitpos.composition.Position, "shared_signal", None)
    monkeypatch.setattr(vitpos.composition.Position, "told", None)
    for pos in ("none", "sincos2d", "cpe"):
        assert tiny(pos)(images((3, 5))).isfinite().all()
    with pytest.raises(TypeError):
        tiny("ape1d")(images((3, 5)))  # told to keep to timm's kernels


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_small_patch16_rope_mixed_224", {}),
        (
            "beit_base_patch16_224",
            {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False, "use_abs_pos_emb": False},
        ),
        ("vit_srelpos_small_patch16_224", {}),
    ],
)
def test_what_timms_model_holds_is_never_kept(name, kwargs):
    """Its weights are arguments of the encoding, no attributes."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, embed_dim=48, num_heads=4, depth=2, num_classes=5, **kwargs)
    vitpos.attach(model, "native").eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        model(x)
    other = {key: value + 0.3 * torch.randn_like(value) for key, value in model.state_dict().items()}
    model.load_state_dict(other)
    fresh = copy.deepcopy(model)
    assert torch.equal(model(x), fresh(x))
    model(x).square().sum().backward()
    own = [
        n for n, p in model.named_parameters() if any(word in n for word in ("rope", "rel_pos")) and "blocks" not in n
    ]
    assert own
    assert all(model.get_parameter(n).grad is not None for n in own)


class Zooming(vitpos.encodings.rope_mixed.RopeMixed):
    """Derived from a class whose layers differ in frequencies alone: its own differ in more."""

    def placed(self, pos):
        return super().placed(pos) * (1 + self.geometry.layer)


class Drifting(vitpos.encodings.alibi2d.Alibi2d):
    """Derived from a class whose data may be kept; its own may not."""

    slope = 1.0

    def at(self, offset, extent):
        return super().at(offset, extent) * self.slope


def test_promises_are_not_inherited(monkeypatch):
    model = tiny("rope_mixed", depth=3).eval()
    for layer in model.position.layers:
        layer["rope_mixed"].__class__ = Zooming
    x, cells = images((4, 5)), positions.grid(4, 5, dtype=torch.float64).coords
    assert apart(model(x), model(x, coords=cells)) < 1e-13  # which every layer answers by itself
    model = tiny("alibi2d").eval()
    before = model(x)
    model.position.shared["alibi2d"].__class__ = Drifting
    assert apart(model(x), before) < 1e-13
    monkeypatch.setattr(Drifting, "slope", 3.0)
    assert apart(model(x), before) > 1e-6


@pytest.mark.parametrize("change", ["free_prefix", "missing"])
def test_a_layer_that_is_not_like_the_others(change):
    model = tiny("rope_mixed", prefix=1, depth=3).eval()
    layer = model.position.layers[1]
    if change == "missing":
        del layer["rope_mixed"]
    else:
        layer["rope_mixed"].free_prefix = True
    x, cells = images((4, 5)), positions.grid(4, 5, dtype=torch.float64).coords
    assert apart(model(x), model(x, coords=cells)) < 1e-13
