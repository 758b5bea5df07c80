"""Factorial: parts that were planted are found, relative encodings have none, and the derivative is the derivative."""

import numpy as np
import pytest
import torch
from fakes import CLASSES, Constant, Squares
from probing import encoded, probe, subject

from vitpos import positions
from vitpos.probes import factorial

WEIGHT = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [0.0, -2.0]])  # logits per patch of mean coordinate


def cells(x, coords):
    """The coordinates that are given, or those of the image's own grid."""
    return positions.grid(x.shape[2] // 4, x.shape[3] // 4, dtype=x.dtype).coords if coords is None else coords


class Additive(Constant):
    """Logits: a linear function of the mean coordinate plus `content` times a function of the image."""

    def __init__(self, content=0.0):
        super().__init__()
        self.position, self.content = encoded("none").position, content

    def forward(self, x, coords=None, extent=None):
        coords = cells(x, coords)
        where = torch.arange(x.shape[3], dtype=x.dtype)
        content = (x.amax((1, 2)) * where).sum(1, keepdim=True) * torch.arange(CLASSES, dtype=x.dtype)
        return coords.mean(1) @ WEIGHT.to(x.dtype).mT + self.content * content + 0 * self.weight[0]


def drifts(row):
    return {name: entry["value"] for name, entry in row["drift"].items()}


def test_planted_parts_are_found():
    offset = (1.0, 0.5)
    found, arrays = probe("factorial", Additive(), options={"offsets": [list(offset)]})
    by = (WEIGHT @ torch.tensor(offset)).norm().item()
    for name, wanted in dict(ordinary=0, following=by, encoding=by, coordinates=by, interaction=0).items():
        np.testing.assert_allclose(arrays[f"drift_{name}"], wanted, atol=1e-4, err_msg=name)
    assert found["gradient"]["offset_share"]["value"] == pytest.approx(1)
    grid = torch.tensor(found["gradient"]["map"])
    torch.testing.assert_close(grid, torch.full((3, 4), 5 / 12))  # |(3, 4)| over 12 places
    assert found["rows"][0]["decisions"]["ordinary"]["value"] == 0
    # Far enough, and all decisions but those of the shifted image are others.
    (row,) = probe("factorial", Additive(), options={"offsets": [[2, 3]]})[0]["rows"]
    decisions = {name: entry["value"] for name, entry in row["decisions"].items()}
    assert decisions == {"ordinary": 0, "following": 1, "encoding": 1, "coordinates": 1}
    # With content the parts add up without interaction, and content alone has no part of the coordinates.
    _, arrays = probe("factorial", Additive(content=1.0), options={"offsets": [list(offset)]})
    np.testing.assert_allclose(arrays["drift_coordinates"], by, rtol=1e-4)
    np.testing.assert_allclose(arrays["drift_interaction"], 0, atol=1e-3)
    assert arrays["drift_ordinary"].min() > 0.1


class Tracking(Additive):
    """Logits: a linear function of the coordinates that the content has, weighted by its mass; class 1 near the corner.

    What follows the content is the same again, whatever patch it is in.
    """

    def forward(self, x, coords=None, extent=None):
        mass = torch.nn.functional.avg_pool2d(x * 0.5 + 0.25, 4).flatten(1)  # [b, 12]
        where = (mass[..., None] * cells(x, coords)).sum(1)
        near = 2.8 * mass.sum(1, keepdim=True) * torch.tensor([0, 1, 0, 0], dtype=x.dtype)
        return where @ WEIGHT.to(x.dtype).mT + near + 0 * self.weight[0]


def test_coordinates_follow_the_content_and_not_the_other_way():
    offsets = [[1, 0], [0, 1], [0, 2], [1, 1]]
    images = Squares(n=39)  # one image fewer of class 1
    found, arrays = probe("factorial", Tracking(), images, options={"offsets": offsets})
    assert set(arrays["pred"]) == set(arrays["pred_both"].flat) == {1}
    assert set(arrays["pred_shifted"].flat) == {0}
    for effect in ("following", "interaction"):
        np.testing.assert_allclose(arrays[f"drift_{effect}"], 0, atol=1e-4)
    mass = images.objects.mean((1, 2, 3)).numpy()
    for row, drift, offset in zip(found["rows"], arrays["drift_ordinary"], offsets):
        by = (WEIGHT @ torch.tensor(offset, dtype=torch.float32)).tolist()
        np.testing.assert_allclose(drift, mass * np.linalg.norm(by), rtol=1e-4)
        decisions = {name: entry["value"] for name, entry in row["decisions"].items()}
        assert decisions["following"] == 0
        assert decisions["ordinary"] == decisions["encoding"] == 1
        accuracy = {name: entry["value"] for name, entry in row["accuracy"].items()}
        assert (accuracy["plain"], accuracy["both"], accuracy["shifted"]) == (9 / 39, 9 / 39, 10 / 39)
    for effect in ("encoding", "coordinates"):
        np.testing.assert_allclose(arrays[f"drift_{effect}"], arrays["drift_ordinary"], rtol=1e-4)


@pytest.mark.parametrize(
    ("pos", "absolute"), [("none", False), ("rope_axial", False), ("rpb", False), ("ape1d", True), ("sincos2d", True)]
)
def test_encodings_that_know_offsets_only_have_no_part(pos, absolute):
    images = Squares(n=12, textured=True)
    found, arrays = probe("factorial", encoded(pos, std=0.3), images)
    assert [row["offset"] for row in found["rows"]][:2] == [[0.25, 0.0], [0.0, 0.25]]
    scale = arrays["norm"].mean()
    for name in ("encoding", "coordinates", "interaction"):
        assert (arrays[f"drift_{name}"].max() > 1e-3 * scale) == absolute, name
    ordinary = arrays["drift_ordinary"]
    assert (
        (ordinary[:6] > 1e-3 * scale).any(axis=1).all()
    )  # fractions of a patch change the tokens, whatever the encoding
    if pos == "none":
        assert "no differentiable function" in found["gradient"]["not_applicable"]
        assert ordinary[6:8].max() < 1e-5  # whole patches on black: the same set of patches, as nothing leaves
    else:
        assert (found["gradient"]["offset_share"]["value"] > 1e-3) == absolute


def test_the_derivative_is_that_by_the_coordinates():
    model, images = encoded("sincos2d", std=0.3).double(), Squares(n=3, textured=True)
    _, arrays = probe("factorial", model.float(), images, options={"offsets": [[1, 0]]})
    exact = subject(model, images).precise()
    pixels, coords = exact.pixels(exact.indices), positions.grid(3, 4, dtype=torch.float64).coords
    best = exact.logits(pixels).argmax(1)
    step = torch.zeros_like(coords)
    slopes = []
    for axis in (0, 1):
        step[0, 7, axis] = 1e-5
        ends = [exact.logits(pixels, coords=coords + sign * step)[torch.arange(3), best] for sign in (1, -1)]
        slopes.append((ends[0] - ends[1]) / 2e-5)
        step.zero_()
    expected = torch.stack(slopes).norm(dim=0).detach().numpy()
    np.testing.assert_allclose(arrays["gradient/magnitude"][1, 3], expected, rtol=1e-5)


def test_encodings_that_refuse_fractions_keep_whole_steps():
    found, _ = probe("factorial", encoded("cpe"), Squares(n=8))
    assert [row["offset"] for row in found["rows"]] == [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]]
    assert "whole numbers" in found["refused"][0]["why"]
    assert len(found["refused"]) == 6
    assert "differentiable" in found["gradient"]["not_applicable"]


def test_the_cell_of_image_and_grid_is_plain_evaluation():
    model, images = encoded("rpb"), Squares(textured=True)
    _, arrays = probe("factorial", model, images, options={"offsets": [[1, 0]]})
    sub = subject(model, images)
    with torch.inference_mode():
        plain = torch.cat([sub.logits(pixels) for _, pixels in sub.loaded()])
    np.testing.assert_array_equal(arrays["pred"], plain.argmax(1).numpy())


def test_offsets_are_checked():
    assert (0.5, 0.0) in factorial.resolve_offsets("auto", (4, 4), (12, 16))
    assert (0.25, 0.0) not in factorial.resolve_offsets("auto", (2, 2), (12, 16))
    for bad, message in (([[0.3, 0]], "no whole number of pixels"), ([[5, 0]], "within the image"), ("x", "auto or"),
                         ([1], "a pair"), ([], "auto or")):  # fmt: skip
        with pytest.raises(ValueError, match=f"factorial.offsets.*{message}"):
            factorial.resolve_offsets(bad, (4, 4), (12, 16))


def test_what_takes_no_coordinates_says_so():
    assert "no coordinates" in probe("factorial", Constant())[0]["not_applicable"]
