"""A bias that layers share up to a number each: applied as the plain path has it, and held once."""

import math
import weakref

import pytest
import torch
from common import images, tiny
from test_kernels import FORWARD, GRADIENT, agree, apart, packed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import vitpos
from vitpos import kernels, pages, positions
from vitpos.attention import Part, Signal
from vitpos.encodings.alibi2d import Alibi2d
from vitpos.encodings.rpb import RelativePositionBias


def attended(tokens, batch=3, dtype=torch.float32):
    return [t.detach().transpose(1, 2).requires_grad_() for t in packed(tokens, 2, 32, batch, dtype).unbind(2)]


def fused_as_modules_do(model, fused=True):
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


@pytest.mark.parametrize("chunk", [1, 700, 10**6])
@pytest.mark.parametrize("shape", [(1, 2), (3, 1)])
def test_attend_with_a_slope(shape, chunk, monkeypatch):
    monkeypatch.setattr(kernels.attending, "CHUNK", chunk)
    given, bias = attended(13), torch.randn(*shape, 13, 13, requires_grad=True)
    agree(kernels.attend, kernels.explicit, *given, bias, 0.3, 1.25)
    expected = kernels.explicit(*given, 1.25 * bias, 0.3)
    assert apart(kernels.attend(*given, bias, 0.3, 1.25), expected) < FORWARD
    assert apart(kernels.attend(*given, bias, 0.3, 1.0), expected) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (1, 1)])
@pytest.mark.parametrize("tokens", [3, 13, 82])
def test_attend_fused(tokens, shape, dtype):
    given = attended(tokens)
    bias = torch.randn(*shape, tokens, tokens, dtype=dtype)
    bias[..., 0].fill_(-math.inf)
    for slope in (1.25, 1.0):
        agree(kernels.attend_fused, lambda q, k, v, *rest: kernels.explicit(q, k, v, rest[0], 32**-0.5, rest[1]),
              *given, bias, slope)  # fmt: skip
    expected = scaled_dot_product_attention(*given, attn_mask=(1.25 * bias).float())
    assert torch.equal(kernels.attend_fused(*given, bias, 1.25), expected)
    assert apart(kernels.attend_fused(*given, bias, 0.5), expected) > 1e-3


@pytest.mark.parametrize(("tokens", "width"), [(3, 32), (13, 64), (78, 128)])  # 78: a class token and 7 x 11 patches
def test_attend_fused_is_the_fused_kernel_bit_for_bit(tokens, width):
    """Which is as far from the exact values as the plain path is, and so up to twice as far from that."""
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in packed(tokens, 2, width).unbind(2))
    bias = torch.randn(1, 2, tokens, tokens)
    outs = kernels.attend_fused(q, k, v, bias, 1.25), scaled_dot_product_attention(q, k, v, attn_mask=1.25 * bias)
    ours, theirs = ([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))] for out in outs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradients_of_gradients_of_attention_with_a_slope():
    given = [torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    fixed = bias.detach()
    assert torch.autograd.gradcheck(lambda *t: kernels.attend(*t, 0.5, 1.25), (*given, bias))
    assert torch.autograd.gradgradcheck(lambda *t: kernels.attend(*t, 0.5, 1.25), (*given, bias))
    assert torch.autograd.gradcheck(lambda *t: kernels.attend_fused(*t, fixed, 1.25), given)
    assert torch.autograd.gradgradcheck(lambda *t: kernels.attend_fused(*t, fixed, 1.25), given)


def test_the_mask_is_made_again_only_where_that_spares_memory():
    q, k, v = attended(13)
    bias = torch.randn(1, 2, 13, 13)
    assert kernels.spares_memory(q, k, v, bias, 1.25)
    assert kernels.spares_memory(q, k, v, bias.double(), 1.0)
    assert not kernels.spares_memory(q, k, v, bias, 1.0)  # it is the mask
    assert not kernels.spares_memory(q, k, v, bias.clone().requires_grad_(), 1.25)
    assert not kernels.spares_memory(*(t.detach() for t in (q, k, v)), bias, 1.25)
    assert not kernels.spares_memory(*(t[:0] for t in (q, k, v)), bias, 1.25)
    with torch.no_grad():
        assert not kernels.spares_memory(q, k, v, bias, 1.25)
    for learning in range(3):
        some = [t if at == learning else t.detach() for at, t in enumerate((q, k, v))]
        assert kernels.spares_memory(*some, bias, 1.25)
    assert not kernels.spares_memory(q, k, v, bias.to("meta"), 1.25)
    with FlopCounterMode(display=False):
        assert not kernels.spares_memory(q, k, v, bias, 1.25)
    with sdpa_kernel(SDPBackend.MATH):
        assert not kernels.spares_memory(q, k, v, bias, 1.25)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_gradients_at_once():
    q, k, v = attended(5)
    bias = torch.randn(1, 2, 5, 5)
    out, weights = kernels.attend_fused(q, k, v, bias, 1.25), torch.randn(3, 3, 2, 5, 32)
    many = torch.autograd.grad(out, (q, k, v), weights, is_grads_batched=True, retain_graph=True)
    one = torch.autograd.grad(out, (q, k, v), weights[1])
    assert all(apart(a[1], b) < GRADIENT for a, b in zip(many, one, strict=True))


def test_what_the_gradient_costs_is_counted():
    """By the plain path: PyTorch counts nothing for the fused kernel on a CPU."""
    q, k, v = attended(5)
    out = kernels.attend_fused(q, k, v, torch.randn(1, 2, 5, 5), 1.25)
    with FlopCounterMode(display=False) as counted:
        torch.autograd.grad(out.sum(), (q, k, v))
    product = 2 * (3 * 2 * 5 * 5 * 32)  # of 3 images, 2 heads, 5 by 5 tokens, 32 channels; five of them
    assert counted.get_total_flops() == 5 * product


MODELS = ["lookhere", "rope_mixed + lookhere", "lookhere + rpb", "alibi2d + lookhere", "lookhere + irpe"]


@pytest.mark.parametrize("spec", [*MODELS, "rope_axial(free_prefix=True) + lookhere"])
@pytest.mark.parametrize("masked", [True, False])
def test_models_compute_what_the_plain_path_does(spec, masked, monkeypatch):
    model = fused_as_modules_do(tiny(spec, (3, 5), 1, depth=3))
    mask = torch.rand(16, 16).gt(0.3) | torch.eye(16, dtype=torch.bool) if masked else None

    def gradients():
        model.zero_grad()
        out = model.forward_features(images((3, 5)), attn_mask=mask)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    ours = gradients()
    monkeypatch.setattr(kernels.when, "_undisturbed", lambda: False)
    fused_as_modules_do(model, fused=False)
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)
    monkeypatch.setattr(vitpos.encodings.lookhere.LookHere, "slope_of", lambda self, layer: 1.5)
    assert apart(gradients()[0], ours[0]) > 1e-4  # each layer has its own


def square(model, x):
    """How many different tensors of all token pairs a forward keeps for the gradient."""
    kept = set()

    def note(t):
        if t.ndim >= 2 and t.shape[-1] == t.shape[-2] == 16:
            kept.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = model(x)
    assert out.requires_grad  # alive, so that no memory is used twice
    return len(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_holds_one_bias_for_all_layers(dtype, monkeypatch):
    for depth in (1, 4):
        model = fused_as_modules_do(tiny("lookhere", (3, 5), 1, depth=depth)).to(dtype)
        assert square(model, images((3, 5), dtype=dtype)) == 1
    alibi = fused_as_modules_do(tiny("alibi2d", (3, 5), 1, depth=4)).to(dtype)
    assert square(alibi, images((3, 5), dtype=dtype)) == 1
    monkeypatch.setattr(kernels, "spares_memory", lambda *given: False)
    assert square(model, images((3, 5), dtype=dtype)) == 4


def test_evaluation_holds_one_bias_for_all_layers():
    def held(spec):
        model = tiny(spec, (3, 5), 1, depth=4).eval()
        with torch.no_grad():
            model(images((3, 5)))
        found = set()
        for memory in model.position.memories:
            found |= {dense.data_ptr() for _, _, _, dense, _ in memory._held.values()}
            found |= {part.bias.data_ptr() for part in memory._signal[1].parts} if memory._signal else set()
        return len(found)

    assert held("lookhere") == 1
    assert held("rpb") == 4  # whose layers differ


def test_what_is_kept_is_dropped_when_it_is_written_to():
    model = tiny("lookhere", (3, 5), 1).eval()
    with torch.no_grad():
        before = model(images((3, 5)))
        (part,) = model.position.memories[-1]._signal[1].parts
        part.bias.zero_()
        assert torch.equal(model(images((3, 5))), before)


def test_a_bias_with_slopes_becomes_a_table_of_each_layer(monkeypatch):
    monkeypatch.setattr(Alibi2d, "slope_of", lambda self, layer: (2.0, 0.5)[layer])
    monkeypatch.setattr(Alibi2d, "prefix_bias", lambda self: torch.tensor([[1.0, 2.0, 3.0]]))
    model = tiny("alibi2d", (3, 5), 1)
    with torch.no_grad():
        before = model(images((3, 5)))
        assert apart(vitpos.convert(model, "rpb")(images((3, 5))), before) < 1e-12
        first, second = (layer["rpb"] for layer in model.position.layers)
    torch.testing.assert_close(first.table, 4 * second.table)
    assert second.prefix.tolist() == [[0.5, 1.0, 1.5]] * 3


@pytest.mark.parametrize("spec", ["alibi2d", "rpb"])
def test_slopes_of_what_layers_share_and_of_what_they_do_not(spec, monkeypatch):
    model = tiny(spec, (3, 5), 1)
    cls = {"alibi2d": Alibi2d, "rpb": RelativePositionBias}[spec]
    before = model(images((3, 5)))
    assert model.position.alike == (spec == "alibi2d")
    monkeypatch.setattr(cls, "slope_of", lambda self, layer: (2.0, 0.5)[layer])
    model = tiny(spec, (3, 5), 1)
    assert not model.position.alike
    pos = positions.grid(3, 5, dtype=torch.float64)
    told = model.position.tell(pos, 1, {}, [{}, {}], None, False)
    first, second = (told.take(layer).expand().bias for layer in range(2))
    if spec == "alibi2d":
        torch.testing.assert_close(first, 4 * second)
    assert apart(model(images((3, 5))), before) > 1e-4


def test_parts_with_a_slope_each():
    a, b, c = torch.randn(3, 1, 2, 4, 4).unbind(0)
    given = Signal(parts=(Part(a, (2.0, 3.0)), Part(b), Part(c, (0.5, 4.0))))
    torch.testing.assert_close(given.of_layer(0).bias, 2 * a + b + 0.5 * c)
    torch.testing.assert_close(given.of_layer(1).bias, 3 * a + b + 4 * c)
    assert Signal().bias is None


def test_figures_show_the_last_layer():
    title, last = pages.panels(vitpos.parse("lookhere"), (5, 5))[-1]
    slope = vitpos.encodings.lookhere.FREE_SLOPES[3]
    assert title == "bias, head 11"
    torch.testing.assert_close(last[2, 3].item(), -0.5 * slope)


def test_what_has_no_slope_is_added_once_and_comes_first():
    signal = tiny("lookhere + alibi2d + t5", (3, 5), 1).position.shared_signal(positions.grid(3, 5), 1)
    assert [isinstance(part.slope, tuple) for part in signal.parts] == [False, True]


@pytest.mark.parametrize(
    ("spec", "slope", "error", "words"),
    [
        ("deberta", 2.0, TypeError, "deberta: a contextual bias takes no slope"),
        ("alibi2d", torch.tensor(2.0), TypeError, "alibi2d: the slope of a layer must be a number, got Tensor"),
        ("alibi2d", 0.0, ValueError, "alibi2d: the slope of a layer must be a number above 0, got 0.0"),
        ("rpb", math.inf, ValueError, "rpb: the slope of a layer must be a number above 0, got inf"),
    ],
)
def test_slopes_that_cannot_be(spec, slope, error, words, monkeypatch):
    model = tiny(spec, (3, 5), 1)
    monkeypatch.setattr(type(next(model.position.encodings())), "slope_of", lambda self, layer: slope)
    with pytest.raises(error, match=words):
        model(images((3, 5)))


def test_what_is_told_is_not_held_on_to():
    """Such as the buckets of all pairs, of which each layer has its own."""
    for spec in ("irpe", "rpb"):
        position = tiny(spec, (3, 5), 1).position
        told = position.tell(positions.grid(3, 5, dtype=torch.float64), 1, {}, [{}, {}], None, False)
        for layer in range(2):
            alive = weakref.ref(told.take(layer))
            assert alive() is None
