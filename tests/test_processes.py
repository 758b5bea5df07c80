"""Several processes train as one does: the same images, gradients and losses; they stop together and resume exactly."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from commands import TINY, TRAIN
from test_resume import RICH, contents, saved_steps

import vitpos

pytestmark = [pytest.mark.usefixtures("somewhere"), pytest.mark.slow]
CALL = f"""
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""
# what a process is fed and computes, written when it ends
RECORD = """
import atexit, os, torch
from accelerate import Accelerator
from vitpos import data, training

seen = {"ids": [], "images": [], "losses": [], "rates": []}
backward, clip, set_rate = training.backward, Accelerator.clip_grad_norm_, training.set_learning_rate

def watching(iterate):
    def watched(self, batches, *, epoch=None, **kwargs):
        if epoch is not None:
            seen["ids"] += [[self.ids[i] for i in batch.tolist()] for batch in batches]
        return iterate(self, batches, epoch=epoch, **kwargs)
    return watched

for kind in (data.Dataset, data.Folder):
    kind.iterate = watching(kind.iterate)

def recorded(accelerator, model, criterion, x, *args):
    seen["images"].append(x.clone())
    loss, accuracy = backward(accelerator, model, criterion, x, *args)
    seen["losses"].append(loss.item())
    return loss, accuracy

def clipped(self, parameters, limit):
    parameters = list(parameters)
    whole = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters)
    seen.setdefault("gradients", [g.clone() for g in whole])
    return clip(self, parameters, limit)

def rate(optimizer, *args):
    set_rate(optimizer, *args)
    seen["rates"].append(optimizer.param_groups[0]["lr"])

training.backward, Accelerator.clip_grad_norm_, training.set_learning_rate = recorded, clipped, rate
name = sys.argv[1].removeprefix("out=") + "-" + os.environ.get("RANK", "0") + ".pt"
atexit.register(lambda: torch.save(seen, name))
"""
# one of two processes, at a step: something happens to it alone
ALONE = """
import os, signal
from vitpos import training
backward, calls = training.backward, []

def disturbed(*args):
    calls.append(1)
    loss, accuracy = backward(*args)
    if os.environ.get("RANK") == "1" and len(calls) == 3:
        {event}
    return loss, accuracy

training.backward = disturbed
"""


def run(code: str, *words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """train.py after some code. Where no accelerator is, none is told so: train.py has to find out by itself."""
    Path("called.py").write_text("import sys\n" + code + CALL)
    given = [w for w in words if w != "train.cpu=true" or torch.accelerator.is_available()]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "called.py", *given]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def recorded(name: str, *words: str, processes: int = 2) -> list[dict[str, list]]:
    done = run(RECORD, f"out={name}", *words, processes=processes)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{name}-{rank}.pt") for rank in range(processes)]


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The norm of the difference of two gradients, as a share of the second one's."""
    a, b = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (ours, theirs))
    return ((a - b).norm() / b.norm()).item()


DIGITS = [*TINY, "pos=rope_axial + ape1d", "train.batch_size=120", "train.epochs=1", "data.placement=uniform"]


@pytest.mark.parametrize(
    ("words", "ways"),
    [(DIGITS, [[], ["train.accumulate=3"], ["train.sharding=fsdp", "train.ema=0.9"]])],
)
def test_two_processes_compute_what_one_does(words, ways):
    one = recorded("one", *words, processes=1)[0]
    assert len(one["ids"]) >= 3
    for number, extra in enumerate(ways):
        first, second = recorded(f"two{number}", *words, *extra)
        assert [a + b for a, b in zip(first["ids"], second["ids"])] == one["ids"]
        for a, b, images in zip(first["images"], second["images"], one["images"]):
            assert torch.equal(torch.cat([a, b]), images)
        assert first["rates"] == second["rates"] == one["rates"]
        losses = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"])]
        furthest = max(abs(a - b) / b for a, b in zip(losses[:5], one["losses"]))
        print(f"{extra}: gradients {apart(first['gradients'], one['gradients']):.1e} apart, losses {furthest:.1e}")
        assert apart(first["gradients"], one["gradients"]) < 1e-6
        assert furthest < 1e-5
    other = recorded("other", *words, "seed=1", processes=1)[0]
    assert apart(other["gradients"], one["gradients"]) > 1e-2, "the control"
    assert abs(other["losses"][0] / one["losses"][0] - 1) > 1e-4


def test_one_process_speaks_and_writes(tmp_path):
    done = run("", *TINY, "out=run")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 3, "one process prints"
    assert not [line for line in done.stderr.splitlines() if line.startswith("rope_axial")]
    assert {p.name for p in tmp_path.iterdir()} == {"run", "called.py"}
    assert pd.read_csv("run/metrics.csv")["epoch"].tolist() == [1, 2]
    assert 'processes": 2' in Path("run/environment.json").read_text()
    vitpos.load("run/last.safetensors")


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_processes_stop_together_and_go_on_exactly(sharding):
    """A signal that reaches one of them."""
    words = [*TINY, *RICH, f"train.sharding={sharding}"]
    assert run("", *words, "out=whole").returncode == 0
    done = run(ALONE.format(event="os.kill(os.getpid(), signal.SIGTERM)"), *words, "out=run")
    assert done.stderr.count("terminated: step 3 is saved, resume=run goes on\n") == 1
    assert done.stderr.count("terminated") == 1
    assert "exitcode  : 75" in done.stderr, "of each process; torchrun's own is 1"
    assert saved_steps() == [3]
    again = run("", "resume=run")
    assert again.returncode == 0, again.stderr
    assert contents("run") == contents("whole")


def test_processes_agree_on_a_loss_that_is_not_finite():
    event = "loss = loss * float('nan')"
    done = run(ALONE.format(event=event), *TINY, "out=run")
    assert done.returncode == 1
    assert done.stderr.count("the loss is nan in step 3") == 1
    assert saved_steps() == [2]
    skipping = run(ALONE.format(event=event), *TINY, "out=skipping", "train.nonfinite=skip")
    assert skipping.returncode == 0, skipping.stderr
    assert skipping.stderr.count("the loss is nan in step 3") == 1
    assert pd.read_csv("skipping/metrics.csv")["skipped_steps"].tolist() == [1, 0]


def test_a_full_disk_ends_all_processes():
    code = """
import os, resource
from vitpos import runs
stepped = runs.RunFolder.stepped
def full(self, state):
    if state.step == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    stepped(self, state)
runs.RunFolder.stepped = full
"""
    done = run(code, *TINY, "out=run", "train.save_every=1")
    assert done.returncode == 1
    assert done.stderr.count("error: cannot write to run: File too large; state-00000002-") == 1
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]
    assert saved_steps() == [1, 2]
