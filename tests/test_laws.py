"""Each law that an encoding declares holds at the readout of a two-block model; each one that it does not declare
is seen to fail. Parameters are random, float64, on grids whose sides differ."""

import pytest
import torch
from common import ENCODINGS, GRIDS, PATCH, PREFIXES, SPECS, coordinates, images, relative_change, tiny

import vitpos
from vitpos.encoding import NO_PREFIX
from vitpos.spec import options

HOLDS, FAILS = 1e-12, 1e-4


def change(law, name, grid, prefix):
    """How much the readout changes under the law's transformation."""
    model = tiny(name, grid, prefix)
    x = images(grid)
    here = coordinates(grid)
    with torch.no_grad():
        plain = model(x)
        if law == "offset":
            moved = model(x, coords=here + torch.tensor([2.0, -3.0]), extent=grid)
            plain = model(x, coords=here, extent=grid)
        elif law == "circular":
            moved = model(x.roll((PATCH, PATCH), dims=(2, 3)))
        elif law == "transpose":
            moved = model(x, coords=here.flip(-1), extent=grid[::-1])
            plain = model(x, coords=here, extent=grid)
    return relative_change(moved, plain)


def holds(law, spec, prefix):
    return law in SPECS[spec] or (prefix == 0 and law + NO_PREFIX in SPECS[spec])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("law", ["offset", "circular", "transpose"])
def test_law(law, name, grid, prefix):
    measured = change(law, name, grid, prefix)
    if holds(law, name, prefix):
        assert measured < HOLDS
    elif min(grid) > 1:  # on one row, an encoding can be invariant by accident
        assert measured > FAILS


FLATTENED = {"rope1d", "sincos1d", "alibi"}  # their index i W + j knows the width of the grid


@pytest.mark.parametrize("name", ENCODINGS)
def test_resize_policies(name):
    """``extrapolate`` does not see the extent (flattened: its height); ``interpolate`` and ``normalized`` see the same
    place of the image at the same place; other policies do neither."""
    grid = (3, 5)
    encoding = next(iter(tiny(name, grid, depth=1).position.encodings()))
    x, here = images(grid), coordinates(grid)
    for policy in encoding.resize_choices():
        if policy != "normalized" and "resize" not in options(name):
            continue
        model = vitpos.set_resize(tiny(name, grid), policy)
        with torch.no_grad():
            plain = model(x, coords=here, extent=grid)
            taller = model(x, coords=here, extent=(6, 5))
            wider = model(x, coords=here, extent=(6, 10))
            rescaled = model(x, coords=(here + 0.5) * 2 - 0.5, extent=(6, 10))
        same, others = {
            "extrapolate": (taller, [wider, rescaled]) if name in FLATTENED else (wider, [rescaled]),
            "interpolate": (rescaled, [wider]),
            "normalized": (rescaled, [wider]),
        }.get(policy, (plain, [taller, wider, rescaled]))
        assert relative_change(same, plain) < HOLDS
        for other in others:
            assert relative_change(other, plain) > FAILS


def test_a_bag_of_patches_has_no_order():
    grid = (3, 5)
    model = tiny("none", grid)
    x = images(grid)
    patches = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # [B, C, H, W, p, p]
    order = torch.randperm(15, generator=torch.Generator().manual_seed(3))
    shuffled = patches.flatten(2, 3)[:, :, order].unflatten(2, grid)
    shuffled = shuffled.permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    with torch.no_grad():
        assert relative_change(model(shuffled), model(x)) < HOLDS
        ordered = tiny("sincos2d", grid)
        assert relative_change(ordered(shuffled), ordered(x)) > FAILS
