"""What the tests of probes share: subjects over the fake data, small models whose answers are not all alike."""

import timm
import torch
from fakes import CLASSES, Squares

import vitpos
from vitpos import probes

SMALL = dict(img_size=(12, 16), patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=16, depth=2, num_heads=2)
POOLED = dict(class_token=False, global_pool="avg")


def subject(model, images=None, **kwargs):
    return probes.Subject(model, images or Squares(), mean=[0.25], std=[0.5], batch_size=16, **kwargs)


def large(model, std=0.5):
    """Large weights: at its start a model is nearly linear, and all images get one decision."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=std)
    return model


def encoded(pos, std=0.5, **kwargs):
    """A small ViT with a vitpos encoding, read out by mean pooling."""
    torch.manual_seed(0)
    return large(vitpos.create_model("vit_tiny_patch16_224", pos=pos, **(SMALL | POOLED | kwargs)), std).eval()


def probe(name, model, images=None, options=None, limit=0):
    """A probe's (results, arrays) on a model."""
    arrays = probes.evaluate(subject(model, images, limit=limit), {name: options or {}})
    found = probes.summarize(arrays)["probes"][name]
    return found, {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}


EVA = {key: value for key, value in SMALL.items() if key != "class_token"}
OTHERS = {  # models that are not vitpos's: timm's own encodings, and a network without patches
    "resnet10t": dict(in_chans=1, num_classes=CLASSES, channels=(8, 8, 16, 16), output_stride=8),
    "vit_tiny_patch16_224": SMALL | dict(dynamic_img_size=True),
    "vit_relpos_small_patch16_224": SMALL,
    "vit_small_patch16_rope_224": SMALL | dict(dynamic_img_size=True),
    "vit_small_patch16_dinov3": SMALL | dict(dynamic_img_size=True),
    "swin_tiny_patch4_window7_224": dict(
        img_size=(32, 32), window_size=4, embed_dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), in_chans=1,
        num_classes=CLASSES,
    ),
}  # fmt: skip


def other(name):
    torch.manual_seed(0)
    return timm.create_model(name, **OTHERS[name]).eval()
