"""What the tests of encodings share: small models at randomized parameters, and the grids they run on."""

import torch

import vitpos
from vitpos.spec import REGISTRY

PATCH = 2
GRIDS = [(3, 5), (5, 2), (1, 7)]
PREFIXES = [0, 1, 5]
ENCODINGS = [name for name in vitpos.list_encodings() if name != "native"]  # native stands for another one


def variants(name):
    """The spec of an encoding, and of each variant that it declares laws for, with those laws."""
    cls = REGISTRY[name]
    return {name: cls.laws} | {f"{name}({given})": laws for given, laws in cls.variants.items()}


SPECS = {spec: laws for name in ENCODINGS for spec, laws in variants(name).items()}


def tiny(pos, grid=(3, 5), prefix=0, heads=3, dim=36, depth=2, randomize=True, seed=0, **kwargs):
    """A float64 ViT of ``depth`` blocks (head width 12) on ``grid``, every parameter random.

    Read out by mean pooling without prefix tokens, by the class token with them.
    """
    torch.manual_seed(seed)
    pooling = {"class_token": False, "global_pool": "avg"} if prefix == 0 else {"reg_tokens": prefix - 1}
    model = vitpos.create_model(
        "vit_tiny_patch16_224",
        pos=pos,
        img_size=(grid[0] * PATCH, grid[1] * PATCH),
        **{
            "patch_size": PATCH,
            "embed_dim": dim,
            "depth": depth,
            "num_heads": heads,
            "num_classes": 7,
            **pooling,
            **kwargs,
        },
    )
    model = model.double().eval()
    if randomize:
        randomize_(model)
    return model


def randomize_(model, std=0.5, seed=1):
    """Draw positional parameters with standard deviation 0.5: laws that a zero table passes must be able to fail."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("position.", "pos_embed", "cls_token", "reg_token")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
            elif parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
            else:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
                parameter.copy_(parameter + noise)


def images(grid, batch=2, seed=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, grid[0] * PATCH, grid[1] * PATCH, generator=generator, dtype=torch.float64).to(dtype)


def coordinates(grid):
    """All cells (y, x) of a grid, row-major, written with loops."""
    return torch.tensor([[i, j] for i in range(grid[0]) for j in range(grid[1])], dtype=torch.float64)


def relative_change(a, b):
    return ((a - b).norm() / b.norm()).item()
