"""Train one vision transformer with one position encoding: config, data, model, optimizer, loop.

python train.py                                          # digits, rope_axial
python train.py 'pos=rope_axial(theta=50) + ape1d' data=cifar10 data.root=PATH
python train.py -m pos=none,ape1d,rope_axial seed=0,1,2  # a sweep
torchrun --nproc-per-node 2 train.py                     # several devices or processes
python train.py resume=RUN_FOLDER                        # go on with a stopped run
python train.py init=RUN_FOLDER pos=rope_mixed preserve=true  # fine-tune, from one encoding to another
"""

from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from vitpos import cli, config, data, runs, seeds, training


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
@cli.task
def main(cfg: DictConfig) -> None:
    # config: checked as a whole before anything is written
    if cfg.resume is not None:
        cfg = config.resumed(cfg, Path(cfg.resume))
    run = config.typed(cfg)
    config.check_folder(run)
    accelerator = training.start(run.train)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes

    # data: validation is carved from train by the seed; the test set is eval.py's alone
    train_set, val_set = (data.load(run.data, split, run.seed).to(device) for split in ("train", "val"))
    steps_per_epoch = len(data.epoch_batches(len(train_set), run.train.batch_size, run.seed, 0, rank, world))
    steps = run.train.epochs * steps_per_epoch

    # model: at one seed every encoding starts from the same backbone weights
    model = training.create_model(run, train_set.info).to(device)
    ema = training.create_ema(model, run.train)
    evaluated = model if ema is None else ema.module
    criterion = training.create_loss(run.train)

    # optimizer
    optimizer = training.create_optimizer(model, run.train)

    with runs.RunFolder(run, accelerator, train_set, val_set) as folder:
        done = folder.restore(model, optimizer, ema)
        if done >= run.train.epochs:
            accelerator.print(f"{folder.path} is finished: {done} of {run.train.epochs} epochs are done")
            return
        parallel, optimizer = accelerator.prepare(model, optimizer)
        meter = training.Meter(accelerator, run, steps, done * steps_per_epoch, folder.seconds)

        # loop: (epoch, step) decides every random draw
        with meter:
            for epoch in range(done, run.train.epochs):
                parallel.train()
                total = torch.zeros(2, device=device)  # sums of loss and accuracy over steps
                batches = data.epoch_batches(len(train_set), run.train.batch_size, run.seed, epoch, rank, world)
                images = train_set.iterate(batches, seed=run.seed, epoch=epoch)
                for step, (x, y) in enumerate(meter.steps(images), epoch * steps_per_epoch):
                    lr = training.set_learning_rate(optimizer, run.train, step, steps)
                    training.set_fade(model, run.train, step, steps)
                    torch.manual_seed(seeds.stream(run.seed, "regularize", step, rank))
                    x, y = training.mix(data.normalize(x, train_set.info), y, train_set.info, run, step)
                    told = training.coordinates(model, x, run, step)
                    loss, accuracy = training.backward(accelerator, parallel, criterion, x, y, told, run.train)
                    if run.train.clip_grad > 0:
                        accelerator.clip_grad_norm_(parallel.parameters(), run.train.clip_grad)
                    optimizer.step()
                    optimizer.zero_grad()
                    if ema is not None:
                        ema.update(model, step=step)
                    total += torch.stack([loss, accuracy])

                train_loss, train_accuracy = (accelerator.reduce(total, "mean") / steps_per_epoch).tolist()
                row = {
                    "epoch": epoch + 1,
                    "step": step + 1,
                    "lr": lr,
                    "train_loss": train_loss,
                    "train_accuracy": train_accuracy,
                    **training.evaluate(evaluated, val_set, run.train.eval_batch_size, accelerator),
                    "images_per_second": meter.rate,
                    "seconds": meter.seconds,
                }
                folder.save(row, model, optimizer, ema)
                meter.epoch(row)

        accelerator.print(
            f"{folder.path}: {run.pos}, seed {run.seed}, val accuracy {row['val_accuracy']:.3f} after "
            f"{row['epoch']} epochs, {row['seconds']:.0f} s, {row['images_per_second']:,.0f} images/s"
        )


if __name__ == "__main__":
    cli.run(main)
