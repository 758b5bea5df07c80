"""Shortcut: does an architecture with its encoding learn where things are in place of what they are?

Fresh networks of the evaluated model's architecture and encoding (never its weights) are trained on generated images
with one fixed recipe (`RECIPE`, `steps` steps of `batch` images, seeded), and tested on others. What is said is about
the architecture, encoding and recipe. Images are RGB on black, `grid` x `grid` cells; a cell is a patch of the model,
so that everything is patch-aligned (4 px for a network without patches).

- `red_green`: one red and one green cell in one row. Class 0: red left of green; class 1: green left of red. Each
  class is the same set of patches, so only an arrangement tells them apart. In training class 0 lies in the top half,
  class 1 in the bottom half: the place is a second, easier cue. Tests: `similar` (as trained), `dissimilar` (halves
  swapped), `anywhere` (either half: only the relation tells). Without position every answer is alike: exactly 50%.
- `quadrant`: an object of 2 x 2 cells, one of 4 textures in noise; class k lies in quadrant k with probability `rho` in
  training, else in another. Tests: `aligned` (quadrant k), `uniform` (any), `swapped` (any but k). gap = accuracy
  aligned - accuracy swapped; position following = share of swapped images given the class of their quadrant.
- `held_out`: the same objects, in training never in the last quadrant. Tests: `seen`, `unseen`.
- `centre`: in training never touching the border. Tests: `centre`, `border` (it touches).
- `everywhere`: the control, trained at any place and tested on those sets: what the places cost by themselves.

There are no `scores` for a comparison over seeds: the networks are of the probe's own seeds, so that runs of several
seeds of one encoding hold the same networks again.

Source: Kayhan & van Gemert 2020, On Translation Invariance in CNNs, arXiv:2003.07064, section 4 (red_green, there with
convolutional networks); Geirhos et al. 2020, Shortcut Learning, arXiv:2004.07780 (cues in conflict). The rest is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitpos import names, seeds, stats
from vitpos.probes import Arrays, NotApplicable, Subject, register
from vitpos.probes._views import View, table

MEAN, STD = 0.1, 0.25  # of the generated images, roughly
NOISE = 3.0  # standard deviation of the noise on an object, in those of its texture: "what" is harder than "where"
RECIPE: dict[str, Any] = {"lr": 2e-3, "pos_lr_mult": 10.0, "weight_decay": 0.05, "warmup": 0.1}  # AdamW, cosine
CLASSES = 4
Draw = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]  # (labels, generator) -> images, class of the place


def red_green(labels: Tensor, generator: torch.Generator, place: str, grid: int, cell: int) -> tuple[Tensor, Tensor]:
    """Images [n, 3, S, S] of one red and one green cell in a row, and the class of the half they lie in [n]."""
    n, half = len(labels), grid // 2
    if place == "anywhere":
        lower = torch.randint(2, (n,), generator=generator)
    else:
        lower = labels if place == "similar" else 1 - labels
    row = lower * half + torch.randint(half, (n,), generator=generator)
    columns = torch.rand(n, grid, generator=generator).argsort(1)[:, :2].sort(1).values  # two different ones, in order
    red, green = torch.where(labels[:, None] == 0, columns, columns.flip(1)).unbind(1)
    cells = torch.zeros(n, 3, grid, grid)
    cells[torch.arange(n), 0, row, red] = 1.0
    cells[torch.arange(n), 1, row, green] = 1.0
    return cells.repeat_interleave(cell, 2).repeat_interleave(cell, 3), lower


def offsets(quadrant: Tensor, generator: torch.Generator, grid: int) -> Tensor:
    """Top left cells [n, 2] of objects of 2 x 2 cells, uniformly within quadrants 0..3 (row-major)."""
    half = grid // 2
    inside = torch.randint(half - 1, (len(quadrant), 2), generator=generator)
    return inside + half * torch.stack([quadrant // 2, quadrant % 2], dim=1)


def objects(labels: Tensor, at: Tensor, generator: torch.Generator, grid: int, cell: int) -> Tensor:
    """Images [n, 3, S, S] of textured objects of 2 x 2 cells with their top left cells at `at` [n, 2]."""
    side = 2 * cell
    textures = torch.randn(CLASSES, 3, side, side, generator=seeds.generator(0, "probe-textures", side))
    noise = torch.randn(len(labels), 3, side, side, generator=generator)
    parts = (0.5 + 0.2 * (textures[labels] + NOISE * noise) / (1 + NOISE**2) ** 0.5).clamp(0, 1)
    images = torch.zeros(len(labels), 3, grid * cell, grid * cell)
    span = torch.arange(side)
    rows, columns = (at[:, axis, None] * cell + span for axis in (0, 1))  # [n, side] each
    images[torch.arange(len(at))[:, None, None], :, rows[:, :, None], columns[:, None, :]] = parts.movedim(1, -1)
    return images


def other(labels: Tensor, generator: torch.Generator) -> Tensor:
    """A class other than each of `labels`, uniformly."""
    return (labels + torch.randint(1, CLASSES, labels.shape, generator=generator)) % CLASSES


def textured(place: str, rho: float, grid: int, cell: int) -> Draw:
    """Objects of 4 classes at places of a kind."""

    def draw(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n = len(labels)
        if place in ("centre", "border", "everywhere"):
            at = torch.randint(grid - 1, (n, 2), generator=generator)
            if place == "centre":
                at = 1 + torch.randint(grid - 3, (n, 2), generator=generator)
            elif place == "border":
                side, end = torch.randint(2, (2, n), generator=generator)
                at[torch.arange(n), side] = end * (grid - 2)
            quadrant = 2 * (at[:, 0] >= grid // 2) + (at[:, 1] >= grid // 2)
        else:
            anywhere = torch.randint(CLASSES, (n,), generator=generator)
            stays = torch.rand(n, generator=generator) < rho
            quadrant = {
                "aligned": labels,
                "swapped": other(labels, generator),
                "uniform": anywhere,
                "correlated": torch.where(stays, labels, other(labels, generator)),
                "seen": anywhere % (CLASSES - 1),
                "unseen": torch.full_like(labels, CLASSES - 1),
            }[place]
            at = offsets(quadrant, generator, grid)
        return objects(labels, at, generator, grid, cell), quadrant

    return draw


SETS = {  # task: (classes, where training has its images, where the tests have them)
    "red_green": (2, "similar", ("similar", "dissimilar", "anywhere")),
    "quadrant": (CLASSES, "correlated", ("aligned", "uniform", "swapped")),
    "held_out": (CLASSES, "seen", ("seen", "unseen")),
    "centre": (CLASSES, "centre", ("centre", "border")),
    "everywhere": (CLASSES, "everywhere", ("aligned", "uniform", "swapped", "seen", "unseen", "centre", "border")),
}


def drawing(task: str, place: str, rho: float, grid: int, cell: int) -> Draw:
    if task == "red_green":
        return lambda labels, generator: red_green(labels, generator, place, grid, cell)
    return textured(place, rho, grid, cell)


def normalized(images: Tensor) -> Tensor:
    return (images - MEAN) / STD


def train(model: Any, draw: Draw, classes: int, options: Mapping[str, Any], seed: int, device: torch.device) -> None:
    """Train in place: `steps` batches of new images, each class equally often."""
    from vitpos import config, training  # a trainer's libraries, which no other probe needs

    cfg = config.TrainConfig(batch_size=options["batch"], **RECIPE)
    optimizer = training.create_optimizer(model, cfg)
    model.train()
    for step in range(options["steps"]):
        training.set_learning_rate(optimizer, cfg, step, options["steps"])
        generator = seeds.generator(seed, "probe-batch", step)
        labels = torch.arange(options["batch"]) % classes
        images, _ = draw(labels, generator)
        loss = nn.functional.cross_entropy(model(normalized(images).to(device)), labels.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def tested(model: nn.Module, draw: Draw, classes: int, count: int, name: str, device: torch.device) -> Arrays:
    """Decisions `pred` [n] on a fixed test set of `count` images, each class equally often, with `labels` and the
    class that belongs to the `place`, both [n]."""
    labels = torch.arange(count) % classes
    images, place = draw(labels, seeds.generator(0, f"probe-test-{name}"))
    with torch.no_grad():
        pred = [model(normalized(part).to(device)).argmax(1).cpu() for part in images.split(64)]
    return {"pred": torch.cat(pred).numpy(), "labels": labels.numpy(), "place": place.numpy()}


@register(
    "shortcut",
    definitions={
        "red_green": "Red left or right of green, trained with one class above and one below. similar: tested so; "
        "dissimilar: swapped; anywhere: only the relation tells. Without position exactly 50%.",
        "quadrant": "Textured objects whose class goes with their quadrant in training (probability rho). Tested where "
        "it does (aligned), anywhere (uniform), and where it does not (swapped).",
        "gap": "Accuracy where the place agrees with the class, minus accuracy where it disagrees.",
        "position_following": "Share of swapped images that are given the class that belongs to their place.",
        "held_out": "Trained in three quadrants, tested there (seen) and in the fourth (unseen).",
        "centre": "Trained away from the border, tested there (centre) and touching the border.",
        "everywhere": "The control: trained at any place, tested on the same sets.",
        "networks": "Fresh ones of this architecture and encoding, trained on generated images with one recipe; the "
        "evaluated weights play no part.",
    },
)
class Shortcut:
    """Options: `tasks` ("all", or a list), `steps` and `batch` of each training, `test_images` a test set, `rho`,
    `grid` (cells a side, even), `seeds`: networks a task. It trains networks, so it runs only when it is named."""

    by_default: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {
        "tasks": "all", "steps": 150, "batch": 32, "test_images": 240, "rho": 0.9, "grid": 6, "seeds": 1,
    }  # fmt: skip

    def collect(self, subject: Subject, options: Mapping[str, Any]) -> Arrays:
        tasks = list(SETS) if options["tasks"] == "all" else options["tasks"]
        if not isinstance(tasks, list | tuple) or not tasks or not all(task in SETS for task in tasks):
            raise ValueError(f"shortcut.tasks must be all or a list out of {list(SETS)}, got {tasks!r}")
        if min(options["steps"], options["batch"], options["seeds"]) < 1 or options["test_images"] < 4:
            raise ValueError(f"shortcut.steps, batch, seeds must be at least 1, test_images 4, got {dict(options)}")
        if options["grid"] < 4 or options["grid"] % 2:
            raise ValueError(f"shortcut.grid must be an even number of at least 4 cells, got {options['grid']}")
        if not 0 <= options["rho"] <= 1:
            raise ValueError(f"shortcut.rho is a probability, got {options['rho']}")
        cell = 4 if subject.patch_source == "total stride" else max(subject.patch)
        if subject.patch[0] != subject.patch[1] and subject.patch_source != "total stride":
            raise NotApplicable(f"patches of {subject.patch[0]}x{subject.patch[1]} px are no square cells")
        arrays: Arrays = {"cell": np.array(cell)}
        advance = subject.track("shortcut", len(tasks) * options["seeds"])
        for task in tasks:
            runs = []
            for seed in range(options["seeds"]):
                with subject.differentiable():
                    runs.append(self._run(subject, task, cell, options, seed))
                advance(1)
            for key in runs[0]:
                one = key.endswith("pred")
                arrays[f"{task}/{key}"] = np.stack([run[key] for run in runs]) if one else runs[0][key]
        return arrays

    @staticmethod
    def _run(subject: Subject, task: str, cell: int, options: Mapping[str, Any], seed: int) -> Arrays:
        classes, trained_on, tests = SETS[task]
        rho, grid, side = options["rho"], options["grid"], options["grid"] * cell
        torch.manual_seed(seeds.stream(seed, "probe-backbone"))
        given = {"num_classes": classes, "in_chans": 3, "img_size": (side, side)}
        try:
            model = names.renew(subject.model, encoding_seed=seeds.stream(seed, "probe-encoding"), **given)
            model.eval().to(subject.device)(torch.zeros(1, 3, side, side, device=subject.device))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise NotApplicable(f"no fresh network for {side}x{side} px can be made: {error}") from None
        train(model, drawing(task, trained_on, rho, grid, cell), classes, options, seed, subject.device)
        arrays: Arrays = {}
        for place in tests:
            draw, count = drawing(task, place, rho, grid, cell), options["test_images"]
            found = tested(model, draw, classes, count, f"{classes}-{place}", subject.device)
            arrays |= {f"{place}/{key}": array for key, array in found.items()}
        return arrays

    def summarize(self, arrays: Arrays, truth: NDArray[np.int64]) -> dict[str, Any]:
        tasks = {}
        for task, (classes, _, tests) in SETS.items():
            if f"{task}/{tests[0]}/pred" not in arrays:
                continue
            found = {place: _tested({key: arrays[f"{task}/{place}/{key}"] for key in ("pred", "labels", "place")})
                     for place in tests}  # fmt: skip
            tasks[task] = {"chance": 1 / classes, "tests": found} | _gaps(found)
        return {"cell": int(arrays["cell"]), "tasks": tasks}

    def views(self, summary: dict[str, Any]) -> list[View]:
        rows = []
        for task, entry in summary["tasks"].items():
            for place, test in entry["tests"].items():
                rows.append([task, place, test["accuracy"], test["position_following"], test["constant"]])
        note = (
            "Fresh networks of this architecture and encoding, trained on generated images by one recipe. A network "
            "that reads the place in place of the object is right where the two agree (similar, aligned) and wrong "
            "where they do not (dissimilar, swapped). Intervals are over generated test images, for these networks."
        )
        columns = {"trained on": "", "tested on": "", "accuracy": "percent", "follows the place": "percent",
                   "one answer for all": ""}  # fmt: skip
        return [table("tasks", "Position as a shortcut", note, columns, rows, brief=True)]


def _tested(columns: Arrays) -> dict[str, Any]:
    """Numbers of one test set: pred [R, n], labels [n] and the class of the place [n]."""
    pred, labels, place = columns["pred"], columns["labels"], columns["place"]
    conflict = place != labels
    follows = (pred == place)[:, conflict].mean(axis=0)
    return {
        "accuracy": stats.mean_over_images((pred == labels).mean(axis=0), len(pred)).as_dict(),
        "by_seed": (pred == labels).mean(axis=1).tolist(),
        "position_following": stats.mean_over_images(follows, len(pred)).as_dict() if conflict.sum() > 1 else None,
        "constant": "yes" if (pred == pred[:, :1]).all() else "no",
    }


PAIRS = {"similar": "dissimilar", "aligned": "swapped", "seen": "unseen", "centre": "border"}


def _gaps(found: Mapping[str, Any]) -> dict[str, Any]:
    gaps = {
        f"{a} - {b}": found[a]["accuracy"]["value"] - found[b]["accuracy"]["value"]
        for a, b in PAIRS.items()
        if a in found and b in found
    }
    return {"gap": gaps}
