"""What train.py's page calls: processes and devices, the model, its optimizer, the run folder, the progress line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import timm
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from timm.optim import param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn

import vitpos
from vitpos import config, data, positions, seeds
from vitpos.backbone.models import MODELS
from vitpos.config import RunConfig, TrainConfig

PACKAGES = ("vitpos", "torch", "timm", "torchvision", "accelerate", "numpy", "scikit-learn")


def start(cfg: TrainConfig) -> Accelerator:
    """Threads, device, precision and the process group (under torchrun), as the configuration asks."""
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    # without an accelerator Accelerate joins torchrun's processes only when told to use the CPU
    accelerator = Accelerator(mixed_precision=cfg.precision, cpu=cfg.cpu or not torch.accelerator.is_available())
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", "1")):
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, {accelerator.num_processes} work together"
        )
    return accelerator


def create_model(run: RunConfig, info: data.Info) -> nn.Module:
    """The timm model with its encoding: bit-equal backbone weights at one seed, whatever the encoding."""
    name, kwargs = run.model.name, run.model.kwargs
    if timm.is_model(name):
        source = sys.modules[timm.model_entrypoint(name.split(".")[0]).__module__]
        if not any(kind in vars(source).values() for kind in MODELS):
            served = ", ".join(kind.__name__ for kind in MODELS)
            raise ValueError(f"model.name={name} is of {source.__name__}; served are timm's {served}")
    given = dict(kwargs, in_chans=info.in_chans, num_classes=len(info.classes), img_size=info.img_size)
    torch.manual_seed(seeds.stream(run.seed, "backbone"))
    return vitpos.create_model(name, pos=run.pos, encoding_seed=seeds.stream(run.seed, "encoding"), **given)


def is_positional(name: str) -> bool:
    """Whether a parameter of this name belongs to the encoding."""
    return name.startswith("position.") or name == "pos_embed"


def create_optimizer(model: Any, cfg: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over timm's parameter groups; the encoding's parameters get no decay and a learning rate of their own."""
    positional = [p for name, p in model.named_parameters() if is_positional(name) and p.requires_grad]
    ours = {id(p) for p in positional}
    groups = param_groups_weight_decay(model, cfg.weight_decay, no_weight_decay_list=model.no_weight_decay())
    groups = [{**g, "params": [p for p in g["params"] if id(p) not in ours], "lr_scale": 1.0} for g in groups]
    groups.append({"params": positional, "weight_decay": 0.0, "lr_scale": cfg.pos_lr_mult})
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, cfg: TrainConfig, step: int, steps: int) -> float:
    """Linear warm-up over the first cfg.warmup of all steps, then cosine to zero; returns the base rate."""
    warmup = round(cfg.warmup * steps)
    if step < warmup:
        lr = cfg.lr * (step + 1) / warmup
    else:
        lr = cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    return lr


def coordinates(model: Any, x: Tensor, run: RunConfig, step: int) -> dict[str, Tensor]:
    """What the model is told besides the images: augmented coordinates where the configuration asks for them."""
    if run.train.coords == config.CoordsConfig():
        return {}
    grid = positions.grid(*model.patch_embed.dynamic_feat_size(tuple(x.shape[-2:])))
    draws = seeds.generator(run.seed, "coordinates", step)
    return {"coords": positions.augment(grid, **dataclasses.asdict(run.train.coords), generator=draws).to(x.device)}


def create_ema(model: nn.Module, cfg: TrainConfig) -> ModelEmaV3 | None:
    return None if cfg.ema is None else ModelEmaV3(model, decay=cfg.ema, use_warmup=True)


@torch.no_grad()
def evaluate(model: nn.Module, dataset: data.Dataset, batch_size: int, accelerator: Accelerator) -> dict[str, float]:
    """Mean cross-entropy and accuracy of the model on the whole dataset, each process on its share."""
    model.eval()
    total = torch.zeros(3, device=accelerator.device)  # loss, correct, images
    batches = data.eval_batches(len(dataset), batch_size)
    for x, y in dataset.iterate(batches[accelerator.process_index :: accelerator.num_processes]):
        with accelerator.autocast():
            logits = model(data.normalize(x, dataset.info)).float()
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        total += torch.stack([loss, (logits.argmax(1) == y).sum(), torch.tensor(len(y), device=loss.device)])
    loss_sum, correct, images = accelerator.reduce(total).tolist()
    return {"val_loss": loss_sum / images, "val_accuracy": correct / images}


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


class Meter:
    """Progress of the first process: a bar with images/s and time left on a terminal, a line an epoch elsewhere.

    Runs of a sweep that share a terminal side by side print three lines each.
    """

    def __init__(self, accelerator: Accelerator, run: RunConfig, steps: int, done: int, seconds: float = 0.0):
        self.loud = accelerator.is_main_process
        self.label, self.epochs = f"{run.pos} s{run.seed}", run.train.epochs
        self.images, self.images_per_step = 0, run.train.batch_size
        alone = multiprocessing.current_process().name == "MainProcess"
        self.every = 1 if alone else math.ceil(self.epochs / 3)
        self.begin = time.perf_counter() - seconds  # those of the epochs before this start
        self.spent = 0.0  # seconds in training steps, evaluation left out
        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, disable=not (self.loud and alone and sys.stdout.isatty()))
        self.task = self.bar.add_task(self.label, total=steps, completed=done, rate="")

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def steps(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass batches on, counting images and the seconds until the next is asked for."""
        since = time.perf_counter()
        for batch in batches:
            yield batch
            now = time.perf_counter()
            self.spent, since = self.spent + now - since, now
            self.images += self.images_per_step
            if not self.bar.disable:
                self.bar.update(self.task, advance=1, rate=f"{self.rate:,.0f} images/s")

    @property
    def rate(self) -> float:
        return self.images / max(self.spent, 1e-9)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def epoch(self, row: dict[str, Any]) -> None:
        """Report an epoch's metrics."""
        text = (
            f"{self.label}  epoch {row['epoch']}/{self.epochs}  loss {row['train_loss']:.3f}  "
            f"val accuracy {row['val_accuracy']:.3f}  {self.rate:,.0f} images/s"
        )
        if not self.bar.disable:
            self.bar.update(self.task, description=f"{self.label}  val accuracy {row['val_accuracy']:.3f}")
        elif self.loud and row["epoch"] % self.every == 0:
            print(text, flush=True)
