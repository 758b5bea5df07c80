"""A run's folder: what is written there, when, and how a stopped run goes on from it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from timm.utils import ModelEmaV3
from torch import Tensor, nn

import vitpos
from vitpos import config, data
from vitpos.config import RunConfig

PACKAGES = ("vitpos", "torch", "timm", "torchvision", "accelerate", "numpy", "scikit-learn")


class RunFolder:
    """A run's folder: chosen by the first process, written by it alone, each file whole or not at all.

    As a context manager it removes again what it wrote of a new run when no epoch was completed.
    """

    def __init__(self, run: RunConfig, accelerator: Accelerator, train_set: data.Dataset, val_set: data.Dataset):
        self.run, self.accelerator, self.info = run, accelerator, train_set.info
        self.samples = data.fingerprint(train_set, val_set)
        self.rows: list[dict[str, Any]] = []
        self.created: list[Path] = []
        self.writer: Any = None

    def __enter__(self) -> RunFolder:
        self.path = self._agree(self._open)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.writer is not None:
            self.writer.close()
        if error is not None:
            self._remove_unless_begun()

    @property
    def seconds(self) -> float:
        """How long the epochs done so far took."""
        return self.rows[-1]["seconds"] if self.rows else 0.0

    def _agree(self, action: Callable[[], Path]) -> Path:
        """The first process's result in every process; its error too, so that none waits for a folder in vain."""
        answer: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                answer[0] = action()
            except (ValueError, OSError) as error:
                answer[1] = error
        if self.accelerator.num_processes > 1:
            broadcast_object_list(answer)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def _open(self) -> Path:
        if self.run.resume is not None:
            return Path(self.run.resume)
        self.path = path = config.new_folder(self.run)
        self.created = [p for p in (path, *path.parents) if not p.exists()]
        config.check_folder(self.run)
        try:
            path.mkdir(parents=True, exist_ok=path not in self.created)
        except FileExistsError:  # another run has taken the name since
            return self._open()
        try:
            self._write("config.yaml", yaml.safe_dump(dataclasses.asdict(self.run), sort_keys=False))
            self._write("environment.json", json.dumps(environment(self.accelerator), indent=2))
        except BaseException:
            self._remove_unless_begun()
            raise
        return path

    def _remove_unless_begun(self) -> None:
        if self.run.resume is not None or not self.accelerator.is_main_process or (self.path / "state.pt").exists():
            return
        for name in ("config.yaml", "environment.json", "last.safetensors", "metrics.csv"):
            (self.path / name).unlink(missing_ok=True)
        for folder in self.created:
            with contextlib.suppress(OSError):  # another run's files are in it
                folder.rmdir()

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: ModelEmaV3 | None) -> int:
        """Load the state of the run that is continued, if it has one; returns the number of epochs done."""
        path = self.path / "state.pt"
        if self.run.resume is None or not path.is_file():
            return 0
        try:
            state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
            differing = config.difference(config.identity(self.run), state["config"])
            samples = state["samples"]
        except Exception as error:
            raise ValueError(f"{path} is damaged: {_reason(error)}; start a new run") from None
        if differing is not None:
            key, ours, theirs = differing
            raise ValueError(f"{path} was trained with {key}={theirs}, config.yaml says {ours}; restore {key} there")
        if samples != self.samples:
            raise ValueError(
                f"resume={self.path} was trained on other images than data.root={getattr(self.run.data, 'root', None)} "
                "holds now (by their names in train and val); put them back, or start a new run"
            )
        try:
            _load(model, state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if ema is not None:
                _load(ema.module, state["ema"])
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
        except Exception as error:
            raise ValueError(
                f"{path} does not fit the model of {self.path / 'config.yaml'}: {_reason(error)}"
            ) from None
        self.rows = state["rows"]
        return state["epoch"]

    def save(
        self, row: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, ema: ModelEmaV3 | None
    ) -> None:
        """After an epoch: its metrics, the weights of the evaluated model, and the resumable state."""
        if not math.isfinite(row["train_loss"]):
            raise ValueError(f"the loss is {row['train_loss']} in epoch {row['epoch']}; a lower train.lr may help")
        self.rows.append(row)
        if not self.accelerator.is_main_process:
            return
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ema": None if ema is None else ema.module.state_dict(),
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
            "config": config.identity(self.run),
            "samples": self.samples,
            "epoch": row["epoch"],
            "step": row["step"],
            "rows": self.rows,
        }
        extra = {
            "run": f"{self.run.pos} s{self.run.seed}",
            "seed": self.run.seed,
            "epochs": row["epoch"],
            "data": dataclasses.asdict(self.run.data),
        }
        info = self.info
        preprocessing = {
            "mean": info.mean, "std": info.std, "img_size": list(info.img_size), "in_chans": info.in_chans,
        }  # fmt: skip
        weights = model if ema is None else ema.module
        vitpos.save(
            weights, self.path / "last.safetensors", classes=info.classes, preprocessing=preprocessing, extra=extra
        )
        self._write("metrics.csv", pd.DataFrame(self.rows).to_csv(index=False, float_format="%.6g"))
        self._write("state.pt", lambda path: torch.save(state, path))
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.path / "tb"))
        for name, value in row.items():
            if name not in ("epoch", "step"):
                self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()

    def _write(self, name: str, content: str | Callable[[Path], None]) -> None:
        temporary = self.path / f".{name}-{os.getpid()}"
        try:
            if callable(content):
                content(temporary)
            else:
                temporary.write_text(content)
            os.replace(temporary, self.path / name)
        finally:
            temporary.unlink(missing_ok=True)


def _load(module: nn.Module, stored: dict[str, Tensor]) -> None:
    """Load a state; ValueError names the first weight that differs in name or shape."""
    here, there = ({k: tuple(v.shape) for k, v in state.items()} for state in (module.state_dict(), stored))
    differing = config.difference(here, there)
    if differing is not None:
        name, ours, theirs = differing
        raise ValueError(f"{name} has shape {theirs or '(absent)'} there, {ours or '(absent)'} here")
    module.load_state_dict(stored)


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
