"""train.py as it is called: one run, sweeps, resume, torchrun, and bad input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from commands import (
    FOLDER,
    TINY,
    TRAIN,
    Stop,
    at_step,
    files,
    latest,
    make_folder,
    one_line,
    stop_after,
    stopped,
    tamper,
    train,
)  # fmt: skip
from omegaconf import OmegaConf

import vitpos
from vitpos import data, report

pytestmark = pytest.mark.usefixtures("somewhere")

# a run


def test_run_folder(monkeypatch, tmp_path, capsys):
    assert train(monkeypatch, "pos=rope_axial(theta=50)", "out=run", "train.ema=0.9", "train.pictures=1") == 0
    run = tmp_path / "run"
    expected = {"config.yaml", "environment.json", "last.safetensors", "metrics.csv"}
    assert expected == {f for f in files(run) if not f.startswith(("tb/", "state-"))}
    assert [path.name[:14] for path in sorted(run.glob("state-*"))] == ["state-00000004", "state-00000008"]
    assert len(list((run / "tb").iterdir())) == 1
    metrics = pd.read_csv(run / "metrics.csv")
    assert metrics["epoch"].tolist() == [1, 2]
    assert metrics["step"].tolist() == [4, 8]
    assert yaml.safe_load((run / "config.yaml").read_text())["pos"] == "rope_axial(theta=50.0)"
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3
    assert "epoch 1/2" in lines[0]
    assert "after 2 epochs" in lines[-1]


def test_a_convolutional_baseline_is_trained_resumed_and_evaluated(monkeypatch, tmp_path, evaluate):
    words = ["model=resnet", "model.kwargs.channels=[8,8,16,16]", "pos=native", *TINY[3:]]
    assert train(monkeypatch, *words, "out=run", "train.pictures=1", tiny=False) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            train(patch, *words, "out=again", tiny=False)
    assert train(monkeypatch, "resume=again", tiny=False) == 0
    assert Path("again/last.safetensors").read_bytes() == Path("run/last.safetensors").read_bytes()
    code, _, err = evaluate("checkpoint=run", "images=8", "probes=[translation,factorial]")
    assert code == 0, err
    run = report.read("run/eval/results.json")["runs"][0]
    assert (run["encoding"], run["architecture"], run["trained"]) == ("native", "resnet10t", True)
    assert run["probes"]["translation"]["patch_size"] == [8, 8]
    assert "takes no coordinates" in run["probes"]["factorial"]["not_applicable"]


def test_saved_weights_give_the_reported_accuracy(monkeypatch, tmp_path):
    train(monkeypatch, "out=run", "train.ema=0.9", "seed=2")
    card = vitpos.read_card(tmp_path / "run" / "last.safetensors")
    assert (card["extra"]["seed"], card["extra"]["epochs"]) == (2, 2)
    val_set = data.load(card["extra"]["data"], "val", 2)
    assert card["classes"] == val_set.info.classes
    assert card["preprocessing"]["mean"] == val_set.info.mean
    model = vitpos.load(tmp_path / "run" / "last.safetensors")
    with torch.no_grad():
        logits = model(data.normalize(val_set.batch(range(len(val_set))), val_set.info))
    accuracy = (logits.argmax(1) == val_set.labels).float().mean().item()
    assert accuracy == pytest.approx(pd.read_csv(tmp_path / "run" / "metrics.csv")["val_accuracy"].iloc[-1], abs=1e-5)


def test_training_learns(monkeypatch, tmp_path):
    size = ["model.kwargs.embed_dim=32", "model.kwargs.depth=2"]
    schedule = ["train.epochs=8", "train.batch_size=32", "train.lr=5e-3"]
    assert train(monkeypatch, "out=run", "pos=sincos2d", *size, *schedule) == 0
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics["train_loss"].iloc[-1] < metrics["train_loss"].iloc[0] - 0.3
    assert metrics["val_accuracy"].iloc[-1] > 0.25


def spied(monkeypatch, tmp_path, name, *words):
    """What one run feeds its model and which units its dropout drops, over all steps."""
    seen: dict[str, list[torch.Tensor]] = {"batches": [], "masks": []}
    normalize, dropout = data.normalize, torch.nn.functional.dropout

    def record_batch(x, info):
        seen["batches"].append(x.clone())
        return normalize(x, info)

    def record_mask(x, p=0.5, training=True, inplace=False):
        if training and p > 0:
            state = torch.get_rng_state()
            seen["masks"].append(dropout(torch.ones_like(x), p, True) > 0)
            torch.set_rng_state(state)
        return dropout(x, p, training, inplace)

    with monkeypatch.context() as patch:
        patch.setattr(data, "normalize", record_batch)
        patch.setattr(torch.nn.functional, "dropout", record_mask)
        assert train(patch, f"out={name}", "train.epochs=1", "model.kwargs.proj_drop_rate=0.3", *words) == 0
    return seen


def test_same_seed_same_batches_and_masks_for_every_encoding(monkeypatch, tmp_path):
    none, rope, again, other = (
        spied(monkeypatch, tmp_path, name, f"pos={pos}", f"seed={seed}")
        for name, pos, seed in [("a", "none", 0), ("b", "rope_axial", 0), ("c", "ape2d", 0), ("d", "none", 1)]
    )
    for kind in ("batches", "masks"):
        assert len(none[kind]) >= 5
        for variant in (rope, again):
            assert len(none[kind]) == len(variant[kind])
            assert all(torch.equal(x, y) for x, y in zip(none[kind], variant[kind]))
        assert not any(torch.equal(x, y) for x, y in zip(none[kind], other[kind]))


def test_every_recipe_at_once(monkeypatch, tmp_path):
    """And a stopped run goes on with the same draws: sizes, mixing, copies, erasing."""
    words = ["pos=rope_axial + ape1d", "train.sizes=[24,[16,32],[32,20]]", "train.mixup=0.8", "train.cutmix=1.0",
             "train.loss=bce", "train.optimizer=lamb", "train.repeats=3", "train.accumulate=2", "train.layer_decay=0.8",
             "train.coords.shift=0.1", "train.ema=0.9", "model.kwargs.drop_path_rate=0.1",
             "model.kwargs.patch_drop_rate=0.25"]  # fmt: skip
    assert train(monkeypatch, "out=whole", *words) == 0
    stopped(monkeypatch, "out=part", *words)
    assert train(monkeypatch, "resume=part", tiny=False) == 0
    whole, part = (vitpos.load(f"{name}/last.safetensors").state_dict() for name in ("whole", "part"))
    assert all(torch.equal(whole[k], part[k]) for k in whole)


def test_the_same_run_twice_is_the_same(monkeypatch, tmp_path):
    weights = []
    for name in ("a", "b"):
        assert train(monkeypatch, f"out={name}", "pos=rpb") == 0
        weights.append(vitpos.load(tmp_path / name / "last.safetensors").state_dict())
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


# resume


def test_resume_of_a_finished_run_says_so(monkeypatch, tmp_path, capsys):
    train(monkeypatch, "out=run")
    before = {f: (tmp_path / f).read_bytes() for f in files(tmp_path)}
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert "run is finished: 2 of 2 epochs are done" in capsys.readouterr().out
    assert {f: (tmp_path / f).read_bytes() for f in files(tmp_path)} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pos=ape1d"], "was trained with pos=none and cannot go on with ape1d"),
        (["model.kwargs.depth=3"], "was trained with model.kwargs.depth=1 and cannot go on with 3"),
        (["seed=4"], "was trained with seed=0"),
        (["out=elsewhere"], "was trained with out=run"),
        (["experiment=demo"], "leave experiment out"),
        (["data=cifar10"], "was trained with data=digits and cannot go on with cifar10"),
    ],
)
def test_resume_of_another_architecture(monkeypatch, capsys, words, message):
    stopped(monkeypatch, "out=run", "pos=none")
    before = files(Path("run"))
    assert train(monkeypatch, "resume=run", *words, tiny=False) == 2
    assert message in one_line(capsys)
    assert files(Path("run")) == before


def edit(key: str, value: object) -> None:
    """Change run/config.yaml by hand."""
    stored = OmegaConf.load("run/config.yaml")
    OmegaConf.update(stored, key, value)
    Path("run/config.yaml").write_text(OmegaConf.to_yaml(stored))


def test_resume_of_an_edited_configuration(monkeypatch, capsys):
    stopped(monkeypatch, "out=run", "pos=rope_axial")
    text = Path("run/config.yaml").read_text()
    for key, value, trained in [
        ("seed", 1, "0"), ("pos", "rope_axial(theta=7.0)", "rope_axial"), ("data.placement", "uniform", "home"),
        ("train.epochs", 1, "2"), ("model.kwargs.qk_norm", True, "None"),
    ]:  # fmt: skip
        edit(key, value)
        before = files(Path("run"))
        assert train(monkeypatch, "resume=run", tiny=False) == 2
        assert f"was trained with {key}={trained}, config.yaml says {value}" in one_line(capsys)
        assert files(Path("run")) == before
        Path("run/config.yaml").write_text(text)
    edit("train.threads", 2)
    assert train(monkeypatch, "resume=run", tiny=False) == 0


def test_resume_with_a_state_that_does_not_fit(monkeypatch, capsys):
    stopped(monkeypatch, "out=run", "pos=none")
    name, whole = latest(), latest().read_bytes()
    tamper(lambda state: state["model"].update({"fc_norm.weight": torch.ones(5)}))
    assert train(monkeypatch, "resume=run", tiny=False) == 2
    message = "does not fit the model of run/config.yaml: fc_norm.weight has shape (5,) there, (16,) here\n"
    assert message in one_line(capsys)
    latest().unlink()
    name.write_bytes(whole)
    tamper(lambda state: state["model"].pop("head.bias"))
    assert train(monkeypatch, "resume=run", tiny=False) == 2
    assert "head.bias has shape (absent) there, (10,) here" in one_line(capsys)


def test_resume_of_a_run_killed_in_its_first_epoch(monkeypatch, tmp_path):
    assert train(monkeypatch, "out=run") == 0
    before = (tmp_path / "run" / "last.safetensors").read_bytes()
    for path in (*Path("run").glob("state-*"), Path("run/metrics.csv"), Path("run/last.safetensors")):
        path.unlink()
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == before


def test_seconds_go_on(monkeypatch):
    stopped(monkeypatch, "out=run")
    tamper(lambda state: (state["rows"][0].update(seconds=1000.0), state.update(seconds=1000.0)))
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    seconds = pd.read_csv("run/metrics.csv")["seconds"]
    assert seconds[0] == 1000
    assert seconds[1] > 1000


def test_resume_where_the_data_has_moved(monkeypatch, tmp_path, capsys):
    make_folder(tmp_path / "images")
    stopped(monkeypatch, *FOLDER[:-3], "train.epochs=2", "train.cpu=true", "data.workers=0", "out=run")
    (tmp_path / "images").rename(tmp_path / "moved")
    assert train(monkeypatch, "resume=run", tiny=False) == 2
    assert "data.root=images is not a folder" in one_line(capsys)
    assert train(monkeypatch, "resume=run", "data.root=moved", "data.rot=moved", tiny=False) == 2
    assert "unknown config key 'data.rot'; did you mean data.root" in one_line(capsys)
    assert train(monkeypatch, "resume=run", "data.root=moved", "data.flip=false", tiny=False) == 2
    assert "was trained with data.flip=True and cannot go on with False" in one_line(capsys)
    picture = tmp_path / "moved" / "train" / "bee" / "7.png"
    picture.rename(picture.with_name("8.png"))
    assert train(monkeypatch, "resume=run", "data.root=moved", tiny=False) == 2
    assert "was trained on other images than data.root=moved holds now" in one_line(capsys)
    picture.with_name("8.png").rename(picture)
    words = ["data=folder", "data.root=moved", "data.workers=1"]
    assert train(monkeypatch, "resume=run", *words, tiny=False) == 0
    assert vitpos.read_card("run/last.safetensors")["extra"]["data"]["root"] == "moved"


# sweeps


def test_sweep(monkeypatch, tmp_path):
    words = ["pos=none,rope_axial(theta=50),rope_axial + ape1d", "seed=0,1", "train.epochs=1", "out=sweep"]
    assert train(monkeypatch, "-m", *words) == 0
    runs = sorted(p.name for p in (tmp_path / "sweep").iterdir() if p.is_dir())
    assert runs == [
        "00-none-s0", "01-none-s1", "02-rope_axial-theta-50.0-s0", "03-rope_axial-theta-50.0-s1",
        "04-rope_axial_ape1d-s0", "05-rope_axial_ape1d-s1",
    ]  # fmt: skip
    cards = [vitpos.read_card(tmp_path / "sweep" / r / "last.safetensors") for r in runs]
    assert [c["pos"] for c in cards[::2]] == ["none", "rope_axial(theta=50.0)", "rope_axial + ape1d"]
    assert [c["extra"]["seed"] for c in cards] == [0, 1] * 3


def test_a_bad_spec_ends_a_sweep_before_its_first_run(monkeypatch, tmp_path, capsys):
    assert train(monkeypatch, "-m", "pos=none,rope_axail", "train.epochs=1", "out=sweep") == 2
    assert "did you mean rope_axial" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_does_not_end_its_sweep(monkeypatch, tmp_path, capsys):
    words = ["pos=none,rope_axial", "model.kwargs.embed_dim=12", "model.kwargs.num_heads=2,4", "train.epochs=1"]
    assert train(monkeypatch, "-m", *words, "out=sweep") == 2
    told = capsys.readouterr().err.splitlines()
    assert [line[: len("error in run 02: rope_axial needs")] for line in told[:-1]] == [
        "error in run 01: rope_axial needs", "error in run 03: rope_axial needs"
    ]  # fmt: skip
    assert told[-1] == "error: 2 of the sweep's runs failed: 01, 03"
    assert len(list((tmp_path / "sweep").glob("*-none-s0/last.safetensors"))) == 2


def test_a_sweep_finds_its_runs_in_another_order(monkeypatch, tmp_path, capsys):
    command = ["-m", "pos=none", "out=sweep", "resume=auto", "train.epochs=1"]
    assert train(monkeypatch, *command, "seed=0,1") == 0
    assert train(monkeypatch, *command, "seed=2,1,0") == 0
    assert capsys.readouterr().out.count("is finished") == 2
    assert sorted(p.parent.name for p in (tmp_path / "sweep").glob("*/last.safetensors")) == [
        "00-none-s0", "00-none-s2", "01-none-s1"
    ]  # fmt: skip


def test_paths_begin_at_home_and_are_not_empty(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert train(monkeypatch, "out=~/run", "train.epochs=1") == 0
    assert (tmp_path / "home" / "run" / "last.safetensors").exists()
    assert not (tmp_path / "~").exists()
    capsys.readouterr()
    for key in ("out", "resume", "init", "data.root"):
        assert train(monkeypatch, f"{key}=") == 2
        assert one_line(capsys) == f"error: {key}= is empty; write a path, or leave it out\n"


def test_the_model_of_init_is_its_own(monkeypatch, tmp_path, capsys):
    assert train(monkeypatch, "out=first", "pos=none", "train.epochs=1") == 0
    capsys.readouterr()
    words = ["init=first", "pos=none", "train.epochs=1", "train.cpu=true", "out=second"]
    assert train(monkeypatch, *words, "model.kwargs.depth=2", tiny=False) == 2
    assert "init=first has the model that it was trained with; leave model.kwargs.depth out" in one_line(capsys)
    assert train(monkeypatch, *words, tiny=False) == 0
    first, second = (OmegaConf.load(tmp_path / run / "config.yaml").model for run in ("first", "second"))
    assert second.kwargs.depth == first.kwargs.depth == 1
    assert second.kwargs.embed_dim == 16
    assert train(monkeypatch, *words, "resume=auto", tiny=False) == 0
    assert "second is finished" in capsys.readouterr().out


def test_sweep_is_refused_under_torchrun(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert train(monkeypatch, "-m", "seed=0,1") == 2
    assert "cannot run under torchrun" in one_line(capsys)
    assert files(tmp_path) == set()


@pytest.mark.slow
def test_parallel_sweep(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "pos=none,ape1d", "train.epochs=1", "out=sweep"]
    done = subprocess.run([sys.executable, str(TRAIN), *TINY, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "sweep").glob("*/last.safetensors"))) == 2
    bad = [*words[:-1], "out=bad", "model.kwargs.patch_size=5"]
    done = subprocess.run([sys.executable, str(TRAIN), *TINY, *bad], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bad").exists()


# bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pos=rope_axail"], "unknown encoding 'rope_axail'; did you mean rope_axial"),
        (["pos=rope_axial(theto=3)"], "no option 'theto'; did you mean theta"),
        (["pos=rope_axial(theta='a')"], "expected float"),
        (["pos=rope_axial("], "cannot read spec"),
        (["pos=rope_axial", "model.kwargs.embed_dim=36", "model.kwargs.num_heads=6"], "4"),
        (["model.kwargs.patch_size=5"], "patch"),
        (["model.kwargs.num_heads=5"], "timm cannot build vit_tiny_patch16_224"),
        (["data=null"], "take the name of a choice each, such as data=digits"),
        (["data.classes=3"], "unknown config key 'data.classes'; known: data.name"),
        (["hydra.foo=1"], "unknown config key 'hydra.foo'; known: hydra."),
        (["model.kwargs.deepth=5"], "deepth"),
        (["model.name=vit_tinny_patch16_224"], "vit_tinny_patch16_224"),
        (["model.kwargs.img_size=32"], "follows from the data"),
        (["data=folder"], "needs data.root"),
        (["data=folder", "data.root=nowhere"], "data.root=nowhere is not a folder"),
        (["data=digit"], "unknown data 'digit'; did you mean digits"),
        (["experiment=dem"], "unknown experiment 'dem'; did you mean demo"),
        (["data.placement=centre"], "data.placement"),
        (["resume=nowhere"], "no run there"),
        (["pos=none,rope_axial(theta=50, resize='ntk')"], "several encodings are a sweep, which takes -m"),
        (["train.optimizer=adan"], "train.optimizer=adan must be timm's; did you mean"),
        (["train.epoch=3"], "unknown config key 'train.epoch'; did you mean train.epochs?"),
        (["epochs=3"], "did you mean train.epochs?"),
        (["+foo=3"], "unknown config key 'foo'"),
        (["train.lr=fast"], "train.lr: Value 'fast'"),
        (["train.epochs=1.5"], "train.epochs: Value '1.5'"),
        (["seed"], "Error parsing override 'seed'"),
        (["train.batch_size=5000"], "must lie in 1..1221"),
        (["train.precision=half"], "one of no, bf16, fp16"),
        (["--multi"], "unknown flag '--multi'; did you mean --multirun"),
        (["-m", "pos=none,nonne"], "unknown encoding 'nonne'"),
        (["-m", "train.lrr=1,2"], "unknown config key 'train.lrr'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(monkeypatch, tmp_path, capsys, words, message):
    assert train(monkeypatch, *words) == 2
    assert message in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_out_that_is_taken(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert train(monkeypatch, "out=mine") == 2
    assert "holds files already" in one_line(capsys)
    assert files(tmp_path) == {"mine/thesis.txt"}


@pytest.mark.parametrize("words", [["out=file"], ["out=file/x"], ["-m", "out=file"], ["out=mine"]])
def test_out_is_checked_before_anything_is_computed(monkeypatch, tmp_path, capsys, words):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("data was loaded"))
    assert train(monkeypatch, *words) == 2
    assert words[-1] in one_line(capsys)
    assert files(tmp_path) == {"mine/thesis.txt", "file"}


@pytest.mark.parametrize("there", [False, True])
def test_an_interrupted_first_epoch_leaves_nothing(monkeypatch, tmp_path, capsys, there):
    if there:
        (tmp_path / "run").mkdir()
    handlers = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train(patch, "out=run") == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert list(tmp_path.rglob("*")) == ([tmp_path / "run"] if there else [])
    assert signal.getsignal(signal.SIGINT) is handlers
    assert train(monkeypatch, "out=run", "train.epochs=1") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_leaves_nothing(monkeypatch, tmp_path, capsys, number):
    load = data.load
    monkeypatch.setattr(data, "load", lambda *args: (load(*args), os.kill(os.getpid(), number))[0])
    assert train(monkeypatch, "out=run") == 128 + number
    assert capsys.readouterr().err == {15: "terminated\n", 10: "stopped by SIGUSR1\n"}[number]
    assert list(tmp_path.iterdir()) == []


def test_a_later_interrupt_leaves_what_can_be_resumed(monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train(patch, "out=run") == 130
    assert pd.read_csv("run/metrics.csv")["epoch"].tolist() == [1]
    assert not [f for f in files(tmp_path / "run") if Path(f).name.startswith(".")]
    assert train(monkeypatch, "resume=run", tiny=False) == 0


def test_a_failed_first_epoch_keeps_what_was_there(monkeypatch, tmp_path, capsys):
    """A folder that is no longer empty when the run ends keeps the rest."""
    (tmp_path / "run").mkdir()
    at_step(monkeypatch, 2, lambda: (Path("run/notes.txt").write_text("mine"), os.kill(os.getpid(), signal.SIGINT)))
    assert train(monkeypatch, "out=run") == 130
    assert files(tmp_path) == {"run/notes.txt"}


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_image_ends_the_run_in_one_line(monkeypatch, tmp_path, capsys, workers):
    bad = make_folder(tmp_path / "images") / "train" / "bee" / "3.png"
    bad.write_bytes(bad.read_bytes()[:40])
    assert train(monkeypatch, *FOLDER, f"data.workers={workers}", tiny=False) == 2
    assert "bee/3.png" in one_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["images"]


def test_empty_class_folder_ends_the_run_in_one_line(monkeypatch, tmp_path, capsys):
    (make_folder(tmp_path / "images") / "train" / "cow").mkdir()
    assert train(monkeypatch, *FOLDER, tiny=False) == 2
    assert "cow holds no image" in one_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["images"]


def test_folder_trains(monkeypatch, tmp_path):
    make_folder(tmp_path / "images")
    assert train(monkeypatch, *FOLDER, "data.workers=1", "out=run", tiny=False) == 0
    assert vitpos.read_card(tmp_path / "run" / "last.safetensors")["classes"] == ["ant", "bee"]


def test_a_refused_step_names_the_samples_behind_its_copies(monkeypatch, tmp_path, capsys):
    words = ["train.lr=1e30", "train.clip_grad=0", "train.warmup=0", "train.repeats=3"]
    assert train(monkeypatch, "out=run", *words, "train.nonfinite=stop") == 2
    capsys.readouterr()
    report = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    assert len(report["samples"]) == 300
    assert len(set(report["samples"])) == 100
    assert set(report["samples"]) <= set(data.load({"name": "digits"}).ids)
