"""Patch shuffle: what is a set of patches loses nothing; what reads the arrangement does."""

import numpy as np
import pytest
import torch
from fakes import Brightness, Constant, Quadrant, Scenes, Squares
from probing import encoded, probe, subject

from vitpos import probes
from vitpos.probes import shuffle


def test_blocks_change_places_as_written():
    image = torch.arange(24.0).view(1, 1, 4, 6)
    order = torch.tensor([[5, 0, 1, 2, 3, 4]])  # 2x3 blocks of 2x2 pixels
    moved = shuffle.shuffle_blocks(image, (2, 2), order)
    blocks = [image[0, 0, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] for i in range(2) for j in range(3)]
    seen = [moved[0, 0, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] for i in range(2) for j in range(3)]
    assert all(torch.equal(a, blocks[o]) for a, o in zip(seen, order[0].tolist()))
    assert torch.equal(shuffle.shuffle_blocks(image, (2, 2), torch.arange(6)[None]), image)


def test_orders_are_permutations_of_each_image_alone():
    order = shuffle.orders(["a", "b", "c"], 0, 1, 12)
    assert all(sorted(row) == list(range(12)) for row in order.tolist())
    assert torch.equal(order[1:2], shuffle.orders(["b"], 0, 1, 12))
    assert not torch.equal(order, shuffle.orders(["a", "b", "c"], 1, 1, 12))
    many = shuffle.orders(
        [str(i) for i in range(4000)], 0, 1, 3
    )  # all six orders, equally often: sd of a share is 0.006
    _, counts = np.unique(many.numpy(), axis=0, return_counts=True)
    assert len(counts) == 6
    assert np.abs(counts / 4000 - 1 / 6).max() < 0.03


@pytest.mark.parametrize("pos", ["none", "ape1d", "rope_axial", "rpb"])
def test_without_position_nothing_is_lost_and_with_it_something_is(pos):
    found, arrays = probe("shuffle", encoded(pos), Squares(textured=True))
    assert found["exact"]["holds"] == (pos == "none")
    assert (found["exact"]["largest"] < 1e-12) == (pos == "none")
    assert arrays["exact/change"].shape == (8,)
    assert [row["block"] for row in found["rows"]] == [1]  # 3x4 patches have no even cut
    row = found["rows"][0]
    assert (row["logit_change"] < 1e-5) == (pos == "none")
    if pos == "none":
        assert row["vs_reference"]["value"] == 1
        assert row["sensitivity"]["value"] == 0
    plain = probes.evaluate(subject(encoded(pos), Squares(textured=True)), {})["plain/pred"]
    np.testing.assert_array_equal(arrays["pred"][0], plain)


def test_known_models():
    for model, shuffled in ((Constant(), 0.25), (Brightness(), 1.0)):
        found, _ = probe("shuffle", model)
        assert found["rows"][0]["shuffled"]["value"] == shuffled
        assert found["rows"][0]["sensitivity"]["value"] == 0
        assert found["exact"]["holds"]
    found, arrays = probe("shuffle", Quadrant(), Scenes())  # all objects lie alike; shuffled they lie anywhere
    assert not found["exact"]["holds"]
    assert len(np.unique(arrays["pred"][0])) == 1
    assert len(np.unique(arrays["pred"][1:])) == 4


def test_numbers_of_stored_decisions_worked_by_hand():
    truth = np.array([0, 1, 2, 3])
    pred = np.array([[0, 1, 2, 0], [0, 0, 2, 0], [1, 1, 0, 0], [0, 1, 2, 3]])  # blocks as below
    arrays = {
        "images": np.arange(4), "grid": np.array([4, 4]), "blocks": np.array([0, 1, 1, 2]), "pred": pred,
        "logit_change": np.array([[0.0] * 4, [1, 2, 0, 0], [0, 0, 3, 0], [5, 0, 0, 0]]),
        "exact/change": np.zeros(2),
    }  # fmt: skip
    found = shuffle.Shuffle().summarize(arrays, truth)
    single, double = found["rows"]
    assert found["unshuffled"]["value"] == 0.75
    assert (single["block"], single["draws"], double["block"], double["draws"]) == (1, 2, 2, 1)
    assert (single["shuffled"]["value"], double["shuffled"]["value"]) == (0.375, 1.0)
    assert (single["sensitivity"]["value"], double["sensitivity"]["value"]) == (0.375, -0.25)  # lost is positive
    assert (single["vs_reference"]["value"], double["vs_reference"]["value"]) == (0.625, 0.75)
    assert (single["logit_change"], double["logit_change"]) == (3, 5)
    scores = shuffle.Shuffle().scores(arrays, truth)
    assert scores["1x1"].values.tolist() == [0.5, 0.5, 0.5, 0]
    assert (scores["1x1"].repeats, scores["2x2"].values.tolist()) == (2, [1, 1, 1, 1])


def test_block_sides():
    assert shuffle.block_sides("auto", (8, 12)) == [1, 2, 4]
    assert shuffle.block_sides("auto", (7, 7)) == [1]
    assert shuffle.block_sides([2, 1], (4, 4)) == [2, 1]
    with pytest.raises(ValueError, match=r"3 does not cut a grid of 4x4 patches; fitting: \[1, 2\]"):
        shuffle.block_sides([3], (4, 4))
    with pytest.raises(ValueError, match="auto or a list"):
        shuffle.block_sides("2", (4, 4))


def test_images_without_whole_patches_say_so():
    model = Constant()
    model.patch_embed.patch_size = (5, 5)
    found, _ = probe("shuffle", model)
    assert "12x16 px is not two or more whole patches of 5x5" in found["not_applicable"]
