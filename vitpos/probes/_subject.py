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
from vitpos.parts import Arrays, Parts

T = TypeVar("T")
Batch = tuple[slice, Tensor]  # places among 0..N-1, and the data set's indices there
OWN = "timm's own"  # resize policy
OWN_POSITIONS = ("pos_embed", "rel_pos", "relative_position")  # in names of parameters
PARTS = 32  # of the images, about so many: what is lost at most when an evaluation is stopped
COLUMNS = {  # what a sweep keeps of each image's logits
    "pred": "the decision",
    "logit_change": "largest absolute change over classes against the reference",
    "logit_drift": "Euclidean norm over classes of that change",
    "logit_norm": "Euclidean norm of the logits about their mean over classes: the scale of a drift",
    "true_logit": "the logit of the true class",
    "confidence": "the largest probability",
    "entropy": "of the probabilities, in nats",
}


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


def _columns(logits: Tensor, reference: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """[b] for each name of `COLUMNS` from logits [b, K]."""
    change, log = logits - reference, logits.log_softmax(1)
    return {
        "pred": logits.argmax(1),
        "logit_change": change.abs().amax(1),
        "logit_drift": change.norm(dim=1),
        "logit_norm": (logits - logits.mean(1, keepdim=True)).norm(dim=1),
        "true_logit": logits.gather(1, labels[:, None])[:, 0],
        "confidence": log.amax(1).exp(),
        "entropy": -(log.exp() * log).nan_to_num().sum(1),
    }


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return {key: np.concatenate([part[key] for part in parts], axis=-1) for key in parts[0]}


class Subject:
    """A model with its images. `mean`, `std`: per channel, of the model's preprocessing.

    `limit` (0: all) takes that many test images by a fixed rule, spread evenly over the data set's order. `places`: the
    logit of each class of the images, where the model knows others too; it decides among all of them, or with
    `restrict` among these. `precision` "bf16" computes logits under autocast. `parts` shares the work among processes
    and keeps what is measured. `track(description, total)` is called when a long loop starts and returns a function to
    call with progress. The caller's model is on `device` during evaluation only (`evaluating`).
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
        places: Sequence[int] | None = None,
        restrict: bool = False,
        precision: str = "float32",
        parts: Parts | None = None,
        track: Callable[[str, int], Callable[[int], None]] | None = None,
    ) -> None:
        if batch_size < 1 or limit < 0:
            raise ValueError(f"batch_size must be at least 1 and limit at least 0, got {batch_size} and {limit}")
        if len(images) == 0:
            raise ValueError("no test image: the data set is empty")
        self.model, self.images, self.device = model, images, torch.device(device)
        self.batch_size, self.dtype = batch_size, torch.float32
        self.patch, self.patch_source = (patch, "given") if patch else _patch_of(model)
        count = min(limit, len(images)) if limit else len(images)
        self.indices = torch.arange(count) * len(images) // count
        self.labels = images.labels[self.indices].to(torch.int64)
        self.chosen = torch.tensor(places) if restrict and places is not None else None  # logits that are looked at
        if places is not None and not restrict:
            self.labels = torch.tensor(places)[self.labels]
        self.ids = [images.ids[i] for i in self.indices.tolist()]
        self._mean = torch.tensor(mean, device=self.device).view(1, -1, 1, 1)
        self._std = torch.tensor(std, device=self.device).view(1, -1, 1, 1)
        self.low = {"float32": None, "bf16": torch.bfloat16}[precision]  # of logits, by autocast
        self.parts = parts or Parts()
        self.track = track or (lambda description, total: lambda done: None)
        first = images.batch(self.indices[:1])
        self.size: tuple[int, int] = (first.shape[2], first.shape[3])
        if first.shape[1] != self._mean.shape[1]:
            raise ValueError(f"the images have {first.shape[1]} channels, the model's preprocessing {len(mean)}")

    @property
    def black(self) -> Tensor:
        """What a black pixel is once normalised [1, C, 1, 1]."""
        return self.normalized(torch.zeros_like(self._mean))

    @property
    def position_aware(self) -> bool:
        """Whether the model carries a vitpos encoding (and so takes any grid, and has resize policies)."""
        return isinstance(getattr(self.model, "position", None), Position)

    def batches(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of 0..N and the data set's indices there, always in the same composition."""
        for start in range(0, len(self.indices), self.batch_size):
            part = slice(start, min(start + self.batch_size, len(self.indices)))
            yield part, self.indices[part]

    def told(self) -> dict[str, Any]:
        """All but model and pixels that what is measured depends on, as JSON can hold it."""
        return {
            "ids": self.ids, "labels": self.labels.tolist(), "size": self.size, "batch_size": self.batch_size,
            "mean": self._mean.flatten().tolist(), "std": self._std.flatten().tolist(), "patch": self.patch,
            "chosen": None if self.chosen is None else self.chosen.tolist(), "policy": self.resize_policy(),
            "device": str(self.device), "threads": torch.get_num_threads(), "precision": str(self.low),
        }  # fmt: skip

    def alone(self) -> Subject:
        """The same, for a part that one process measures as a whole."""
        part = copy.copy(self)
        part.parts = Parts()
        return part

    def some(self, count: int) -> tuple[Subject, NDArray[np.int64]]:
        """The same with at most `count` images (0: all), spread evenly, and their places [n] among 0..N-1."""
        if count < 0:
            raise ValueError(f"the number of images must be 0 (all) or more, got {count}")
        total = len(self.indices)
        count = min(count, total) if count else total
        chosen = torch.arange(count) * total // count
        part = copy.copy(self)
        part.indices, part.labels = self.indices[chosen], self.labels[chosen]
        part.ids = [self.ids[i] for i in chosen.tolist()]
        return part, chosen.numpy()

    def precise(self) -> Subject:
        """The same in float64, with a copy of the model; on the CPU where the device knows no float64."""
        with torch.inference_mode(False):
            part = copy.copy(self)
            part.dtype, part.model, part.low = torch.float64, copy.deepcopy(self.model), None
            part.device = torch.device("cpu") if self.device.type == "mps" else self.device
            part.model.to(part.device, torch.float64)
            part._mean, part._std = (t.to(part.device, torch.float64) for t in (self._mean, self._std))
        return part

    def positioned(self) -> nn.Module:
        """A model of the same weights and logits that takes `coords`: the model itself, or a copy of a timm model with
        its native encoding made explicit. Raises NotApplicable where there is none."""
        if self.position_aware:
            return self.model
        try:
            with torch.inference_mode(False):
                return vitpos.attach(copy.deepcopy(self.model), "native")
        except (TypeError, ValueError) as error:
            raise NotApplicable(f"the model takes no coordinates, and none can be given to it: {error}") from None

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """Inside, gradients can be taken; only copies of the model should be touched."""
        with torch.inference_mode(False), torch.enable_grad():
            yield

    def pixels(self, indices: Tensor) -> Tensor:
        """Images [b, C, H, W] in 0..1 on the device, not yet normalised."""
        return self.images.batch(indices).to(self.device, self.dtype)

    def normalized(self, pixels: Tensor) -> Tensor:
        """What the model is given for raw pixels [b, C, H, W]."""
        return (pixels.to(self.device) - self._mean).div_(self._std)

    def logits(self, pixels: Tensor, model: nn.Module | None = None, **told: Any) -> Tensor:
        """Normalise, run -> [b, K] on the CPU in this subject's dtype; `told` goes to the model. Everything before this
        (shift, pad, resize) is on raw pixels, so that what is filled in is black, not the mean colour."""
        return self.answers(self.normalized(pixels), model, **told)

    def answers(self, given: Tensor, model: nn.Module | None = None, **told: Any) -> Tensor:
        """The same of images that are normalised."""
        with torch.autocast(self.device.type, dtype=self.low, enabled=self.low is not None):
            out: Tensor = (self.model if model is None else model)(given, **told)
        return self.decided(out).to(self.dtype).cpu()

    def decided(self, logits: Tensor) -> Tensor:
        """Of logits [b, K] those among which is decided."""
        return logits if self.chosen is None else logits[:, self.chosen.to(logits.device)]

    def features(self, pixels: Tensor, model: Any = None) -> dict[str, Tensor]:
        """What each layer puts out for raw pixels, as maps [b, D, h, w] by name: of a transformer the patch tokens
        before the first block (`embedding`) and after each, of a network of stages each stage; or NotApplicable."""
        model = self.model if model is None else model
        if not hasattr(model, "forward_intermediates"):
            raise NotApplicable(f"{type(model).__name__} has no forward_intermediates, so its layers cannot be read")
        entered: list[Tensor] = []
        blocks = list(getattr(model, "blocks", []))
        hook = blocks[0].register_forward_pre_hook(lambda _, given: entered.append(given[0])) if blocks else None
        try:
            maps = model.forward_intermediates(self.normalized(pixels), intermediates_only=True)
        finally:
            if hook is not None:
                hook.remove()
        h, w = maps[0].shape[-2:]
        prefix = getattr(model, "num_prefix_tokens", 0)
        if not (entered and entered[0].ndim == 3 and entered[0].shape[1] == prefix + h * w):
            return {f"stage {i}": out for i, out in enumerate(maps, 1)}
        embedding = {"embedding": entered[0][:, prefix:].mT.unflatten(2, (h, w))}
        return embedding | {f"block {i}": out for i, out in enumerate(maps, 1)}

    def loaded(self, batches: Sequence[Batch] | None = None) -> Iterator[tuple[slice, Tensor]]:
        """As `batches` (all, or those given), with pixels [b, C, H, W] on the device in place of indices; decoded by
        workers where the data set has them."""
        batches = list(self.batches()) if batches is None else batches
        if hasattr(self.images, "iterate"):
            stream = self.images.iterate([indices for _, indices in batches])
            for (part, _), (pixels, _) in zip(batches, stream):
                yield part, pixels.to(self.device, self.dtype)
        else:
            for part, indices in batches:
                yield part, self.pixels(indices)

    def plain(self) -> Arrays:
        """Ordinary evaluation: decisions `pred` [N]; at a lower precision also what float32 decides, `float32` [N], and
        how far logits are from it: `logit_drift` and `logit_norm` as in `COLUMNS`."""

        def measure(some: list[Batch]) -> Iterator[Arrays]:
            full = copy.copy(self)
            full.low = None
            for part, pixels in self.loaded(some):
                logits = self.logits(pixels)
                found = {"pred": logits.argmax(1)}
                if self.low is not None:
                    columns = _columns(logits, reference := full.logits(pixels), self.labels[part])
                    found["float32"], found["logit_drift"] = reference.argmax(1), columns["logit_drift"]
                    found["logit_norm"] = _columns(reference, reference, self.labels[part])["logit_norm"]
                yield {key: values.numpy() for key, values in found.items()}

        return self.over_images("plain", measure)

    def over_images(self, name: str, measure: Callable[[list[Batch]], Iterable[Arrays]]) -> Arrays:
        """What `measure` yields for each of the batches that it is given, joined along the last axis over all images:
        in parts, which processes share and which are kept."""
        batches = list(self.batches())
        size = max(1, len(batches) // PARTS)
        groups = [batches[i : i + size] for i in range(0, len(batches), size)]

        def of(numbers: list[int]) -> Iterator[Arrays]:
            measured = iter(measure([batch for number in numbers for batch in groups[number]]))
            for number in numbers:
                yield _joined([next(measured) for _ in groups[number]])

        return _joined(self.parts.each([name] * len(groups), of))

    def sweep(
        self,
        conditions: Sequence[T],
        render: Callable[[Any, T], Tensor],
        description: str,
        *,
        source: Callable[[list[Batch]], Iterable[tuple[slice, Any]]] | None = None,
        normalized: bool = False,
        model: nn.Module | None = None,
    ) -> Arrays:
        """All images under all conditions -> what is kept of the logits, by the names of `COLUMNS`, each [S, N].

        render(batch, condition) gives raw pixels from what `source` makes of batches (the loaded pixels by default), or
        `normalized` ones from normalised pixels, where it moves pixels alone: one pass over them in place of three.
        Changes are against the first condition.
        """

        def measure(some: list[Batch]) -> Iterator[Arrays]:
            advance = self.track(description, len(conditions) * sum(len(indices) for _, indices in some))
            for part, batch in (source or self.loaded)(some):
                batch = self.normalized(batch) if normalized else batch
                rows: list[dict[str, Tensor]] = []
                reference = None
                for condition in conditions:
                    logits = (self.answers if normalized else self.logits)(render(batch, condition), model)
                    reference = logits if reference is None else reference
                    rows.append(_columns(logits, reference, self.labels[part]))
                    advance(len(logits))
                kinds = {name: np.int64 if name == "pred" else np.float32 for name in COLUMNS}
                yield {name: torch.stack([row[name] for row in rows]).numpy().astype(kinds[name]) for name in COLUMNS}

        return self.over_images(description, measure)

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

    def resize_policy(self, model: Any = None) -> str:
        """What the model does with its positions at another grid, by name; '-' if nothing depends on it. Of what timm's
        modules hold themselves (rotary embeddings, relative positions) it is theirs: "timm's own"."""
        model = self.model if model is None else model
        if self.position_aware:
            names, policies = model.position.spec.names, vitpos.resize_policy(model).split(" + ")
            return " + ".join(OWN if name == "native" else policy for name, policy in zip(names, policies, strict=True))
        found = ["interpolate (timm)"] if getattr(model, "pos_embed", None) is not None else []
        inside = " ".join(name for name, _ in model.named_parameters() if name != "pos_embed")
        if getattr(model, "rope", None) is not None or any(word in inside for word in OWN_POSITIONS):
            found.append(OWN)
        return " + ".join(found) or "-"

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
