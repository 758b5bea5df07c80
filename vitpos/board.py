"""What TensorBoard shows of a run: its curves and settings, images as they are trained on, and the encoding; and of
evaluated runs."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
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


def evaluated(folder: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Curves of evaluated runs (docs/results.md) by their names: a sub-folder each, drawn over each other. Written
    whole or not at all; an earlier evaluation's are replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as made:
        for name, run in runs.items():
            with SummaryWriter(str(Path(made) / folder.name / name)) as writer:
                for tag, step, value in points(run):
                    writer.add_scalar(tag, value, step)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(Path(made) / folder.name, folder)


def points(run: Mapping[str, Any]) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of an evaluated run: accuracy by distance of the shift and by side, in pixels, and what the
    probes show as curves; there a step is x if that counts something, else the place along the curve."""
    yield "accuracy", 0, run["accuracy"]["value"]
    for variant, groups in run["probes"].get("translation", {}).get("variants", {}).items():
        for group in (group for group in ("patch", "subpatch") if group in groups):
            for row in groups[group]["by_distance"]:
                tag = f"translation/accuracy by distance ({variant}, {group})"
                yield tag, round(row["distance"]), row["accuracy"]["value"]
    for kind, entry in run["probes"].get("resolution", {}).get("kinds", {}).items():
        for row in entry.get("rows", []):
            if row["scale"][0] == row["scale"][1]:
                yield f"resolution/{kind} ({row['policy']})", row["size"][0], row["accuracy"]["value"]
    for name, probe in run["probes"].items():
        for view in (view for view in probe.get("views", []) if view["kind"] == "curves"):
            for line in view["series"]:
                counted = all(isinstance(x, int) for x in line["x"])
                for place, (x, y) in enumerate(zip(line["x"], line["y"])):
                    if y is not None:
                        tag = f"{name}/{view['title']}/{line['name']}"
                        yield tag, x if counted else place, y["value"] if isinstance(y, Mapping) else y


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
