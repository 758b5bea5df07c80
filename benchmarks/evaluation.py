"""Speed of evaluation under translation: five shifts of every image, next to a plain loop over images.

python benchmarks/evaluation.py [--rounds 15] [--threads 1]

The plain loop is what scripts do: for each shift and each image PIL's affine transform, torchvision's ToTensor and
Normalize (of version 1, which is the faster), default collation, and a forward a batch. vitpos is `Subject.sweep`,
which the translation probe calls: it also keeps seven numbers of each image's logits. Both have the same images in
memory (made up), model, batches and shifts (crop: black comes in), in float32, and must decide alike. `preprocessing`
is the same without the model: pixels as it would be given them.

The two are measured in turn within each round, in one process, and in the other order every second round. The table
holds medians over rounds of process time (CPU seconds of this process, which other work on the machine hardly touches)
and of wall time, and the median and quartiles of the rounds' own ratios, vitpos over the plain loop.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import timm
import torch
from PIL import Image
from torchvision import transforms

from vitpos import data, probes
from vitpos.data.decoded import IMAGENET_MEAN, IMAGENET_STD
from vitpos.probes._shifts import crop_shift

CLASSES = 10
SMALL = {"embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2, "class_token": False, "global_pool": "avg"}
SETTINGS = {  # title: side in pixels, patch, images, batch, arguments of the model
    "32 px, CIFAR recipe": (32, 4, 512, 128, SMALL),
    "224 px, ViT-Ti/16": (224, 16, 16, 16, {}),
}


class Images(data.Dataset):
    """uint8 images in memory, as vitpos holds CIFAR."""

    def __init__(self, side: int, count: int) -> None:
        info = data.Info("made up", [str(c) for c in range(CLASSES)], 3, (side, side), IMAGENET_MEAN, IMAGENET_STD)
        super().__init__(info, np.arange(count) % CLASSES, [str(i) for i in range(count)])
        small = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.images = small.repeat_interleave(side // 8, 2).repeat_interleave(side // 8, 3)

    def batch(self, indices: torch.Tensor) -> torch.Tensor:
        return self.images[indices].float() / 255

    def augmented(self, *_: object) -> torch.Tensor:
        raise NotImplementedError("evaluation augments nothing")


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


def rivals(title: str) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """(end to end, preprocessing), each as calls by name."""
    side, patch, count, batch, arguments = SETTINGS[title]
    images = Images(side, count)
    pictures = [Image.fromarray(x) for x in images.images.permute(0, 2, 3, 1).numpy()]
    shifts = [(0, 0), (patch, 0), (-patch, 0), (0, patch), (0, -patch)]
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=side, patch_size=patch, num_classes=CLASSES, **arguments)
    subject = probes.Subject(model.eval(), images, mean=IMAGENET_MEAN, std=IMAGENET_STD, batch_size=batch)

    moved = functools.partial(crop_shift, black=subject.black)

    def plain_batches() -> Iterator[tuple[int, torch.Tensor]]:
        for s, shift in enumerate(shifts):
            for x in torch.utils.data.DataLoader(Plain(pictures, shift), batch):
                yield s, x

    @torch.inference_mode()
    def plain() -> np.ndarray:
        found: list[list[torch.Tensor]] = [[] for _ in shifts]
        for s, x in plain_batches():
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
    return {"plain": plain, "vitpos": ours}, {"plain": plain_prepared, "vitpos": ours_prepared}


def measure(title: str, calls: dict[str, Callable[[], object]], rounds: int) -> None:
    clocks = {"CPU": time.process_time, "wall": time.perf_counter}
    spent: dict[tuple[str, str], list[float]] = {(name, clock): [] for name in calls for clock in clocks}
    for round_ in range(-1, rounds):  # the first one warms up
        for name in list(calls)[:: 1 if round_ % 2 else -1]:
            begin = {clock: now() for clock, now in clocks.items()}
            calls[name]()
            if round_ >= 0:
                for clock, now in clocks.items():
                    spent[name, clock].append(now() - begin[clock])
    for clock in clocks:
        theirs, mine = spent["plain", clock], spent["vitpos", clock]
        low, middle, high = statistics.quantiles([b / a for a, b in zip(theirs, mine)], n=4)
        print(
            f"| {title} | {clock} | {statistics.median(theirs):.3f} | {statistics.median(mine):.3f} "
            f"| {middle:.3f} ({low:.3f}-{high:.3f}) |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{given.rounds} rounds, {given.threads} thread(s), five shifts, torch {torch.__version__}")
    print("| what | clock | plain, s | vitpos, s | ratio, median (quartiles) |\n| --- | --- | --- | --- | --- |")
    for title in SETTINGS:
        end_to_end, preprocessing = rivals(title)
        measure(f"{title}: end to end", end_to_end, given.rounds)
        measure(f"{title}: preprocessing", preprocessing, given.rounds)


if __name__ == "__main__":
    main()
