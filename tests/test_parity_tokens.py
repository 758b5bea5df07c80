"""Encodings added to (or mixing) the tokens, against the same formulas written again with loops in float64, and
against timm where timm has them. Parameters are random and grids are not square; beside each comparison stands one
that must fail."""

import itertools
import math

import pytest
import timm
import torch
from common import coordinates, images, randomize_, relative_change, tiny
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torch.nn.functional import conv2d

import vitpos
from vitpos import positions
from vitpos.encoding import Geometry
from vitpos.encodings.weierstrass import HALF_PERIOD, elliptic
from vitpos.positions import Positions
from vitpos.spec import lookup, parse

SAME, DIFFERENT = 1e-12, 1e-3
GRIDS = [(3, 5), (5, 2), (1, 7)]


def build(spec, grid=(3, 5), dim=12, std=0.5):
    """One encoding on its own, float64, its parameters random."""
    (term,) = parse(spec).terms
    encoding = lookup(term.name)(Geometry(dim, 1, dim, 1, grid), **dict(term.options)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
    return encoding


def added(spec, grid, at=None, **kwargs):
    """What an encoding trained on ``grid`` adds on the grid ``at``: [N, D]."""
    with torch.no_grad():
        return build(spec, grid, **kwargs).tokens(positions.grid(*(at or grid), dtype=torch.float64))[0]


def wave(index, dim, temperature):
    """Vaswani's encoding of one index."""
    out = []
    for k in range(dim // 2):
        phase = index / temperature ** (2 * k / dim)
        out += [math.sin(phase), math.cos(phase)]
    return torch.tensor(out, dtype=torch.float64)


def ends(value, reference, current):
    """Where the centre of patch ``value`` of ``current`` lies on a side of ``reference``: two entries, a weight."""
    at = min(max((value + 0.5) * reference / current - 0.5, 0), reference - 1)
    low = math.floor(at)
    return low, min(low + 1, reference - 1), at - low


# sincos1d


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("resize", ["interpolate", "extrapolate"])
def test_sincos1d_on_its_own_grid(grid, resize):
    ours = added(f"sincos1d(temperature=50.0, resize={resize!r})", grid)
    theirs = torch.stack([wave(i * grid[1] + j, 12, 50.0) for i in range(grid[0]) for j in range(grid[1])])
    assert relative_change(ours, theirs) < SAME
    transposed = torch.stack([wave(j * grid[0] + i, 12, 50.0) for i in range(grid[0]) for j in range(grid[1])])
    if min(grid) > 1:
        assert relative_change(ours, transposed) > DIFFERENT


@pytest.mark.parametrize("at", [(5, 3), (6, 10), (3, 8), (2, 3)])
def test_sincos1d_on_another_grid(at):
    """Recomputed with the current width, or read from the table of the training grid: 3 x 5."""
    recomputed = added("sincos1d(resize='extrapolate')", (3, 5), at)
    resampled = added("sincos1d", (3, 5), at)
    for n, (i, j) in enumerate(itertools.product(range(at[0]), range(at[1]))):
        torch.testing.assert_close(recomputed[n], wave(i * at[1] + j, 12, 1e4), atol=SAME, rtol=0)
        top, bottom, dy = ends(i, 3, at[0])
        left, right, dx = ends(j, 5, at[1])
        expected = sum(
            weight * wave(row * 5 + column, 12, 1e4)
            for row, column, weight in [
                (top, left, (1 - dy) * (1 - dx)),
                (top, right, (1 - dy) * dx),
                (bottom, left, dy * (1 - dx)),
                (bottom, right, dy * dx),
            ]
        )
        torch.testing.assert_close(resampled[n], expected, atol=SAME, rtol=0)
    assert relative_change(recomputed, resampled) > DIFFERENT


def test_sincos1d_stripes():
    """Recomputing on a wider grid gives the start of row 1 what the training grid has elsewhere; resampling keeps
    row 1 at the place of row 1. The model stores the training grid, so that it can."""
    trained = added("sincos1d", (4, 4)).unflatten(0, (4, 4))
    recomputed = added("sincos1d(resize='extrapolate')", (4, 4), (4, 8)).unflatten(0, (4, 8))
    resampled = added("sincos1d", (4, 4), (4, 8)).unflatten(0, (4, 8))
    assert torch.equal(recomputed[1, 0], trained[2, 0])
    assert torch.equal(resampled[1, 0], trained[1, 0])
    model = tiny("sincos1d", (4, 4))
    model.set_input_size(img_size=(8, 16))
    assert model.position.geometry.grid == (4, 4)


def normalised_products(dim, temperature, count):
    table = added(f"sincos1d(temperature={temperature!r})", (1, count), dim=dim)
    return table @ table[0] / (dim / 2)


def test_flattening_hides_the_second_dimension():
    """The stated dot products: on 14 columns the patch below is no nearer than the far end of the row."""
    products = normalised_products(192, 1e4, 200)
    assert round(products[1].item(), 4) == 0.9715
    assert round(products[14].item(), 4) == 0.6526
    assert round(products[13].item(), 4) == 0.6608
    for layout in ("timm", "mae", "moco"):
        table = added(f"sincos2d(layout={layout!r})", (14, 14), dim=192)
        for neighbour in (1, 14):
            assert round((table[0] @ table[neighbour]).item() / 96, 4) == 0.9844
    assert (products.diff() > 0).sum() == 79


@pytest.mark.parametrize(("dim", "temperature", "first"), [(192, 1e4, 24), (192, 100.0, 19), (768, 1e4, 44)])
def test_sinusoid_products_do_not_fall_monotonically(dim, temperature, first):
    rises = (normalised_products(dim, temperature, 200).diff() > 0).nonzero()
    assert rises[0].item() + 1 == first


# sincos2d


def two_dimensional(layout, i, j, dim, temperature):
    bands = dim // 4
    last = bands - 1 if layout == "big_vision" else bands
    omega = [temperature ** (-k / last) for k in range(bands)]
    rows, columns = [i * w for w in omega], [j * w for w in omega]
    order = {
        "timm": [(math.sin, rows), (math.sin, columns), (math.cos, rows), (math.cos, columns)],
        "moco": [(math.sin, rows), (math.cos, rows), (math.sin, columns), (math.cos, columns)],
        "mae": [(math.sin, columns), (math.cos, columns), (math.sin, rows), (math.cos, rows)],
    }
    order["big_vision"] = order["mae"]
    return torch.tensor([f(phase) for f, block in order[layout] for phase in block], dtype=torch.float64)


LAYOUTS = ["timm", "moco", "mae", "big_vision"]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sincos2d_layouts(layout, grid):
    ours = added(f"sincos2d(layout={layout!r}, temperature=30.0)", grid)
    for other in LAYOUTS:
        theirs = torch.stack([two_dimensional(other, i, j, 12, 30.0) for i, j in coordinates(grid).tolist()])
        assert (relative_change(ours, theirs) < SAME) == (other == layout)


@pytest.mark.parametrize("grid", [*GRIDS, (14, 9)])
def test_sincos2d_equals_timm(grid):
    theirs = build_sincos2d_pos_embed(list(grid), dim=48, temperature=1e4)
    with torch.no_grad():
        encoding = lookup("sincos2d")(Geometry(48, 1, 48, 1, grid))
        torch.testing.assert_close(encoding.tokens(positions.grid(*grid))[0], theirs, atol=1e-6, rtol=0)
    reverse = build_sincos2d_pos_embed(list(grid), dim=48, temperature=1e4, reverse_coord=True)
    assert relative_change(encoding.tokens(positions.grid(*grid))[0], reverse) > DIFFERENT  # of the transposed grid


# ape2d


@pytest.mark.parametrize("at", [(3, 5), (5, 3), (6, 10), (4, 2), (1, 1), (9, 7)])
@pytest.mark.parametrize("mode", ["absolute", "fractional"])
def test_ape2d_modes(mode, at):
    """Absolute: patch centres at the same place; fractional: i / H between entries at k / 3."""
    encoding = build(f"ape2d(mode={mode!r})", (3, 5))
    ours = added(f"ape2d(mode={mode!r})", (3, 5), at)

    def read(table, p, side):
        count = len(table)
        if mode == "absolute":
            low, high, weight = ends(p, count, side)
        else:
            fraction = p / side
            low = max(k for k in range(count) if k / count <= fraction + 1e-12)
            high = min(low + 1, count - 1)
            weight = (fraction - low / count) * count
        return (1 - weight) * table[low] + weight * table[high]

    for n, (i, j) in enumerate(itertools.product(range(at[0]), range(at[1]))):
        expected = read(encoding.rows, i, at[0]) + read(encoding.columns, j, at[1])
        torch.testing.assert_close(ours[n], expected.detach(), atol=SAME, rtol=0)


def test_ape2d_modes_differ_off_the_training_grid():
    for at in [(6, 10), (4, 2), (5, 3)]:
        change = relative_change(added("ape2d", (3, 5), at), added("ape2d(mode='fractional')", (3, 5), at))
        assert change > DIFFERENT
    assert torch.equal(added("ape2d", (3, 5)), added("ape2d(mode='fractional')", (3, 5)))
    model = tiny("ape2d(mode='fractional')")
    assert vitpos.resize_policy(model) == "fractional"
    with pytest.raises(ValueError, match="does not offer the resize policy 'interpolate'"):
        vitpos.set_resize(model, "interpolate")
    count = sum(p.numel() for p in vitpos.create_model("vit_base_patch16_224", pos="ape2d").position.parameters())
    assert count == 21_504


# fourier


def gelu(x):
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


@pytest.mark.parametrize("resize", ["interpolate", "extrapolate"])
@pytest.mark.parametrize("at", [(3, 5), (5, 2), (1, 7)])
def test_fourier_equals_loops(at, resize):
    spec = f"fourier(features=6, hidden=4, resize={resize!r})"
    encoding = build(spec, (3, 5), dim=5)
    ours = added(spec, (3, 5), at, dim=5)
    w, w1, b1 = encoding.frequencies.tolist(), encoding.inner.weight.tolist(), encoding.inner.bias.tolist()
    w2, b2 = encoding.outer.weight.tolist(), encoding.outer.bias.tolist()

    def by_loops(y, x, kind):
        phases = [row[0] * y + row[1] * x for row in w]
        waves = [math.cos(p) for p in phases] + [math.sin(p) for p in phases]
        if kind == "sines first":
            waves = waves[3:] + waves[:3]
        waves = [v / math.sqrt(6 if kind != "unscaled" else 1) for v in waves]
        inside = [gelu(b + sum(a * v for a, v in zip(row, waves))) for row, b in zip(w1, b1)]
        return torch.tensor(
            [b + sum(a * v for a, v in zip(row, inside)) for row, b in zip(w2, b2)], dtype=torch.float64
        )

    for n, (i, j) in enumerate(itertools.product(range(at[0]), range(at[1]))):
        y, x = (i, j) if resize == "extrapolate" else ((i + 0.5) * 3 / at[0] - 0.5, (j + 0.5) * 5 / at[1] - 0.5)
        torch.testing.assert_close(ours[n], by_loops(y, x, "published"), atol=SAME, rtol=0)
        for wrong in ("sines first", "unscaled"):
            assert relative_change(ours[n], by_loops(y, x, wrong)) > DIFFERENT
        if i != j:
            assert relative_change(ours[n], by_loops(x, y, "published")) > DIFFERENT


@pytest.mark.parametrize("gamma", [10.0, 0.5])
def test_fourier_gamma_is_the_inverse_standard_deviation(gamma):
    """gamma^-2 is a variance: the inner product of the features is near a Gaussian of width gamma."""
    geometry = Geometry(8, 1, 8, 1, (14, 14))
    encoding = lookup("fourier")(geometry, features=20_000, gamma=gamma)
    assert encoding.frequencies.std().item() * gamma == pytest.approx(1, rel=0.02)
    offset = torch.tensor([0.6, -0.8]) * gamma  # at distance gamma
    kernel = (encoding.frequencies @ offset).cos().mean().item()
    assert kernel == pytest.approx(math.exp(-0.5), abs=0.02)
    assert abs(kernel - math.exp(-0.5 / gamma**2)) > 0.3  # were gamma^-2 the standard deviation


def test_fourier_parameters():
    model = vitpos.create_model("vit_base_patch16_224", pos="fourier")
    assert sum(p.numel() for p in model.position.parameters()) == 50_720
    for bad, words in [("features=7", "multiple of 2"), ("hidden=0", "at least 1"), ("gamma=0", "above 0")]:
        with pytest.raises(ValueError, match=words):
            build(f"fourier({bad})")


# weierstrass


def lattice(half_period):
    return [2 * half_period * complex(m, n) for m, n in itertools.product(range(-12, 13), repeat=2) if (m, n) != (0, 0)]


def weierstrass_by_loops(z):
    """The published sum, 624 terms: with the terms 1 / w^2."""
    points = lattice(HALF_PERIOD)
    p = 1 / z**2 + sum(1 / (z - w) ** 2 - 1 / w**2 for w in points)
    derivative = -2 / z**3 + sum(-2 / (z - w) ** 3 for w in points)
    return p, derivative


@pytest.mark.parametrize("grid", GRIDS)
def test_weierstrass_equals_loops(grid):
    spec = "weierstrass(alpha=0.3)"
    encoding = build(spec, dim=4)
    ours = added(spec, (3, 5), grid, dim=4)
    w3 = min(max(math.log1p(math.exp(encoding.aspect.item())), 0.02), 8)

    def by_loops(u, v):
        p, derivative = weierstrass_by_loops(complex(0.4 * 2 * HALF_PERIOD * u, 0.4 * 2 * w3 * v))
        alpha = math.exp(encoding.log_alpha.item())
        squeezed = [math.tanh(alpha * part) for part in (p.real, p.imag, derivative.real, derivative.imag)]
        rows = zip(encoding.project.weight.tolist(), encoding.project.bias.tolist())
        raw = [b + sum(a * v for a, v in zip(row, squeezed)) for row, b in rows]
        mean = sum(raw) / 4
        spread = math.sqrt(sum((r - mean) ** 2 for r in raw) / 4 + 1e-5)
        norm = zip(raw, encoding.norm.weight.tolist(), encoding.norm.bias.tolist())
        return torch.tensor(
            [encoding.gain.item() * ((r - mean) / spread * g + b) for r, g, b in norm], dtype=torch.float64
        )

    cells = list(itertools.product(range(grid[0]), range(grid[1])))
    theirs = torch.stack([by_loops((j + 0.5) / grid[1], (i + 0.5) / grid[0]) for i, j in cells])
    assert relative_change(ours, theirs) < SAME
    swapped = torch.stack([by_loops((i + 0.5) / grid[0], (j + 0.5) / grid[1]) for i, j in cells])
    corners = torch.stack([by_loops((j + 1) / grid[1], (i + 1) / grid[0]) for i, j in cells])
    assert min(relative_change(ours, swapped), relative_change(ours, corners)) > DIFFERENT


def test_weierstrass_lattice_is_not_the_one_it_is_labelled():
    """g2 = 60 times the sum of w^-4 is 1/4 for the lattice in use; the label, g2 = 1, needs another half-period."""

    def g2(half_period):
        return 60 * sum(w**-4 for w in lattice(half_period))

    assert g2(HALF_PERIOD).real == pytest.approx(0.25, abs=5e-4)
    assert g2(1.85407468).real == pytest.approx(1, abs=2e-3)
    assert abs(140 * sum(w**-6 for w in lattice(HALF_PERIOD))) < 1e-12  # g3
    assert abs(sum(w**-2 for w in lattice(HALF_PERIOD))) < 1e-12  # the terms left out of the sum
    x = torch.tensor([0.3, 0.8, 1.2, 2.0], dtype=torch.float64)
    y = torch.tensor([0.2, 0.1, 0.5, 0.6], dtype=torch.float64)
    parts = elliptic(x, y)
    p, derivative = torch.complex(parts[:, 0], parts[:, 1]), torch.complex(parts[:, 2], parts[:, 3])
    for claimed, fits in [(0.25, True), (1.0, False)]:  # P'^2 = 4 P^3 - g2 P - g3
        left_over = (derivative**2 - 4 * p**3 + claimed * p).abs()
        assert (left_over < 2e-3).all() if fits else (left_over > 0.1).all()


def test_weierstrass_is_finite_at_its_poles():
    """No grid reaches one; explicit coordinates may. Gradients are finite too."""
    encoding = build("weierstrass")
    corner = Positions(torch.tensor([[[-0.5, -0.5], [0.0, 12.0]]], dtype=torch.float64), extent=(3, 5))
    out = encoding.tokens(corner)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in encoding.parameters())
    for grid in [(1, 1), (64, 64), (64, 1)]:
        single = lookup("weierstrass")(Geometry(8, 1, 8, 1, grid))
        tokens = single.tokens(positions.grid(*grid))
        tokens.pow(2).sum().backward()
        assert tokens.isfinite().all()
        assert single.aspect.grad.isfinite().all()


def test_weierstrass_saturates_at_its_corner():
    """At 28 x 28 six tokens next to the pole have nearly the same features; at 14 x 14 none."""
    counts = {}
    for side in (14, 28):
        encoding = lookup("weierstrass")(Geometry(8, 1, 8, 1, (side, side))).double()
        inputs = []
        encoding.project.register_forward_pre_hook(lambda _, given, inputs=inputs: inputs.append(given[0][0]))
        encoding.tokens(positions.grid(side, side, dtype=torch.float64))
        distance = torch.cdist(inputs[0], inputs[0]) + torch.eye(side**2, dtype=torch.float64)
        counts[side] = (distance.amin(1) < 1e-3).sum().item()
    assert counts == {14: 0, 28: 6}


# cpe


def neighbour(p, side, padding):
    """The index that a filter sees at ``p``, perhaps beyond the border: None for a zero."""
    if 0 <= p < side:
        return p
    if padding == "zeros":
        return None
    if padding == "circular":
        return p % side
    while not 0 <= p < side:  # mirror at the last patches
        p = -p if p < 0 else 2 * (side - 1) - p
        if side == 1:
            return 0
    return p


def cpe_by_loops(encoding, rows, grid, cells=None, padding=None):
    """``rows`` [N, D] of the patches at ``cells`` (all, without): no tensor padding, one filter entry at a time."""
    padding = padding or encoding.padding
    cells = cells or [(i, j) for i in range(grid[0]) for j in range(grid[1])]
    where = {cell: n for n, cell in enumerate(cells)}
    weight, bias = encoding.conv.weight[:, 0], encoding.conv.bias
    reach = weight.shape[-1] // 2
    out = []
    for i, j in cells:
        total = rows[where[i, j]] + bias
        for a, b in itertools.product(range(-reach, reach + 1), repeat=2):
            place = neighbour(i + a, grid[0], padding), neighbour(j + b, grid[1], padding)
            if place in where:
                total = total + weight[:, a + reach, b + reach] * rows[where[place]]
        out.append(total)
    return torch.stack(out)


PADDINGS = ["zeros", "circular", "reflect"]


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("grid", [*GRIDS, (1, 1), (4, 4)])
@pytest.mark.parametrize("padding", PADDINGS)
def test_cpe_equals_loops(padding, grid, kernel):
    encoding = build(f"cpe(padding={padding!r}, kernel={kernel})", grid)
    count = grid[0] * grid[1]
    rows = torch.randn(2, count, 12, dtype=torch.float64)
    with torch.no_grad():
        ours = encoding.mix(rows, positions.grid(*grid, dtype=torch.float64))
        for sample in range(2):
            torch.testing.assert_close(ours[sample], cpe_by_loops(encoding, rows[sample], grid), atol=SAME, rtol=0)
        if kernel > 1:
            for other in set(PADDINGS) - {padding}:
                wrong = cpe_by_loops(encoding, rows[0], grid, padding=other)
                same = {padding, other} == {"circular", "reflect"} and grid == (1, 1)
                assert (relative_change(ours[0], wrong) > DIFFERENT) != same


@pytest.mark.parametrize("padding", PADDINGS)
def test_cpe_on_dropped_patches(padding):
    """Kept patches are scattered into zeros; each sample has its own."""
    grid = (3, 5)
    encoding = build(f"cpe(padding={padding!r})", grid)
    rows = torch.randn(2, 15, 12, dtype=torch.float64)
    kept = torch.tensor([[7, 0, 14, 3, 8, 2], [1, 2, 6, 11, 13, 12]])
    pos = positions.grid(*grid, dtype=torch.float64).keep(kept)
    given = rows.gather(1, kept.unsqueeze(-1).expand(-1, -1, 12))
    with torch.no_grad():
        ours = encoding.mix(given, pos)
        for sample in range(2):
            cells = [(n // 5, n % 5) for n in kept[sample].tolist()]
            expected = cpe_by_loops(encoding, given[sample], grid, cells)
            torch.testing.assert_close(ours[sample], expected, atol=SAME, rtol=0)
            whole = encoding.mix(rows[sample : sample + 1], positions.grid(*grid, dtype=torch.float64))
            assert relative_change(ours[sample], whole[0, kept[sample]]) > DIFFERENT


@pytest.mark.parametrize("prefix", [1, 5])
def test_cpe_acts_after_the_first_block_and_passes_by_prefix_tokens(prefix):
    """Against timm's own blocks with torch's convolution put between the first and the second."""
    model = tiny("cpe", (3, 5), prefix, depth=3)
    plain = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=(6, 10),
        patch_size=2,
        embed_dim=36,
        depth=3,
        num_heads=3,
        num_classes=7,
        reg_tokens=prefix - 1,
        pos_embed="none",
    ).double()
    state = model.state_dict()
    weight, bias = state.pop("position.shared.cpe.conv.weight"), state.pop("position.shared.cpe.conv.bias")
    plain.load_state_dict(state)
    x = images((3, 5))
    with torch.no_grad():
        tokens = plain._pos_embed(plain.patch_embed(x))
        for layer, block in enumerate(plain.eval().blocks):
            tokens = block(tokens)
            if layer == 0:
                image = tokens[:, prefix:].transpose(1, 2).reshape(2, 36, 3, 5)
                image = image + conv2d(image, weight, bias, padding=1, groups=36)
                tokens = torch.cat([tokens[:, :prefix], image.flatten(2).transpose(1, 2)], dim=1)
        assert relative_change(model.forward_features(x), plain.norm(tokens)) < SAME
        assert relative_change(model.forward_features(x), plain.forward_features(x)) > DIFFERENT


def test_cpe_circular_shifts():
    """Circular padding makes the patches' features move with the image, exactly; the other paddings do not."""
    x = images((4, 6))
    shifted = x.roll((4, -2), dims=(2, 3))
    changes = {}
    for padding in PADDINGS:
        model = tiny(f"cpe(padding={padding!r})", (3, 5), 1, depth=3)
        with torch.no_grad():
            maps, moved = (model.forward_intermediates(v, [2], intermediates_only=True)[0] for v in (x, shifted))
        changes[padding] = relative_change(moved, maps.roll((2, -1), dims=(2, 3)))
    assert changes["circular"] < SAME
    assert min(changes["zeros"], changes["reflect"]) > DIFFERENT


def test_cpe_explicit_coordinates():
    """Neighbours are what the coordinates say; what cannot lie on a grid is refused."""
    model = tiny("cpe", (3, 5))
    x, here = images((3, 5)), coordinates((3, 5))
    with torch.no_grad():
        plain = model(x)
        assert relative_change(model(x, coords=here), plain) < SAME
        assert relative_change(model(x, coords=here - 40), plain) < SAME
        assert relative_change(model(x, coords=here.flip(0)), plain) > DIFFERENT
        assert relative_change(model(x, coords=here * 2, extent=(6, 10)), plain) > DIFFERENT
        ring = tiny("cpe(padding='circular')", (3, 5))
        around = (here + torch.tensor([1.0, 3.0])) % torch.tensor([3.0, 5.0])
        assert relative_change(ring(x, coords=around), ring(x)) < SAME
        assert relative_change(model(x, coords=around), plain) > DIFFERENT
        for coords, words in [
            (here + 0.25, "whole numbers; got 0.25"),
            (here * torch.nan, "must be finite"),
            (here * 2, "span 5x9 patches, more than the grid of 3x5"),
            (here.clamp(max=2), "two patches have the same coordinates"),
        ]:
            with pytest.raises(ValueError, match=words):
                model(x, coords=coords)


def test_cpe_options():
    model = vitpos.create_model("vit_base_patch16_224", pos="cpe")
    assert sum(p.numel() for p in model.position.parameters()) == 7_680
    for kernel, words in [(4, "must be odd; nearest: 3 or 5"), (0, "at least 1"), (-3, "at least 1")]:
        with pytest.raises(ValueError, match=words):
            build(f"cpe(kernel={kernel})")


# all of them


TOKENS = ["sincos1d", "sincos2d", "ape2d", "ape2d(mode='fractional')", "fourier", "weierstrass"]


@pytest.mark.parametrize("spec", TOKENS)
def test_float32_and_irregular_positions(spec):
    """float32 within 1e-6 of float64; explicit positions equal the grid's; each sample may have its own."""
    grid = (7, 4)
    double = build(spec, (3, 5), dim=12, std=0.1)
    single = build(spec, (3, 5), dim=12, std=0.1).float()
    with torch.no_grad():
        expected = double.tokens(positions.grid(*grid, dtype=torch.float64))
        torch.testing.assert_close(single.tokens(positions.grid(*grid)).double(), expected, atol=1e-6, rtol=1e-6)
        coords = torch.stack([coordinates(grid), coordinates(grid).flip(0) + 0.25])
        each = double.tokens(Positions(coords, grid))
        assert each.shape == (2, 28, 12)
        torch.testing.assert_close(each[:1], expected, atol=SAME, rtol=0)
        torch.testing.assert_close(each[1:], double.tokens(Positions(coords[1:], grid)), atol=SAME, rtol=0)
        assert relative_change(each[1].flip(0), expected[0]) > DIFFERENT


@pytest.mark.parametrize("spec", TOKENS)
def test_precision_is_the_encodings_own(spec):
    """Neither autocast nor a bfloat16 model changes a bit of what is added, before it joins the tokens."""
    model = tiny(spec).float()
    pos = positions.grid(4, 6)
    with torch.no_grad():
        plain = model.position.tokens(pos, {})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model.position.tokens(pos, {}), plain)
        assert torch.equal(model.bfloat16().position.tokens(pos, {}), plain)
    assert plain.dtype == torch.float32
    assert not torch.equal(plain.bfloat16().float(), plain)


@pytest.mark.parametrize("name", ["ape2d", "fourier", "weierstrass", "cpe"])
def test_weights_can_be_drawn_again(name):
    """``reset_parameters`` undoes a change of every weight, up to the draw."""
    model = tiny(name, randomize=False)
    encoding = model.position.shared[name]
    before = {n: p.detach().clone() for n, p in encoding.named_parameters()}
    randomize_(model, std=50.0)
    encoding.reset_parameters()
    for n, p in encoding.named_parameters():
        assert p.std(correction=0).item() == pytest.approx(before[n].std(correction=0).item(), rel=0.5), n
        assert p.abs().max() < 10, n


def test_widths_that_cannot_be_served():
    with pytest.raises(ValueError, match="sincos1d needs a model width that is a multiple of 2, got 7"):
        build("sincos1d", dim=7)
    with pytest.raises(ValueError, match=r"temperature=0\.0 must be above 0"):
        build("sincos1d(temperature=0.0)")
    for bad in ("alpha=0.0", "gain=-1.0"):
        with pytest.raises(ValueError, match="weierstrass"):
            build(f"weierstrass({bad})")
