"""Nearest-neighbour retrieval from dense features: digits at any place of a canvas, against pixels.

Two images are as similar as their patches: the mean, over the patches of the query, of the highest cosine
similarity to a patch of the other image. A query is right if the nearest gallery image shows the same digit.

    python examples/retrieval.py
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from digits import digits, place
from torch import Tensor, nn

import vitpos  # noqa: F401  (puts the names into timm's registry)

CANVAS = 24


def similarity(queries: Tensor, gallery: Tensor) -> Tensor:
    """[Q, G] from dense features [Q, D, h, w] and [G, D, h, w]."""
    a, b = (F.normalize(f.flatten(2).mT, dim=-1) for f in (queries, gallery))
    return torch.stack([torch.einsum("nd,gmd->gnm", one, b).amax(-1).mean(-1) for one in a])


def correct(similar: Tensor, labels: Tensor, known: Tensor) -> float:
    """The share of queries whose nearest gallery image has their label."""
    return (known[similar.argmax(1)] == labels).float().mean().item()


def dense(model: nn.Module, images: Tensor) -> Tensor:
    """The normalized last map [B, D, h, w] of a model."""
    with torch.no_grad():
        return model.eval().forward_intermediates(images, 1, norm=True, intermediates_only=True)[0]


def run(encoding: str = "rope_axial", epochs: int = 20, queries: int = 200, gallery: int = 400) -> dict[str, float]:
    """Train a classifier; return the accuracy of retrieval by pixels, by untrained and by trained features."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels, test_images, test_labels = digits()
    model = timm.create_model(
        f"vitpos_tiny_patch16_224_{encoding}",
        img_size=CANVAS,
        patch_size=4,
        in_chans=1,
        num_classes=10,
        embed_dim=48,
        depth=3,
        num_heads=3,
        global_pool="avg",
    )
    known = place(images[:gallery], CANVAS, generator)
    asked = place(test_images[:queries], CANVAS, generator)
    pixels = F.normalize(asked.flatten(1), dim=1) @ F.normalize(known.flatten(1), dim=1).T

    def retrieve() -> float:
        similar = similarity(dense(model, asked), dense(model, known))
        return correct(similar, test_labels[:queries], labels[:gallery])

    result = {"pixels": correct(pixels, test_labels[:queries], labels[:gallery]), "untrained": retrieve()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps = max(epochs, 1) * -(-len(images) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).split(32):
            loss = F.cross_entropy(model(place(images[batch], CANVAS, generator)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return result | {"trained": retrieve()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoding", default="rope_axial")
    parser.add_argument("--epochs", type=int, default=20)
    print("  ".join(f"{key} {value:.3f}" for key, value in run(**vars(parser.parse_args())).items()))
