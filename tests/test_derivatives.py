"""Derivatives of models by ``torch.func``, forward mode and twice backwards: those of attention written out."""

import pytest
import torch
from common import ENCODINGS, images, tiny
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitpos import kernels

pytestmark = [  # what torch.func itself warns of
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
SPECS = [*ENCODINGS, "rope_axial(free_prefix=True)", "rope_mixed + rpb(prefix=True) + lookhere"]


def model_of(spec, fused=True):
    model = tiny(spec, (3, 5), 1, depth=1)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def end(model, **given):
    return lambda x: model(x, **given).square().sum()


def twice(function, x, along):
    """The gradient, and the Hessian times ``along``."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(x), x, create_graph=True)
    return grad.detach(), torch.autograd.grad(grad, x, along)[0]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-10 * theirs.abs().max().item(), rtol=1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_transforms_give_what_attention_written_out_gives(spec):
    x = images((3, 5))
    along = torch.randn_like(x)
    grad, product = twice(end(model_of(spec, fused=False)), x, along)
    function = end(model_of(spec))
    close(torch.func.grad(function)(x), grad)
    close(torch.func.vmap(torch.func.grad(lambda one: function(one[None])))(x), grad)
    close(torch.func.jvp(function, (x,), (along,))[1], (grad * along).sum())
    close(torch.func.jvp(torch.func.grad(function), (x,), (along,))[1], product)
    close(torch.func.vjp(torch.func.grad(function), x)[1](along)[0], product)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_gradients(spec):
    """PyTorch's fused attention has none: they are asked for as of any model, by its own switch."""
    x = images((3, 5))
    along = torch.randn_like(x)
    function = end(model_of(spec))

    def plain(x):
        with sdpa_kernel(SDPBackend.MATH):
            return function(x)

    for a, b in zip(twice(plain, x, along), twice(end(model_of(spec, fused=False)), x, along), strict=True):
        close(a, b)


def test_derivatives_of_each_image_by_each_weight():
    model, x = model_of("rpb"), images((3, 5))
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, one):
        return torch.func.functional_call(model, weights, (one[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    plain = model_of("rpb", fused=False)
    end(plain)(x).backward()
    for name, p in plain.named_parameters():
        close(each[name].sum(0), p.grad)


def test_a_query_that_may_see_no_key():
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask[3] = False
    model, x = model_of("rope_axial"), images((3, 5)).requires_grad_()

    def function(x):
        return model.forward_features(x, attn_mask=mask).square().mul(torch.linspace(-1, 1, 16)[:, None]).sum()

    (grad,) = torch.autograd.grad(function(x), x)
    close(torch.func.grad(function)(x.detach()), grad)


@pytest.mark.parametrize("spec", SPECS)
def test_forward_mode_by_hand(spec):
    x = images((3, 5))
    along = torch.randn_like(x)
    grad, _ = twice(end(model_of(spec, fused=False)), x, along)
    for checkpointing in (False, True):
        model = model_of(spec)
        model.set_grad_checkpointing(checkpointing)
        with forward_ad.dual_level():
            dual = end(model)(forward_ad.make_dual(x, along))
            close(forward_ad.unpack_dual(dual).tangent, (grad * along).sum())


def test_dropout_of_attention_under_a_transform():
    model, x = model_of("rope_axial").train(), images((3, 5))
    for block in model.blocks:
        block.attn.attn_drop.p = 1.0
        block.attn.proj.bias.data.zero_()
    alone = x.clone()
    alone[:, :, 2:] = 0  # what other patches hold does not reach the first one
    tokens = [torch.func.vmap(model.forward_features, randomness="same")(given[:, None]) for given in (x, alone)]
    close(*(t[:, 0, 1] for t in tokens))


@pytest.mark.parametrize("spec", ["none", "rope_axial", "rpb", "lookhere"])
def test_a_compiled_transform(spec):
    x, function = images((3, 5)), end(model_of(spec))
    compiled = torch.compile(torch.func.grad(function), backend="aot_eager", fullgraph=True)
    close(compiled(x), torch.func.grad(function)(x))


@pytest.mark.parametrize("transform", [lambda f: torch.func.grad(f), lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
def test_pytorchs_choice_would_not_do(transform, monkeypatch):
    """Once this fails PyTorch has all rules, and ``transformed`` can go."""
    monkeypatch.setattr(kernels, "transformed", lambda: False)
    with pytest.raises((RuntimeError, NotImplementedError), match="_scaled_dot_product_flash_attention_for_cpu"):
        transform(end(model_of("rpb")))(images((3, 5)))
