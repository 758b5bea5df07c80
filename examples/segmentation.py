"""Semantic segmentation with segmentation-models-pytorch: DPT over a vitpos encoder, by its name.

Trained on images of 64 x 64, tested there and on larger ones, square and not.

    python examples/segmentation.py
"""

import argparse

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from shapes import CLASSES, shapes

import vitpos  # noqa: F401  (puts the names into timm's registry)

SIZES = ((64, 64), (64, 128), (96, 96))


def build(encoding: str) -> torch.nn.Module:
    """DPT over a small encoder: patches of 8 pixels, 12 blocks of width 48, read after every third."""
    return smp.DPT(
        f"tu-vitpos_tiny_patch16_224_{encoding}",
        encoder_weights=None,
        decoder_intermediate_channels=(16, 32, 48, 48),
        decoder_fusion_channels=32,
        classes=len(CLASSES),
        img_size=64,
        patch_size=8,
        embed_dim=48,
        num_heads=3,
    )


def overlap(model: torch.nn.Module, size: tuple[int, int], count: int = 24) -> float:
    """Mean intersection over union of the classes that are not background."""
    images, masks, _ = shapes(count, size, torch.Generator().manual_seed(1000))
    with torch.no_grad():
        found = model.eval()(images).argmax(1)
    pairs = [(found == label, masks == label) for label in range(1, len(CLASSES))]
    return sum(((a & b).sum() / (a | b).sum().clamp(min=1)).item() for a, b in pairs) / len(pairs)


def run(encoding: str = "rope_axial", steps: int = 120) -> dict[str, float]:
    """Train, and return the first and last loss and the overlap at each size."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = build(encoding).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        images, masks, _ = shapes(8, SIZES[0], generator)
        loss = F.cross_entropy(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = {"first loss": losses[0], "last loss": sum(losses[-10:]) / len(losses[-10:])}
    return result | {f"IoU {h}x{w}": overlap(model, (h, w)) for h, w in SIZES}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoding", default="rope_axial")
    parser.add_argument("--steps", type=int, default=120)
    print("  ".join(f"{key} {value:.3f}" for key, value in run(**vars(parser.parse_args())).items()))
