"""A run's folder: what is written there, when, and how a stopped run goes on from it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import pandas as pd
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

import vitpos
from vitpos import config, data, preemption, states
from vitpos.config import RunConfig
from vitpos.states import State, whole

CONFIG, NONFINITE = "config.yaml", "nonfinite.json"
PACKAGES = ("vitpos", "torch", "timm", "torchvision", "accelerate", "numpy", "scikit-learn")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunFolder:
    """A run's folder: chosen by the first process, written by it alone, each file whole or not at all.

    As a context manager it lets a scheduler's signals wait for the end of the step in hand, keeps other processes from
    the run by a lock on its config.yaml, and removes what it wrote of a new run when no state was saved.
    """

    def __init__(self, run: RunConfig, accelerator: Accelerator, train_set: data.Dataset, val_set: data.Dataset):
        self.run, self.accelerator, self.train_set = run, accelerator, train_set
        self.samples = data.fingerprint(train_set, val_set)
        self.rows: list[dict[str, Any]] = []
        self.created: list[Path] = []
        self.latest: Path | None = None  # state file
        self.begin = time.perf_counter()
        self.earlier = 0.0  # seconds before this start
        self.request = preemption.Request()
        self.signal = 0  # that all processes have agreed to obey after this step
        self.board: Any = None
        self.lock = contextlib.ExitStack()  # the locked file

    def __enter__(self) -> RunFolder:
        try:
            self.path = self._agree(self._open)
        except BaseException:
            self.lock.close()
            raise
        self.request.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.request.__exit__()
        if self.board is not None:
            with contextlib.suppress(OSError):  # nothing is lost: it was flushed after each epoch
                self.board.close()
        if error is not None:
            self._remove_unless_begun()
        self.lock.close()

    @property
    def seconds(self) -> float:
        """How long the run has taken, over all its starts."""
        return self.earlier + time.perf_counter() - self.begin

    def _agree(self, action: Callable[[], Any]) -> Any:
        """The first process's result in every process; its error too, so that none waits for it in vain."""
        answer: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                answer[0] = action()
            except (ValueError, OSError) as error:
                answer[1] = error
        if self.accelerator.num_processes > 1:
            broadcast_object_list(answer)
        if answer[1] is not None:
            self._fail(answer[1])
        return answer[0]

    def _fail(self, error: Exception) -> NoReturn:
        """Raise what all processes have met: the first one reports it."""
        raise error if self.accelerator.is_main_process else SystemExit(2)

    def _open(self) -> Path:
        if self.run.resume is not None:
            self.path = path = Path(self.run.resume)
            self._hold(self.lock.enter_context(open(path / CONFIG, "r+")))  # noqa: SIM115
            for left in path.glob(".saving-*"):  # by a process that was killed meanwhile
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            return path
        self.path = path = config.new_folder(self.run)
        self.created = [p for p in (path, *path.parents) if not p.exists()]
        config.check_folder(self.run)
        try:
            path.mkdir(parents=True, exist_ok=path not in self.created)
            self._take()
        except FileExistsError:  # another run has taken the folder since
            return self._open()
        try:
            self._write("environment.json", json.dumps(environment(self.accelerator), indent=2))
        except BaseException:
            self._remove_unless_begun()
            raise
        return path

    def _take(self) -> None:
        """Write a new run's config.yaml, locked; FileExistsError where another process was first."""
        temporary = self.path / f".saving-{CONFIG}-{os.getpid()}"
        file = self.lock.enter_context(open(temporary, "x"))  # noqa: SIM115
        try:
            file.write(yaml.safe_dump(dataclasses.asdict(self.run), sort_keys=False))
            file.flush()
            self._hold(file)
            try:
                os.link(temporary, self.path / CONFIG)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                os.replace(temporary, self.path / CONFIG)
        finally:
            temporary.unlink(missing_ok=True)

    def _hold(self, file: IO[str]) -> None:
        """Lock a file until it is closed or this process is dead, however it died; ValueError if another has it.

        fcntl's lock, which works on network file systems and which the processes that read images do not inherit. The
        file must not be opened and closed again by this process, which would give the lock up.
        """
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"the run in {self.path} is being trained by another process; wait for its end, or stop it first"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                raise
            print(f"{self.path} cannot be locked ({error.strerror}): start no second process on it", file=sys.stderr)

    def _remove_unless_begun(self) -> None:
        if self.run.resume is not None or not self.accelerator.is_main_process or self.latest is not None:
            return
        for name in (CONFIG, "environment.json", "last.safetensors", "metrics.csv", NONFINITE):
            (self.path / name).unlink(missing_ok=True)
        for folder in self.created:
            with contextlib.suppress(OSError):  # another run's files are in it
                folder.rmdir()

    def restore(self, state: State) -> None:
        """Load the newest whole state of the run that is continued, if it has one."""
        if self.run.resume is not None:
            self.latest = self._agree(self._choose)
        if self.latest is None:
            return
        try:
            stored = torch.load(self.latest, map_location="cpu", weights_only=True)
            differing = config.difference(config.identity(self.run), stored["config"])
            samples, self.rows, self.earlier = stored["samples"], stored["rows"], stored["seconds"]
        except Exception as error:
            raise ValueError(f"{self.latest} cannot be read: {_reason(error)}; start a new run") from None
        if differing is not None:
            key, ours, theirs = differing
            raise ValueError(
                f"{self.latest} was trained with {key}={theirs}, config.yaml says {ours}; restore {key} there"
            )
        if samples != self.samples:
            raise ValueError(
                f"resume={self.path} was trained on other images than data.root={getattr(self.run.data, 'root', None)} "
                "holds now (by their names in train and val); put them back, or start a new run"
            )
        try:
            state.load(stored)
        except Exception as error:
            raise ValueError(
                f"{self.latest} does not fit the model of {self.path / 'config.yaml'}: {_reason(error)}"
            ) from None

    def _choose(self) -> Path | None:
        path, damaged = states.newest(self.path)
        names = " and ".join(p.name for p in damaged)
        if damaged and path is None:
            raise ValueError(f"{self.path} is damaged: no state that was saved ({names}) is whole; start a new run")
        if damaged and path is not None:
            print(f"{self.path}: {names} is damaged; going on from {path.name}, saved before", file=sys.stderr)
        return path

    def accepts(self, state: State, loss: Tensor, norm: Tensor | None = None) -> bool:
        """Whether to take a step: its loss, and its gradient's norm where it is known, are finite in all processes.

        If not, train.nonfinite says whether the step is skipped or the run ends. The same exchange agrees on signals.
        It costs one read from the device a step and, with several processes, one reduction of two numbers.
        """
        bad = ~loss.detach().isfinite()
        if norm is not None and self.accelerator.scaler is None:  # which looks for infinite gradients itself
            bad = bad | ~whole(norm).isfinite()
        self.signal = self.request.number or 0
        if self.accelerator.num_processes > 1:
            votes = torch.stack([bad.int(), torch.full_like(bad, self.signal, dtype=torch.int32)])
            bad, self.signal = self.accelerator.gather(votes[None]).amax(0).tolist()
        if not bad:
            state.skips = 0
            return True
        state.skips += 1
        ends = self.run.train.nonfinite == "stop" or state.skips >= self.run.train.nonfinite_limit
        self._report(state, self.accelerator.reduce(loss.detach(), "mean").item(), norm, ends)
        if self.accelerator.scaler is not None and norm is not None:
            self.accelerator.scaler.update()  # it has seen these gradients
        return False

    def _report(self, state: State, loss: float, norm: Tensor | None, ends: bool) -> None:
        """Say which step was not taken, and on which samples; end the run there, the state before it saved."""
        t, images = self.run.train, len(self.train_set)
        batches = data.epoch_batches(images, t.batch_size, self.run.seed, len(self.rows), repeats=t.repeats)
        batch = batches[state.step - len(self.rows) * len(batches)] % images
        report = {
            "step": state.step + 1,
            "epoch": len(self.rows) + 1,
            "loss": str(loss),
            "gradient_norm": None if norm is None else str(whole(norm).item()),
            "samples": [self.train_set.ids[i] for i in batch.tolist()],
        }
        self._agree(lambda: self._saving(lambda: self._write(NONFINITE, json.dumps(report, indent=2))))
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {report['gradient_norm']}"
        what += f" in step {state.step + 1} (epoch {len(self.rows) + 1}; samples in {self.path / NONFINITE})"
        if not ends:
            self.accelerator.print(f"{what}: skipped", file=sys.stderr)
            return
        if state.skips > 1:
            what += f", the last of {state.skips} in a row"
        state.skips = 0
        self.save(state, what)
        self._fail(
            ValueError(
                f"{what}; a lower train.lr may help, or resume={self.path} train.nonfinite=skip, which goes on from "
                "before this step and leaves it out"
            )
        )

    def stepped(self, state: State) -> None:
        """After each step: save where it is time to, and stop where that was asked for."""
        state.step += 1
        every = self.run.train.save_every
        if self.signal or (every is not None and state.step % every == 0):
            self.save(state)
        if self.signal:
            self._stop(f"step {state.step} is saved, resume={self.path} goes on")

    def _stop(self, saved: str) -> None:
        """End all processes, unless the handler of the signal that this one stands in for wants to go on."""
        ending: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                self.request.obey(self.signal, saved)
            except (preemption.Stopped, SystemExit) as end:
                ending[0] = end
        if self.accelerator.num_processes > 1:
            broadcast_object_list(ending)
        if ending[0] is not None:
            raise ending[0] if self.accelerator.is_main_process else SystemExit(preemption.SAVED)
        self.request.forget(self.signal)

    def save(self, state: State, problem: str | None = None) -> None:
        """Write the state that a run can go on from, and keep the one before. All processes take part."""
        self._check_weights(state, problem)
        content = {
            **state.gather(),
            "config": config.identity(self.run),
            "samples": self.samples,
            "rows": self.rows,
            "seconds": self.seconds,
        }

        def write() -> Path:
            path = states.write(self.path, state.step, content)
            states.keep(self.path, path, self.latest)
            return path

        self.latest = self._agree(lambda: self._saving(write))

    def _check_weights(self, state: State, problem: str | None = None) -> None:
        """Weights that are no longer finite replace none that are."""
        if not state.finite():
            kept = "nothing was saved before" if self.latest is None else f"{self.latest} is the last that was"
            problem = problem or f"after step {state.step} not all weights are finite numbers"
            self._fail(ValueError(f"{problem}; the weights are not saved, {kept}; a lower train.lr may help"))

    def epoch(self, state: State, row: dict[str, Any]) -> None:
        """After an epoch: the weights of the evaluated model, the metrics, and the state. All processes take part."""
        self._check_weights(state)
        self.rows.append(row)
        state.start_epoch()
        weights = state.evaluated()
        self._agree(lambda: self._saving(lambda: self._write_results(weights, row)))
        self.save(state)
        self._agree(lambda: self._saving(lambda: self._write_events(weights, row)))

    def _write_results(self, weights: nn.Module, row: dict[str, Any]) -> None:
        info = self.train_set.info
        extra = {
            "run": f"{self.run.pos} s{self.run.seed}",
            "seed": self.run.seed,
            "epochs": row["epoch"],
            "data": dataclasses.asdict(self.run.data),
        }
        preprocessing = {
            "mean": info.mean, "std": info.std, "img_size": list(info.img_size), "in_chans": info.in_chans,
        }  # fmt: skip
        path = self.path / "last.safetensors"
        vitpos.save(weights, path, classes=info.classes, preprocessing=preprocessing, extra=extra)
        self._write("metrics.csv", pd.DataFrame(self.rows).to_csv(index=False, float_format="%.6g"))

    def _write_events(self, weights: nn.Module, row: dict[str, Any]) -> None:
        if self.board is None:
            from vitpos.board import Board

            self.board = Board(self.path / "tb", self.run)
        self.board.epoch(row, weights, self.train_set)

    def _saving(self, action: Callable[[], Any]) -> Any:
        """Do it; an error of the disk says what is still there."""
        try:
            return action()
        except OSError as error:
            kept = "nothing was saved before"
            if self.latest is not None:
                mend = "make room" if error.errno in FULL else "mend that"
                kept = f"{self.latest.name}, saved before, is whole; {mend}, then resume={self.path} goes on"
            raise OSError(f"cannot write to {self.path}: {error.strerror or error}; {kept}") from None

    def _write(self, name: str, content: str) -> None:
        temporary = self.path / f".saving-{name}-{os.getpid()}"
        try:
            temporary.write_text(content)
            os.replace(temporary, self.path / name)
        finally:
            temporary.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """What the numbers of a run depend on besides its configuration."""
    gpu = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else None
    return {
        "command": " ".join(sys.argv),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": gpu or str(accelerator.device),
        "processes": accelerator.num_processes,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
