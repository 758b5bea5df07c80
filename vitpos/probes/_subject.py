"""What a probe sees: a model, its preprocessing, and test images. Not a probe (the name starts with `_`).

Shapes: b images of a batch, C channels, H x W pixels, K classes, N images in all, S conditions.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import vitpos
from vitpos.composition import Position

T = TypeVar("T")


class NotApplicable(Exception):
    """A condition that this model or data set does not have; the message says why and what would help."""


class Images(Protocol):
    """The data set interface that probes use (vitpos.data gives it)."""

    labels: Tensor  # int64 [N]
    ids: list[str]

    def __len__(self) -> int: ...

    def batch(self, indices: Any) -> Tensor: ...  # float32 [b, C, H, W] in 0..1, not normalised


def _patch_of(model: nn.Module) -> tuple[tuple[int, int], str]:
    """The model's token grid in pixels (h, w), and where that number comes from."""
    embed = getattr(model, "patch_embed", None)
    ratio = getattr(embed, "feat_ratio", None)  # of a hybrid the whole stem's stride, not its last convolution's
    size = ratio(as_scalar=False) if ratio is not None else getattr(embed, "patch_size", None)
    if size is not None:
        h, w = (size, size) if isinstance(size, int) else size
        return (int(h), int(w)), "patch embedding"
    info = getattr(model, "feature_info", None)
    if info:
        stride = int(info[-1]["reduction"])
        return (stride, stride), "total stride"
    raise ValueError(
        f"{type(model).__name__} tells neither a patch size nor a stride (no patch_embed.patch_size, no feature_info): "
        "pass patch=(height, width) in pixels"
    )


class Subject:
    """A model with its images. `mean`, `std`: per channel, of the model's preprocessing.

    `limit` (0: all) takes that many test images by a fixed rule, spread evenly over the data set's order.
    `track(description, total)` is called when a long loop starts and returns a function to call with
    progress. The caller's model is on `device` during evaluation only (`evaluating`).
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: str | torch.device = "cpu",
        batch_size: int = 128,
        limit: int = 0,
        patch: tuple[int, int] | None = None,
        track: Callable[[str, int], Callable[[int], None]] | None = None,
    ) -> None:
        if batch_size < 1 or limit < 0:
            raise ValueError(f"batch_size must be at least 1 and limit at least 0, got {batch_size} and {limit}")
        if len(images) == 0:
            raise ValueError("no test image: the data set is empty")
        self.model, self.images, self.device = model, images, torch.device(device)
        self.batch_size = batch_size
        self.patch, self.patch_source = (patch, "given") if patch else _patch_of(model)
        count = min(limit, len(images)) if limit else len(images)
        self.indices = torch.arange(count) * len(images) // count
        self.labels = images.labels[self.indices].to(torch.int64)
        self.ids = [images.ids[i] for i in self.indices.tolist()]
        self._mean = torch.tensor(mean, device=self.device).view(1, -1, 1, 1)
        self._std = torch.tensor(std, device=self.device).view(1, -1, 1, 1)
        self.track = track or (lambda description, total: lambda done: None)
        first = images.batch(self.indices[:1])
        self.size: tuple[int, int] = (first.shape[2], first.shape[3])
        if first.shape[1] != self._mean.shape[1]:
            raise ValueError(f"the images have {first.shape[1]} channels, the model's preprocessing {len(mean)}")

    @property
    def position_aware(self) -> bool:
        """Whether the model carries a vitpos encoding (and so takes any grid, and has resize policies)."""
        return isinstance(getattr(self.model, "position", None), Position)

    def batches(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of 0..N and the data set's indices there, always in the same composition."""
        for start in range(0, len(self.indices), self.batch_size):
            part = slice(start, min(start + self.batch_size, len(self.indices)))
            yield part, self.indices[part]

    def pixels(self, indices: Tensor) -> Tensor:
        """Images [b, C, H, W] in 0..1 on the device, not yet normalised."""
        return self.images.batch(indices).to(self.device)

    def logits(self, pixels: Tensor, model: nn.Module | None = None) -> Tensor:
        """Normalise, run -> float32 [b, K] on the CPU. Everything before this (shift, pad, resize) is on raw
        pixels, so that what is filled in is black, not the mean colour."""
        images = (pixels.to(self.device) - self._mean) / self._std
        out: Tensor = (self.model if model is None else model)(images)
        return out.float().cpu()

    def loaded(self) -> Iterator[tuple[slice, Tensor]]:
        """As `batches`, with pixels [b, C, H, W] on the device in place of indices; decoded by workers where
        the data set has them."""
        if hasattr(self.images, "iterate"):
            parts, batches = zip(*self.batches())
            for part, (pixels, _) in zip(parts, self.images.iterate(list(batches))):
                yield part, pixels.to(self.device)
        else:
            for part, indices in self.batches():
                yield part, self.pixels(indices)

    def plain(self) -> NDArray[np.int64]:
        """Decisions of ordinary evaluation [N]."""
        return np.concatenate([self.logits(pixels).argmax(1).numpy() for _, pixels in self.loaded()])

    def sweep(
        self,
        conditions: Sequence[T],
        render: Callable[[Tensor, T], Tensor],
        description: str,
        *,
        source: Iterable[tuple[slice, Tensor]] | None = None,
        model: nn.Module | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """All images under all conditions -> decisions [S, N] and logit change [S, N].

        render(batch, condition) gives raw pixels from what `source` yields (the loaded pixels by default). The logit
        change is the largest absolute one over classes, against the first condition.
        """
        decisions = np.zeros((len(conditions), len(self.indices)), dtype=np.int64)
        change = np.zeros(decisions.shape, dtype=np.float32)
        advance = self.track(description, decisions.size)
        for part, batch in self.loaded() if source is None else source:
            reference = None
            for s, condition in enumerate(conditions):
                logits = self.logits(render(batch, condition), model)
                reference = logits if reference is None else reference
                decisions[s, part] = logits.argmax(1).numpy()
                change[s, part] = (logits - reference).abs().amax(1).numpy()
                advance(len(logits))
        return decisions, change

    def accepts(self, size: tuple[int, int]) -> str:
        """'' if the model runs on images of `size` (h, w), else one line that says why not and what would
        help."""
        h, w = size
        try:
            self.logits(torch.zeros(1, self._mean.shape[1], h, w))
        except (AssertionError, RuntimeError, ValueError) as error:
            if self.position_aware:
                raise
            reason = str(error).split("\n")[0] or type(error).__name__
            hint = ""
            if hasattr(getattr(self.model, "patch_embed", None), "strict_img_size"):
                hint = "; try model_args={dynamic_img_size: true} where the model supports it"
            return f"the model does not accept {h}x{w} px ({reason.rstrip('.')}){hint}"
        return ""

    def resize_policy(self, model: nn.Module | None = None) -> str:
        """What the model does with its positions at another grid, by name; '-' if nothing depends on it."""
        model = self.model if model is None else model
        if self.position_aware:
            return vitpos.resize_policy(model)
        return "interpolate (timm)" if getattr(model, "pos_embed", None) is not None else "-"

    def with_policy(self, policy: str) -> nn.Module:
        """A copy of the model under another resize policy: same weights, and the model itself stays as it is."""
        if not self.position_aware:
            raise NotApplicable(f"resize policy {policy!r}: the model carries no vitpos encoding")
        return vitpos.set_resize(copy.deepcopy(self.model), policy)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inference on the device in evaluation mode; the model's device, training flags of every module and random
        states are put back afterwards."""
        held = next(self.model.parameters(), torch.empty(0, device=self.device)).device
        modes = [(module, module.training) for module in self.model.modules()]
        states = random.getstate(), np.random.get_state()  # noqa: NPY002 (what a data set may use)
        cuda = [self.device] if self.device.type == "cuda" else []
        # fork_rng watches the CPU too; without a device list it would touch every GPU.
        with torch.random.fork_rng(devices=cuda), torch.inference_mode():
            try:
                self.model.to(self.device).eval()
                yield
            finally:
                self.model.to(held)
                for module, mode in modes:
                    module.training = mode
                random.setstate(states[0])
                np.random.set_state(states[1])  # noqa: NPY002
