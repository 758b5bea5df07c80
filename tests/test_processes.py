"""Several processes train as one does: the same images, gradients and losses; they stop together and resume exactly."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import TINY, TRAIN
from PIL import Image
from test_resume import RICH, contents, saved_steps

import vitpos
from vitpos import states

pytestmark = [pytest.mark.usefixtures("somewhere"), pytest.mark.slow]
CALL = f"""
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""
# what a process is fed and computes, written when it ends
RECORD = """
import atexit, os, torch
from vitpos import data, states, training

seen = {"ids": [], "images": [], "losses": [], "rates": []}
backward, set_rate = training.backward, training.set_learning_rate

def watching(iterate):
    def watched(self, batches, *, epoch=None, **kwargs):
        if epoch is not None:
            seen["ids"] += [[(self.ids[i % len(self)], i // len(self)) for i in batch.tolist()] for batch in batches]
        return iterate(self, batches, epoch=epoch, **kwargs)
    return watched

for kind in (data.Dataset, data.Folder):
    kind.iterate = watching(kind.iterate)

def recorded(accelerator, model, criterion, x, *args):
    seen["images"].append(x.clone())
    loss, accuracy = backward(accelerator, model, criterion, x, *args)
    seen["losses"].append(loss.item())
    gradients = {name.removeprefix("module."): states.whole(p.grad).clone() for name, p in model.named_parameters()}
    seen.setdefault("gradients", gradients)
    return loss, accuracy

def rate(optimizer, *args):
    set_rate(optimizer, *args)
    seen["rates"].append(optimizer.param_groups[0]["lr"])

training.backward, training.set_learning_rate = recorded, rate
name = sys.argv[1].removeprefix("out=") + "-" + os.environ.get("RANK", "0") + ".pt"
atexit.register(lambda: torch.save(seen, name))
"""
# the whole loop in double precision, where it asks for single precision too
DOUBLE = """
import torch
torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double
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

STOP = """
import os
from vitpos import runs
stepped = runs.RunFolder.stepped

def stopping(self, state):
    stepped(self, state)
    if state.step == 3:
        self.accelerator.wait_for_everyone()
        os._exit(1)

runs.RunFolder.stepped = stopping
"""
LOADED = """
import torch
from vitpos import states
load = states.State.load

def loading(self, stored):
    load(self, stored)
    content = self.gather()
    if self.accelerator.is_main_process:
        torch.save(content, "loaded.pt")

states.State.load = loading
"""


def run(code: str, *words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """train.py after some code. Where no accelerator is, none is told so: train.py has to find out by itself."""
    Path("called.py").write_text("import sys\n" + code + CALL)
    given = [w for w in words if w != "train.cpu=true" or torch.accelerator.is_available()]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "called.py", *given]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def recorded(name: str, *words: str, processes: int = 2, before: str = "") -> list[dict]:
    done = run(before + RECORD, f"out={name}", *words, processes=processes)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{name}-{rank}.pt") for rank in range(processes)]


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The norm of the difference of two gradients as a share of the second one's: of all of it, of the worst weight."""
    assert list(ours) == list(theirs)
    shares = [((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs]
    a, b = (torch.cat([gradient.flatten() for gradient in gradients.values()]) for gradients in (ours, theirs))
    return ((a - b).norm() / b.norm()).item(), max(shares)


def stored(folder: str) -> dict:
    path, damaged = states.newest(Path(folder))
    assert path is not None
    assert not damaged
    return torch.load(path, weights_only=True)


def weights_of(state: dict) -> dict[str, torch.Tensor]:
    return {f"{kind}.{name}": value for kind in ("model", "ema") for name, value in state[kind].items()}


def same(ours: dict, theirs: dict) -> bool:
    """Whether two states hold the same weights, averages and moments, bit for bit."""
    a, b = (
        weights_of(s) | {f"{i}.{k}": v for i, m in s["optimizer"]["state"].items() for k, v in m.items()}
        for s in (ours, theirs)
    )
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b)


def make_photographs(root: Path) -> None:
    """JPEG files of several sizes with smooth colours and noise: no two crops of them are alike."""
    draws = np.random.default_rng(0)
    for part, each in (("train", 20), ("val", 2)):
        for shade, name in enumerate(("ant", "bee", "cat")):
            (root / part / name).mkdir(parents=True)
            for i in range(each):
                w, h = draws.integers(40, 90, 2).tolist()
                coarse = draws.normal(100 + 30 * shade, 50, (5, 5, 3)).clip(0, 255).astype(np.uint8)
                image = np.asarray(Image.fromarray(coarse).resize((w, h), Image.Resampling.BICUBIC))
                noisy = (image + draws.normal(0, 6, image.shape)).clip(0, 255).astype(np.uint8)
                Image.fromarray(noisy).save(root / part / name / f"{i}.jpg", quality=85)


DIGITS = [*TINY, "pos=rope_axial + ape1d", "train.batch_size=120", "train.epochs=1", "data.placement=uniform"]
PHOTOGRAPHS = [
    *DIGITS[:-1], "data=folder", "data.root=images", "data.img_size=32", "data.workers=1", "train.batch_size=24",
    "data.augment=rand-m9-mstd0.5-inc1", "data.color_jitter=0.3", "data.erase=0.3", "train.repeats=2",
    "model.kwargs.patch_size=8", "train.epochs=3",
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (DIGITS, [[], ["train.accumulate=3"], ["train.sharding=fsdp", "train.ema=0.9"]]),
        (PHOTOGRAPHS, [[]]),
    ],
)
@pytest.mark.parametrize("double", [False, True])
def test_two_processes_compute_what_one_does(words, ways, double):
    """In single precision but for rounding, which in double precision is all that there is.

    The worst weight of all is a scale or shift of LayerNorm, whose gradient is a sum over all tokens of all images:
    1.2e-6 of itself here, 2e-6 in six blocks on 128 photographs of 64 pixels, where the whole gradient was 5e-7 and
    in double precision the worst weight 4e-15.
    """
    make_photographs(Path("images"))
    before = DOUBLE if double else ""
    one = recorded("one", *words, processes=1, before=before)[0]
    assert len(one["losses"]) >= 5
    assert one["images"][0].dtype == (torch.float64 if double else torch.float32)
    for number, extra in enumerate(ways):
        first, second = recorded(f"two{number}", *words, *extra, before=before)
        assert [a + b for a, b in zip(first["ids"], second["ids"])] == one["ids"]
        for a, b, images in zip(first["images"], second["images"], one["images"]):
            assert torch.equal(torch.cat([a, b]), images)
        assert first["rates"] == second["rates"] == one["rates"]
        losses = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"])]
        furthest = max(abs(a - b) / b for a, b in zip(losses[:5], one["losses"]))
        gradient, worst = apart(first["gradients"], one["gradients"])
        print(f"{extra}: gradients {gradient:.1e} apart, the worst weight's {worst:.1e}, losses {furthest:.1e}")
        if double:
            assert worst < 1e-13
            assert furthest < 1e-13
        else:
            assert gradient < 1e-6
            assert worst < 1e-5
            assert furthest < 1e-5
    other = recorded("other", *words, "seed=1", processes=1, before=before)[0]
    assert min(apart(other["gradients"], one["gradients"])) > 1e-2, "the control"
    assert abs(other["losses"][0] / one["losses"][0] - 1) > 1e-4


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_sharded_run_goes_on_in_one_process_and_the_other_way_round(before, after):
    """What is loaded is what was saved, bit for bit, and the steps after it differ by rounding (in double precision).

    In single precision, measured: all weights agree to 2e-7 of their norm but the bias of the keys, 12 of its 16
    values apart by up to 1e-5. Where nothing turns the keys softmax does not feel it, so that its gradient is rounding
    and no more, which Adam divides by its own size.
    """
    words = [*TINY, "pos=ape2d", "train.ema=0.9", "train.save_every=1"]
    sharding = {1: "train.sharding=none", 2: "train.sharding=fsdp"}
    whole = run(DOUBLE, *words, "out=whole", sharding[before], processes=before)
    assert whole.returncode == 0, whole.stderr
    assert run(DOUBLE + STOP, *words, "out=run", sharding[before], processes=before).returncode != 0
    assert saved_steps() == [2, 3]
    saved = stored("run")
    again = run(DOUBLE + LOADED, "resume=run", sharding[after], processes=after)
    assert again.returncode == 0, again.stderr
    loaded = torch.load("loaded.pt")
    assert same(loaded, saved)
    assert not same(loaded, stored("run")), "the control: after more steps"
    ours, theirs = weights_of(stored("run")), weights_of(stored("whole"))
    assert apart(ours, theirs)[1] < 1e-12
    assert apart(ours, weights_of(saved))[0] > 1e-3, "the control"
    evaluated = dict(vitpos.load("run/last.safetensors").state_dict())
    assert evaluated.keys() == stored("run")["ema"].keys()
    assert all(torch.equal(v, stored("run")["ema"][k]) for k, v in evaluated.items())


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
