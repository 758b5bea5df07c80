"""Speed of evaluation under translation: five shifts of every image, next to a plain loop over images.

python benchmarks/evaluation.py [--rounds 15] [--threads 1]

The plain loop is what scripts do: for each shift and each image PIL's affine transform, torchvision's ToTensor and
Normalize (of version 1, which is the faster), default collation, and a forward a batch (`one by one`: an image). vitpos
is `Subject.sweep`, which the translation probe calls: it also keeps seven numbers of each image's logits. Both have the
same images in memory (made up), model, batches and shifts (crop: black comes in), in float32, and must decide alike.
`preprocessing` is the same without the model: pixels as it would be given them.

How the two take turns: benchmarks/rivals.py.
"""

import functools
from collections.abc import Iterator

import numpy as np
import timm
import torch
from PIL import Image
from rivals import HEADER, Rivals, parser, race
from torchvision import transforms

from vitpos import probes
from vitpos.data.decoded import IMAGENET_MEAN, IMAGENET_STD
from vitpos.probes._shifts import crop_shift

CLASSES = 10
SMALL = {"embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2, "class_token": False, "global_pool": "avg"}
SETTINGS = {  # title: side in pixels, patch, images, batch, arguments of the model
    "32 px, CIFAR recipe": (32, 4, 512, 128, SMALL),
    "224 px, ViT-Ti/16": (224, 16, 16, 16, {}),
}


class Images:
    """uint8 images in memory, as vitpos holds CIFAR; what probes need of a data set."""

    def __init__(self, side: int, count: int) -> None:
        self.labels, self.ids = torch.arange(count) % CLASSES, [str(i) for i in range(count)]
        small = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.images = small.repeat_interleave(side // 8, 2).repeat_interleave(side // 8, 3)

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: torch.Tensor) -> torch.Tensor:
        return self.images[indices].float() / 255


class Plain(torch.utils.data.Dataset):
    """One shift of PIL images in memory."""

    def __init__(self, images: list[Image.Image], shift: tuple[int, int]) -> None:
        self.images, (self.dy, self.dx) = images, shift
        self.prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        image = self.images[i]
        return self.prepare(image.transform(image.size, Image.Transform.AFFINE, (1, 0, -self.dx, 0, 1, -self.dy)))


def contest(title: str) -> tuple[Rivals, Rivals]:
    """(end to end, preprocessing)."""
    side, patch, count, batch, arguments = SETTINGS[title]
    images = Images(side, count)
    pictures = [Image.fromarray(x) for x in images.images.permute(0, 2, 3, 1).numpy()]
    shifts = [(0, 0), (patch, 0), (-patch, 0), (0, patch), (0, -patch)]
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=side, patch_size=patch, num_classes=CLASSES, **arguments)
    subject = probes.Subject(model.eval(), images, mean=IMAGENET_MEAN, std=IMAGENET_STD, batch_size=batch)

    moved = functools.partial(crop_shift, black=subject.black)

    def plain_batches(batch: int = batch) -> Iterator[tuple[int, torch.Tensor]]:
        for s, shift in enumerate(shifts):
            for x in torch.utils.data.DataLoader(Plain(pictures, shift), batch):
                yield s, x

    @torch.inference_mode()
    def plain(batch: int = batch) -> np.ndarray:
        found: list[list[torch.Tensor]] = [[] for _ in shifts]
        for s, x in plain_batches(batch):
            found[s].append(model(x).argmax(1))
        return torch.stack([torch.cat(part) for part in found]).numpy()

    @torch.inference_mode()
    def ours() -> np.ndarray:
        return subject.sweep(shifts, moved, "five shifts", normalized=True)["pred"]

    @torch.inference_mode()
    def ours_prepared() -> list[torch.Tensor]:
        batches = (subject.normalized(x) for _, x in subject.loaded())
        return [moved(x, shift)[0, 0, 0, 0] for x in batches for shift in shifts]

    def plain_prepared() -> list[torch.Tensor]:
        return [x[0, 0, 0, 0] for _, x in plain_batches()]

    agreement = (plain() == ours()).mean()
    if agreement < 0.999:
        raise SystemExit(f"the two decide alike on {agreement:.2%} of images and shifts: they do not measure the same")
    one_by_one = functools.partial(plain, 1)
    return {"plain": plain, "one by one": one_by_one, "vitpos": ours}, {
        "plain": plain_prepared,
        "vitpos": ours_prepared,
    }


def main() -> None:
    given = parser(__doc__, rounds=15).parse_args()
    torch.set_num_threads(given.threads)
    print(f"{given.rounds} rounds, {given.threads} thread(s), five shifts, torch {torch.__version__}")
    print(HEADER)
    for title in SETTINGS:
        end_to_end, preprocessing = contest(title)
        race(f"{title}: end to end", end_to_end, given.rounds, clocks=("CPU", "wall"))
        race(f"{title}: preprocessing", preprocessing, given.rounds, clocks=("CPU", "wall"))


if __name__ == "__main__":
    main()
