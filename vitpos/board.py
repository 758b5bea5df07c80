"""What TensorBoard shows of a run: its curves and settings, images as they are trained on, and the encoding."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torchvision.utils import make_grid

from vitpos import data, pages
from vitpos.backbone.models import is_positional
from vitpos.config import RunConfig

IMAGES = 64


class Board:
    """Events of one start of a run, in ``folder``. Whatever it shows of images and weights changes neither."""

    def __init__(self, folder: Path, run: RunConfig):
        self.run = run
        self.writer = SummaryWriter(str(folder))
        for summary in hparams(settings(run), {"val_accuracy": 0.0, "val_loss": 0.0}):
            self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]

    def epoch(self, row: dict[str, Any], model: nn.Module, train_set: data.Dataset) -> None:
        """An epoch's metrics; at some of the epochs, as train.pictures says, the rest."""
        for name, value in row.items():
            if name not in ("epoch", "step"):
                self.writer.add_scalar(name, value, row["step"])
        if row["epoch"] == 1 and self.run.train.pictures:
            self._images(train_set)
        if row["epoch"] in self._drawn():
            self._encoding(model, row["step"])
        self.writer.flush()

    def _drawn(self) -> set[int]:
        """The epochs after which the encoding is drawn: evenly spread, the last one among them."""
        epochs, pictures = self.run.train.epochs, self.run.train.pictures
        return {math.ceil((i + 1) * epochs / pictures) for i in range(pictures)}

    def _images(self, train_set: data.Dataset) -> None:
        """The first batch as it is after augmentation, before mixing and at the data's own size."""
        t = self.run.train
        first = data.epoch_batches(len(train_set), t.batch_size, self.run.seed, 0, repeats=t.repeats)[0][:IMAGES]
        self.writer.add_image("first_batch", make_grid(train_set.augmented(first, self.run.seed, 0).cpu()))

    def _encoding(self, model: Any, step: int) -> None:
        for name, parameter in model.named_parameters():
            if is_positional(name):
                self.writer.add_histogram(name, parameter.detach().float(), step)
        figure = pages.draw_model(model) if hasattr(model, "position") else None
        if figure is not None:
            self.writer.add_figure("encoding", figure, step)

    def close(self) -> None:
        self.writer.close()


def settings(run: RunConfig) -> dict[str, bool | int | float | str]:
    """A run's configuration as dotted keys and values that TensorBoard can tabulate."""
    found: dict[str, Any] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inside in value.items():
                collect(f"{prefix}.{key}".lstrip("."), inside)
        elif value is not None:
            found[prefix] = value if isinstance(value, (bool, int, float, str)) else str(value)

    collect("", dataclasses.asdict(run))
    return found
