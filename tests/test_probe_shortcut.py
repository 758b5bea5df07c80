"""Shortcut: generated images are as described, readers of known kinds get the answers they must, trained ones too."""

import numpy as np
import pytest
import torch
from fakes import Constant, Squares
from probing import SMALL, encoded, probe
from torch import nn

import vitpos
from vitpos import probes, seeds
from vitpos.probes import shortcut

GRID, CELL = 6, 4


def drawn(task, place, n=400, rho=0.9):
    labels = torch.arange(n) % shortcut.SETS[task][0]
    images, where = shortcut.drawing(task, place, rho, GRID, CELL)(labels, seeds.generator(1, place))
    return labels, images, where


class Reader(nn.Module):
    """Answers by a function of the raw generated image."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return nn.functional.one_hot(self.answer(x * shortcut.STD + shortcut.MEAN), 4).float()


def centre(x, axis):
    """Where the content is [n], in pixels."""
    mass = (x.amax(1) > 1e-4).float().sum(2 - axis)
    return (mass * torch.arange(mass.shape[1])).sum(1) / mass.sum(1)


def half(x):
    return (centre(x, 0) > x.shape[-1] / 2).long()


def quadrant(x):
    return 2 * half(x) + (centre(x, 1) > x.shape[-1] / 2).long()


def relation(x):
    red, green = (centre(x[:, [channel]], 1) for channel in (0, 1))
    return (red > green).long()


def scores(task, answer):
    arrays = {"cell": np.array(CELL)}
    classes, _, tests = shortcut.SETS[task]
    for place in tests:
        draw = shortcut.drawing(task, place, 0.9, GRID, CELL)
        found = shortcut.tested(Reader(answer), draw, classes, 240, place, torch.device("cpu"))
        found["pred"] = found["pred"][None]
        arrays |= {f"{task}/{place}/{key}": array for key, array in found.items()}
    entry = probes.get("shortcut").summarize(arrays, np.zeros(0))["tasks"][task]
    follows = {place: test["position_following"] for place, test in entry["tests"].items()}
    return {place: test["accuracy"]["value"] for place, test in entry["tests"].items()}, follows, entry["gap"]


def test_a_reader_of_the_position_alone_is_right_and_wrong_with_it():
    accuracy, _, gap = scores("red_green", half)
    assert accuracy["similar"] == 1
    assert accuracy["dissimilar"] == 0
    assert gap == {"similar - dissimilar": 1}
    accuracy, follows, gap = scores("quadrant", quadrant)
    assert accuracy["aligned"] == 1
    assert accuracy["swapped"] == 0
    assert follows["swapped"]["value"] == 1
    assert follows["aligned"] is None
    assert gap == {"aligned - swapped": 1}


def test_a_reader_of_the_relation_needs_no_position():
    accuracy, follows, gap = scores("red_green", relation)
    assert set(accuracy.values()) == {1}
    assert follows["dissimilar"]["value"] == 0
    assert gap == {"similar - dissimilar": 0}
    accuracy, follows, _ = scores("quadrant", lambda x: torch.zeros(len(x), dtype=torch.long))
    assert set(accuracy.values()) == {0.25}


def test_both_classes_of_red_green_are_the_same_set_of_patches():
    labels, images, _ = drawn("red_green", "similar")
    patches = nn.functional.unfold(images, CELL, stride=CELL).mT  # [n, patches, 3 * 4 * 4]
    for colour, count in (((0, 0, 0), GRID**2 - 2), ((1, 0, 0), 1), ((0, 1, 0), 1)):
        whole = torch.tensor(colour).repeat_interleave(CELL**2)
        assert ((patches == whole).all(-1).sum(1) == count).all()
    assert (half(images) == labels).all()
    assert (half(drawn("red_green", "dissimilar")[1]) == 1 - labels).all()
    assert 0.4 < (half(drawn("red_green", "anywhere")[1]) == labels).float().mean() < 0.6


@pytest.mark.parametrize(
    ("place", "agreeing"),
    [("aligned", (1, 1)), ("swapped", (0, 0)), ("uniform", (0.18, 0.32)), ("correlated", (0.86, 0.94))],
)
def test_quadrants_go_with_classes_as_said(place, agreeing):
    labels, images, where = drawn("quadrant", place)
    assert (quadrant(images) == where).all()
    assert agreeing[0] <= (where == labels).float().mean() <= agreeing[1]


def test_held_out_places_are_disjoint():
    assert set(drawn("held_out", "seen")[2].tolist()) == {0, 1, 2}
    assert set(drawn("held_out", "unseen")[2].tolist()) == {3}

    def touches(images):
        edge = torch.ones(GRID * CELL, GRID * CELL)
        edge[1:-1, 1:-1] = 0
        return (images.amax(1) * edge).amax((1, 2)) > 0

    assert not touches(drawn("centre", "centre")[1]).any()
    assert touches(drawn("centre", "border")[1]).all()


def test_trained_networks_answer_as_they_must():
    options = {"tasks": ["red_green"], "steps": 60, "batch": 32, "grid": 4, "test_images": 64}
    none, arrays = probe("shortcut", encoded("none"), options=options)
    assert {test["accuracy"]["value"] for test in none["tasks"]["red_green"]["tests"].values()} == {0.5}
    assert {test["constant"] for test in none["tasks"]["red_green"]["tests"].values()} == {"yes"}
    assert arrays["red_green/similar/pred"].shape == (1, 64)
    sincos, _ = probe("shortcut", encoded("sincos2d"), options=options)
    tests = sincos["tasks"]["red_green"]["tests"]
    assert tests["similar"]["accuracy"]["value"] > 0.95
    assert tests["dissimilar"]["accuracy"]["value"] < 0.05


def test_a_model_not_made_by_name_says_so():
    assert "not made by name" in probe("shortcut", Constant())[0]["not_applicable"]
    torch.manual_seed(0)
    narrow = vitpos.create_model("vit_tiny_patch16_224", pos="none", **(SMALL | {"patch_size": (4, 2)}))
    assert "4x2 px are no square" in probe("shortcut", narrow, Squares(n=4))[0]["not_applicable"]


@pytest.mark.parametrize(
    "options", [{"tasks": ["rgb"]}, {"steps": 0}, {"test_images": 3}, {"grid": 5}, {"rho": 1.5}, {"seeds": 0}]
)
def test_bad_options(options):
    with pytest.raises(ValueError, match=f"shortcut.*{next(iter(options))}"):
        probe("shortcut", encoded("none"), options=options)


def test_it_runs_only_when_it_is_named():
    assert "shortcut" in probes.names()
    assert "shortcut" not in probes.default_names()
