"""A run that was stopped, killed or short of disk goes on as if nothing had been; one that cannot says so."""

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from commands import FOLDER, TINY, Stop, at_step, files, latest, make_folder, one_line, train

import vitpos
from vitpos import data, runs, states, training

pytestmark = pytest.mark.usefixtures("somewhere")
# dropout, an average and clipping: what a resumed run may get wrong; 8 steps in 2 epochs
SMALL = ["data.canvas=16", "data.object_size=8"]
RICH = ["pos=ape2d", "train.ema=0.9", "model.kwargs.proj_drop_rate=0.1", *SMALL]
TIMINGS = ["images_per_second", "seconds"]


def contents(folder) -> dict[str, object]:
    """All that finished runs are compared by: the bytes of the weights, the metrics, the last state."""
    rows = pd.read_csv(f"{folder}/metrics.csv").drop(columns=TIMINGS)
    path, damaged = states.newest(Path(folder))
    assert not damaged
    state = torch.load(path, weights_only=True)
    tensors = {f"{kind}.{k}": v for kind in ("model", "ema") for k, v in (state[kind] or {}).items()}
    tensors |= {f"{i}.{k}": v for i, moments in state["optimizer"]["state"].items() for k, v in moments.items()}
    return {
        "weights": Path(folder, "last.safetensors").read_bytes(),
        "rows": rows.to_csv(),
        "tensors": {k: v.numpy().tobytes() for k, v in tensors.items()},
        "groups": state["optimizer"]["param_groups"],
        "position": (state["step"], state["skips"], state["totals"].tolist()),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        assert train(patch, "out=run", *RICH) == 0
        return contents("run")


def saved_steps(folder: str = "run") -> list[int]:
    return sorted(int(path.name[6:14]) for path in Path(folder).glob("state-*"))


def stop_at(monkeypatch, step: int) -> None:
    """Stands for a process that dies right after a step."""
    stepped = runs.RunFolder.stepped

    def stopping(self, state):
        stepped(self, state)
        if state.step == step:
            raise Stop

    monkeypatch.setattr(runs.RunFolder, "stepped", stopping)


def killed(monkeypatch, step: int, *words: str, tiny: bool = True) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(Stop):
            train(patch, *words, tiny=tiny)


def test_a_run_that_is_stopped_again_and_again_is_the_same_run(monkeypatch, whole):
    """In mid-epoch, with the epoch's last step but not its evaluation done, and where the state is a step behind."""
    killed(monkeypatch, 2, "out=run", *RICH, "train.save_every=2")
    killed(monkeypatch, 4, "resume=run", tiny=False)
    assert not Path("run/metrics.csv").exists()
    killed(monkeypatch, 7, "resume=run", tiny=False)
    assert saved_steps() == [4, 6]
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert contents("run") == whole


def test_another_seed_is_another_run(monkeypatch, whole):
    """The control of the comparison."""
    assert train(monkeypatch, "out=run", *RICH, "seed=1") == 0
    assert all(contents("run")[k] != whole[k] for k in ("weights", "rows", "tensors"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [RICH, ["pos=cpe", "train.optimizer=lamb", "train.mixup=0.2", "train.accumulate=3"]])
def test_resumed_after_any_step_it_is_the_same_run(monkeypatch, words):
    assert train(monkeypatch, "out=whole", *words) == 0
    for step in range(1, 9):
        killed(monkeypatch, step, f"out=part{step}", *words, "train.save_every=1")
        assert saved_steps(f"part{step}")[-1] == step
        assert train(monkeypatch, f"resume=part{step}", tiny=False) == 0
        assert contents(f"part{step}") == contents("whole"), step


@pytest.mark.parametrize(("before", "after"), [(0, 2), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_the_number_of_workers_may_change(monkeypatch, before, after):
    make_folder(Path("images"))
    words = [*FOLDER, "train.epochs=2", "train.save_every=1"]
    assert train(monkeypatch, "out=whole", *words, f"data.workers={before}", tiny=False) == 0
    killed(monkeypatch, 2, "out=run", *words, f"data.workers={before}", tiny=False)
    assert train(monkeypatch, "resume=run", f"data.workers={after}", tiny=False) == 0
    ours, theirs = contents("run"), contents("whole")
    assert ours.pop("weights") != theirs.pop("weights"), "its card names the number of workers"
    assert ours == theirs


def saving(told, *words: str) -> None:
    """In a process of its own: trains until a second state is written but not in its place, tells, and waits."""
    with pytest.MonkeyPatch.context() as patch:
        replace, saved = os.replace, []

        def replacing(old, new):
            if ".saving-state" in str(old):
                saved.append(new)
                if len(saved) == 2:
                    told.set()
                    signal.pause()
            replace(old, new)

        patch.setattr(os, "replace", replacing)
        train(patch, *words)


def test_killed_while_it_saves(monkeypatch, capsys, whole):
    """kill -9 in mid-epoch. Until then nobody else may go on."""
    processes = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    told = processes.Event()
    other = processes.Process(target=saving, args=(told, *RICH, "out=run", "train.save_every=1"))
    other.start()
    try:
        assert told.wait(180)
        there = files(Path("run"))
        assert [f for f in there if f.startswith(".saving-state")]
        capsys.readouterr()
        assert train(monkeypatch, "resume=run", tiny=False) == 2
        assert "the run in run is being trained by another process" in one_line(capsys)
        assert files(Path("run")) == there
    finally:
        other.kill()
        other.join()
    assert saved_steps() == [1]
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert not [f for f in files(Path("run")) if f.startswith(".")]
    assert contents("run") == whole


def test_of_two_new_runs_in_one_folder_the_first_has_it(monkeypatch, capsys):
    Path("run").mkdir()
    link = os.link

    def second(old, new):
        Path(new).write_text("theirs")
        link(old, new)

    monkeypatch.setattr(os, "link", second)
    assert train(monkeypatch, "out=run") == 2
    assert "out=run holds files already" in one_line(capsys)
    assert {f: Path(f).read_text() for f in files(Path())} == {"run/config.yaml": "theirs"}


def test_a_file_system_without_links_and_locks(monkeypatch, capsys):
    """Such as some that clusters and containers mount."""
    refused = {fcntl: ("lockf", errno.ENOLCK), os: ("link", errno.EPERM)}
    for module, (name, number) in refused.items():
        monkeypatch.setattr(module, name, lambda *_, n=number: (_ for _ in ()).throw(OSError(n, os.strerror(n))))
    assert train(monkeypatch, "out=run", "train.epochs=1", *SMALL) == 0
    assert capsys.readouterr().err == "run cannot be locked (No locks available): start no second process on it\n"
    assert {"config.yaml", "last.safetensors"} < files(Path("run"))


def test_what_a_run_began_from_may_be_gone(monkeypatch, capsys):
    """And its name may hold what Hydra's grammar would take apart."""
    odd = "a run (1), x=2"
    assert train(monkeypatch, f"out={odd}", *RICH, "train.epochs=1") == 0
    words = [*(word for word in TINY if not word.startswith("model.")), f"init={odd}", "pos=rope_mixed"]
    words += ["preserve=true", "data.canvas=20", "train.ema=0.9", "train.epochs=1"]
    assert train(monkeypatch, "out=whole", *words, tiny=False) == 0
    killed(monkeypatch, 2, "out=run", *words, "train.save_every=1", tiny=False)
    shutil.rmtree(odd)
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert contents("run") == contents("whole")
    assert vitpos.load("run/last.safetensors").position.spec == vitpos.parse("rope_mixed + fading(ape2d)")
    for path in Path("run").glob("state-*"):
        path.unlink()
    assert train(monkeypatch, "resume=run", tiny=False) == 2
    assert "no checkpoint at" in one_line(capsys), "without a state it would begin anew"


# damage


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_damaged_state_is_passed_over(monkeypatch, capsys, whole):
    killed(monkeypatch, 7, "out=run", *RICH, "train.save_every=2")
    older, newer = sorted(Path("run").glob("state-*"))
    flip(newer, 8 * 30_000 + 3)
    capsys.readouterr()
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert capsys.readouterr().err == f"run: {newer.name} is damaged; going on from {older.name}, saved before\n"
    assert contents("run") == whole
    assert saved_steps() == [8, 8], "the damaged one is gone"


def test_no_state_is_whole(monkeypatch, capsys):
    killed(monkeypatch, 7, "out=run", "train.save_every=2", *SMALL)
    older, newer = sorted(Path("run").glob("state-*"))
    newer.write_bytes(newer.read_bytes()[:1000])
    flip(older, 0)
    before = {f: Path("run", f).read_bytes() for f in files(Path("run"))}
    assert train(monkeypatch, "resume=run", tiny=False) == 2
    assert f"no state that was saved ({newer.name} and {older.name}) is whole; start a new run" in one_line(capsys)
    assert {f: Path("run", f).read_bytes() for f in files(Path("run"))} == before


def test_every_bit_is_checked(tmp_path):
    path = states.write(tmp_path, 3, {"x": torch.arange(3.0)})
    assert states.newest(tmp_path) == (path, [])
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 61):
        flip(path, bit)
        assert states.newest(tmp_path) == (None, [path])
        path.write_bytes(content)
    for length in (0, 1, len(content) - 1):
        path.write_bytes(content[:length])
        assert not states.intact(path)
    path.write_bytes(content)
    assert states.intact(path)


# a full disk


@pytest.fixture
def disk(monkeypatch):
    """What calls it has no more room for a file of more than ``size`` bytes, until the test's end or ``None``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [30_000, pytest.param(5_000, marks=pytest.mark.slow)])  # state 70 kB, weights 13
def test_a_full_disk_leaves_the_state_before(monkeypatch, capsys, whole, disk, size):
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: disk(size))
        assert train(patch, "out=run", *RICH, "train.save_every=3") == 2
    disk(None)
    assert saved_steps() == [3]
    kept = f"{latest().name}, saved before, is whole; make room, then resume=run goes on"
    assert one_line(capsys) == f"error: cannot write to run: File too large; {kept}\n"
    assert not [f for f in files(Path("run")) if f.startswith(".")]
    assert train(monkeypatch, "resume=run", "train.save_every=null", tiny=False) == 0
    assert contents("run") == whole


def test_a_disk_that_is_full_from_the_start_leaves_nothing(monkeypatch, tmp_path, capsys, disk):
    at_step(monkeypatch, 1, lambda: disk(5_000))
    assert train(monkeypatch, "out=run", "train.save_every=1", *SMALL) == 2
    disk(None)  # pytest itself may be writing to a file
    assert "cannot write to run: File too large; nothing was saved before" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which only root can")
def test_no_space_left_on_device(monkeypatch, tmp_path, capsys, whole):
    Path("disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", "disk"], check=True)
    try:
        words = [*RICH, "train.save_every=1", "model.kwargs.depth=2"]
        assert train(monkeypatch, "out=disk/run", *words) == 2
        assert "cannot write to disk/run: No space left on device" in one_line(capsys)
        kept, damaged = states.newest(Path("disk/run"))
        assert kept is not None
        assert not damaged
        assert not [f for f in files(Path("disk/run")) if f.startswith(".")]
        subprocess.run(["mount", "-o", "remount,size=9m", "disk"], check=True)
        assert train(monkeypatch, "resume=disk/run", tiny=False) == 0
        shutil.copytree("disk/run", "run")
    finally:
        subprocess.run(["umount", "disk"], check=True)
    assert train(monkeypatch, "out=whole", *words) == 0
    assert contents("run") == contents("whole")


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("call", [1, 5, 44])  # of torch's: in and outside of what it hides errors of
def test_what_is_raised_while_a_state_is_written_stays_itself(monkeypatch, tmp_path, kind, call):
    state, calls, write = {"a": torch.zeros(1000), "b": torch.ones(100)}, [], states._Hashing.write
    error = kind("what happened")

    def failing(self, content):
        calls.append(1)
        if len(calls) == call:
            raise error
        return write(self, content)

    monkeypatch.setattr(states._Hashing, "write", failing)
    with pytest.raises(kind) as caught:
        states.write(tmp_path, 3, state)
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_what_torch_cannot_save_is_in_its_own_words(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("no such storage")))
    with pytest.raises(RuntimeError, match="no such storage"):
        states.write(tmp_path, 3, {})
    assert list(tmp_path.iterdir()) == []


def test_only_a_full_disk_needs_room(monkeypatch, capsys):
    write = states.write

    def failing(folder, step, state):
        if step > 1:
            raise OSError(errno.EIO, "Input/output error")
        return write(folder, step, state)

    monkeypatch.setattr(states, "write", failing)
    assert train(monkeypatch, "out=run", "train.save_every=1", *SMALL) == 2
    kept = f"{latest().name}, saved before, is whole; mend that, then resume=run goes on"
    assert one_line(capsys) == f"error: cannot write to run: Input/output error; {kept}\n"


# signals of a scheduler


def test_a_signal_waits_for_the_step_and_its_state(monkeypatch, capsys, whole):
    """Even if it is the epoch's last."""
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert train(patch, "out=run", *RICH) == 75
    assert capsys.readouterr().err == "stopped by SIGUSR1: step 4 is saved, resume=run goes on\n"
    assert saved_steps() == [4]
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert contents("run") == whole


def test_the_same_command_again_goes_on(monkeypatch, capsys, whole):
    command = ["out=run", "resume=auto", *RICH]
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(patch, *command) == 75
    assert capsys.readouterr().err == "terminated: step 2 is saved, resume=run goes on\n"
    assert train(monkeypatch, *command) == 0
    assert contents("run") == whole
    assert train(monkeypatch, *command) == 0
    assert "run is finished" in capsys.readouterr().out
    assert train(monkeypatch, *command, "seed=3") == 2
    assert "the run in run has seed=0, not 3; choose another out=" in one_line(capsys)
    assert train(monkeypatch, "resume=auto") == 2
    assert "name that with out=FOLDER" in one_line(capsys)


def terminated(step: int, words: list[str]) -> None:
    """In a process of its own: trains until every process of its group is sent SIGTERM, as by ``timeout``."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that is called, and faster
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: subprocess.run(["sh", "-c", "kill -TERM 0"], check=False))
        sys.exit(train(patch, *words, tiny=False))


@pytest.mark.slow
@pytest.mark.parametrize(("step", "saved"), [(5, 4), (4, 4)])  # in the second epoch; in the evaluation of the first
def test_a_signal_to_every_process_of_a_run(monkeypatch, step, saved):
    """The processes that read images leave the answer to the main one."""
    make_folder(Path("images"))
    words = [*FOLDER, "train.epochs=2", "data.workers=2"]
    process = multiprocessing.get_context("spawn").Process(target=terminated, args=(step, [*words, "out=run"]))
    process.start()
    process.join(180)
    assert process.exitcode == 75
    assert saved_steps()[-1] == saved
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert train(monkeypatch, "out=whole", *words, tiny=False) == 0
    assert contents("run") == contents("whole")


@pytest.mark.slow
def test_a_sweep_goes_on(monkeypatch, capsys):
    command = ["-m", "out=sweep", "resume=auto", "seed=0,1", "train.epochs=1"]
    with monkeypatch.context() as patch:
        at_step(patch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))  # (one of them is evaluation)
        assert train(patch, *command) == 75
    assert [p.name for p in sorted(Path("sweep").glob("*/last.safetensors"))] == ["last.safetensors"]
    assert train(monkeypatch, *command) == 0
    assert "00-rope_axial-s0 is finished" in capsys.readouterr().out
    assert len(list(Path("sweep").glob("*/last.safetensors"))) == 2


# losses that are not finite


def poison(monkeypatch, *steps: int) -> None:
    """Not-a-number in the images of these calls."""
    normalize, calls = data.normalize, []

    def poisoned(x, info):
        calls.append(1)
        return normalize(x, info) * (float("nan") if len(calls) in steps else 1.0)

    monkeypatch.setattr(data, "normalize", poisoned)


def batch_ids(step: int) -> list[str]:
    dataset = data.load({"name": "digits"}, "train", 0)
    batches = [b for epoch in (0, 1) for b in data.epoch_batches(len(dataset), 300, 0, epoch)]
    return [dataset.ids[i] for i in batches[step - 1]]


def test_a_loss_that_is_not_finite_stops_before_its_step(monkeypatch, capsys, whole):
    with monkeypatch.context() as patch:
        poison(patch, 3)
        assert train(patch, "out=run", *RICH) == 2
    assert "the loss is nan in step 3 (epoch 1; samples in run/nonfinite.json); a lower train.lr" in one_line(capsys)
    report = json.loads(Path("run/nonfinite.json").read_text())
    assert report.pop("samples") == batch_ids(3)
    assert report == {"step": 3, "epoch": 1, "loss": "nan", "gradient_norm": "nan"}
    assert saved_steps() == [2]
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert contents("run") == whole, "the images of step 3 are as good as any"


def test_steps_can_be_skipped(monkeypatch, capsys):
    words = ["out=run", "train.nonfinite=skip", "train.nonfinite_limit=2", "train.save_every=1", *RICH]
    with monkeypatch.context() as patch:
        poison(patch, 2, 5)  # (the fifth is evaluation's)
        killed(patch, 4, *words)
    before, after = (torch.load(p, weights_only=True) for p in sorted(Path("run").glob("state-*")))
    assert (before["step"], before["totals"][0, 2].item()) == (3, 2), "three steps, two of them taken"
    assert not torch.equal(before["model"]["head.weight"], after["model"]["head.weight"])
    with monkeypatch.context() as patch:
        poison(patch, 2, 3)  # the first is evaluation's
        assert train(patch, "resume=run", tiny=False) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "the loss is nan in step 2 (epoch 1; samples in run/nonfinite.json): skipped"
    assert err[1].startswith("the loss is nan in step 5 (epoch 2")
    assert err[2].startswith("error: the loss is nan in step 6 (epoch 2; samples in run/nonfinite.json), the last of 2")
    assert pd.read_csv("run/metrics.csv")["skipped_steps"].tolist() == [1]
    assert train(monkeypatch, "resume=run", tiny=False) == 0
    assert pd.read_csv("run/metrics.csv")["skipped_steps"].tolist() == [1, 1]


def test_a_gradient_that_is_not_finite_stops_too(monkeypatch, capsys):
    backward = training.backward

    def overflowing(accelerator, model, *args):
        result = backward(accelerator, model, *args)
        next(model.parameters()).grad.view(-1)[0] = float("inf")
        return result

    monkeypatch.setattr(training, "backward", overflowing)
    assert train(monkeypatch, "out=run", *SMALL) == 2
    assert "the gradient's norm is inf in step 1" in one_line(capsys)
    assert saved_steps() == [0], "what can be gone on from, before any step"
    monkeypatch.undo()


def test_weights_that_are_not_finite_are_never_saved(monkeypatch, capsys):
    """Where gradients are not clipped their norm is not looked at, and the next loss comes too late."""
    words = ["train.lr=1e39", "train.clip_grad=0", "train.warmup=0", *SMALL]
    assert train(monkeypatch, "out=run", *words) == 2
    assert "the weights are not saved, nothing was saved before; a lower train.lr may help" in one_line(capsys)
    assert not Path("run").exists()
