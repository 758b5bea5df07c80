import math

import pytest
import torch
import torch.nn.functional as F
from common import ENCODINGS, GRIDS, coordinates, images, relative_change, tiny

from vitpos import positions
from vitpos.positions import Positions, augment, grid, into, resample_plane, sample_line, sample_plane
from vitpos.spec import REGISTRY


@pytest.mark.parametrize("size", [*GRIDS, (1, 1), (2, 4)])
def test_grid_is_row_major_y_x(size):
    pos = grid(*size, dtype=torch.float64)
    assert torch.equal(pos.coords[0], coordinates(size))
    assert pos.extent == size
    assert pos.full


def test_kept_positions():
    pos = grid(2, 3)
    kept = pos.keep(torch.tensor([[5, 0], [2, 3]]))
    assert kept.coords.tolist() == [[[1.0, 2.0], [0.0, 0.0]], [[0.0, 2.0], [1.0, 0.0]]]
    assert (kept.extent, kept.cells, kept.full) == ((2, 3), True, False)


def test_into_maps_borders_to_borders_and_centres_to_centres():
    corners = torch.tensor([[-0.5, -0.5], [5.5, 9.5], [2.5, 4.5]])
    assert into(corners, (6, 10), (3, 5)).tolist() == [[-0.5, -0.5], [2.5, 4.5], [1.0, 2.0]]


def test_tables_between_entries():
    table = torch.randn(3, 5, 4, dtype=torch.float64)
    at = coordinates((3, 5))
    assert torch.equal(sample_plane(table, at), table.flatten(0, 1))
    y, x = 1.25, 2.5
    by_hand = 0.75 * (0.5 * table[1, 2] + 0.5 * table[1, 3]) + 0.25 * (0.5 * table[2, 2] + 0.5 * table[2, 3])
    torch.testing.assert_close(sample_plane(table, torch.tensor([y, x], dtype=torch.float64)), by_hand)
    outside = torch.tensor([[-7.0, 9.0]], dtype=torch.float64)
    assert torch.equal(sample_plane(table, outside)[0], table[0, 4])
    assert torch.equal(sample_line(table[:, 0], torch.tensor([-1.0, 7.0], dtype=torch.float64)), table[[0, 2], 0])
    for side in (torch.randn(1, 1, 2), torch.randn(1, 3, 2)):
        assert sample_plane(side, torch.zeros(2)).shape == (2,)


@pytest.mark.parametrize(("source", "target"), [((2, 8), (4, 4)), ((4, 6), (6, 4)), ((8, 2), (4, 4)), ((3, 5), (7, 2))])
def test_resampled_table_is_interpolated_from_the_true_grid(source, target):
    table = torch.randn(*source, 3)
    expected = F.interpolate(table.permute(2, 0, 1)[None], target, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    assert torch.equal(resample_plane(table, target), expected)
    constant = resample_plane(torch.ones(*source, 1), target)
    torch.testing.assert_close(constant, torch.ones_like(constant))


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_batch_of_coordinates_equals_each_sample_alone(name):
    model = tiny(name, (3, 5), 1)
    x = images((3, 5))
    here = coordinates((3, 5))
    there = here[torch.randperm(15, generator=torch.Generator().manual_seed(5))]  # the same cells in another order
    with torch.no_grad():
        both = model(x, coords=torch.stack([here, there]), extent=(3, 5))
        for sample, coords in enumerate((here, there)):
            alone = model(x[sample : sample + 1], coords=coords, extent=(3, 5))
            assert relative_change(alone, both[sample : sample + 1]) < 1e-12
        assert relative_change(model(x, coords=here), model(x)) < 1e-12
        swapped = model(x, coords=torch.stack([there, here]), extent=(3, 5))
    if name not in ("none", "logn"):
        assert relative_change(swapped, both) > 1e-4


def test_coordinates_reach_intermediates_too():
    model = tiny("rope_axial", (3, 5), 1)
    x = images((3, 5))
    coords = coordinates((3, 5)) * 1.5
    with torch.no_grad():
        features = model.forward_features(x, coords=coords)
        last, maps = model.forward_intermediates(x, 1, norm=True, coords=coords, output_fmt="NLC")
    assert torch.equal(last, features)
    assert torch.equal(maps[0], features[:, 1:])
    assert relative_change(features, model.forward_features(x)) > 1e-4


def test_augmentation_by_hand():
    """The draws, taken again from the same generator, put through the formula one coordinate at a time."""
    pos = grid(2, 3, dtype=torch.float64)
    out = augment(
        pos, shift=0.3, stretch=1.2, rescale=2.0, jitter=0.4, samples=2, generator=torch.Generator().manual_seed(3)
    )
    again = torch.Generator().manual_seed(3)
    u = [2 * torch.rand(2, 1, n, generator=again, dtype=torch.float64) - 1 for n in (2, 2, 1)]
    moved = torch.randn(2, 6, 2, generator=again, dtype=torch.float64)
    for b in range(2):
        for n, (i, j) in enumerate(coordinates((2, 3)).tolist()):
            for axis, (value, side) in enumerate(((i, 2), (j, 3))):
                c = 2 * (value + 0.5) / side - 1 + 0.3 * u[0][b, 0, axis]
                c = c * math.exp(math.log(1.2) * u[1][b, 0, axis]) * math.exp(math.log(2.0) * u[2][b, 0, 0])
                expected = (c + 1) / 2 * side - 0.5 + max(-0.5, min(0.5, 0.4 * moved[b, n, axis].item()))
                assert out[b, n, axis].item() == pytest.approx(float(expected), abs=1e-12)


def test_augmentation_off_changes_nothing_and_bad_values_are_refused():
    pos = grid(5, 2, dtype=torch.float64)
    torch.testing.assert_close(augment(pos), pos.coords, atol=1e-12, rtol=0)
    for bad in ({"shift": -0.1}, {"stretch": 0.5}, {"rescale": float("inf")}, {"jitter": float("nan")}):
        with pytest.raises(ValueError, match="coordinate augmentation"):
            augment(pos, **bad)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_takes_augmented_coordinates(name):
    model = tiny(name, (3, 5), 1)
    x = images((3, 5))
    coords = augment(grid(3, 5, dtype=torch.float64), shift=0.2, stretch=1.1, rescale=1.5, jitter=0.2, samples=2)
    if name == "cpe":  # a convolution knows no positions between cells
        with pytest.raises(ValueError, match="cpe"):
            model(x, coords=coords)
        return
    with torch.no_grad():
        assert model(x, coords=coords).isfinite().all()


def test_explicit_positions_are_checked():
    for bad in ((4.5, 4), 4, "ab", (2, 2, 2), (0, 3)):
        with pytest.raises(ValueError, match="extent must be two whole numbers"):
            positions.explicit(torch.zeros(4, 2), bad, (2, 2), torch.float32)
    with pytest.raises(ValueError, match="finite"):
        positions.explicit(torch.full((4, 2), float("nan")), None, (2, 2), torch.float32)
    with pytest.raises(TypeError, match="tensor"):
        positions.explicit([[0.0, 0.0]], None, (1, 1), torch.float32)
    with pytest.raises(ValueError, match="extent"):
        positions.explicit(torch.zeros(4, 2), (2, 0), (2, 2), torch.float32)
    pos = positions.explicit(torch.zeros(4, 2), None, (2, 2), torch.float64)
    assert isinstance(pos, Positions)
    assert (pos.extent, pos.coords.dtype, pos.cells, pos.full) == ((2, 2), torch.float64, False, False)


@pytest.mark.parametrize("spec", [name for name in ENCODINGS if name not in ("none", "logn")])
def test_a_transposed_image_with_its_own_places_is_the_same_set(spec):
    """Token k of an H x W grid is at (k // W, k % W) for every encoding: the transposed image, told where each of its
    patches was, gives the same readout; not told, another one, unless the encoding declares that law."""
    for size in ((2, 3), (2, 4)):
        model = tiny(spec, size, 1)
        with torch.no_grad():
            weight = model.patch_embed.proj.weight
            weight.copy_((weight + weight.mT) / 2)  # so that a transposed patch is the same token
            x = images(size)
            expected = model(x)
            turned = x.transpose(2, 3)
            where = torch.tensor([[i, j] for j in range(size[1]) for i in range(size[0])])
            assert relative_change(model(turned, coords=where, extent=size), expected) < 1e-12
            if "transpose" not in REGISTRY[spec].laws:
                assert relative_change(model(turned), expected) > 1e-4


RAMPS = {  # what reads a learned table, and where it lies
    "ape1d": lambda model: model.pos_embed[0, 1:].unflatten(0, model.position.geometry.grid),
    "rpb": lambda model: model.position.layers[0]["rpb"].table.permute(1, 2, 0),
}


@pytest.mark.parametrize("target", [(3, 7), (7, 3), (2, 9), (10, 4)])
@pytest.mark.parametrize("name", RAMPS)
def test_ramps_stay_ramps_of_their_axis(name, target):
    """A table that grows with the row reads so on any grid, and one that grows with the column: axes or scales that
    are swapped twice cancel on squares only."""
    model = tiny(name, (4, 5), 1, depth=1)
    plane = RAMPS[name](model)
    for axis in (0, 1):
        with torch.no_grad():
            steps = torch.arange(plane.shape[axis], dtype=torch.float64)
            plane.copy_((steps[:, None] if axis == 0 else steps[None, :]).unsqueeze(-1).expand_as(plane))
            pos = grid(*target, dtype=torch.float64)
            if name == "ape1d":
                read = model.position.tokens(pos, {"pos_embed": model.pos_embed[:, 1:]})[0].unflatten(0, target)[..., 0]
            else:
                read = model.position.layers[0]["rpb"].bias(pos).values[0]
        assert read.std(dim=1 - axis).max() < 1e-6
        along = read.diff(dim=axis)
        assert along.min() > (-1e-9 if name == "rpb" else 0.01)  # (a table ends where its grid does)
        assert along.max() > 0.1
        other = read.mT if read.shape[0] != read.shape[1] else read
        assert other.std(dim=axis).max() < 1e-6  # the control: the transposed map is a ramp of the other axis
        assert other.std(dim=1 - axis).max() > 0.1


def test_ape2d_keeps_rows_and_columns_apart():
    model = tiny("ape2d", (4, 5), 1)
    encoding = model.position.shared["ape2d"]
    first, second = encoding.parameters()
    for table, axis in ((first, 0), (second, 1)):
        with torch.no_grad():
            for parameter in (first, second):
                parameter.zero_()
            steps = torch.arange(max(table.shape[:-1]), dtype=torch.float64)
            table.copy_(steps.view(*table.shape[:-1], 1).expand_as(table))
            read = encoding.tokens(grid(7, 3, dtype=torch.float64))[0].unflatten(0, (7, 3))[..., 0]
        assert read.std(dim=1 - axis).max() < 1e-6
        assert read.diff(dim=axis).min() > -1e-9
        assert read.std(dim=axis).min() > 0.1
