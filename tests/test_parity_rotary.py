"""Rotary encodings against their formulas, written here with loops, and against timm; what each is relative to."""

import math

import pytest
import torch
from common import GRIDS, SPECS, coordinates, images, relative_change, tiny
from timm.layers import RotaryEmbeddingDinoV3, apply_rot_embed_cat

import vitpos
from vitpos import positions
from vitpos.attention import expand_angles
from vitpos.encoding import Geometry
from vitpos.encodings._rotary import ladder
from vitpos.positions import Positions
from vitpos.spec import REGISTRY, lookup, parse

D, HEADS = 12, 3
ROTARY = [name for name, cls in REGISTRY.items() if "angles" in cls.sites()]


def build(spec, grid=(3, 5), head_dim=D, heads=HEADS, randomize=True, dtype=torch.float64):
    (term,) = parse(spec).terms
    encoding = lookup(term.name)(Geometry(head_dim * heads, heads, head_dim, 2, grid), **dict(term.options)).to(dtype)
    if randomize:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return encoding


def here(grid, dtype=torch.float64):
    return positions.grid(*grid, dtype=dtype)


def dense(encoding, pos):
    """The matrices [1 | B, h, N, d, d] by which q and k are multiplied at each position."""
    count, width = pos.coords.shape[1], encoding.geometry.head_dim
    rotation = expand_angles(encoding.angles(pos), prefix=0)
    one = torch.eye(width, dtype=torch.float64)
    columns = [rotation(one[c].expand(1, encoding.geometry.heads, count, -1)) for c in range(width)]
    return torch.stack(columns, dim=-1)


def exponential(matrix):
    """exp by its series, after halving the exponent 10 times."""
    term = total = torch.eye(len(matrix), dtype=torch.float64)
    for k in range(1, 30):
        term = term @ matrix / 2**10 / k
        total = total + term
    for _ in range(10):
        total = total @ total
    return total


def by_pairs(phases, layout):
    """The d x d rotation of channel pairs by these angles."""
    width = 2 * len(phases)
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for pair, angle in enumerate(phases):
        a, b = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + width // 2)
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[b, a], matrix[a, b] = math.sin(angle), -math.sin(angle)
    return matrix


def generator_by_hand(upper, width):
    """A skew-symmetric matrix from the entries above its diagonal, row by row."""
    matrix = torch.zeros(width, width, dtype=torch.float64)
    entries = iter(upper)
    for row in range(width):
        for column in range(row + 1, width):
            matrix[row, column] = next(entries)
            matrix[column, row] = -matrix[row, column]
    return matrix


def rope1d_by_hand(encoding, grid, i, j, head):
    return by_pairs([(i * grid[1] + j) * 10000.0 ** (-2 * k / D) for k in range(D // 2)], "interleaved")


def dinov3_by_hand(encoding, grid, i, j, head):
    height, width = {"separate": grid, "min": (min(grid),) * 2, "max": (max(grid),) * 2}[encoding.normalize]
    y, x = 2 * (i + 0.5) / height - 1, 2 * (j + 0.5) / width - 1
    periods = [100.0 ** (2 * k / (D / 2)) for k in range(D // 4)]
    return by_pairs([2 * math.pi * c / p for c in (y, x) for p in periods], "half")


def liere_by_hand(encoding, grid, i, j, head):
    side = encoding.block
    whole = torch.zeros(D, D, dtype=torch.float64)
    for axis, (index, steps, trained) in enumerate(zip((i, j), grid, encoding.geometry.grid)):
        place = torch.linspace(0, steps / trained, steps, dtype=torch.float64)[index]
        for block in range(D // side):
            rows = slice(block * side, (block + 1) * side)
            whole[rows, rows] += place * generator_by_hand(encoding.upper[head, axis, block], side)
    return exponential(whole)


def string_by_hand(encoding, grid, i, j, head):
    s = generator_by_hand(encoding.upper[head], D)
    one = torch.eye(D, dtype=torch.float64)
    basis = (one - s) @ torch.linalg.inv(one + s)
    if encoding.weight is None:
        phases = [c * 100.0 ** (-4 * k / D) for c in (j, i) for k in range(D // 4)]
    else:
        phases = [i * f_y + j * f_x for f_y, f_x in encoding.weight[head].tolist()]
    return by_pairs(phases, "interleaved") @ basis


def comrope_by_hand(encoding, grid, i, j, head):
    place = ((i + 0.5) / grid[0], (j + 0.5) / grid[1])
    blocks, side = encoding.weight.shape[1:3]
    whole = torch.zeros(D, D, dtype=torch.float64)
    for axis in (0, 1):
        for block in range(blocks):
            rows = slice(block * side, (block + 1) * side)
            p = encoding.weight[head, block]
            if encoding.theta is not None:
                whole[rows, rows] += place[axis] * encoding.theta[axis, block] * (p - p.T)
            elif block % 2 == axis:
                whole[rows, rows] += place[axis] * (p - p.T)
    return exponential(whole)


BY_HAND = [
    ("rope1d", rope1d_by_hand),
    ("rope_dinov3", dinov3_by_hand),
    ("rope_dinov3(normalize='min')", dinov3_by_hand),
    ("rope_dinov3(normalize='max')", dinov3_by_hand),
    ("liere", liere_by_hand),
    ("liere(block=4)", liere_by_hand),
    ("liere(block=12)", liere_by_hand),
    ("string", string_by_hand),
    ("string(learned=True)", string_by_hand),
    ("comrope", comrope_by_hand),
    ("comrope(block=3)", comrope_by_hand),
    ("comrope(kind='ld')", comrope_by_hand),
]


@pytest.mark.parametrize("grid", [(3, 5), (5, 2), (1, 7)])
@pytest.mark.parametrize(("spec", "by_hand"), BY_HAND, ids=[spec for spec, _ in BY_HAND])
def test_formula(spec, by_hand, grid):
    """On the training grid 3 x 5 and two others, all cells and single ones; y and x exchanged are seen to fail."""
    encoding = build(spec)
    with torch.no_grad():
        full, apart = dense(encoding, here(grid)), dense(encoding, Positions(coordinates(grid)[None], grid))
        torch.testing.assert_close(full, apart, atol=1e-12, rtol=0)
        wrong = 0.0
        for head in range(HEADS):
            for n, (i, j) in enumerate(coordinates(grid).int().tolist()):
                expected = by_hand(encoding, grid, i, j, head)
                torch.testing.assert_close(full[0, head, n], expected, atol=1e-11, rtol=0)
                if max(i, j) < min(grid):
                    wrong = max(wrong, (by_hand(encoding, grid, j, i, head) - full[0, head, n]).abs().max().item())
        assert wrong > 1e-2 or min(grid) == 1


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("normalize", ["separate", "min", "max"])
def test_dinov3_equals_timm(normalize, grid):
    theirs = RotaryEmbeddingDinoV3(D, temperature=100.0, normalize_coords=normalize).get_embed(grid)
    x = torch.randn(1, HEADS, grid[0] * grid[1], D)

    def ours(base, grid, normalize=normalize):
        encoding = build(f"rope_dinov3(base={base}, normalize={normalize!r})", (4, 4), dtype=torch.float32)
        return expand_angles(encoding.angles(here(grid, torch.float32)), prefix=0)(x)

    expected = apply_rot_embed_cat(x, theirs, half=True)
    torch.testing.assert_close(ours(100.0, grid), expected, atol=1e-5, rtol=0)
    assert (ours(90.0, grid) - expected).abs().max() > 1e-2
    assert (ours(100.0, grid[::-1]) - expected).abs().max() > 1e-2
    assert (ours(100.0, grid, "max" if normalize == "min" else "min") - expected).abs().max() > 1e-2 or min(grid) == 1


@pytest.mark.parametrize("spec", [s for s in SPECS if s.partition("(")[0] in ROTARY])
def test_relativity(spec):
    """R(p + t)^T R(q + t) = R(p)^T R(q), fractional places and shifts; LieRE is the one for which it fails."""
    encoding = build(spec)
    torch.manual_seed(3)
    places = torch.rand(1, 4, 2, dtype=torch.float64) * 4
    with torch.no_grad():
        before, after = (
            dense(encoding, Positions(places + torch.tensor(t, dtype=torch.float64), (3, 5)))
            for t in ([0.0, 0.0], [1.25, -0.75])
        )
    torch.testing.assert_close(before.mT @ before, torch.eye(D, dtype=torch.float64).expand_as(before))
    change = (before[:, :, :1].mT @ before - after[:, :, :1].mT @ after).abs().max()
    assert (before[:, :, :1] - after[:, :, :1]).abs().max() > 1e-2
    assert change > 1e-2 if spec.startswith("liere") else change < 1e-12


def test_liere_is_relative_when_its_generators_commute():
    encoding = build("liere")
    with torch.no_grad():
        encoding.upper[:, 1] = encoding.upper[:, 0] * 0.3
    place = torch.tensor([[[0.0, 0.0], [1.0, 3.0], [1.0, 1.0], [2.0, 4.0]]], dtype=torch.float64)
    with torch.no_grad():
        a, b, c, d = dense(encoding, Positions(place, (3, 5)))[0].unbind(1)
    torch.testing.assert_close(a.mT @ b, c.mT @ d, atol=1e-12, rtol=0)


# resize policies of frequencies


def steps(spec, policy, extent, grid=(3, 5)):
    """Radians a patch [h, d/2, (y, x)] on ``extent``, read off the angles."""
    encoding = build(spec, grid)
    encoding.resize = policy
    corner = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    phase = encoding.angles(Positions(corner, extent)).phase.detach()[0]
    return torch.stack([phase[:, 1] - phase[:, 0], phase[:, 2] - phase[:, 0]], dim=-1)


@pytest.mark.parametrize("extent", [(6, 20), (2, 5), (9, 3)])
@pytest.mark.parametrize("spec", ["rope1d", "rope_axial", "rope_mixed", "string", "string(learned=True)"])
def test_ntk_goes_from_extrapolate_to_interpolate(spec, extent):
    out, into, ntk = (steps(spec, policy, extent) for policy in ("extrapolate", "interpolate", "ntk"))
    count = D // 2 if spec == "rope1d" else D // 4
    for pair in range(D // 2):
        k = pair % count
        ratio = torch.where(out[:, pair] == 0, 1.0, into[:, pair] / out[:, pair])
        torch.testing.assert_close(ntk[:, pair], out[:, pair] * ratio ** (k / (count - 1)), atol=1e-12, rtol=1e-9)
        if k == 0:
            torch.testing.assert_close(ntk[:, pair], out[:, pair], atol=1e-12, rtol=1e-9)
        elif k == count - 1:
            torch.testing.assert_close(ntk[:, pair], into[:, pair], atol=1e-12, rtol=1e-9)
    assert ((ntk - out).abs() > 1e-6).any()
    assert ((ntk - into).abs() > 1e-6).any()
    for policy in ("extrapolate", "interpolate", "ntk"):  # nothing to scale on the training grid
        torch.testing.assert_close(steps(spec, policy, (3, 5)), steps(spec, "extrapolate", (3, 5)))


def test_ntk_numbers():
    """d = 12, theta = 100: frequencies 1, 100^(-1/3), 100^(-2/3); twice the width divides by 1, sqrt 2, 2."""
    x = steps("rope_axial", "ntk", (3, 10))[0, :3, 1].tolist()
    assert x == pytest.approx([1.0, 100 ** (-1 / 3) / 2**0.5, 100 ** (-2 / 3) / 2])


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_whole_cycles_have_no_ntk(name):
    with pytest.raises(ValueError, match="whole cycles, so resize='ntk'; known: extrapolate, interpolate"):
        build(f"{name}(wrap=True, resize='ntk')")
    model = tiny(f"{name}(wrap=True)")
    with pytest.raises(ValueError, match="does not offer the resize policy 'ntk'"):
        vitpos.set_resize(model, "ntk")
    assert vitpos.resize_policy(vitpos.set_resize(tiny(name), "ntk")) == "ntk"


def test_rope1d_counts_with_the_width_in_force():
    """Index i W + j: W of the grid at hand, or the training one's under ``interpolate``."""
    assert steps("rope1d", "extrapolate", (7, 11))[0, 0].tolist() == pytest.approx([11.0, 1.0])
    assert steps("rope1d", "interpolate", (6, 10))[0, 0].tolist() == pytest.approx([2.5, 0.5])
    last_and_first = Positions(torch.tensor([[[0.0, 5.0], [1.0, 0.0]]], dtype=torch.float64), (3, 5))
    phase = build("rope1d").angles(last_and_first).phase[0, 0]
    torch.testing.assert_close(phase[0], phase[1])  # one step right of the last column is the next row


@pytest.mark.parametrize("policy", ["linspace", "extrapolate", "interpolate"])
def test_liere_places(policy):
    encoding = build(f"liere(resize={policy!r})")
    placed = encoding.placed(here((6, 20))).view(6, 20, 2)
    wanted = {
        "linspace": (torch.linspace(0, 6 / 3, 6), torch.linspace(0, 20 / 5, 20)),
        "extrapolate": (torch.arange(6) / 2, torch.arange(20) / 4),
        "interpolate": (((torch.arange(6) + 0.5) / 2 - 0.5) / 2, ((torch.arange(20) + 0.5) / 4 - 0.5) / 4),
    }[policy]
    torch.testing.assert_close(placed[:, 0, 0], wanted[0].double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(placed[0, :, 1], wanted[1].double(), atol=1e-6, rtol=0)
    native = encoding.placed(here((3, 5)))  # from 0 to 1 on the training grid, whatever the policy
    assert native.amin((0, 1)).tolist() == [0.0, 0.0]
    assert native.amax((0, 1)).tolist() == [1.0, 1.0]
    assert build("liere", (1, 1)).placed(here((1, 1))).tolist() == [[[0.0, 0.0]]]


# whole cycles


@pytest.mark.parametrize(
    ("side", "distinct", "cycles"),
    [
        (6, 3, [3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]),
        (8, 4, [4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]),
        (14, 7, [7, 6, 5, 5, 4, 4, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1]),
    ],
)
def test_ladder(side, distinct, cycles):
    """A head of 64 channels has 16 pairs an axis; rounding theta^(-k/16) S / 2 pi would leave 2 distinct at most."""
    assert ladder(16, side) == cycles
    assert len(set(cycles)) == distinct == side // 2
    collapsed = {round(100 ** (-k / 16) * side / (2 * math.pi)) for k in range(16)}
    assert len(collapsed - {0}) <= 2


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_wrap_turns_whole_circles(name):
    """Once around a side is a multiple of 2 pi on every grid and under both policies; without wrap it is not."""
    for extent in [(3, 5), (6, 10), (4, 7)]:
        sides = torch.tensor(extent, dtype=torch.float64)
        for policy in ("interpolate", "extrapolate"):
            cycles = steps(f"{name}(wrap=True)", policy, extent) * sides / (2 * math.pi)
            torch.testing.assert_close(cycles, cycles.round(), atol=1e-9, rtol=0)
        cycles = steps(name, "extrapolate", extent) * sides / (2 * math.pi)
        assert (cycles - cycles.round()).abs().max() > 0.1


def test_cycles_on_another_grid():
    """Trained on 6 x 14 (d = 12, 3 pairs an axis); on 12 x 8 the cycles are kept or taken anew."""

    def cycles(spec, policy, extent):
        found = steps(spec, policy, extent, grid=(6, 14)) * torch.tensor(extent) / (2 * math.pi)
        return found.round().int()

    for policy, extent, x, y in [
        ("interpolate", (6, 14), [7, 3, 1], [3, 2, 1]),
        ("interpolate", (12, 8), [7, 3, 1], [3, 2, 1]),
        ("extrapolate", (12, 8), [4, 2, 1], [6, 2, 1]),
    ]:
        expected = [[0, k] for k in x] + [[k, 0] for k in y]
        assert cycles("rope_axial(wrap=True)", policy, extent)[0].tolist() == expected

    encoding = build("rope_mixed(wrap=True)", (6, 14))
    kept = cycles("rope_mixed(wrap=True)", "interpolate", (12, 8))
    grown = cycles("rope_mixed(wrap=True)", "extrapolate", (12, 8))
    assert torch.equal(kept, encoding.weight.detach().round().int())
    assert torch.equal(grown, (encoding.weight.detach() * torch.tensor([2, 8 / 14])).round().int())
    assert not torch.equal(kept, grown)


@pytest.mark.parametrize(("policy", "growth"), [("interpolate", (1.0, 1.0)), ("extrapolate", (2.0, 0.5))])
def test_rounding_passes_gradients_straight_through(policy, growth):
    """A phase is 2 pi k / S with k = round(weight): its gradient is that of 2 pi weight / S."""
    encoding = build(f"rope_mixed(wrap=True, resize={policy!r})", (6, 14))
    extent = (12, 7)
    encoding.frequencies(here(extent)).mul(torch.tensor([3.0, 5.0])).sum().backward()
    for axis, (factor, side, grown) in enumerate(zip((3.0, 5.0), extent, growth)):
        expected = torch.full_like(encoding.weight[..., axis], factor * grown * 2 * math.pi / side)
        torch.testing.assert_close(encoding.weight.grad[..., axis], expected)
    rounded = encoding.frequencies(here(extent)).detach()
    with torch.no_grad():
        encoding.weight.add_(1e-9)
    assert torch.equal(encoding.frequencies(here(extent)).detach(), rounded)  # the value itself does not move


def test_mixed_cycles_start_on_the_ladder():
    encoding = build("rope_mixed(wrap=True)", (6, 14), head_dim=64, randomize=False)
    expected = torch.tensor([7 ** (1 - k / 15) for k in range(16)] * 2).double().expand(HEADS, -1)
    torch.testing.assert_close(encoding.weight.detach().norm(dim=-1), expected, atol=1e-5, rtol=0)
    assert [round(v) for v in expected[0, :16].tolist()] == ladder(16, 14)


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_describe_says_how_many_cycles_a_side_allows(name):
    assert "S // 2" in vitpos.describe(name)


# construction, scale, precision


@pytest.mark.parametrize(
    ("spec", "head_dim", "words"),
    [
        ("liere(block=8)", 12, "block=8 does not cut the 12 channels of a head into blocks; possible: 2, 3, 4, 6, 12"),
        ("liere(block=1)", 12, "block=1"),
        ("liere(block=0)", 12, "block=0"),
        ("liere", 11, "block=None needs a divisor of the 11 channels of a head into blocks; possible: 11"),
        ("comrope(block=12)", 12, "possible: 2, 3, 4, 6"),
        ("comrope", 7, "possible: none"),
        ("rope1d", 11, "multiple of 2, got 11; nearest: 10 or 12"),
        ("rope_dinov3", 10, "multiple of 4, got 10"),
        ("string", 10, "multiple of 4, got 10"),
        ("string(std=-1)", 12, "std=-1.0"),
        ("rope1d(theta=0)", 12, "theta=0.0"),
        ("rope_dinov3(base=-3)", 12, "base=-3.0"),
        ("string(theta=0)", 12, "theta=0.0"),
    ],
)
def test_bad_values_say_what_is_wrong(spec, head_dim, words):
    with pytest.raises(ValueError) as caught:
        build(spec, head_dim=head_dim)
    assert words in str(caught.value)


def test_sizes_of_the_papers():
    """At ViT-B/16, 14 x 14: encodings.md and the papers."""
    for spec, expected in [
        ("rope1d", 0),
        ("rope_dinov3", 0),
        ("rope_mixed", 9_216),
        ("liere", 64_512),
        ("liere(block=64)", 580_608),
        ("comrope", 73_728),
        ("comrope(kind='ld')", 73_920),
        ("string", 12 * 12 * 64 * 63 // 2),
        ("string(learned=True)", 12 * 12 * 64 * 63 // 2 + 9_216),
    ]:
        encoding = build(spec, (14, 14), head_dim=64, heads=12, randomize=False, dtype=torch.float32)
        assert 12 * sum(p.numel() for p in encoding.parameters()) == expected, spec


def test_initial_values():
    torch.manual_seed(0)
    many = {"head_dim": 64, "heads": 12, "randomize": False}
    upper = build("liere", **many).upper
    assert 0 <= upper.min() < 0.01
    assert 2 * math.pi - 0.01 < upper.max() <= 2 * math.pi
    assert upper.mean().item() == pytest.approx(math.pi, rel=0.05)
    for parameter in build("comrope(kind='ld')", **many).parameters():
        assert parameter.std().item() == pytest.approx(1, abs=0.3)
    for std in (0.02, 0.5):
        assert build(f"string(std={std})", **many).upper.std().item() == pytest.approx(std, rel=0.05)
    learned = build("string(learned=True)", **many)
    fixed = build("string", **many)
    start, wanted = (e.frequencies(here((3, 5))).detach() for e in (learned, fixed))
    torch.testing.assert_close(start, wanted.expand(12, -1, -1), rtol=1e-6, atol=0)


def test_string_starts_as_rope_axial():
    x = images((3, 5))
    plain = tiny("rope_axial", prefix=1)
    for std, same in [(0.0, True), (0.1, False)]:
        model = tiny("rope_axial", prefix=1)
        vitpos.attach(model, f"string(std={std})")
        with torch.no_grad():
            change = relative_change(model(x), plain(x))
        assert change < 1e-12 if same else change > 1e-4


@pytest.mark.parametrize("spec", ["rope_mixed", "string(learned=True)", "liere", "comrope(kind='ld')"])
def test_weights_and_angles_keep_float32(spec):
    """Bit for bit the same under autocast; in a bfloat16 model weights and what is made of them stay float32."""
    model = tiny(spec, randomize=False).float()
    pos = here((3, 5), torch.float32)

    def told():
        angles = model.position.signal(0, pos, model.position.shared_signal(pos, 0)).angles
        return [v for v in vars(angles).values() if isinstance(v, torch.Tensor)]

    with torch.no_grad():
        plain = told()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = told()
        model.bfloat16()
        low = told()
    assert plain
    for a, b, c in zip(plain, inside, low):
        assert torch.equal(a, b)
        assert c.dtype == torch.float32
        torch.testing.assert_close(c, a, atol=0.1, rtol=0.1)
    assert {p.dtype for p in model.position.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("side", "cycles"), [(5, [2, 1, 1]), (7, [3, 2, 1]), (9, [4, 2, 1]), (8, [4, 2, 1]), (1, [1, 1, 1])]
)
def test_ladder_of_odd_sides(side, cycles):
    """K is half the side, rounded down: more cycles than that are not told apart."""
    assert ladder(3, side) == cycles


def test_mixed_frequencies_start_in_pairs_of_directions():
    """Per head one direction for the first half of the pairs and one at a right angle to it for the second."""
    torch.manual_seed(0)
    weight = lookup("rope_mixed")(Geometry(96, 4, 24, 1, (4, 4))).weight.detach()  # [4, 12, (y, x)]
    first, second = weight[:, :6], weight[:, 6:]
    expected = torch.tensor([10 ** (-k / 6) for k in range(6)]).expand(4, 6)
    torch.testing.assert_close(first.norm(dim=-1), expected)
    torch.testing.assert_close(second.norm(dim=-1), expected)
    assert (first * second).sum(-1).abs().max() < 1e-6  # right angles
    angle = torch.atan2(first[..., 0], first[..., 1])
    assert (angle - angle[:, :1]).abs().max() < 1e-5  # one direction a head
    assert angle[:, 0].diff().abs().min() > 1e-3  # another in each head
    side = second[..., 0] * first[..., 1] - second[..., 1] * first[..., 0]
    assert side.min() > 0  # counter-clockwise, as published
