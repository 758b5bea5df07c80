"""Derivatives of models by ``torch.func``, forward mode and twice backwards: those of attention written out."""

import pytest
import torch
from common import ENCODINGS, images, tiny
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
    with sdpa_kernel(SDPBackend.MATH):
        ours = twice(end(model_of(spec)), x, along)
    for a, b in zip(ours, twice(end(model_of(spec, fused=False)), x, along), strict=True):
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
    x = images((3, 5)).requires_grad_()
    function = end(model_of("rope_axial"), attn_mask=mask)
    (grad,) = torch.autograd.grad(function(x), x)
    close(torch.func.grad(function)(x.detach()), grad)


@pytest.mark.parametrize("transform", [lambda f: torch.func.grad(f), lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
def test_pytorchs_choice_would_not_do(transform, monkeypatch):
    """Once this fails PyTorch has all rules, and ``transformed`` can go."""
    monkeypatch.setattr(kernels, "transformed", lambda: False)
    with pytest.raises((RuntimeError, NotImplementedError), match="_scaled_dot_product_flash_attention_for_cpu"):
        transform(end(model_of("rpb")))(images((3, 5)))
