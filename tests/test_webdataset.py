"""Tar shards, written by the webdataset library itself."""

import io
import tarfile

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from vitpos import data


def write(root, shards=3, samples=8, extension="png"):
    """Shards of images whose pixels all say which sample they are; two classes in turn."""
    root.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(root / "%03d.tar"), maxcount=samples, verbose=0) as sink:
        for i in range(shards * samples):
            image = np.full((20, 20, 3), i, np.uint8)
            sink.write({"__key__": f"sample{i:03d}", extension: image, "cls": i % 2, "json": {"i": i}})


def load(root, split="train", seed=0, **options):
    cfg = {"name": "webdataset", "root": str(root), "img_size": 16, "workers": 0, **options}
    return data.load({"val_fraction": 0.25, **cfg}, split, seed)


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "val", shards=1)
    return tmp_path


def number(x: torch.Tensor) -> list[int]:
    return (x.mean((1, 2, 3)) * 255).round().int().tolist()


def test_samples_are_those_that_were_written(root):
    train, val, test = (load(root, split) for split in data.SPLITS)
    assert [len(part) for part in (train, val, test)] == [18, 6, 8]
    assert not set(train.ids) & set(val.ids)
    assert set(load(root, "val", seed=1).ids) != set(val.ids)
    assert test.ids[3] == "val/000.tar/sample003"
    for part in (train, val, test):
        i = number(part.batch(range(len(part))))
        assert [int(name[-3:]) for name in part.ids] == i
        assert part.labels.tolist() == [n % 2 for n in i]
    assert train.info.classes == ["0", "1"]
    (root / "classes.txt").write_text("even\nodd\nthird\n")
    assert load(root).info.classes == ["even", "odd", "third"]
    assert load(root, "val", val="val/*.tar").ids == test.ids, "a validation set of its own"


@pytest.mark.parametrize("workers", [0, 2])
def test_any_place_of_an_epoch_can_be_gone_to(root, workers):
    """A resumed run, another process and another number of workers see what one run sees."""
    ds = load(root, workers=workers, augment="rand-m9-mstd0.5", erase=0.5)
    batches = data.epoch_batches(len(ds), 6, 0, 1)
    whole = list(load(root, augment="rand-m9-mstd0.5", erase=0.5).iterate(batches, seed=0, epoch=1))
    late = list(ds.iterate(batches[1:], seed=0, epoch=1))
    assert all(torch.equal(a, b) for x, y in zip(whole[1:], late) for a, b in zip(x, y))
    parts = [list(ds.iterate(data.epoch_batches(len(ds), 6, 0, 1, rank, 2), seed=0, epoch=1)) for rank in (0, 1)]
    for (x, y), (x0, y0), (x1, y1) in zip(whole, *parts):
        assert torch.equal(x, torch.cat([x0, x1]))
        assert torch.equal(y, torch.cat([y0, y1]))
    assert not torch.equal(whole[0][0], next(ds.iterate(batches, seed=0, epoch=2))[0])


def test_keys_in_folders_and_other_files(tmp_path):
    """A dot in a folder's name is no extension; files of no use are passed over."""
    (tmp_path / "train").mkdir()
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (7, 7, 7)).save(buffer, "png")
    with tarfile.open(tmp_path / "train" / "0.tar", "w") as archive:
        for folder in ("a.b", "c"):
            for i in range(2):
                for name, content in {"PNG": buffer.getvalue(), "cls": b"%d\n" % i, "txt": b"no"}.items():
                    member = tarfile.TarInfo(f"{folder}/{i}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    ds = load(tmp_path, val_fraction=0.5)
    assert sorted([*ds.ids, *load(tmp_path, "val", val_fraction=0.5).ids]) == [
        "train/0.tar/a.b/0", "train/0.tar/a.b/1", "train/0.tar/c/0", "train/0.tar/c/1",
    ]  # fmt: skip
    assert number(ds.batch([0])) == [7]


def test_shards_that_cannot_be_read(root):
    path = root / "train" / "001.tar"
    whole = path.read_bytes()
    for content, message in {
        whole[:3000]: "not a whole one", b"text " * 300: "not an uncompressed tar file", b"": "not an uncompressed",
    }.items():  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"001.tar is .*{message}.*"):
            load(root)
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("7.png"))
    with pytest.raises(ValueError, match=r"001.tar: sample 7 has no \.cls"):
        load(root)
    path.unlink()
    (root / "classes.txt").write_text("one\n")
    with pytest.raises(ValueError, match=r"classes.txt names 1 classes, shards have those from 0 to 1"):
        load(root)
    with pytest.raises(FileNotFoundError, match=r"no shard \*\.tgz below"):
        load(root, train="*.tgz")


def test_corrupt_image_is_named(root):
    path = root / "val" / "000.tar"
    content = path.read_bytes()
    at = content.index(b"IDAT", content.index(b"sample002.png"))
    path.write_bytes(content[:at] + b"XXXX" + content[at + 4 :])
    with pytest.raises(ValueError, match=r"cannot decode image val/000.tar/sample002: "):
        load(root, "test").batch(range(8))
