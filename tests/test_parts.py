"""An evaluation that was stopped goes on, and several processes share one: bit for bit what one through run gives."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from evaluating import EVAL, make_run, start
from fakes import Squares
from probing import encoded, subject

import vitpos
from vitpos import evaluation, parts, report
from vitpos.probes import Subject

QUICK = ["images=20", "batch_size=4", "probes=[translation,shuffle,location,resolution,attention]", "threads=1",
         "translation.phase=false", "location.folds=2", "device=cpu"]  # fmt: skip


class Stop(BaseException):
    """Stands for a killed process."""


def decisions(folder):
    with np.load(folder / "predictions.npz") as file:
        return {key: (file[key].dtype, file[key].tobytes()) for key in file}


def doing(monkeypatch, count, action):
    """Do something at the `count`-th forward of the model."""
    logits, calls = Subject.logits, []

    def acting(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            action()
        return logits(self, *args, **kwargs)

    monkeypatch.setattr(Subject, "logits", acting)
    return calls


def stop():
    raise Stop


# one process


def test_a_part_is_measured_once_and_only_for_what_it_depends_on(tmp_path):
    asked = []

    def measure(numbers):
        for i in numbers:
            asked.append(i)
            if asked.count(2) == 1 and i == 2:
                raise Stop
            yield {"x": np.full((2, 3), i), "why": np.array("a reason")}

    root = tmp_path / "made" / "out"
    with pytest.raises(Stop):
        parts.Parts(root, "same").each(["a"] * 4, measure)
    assert asked == [0, 1, 2]
    again = parts.Parts(root, "same")
    found = again.each(["a"] * 4, measure)
    assert asked == [0, 1, 2, 2, 3]
    assert [int(one["x"][0, 0]) for one in found] == [0, 1, 2, 3]
    assert str(found[0]["why"]) == "a reason"
    # another sweep of the same name is another part; so is the same under another identity, which replaces these
    again.each(["a"], measure)
    assert asked[5:] == [0]
    (root / ".parts" / "same" / "001-a-0001.npz").write_bytes(b"PK damaged")
    parts.Parts(root, "same").each(["a"] * 4, measure)
    assert asked[6:] == [1]
    other = parts.Parts(root, "other")
    other.each(["a"], measure)
    assert asked[7:] == [0]
    assert [path.name for path in (root / ".parts").iterdir()] == ["other"]
    other.discard()
    assert not root.exists()
    assert len(parts.Parts().each(["a"], measure)) == 1
    assert not list(tmp_path.rglob("*.npz"))


def test_parts_are_of_their_weights_images_and_options(tmp_path):
    def identity(model, images=None, options=(), config=(), **kwargs):
        about = subject(model, images, **kwargs)
        return evaluation.keep(tmp_path, about, dict(options), dict(config), parts.Processes()).folder.name

    model = encoded("ape1d")
    first = identity(model)
    assert identity(encoded("ape1d")) == first
    others = [
        identity(model, limit=3), identity(model, Squares(n=41)), identity(model, options={"shuffle": {"draws": 3}}),
        identity(model, config={"root": "elsewhere"}), identity(model, places=[0, 2, 1, 3]),
        identity(encoded("rope_axial")), identity(vitpos.set_resize(encoded("rope_axial"), "interpolate")),
    ]  # fmt: skip
    two = parts.Processes()
    two.exchange = lambda value: [value, value]
    assert evaluation.keep(tmp_path, subject(model), {}, {}, two).folder.name == first
    two.exchange = lambda value: [value, "another"]  # as where each has random weights of its own
    with pytest.raises(ValueError, match="different models"):
        evaluation.keep(tmp_path, subject(model), {}, {}, two)
    with torch.no_grad():
        model.head.bias[0] += 1e-7
    assert len({first, identity(model), *others}) == 9


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "rope_axial")


@pytest.fixture(scope="module")
def whole(run):
    """The decisions of an evaluation that ran through, and how many forwards it took."""
    with pytest.MonkeyPatch.context() as patch:
        calls = doing(patch, 0, stop)
        assert start(patch, f"checkpoint={run}", *QUICK, f"out={run / 'whole'}") == 0
    return decisions(run / "whole"), len(calls)


@pytest.mark.parametrize("at", [0.3, 0.9])
def test_an_evaluation_that_was_stopped_goes_on(run, whole, at, tmp_path, evaluate, monkeypatch):
    words = [f"checkpoint={run}", *QUICK, f"out={tmp_path / 'out'}"]
    count = round(at * whole[1])
    with monkeypatch.context() as patch:
        doing(patch, count, stop)
        with pytest.raises(Stop):
            evaluate(*words)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".parts"]
    with monkeypatch.context() as patch:
        calls = doing(patch, 0, stop)
        assert evaluate(*words)[0] == 0
    assert len(calls) < whole[1] - 0.7 * count
    assert decisions(tmp_path / "out") == whole[0]
    assert not (tmp_path / "out" / ".parts").exists()


def test_what_was_kept_of_another_evaluation_is_not_used(run, whole, tmp_path, evaluate, monkeypatch):
    words = [f"checkpoint={run}", *QUICK, f"out={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        doing(patch, whole[1] // 2, stop)
        with pytest.raises(Stop):
            evaluate(*words, "batch_size=5")
    with monkeypatch.context() as patch:
        calls = doing(patch, 0, stop)
        assert evaluate(*words)[0] == 0
    assert len(calls) == whole[1]
    assert decisions(tmp_path / "out") == whole[0]


def test_a_signal_says_that_the_same_command_goes_on(run, whole, tmp_path, evaluate, monkeypatch):
    words = [f"checkpoint={run}", *QUICK, f"out={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        doing(patch, whole[1] // 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        code, _, err = evaluate(*words)
    assert code == 75
    assert err == f"terminated: what is measured is kept in {tmp_path / 'out'}; the same command goes on\n"
    assert evaluate(*words)[0] == 0
    assert decisions(tmp_path / "out") == whole[0]


def test_of_several_models_none_is_measured_again(tmp_path, evaluate, monkeypatch):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, "none" if name == "a" else "rope_axial")
    words = [f"runs={tmp_path / 'runs'}", "images=8", "batch_size=4", "probes=[shuffle]"]
    with monkeypatch.context() as patch:
        calls = doing(patch, 0, stop)
        assert evaluate(*words)[0] == 0
    total = len(calls)
    first = decisions(tmp_path / "runs" / "b" / "eval")
    with monkeypatch.context() as patch:
        doing(patch, total - 2, stop)
        with pytest.raises(Stop):
            evaluate(*words)
    with monkeypatch.context() as patch:
        calls = doing(patch, 0, stop)
        assert evaluate(*words)[0] == 0
    assert len(calls) < 0.6 * total
    assert decisions(tmp_path / "runs" / "b" / "eval") == first
    assert not list(tmp_path.rglob(".parts"))


def test_a_users_error_leaves_nothing(run, tmp_path, evaluate):
    words = [f"checkpoint={run}", *QUICK, f"out={tmp_path / 'a' / 'out'}", "resolution.upsample=[26]"]
    code, _, err = evaluate(*words)
    assert (code, "try 24 or 28" in err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_line_of_progress_where_there_is_no_terminal(run, tmp_path, evaluate, monkeypatch):
    monkeypatch.setattr("vitpos.evaluation.EVERY", 0)
    words = "images=20", "batch_size=4", "probes=[translation]", "translation.phase=false"
    code, _, err = evaluate(f"checkpoint={run}", *words, f"out={tmp_path / 'out'}")
    assert code == 0
    assert "canvas, patch: 64 of 320 images" in err


# processes

KILLED = """
import os, runpy, signal, sys
from vitpos.probes import Subject
logits, calls = Subject.logits, []
def dying(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
    return logits(self, *args, **kwargs)
Subject.logits = dying
sys.argv = ["eval.py", *sys.argv[1:]]
runpy.run_path({path!r}, run_name="__main__")
"""


def command(*words, processes=1, kill_at=0, folder=None):
    call = [str(EVAL)]
    if kill_at:
        (folder / "killed.py").write_text(KILLED.format(count=kill_at, path=str(EVAL)))
        call = [str(folder / "killed.py")]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = [sys.executable, *launcher, *call, *words]
    return subprocess.run(done, capture_output=True, text=True, env=env, timeout=300, check=False)


@pytest.mark.slow
def test_a_killed_process_goes_on_alone_and_as_two(run, whole, tmp_path):
    words = [f"checkpoint={run}", *QUICK, f"out={tmp_path / 'out'}"]
    done = command(*words, kill_at=whole[1] // 2, folder=tmp_path)
    assert done.returncode == -signal.SIGKILL
    kept = list((tmp_path / "out").rglob("*.npz"))
    assert len(kept) > 5
    done = command(*words, processes=2)
    assert done.returncode == 0, done.stderr
    assert decisions(tmp_path / "out") == whole[0]
    # two from the start, one of them killed; then one alone
    done = command(*words, processes=2, kill_at=whole[1] // 4, folder=tmp_path)
    assert done.returncode != 0
    assert list((tmp_path / "out").rglob(".parts/*/*.npz"))
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert decisions(tmp_path / "out") == whole[0]


@pytest.mark.slow
def test_two_processes_give_what_one_gives(run, whole, tmp_path):
    done = command(f"checkpoint={run}", *QUICK, f"out={tmp_path / 'two'}", processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1, "one process speaks"
    assert decisions(tmp_path / "two") == whole[0]
    results = report.read(tmp_path / "two" / "results.json")
    assert results["runs"] == report.read(run / "whole" / "results.json")["runs"]
    refused = command(f"checkpoint={run}", f"out={tmp_path / 'bad'}", "resolution.upsample=[26]", processes=2)
    assert refused.returncode != 0
    assert "error: 26 of size 26x26" in refused.stderr.replace("height ", "")
