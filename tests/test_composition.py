"""Which encodings combine: every cell of the matrix is built and run, or refused with its reason."""

import itertools

import pytest
import torch
from common import images, relative_change, tiny

import vitpos
from vitpos.composition import why_not
from vitpos.spec import lookup

NAMES = [name for name in vitpos.list_encodings() if name != "native"]


def expected(first, second):
    """The rule, said a second time: nothing with itself, nothing with none, one rotation at most."""
    rotary = {name for name in NAMES if "angles" in lookup(name).sites()}
    if first == second:
        return "twice"
    if "none" in (first, second):
        return "combines with nothing"
    return "both rotate" if {first, second} <= rotary else None


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(NAMES, 2)))
def test_every_pair(first, second):
    reason = expected(first, second)
    if reason:
        assert reason in why_not(first, second)
        with pytest.raises(ValueError, match=reason):
            tiny(f"{first} + {second}", (2, 3), depth=1)
        return
    assert why_not(first, second) is None
    x = images((3, 2))
    with torch.no_grad():
        both = tiny(f"{first} + {second}", (2, 3), prefix=1)(x)
        swapped = tiny(f"{second} + {first}", (2, 3), prefix=1)
        assert both.isfinite().all()
        assert swapped(x).isfinite().all()


@pytest.mark.parametrize("pos", ["none + native", "native + none", "native + native"])
def test_native_is_no_exception(pos):
    with pytest.raises(ValueError, match=r"use one|twice"):
        tiny(pos)


def test_order_does_not_matter():
    x = images((3, 5))
    model, other = tiny("rope_mixed + rpb + ape2d"), tiny("ape2d + rpb + rope_mixed")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert relative_change(other(x), model(x)) < 1e-12


def test_each_part_of_a_combination_counts():
    x = images((6, 10))
    whole = tiny("rope_axial + rpb + sincos2d + logn")
    with torch.no_grad():
        expected = whole(x)
        for part in (
            "rpb + sincos2d + logn",
            "rope_axial + sincos2d + logn",
            "rope_axial + rpb + logn",
            "rope_axial + rpb + sincos2d",
        ):
            other = tiny(part)
            other.load_state_dict(whole.state_dict(), strict=False)
            assert relative_change(other(x), expected) > 1e-4, part


def test_log_n_temperature():
    """1 on the training grid; elsewhere it is the factor on the logits, not on the bias."""
    x, larger = images((3, 5)), images((6, 10))
    plain, scaled = tiny("rpb"), tiny("rpb + logn")
    with torch.no_grad():
        assert torch.equal(plain(x), scaled(x))
        factor = torch.log(torch.tensor(60.0, dtype=torch.float64)) / torch.log(torch.tensor(15.0, dtype=torch.float64))
        for block in plain.blocks:
            block.attn.qkv.weight[:36] *= factor
            block.attn.qkv.bias[:36] *= factor
        assert relative_change(plain(larger), scaled(larger)) < 1e-12
        assert relative_change(tiny("rpb")(larger), scaled(larger)) > 1e-4
