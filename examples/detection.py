"""Detection with torchvision: a simple feature pyramid over the dense features of a vitpos model, and FCOS on top.

The pyramid is that of Li et al. 2022 (ViTDet, arXiv:2203.16527): every level is made from the last map alone.
Images of one batch have different sizes and shapes; torchvision pads them, and the encoding takes what comes.

    python examples/detection.py
"""

import argparse
from collections import OrderedDict

import timm
import torch
from shapes import CLASSES, shapes
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou

import vitpos  # noqa: F401  (puts the names into timm's registry)

SIZES = ((64, 64), (64, 96), (96, 64))


class SimplePyramid(nn.Module):
    """Maps of strides 4, 8 and 16 from the last map of a plain vision transformer with patches of 8 pixels."""

    def __init__(self, encoding: str, out_channels: int = 64) -> None:
        super().__init__()
        self.out_channels = out_channels  # torchvision reads it
        self.body = timm.create_model(
            f"vitpos_tiny_patch16_224_{encoding}",
            features_only=True,
            out_indices=(-1,),
            img_size=64,
            patch_size=8,
            embed_dim=48,
            depth=4,
            num_heads=3,
        )
        (width,) = self.body.feature_info.channels()

        def level(*resize: nn.Module) -> nn.Module:
            return nn.Sequential(*resize, nn.Conv2d(width, out_channels, 3, padding=1), nn.GroupNorm(1, out_channels))

        up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.levels = nn.ModuleList([level(up, nn.GELU()), level(), level(nn.MaxPool2d(2))])

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        (features,) = self.body(images)
        return OrderedDict((str(i), level(features)) for i, level in enumerate(self.levels))


def build(encoding: str) -> nn.Module:
    """FCOS over the pyramid, on images as they are (no resizing, no normalization)."""
    return FCOS(
        SimplePyramid(encoding),
        num_classes=len(CLASSES),
        anchor_generator=AnchorGenerator(sizes=((8,), (16,), (32,)), aspect_ratios=((1.0,),) * 3),
        min_size=64,
        max_size=96,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        score_thresh=0.4,
        detections_per_img=10,
    )


def sample(count: int, generator: torch.Generator) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of all sizes, as torchvision takes them, and what is on them."""
    images: list[Tensor] = []
    targets: list[dict[str, Tensor]] = []
    for size in SIZES:
        some, _, found = shapes(count, size, generator)
        images, targets = [*images, *some], [*targets, *found]
    return images, targets


def found(model: nn.Module, count: int = 16) -> tuple[float, float]:
    """Recall and precision at an overlap of half, with the right class."""
    images, targets = sample(count, torch.Generator().manual_seed(1000))
    with torch.no_grad():
        predictions = model.eval()(images)
    hits = objects = boxes = 0
    for prediction, target in zip(predictions, targets):
        alike = prediction["labels"][:, None] == target["labels"][None]
        hits += int(((box_iou(prediction["boxes"], target["boxes"]) > 0.5) & alike).any(0).sum())
        objects += len(target["labels"])
        boxes += len(prediction["labels"])
    return hits / objects, hits / max(boxes, 1)


def run(encoding: str = "rope_axial", steps: int = 120) -> dict[str, float]:
    """Train, and return the first and last loss, recall and precision."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = build(encoding).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = sum(model(*sample(3, generator)).values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    recall, precision = found(model)
    last = sum(losses[-10:]) / len(losses[-10:])
    return {"first loss": losses[0], "last loss": last, "recall": recall, "precision": precision}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoding", default="rope_axial")
    parser.add_argument("--steps", type=int, default=120)
    print("  ".join(f"{key} {value:.3f}" for key, value in run(**vars(parser.parse_args())).items()))
