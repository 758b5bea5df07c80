import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval

from vitpos import data, seeds
from vitpos.data.decoded import _posterize
from vitpos.data.workers import read_batches

CIFAR10 = os.environ.get("VITPOS_CIFAR10")
IMAGENETTE = os.environ.get("VITPOS_IMAGENETTE")


def digits(split="train", seed=0, **options):
    return data.load({"name": "digits", **options}, split, seed)


def make_tree(root: Path, parts: tuple[str, ...], size=(32, 32), images=4, classes=("ant", "bee")) -> Path:
    rng = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(images):
                pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def folder(root, split="train", seed=0, **options):
    return data.load({"name": "folder", "root": str(root), "img_size": 16, "workers": 0, **options}, split, seed)


# splits


def test_digits_splits_are_disjoint_and_complete():
    parts = [set(digits(split).ids) for split in data.SPLITS]
    assert [len(p) for p in parts] == [1221, 216, 360]
    assert len(set.union(*parts)) == 1797


def test_validation_follows_the_seed_and_test_does_not():
    assert digits("test", 0).ids == digits("test", 1).ids
    assert digits("val", 0).ids == digits("val", 0).ids
    assert digits("val", 0).ids != digits("val", 1).ids


def test_splits_are_stratified():
    total = sum(torch.bincount(digits(split).labels) for split in data.SPLITS)
    for split in data.SPLITS:
        labels = digits(split).labels
        proportional = total * len(labels) / total.sum()
        assert (torch.bincount(labels) - proportional).abs().max() < 1.5


def test_stratified_counts():
    labels = np.repeat([0, 1, 2], [10, 20, 3])
    chosen = data.stratified(labels, seeds.sample_keys([str(i) for i in range(33)]), 11, 0)
    assert np.bincount(labels[chosen]).tolist() == [3, 7, 1]
    with pytest.raises(ValueError, match="class 1 has a single image"):
        data.stratified(np.array([0, 0, 1]), seeds.sample_keys(["a", "b", "c"]), 1, 0)


@pytest.mark.parametrize(("size", "expected"), [(3, [3, 1]), (99, [99, 1])])
def test_a_rare_class_is_in_both_parts_of_a_split(size, expected):
    """In proportion it would have 0.06 of 3 samples, and 1.94 of 99: none, and both."""
    labels = np.repeat([0, 1], [100, 2])
    chosen = data.stratified(labels, seeds.sample_keys([str(i) for i in range(102)]), size, 0)
    assert np.bincount(labels[chosen], minlength=2)[1] == expected[1]


# digits


def test_place_puts_the_object_where_it_says():
    ds = digits("test")
    x = ds.place([0, 5], (3, 7), canvas=(20, 30))
    assert x.shape == (2, 1, 20, 30)
    assert torch.equal(x[:, :, 3:15, 7:19], ds.objects[[0, 5]])
    assert x.sum() == pytest.approx(ds.objects[[0, 5]].sum().item(), rel=1e-6)
    assert not torch.equal(x, ds.place([0, 5], (7, 3), canvas=(20, 30)))


def test_place_outside_the_canvas():
    ds = digits("test")
    for offset in [(13, 0), (0, 13), (-1, 0)]:
        with pytest.raises(ValueError, match="outside the 24x24 canvas"):
            ds.place([0], offset)


def test_home_offsets_are_fixed_by_sample_and_cover_every_phase():
    ds = digits("test")
    assert torch.equal(ds.batch([3, 8]), ds.batch([8, 3]).flip(0))
    assert {tuple(o) for o in ds.home} == {(dy, dx) for dy in range(4) for dx in range(4)}


def corners(x: torch.Tensor) -> torch.Tensor:
    """int64 [b, 2]: first non-black row and column."""
    return torch.stack([(x[:, 0].amax(2) > 0).int().argmax(1), (x[:, 0].amax(1) > 0).int().argmax(1)], 1)


def test_placement_of_training_images():
    home, uniform = (digits(placement=p).augmented(range(400), 0, 1) for p in ("home", "uniform"))
    blank = corners(digits().place(range(400), (0, 0)))
    offsets = corners(home) - blank
    assert offsets.min() == 0
    assert offsets.max() == 3
    offsets = corners(uniform) - blank
    assert offsets.min() == 0
    assert offsets.max() == 12


@pytest.mark.parametrize("kind", ["digits", "cifar", "folder"])
def test_augmentation_is_keyed_by_seed_epoch_and_sample(kind, tmp_path):
    if kind == "digits":
        ds = digits()
    elif kind == "cifar":
        ds = cifar_tree(tmp_path)
    else:
        ds = folder(make_tree(tmp_path, ("train", "val"), images=20))
    x = ds.augmented([0, 1, 2, 3, 4, 5], seed=0, epoch=1)
    assert torch.equal(x[[4, 1]], ds.augmented([4, 1], seed=0, epoch=1)), "another batch, the same images"
    assert not torch.equal(x, ds.augmented([0, 1, 2, 3, 4, 5], seed=0, epoch=2))
    assert not torch.equal(x, ds.augmented([0, 1, 2, 3, 4, 5], seed=1, epoch=1))


def test_drawing_augmentation_leaves_the_global_stream_alone(tmp_path):
    ds = folder(make_tree(tmp_path, ("train", "val"), images=20))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ds.augmented([0, 1], 0, 0)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"object_size": 22}, "does not fit"),
        ({"patch": 0}, "data.patch=0"),
        ({"placement": "hme"}, "did you mean home"),
        ({"val_fraction": 1.5}, "between 0 and 1"),
        ({"canvass": 32}, "did you mean canvas"),
    ],
)
def test_digits_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        digits(**options)


def test_unknown_dataset_split_and_type():
    with pytest.raises(ValueError, match="did you mean cifar10"):
        data.load({"name": "cifar1"})
    with pytest.raises(ValueError, match="did you mean val"):
        digits("vall")
    with pytest.raises(TypeError, match=r"data.canvas='24' is str, expected int"):
        digits(canvas="24")


# batches


def test_epoch_batches_visit_each_sample_at_most_once_and_in_a_new_order():
    first, again, later = (data.epoch_batches(103, 10, 0, e) for e in (0, 0, 1))
    assert len(first) == 10
    assert len(set(torch.cat(first).tolist())) == 100
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first), torch.cat(later))


def test_processes_share_the_same_global_batch():
    single = data.epoch_batches(50, 8, 0, 0)
    pair = [data.epoch_batches(50, 8, 0, 0, rank, 2) for rank in (0, 1)]
    for whole, a, b in zip(single, *pair):
        assert torch.equal(whole, torch.cat([a, b]))
    with pytest.raises(ValueError, match="cannot be split evenly among 3 processes"):
        data.epoch_batches(50, 8, 0, 0, 0, 3)
    with pytest.raises(ValueError, match=r"must lie in 1..50"):
        data.epoch_batches(50, 64, 0, 0)


def test_repeated_samples_are_in_one_batch_with_draws_of_their_own():
    ds = digits(placement="uniform")
    n = len(ds)
    batches = data.epoch_batches(n, 12, 0, 0, repeats=3)
    assert len(batches) == len(data.epoch_batches(n, 12, 0, 0))
    for batch in batches:
        _, count = (batch % n).unique(return_counts=True)
        assert count.tolist() == [3] * 4
        assert len(set(batch.tolist())) == 12
    assert len(set((torch.cat(batches) % n).tolist())) == 4 * len(batches), "no sample in two batches"
    x, y = next(ds.iterate(batches, seed=0, epoch=0))
    same = batches[0] % n == batches[0][0] % n
    assert y[same].unique().numel() == 1
    copies = x[same]
    assert not any(torch.equal(copies[i], copies[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert torch.equal(copies[0], ds.augmented([int(batches[0][0] % n)], 0, 0)[0]), "copy 0 is the sample itself"
    pair = [data.epoch_batches(n, 12, 0, 0, rank, 2, repeats=3) for rank in (0, 1)]
    assert all(torch.equal(whole, torch.cat(parts)) for whole, *parts in zip(batches, *pair))
    assert all(
        (part[0] // n).tolist() == copies for part, copies in zip(pair, ([0, 0, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2]))
    )
    odd = torch.cat(data.epoch_batches(n, 20, 0, 0, repeats=3))
    assert len(odd) == n // 20 * 20 == len(odd.unique()), "copies of a sample may lie in two batches"
    assert (odd % n).unique(return_counts=True)[1].tolist().count(3) == len(odd) // 3


@pytest.mark.parametrize("kind", ["digits", "cifar", "folder"])
def test_images_come_at_the_sizes_that_are_asked_for(kind, tmp_path):
    if kind == "folder":
        ds = folder(make_tree(tmp_path, ("train", "val"), images=20))
    else:
        ds = digits() if kind == "digits" else cifar_tree(tmp_path)
    batches = data.epoch_batches(len(ds), 4, 0, 0)[:3]
    sizes = [(16, 28), None, (40, 8)]
    shapes = [tuple(x.shape[-2:]) for x, _ in ds.iterate(batches, epoch=0, sizes=sizes)]
    assert shapes == [(16, 28), ds.info.img_size, (40, 8)]
    (x, _), *_ = ds.iterate(batches, seed=0, epoch=0, sizes=sizes)
    assert torch.equal(x, ds.augmented(batches[0], 0, 0, (16, 28)))


def test_iterate_yields_images_with_their_labels():
    ds = digits("val")
    batches = data.eval_batches(len(ds), 100)
    out = list(ds.iterate(batches))
    assert torch.equal(torch.cat([y for _, y in out]), ds.labels)
    assert torch.equal(torch.cat([x for x, _ in out]), ds.batch(range(len(ds))))


def test_normalize():
    info = data.Info("x", ["a"], 2, (1, 1), [0.5, 0.25], [0.5, 2.0])
    x = torch.tensor([1.0, 0.25]).reshape(1, 2, 1, 1)
    assert torch.equal(data.normalize(x, info).flatten(), torch.tensor([1.0, 0.0]))


def test_digits_statistics_are_near_those_of_the_info():
    x = data.normalize(digits().batch(range(1221)), digits().info)
    assert abs(x.mean().item()) < 0.05
    assert abs(x.std().item() - 1) < 0.05


# CIFAR, in both layouts


def cifar_tree(root, split="train", **options):
    make_tree(root, ("train", "test"), classes=[f"class{i}" for i in range(10)])
    return data.load({"name": "cifar10", "root": str(root), "val_fraction": 0.25, **options}, split)


def test_cifar_class_folders(tmp_path):
    ds = cifar_tree(tmp_path)
    assert (len(ds), ds.info.in_chans, ds.info.img_size) == (30, 3, (32, 32))
    with Image.open(tmp_path / ds.ids[7]) as image:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(ds.images[7], pixels)
    assert torch.equal(ds.batch([7])[0], pixels.float() / 255)
    assert ds.info.classes[ds.labels[7]] == Path(ds.ids[7]).parent.name


def test_cifar_crop_and_flip_by_hand(tmp_path):
    ds = cifar_tree(tmp_path)
    x = ds.augmented(list(range(8)), seed=0, epoch=0)
    draws = seeds.integers(seeds.stream(0, "augment", 0), ds.keys[:8], (9, 9, 2))
    assert set(draws[:, 2]) == {0, 1}
    for i, (dy, dx, flip) in enumerate(draws):
        padded = torch.nn.functional.pad(ds.images[i], [4, 4, 4, 4])
        image = padded[:, dy : dy + 32, dx : dx + 32]
        image = image.flip(2) if flip else image
        assert torch.equal(x[i], image.float() / 255)


def test_cifar_is_cut_alike_on_a_cpu_and_elsewhere(tmp_path, monkeypatch):
    ds = cifar_tree(tmp_path, flip=False)
    indices, dy, dx = torch.tensor([3, 0, 3]), torch.tensor([0, 8, 3]), torch.tensor([5, 1, 0])
    here = ds._cut(indices, dy, dx)
    monkeypatch.setattr(ds, "device", torch.device("cuda"))
    assert torch.equal(ds._cut(indices, dy, dx), here)
    assert not torch.equal(ds._cut(indices, dx, dy), here)


def test_cifar_without_augmentation_is_the_image(tmp_path):
    ds = cifar_tree(tmp_path, crop_padding=0, flip=False)
    assert torch.equal(ds.augmented([3, 1], 0, 0), ds.batch([3, 1]))


def test_cifar_randaugment_and_erasing_are_keyed_by_sample(tmp_path):
    plain = cifar_tree(tmp_path)
    cfg = {"name": "cifar10", "root": str(tmp_path), "val_fraction": 0.25}
    for option in ({"augment": "rand-m9-n2"}, {"erase": 0.5}):
        ds = data.load({**cfg, **option})
        x = ds.augmented(range(30), 0, 1)
        assert torch.equal(ds.augmented([4, 21], 0, 1), x[[4, 21]]), "another batch, the same images"
        assert not torch.equal(ds.augmented(range(30), 0, 2), x)
        changed = (x != plain.augmented(range(30), 0, 1)).flatten(1).any(1)
        assert 0.2 < changed.float().mean() < (1.01 if "augment" in option else 0.8)


def test_cifar_archive(tmp_path, monkeypatch):
    """torchvision's layout, with its checksums switched off: the real archive is large and not shipped."""
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    rng = np.random.default_rng(0)
    names = [f"class{i}" for i in range(10)]
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {
            "data": rng.integers(0, 256, (20, 3072), dtype=np.uint8),
            "labels": [i % 10 for i in range(20)],
        }
        (base / name).write_bytes(pickle.dumps(batch))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    cfg = {"name": "cifar10", "root": str(tmp_path)}
    with pytest.raises(ValueError, match="incomplete or corrupt"):
        data.load(cfg)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    train, val, test = (data.load(cfg, split) for split in data.SPLITS)
    assert (len(train), len(val), len(test)) == (90, 10, 20)
    assert test.info.classes == names
    expected = pickle.loads((base / "test_batch").read_bytes())["data"][4].reshape(3, 32, 32)
    np.testing.assert_array_equal(test.images[4].numpy(), expected)


def test_cifar_missing_or_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="no cifar10 below"):
        data.load({"name": "cifar10", "root": str(tmp_path)})
    make_tree(tmp_path, ("train",))
    with pytest.raises(ValueError, match="holds 2 classes, cifar10 has 10"):
        data.load({"name": "cifar10", "root": str(tmp_path)})


def test_cifar_image_of_another_size(tmp_path):
    make_tree(tmp_path, ("train",), size=(32, 40), classes=[f"class{i}" for i in range(10)])
    with pytest.raises(ValueError, match="is 40x32 pixels"):
        data.load({"name": "cifar10", "root": str(tmp_path)})


# folders


def tops(ds) -> set[str]:
    return {i.split("/")[0] for i in ds.ids}


def test_folder_splits(tmp_path):
    three = make_tree(tmp_path / "three", ("train", "val", "test"), images=8)
    assert [tops(folder(three, split)) for split in data.SPLITS] == [{"train"}, {"val"}, {"test"}]
    assert len(folder(three, "train")) == 16
    two = make_tree(tmp_path / "two", ("train", "val"), images=8)
    assert [tops(folder(two, split)) for split in data.SPLITS] == [{"train"}, {"train"}, {"val"}]
    one = make_tree(tmp_path / "one", (".",), images=8)
    parts = [set(folder(one, s).ids) for s in data.SPLITS]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 16
    assert folder(one, "test", 0).ids == folder(one, "test", 1).ids


def test_folder_resizes_and_crops_the_centre(tmp_path):
    root = make_tree(tmp_path, ("train", "val"), size=(24, 40))
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 8:24] = 200  # the central square of a 16 x 32 image
    Image.fromarray(pixels).save(root / "val" / "ant" / "0.png")
    ds = folder(root, "test")
    x = ds.batch([0, 5])
    assert x.shape == (2, 3, 16, 16)
    assert torch.all(x[0] == 200 / 255)


def test_folder_crops_what_timm_crops(tmp_path):
    """At crop_pct 0.875, against timm's transforms for evaluation; another crop_pct differs."""
    root = make_tree(tmp_path, ("train", "val"), size=(90, 70))
    config = {"name": "folder", "root": str(root), "img_size": 32, "crop_pct": 0.875, "interpolation": "bicubic"}
    images = data.load(config, "test")
    theirs = transforms_imagenet_eval(32, crop_pct=0.875, interpolation="bicubic", use_prefetcher=True)
    wanted = theirs(images.image(0))
    assert torch.equal(images.batch([0])[0], wanted.float() / 255)
    whole = data.load({**config, "crop_pct": 1.0}, "test")
    assert not torch.equal(whole.batch([0]), images.batch([0]))


def test_a_single_tree_can_be_all_test(tmp_path):
    root = make_tree(tmp_path, ("",), images=1)
    config = {"name": "folder", "root": str(root), "test_fraction": 1}
    assert len(data.load(config, "test")) == 2
    with pytest.raises(ValueError, match="nothing is left to train"):
        data.load(config, "train")


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_streams_what_batch_gives(tmp_path, workers):
    ds = folder(make_tree(tmp_path, ("train", "val"), images=6), workers=workers)
    batches = data.epoch_batches(len(ds), 5, 0, 0)
    for indices, (x, y) in zip(batches, ds.iterate(batches, seed=0, epoch=3)):
        assert torch.equal(x, ds.augmented(indices, 0, 3))
        assert torch.equal(y, ds.labels[indices])
    (x, _), *_ = ds.iterate(batches)
    assert torch.equal(x, ds.batch(batches[0]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_leave_workers_alone(tmp_path, number):
    """Ctrl-C in a terminal reaches them too, and so may a scheduler's signal; the main process decides."""
    ds = folder(make_tree(tmp_path, ("train", "val"), images=30), workers=2)
    found = 0
    for x, _ in ds.iterate(data.eval_batches(len(ds), 4)):
        if found == 0:
            pids = [str(worker.pid) for worker in multiprocessing.active_children()]
            subprocess.run(["kill", f"-{number.value}", *pids], check=True)
        found += len(x)
    assert found == len(ds)


def test_signals_leave_a_worker_alone_that_starts(tmp_path, monkeypatch):
    """PyTorch has it die of SIGTERM by then."""
    ds = folder(make_tree(tmp_path, ("train", "val")), workers=1)
    handling = torch.utils.data._utils.signal_handling
    begin = handling._set_worker_signal_handlers
    told = lambda: (begin(), os.kill(os.getpid(), signal.SIGTERM))  # noqa: E731
    monkeypatch.setattr(handling, "_set_worker_signal_handlers", told)
    assert sum(len(x) for x, _ in ds.iterate(data.eval_batches(len(ds), 4))) == len(ds)


def stuck(item: int) -> torch.Tensor:
    if item:
        time.sleep(600)
    return torch.zeros(1)


def test_the_main_process_ends_a_stuck_worker():
    """As PyTorch and multiprocessing do, which then wait for it; nobody else ends it."""
    batches = read_batches(stuck, [[0], [1], [1]], workers=1, pin_memory=False)
    next(batches)
    (worker,) = multiprocessing.active_children()
    subprocess.run(["kill", str(worker.pid)], check=True)
    worker.join(0.5)
    assert worker.is_alive()
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0


KILLED = """
import multiprocessing, os, signal, sys, time
import torch
from vitpos.data.workers import read_batches

def read(item):
    if item == 3:
        time.sleep(600)
    return torch.zeros(1)

batches = read_batches(read, [[i] for i in range(9)], 2, False)
next(batches)
print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_no_worker_outlives_a_killed_main_process():
    """One that waits ends itself; one that is stuck does so when anyone says so."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as main:
        left, until = main.stdout.readline().split(), time.monotonic() + 60
        assert main.wait() == -signal.SIGKILL
        assert len(left) == 2
        while len(left) > 1 and time.monotonic() < until:
            left = [pid for pid in left if is_running(pid)]
        assert len(left) == 1
        os.kill(int(left[0]), signal.SIGTERM)
        while is_running(left[0]) and time.monotonic() < until:
            pass
        assert not is_running(left[0])


def is_running(pid: str) -> bool:
    time.sleep(0.1)
    state = subprocess.run(["ps", "-o", "stat=", pid], capture_output=True, text=True, check=False).stdout
    return state[:1] not in ("", "Z")


def test_an_interrupt_while_a_worker_starts_is_not_lost(tmp_path):
    """Exceptions in what Python runs around a fork are."""
    ds = folder(make_tree(tmp_path, ("train", "val")), workers=1)
    armed = [signal.SIGINT]
    os.register_at_fork(after_in_parent=lambda: armed and signal.raise_signal(armed.pop()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests left there
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(ds.iterate(data.eval_batches(len(ds), 4)))
    assert not armed
    assert signal.signal(signal.SIGINT, before) is handler


def test_an_interrupt_while_workers_end_is_not_lost(tmp_path, monkeypatch):
    """Exceptions in __del__ are."""
    ds = folder(make_tree(tmp_path, ("train", "val")), workers=1)
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    end = kind._shutdown_workers

    def interrupted(self):
        monkeypatch.setattr(kind, "_shutdown_workers", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "_shutdown_workers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(ds.iterate(data.eval_batches(len(ds), 4)))


def test_workers_have_ended_before_the_last_batch_is_used(tmp_path):
    """Who takes no more would leave their end to __del__, in which a signal is lost."""
    ds = folder(make_tree(tmp_path, ("train", "val")), workers=1)
    stream = ds.iterate([torch.arange(4), torch.arange(4)])
    next(stream)
    assert multiprocessing.active_children()
    next(stream)
    assert not multiprocessing.active_children()


def test_workers_have_ended_after_a_bad_image():
    """Not when garbage is collected at last, which would wait for each of them."""
    gc.disable()
    try:
        with pytest.raises(ValueError, match="bad"):
            list(read_batches(bad_below_zero, [[1], [-1], [3]], 2, False))
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def bad_below_zero(number):
    if number < 0:
        raise ValueError("bad")
    return torch.zeros(2)


def test_greyscale_images_become_rgb(tmp_path):
    root = make_tree(tmp_path, ("train", "val"))
    Image.new("L", (32, 32), 128).save(root / "val" / "ant" / "0.png")
    assert torch.all(folder(root, "test").batch([0]) == 128 / 255)


def decoded(root: Path, image: Image.Image, name="0.png", **options) -> torch.Tensor:
    """What a single image of the test set comes out as, in 0..255."""
    (root / "val" / "ant" / "0.png").unlink(missing_ok=True)
    image.save(root / "val" / "ant" / name, **options)
    return folder(root, "test").batch([0])[0] * 255


@pytest.mark.parametrize("name", ["0.png", "0.tif"])
def test_16_bit_images_keep_their_greys(tmp_path, name):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    x = decoded(make_tree(tmp_path, ("train", "val")), Image.fromarray(ramp), name)
    np.testing.assert_array_equal(x.numpy(), np.broadcast_to(np.arange(256).reshape(16, 16), (3, 16, 16)))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_no_known_range_are_refused(tmp_path, dtype):
    root = make_tree(tmp_path, ("train", "val"))
    with pytest.raises(ValueError, match=r"cannot decode image .*ant/0\.tif: .* mode [IF], whose range is unknown"):
        decoded(root, Image.fromarray(np.full((16, 16), 0.5 if dtype is np.float32 else 9, dtype)), "0.tif")


def test_an_image_stands_as_its_exif_orientation_says(tmp_path):
    pixels = np.zeros((16, 16), np.uint8)
    pixels[:8] = 255  # bright above; the camera was turned by 180 degrees
    exif = Image.Exif()
    exif[0x0112] = 3
    x = decoded(make_tree(tmp_path, ("train", "val")), Image.fromarray(pixels), "0.png", exif=exif)
    assert (x[:, :8] == 0).all()
    assert (x[:, 8:] == 255).all()


def test_transparent_pixels_become_white(tmp_path):
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[:8, :, 0] = 200  # red, yet only the right half is opaque
    pixels[:, 8:, 3] = 255
    x = decoded(make_tree(tmp_path, ("train", "val")), Image.fromarray(pixels))
    assert (x[:, :, :8] == 255).all()
    assert x[:, 0, 12].tolist() == [200, 0, 0]


@pytest.mark.parametrize("flip", [False, True])
def test_folder_flips_when_it_is_told_to(tmp_path, flip):
    ds = folder(make_tree(tmp_path, ("train", "val"), size=(16, 16), images=10), flip=flip, min_crop_area=1.0)
    whole, x = ds.batch(range(len(ds))), ds.augmented(range(len(ds)), 0, 0)
    flipped = [torch.equal(a, b.flip(2)) for a, b in zip(x, whole)]
    assert all(f or torch.equal(a, b) for f, a, b in zip(flipped, x, whole))
    assert any(flipped) is flip


@pytest.mark.parametrize(
    "options", [{"augment": "rand-m9-mstd0.5-inc1"}, {"augment": "3a"}, {"color_jitter": 0.4}, {"erase": 0.7}]
)
def test_folder_augmentation_is_keyed_by_sample(tmp_path, options):
    """timm's transforms draw from global generators: workers, order and batch must not matter."""
    root = make_tree(tmp_path, ("train", "val"), images=6)
    ds, plain = folder(root, **options), folder(root)
    x = ds.augmented(range(8), 0, 1)
    assert torch.equal(ds.augmented([6, 3], 0, 1), x[[6, 3]])
    (streamed, _), *_ = folder(root, workers=2, **options).iterate([torch.arange(8)], seed=0, epoch=1)
    assert torch.equal(streamed, x)
    assert not torch.equal(ds.augmented(range(8), 0, 2), x)
    assert (x != plain.augmented(range(8), 0, 1)).flatten(1).any(1).float().mean() > 0.4
    assert torch.equal(ds.batch(range(4)), plain.batch(range(4))), "clean images stay clean"


@pytest.mark.parametrize(
    "augment", ["rand-m10-mstd0.5-inc1-n9", "rand-m10-inc1-n9", "rand-m0-n9", "augmix-m9", "original"]
)
def test_the_strongest_augmentation_is_possible(tmp_path, augment):
    """Posterizing keeps 4 bits down to none, of which Pillow allows the last no more."""
    ds = folder(make_tree(tmp_path, ("train", "val"), images=6), augment=augment)
    for epoch in range(20):
        assert ds.augmented(range(8), 0, epoch).isfinite().all()


def test_no_bits_are_black():
    image = Image.new("RGB", (2, 2), (250, 3, 100))
    assert np.asarray(_posterize(image, 0)).max() == 0
    assert np.asarray(_posterize(image, 1)).tolist()[0][0] == [128, 0, 0]


def test_crops_of_another_shape_keep_the_aspect_ratio(tmp_path):
    """A disc on a large square image, cropped to 16 x 48: its bounding box is about as high as wide."""
    root = make_tree(tmp_path, ("train", "val"), images=3)
    y, x = np.mgrid[:256, :256] - 127.5
    disc = Image.fromarray((255 * (y**2 + x**2 < 40**2)).astype(np.uint8))
    for path in (root / "train").rglob("*.png"):
        disc.save(path)
    ds = folder(root, min_crop_area=0.4)
    ratios = []
    for epoch in range(20):
        seen = ds.augmented([0], 0, epoch, (16, 48))[0, 0] > 0.5
        rows, columns = seen.any(1).sum(), seen.any(0).sum()
        if not (seen[0].any() or seen[-1].any()):
            ratios.append((columns / rows).item())
    assert ratios
    assert 0.6 < np.median(ratios) < 1.7, "squeezed into 16 x 48 it would be three times as wide as high"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "rnd-m9"}, "data.augment='rnd-m9' is not in timm's notation"),
        ({"augment": "rand-q9"}, "data.augment='rand-q9' is not in timm's notation"),
        ({"color_jitter": -1.0}, "data.color_jitter=-1.0 must be 0 or more"),
        ({"erase": 2.0}, r"data.erase=2.0 must lie in \[0, 1\]"),
        ({"crop_pct": 0.0}, "data.crop_pct=0.0 must lie in"),
        ({"crop_pct": 1.5}, "data.crop_pct=1.5 must lie in"),
        ({"interpolation": "cubic"}, "data.interpolation='cubic' must be one of bilinear, bicubic"),
    ],
)
def test_folder_options_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        folder(make_tree(tmp_path, ("train", "val")), **options)


def test_empty_class_folder_is_named(tmp_path):
    root = make_tree(tmp_path, ("train", "val"))
    (root / "train" / "cow").mkdir()
    (root / "train" / "cow" / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"class folder .*cow holds no image"):
        folder(root)


@pytest.mark.parametrize(
    ("parts", "images", "message"),
    [
        ((".",), 2, "ant holds 2 images; at least 3 are needed to carve train, val and test"),
        (("train", "val"), 1, "train/ant holds 1 image; at least 2 are needed to carve train and val"),
    ],
)
def test_class_too_small_to_carve(tmp_path, parts, images, message):
    root = make_tree(tmp_path, parts, images=images)
    with pytest.raises(ValueError, match=message):
        folder(root)
    for path in root.rglob("1.png" if images == 2 else "0.png"):
        path.with_name("more.png").write_bytes(path.read_bytes())
    assert len(folder(root)) == 2


def test_cifar_class_too_small_to_carve(tmp_path):
    make_tree(tmp_path, ("train", "test"), images=1, classes=[f"class{i}" for i in range(10)])
    with pytest.raises(ValueError, match="train/class0 holds 1 image; at least 2"):
        data.load({"name": "cifar10", "root": str(tmp_path)})


def test_unreadable_folder_is_not_an_empty_one(tmp_path, monkeypatch):
    root = make_tree(tmp_path, ("train", "val"))
    scandir = os.scandir

    def guarded(path):
        if str(path).endswith(locked):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    for locked in ("train/bee", "train"):
        with pytest.raises(ValueError, match=f"cannot read folder .*{locked}: Permission denied"):
            folder(root)


@pytest.mark.parametrize("there", [False, True])
def test_failed_download_leaves_nothing(tmp_path, monkeypatch, there):
    root = tmp_path / "new" / "cifar"
    if there:
        root.mkdir(parents=True)

    def offline(self):
        Path(self.root).mkdir(parents=True, exist_ok=True)
        Path(self.root, self.filename).write_text("half of it")
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", offline)
    with pytest.raises(ValueError, match=r"cannot be downloaded .*not known.*; fetch http.*data\.root") as caught:
        data.load({"name": "cifar10", "root": str(root), "download": True})
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == ([root.parent, root] if there else [])


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_image_is_named_in_one_line(tmp_path, workers):
    root = make_tree(tmp_path, ("train", "val"))
    bad = root / "val" / "bee" / "1.png"
    bad.write_bytes(bad.read_bytes()[:100])
    ds = folder(root, "test", workers=workers)
    with pytest.raises(ValueError, match=r"cannot decode image .*bee/1\.png") as caught:
        list(ds.iterate(data.eval_batches(len(ds), 4)))
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()  # though the error is held


def test_missing_roots(tmp_path):
    with pytest.raises(ValueError, match=r"needs data\.root"):
        data.load({"name": "folder"})
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds 0 class folders"):
        folder(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="has train/ only"):
        folder(make_tree(tmp_path / "train_only", ("train",)))


def test_test_set_of_other_classes(tmp_path):
    root = make_tree(tmp_path, ("train", "val"))
    (root / "val" / "bee").rename(root / "val" / "wasp")
    with pytest.raises(ValueError, match="different classes: bee, wasp"):
        folder(root, "test")


# real data, when it is there


@pytest.mark.slow
@pytest.mark.skipif(CIFAR10 is None, reason="VITPOS_CIFAR10 names no unpacked CIFAR-10")
def test_real_cifar10():
    cfg = {"name": "cifar10", "root": CIFAR10}
    train, val, test = (data.load(cfg, split) for split in data.SPLITS)
    assert [len(train), len(val), len(test)] == [45_000, 5_000, 10_000]
    mean = train.images.float().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx(train.info.mean, abs=0.002)


@pytest.mark.slow
@pytest.mark.skipif(IMAGENETTE is None, reason="VITPOS_IMAGENETTE names no folder with train/ and val/")
def test_real_folder():
    ds = data.load({"name": "folder", "root": IMAGENETTE, "img_size": 64}, "test")
    x, y = next(ds.iterate(data.eval_batches(len(ds), 32)))
    assert x.shape == (32, 3, 64, 64)
    assert y.tolist() == ds.labels[:32].tolist()
