"""What train.py's page calls: processes and devices, the model, its optimizer and schedule, the progress line."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from accelerate import Accelerator
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy
from timm.optim import create_optimizer_v2, get_optimizer_info, param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import vitpos
from vitpos import checkpoint, config, data, positions, seeds, states
from vitpos.backbone.models import MODELS, is_positional
from vitpos.config import RunConfig, TrainConfig
from vitpos.states import State


def start(cfg: TrainConfig) -> Accelerator:
    """Threads, device, precision and the process group (under torchrun), as the configuration asks."""
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    if "SUBMITIT_EXECUTOR" in os.environ and "RANK" not in os.environ:
        from submitit.helpers import JobEnvironment, TorchDistributedEnvironment

        if JobEnvironment().num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    # without an accelerator Accelerate joins torchrun's processes only when told to use the CPU
    accelerator = Accelerator(mixed_precision=cfg.precision, cpu=cfg.cpu or not torch.accelerator.is_available())
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", "1")):
        raise ValueError(
            f"{os.environ['WORLD_SIZE']} processes were started, {accelerator.num_processes} work together"
        )
    share, rest = divmod(cfg.batch_size, accelerator.num_processes)
    if rest == 0 and share % cfg.accumulate:
        raise ValueError(
            f"train.accumulate={cfg.accumulate} does not divide the {share} images that each process has of a batch"
        )
    if rest == 0 and mixes(cfg) and share % 2:
        raise ValueError(
            f"train.mixup and train.cutmix pair images: the {share} of each process must be an even number"
        )
    return accelerator


def create_model(run: RunConfig, info: data.Info) -> nn.Module:
    """The timm model with its encoding: bit-equal backbone weights at one seed, whatever the encoding.

    With ``init`` it is the model of those weights, at this dataset's size and classes; of a run that goes on, the one
    that its state describes and holds the weights of. With pos=native, a timm model that can have no vitpos encoding
    is taken as it is: a baseline, such as a ResNet.
    """
    if run.init is not None:
        card = None if run.resume is None else states.card(Path(run.resume))
        model: Any = _begin_from(Path(run.init), run, info) if card is None else checkpoint.built(card)
        model.set_input_size(img_size=info.img_size)
        return model
    name, kwargs = run.model.name, run.model.kwargs
    given = dict(kwargs, in_chans=info.in_chans, num_classes=len(info.classes), img_size=info.img_size)
    if timm.is_model(name):
        source = sys.modules[timm.model_entrypoint(name.split(".")[0]).__module__]
        if not any(kind in vars(source).values() for kind in MODELS):
            if run.pos == "native":
                return _create_plain(run, given)
            served = ", ".join(kind.__name__ for kind in MODELS)
            raise ValueError(
                f"model.name={name} is of {source.__name__}; served are timm's {served} (pos=native trains it as it is)"
            )
    torch.manual_seed(seeds.stream(run.seed, "backbone"))
    return vitpos.create_model(name, pos=run.pos, encoding_seed=seeds.stream(run.seed, "encoding"), **given)


def _create_plain(run: RunConfig, given: dict[str, Any]) -> nn.Module:
    """timm's own model of a class that vitpos does not serve."""
    name, t = run.model.name, run.train
    if t.coords != config.CoordsConfig() or t.sharding != "none":
        raise ValueError(f"train.coords and train.sharding are for models with a vitpos encoding, not for {name}")
    torch.manual_seed(seeds.stream(run.seed, "backbone"))
    try:
        model = timm.create_model(name, **given)
    except TypeError as error:
        if "img_size" not in str(error):
            raise ValueError(f"model.name={name}: {error}") from None
        torch.manual_seed(seeds.stream(run.seed, "backbone"))
        model = timm.create_model(name, **{key: value for key, value in given.items() if key != "img_size"})
    shared = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if shared and (t.accumulate > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        raise ValueError(
            f"{name} normalises over its batch, so parts of one (train.accumulate, several processes) would not train "
            "as the whole does; train it in one"
        )
    return model


def _begin_from(path: Path, run: RunConfig, info: data.Info) -> nn.Module:
    path = path / "last.safetensors" if path.is_dir() else path
    model: Any = vitpos.load(path)
    card = checkpoint.read_card(path)
    arguments = {k: v for k, v in card["model_args"].items() if k not in ("in_chans", "num_classes", "img_size", "pos")}
    run.model = config.ModelConfig(card["architecture"], arguments)  # what is trained here
    if not hasattr(model, "position"):
        raise ValueError(f"init={path} holds a {type(model).__name__}; served are models with a vitpos encoding")
    if model.patch_embed.proj.in_channels != info.in_chans:
        raise ValueError(
            f"init={path} takes {model.patch_embed.proj.in_channels} channels, {info.name} has {info.in_chans}"
        )
    if model.position.spec != vitpos.parse(run.pos):  # the same would be drawn anew
        torch.manual_seed(seeds.stream(run.seed, "encoding"))
        vitpos.attach(model, run.pos, preserve=run.preserve)
    torch.manual_seed(seeds.stream(run.seed, "backbone"))
    if model.num_classes != len(info.classes):
        model.reset_classifier(len(info.classes))
    return model


def set_fade(model: Any, cfg: TrainConfig, step: int, steps: int) -> None:
    """What is left of fading encodings falls linearly, from all of it to nothing at the end of ``cfg.fade``.

    It never rises, so that a model whose encodings have faded in part begins where it was.
    """
    if hasattr(model, "position") and model.position.fading:
        last = round(cfg.fade * steps) - 1
        share = 1 - step / last if step < last else 0.0
        vitpos.set_fade(model, min(share, vitpos.fade_of(model)))


def create_optimizer(model: Any, cfg: TrainConfig) -> torch.optim.Optimizer:
    """timm's optimizer over its parameter groups, whose ``lr_scale`` the schedule multiplies its rate by.

    The encoding's parameters get no decay and a learning rate of their own, whatever layer they belong to.
    """
    positional = [p for name, p in model.named_parameters() if is_positional(name) and p.requires_grad]
    ours = {id(p) for p in positional}
    told: Any = {"weight_decay": cfg.weight_decay, "no_weight_decay_list": getattr(model, "no_weight_decay", set)()}
    if cfg.layer_decay is None:
        groups = [{"lr_scale": 1.0, **group} for group in param_groups_weight_decay(model, **told)]
    else:
        groups = param_groups_layer_decay(model, layer_decay=cfg.layer_decay, **told)
    groups = [{**g, "params": [p for p in g["params"] if id(p) not in ours]} for g in groups]
    groups.append({"params": positional, "weight_decay": 0.0, "lr_scale": cfg.pos_lr_mult})
    if "muon" in cfg.optimizer:  # tables of positions are no maps between features, to be made orthogonal: Adam's
        groups[-1]["use_fallback"] = True
    options: Any = {"betas": (cfg.betas[0], cfg.betas[1])} if get_optimizer_info(cfg.optimizer).has_betas else {}
    if cfg.optimizer in ("adam", "adamw"):
        options["fused"] = True
    try:
        return create_optimizer_v2([g for g in groups if g["params"]], cfg.optimizer, lr=cfg.lr, **options)
    except (ValueError, TypeError, AssertionError, ImportError, RuntimeError) as error:
        raise ValueError(f"timm cannot build train.optimizer={cfg.optimizer}: {error}") from error


def learning_rate(cfg: TrainConfig, step: int, steps: int) -> float:
    """Linear warm-up over the first cfg.warmup of all steps, then cosine to zero."""
    warmup = round(cfg.warmup * steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def set_learning_rate(optimizer: torch.optim.Optimizer, cfg: TrainConfig, step: int, steps: int) -> None:
    """The rate of a step, times the scale of each group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(cfg, step, steps) * group["lr_scale"]


def check_sizes(model: Any, run: RunConfig) -> None:
    """ValueError for a training size that the model's patches do not fill."""
    if run.train.sizes is None:
        return
    if not hasattr(model, "position"):
        raise ValueError(f"train.sizes is for models with a vitpos encoding, not for {run.model.name}")
    step = model.patch_embed.feat_ratio(as_scalar=False)
    for size in map(config.pair, run.train.sizes):
        if any(side % s for side, s in zip(size, step)) and not model.patch_embed.dynamic_img_pad:
            near = tuple(max(1, round(side / s)) * s for side, s in zip(size, step))
            raise ValueError(f"train.sizes holds {size}, which patches of {step} do not fill; the nearest is {near}")


def sizes(run: RunConfig, steps: Sequence[int]) -> list[tuple[int, int] | None]:
    """The (h, w) in pixels of each of these steps' images, the same in all processes; None is the data's own."""
    choices = [None] if run.train.sizes is None else [config.pair(size) for size in run.train.sizes]
    drawn = seeds.integers(seeds.stream(run.seed, "size"), np.array(steps, np.uint64), (len(choices),))[:, 0]
    return [choices[i] for i in drawn]


def coordinates(model: Any, x: Tensor, run: RunConfig, step: int) -> dict[str, Tensor]:
    """What the model is told besides the images: augmented coordinates where the configuration asks for them."""
    if run.train.coords == config.CoordsConfig():
        return {}
    grid = positions.grid(*model.patch_embed.dynamic_feat_size(tuple(x.shape[-2:])))
    draws = seeds.generator(run.seed, "coordinates", step)
    return {"coords": positions.augment(grid, **dataclasses.asdict(run.train.coords), generator=draws).to(x.device)}


def create_loss(cfg: TrainConfig) -> nn.Module:
    """Of logits [b, classes] and classes [b], or shares of classes [b, classes] which are smoothed already."""
    smoothing = 0.0 if mixes(cfg) else cfg.label_smoothing
    if cfg.loss == "bce":
        return BinaryCrossEntropy(smoothing, cfg.bce_threshold)
    return nn.CrossEntropyLoss(label_smoothing=smoothing)


def mixes(cfg: TrainConfig) -> bool:
    return cfg.mixup > 0 or cfg.cutmix > 0


def mix(x: Tensor, y: Tensor, info: data.Info, run: RunConfig, step: int) -> tuple[Tensor, Tensor]:
    """Images [b, C, H, W] (overwritten) and labels [b], by mixup or CutMix where the configuration asks for them.

    Labels are then shares of classes [b, classes], smoothed. One draw a batch, keyed by the step; a process mixes the
    images that it has, so with another number of processes other images meet.
    """
    t = run.train
    if not mixes(t):
        return x, y
    classes = len(info.classes)
    mixer = Mixup(t.mixup, t.cutmix, prob=t.mix_prob, label_smoothing=t.label_smoothing, num_classes=classes)
    with seeds.global_generators(seeds.stream(run.seed, "mix", step)):
        return mixer(x, y)


def backward(
    accelerator: Accelerator, model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor, told: Any, cfg: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Add the gradient of the mean loss over a batch, part by part, and return its loss and accuracy.

    ``told`` is what the model is given besides the images. A mixed image counts for its larger label.
    """
    parts, loss, correct = cfg.accumulate, torch.zeros((), device=x.device), torch.zeros((), device=x.device)
    for i, (images, target) in enumerate(zip(x.chunk(parts), y.chunk(parts)), start=1):
        with contextlib.nullcontext() if i == parts else accelerator.no_sync(model):
            with accelerator.autocast():
                logits = model(images, **told)
            share = criterion(logits.float(), target) / parts
            accelerator.backward(share)
        loss += share.detach()
        correct += (logits.argmax(1) == (target if target.ndim == 1 else target.argmax(1))).sum()
    return loss, correct / len(x)


def create_ema(model: nn.Module, cfg: TrainConfig) -> ModelEmaV3 | None:
    return None if cfg.ema is None else ModelEmaV3(model, decay=cfg.ema, use_warmup=True)


def shard(cfg: TrainConfig, accelerator: Accelerator, model: Any, ema: ModelEmaV3 | None) -> nn.Module | None:
    """With train.sharding=fsdp, split the weights of both over the processes, block by block, in place (FSDP2).

    Returns a whole copy of the model, to evaluate and to save; None where nothing is sharded. By torch itself:
    Accelerate shards on accelerators only.
    """
    if cfg.sharding == "none" or accelerator.num_processes == 1:
        return None
    unsharded = copy.deepcopy(model)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in (model, None if ema is None else ema.module):
        if module is not None:
            for block in module.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(module, mesh=mesh)
    return unsharded


def prepare(accelerator: Accelerator, state: State) -> tuple[nn.Module, Any]:
    """The model as it is called in training, its gradients averaged over all processes, and its optimizer."""
    if state.unsharded is None:
        return accelerator.prepare(state.model, state.optimizer)
    return state.model, accelerator.prepare(state.optimizer)


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


class Meter:
    """Progress of the first process: a bar with images/s and time left on a terminal, a line an epoch elsewhere.

    Runs of a sweep that share a terminal side by side print three lines each.
    """

    def __init__(self, accelerator: Accelerator, run: RunConfig, steps: int, done: int):
        self.loud = accelerator.is_main_process
        self.label, self.epochs = f"{run.pos} s{run.seed}", run.train.epochs
        self.images, self.images_per_step = 0, run.train.batch_size
        alone = multiprocessing.current_process().name == "MainProcess"
        self.every = 1 if alone else math.ceil(self.epochs / 3)
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
