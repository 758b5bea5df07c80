"""Augmentation of batches against the libraries' own, an image at a time."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from vitpos import augment, seeds

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def images(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 12, 10), generator=generator, dtype=torch.uint8)


def test_randaugment_of_a_batch_is_torchvisions_of_each_image(monkeypatch):
    """Every operation and sign at once; torchvision is told the same draws."""
    ours = augment.RandAugment("rand-m7-n2", MEAN)
    theirs = v2.RandAugment(2, 21, fill=[round(255 * m) for m in MEAN])
    kinds = list(theirs._AUGMENTATION_SPACE)
    n = 2 * len(kinds)
    draws = np.stack([np.arange(n) / n, np.arange(n) % 2 * 0.9, np.arange(n)[::-1] / n, np.full(n, 0.1)], 1)
    x = images(n)
    got = ours.batch(x.clone(), draws)
    for i, row in enumerate(draws):
        left = list(row)

        def item(space, left=left):
            name = kinds[int(left.pop(0) * len(kinds))]
            return name, space[name]

        def rand(shape, left=left):
            return torch.tensor(left[0])

        def apply(*args, left=left, step=theirs._apply_image_or_video_transform, **kwargs):
            left.pop(0)  # the sign, drawn or not
            return step(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(theirs, "_get_random_item", item)
            patch.setattr(theirs, "_apply_image_or_video_transform", apply)
            patch.setattr(torch, "rand", rand)
            assert torch.equal(got[i], theirs(x[i])), kinds[int(row[0] * len(kinds))]
    changed = (got != x).flatten(1).any(1)
    assert changed.sum() > n / 2, "the control: the operations do something"


def test_randaugment_depends_on_an_images_own_draws_alone():
    ours = augment.RandAugment("rand-m9-n2", MEAN)
    draws = np.random.default_rng(0).random((40, 4))
    x = images(40)
    whole = ours.batch(x.clone(), draws)
    assert torch.equal(ours.batch(x[[7, 30]].clone(), draws[[7, 30]]), whole[[7, 30]])


@pytest.mark.parametrize("text", ["rand", "rand-m11-n2", "rand-m9-n0", "3a", "rand-m9-mstd0.5-n2", "rand-m9-n2 "])
def test_notation_that_images_in_memory_do_not_know(text):
    with pytest.raises(ValueError, match=rf"data.augment='{text}' must be rand-mM-nN"):
        augment.RandAugment(text, MEAN)


def test_erasing_by_hand():
    x = images(6)
    got = augment.erase(x, [5, 6, 7, 5, 6, 7], MEAN, STD)
    boxes = (got != x).any(1)
    assert 0 < boxes.float().mean() < 0.5
    for i, box in enumerate(boxes):
        rows, columns = box.any(1).nonzero().flatten(), box.any(0).nonzero().flatten()
        inside = box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert inside.float().mean() > 0.9, "a box"
        assert torch.equal(box, boxes[(i + 3) % 6]), "the same stream, the same box"
    assert not torch.equal(boxes[0], boxes[1])
    assert torch.equal(augment.erase(x[2:3], [7], MEAN, STD), got[2:3]), "another batch, the same image"


def test_erased_pixels_are_noise_around_the_mean():
    x = torch.zeros(400, 3, 12, 10, dtype=torch.uint8)
    got = augment.erase(x, range(400), MEAN, [0.05] * 3).float() / 255
    erased = got.permute(1, 0, 2, 3)[:, (got > 0).all(1)]  # [3, pixels]
    assert erased.mean(1).tolist() == pytest.approx(MEAN, abs=0.005)
    assert erased.std(1).tolist() == pytest.approx([0.05] * 3, abs=0.005)


def test_global_generators_are_as_they_were():
    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    expected = drawn(), drawn()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    first = drawn()
    with contextlib.suppress(KeyError), seeds.global_generators(3):
        inside = drawn()
        raise KeyError
    assert (first, drawn()) == expected
    with seeds.global_generators(3):
        assert drawn() == inside
    with seeds.global_generators(4):
        assert drawn() != inside
