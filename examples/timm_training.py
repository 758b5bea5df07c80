"""timm's own training utilities on a vitpos model: loader, mixup, layer-wise decay, schedule, EMA, saving.

python examples/timm_training.py
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import timm
import torch
from digits import digits
from timm.data import Mixup, create_loader, resolve_input_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

import vitpos  # noqa: F401  (puts the names into timm's registry)


class Digits(torch.utils.data.Dataset):
    """Digits as RGB images, with the ``transform`` that timm's loader sets."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = [to_pil_image(image.expand(3, -1, -1)) for image in images]
        self.labels = labels.tolist()
        self.transform: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return (self.transform(image) if self.transform else image), self.labels[index]


def loader(images: Tensor, labels: Tensor, config: dict[str, Any], training: bool) -> Any:
    return create_loader(
        Digits(images, labels),
        input_size=config["input_size"],
        mean=config["mean"],
        std=config["std"],
        crop_pct=1.0,
        batch_size=64,
        is_training=training,
        scale=(0.8, 1.0),
        hflip=0.0,
        color_jitter=0.0,
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
        device=torch.device("cpu"),
    )


def evaluate(model: nn.Module, batches: Any) -> float:
    """Accuracy in percent."""
    meter = AverageMeter()
    with torch.no_grad():
        for images, labels in batches:
            (top1,) = accuracy(model.eval()(images), labels)
            meter.update(top1.item(), len(labels))
    return meter.avg


def run(encoding: str = "rope_axial", epochs: int = 12) -> dict[str, float]:
    """Train, and return the first and last loss and the accuracy of the model, its EMA and its reloaded copy."""
    torch.manual_seed(0)
    model = timm.create_model(
        f"vitpos_tiny_patch16_224_{encoding}",
        img_size=16,
        patch_size=4,
        num_classes=10,
        embed_dim=48,
        depth=4,
        num_heads=3,
        drop_path_rate=0.05,
    )
    config = resolve_input_data_config(model)
    images, labels, test_images, test_labels = digits()
    batches = loader(images, labels, config, training=True)
    test = loader(test_images, test_labels, config, training=False)

    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.05, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05, layer_decay=0.8)
    scheduler, epochs = create_scheduler_v2(
        optimizer, num_epochs=epochs, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=len(batches)
    )
    ema = ModelEmaV3(model, decay=0.98, use_warmup=True)
    criterion = SoftTargetCrossEntropy()
    losses: list[float] = []
    for _ in range(epochs):
        for x, y in batches:
            model.train()
            x, y = mixup(x, y)
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            ema.update(model, step=len(losses))
            scheduler.step_update(len(losses))
    result = {"first loss": losses[0], "last loss": sum(losses[-10:]) / len(losses[-10:])}
    result |= {"accuracy": evaluate(model, test), "EMA accuracy": evaluate(ema.module, test)}
    with tempfile.TemporaryDirectory() as folder:
        save_for_hf(ema.module, folder, safe_serialization=True)
        again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return result | {"reloaded": evaluate(again, test)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoding", default="rope_axial")
    parser.add_argument("--epochs", type=int, default=12)
    print("  ".join(f"{key} {value:.3f}" for key, value in run(**vars(parser.parse_args())).items()))
