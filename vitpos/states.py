"""A run's state: what it holds at any step, and the files that it is kept in.

``state-<step>-<digest>.pt`` carries the SHA-256 of its own content in its name, so that one rename makes it appear
complete, and a file that was cut short or changed afterwards is known by its name alone.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitpos import checkpoint, config

DIGEST = 16  # hexadecimal digits
PATTERN = "state-*.pt"


@dataclass
class State:
    """All that a run goes on from: weights, optimizer, moving average, loss scale, and where training is.

    Every draw is keyed by seed, epoch, step and sample, so that where training is takes two integers: ``step``, the
    number of steps done, and the number of epochs with a row of metrics. ``totals`` is float32 [3], this process's
    sums of loss and accuracy over the steps of the epoch, and their number; ``skips`` counts the latest steps that
    were not taken.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: ModelEmaV3 | None = None
    unsharded: nn.Module | None = None  # of a sharded model, a whole one that is evaluated and saved in its place
    step: int = 0
    skips: int = 0
    totals: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.start_epoch()

    def start_epoch(self) -> None:
        self.totals = torch.zeros(3, device=self.accelerator.device)

    def add(self, loss: Tensor, accuracy: Tensor) -> None:
        self.totals += torch.stack([loss.detach(), accuracy, torch.ones_like(accuracy)])

    def means(self) -> tuple[float, float, int]:
        """Mean loss and accuracy over the epoch's steps and over all processes, and the number of steps taken."""
        loss, accuracy, steps = self.accelerator.reduce(self.totals, "mean").tolist()
        return loss / max(steps, 1), accuracy / max(steps, 1), round(steps)

    def evaluated(self) -> nn.Module:
        """The model that is reported and saved, of the moving average if there is one. All processes take part."""
        model = self.model if self.ema is None else self.ema.module
        if self.unsharded is None:
            return model
        self.unsharded.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
        return self.unsharded

    def gather(self) -> dict[str, Any]:
        """Everything as whole tensors on the CPU of the first process, sharded or not. All processes take part."""

        def collected(values: Mapping[str, Any]) -> dict[str, Any]:
            tensors = ((k, whole(v) if isinstance(v, Tensor) else v) for k, v in values.items())
            return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in tensors if self.accelerator.is_main_process}

        optimizer, scaler = self.optimizer.state_dict(), self.accelerator.scaler
        return {
            "card": checkpoint.described(self.unsharded or self.model),
            "model": collected(self.model.state_dict()),
            "optimizer": {**optimizer, "state": {i: collected(v) for i, v in optimizer["state"].items()}},
            "ema": None if self.ema is None else collected(self.ema.module.state_dict()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "step": self.step,
            "skips": self.skips,
            "totals": self.accelerator.gather(self.totals[None]).cpu(),  # [processes, 3]
        }

    def load(self, stored: dict[str, Any]) -> None:
        """Take over what `gather` returned; ValueError names the first weight that differs in name or shape."""
        _load(self.model, stored["model"])
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = {
            i: {k: _like(v, parameters[i]) for k, v in values.items()}
            for i, values in stored["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**stored["optimizer"], "state": moments})
        if self.ema is not None:
            _load(self.ema.module, stored["ema"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(stored["scaler"])
        self.step, self.skips = stored["step"], stored["skips"]
        totals, processes = stored["totals"], self.accelerator.num_processes
        mine = totals[self.accelerator.process_index] if len(totals) == processes else totals.mean(0)
        self.totals = mine.to(self.accelerator.device)

    def finite(self) -> bool:
        """Whether all weights are finite numbers. All processes take part."""
        shards = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        bad = sum((~shard.isfinite()).sum() for shard in shards)
        return self.accelerator.reduce(torch.as_tensor(bad, device=self.accelerator.device)).item() == 0


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or put together from its shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(value: Any, reference: Tensor) -> Any:
    """A whole tensor sharded as the reference of its shape is; anything else as it is."""
    if not isinstance(reference, DTensor) or not isinstance(value, Tensor) or value.shape != reference.shape:
        return value
    return distribute_tensor(value.to(reference.device), reference.device_mesh, reference.placements)


def _load(module: nn.Module, stored: dict[str, Tensor]) -> None:
    """Load a state; ValueError names the first weight that differs in name or shape."""
    references = module.state_dict()
    here, there = ({k: tuple(v.shape) for k, v in state.items()} for state in (references, stored))
    differing = config.difference(here, there)
    if differing is not None:
        name, ours, theirs = differing
        raise ValueError(f"{name} has shape {theirs or '(absent)'} there, {ours or '(absent)'} here")
    module.load_state_dict({k: _like(v, references[k]) for k, v in stored.items()})


class _Hashing(io.BufferedWriter):
    """A new file that hashes what is written to it."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "wb"))
        self.hash = hashlib.sha256()

    def write(self, content: Any) -> int:
        self.hash.update(content)
        return super().write(content)


def write(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write one more state file and return its path; OSError where it cannot be, the others untouched."""
    temporary = folder / f".saving-state-{os.getpid()}"
    try:
        with _Hashing(temporary) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch's own hides what was raised while it wrote: a full disk, a signal
                raise (error.__context__ or error) from None
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"state-{step:08d}-{file.hash.hexdigest()[:DIGEST]}.pt"
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def keep(folder: Path, *paths: Path | None) -> None:
    """Remove all state files but these."""
    for path in set(folder.glob(PATTERN)) - set(paths):
        path.unlink()


def intact(path: Path) -> bool:
    """Whether a state file holds what it held when it was written."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST]
    return path.stem.endswith(f"-{digest}")


def newest(folder: Path) -> tuple[Path | None, list[Path]]:
    """The newest whole state file of a folder, if there is one, and the damaged ones that are newer."""
    damaged: list[Path] = []
    for path in sorted(folder.glob(PATTERN), key=_age, reverse=True):
        if intact(path):
            return path, damaged
        damaged.append(path)
    return None, damaged


def card(folder: Path) -> dict[str, Any] | None:
    """What the model of a folder's newest whole state is built from; None without a state, or with one of old."""
    path, _ = newest(folder)
    return None if path is None else torch.load(path, mmap=True, weights_only=True).get("card")


def _age(path: Path) -> tuple[int, int]:
    return int(path.stem.split("-")[1]), path.stat().st_mtime_ns
