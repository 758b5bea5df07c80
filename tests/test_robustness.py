"""Over the whole registry: any dtype, any grid, any head width that the formula allows."""

import gc
import resource

import pytest
import torch
from common import ENCODINGS, SPECS, images, relative_change, tiny

import vitpos
from vitpos import positions
from vitpos.attention import BlockRotation, PairRotation
from vitpos.composition import Position
from vitpos.encoding import Contextual, Geometry, LinearRotary
from vitpos.spec import REGISTRY, parse


def tables(position, pos, own_table=None):
    """Every tensor that a position module computes for one forward, shared and of the last layer."""
    owned = {} if own_table is None else {"pos_embed": own_table}
    shared = position.shared_signal(pos, 1)
    signal = position.signal(len(position.layers) - 1, pos, shared).expand()
    found = [position.tokens(pos, owned), signal.bias]
    if isinstance(signal.rotation, PairRotation):
        found += [signal.rotation.turn, signal.rotation.basis]
    if isinstance(signal.rotation, BlockRotation):
        found.append(signal.rotation.matrix)
    for bias in signal.contextual:
        found += [bias.buckets, bias.on_q, bias.on_k]
    return [t.detach().clone() for t in found if t is not None]


@pytest.mark.parametrize("name", [spec for spec in SPECS if not spec.startswith(("none", "logn", "cpe"))])
def test_tables_do_not_round(name):
    """Bit-identical inside autocast, and after a model was cast to bfloat16 and back; float32 in a bfloat16 model."""
    model = tiny(name, (3, 5), 1).float()
    own = None if model.pos_embed is None else model.pos_embed[:, 1:].detach().clone()
    pos = positions.grid(4, 6)
    expected = tables(model.position, pos, own)
    assert expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = tables(model.position, pos, own)
    low = model.bfloat16()
    cast = tables(low.position, pos, own)
    back = tables(low.float().position, pos, own)
    for tensor, *others in zip(expected, inside, cast, back):
        assert tensor.dtype in (torch.float32, torch.int64)
        for other in others:
            assert torch.equal(tensor, other)


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed", "rope_dinov3", "liere", "string", "comrope"])
def test_rotations_are_applied_in_full_precision(name):
    """Under autocast too; prefix tokens (except for a change of basis) stay bit for bit."""
    model = tiny(name, (3, 5), 1).float()
    pos = positions.grid(3, 5)
    rotation = model.position.signal(0, pos, model.position.shared_signal(pos, 1)).expand().rotation
    q = torch.randn(2, 3, 16, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rotation(q)
        rounded = (q.unflatten(-1, (4, 3)) @ torch.eye(3)).flatten(-2)
    assert torch.equal(inside, rotation(q))
    assert name == "string" or torch.equal(inside[:, :, :1], q[:, :, :1])
    assert not torch.equal(rounded, q)  # autocast does round a product like the ones inside


@pytest.mark.parametrize("name", SPECS)
def test_what_is_stored_is_resolved(name):
    """Options that follow from the model are written out, so that a changed rule cannot change an old file."""
    model = tiny(name, (4, 4), 1)
    text = model.position.resolved
    assert "None" not in text
    again = tiny(text, (4, 4), 1)
    again.load_state_dict(model.state_dict())
    x = images((4, 4))
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("name", SPECS)
def test_forward_on_the_meta_device(name):
    with torch.device("meta"):
        model = vitpos.create_model("vit_tiny_patch16_224", pos=name, depth=2, num_classes=3)
        assert model(torch.empty(2, 3, 224, 96)).shape == (2, 3)


def test_the_dtype_check_sees_a_rounded_table():
    """What casting the parameters outright does to learned frequencies."""
    encoding = tiny("rope_mixed", (3, 5), 1).float().position.layers[0]["rope_mixed"]
    before = encoding.weight.detach().clone()
    assert torch.equal(encoding.bfloat16().weight, before)
    torch.nn.Module._apply(encoding, lambda tensor: tensor.bfloat16())
    assert not torch.equal(encoding.weight.float(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
def test_low_precision_models(name, dtype):
    model = tiny(name, (3, 5), 1, randomize=False).to(dtype)
    with torch.no_grad():
        out = model(images((4, 6)).to(dtype))
    assert out.dtype == dtype
    assert out.isfinite().all()


SIDES = [(1, 1), (1, 64), (64, 1), (2, 2), (31, 3), (13, 16)]


@pytest.mark.parametrize("grid", SIDES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_any_training_grid_and_any_other(name, grid):
    """Trained on one odd grid, run on another; and the other way round."""
    geometry = Geometry(dim=48, heads=3, head_dim=16, depth=1, grid=grid)
    position = Position(parse(name), geometry)
    own = torch.randn(1, grid[0] * grid[1], 48)
    for other in (grid, (5, 7), (1, 3)):
        pos = positions.grid(*other)
        for table in tables(position, pos, own if name.startswith("ape1d") else None):
            assert not table.isnan().any()
            assert table.shape[-2] in (other[0] * other[1], other[0] * other[1] + 1, 16, 1) or table.ndim != 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_side_from_1_to_64(name):
    model = tiny(name, (3, 5), 1, heads=2, dim=24, depth=1).float()
    with torch.no_grad():
        for side in range(1, 65):
            for grid in ((side, 1), (1, side), (side, 2)):
                assert model(images(grid, batch=1, dtype=torch.float32)).isfinite().all(), grid


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODINGS)
def test_memory_is_flat_over_many_sizes(name):
    """200 random non-square sizes: nothing is kept, so tensors alive and peak memory stop growing."""
    model = tiny(name, (3, 5), 1, heads=2, dim=24, depth=1).float()
    generator = torch.Generator().manual_seed(0)

    def alive():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())  # (isinstance wakes lazy modules)

    def run(count):
        with torch.no_grad():
            for _ in range(count):
                h, w = torch.randint(1, 13, (2,), generator=generator).tolist()
                model(images((h, w if w != h else w + 1), batch=1, dtype=torch.float32))

    run(100)
    tensors, peak = alive(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(100)
    assert alive() <= tensors  # fewer, where an earlier test left some
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 20 * 1024  # kilobytes


@pytest.mark.parametrize("head_dim", [4, 6, 8, 12, 20, 36, 60, 64])
@pytest.mark.parametrize("name", ENCODINGS)
def test_any_head_width_that_the_formula_allows(name, head_dim):
    """An encoding runs at a head width, or says at construction which widths it takes."""
    kwargs = {"img_size": (4, 6), "patch_size": 2, "embed_dim": 2 * head_dim, "num_heads": 2, "depth": 1}
    known = {"rope1d": 2, "comrope": 2, "liere": 2, "rope_axial": 4, "rope_mixed": 4, "rope_dinov3": 4, "string": 4}
    multiple = known.get(name, 4 if issubclass(REGISTRY[name], LinearRotary) else 1)
    if head_dim % multiple:
        with pytest.raises(ValueError, match=f"multiple of {multiple}, got {head_dim}|block"):
            vitpos.create_model("vit_tiny_patch16_224", pos=name, num_classes=3, **kwargs)
        return
    model = vitpos.create_model("vit_tiny_patch16_224", pos=name, num_classes=3, **kwargs)
    assert model(torch.randn(1, 3, 6, 8)).isfinite().all()


@pytest.mark.parametrize("name", SPECS)
def test_gradients_reach_every_parameter_of_every_variant(name):
    model = tiny(name, (3, 5), 0, heads=2, dim=24)
    model(images((3, 5))).pow(2).sum().backward()
    for key, parameter in model.position.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0 or key.endswith("prefix"), key


def test_contextual_vectors_get_gradients_for_prefix_pairs():
    model = tiny("irpe", (3, 5), 1)
    model(images((3, 5))).pow(2).sum().backward()
    signal = model.position.signal(
        0, positions.grid(3, 5, dtype=torch.float64), model.position.shared_signal(positions.grid(3, 5), 1)
    )
    assert any(isinstance(b, Contextual) for b in signal.expand().contextual)
    for key, parameter in model.position.named_parameters():
        assert parameter.grad is not None, key


def test_a_double_model_computes_in_double():
    """Against float32: the difference is float32's rounding, not zero and not more."""
    for name in ("rope_mixed", "cpb", "sincos2d"):
        model = tiny(name, (3, 5), 1)
        x = images((4, 6))
        with torch.no_grad():
            exact = model(x)
            rounded = model.float()(x.float())
        assert 1e-9 < relative_change(rounded.double(), exact) < 1e-4


@pytest.mark.parametrize("name", SPECS)
def test_grids_of_one_token_count_are_told_apart(name):
    """4 x 6, 6 x 4, 3 x 8 and 2 x 12 in turn, in training and evaluation, in float64 and float32: each time what an
    encoding that has seen nothing else computes."""
    used = tiny(name, (4, 6), 1)
    seen = []
    for dtype, training in ((torch.float64, True), (torch.float32, False), (torch.float64, False)):
        own = None if used.pos_embed is None else used.to(dtype).pos_embed[:, 1:].detach()
        for grid in ((4, 6), (6, 4), (3, 8), (2, 12), (4, 6)):
            pos = positions.grid(*grid, dtype=dtype)
            fresh = Position(used.position.spec, used.position.geometry).to(dtype)
            fresh.load_state_dict(used.to(dtype).position.state_dict(), strict=name != "ape1d")  # (the model holds it)
            found = tables(used.train(training).position, pos, own)
            assert all(torch.equal(a, b) for a, b in zip(found, tables(fresh, pos, own), strict=True))
            seen.append(found)
    if not name.startswith(("none", "logn", "cpe", "rope1d")) and name != "alibi":  # the last two know only the index
        for other in seen[1:4]:
            assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(seen[0], other))


@pytest.mark.parametrize("dim", [37, 38, 39, 40])
@pytest.mark.parametrize("name", ENCODINGS)
def test_any_width_or_a_reason(name, dim):
    """Widths that leave 1, 2 and 3 when divided by 4: an encoding serves them, for each sample alike, or says what it
    needs; and never another width than the one that it was built for."""
    served = {
        "sincos1d": 2,
        "sincos2d": 4,
        "rope1d": 2,
        "rope_axial": 4,
        "rope_mixed": 4,
        "rope_dinov3": 4,
        "string": 4,
    }
    multiple = served.get(name, getattr(REGISTRY[name], "pairs_multiple", 1))  # the latter of an encoding added since
    if dim % multiple or (name in ("liere", "comrope") and dim == 37):  # a prime cannot be cut
        with pytest.raises(ValueError, match=r"multiple of|block"):
            tiny(name, (3, 5), 1, heads=1, dim=dim, depth=1)
        return
    model = tiny(name, (3, 5), 1, heads=1, dim=dim, depth=1)
    five = images((4, 6), batch=5)
    with torch.no_grad():
        together = model(five)
        for sample in range(5):
            assert relative_change(model(five[sample : sample + 1]), together[sample : sample + 1]) < 1e-12
    if "tokens" in REGISTRY[name].sites():
        own = {} if model.pos_embed is None else {"pos_embed": model.pos_embed[:, 1:]}
        pos = positions.grid(3, 5, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="size"):
            model.position.add_tokens(torch.zeros(2, 15, dim + 1), pos, own, torch.float64)
