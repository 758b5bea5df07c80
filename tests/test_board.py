"""What TensorBoard gets of a run."""

import math

import pytest
import torch
from madeup import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import vitpos
from vitpos import config, data, pages
from vitpos.board import Board, evaluated, settings
from vitpos.probes._views import curves, table


def run_config(epochs=10, pictures=4) -> config.RunConfig:
    train = config.TrainConfig(epochs=epochs, pictures=pictures, batch_size=20)
    model = config.ModelConfig("vit_tiny_patch16_224", {"depth": 2})
    return config.RunConfig(pos="rpb", data=data.resolve({"name": "digits"}), model=model, train=train)


def tiny(pos):
    kwargs = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "in_chans": 1, "num_classes": 10}
    return vitpos.create_model("vit_tiny_patch16_224", pos=pos, img_size=24, **kwargs)


def written(path) -> EventAccumulator:
    events = EventAccumulator(str(path), size_guidance={"images": 0})
    events.Reload()
    return events


@pytest.fixture
def train_set():
    return data.load({"name": "digits"})


def test_a_run_is_shown(tmp_path, train_set):
    board = Board(tmp_path, run_config())
    model = tiny("rpb")
    before = [p.clone() for p in model.parameters()]
    for epoch in range(1, 11):
        board.epoch({"epoch": epoch, "step": 7 * epoch, "val_accuracy": epoch / 10}, model, train_set)
    board.close()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    events = written(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("val_accuracy")][-1] == (70, pytest.approx(1.0))
    assert [e.step for e in events.Images("encoding")] == [21, 35, 56, 70]
    grid = events.Images("first_batch")[0]
    assert (grid.width, grid.height) == (8 * 26 + 2, 3 * 26 + 2), "20 images of 24 px, 8 a row"
    tables = [n for n, p in model.named_parameters() if n.startswith("position.")]
    assert tables
    assert set(tables) == set(events.Tags()["distributions"])
    plugin = HParamsPluginData.FromString(events.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    shown = dict(plugin.session_start_info.hparams)
    assert shown["pos"].string_value == "rpb"
    assert shown["train.batch_size"].number_value == 20


def test_evaluated_runs_are_shown_and_replaced(tmp_path):
    runs = {encoding: run(encoding) for encoding in ("none", "ape1d")}
    lines = {"row": (["embedding", "block 1"], [{"value": 0.5}, None]), "steps": ([0, 4], [1.0, 0.25])}
    probe = {"views": [curves("k", "Where", "", "layer", "share", lines, ""), table("t", "Table", "", {}, [])]}
    runs["ape1d"]["probes"]["location"] = probe
    evaluated(tmp_path / "tb", runs)
    events = written(tmp_path / "tb" / "ape1d")

    def scalars(tag):
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]

    assert scalars("accuracy") == [(0, 0.93)]
    assert scalars("translation/accuracy by distance (canvas, patch)") == [(0, 0.95), (4, 0.85), (8, 0.75)]
    assert scalars("resolution/canvas (extrapolate)") == [(24, 0.9), (36, 0.61), (48, 0.37)]
    assert scalars("location/Where/row") == [(0, 0.5)]
    assert scalars("location/Where/steps") == [(0, 1.0), (4, 0.25)]
    evaluated(tmp_path / "tb", {"none": runs["none"]})
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["none"]
    assert [path.name for path in tmp_path.iterdir()] == ["tb"]


@pytest.mark.parametrize(
    ("epochs", "pictures", "expected"),
    [(10, 4, {3, 5, 8, 10}), (3, 4, {1, 2, 3}), (1, 1, {1}), (5, 0, set()), (100, 1, {100})],
)
def test_when_the_encoding_is_drawn(tmp_path, epochs, pictures, expected):
    board = Board(tmp_path, run_config(epochs, pictures))
    board.close()
    assert board._drawn() == expected


def test_no_pictures(tmp_path, train_set):
    board = Board(tmp_path, run_config(2, 0))
    for epoch in (1, 2):
        board.epoch({"epoch": epoch, "step": epoch, "val_accuracy": 0.5}, tiny("rpb"), train_set)
    board.close()
    assert written(tmp_path).Tags()["images"] == []


def test_settings():
    shown = settings(run_config())
    assert shown["model.kwargs.depth"] == 2
    assert shown["train.betas"] == "[0.9, 0.98]"
    assert "train.ema" not in shown


# pictures of a model's encodings


@pytest.mark.parametrize("pos", [*vitpos.list_encodings(), "ape2d + rope_mixed", "rpb + ape1d"])
def test_every_encoding_can_be_drawn_as_it_is(pos):
    model = tiny(pos).to(torch.bfloat16)
    figure = pages.draw_model(model)
    assert (figure is None) == (pos in ("none", "logn"))
    assert next(model.parameters()).dtype == torch.bfloat16


def test_the_picture_shows_the_present_weights():
    model = tiny("ape1d")
    with torch.no_grad():
        model.pos_embed.zero_()
        model.pos_embed[0, 1 + 8, 0] = 3.0  # behind the class token: row 1, column 2
    axes = pages.draw_model(model).axes[0]
    values = torch.from_numpy(axes.images[0].get_array().data)
    assert values.argmax() == 8
    assert math.isclose(values.max(), 3.0)


def test_models_that_hold_an_encoding_of_their_own():
    model = vitpos.create_model("vit_tiny_patch16_224", pos="native", img_size=32)
    assert pages.draw_model(model) is not None
    model = vitpos.create_model("vit_relpos_small_patch16_224", pos="native", img_size=32, depth=1)
    assert pages.draw_model(model) is not None


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224", "eva02_tiny_patch14_224"]
)
def test_rotary_tables_of_timms_own_are_drawn(name):
    model = vitpos.create_model(name, img_size=4 * 14 if "14" in name else 64, depth=2)
    figure = pages.draw_model(model)
    cosine = figure.axes[1].images[0].get_array()
    assert cosine.std() > 0.01
    assert abs(cosine).max() <= 1 + 1e-6
