"""Which encodings combine: every cell of the matrix is built and run, or refused with its reason."""

import itertools

import pytest
import torch
from common import images, relative_change, tiny

import vitpos
from vitpos import kernels, positions
from vitpos.attention import expand_angles
from vitpos.composition import Position, why_not
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


@pytest.mark.parametrize("pos", ["rope_mixed", "rope_mixed(wrap=True)", "rope_mixed(resize='ntk') + rpb"])
def test_angles_of_all_layers_at_once_are_those_of_each(pos, monkeypatch):
    """Rotations and gradients, for the layers that are asked for."""
    model = tiny(pos, depth=3)
    cells = positions.grid(4, 5, dtype=torch.float64)
    calls, unit = [], kernels.unit
    monkeypatch.setattr(kernels, "unit", lambda phase: calls.append(phase.shape) or unit(phase))
    shared = model.position.shared_signal(cells, 0, depth=2)
    signals = [model.position.signal(layer, cells, shared).expand() for layer in range(2)]
    assert [shape[0] for shape in calls] == [2, 2]
    for layer, signal in enumerate(signals):
        encoding = model.position.layers[layer]["rope_mixed"]
        alone = expand_angles(encoding.angles(cells), 0).turn
        assert signal.angles is None
        torch.testing.assert_close(signal.rotation.turn, alone, atol=1e-14, rtol=0)
        weight = torch.randn_like(alone)
        found, sought = (torch.autograd.grad((t * weight).sum(), encoding.weight, retain_graph=True)[0]
                         for t in (signal.rotation.turn, alone))  # fmt: skip
        torch.testing.assert_close(found, sought, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(signals[0].rotation.turn, signals[1].rotation.turn)


@pytest.mark.parametrize("pos", ["string", "rope_axial", "none"])
def test_angles_that_each_layer_makes_itself(pos):
    """A change of basis is the layer's own; without layers there is nothing to make."""
    shared = tiny(pos).position.shared_signal(positions.grid(3, 5, dtype=torch.float64), 0)
    assert shared.angles_by_layer == ()


@pytest.mark.parametrize(("name", "value"), [("resize", "interpolate"), ("gate", torch.nn.Parameter(torch.ones(3)))])
def test_layers_that_differ_in_more_than_weights_make_their_own_angles(name, value):
    model = tiny("rope_mixed")
    cells = positions.grid(4, 5, dtype=torch.float64)
    assert model.position.shared_signal(cells, 0).angles_by_layer
    for layer in model.position.layers if name == "gate" else model.position.layers[1:]:
        setattr(layer["rope_mixed"], name, value)
    assert model.position.shared_signal(cells, 0).angles_by_layer == ()


def test_nobody_can_spoil_the_cells_of_a_grid():
    """They are kept from one forward to the next; what an encoding is given is its own."""
    model, x = tiny("sincos2d"), images((3, 5))
    expected = model(x)
    seen = []
    encoding = model.position.shared["sincos2d"]
    tokens = encoding.tokens
    encoding.tokens = lambda pos: (seen.append(pos.coords), tokens(pos))[1]
    model(x)
    seen[0].zero_()
    assert torch.equal(model(x), expected)
    assert seen[1].any()


def test_blocks_are_told_once_what_is_alike(monkeypatch):
    told, tell = [], Position.told
    monkeypatch.setattr(Position, "told", lambda self, layer, *rest: told.append(layer) or tell(self, layer, *rest))
    for pos, layers in (("rope_axial", [0]), ("none", []), ("rpb", [0, 1, 2]), ("rope_axial + rpb", [0, 1, 2])):
        told.clear()
        tiny(pos, depth=3)(images((3, 5)))
        assert told == layers


@pytest.mark.parametrize(
    ("spec", "order"),
    [
        ("rpb", "told told block block"),
        ("rope_mixed + cpb + lookhere", "told told block block"),
        ("lookhere", "told told block block"),
        ("alibi2d", "told block block"),
        ("irpe", "told block told block"),
        ("liere", "told block told block"),
        ("sincos2d", "block block"),
    ],
)
def test_what_is_small_is_told_at_once(spec, order, monkeypatch):
    """The rest, of the size of all pairs or of a matrix a patch, when its block comes."""
    model, seen, tell = tiny(spec), [], Position.told
    monkeypatch.setattr(Position, "told", lambda *given: seen.append("told") or tell(*given))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, given: seen.append("block"))
    model(images((3, 5)))
    assert " ".join(seen) == order
    seen.clear()
    model(images((3, 5)), coords=torch.rand(15, 2).double() * 3)
    pairwise = spec in ("rpb", "rope_mixed + cpb + lookhere")  # of positions that are no grid
    assert " ".join(seen) == ("told block told block" if pairwise else order)
