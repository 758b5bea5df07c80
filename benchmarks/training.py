"""Speed of training on small images: reading them, and whole steps, next to torchvision and timm.

python benchmarks/training.py [--rounds 15] [--threads 1]

Both have the same model, batches and images (32x32 pixels, made up). How the two take turns: benchmarks/rivals.py.

reading: an epoch in batches of augmented float tensors. torchvision: PIL images in memory, its transforms (of version
    1, which is the faster) an image at a time, default collation; vitpos: uint8 images in memory, many at a time.
steps: timm's train.py is not part of its package; these are the calls of its train_one_epoch, in its order, on what
    its factories make (dataset, loader, optimizer, scheduler, loss), all with float32 and gradient clipping. It reads
    PNG files, as it has no other way. ``steps alone`` gives both loops one batch that is there already.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from rivals import HEADER, Rivals, parser, race
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, dispatch_clip_grad
from torch import nn
from torchvision import transforms

from vitpos import config, data, runs, seeds, training

BATCH, CLASSES, STEPS = 128, 10, 8
MODEL = {
    "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2, "class_token": False,
    "global_pool": "avg", "weight_init": "reset",
}  # fmt: skip


def make_images(root: Path, images: int = 2000) -> None:
    rng = np.random.default_rng(0)
    for i in range(images):
        path = root / "train" / f"class{i % CLASSES}" / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        small.resize((32, 32), Image.Resampling.BICUBIC).save(path)


# reading


class Rival(torch.utils.data.Dataset):
    """torchvision's way: PIL images and a transform of one."""

    def __init__(self, images: torch.Tensor, extra: list[nn.Module]):
        self.images = [Image.fromarray(x) for x in images.permute(0, 2, 3, 1).numpy()]
        crop_and_flip = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip()]
        self.transform = transforms.Compose([*crop_and_flip, *extra, transforms.ToTensor()])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), 0


def reading(ours: data.Dataset, extra: list[nn.Module]) -> Rivals:
    """What reads one epoch."""
    rival = torch.utils.data.DataLoader(Rival(ours.images, extra), BATCH, shuffle=True, drop_last=True)
    epoch = iter(range(10**9))

    def read_ours() -> int:
        number = next(epoch)
        batches = data.epoch_batches(len(ours), BATCH, 0, number)
        return sum(len(y) for _, y in ours.iterate(batches, seed=0, epoch=number))

    rivals: Rivals = {"torchvision": lambda: sum(len(y) for _, y in rival), "vitpos": read_ours}
    if len({read() for read in rivals.values()}) > 1:
        raise SystemExit("the two read different numbers of images: they do not measure the same")
    return rivals


# steps


def timm_loop(root: Path, batch: tuple[torch.Tensor, torch.Tensor] | None) -> Callable[[], None]:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=CLASSES, **MODEL)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=100, updates_per_epoch=100, step_on_epochs=False)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    dataset = create_dataset("", root, split="train", is_training=True)
    loader = create_loader(
        dataset, (3, 32, 32), BATCH, is_training=True, use_prefetcher=False, color_jitter=None, num_workers=0,
        interpolation="bilinear", persistent_workers=False,
    )  # fmt: skip
    losses, updates = AverageMeter(), iter(range(10**9))

    def run() -> None:
        model.train()
        for step, (x, y) in enumerate(loader if batch is None else [batch] * STEPS):
            loss = loss_fn(model(x), y)
            loss.backward()
            dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
            optimizer.step()
            optimizer.zero_grad()
            losses.update(loss.item(), x.size(0))
            scheduler.step_update(num_updates=next(updates), metric=losses.avg)
            if step + 1 == STEPS:
                break

    return run


def our_loop(root: Path, out: Path, batch: tuple[torch.Tensor, torch.Tensor] | None) -> Callable[[], None]:
    train = config.TrainConfig(cpu=True, batch_size=BATCH, lr=1e-3, betas=[0.9, 0.999])
    options = {"name": "cifar10", "root": str(root)}
    run = config.RunConfig(pos="ape1d", out=str(out), data=data.resolve(options), train=train)
    run.model = config.ModelConfig("vit_tiny_patch16_224", MODEL)
    accelerator = training.start(train)
    images, validation = (data.load(run.data, split) for split in ("train", "val"))
    model = training.create_model(run, images.info)
    state = runs.State(accelerator, model, training.create_optimizer(model, train))
    folder = runs.RunFolder(run, accelerator, images, validation).__enter__()
    parallel, optimizer = training.prepare(accelerator, state)
    criterion = training.create_loss(train)
    epoch = iter(range(10**9))

    def go() -> None:
        """The calls of train.py, in its order."""
        parallel.train()
        number = next(epoch)
        batches = data.epoch_batches(len(images), BATCH, 0, number)[:STEPS]
        for x, y in images.iterate(batches, seed=0, epoch=number) if batch is None else [batch] * STEPS:
            training.set_learning_rate(optimizer, train, state.step, 10**4)
            training.set_fade(model, train, state.step, 10**4)
            seeds.seed_all(seeds.stream(0, "regularize", state.step, 0))
            x, y = training.mix(data.normalize(x, images.info), y, images.info, run, state.step)
            told = training.coordinates(model, x, run, state.step)
            loss, accuracy = training.backward(accelerator, parallel, criterion, x, y, told, train)
            norm = accelerator.clip_grad_norm_(parallel.parameters(), train.clip_grad)
            if folder.accepts(state, loss, norm):
                optimizer.step()
                state.add(loss, accuracy)
            optimizer.zero_grad()
            folder.stepped(state)

    return go


def main() -> None:
    given = parser(__doc__, rounds=15).parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_images(root)
        options = {"name": "cifar10", "root": folder, "val_fraction": 0.1}
        print(f"{given.rounds} rounds, {given.threads} thread(s), batch {BATCH}, {STEPS} steps, {torch.__version__}")
        print(HEADER)
        race("reading: crop, flip", reading(data.load(options), []), given.rounds)
        distorted = data.load({**options, "augment": "rand-m9-n2"})
        race("reading: crop, flip, RandAugment", reading(distorted, [transforms.RandAugment(2, 27)]), given.rounds)
        x, y = next(data.load(options).iterate([torch.arange(BATCH)]))
        for title, batch in {"steps and reading": None, "steps alone": (x, y)}.items():
            out = root / title.replace(" ", "-")
            loops = {"timm": timm_loop(root, batch), "vitpos": our_loop(root, out, batch)}
            race(title, loops, given.rounds)


if __name__ == "__main__":
    main()
