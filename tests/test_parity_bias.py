"""Bias encodings against independent implementations: formulas written with plain loops, and timm's modules.

Each comparison has a mistake beside it that it must see.
"""

import math

import pytest
import torch
from common import coordinates, images, relative_change, tiny
from timm.layers import RelPosBias, RelPosMlp, resize_rel_pos_bias_table, resize_rel_pos_bias_table_simple

import vitpos
from vitpos.attention import contextual_bias, expand_bias
from vitpos.composition import Position
from vitpos.encoding import Contextual, Geometry, OffsetTable
from vitpos.positions import Positions, grid
from vitpos.spec import lookup, parse

HEADS, WIDTH = 3, 4


def build(spec, training=(3, 5), heads=HEADS, layer=0, depth=1):
    """A float64 encoding with random weights of standard deviation 0.5."""
    (term,) = parse(spec).terms
    geometry = Geometry(heads * WIDTH, heads, WIDTH, depth, training, layer, prefix=1)
    encoding = lookup(term.name)(geometry, **dict(term.options)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return encoding


def dense(encoding, on, prefix=0):
    """The bias of all token pairs [h, T, T] on a full grid, in the encoding's layer."""
    with torch.no_grad():
        bias = expand_bias(encoding.bias(grid(*on, dtype=torch.float64)), prefix)[0]
        return bias * encoding.slope_of(encoding.geometry.layer)


def looped(formula, on, heads=HEADS):
    """formula(head, dy, dx), offsets query minus key, for all pairs of cells [h, N, N]."""
    cells = coordinates(on).long().tolist()
    rows = [[[formula(h, qy - ky, qx - kx) for ky, kx in cells] for qy, qx in cells] for h in range(heads)]
    return torch.tensor(rows, dtype=torch.float64)


def check(spec, formula, on, training=(3, 5), mistakes=("sign", "axes"), **options):
    """``formula(encoding, on)`` gives f(h, dy, dx); equal to the encoding, unlike the same with a mistake."""
    encoding = build(spec, training, **options)
    f = formula(encoding, on)
    heads = encoding.geometry.heads
    ours = dense(encoding, on)
    torch.testing.assert_close(ours.expand(heads, -1, -1), looped(f, on, heads), atol=1e-12, rtol=1e-12)
    wrong = {"sign": lambda h, dy, dx: f(h, -dy, -dx), "axes": lambda h, dy, dx: f(h, dx, dy)}
    for mistake in mistakes:
        assert not torch.allclose(ours.expand(heads, -1, -1), looped(wrong[mistake], on, heads), atol=1e-4), mistake


def around(delta, side):
    """An offset the shorter way around a side, by search: in [-(side // 2), side - side // 2)."""
    return next(d for d in range(-(side // 2), side - side // 2) if (d - delta) % side == 0)


def wrapped(formula):
    def f(encoding, on):
        plain = formula(encoding, on)
        return lambda h, dy, dx: plain(h, around(dy, on[0]), around(dx, on[1]))

    return f


# ---- alibi, alibi2d, kerple


def reference_slope(h, heads):
    """Press et al.'s published rule."""

    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)[h]
    closest = 2 ** math.floor(math.log2(heads))
    return (power_of_two(closest) + power_of_two(2 * closest)[0::2][: heads - closest])[h]


def alibi(encoding, on):
    return lambda h, dy, dx: -reference_slope(h, encoding.geometry.heads) * abs(dy * on[1] + dx)


def alibi2d(encoding, on):
    return lambda h, dy, dx: -reference_slope(h, encoding.geometry.heads) * math.hypot(dy, dx)


def kerple(encoding, on):
    r = [[math.log1p(math.exp(v)) for v in row] for row in encoding.raw.tolist()]
    return lambda h, dy, dx: -r[0][h] * math.log(1 + r[1][h] * math.hypot(dy, dx))


@pytest.mark.parametrize("heads", [1, 3, 4, 6, 12])
@pytest.mark.parametrize("on", [(3, 5), (5, 2), (1, 7), (6, 6)])
def test_linear_biases(on, heads):
    on_axes = ("axes",) if min(on) > 1 else ()  # symmetric under a change of sign: no mistake
    check("alibi", alibi, on, mistakes=on_axes, heads=heads)
    check("alibi2d", alibi2d, on, mistakes=(), heads=heads)
    check("kerple", kerple, on, mistakes=(), heads=heads)
    if max(on) > 2:
        check("alibi2d(wrap=True)", wrapped(alibi2d), on, mistakes=(), heads=heads)
        check("kerple(wrap=True)", wrapped(kerple), on, mistakes=(), heads=heads)
        assert not torch.equal(
            dense(build("alibi2d(wrap=True)", heads=heads), on), dense(build("alibi2d", heads=heads), on)
        )


def test_alibi_is_the_flattened_index_at_explicit_coordinates_too():
    """Coordinates between cells, on a grid wider than they need: n = y W + x with the extent's width."""
    at = torch.tensor([[[0.5, 1.0], [2.0, 0.25], [1.0, 6.0]]], dtype=torch.float64)
    encoding = build("alibi")
    bias = encoding.bias(Positions(at, (4, 9))).values[0]
    n = [0.5 * 9 + 1.0, 2.0 * 9 + 0.25, 9 + 6.0]
    for h in range(HEADS):
        for q in range(3):
            for k in range(3):
                assert bias[h, q, k].item() == pytest.approx(-reference_slope(h, HEADS) * abs(n[q] - n[k]), abs=1e-12)
    assert not torch.allclose(encoding.bias(Positions(at, (4, 8))).values[0], bias)


def test_alibi2d_at_64x64_is_a_table():
    """No loop and nothing of size N x N or with a batch: 12 tables of 127 x 127; the values those of the loop."""
    encoding = build("alibi2d", heads=12)
    value = encoding.bias(grid(64, 64, dtype=torch.float64))
    assert isinstance(value, OffsetTable)
    assert value.values.shape == (12, 127, 127)
    f = alibi2d(encoding, (64, 64))
    for h, dy, dx in [(0, 0, 0), (11, -63, 63), (5, 3, -4), (8, 0, 63)]:
        assert value.values[h, dy + 63, dx + 63].item() == pytest.approx(f(h, dy, dx), abs=1e-12)
    expanded = expand_bias(build("alibi2d", heads=12).bias(grid(6, 6, dtype=torch.float64)), prefix=5)
    assert expanded.shape == (1, 12, 41, 41)
    assert expanded[:, :, :5].abs().sum() == expanded[:, :, :, :5].abs().sum() == 0
    torch.testing.assert_close(expanded[0, :, 5:, 5:], looped(f, (6, 6), 12), atol=1e-12, rtol=0)


def test_kerple_starts_as_published():
    torch.manual_seed(0)
    encoding = lookup("kerple")(Geometry(4096, 1024, 4, 1, (3, 5)))
    r1, r2 = torch.nn.functional.softplus(encoding.raw.detach())
    assert 0.01 - 1e-6 <= r1.min() < 0.1
    assert 1.9 < r1.max() <= 2.0 + 1e-5
    assert 0.01 - 1e-6 <= r2.min() < 0.1
    assert 0.9 < r2.max() <= 1.0 + 1e-5


# ---- rpb


def rpb(encoding, on):
    height, width = encoding.geometry.grid
    table = encoding.table.tolist()
    return lambda h, dy, dx: table[h][dy + height - 1][dx + width - 1]


def rpb_wrapped(encoding, on):
    height, width = encoding.geometry.grid
    table = encoding.table.tolist()
    return lambda h, dy, dx: table[h][around(dy, on[0]) + height // 2][around(dx, on[1]) + width // 2]


@pytest.mark.parametrize("on", [(3, 5), (4, 2), (1, 7), (1, 1), (6, 6)])
def test_rpb_tables(on):
    mistakes = () if on == (1, 1) else ("sign",)
    check("rpb", rpb, on, training=on, mistakes=mistakes)
    check("rpb(wrap=True)", rpb_wrapped, on, training=on, mistakes=() if on == (1, 1) else ("sign",))


@pytest.mark.parametrize("prefix", [0, 1])
def test_rpb_equals_timm(prefix):
    """On a window with two different sides; timm has at most one prefix token, we any number."""
    torch.manual_seed(3)
    window = (3, 5)
    theirs = RelPosBias(window, num_heads=HEADS, prefix_tokens=prefix).double()
    torch.nn.init.normal_(theirs.relative_position_bias_table, std=0.5)
    ours = build(f"rpb(prefix={bool(prefix)})", window)
    with torch.no_grad():
        flat = theirs.relative_position_bias_table.T
        ours.table.copy_(flat[:, : 5 * 9].view(HEADS, 5, 9))
        if prefix:
            ours.prefix.copy_(flat[:, 5 * 9 :])
        assert torch.equal(dense(ours, window, prefix), theirs.get_bias()[0])
        ours.table.copy_(ours.table.flip(1, 2).clone())
        assert not torch.allclose(dense(ours, window, prefix), theirs.get_bias()[0], atol=1e-4)


@pytest.mark.parametrize("prefix", [1, 5])
def test_prefix_entries_of_rpb(prefix):
    encoding = build("rpb(prefix=True)")
    out = dense(encoding, (3, 5), prefix)
    from_prefix, to_prefix, between = encoding.prefix.detach()[:, :, None, None].unbind(1)
    assert torch.equal(out[:, :prefix, prefix:], from_prefix.expand(-1, prefix, 15))
    assert torch.equal(out[:, prefix:, :prefix], to_prefix.expand(-1, 15, prefix))
    assert torch.equal(out[:, :prefix, :prefix], between.expand(-1, prefix, prefix))
    assert torch.equal(out[:, prefix:, prefix:], dense(encoding, (3, 5)))


def test_rpb_on_another_grid_by_policy():
    """table(dy) = dy, trained on 8 rows, read on 4 and on 16: scaled into the training grid, or as it is, clamped."""
    encoding = build("rpb", training=(8, 1), heads=1)
    encoding.table.data.copy_(torch.arange(-7.0, 8.0).view(1, 15, 1))
    four, sixteen = torch.arange(-3.0, 4).double(), torch.arange(-15.0, 16).double()

    def read(rows):
        with torch.no_grad():
            return encoding.bias(grid(rows, 1, dtype=torch.float64)).values.flatten()

    torch.testing.assert_close(read(4), 2 * four)
    torch.testing.assert_close(read(16), (sixteen / 2).clamp(-7, 7))
    encoding.resize = "extrapolate"
    torch.testing.assert_close(read(4), four)
    torch.testing.assert_close(read(16), sixteen.clamp(-7, 7))


@pytest.mark.filterwarnings("ignore::UserWarning:timm")
def test_rpb_policies_beside_those_of_others():
    """The same table(dy) = dy from 8 to 4: Swin's resizing is near 2 dy, BEiT's near dy, as the docstring says."""
    table = torch.arange(-7.0, 8.0).view(15, 1).expand(15, 15).reshape(225, 1)
    four = torch.arange(-3.0, 4.0)
    swin = resize_rel_pos_bias_table_simple(table, (4, 4), (49, 1)).view(7, 7)[:, 3]
    beit = resize_rel_pos_bias_table(table, (4, 4), (49, 1)).view(7, 7)[:, 3]
    assert (swin - 2 * four).abs().max() < 0.6 < (swin - four).abs().max()
    assert (beit - four).abs().max() < 0.1 < (beit - 2 * four).abs().max()


# ---- cpb


def cpb(encoding, on):
    w1, b1, w2 = (p.tolist() for p in (encoding.inner, encoding.inner_bias, encoding.outer))
    height, width = encoding.geometry.grid

    def spaced(delta, side):
        u = 8 * delta / max(side - 1, 1)
        return math.copysign(math.log2(1 + abs(u)) / math.log2(8), u)

    def f(h, dy, dx):
        y, x = spaced(dy, height), spaced(dx, width)
        units = [max(0.0, wy * y + wx * x + b) for (wy, wx), b in zip(w1, b1)]
        z = sum(w * unit for w, unit in zip(w2[h], units))
        return 16 / (1 + math.exp(-z)) - (8 if encoding.center else 0)

    return f


@pytest.mark.parametrize("on", [(3, 5), (5, 2), (4, 6)])
def test_cpb(on):
    check("cpb(hidden=7)", cpb, on)
    check("cpb(hidden=7, center=False)", cpb, on, training=(2, 7))
    check("cpb(hidden=7, wrap=True)", wrapped(cpb), on)


def copy_mlp(theirs, ours):
    ours.inner.copy_(theirs.mlp.fc1.weight)
    ours.inner_bias.copy_(theirs.mlp.fc1.bias)
    ours.outer.copy_(theirs.mlp.fc2.weight)


@pytest.mark.parametrize("prefix", [0, 2])
def test_cpb_equals_timm(prefix):
    """On its own window and on another one than the trained, in float32."""
    torch.manual_seed(3)
    theirs = RelPosMlp((4, 6), HEADS, hidden_dim=512, mode="swin", pretrained_window_size=(3, 5), prefix_tokens=prefix)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = build("cpb(center=False)").float()
    with torch.no_grad():
        copy_mlp(theirs, ours)
        expected = theirs.eval().get_bias()[0]
        mine = expand_bias(ours.bias(grid(4, 6)), prefix)[0]
        assert relative_change(mine, expected) < 1e-6
        ours.geometry = Geometry(12, HEADS, 4, 1, (4, 6))
        assert relative_change(expand_bias(ours.bias(grid(4, 6)), prefix)[0], expected) > 1e-3


def test_cpb_centre_leaves_patches_alone_and_prefix_tokens_in_reach():
    x = images((3, 5))
    with torch.no_grad():
        centred, published = tiny("cpb", (3, 5), 0), tiny("cpb(center=False)", (3, 5), 0)
        assert relative_change(centred(x), published(x)) < 1e-12
        centred, published = tiny("cpb", (3, 5), 1), tiny("cpb(center=False)", (3, 5), 1)
        assert relative_change(centred(x), published(x)) > 1e-4
    torch.manual_seed(0)
    shares = []
    for spec in ("cpb", "cpb(center=False)"):
        model = vitpos.create_model("vit_tiny_patch16_224", pos=spec, depth=1)
        bias = dense(model.position.layers[0]["cpb"].double(), (14, 14), 1)
        shares.append(
            bias.softmax(-1)[:, 1:, 0].mean().item() * 197
        )  # of uniform attention: a patch to the class token
    assert shares[0] == pytest.approx(1.0, abs=0.1)
    assert shares[1] == pytest.approx(math.exp(-8), rel=0.2)


@pytest.mark.parametrize("training", [(1, 4), (4, 1), (1, 1)])
def test_cpb_with_a_side_of_one_is_finite(training):
    """timm's is not."""
    for on in [training, (1, 7), (3, 5)]:
        assert dense(build("cpb", training), on).isfinite().all()
    theirs = RelPosMlp((3, 5), HEADS, mode="swin", pretrained_window_size=training)
    assert not theirs.rel_coords_log.isfinite().all()


def test_cpb_offsets_have_one_bias_on_every_grid():
    encoding = build("cpb", training=(3, 5))
    small, large = (encoding.bias(grid(*on, dtype=torch.float64)).values for on in ((3, 5), (6, 9)))
    torch.testing.assert_close(large[:, 3:8, 4:13], small, atol=1e-12, rtol=0)
    encoding.resize = "interpolate"
    assert not torch.allclose(encoding.bias(grid(6, 9, dtype=torch.float64)).values[:, 3:8, 4:13], small)


@pytest.mark.parametrize("spec", ["cpb", "t5", "alibi", "alibi2d", "lookhere", "kerple", "rpb"])
def test_tables_do_not_know_autocast(spec):
    torch.manual_seed(0)
    position = Position(parse(spec), Geometry(12, 3, 4, 2, (3, 5)))
    for pos in (grid(4, 6), grid(4, 6).keep(torch.tensor([[0, 5, 9], [1, 3, 23]]))):
        plain = position.signal(0, pos, position.shared_signal(pos, 1)).expand().bias
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = position.signal(0, pos, position.shared_signal(pos, 1)).expand().bias
        assert plain.dtype == torch.float32
        assert torch.equal(plain, inside)
    if spec == "cpb":  # called from outside of composition, autocast would round it
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = position.layers[0]["cpb"].at(torch.tensor([1.0, 2.0]), (4, 6))
        assert not torch.equal(rounded, position.layers[0]["cpb"].at(torch.tensor([1.0, 2.0]), (4, 6)))


# ---- t5


def t5(buckets, maximum):
    """The source's function of key minus query, on floating-point numbers."""

    def bucket(relative):
        half = buckets // 2
        out = half if relative > 0 else 0
        distance, exact = abs(relative), half // 2
        if distance < exact:
            return out + distance
        log = exact + int(math.log(distance / exact) / math.log(maximum / exact) * (half - exact))
        return out + min(log, half - 1)

    def formula(encoding, on):
        rows, columns = encoding.rows.tolist(), encoding.columns.tolist()
        return lambda h, dy, dx: rows[h][bucket(-dy)] + columns[h][bucket(-dx)]

    return formula


@pytest.mark.parametrize("on", [(3, 5), (5, 2), (11, 8), (1, 40)])
def test_t5(on):
    check("t5(num_buckets=8, max_distance=9)", t5(8, 9), on)
    check("t5", t5(32, 16), on)  # training grid 3x5: twice its side would be below the exact buckets' end
    check("t5(num_buckets=8, wrap=True)", wrapped(t5(8, 10)), on)


def test_t5_buckets_are_those_of_the_source():
    """At the published 32 buckets and maximum 128, computed in float32 as the source does."""
    encoding = build("t5(max_distance=128)", training=(14, 14))
    encoding.columns.data.zero_()
    encoding.rows.data.copy_(torch.arange(32.0))
    offsets = torch.arange(-200, 201)
    distance = offsets.abs()
    log = 8 + (torch.log(distance.float() / 8) / math.log(128 / 8) * 8).to(torch.long).clamp(min=-99)
    expected = torch.where(offsets < 0, 16, 0) + torch.where(distance < 8, distance, log.clamp(max=15))
    stacked = torch.stack([offsets, torch.zeros_like(offsets)], dim=-1).double()
    assert torch.equal(encoding.at(stacked, (14, 14))[0].long(), expected)
    assert torch.equal(encoding.at(stacked + 0.3, (14, 14))[0].long(), expected)  # rounded
    assert not torch.equal(encoding.at(stacked + 0.7, (14, 14))[0].long(), expected)


# ---- lookhere

# visible keys by name, for a key at (x, y) seen from its query, y down
MASKS = {
    "right": lambda x, y: x >= 0,
    "left": lambda x, y: x <= 0,
    "up": lambda x, y: y <= 0,
    "down": lambda x, y: y >= 0,
    "tri_up": lambda x, y: abs(x) <= -y,
    "tri_down": lambda x, y: abs(x) <= y,
    "tri_left": lambda x, y: abs(y) <= -x,
    "tri_right": lambda x, y: abs(y) <= x,
}
LOOKS = {
    180: [
        "up",
        "down",
        "left",
        "right",
        "tri_up|tri_right",
        "tri_up|tri_left",
        "tri_down|tri_right",
        "tri_down|tri_left",
    ],
    90: ["up&left", "up&right", "down&left", "down&right", "tri_up", "tri_down", "tri_left", "tri_right"],
    45: [
        *("tri_up&left", "tri_down&left", "tri_left&up", "tri_right&up"),
        *("tri_up&right", "tri_down&right", "tri_left&down", "tri_right&down"),
    ],
}


def sees(name, x, y):
    parts = [[MASKS[word](x, y) for word in part.split("&")] for part in name.split("|")]
    return any(all(part) for part in parts)


def lookhere(kind, layer, depth):
    """12 heads as in the source: global slope 2, directed heads 1/2, free ones 1/4 .. 1/256."""
    layer_slope = 1.5 - layer / (depth - 1)
    free = [0.25, 0.0625, 0.015625, 0.00390625]

    def formula(encoding, on):
        def f(h, dy, dx):
            if h >= 8:
                return -2 * layer_slope * free[h - 8] * math.hypot(dy, dx)
            return -2 * layer_slope * 0.5 * math.hypot(dy, dx) if sees(LOOKS[kind][h], -dx, -dy) else -math.inf

        return f

    return formula


@pytest.mark.parametrize("on", [(3, 5), (5, 2), (1, 7), (6, 6)])
@pytest.mark.parametrize("kind", [180, 90, 45])
def test_lookhere(kind, on):
    for layer in (0, 2, 3):
        check(f"lookhere(kind={kind})", lookhere(kind, layer, 4), on, heads=12, layer=layer, depth=4)
    check(
        f"lookhere(kind={kind}, wrap=True)",
        wrapped(lookhere(kind, 1, 4)),
        on,
        heads=12,
        layer=1,
        depth=4,
        mistakes=("axes",) if min(on) > 1 else (),
    )


def test_lookhere_with_other_numbers_of_heads():
    """Our rule: two thirds directed, at least one free, dealt in the order of the source."""
    first, free = LOOKS[90], [1 / 2, 1 / 8, 1 / 32, 1 / 128]
    for heads, directed in [(1, 0), (2, 1), (3, 2), (6, 4), (12, 8), (16, 10), (24, 16)]:
        bias = dense(build("lookhere", heads=heads), (5, 4))
        for h in range(heads):
            if h < directed:
                expected = looped(
                    lambda _, dy, dx, h=h: -1.5 * math.hypot(dy, dx) if sees(first[h % 8], -dx, -dy) else -math.inf,
                    (5, 4),
                    heads=1,
                )
            else:
                slope = free[(h - directed) % 4]
                expected = looped(lambda _, dy, dx, slope=slope: -1.5 * slope * math.hypot(dy, dx), (5, 4), heads=1)
            torch.testing.assert_close(bias[h], expected[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", [180, 90, 45])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lookhere_has_no_empty_row_in_any_precision(kind, dtype):
    for on in [(1, 1), (1, 7), (64, 3)]:
        bias = expand_bias(build(f"lookhere(kind={kind})", heads=12).float().bias(grid(*on)), prefix=1).to(dtype)
        assert not bias.isnan().any()
        assert (bias.diagonal(dim1=-2, dim2=-1) == 0).all()
        assert bias.softmax(-1).isfinite().all()
    assert (bias == -torch.inf).any()


def test_lookhere_edges_are_not_decided_by_rounding(monkeypatch):
    """Coordinates moved by a fraction leave the same keys in view; without the tolerance they would not."""
    encoding = build("lookhere", heads=12).float()
    cells = coordinates((14, 14)).float()[None]

    def hidden(coords):
        return encoding.bias(Positions(coords, (14, 14))).values.isinf()

    moved = cells + torch.tensor([0.1, 100.7])
    assert torch.equal(hidden(moved), hidden(cells))
    monkeypatch.setattr("vitpos.encodings.lookhere.ON_THE_EDGE", 0.0)
    assert not torch.equal(hidden(moved), hidden(cells))


def test_global_slope():
    assert torch.equal(
        dense(build("lookhere(global_slope=0.5)", heads=12), (3, 5)), dense(build("lookhere", heads=12), (3, 5)) / 2
    )


# ---- irpe and deberta


def contextual(encoding, on, prefix=0):
    """Random queries and keys [1, h, T, d], and the bias [h, T, T] that they get."""
    generator = torch.Generator().manual_seed(5)
    shape = (1, encoding.geometry.heads, prefix + on[0] * on[1], encoding.geometry.head_dim)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    value = encoding.bias(grid(*on, dtype=torch.float64))
    assert isinstance(value, Contextual)
    with torch.no_grad():
        return q[0], k[0], contextual_bias(value, prefix, q, k)[0]


def looped_contextual(term, on, q, k, prefix):
    """term(h, q_i, k_j, dy, dx), with offsets None where a prefix token takes part."""
    cells = [None] * prefix + coordinates(on).long().tolist()
    out = torch.empty(q.shape[0], len(cells), len(cells), dtype=torch.float64)
    for h in range(q.shape[0]):
        for i, a in enumerate(cells):
            for j, b in enumerate(cells):
                offset = (None, None) if a is None or b is None else (a[0] - b[0], a[1] - b[1])
                out[h, i, j] = term(h, q[h, i], k[h, j], *offset)
    return out


def piecewise(x, alpha, beta, gamma):
    """The source's index function of a signed whole number."""
    if abs(x) <= alpha:
        return round(x)
    y = min(beta, round(alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha)))
    return int(math.copysign(y, x))


def irpe_bucket(method, dy, dx, ratio):
    coefficients = (ratio, 2 * ratio, 8 * ratio)
    if dy is None:
        return -1
    if method == "euclidean":
        return piecewise(round(math.hypot(dy, dx)), *coefficients)
    beta = int(2 * ratio)
    return (piecewise(dy, *coefficients) + beta) * (2 * beta + 1) + piecewise(dx, *coefficients) + beta


IRPE = [("product", 1.9), ("product", 1.0), ("euclidean", 20.0), ("euclidean", 1.5)]


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("method", "ratio"), IRPE)
@pytest.mark.parametrize("on", ["k", "q", "qk"])
def test_irpe_contextual(on, method, ratio, prefix):
    """As in the source: q meets the vectors for keys at i - j, k those for queries at j - i."""
    encoding = build(f"irpe(on={on!r}, method={method!r}, ratio={ratio}, shared_head={prefix != 1})", training=(4, 9))
    q, k, ours = contextual(encoding, (4, 9), prefix)

    def term(h, q_i, k_j, dy, dx, flip=1):
        here = irpe_bucket(method, dy, dx, ratio)
        there = irpe_bucket(method, *((None, None) if dy is None else (-flip * dy, -flip * dx)), ratio)
        total = 0.0
        if encoding.keys is not None:
            total += q_i @ encoding.keys[h % len(encoding.keys), here]
        if encoding.queries is not None:
            total += k_j @ encoding.queries[h % len(encoding.queries), there]
        return total

    with torch.no_grad():
        torch.testing.assert_close(ours, looped_contextual(term, (4, 9), q, k, prefix), atol=1e-12, rtol=1e-12)
        if "q" in on and method == "product":  # the trap: one index for both

            def trapped(*args):
                return term(*args, flip=-1)

            assert not torch.allclose(ours, looped_contextual(trapped, (4, 9), q, k, prefix), atol=1e-4)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("method", "ratio"), IRPE)
def test_irpe_bias(method, ratio, prefix):
    encoding = build(f"irpe(on='bias', method={method!r}, ratio={ratio}, shared_head={prefix != 1})", training=(4, 9))
    ours = dense(encoding, (4, 9), prefix)
    table = encoding.biases.detach()
    expected = looped(lambda h, dy, dx: table[h, irpe_bucket(method, dy, dx, ratio)].item(), (4, 9), len(table))
    torch.testing.assert_close(ours[:, prefix:, prefix:], expected, atol=1e-12, rtol=0)
    if method == "product":
        assert not torch.allclose(ours[:, prefix:, prefix:], expected.mT, atol=1e-4)
    if prefix:
        skip = table[:, -1, None, None]
        assert torch.equal(ours[:, :prefix], skip.expand(-1, prefix, 36 + prefix))
        assert torch.equal(ours[:, :, :prefix], skip.expand(-1, 36 + prefix, prefix))


def test_irpe_starts_from_zeros_unless_told():
    geometry = Geometry(dim=768, heads=12, head_dim=64, depth=12, grid=(14, 14))
    assert not lookup("irpe")(geometry).keys.any()
    assert lookup("irpe")(geometry, std=0.5).keys.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("table", ["axes", "joint"])
@pytest.mark.parametrize("terms", ["both", "c2p", "p2c"])
@pytest.mark.parametrize("span", [None, 2])
def test_deberta(table, terms, span, prefix):
    """The published code: both terms at the bucket of i - j; the paper's exchanged index is seen to differ."""
    encoding = build(f"deberta(table={table!r}, terms={terms!r}, span={span})")
    s_y, s_x = (3, 5) if span is None else (2, 2)
    q, k, ours = contextual(encoding, (3, 5), prefix)

    def clip(delta, s):
        return 0 if delta <= -s else 2 * s - 1 if delta >= s else delta + s

    def vector(weights, h, dy, dx):
        if dy is None:
            return weights[h, -1]
        if table == "joint":
            return weights[h, clip(dy, s_y) * 2 * s_x + clip(dx, s_x)]
        return weights[h, clip(dy, s_y)] + weights[h, 2 * s_y + clip(dx, s_x)]

    def term(h, q_i, k_j, dy, dx, flip=1):
        total = 0.0
        if terms != "p2c":
            total += q_i @ vector(encoding.keys, h, dy, dx)
        if terms != "c2p":
            total += k_j @ vector(encoding.queries, h, *((None, None) if dy is None else (flip * dy, flip * dx)))
        return total

    def as_the_paper_writes_it(*args):
        return term(*args, flip=-1)

    with torch.no_grad():
        torch.testing.assert_close(ours, looped_contextual(term, (3, 5), q, k, prefix), atol=1e-12, rtol=1e-12)
        if terms != "c2p":
            other = looped_contextual(as_the_paper_writes_it, (3, 5), q, k, prefix)
            assert not torch.allclose(ours, other, atol=1e-4)
    assert encoding.scale(grid(3, 5)) == pytest.approx(1 / math.sqrt(3 if terms == "both" else 2))


def test_deberta_scale_is_on_all_three_terms():
    """With K = Q = 0 the model is `none` with q smaller by sqrt(3); with random ones it is not."""
    model, plain = tiny("deberta", (3, 5), 1, randomize=False), tiny("none", (3, 5), 1, randomize=False)
    x = images((3, 5))
    with torch.no_grad():
        for block in plain.blocks:
            block.attn.qkv.weight[:36] /= math.sqrt(3)
            block.attn.qkv.bias[:36] /= math.sqrt(3)
        assert relative_change(model(x), plain(x)) > 1e-9
        for parameter in model.position.parameters():
            parameter.zero_()
        assert relative_change(model(x), plain(x)) < 1e-12


# ---- all of them

COUNTS = {  # at ViT-B/16@224
    "alibi": 0,
    "alibi2d": 0,
    "lookhere": 0,
    "kerple": 2 * 12,
    "t5": 2 * 32 * 12,
    "rpb": 104_976,
    "rpb(prefix=True)": 104_976 + 432,
    "rpb(wrap=True)": 14 * 14 * 12 * 12,
    "cpb": 7_680 * 12,
    "irpe": 38_400,
    "irpe(on='qk')": 2 * 38_400,
    "irpe(shared_head=False)": 12 * 38_400,
    "irpe(on='bias', shared_head=False)": 50 * 12 * 12,
    "irpe(method='euclidean')": 42 * 64 * 12,
    "deberta": 2 * (28 + 28 + 1) * 768 * 12,
    "deberta(table='joint', terms='c2p')": (28**2 + 1) * 768 * 12,
}


@pytest.mark.parametrize("spec", COUNTS)
def test_parameter_counts(spec):
    position = Position(parse(spec), Geometry(dim=768, heads=12, head_dim=64, depth=12, grid=(14, 14), prefix=1))
    assert sum(p.numel() for p in position.parameters()) == COUNTS[spec]


@pytest.mark.parametrize(
    "spec", ["t5", "irpe", "irpe(on='bias')", "deberta", "rpb", "cpb", "kerple", "lookhere", "alibi"]
)
def test_explicit_cells_equal_the_grid(spec):
    """The compact answer for a full grid and the one for listed coordinates are the same."""
    encoding = build(spec)
    pos = grid(4, 6, dtype=torch.float64)
    listed = Positions(pos.coords, pos.extent)
    whole, pairs = encoding.bias(pos), encoding.bias(listed)
    if isinstance(whole, Contextual):
        assert torch.equal(whole.buckets, pairs.buckets)
        return
    torch.testing.assert_close(expand_bias(whole, 0), expand_bias(pairs, 0), atol=1e-12, rtol=0)
    moved = Positions(pos.coords.flip(1), pos.extent)
    flat = spec in ("alibi", "alibi2d", "kerple")  # the same under a turn by half
    assert flat or not torch.allclose(expand_bias(encoding.bias(moved), 0), expand_bias(whole, 0), atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("t5(num_buckets=30)", "num_buckets.*multiple of 4, got 30; nearest: 28 or 32"),
        ("t5(max_distance=8)", "max_distance=8 must be above 8"),
        ("t5(std=-1)", "std=-1"),
        ("cpb(hidden=0)", "hidden=0 must be at least 1"),
        ("cpb(std=-0.1)", "std=-0.1"),
        ("lookhere(kind=60)", "kind=60 is not a choice; known: 180, 90, 45"),
        ("lookhere(global_slope=-1)", "global_slope=-1.0 must be at least 0"),
        ("irpe(ratio=0.1)", "ratio=0.1 must be at least 0.5"),
        ("irpe(on='v')", "on='v' is not a choice"),
        ("irpe(std=-1)", "std=-1"),
        ("deberta(span=0)", "span=0 must be at least 1"),
        ("deberta(table='joined')", "did you mean joint"),
        ("rpb(std=-1)", "std=-1"),
    ],
)
def test_bad_options(spec, words):
    with pytest.raises(ValueError, match=words):
        build(spec)
