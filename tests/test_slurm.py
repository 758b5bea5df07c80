"""Sweeps as Slurm jobs: what is submitted, and that jobs which lose their node end as if they had not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import bin_of
from commands import TINY, TRAIN, train
from hydra.core.utils import JobReturn, JobStatus
from test_resume import contents

pytestmark = pytest.mark.usefixtures("somewhere")
submitit = pytest.importorskip("submitit")
SLURM = ["-m", "hydra/launcher=slurm", "out=sweep"]


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Slurm's commands on PATH; the folder of what they share."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{bin_of(folder / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.setenv("CLUSTER_SWEEP", str(tmp_path / "sweep"))
    return folder


def test_what_is_submitted(monkeypatch, cluster):
    """Jobs that ask for the cluster's own settings, are told before their time is up, and may come back."""
    (cluster / "bin" / "sbatch").write_text("#!/bin/sh\ncp $1 submitted.sh\necho Submitted batch job 7\n")
    done = JobReturn(status=JobStatus.COMPLETED)
    done.return_value = None
    monkeypatch.setattr(submitit.SlurmJob, "results", lambda self: [done])
    words = ["hydra.launcher.partition=big", "hydra.launcher.tasks_per_node=4", "hydra.launcher.timeout_min=90"]
    assert train(monkeypatch, *SLURM, *words, "pos=none,rope_axial(theta=50)") == 0
    script = Path("submitted.sh").read_text()
    assert "#SBATCH --requeue\n" in script
    settings = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", script))
    asked = {
        "array": "0-1%2", "signal": "USR2@180", "time": "90", "open-mode": "append", "partition": "big",
        "ntasks-per-node": "4", "gpus-per-node": "4", "cpus-per-task": "8", "nodes": "1",
    }  # fmt: skip
    assert settings.items() >= asked.items()
    for number, pos in enumerate(["pos='none'", "pos='rope_axial(theta=50)'"]):
        job = submitit.core.utils.DelayedSubmission.load(f"sweep/.submitit/7_{number}/7_{number}_submitted.pkl")
        assert pos in job.args[0]
        assert job._timeout_countdown == 1000
        assert job._checkpoint_function().args == job.args, "put back in the queue it is the same job"


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["time", "preempted"])
@pytest.mark.parametrize("tasks", [1, 2])
def test_jobs_that_lose_their_node_end_as_if_they_had_not(monkeypatch, cluster, ends, tasks):
    words = [*TINY, "pos=ape2d", "train.ema=0.9", "train.epochs=16"]
    choices = ["seed=0,1"] if tasks == 1 else ["seed=0"]
    monkeypatch.setenv("CLUSTER_ENDS", ends)
    command = [sys.executable, str(TRAIN), *words, *SLURM, *choices, f"hydra.launcher.tasks_per_node={tasks}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    logs = "".join(path.read_text() for path in Path("sweep/.submitit").rglob("*_0_log.*"))
    assert done.returncode == 0, (done.stderr, logs)
    started = {path.name: path.read_text() for path in cluster.glob("starts-*")}
    assert started == ({"starts-7_0": "2", "starts-7_1": "2"} if tasks == 1 else {"starts-7": "2"})
    said = re.findall(r"^(SIG\w+): step (\d+) is saved, resume=sweep/0\d-ape2d-s\d goes on$", logs, re.MULTILINE)
    assert [number for number, _ in said] == [{"time": "SIGUSR2", "preempted": "SIGTERM"}[ends]] * (3 - tasks)
    assert all(4 <= int(step) < 64 for _, step in said)
    if tasks == 1:
        assert train(monkeypatch, *words, "-m", "out=whole", *choices, tiny=False) == 0
    else:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, str(TRAIN), *words, *choices, "out=whole/00-ape2d-s0"]
        subprocess.run(command, timeout=600, check=True)
    for path in Path("whole").glob("0*"):
        assert contents(Path("sweep", path.name)) == contents(path)
    assert len(list(Path("sweep").glob("0*"))) == len(list(Path("whole").glob("0*"))) == 3 - tasks
