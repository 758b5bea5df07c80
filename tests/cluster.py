"""A cluster of one machine that plays Slurm's commands, as far as submitit needs them, and takes its nodes away once.

``bin_of`` writes the commands to a folder; what they share lies in the folder ``$CLUSTER``. The first start of a job
ends as ``$CLUSTER_ENDS`` says as soon as the run in ``$CLUSTER_SWEEP`` has saved a state: ``time`` sends the tasks the
job's own signal, as when its time is nearly up; ``preempted`` sends SIGCONT and SIGTERM, waits for a newer state,
kills, and puts the job back in the queue.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path


def bin_of(folder: Path) -> Path:
    """A folder for PATH that holds the commands."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol", "sacct"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"\n')
        command.chmod(0o755)
    return folder


def sbatch(script: str) -> None:
    settings = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", Path(script).read_text()))
    last = settings.get("array", "").partition("%")[0].partition("-")[2]
    for index in range(int(last) + 1) if last else [None]:
        env = {
            **os.environ, "SLURM_JOB_ID": str(7 + (index or 0)), "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": settings["ntasks-per-node"],
            "CLUSTER_SIGNAL": settings["signal"].partition("@")[0],
        }  # fmt: skip
        if index is not None:
            env |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
        log = open(shared(f"node-{name_of(env)}"), "w")  # noqa: SIM115
        command = [sys.executable, __file__, "node", script]
        subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    print("Submitted batch job 7")


def node(script: str) -> None:
    """The life of one job."""
    name, starts = name_of(os.environ), 0
    while True:
        starts += 1
        shared(f"starts-{name}").write_text(str(starts))
        batch = subprocess.Popen(["bash", script])
        if starts == 1:
            stop(name)
        code = batch.wait()
        if not shared(f"requeue-{name}").exists():
            break
        shared(f"requeue-{name}").unlink()
    shared(f"state-{name}").write_text("FAILED" if code else "COMPLETED")


def stop(name: str) -> None:
    first = wait_for_state(-1)
    tasks = [int(pid) for pid in shared(f"tasks-{name}").read_text().split()]
    if os.environ["CLUSTER_ENDS"] == "time":
        send(tasks, signal.Signals[f"SIG{os.environ['CLUSTER_SIGNAL']}"])
        return
    send(tasks, signal.SIGCONT, signal.SIGTERM)
    wait_for_state(first)
    time.sleep(0.5)  # of grace
    shared(f"requeue-{name}").touch()
    send(tasks, signal.SIGKILL)


def wait_for_state(after: int) -> int:
    """The step of the job's newest state, once that is later."""
    folder = f"{int(os.environ.get('SLURM_ARRAY_TASK_ID', '0')):02d}-*"
    while True:
        steps = [int(p.name[6:14]) for p in Path(os.environ["CLUSTER_SWEEP"]).glob(f"{folder}/state-*")]
        if max(steps, default=-1) > after:
            return max(steps)
        time.sleep(0.005)


def send(tasks: list[int], *numbers: int) -> None:
    for number in numbers:
        for pid in tasks:
            os.kill(pid, number)


def srun(*words: str) -> int:
    """One task or more, side by side, each with files of its own."""
    options, command = dict(zip(words[1:5:2], words[2:6:2])), words[5:]
    ranks = range(int(os.environ["SLURM_NTASKS"]))
    tasks = []
    for rank in ranks:
        files = [open(pattern(options[key], rank), "a") for key in ("--output", "--error")]  # noqa: SIM115
        env = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        tasks.append(subprocess.Popen(command, env=env, stdout=files[0], stderr=files[1]))
    shared(f"tasks-{name_of(os.environ)}").write_text(" ".join(str(task.pid) for task in tasks))
    return max(abs(task.wait()) for task in tasks)


def pattern(text: str, rank: int) -> str:
    """File names of srun."""
    known = {"%A": "SLURM_ARRAY_JOB_ID", "%a": "SLURM_ARRAY_TASK_ID", "%j": "SLURM_JOB_ID"}
    for key, name in known.items():
        text = text.replace(key, os.environ.get(name, key))
    return text.replace("%t", str(rank))


def scontrol(action: str, name: str) -> None:
    assert action == "requeue"
    shared(f"requeue-{name}").touch()


def sacct(*_: str) -> None:
    print("JobID|State|NodeList")
    for path in Path(os.environ["CLUSTER"]).glob("starts-*"):
        name = path.name.partition("-")[2]
        state = shared(f"state-{name}")
        print(f"{name}|{state.read_text() if state.exists() else 'RUNNING'}|localhost")


def shared(name: str) -> Path:
    return Path(os.environ["CLUSTER"]) / name


def name_of(env: dict[str, str]) -> str:
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


if __name__ == "__main__":
    raise SystemExit(globals()[sys.argv[1]](*sys.argv[2:]))
