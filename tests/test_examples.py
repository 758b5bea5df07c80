"""The examples run; the quick versions by default, as they stand under ``slow``."""

import importlib
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDED = {"segmentation": "segmentation_models_pytorch", "detection": "torchvision", "retrieval": "sklearn"}
NAMES = ["segmentation", "detection", "retrieval", "timm_training"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name):
        pytest.importorskip(NEEDED.get(name, "sklearn"))
        return importlib.import_module(name)

    yield load
    for name in ("segmentation", "detection", "retrieval", "timm_training", "shapes", "digits"):
        sys.modules.pop(name, None)


def test_every_example_is_listed_and_documented():
    scripts = {p.stem for p in EXAMPLES.glob("*.py") if "__main__" in p.read_text()}
    assert scripts == set(NAMES)
    listed = re.findall(r"python examples/(\w+)\.py", (EXAMPLES / "README.md").read_text())
    assert set(listed) == scripts
    for name in scripts:
        assert f"python examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text()


def test_segmentation_takes_any_size(example):
    result = example("segmentation").run("rpb", steps=3)
    assert result["last loss"] < result["first loss"]
    assert {key for key in result if key.startswith("IoU")} == {"IoU 64x64", "IoU 64x128", "IoU 96x96"}


def test_detection_takes_batches_of_mixed_sizes(example):
    detection = example("detection")
    result = detection.run("rope_mixed", steps=3)
    assert set(result) == {"first loss", "last loss", "recall", "precision"}
    assert result["last loss"] == result["last loss"]  # not NaN


def test_retrieval_finds_an_image_among_others(example):
    torch = pytest.importorskip("torch")
    retrieval = example("retrieval")
    generator = torch.Generator().manual_seed(0)
    gallery = torch.randn(5, 8, 3, 3, generator=generator)
    moved = gallery.roll((1, 2), dims=(2, 3))
    assert retrieval.similarity(moved, gallery).argmax(1).tolist() == [0, 1, 2, 3, 4]
    assert retrieval.similarity(moved, gallery).diagonal().min() > 0.999
    assert set(retrieval.run("ape1d", epochs=0, queries=10, gallery=20)) == {"pixels", "untrained", "trained"}


def test_timm_training_saves_what_it_trained(example):
    result = example("timm_training").run("rope_axial", epochs=1)
    assert result["reloaded"] == result["EMA accuracy"]
    assert result["last loss"] < result["first loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "better", "than"),
    [
        ("segmentation", "IoU 96x96", 0.3),
        ("detection", "recall", 0.8),
        ("retrieval", "trained", "pixels"),
        ("timm_training", "accuracy", 70.0),
    ],
)
def test_the_numbers_make_sense(example, name, better, than):
    result = example(name).run()
    assert result[better] > (result[than] if isinstance(than, str) else than)
    if "last loss" in result:
        assert result["last loss"] < 0.6 * result["first loss"]
