"""Train one vision transformer with one position encoding: config, data, model, optimizer, loop.

python train.py                                          # digits, rope_axial
python train.py 'pos=rope_axial(theta=50) + ape1d' data=cifar10 data.root=PATH
python train.py -m pos=none,ape1d,rope_axial seed=0,1,2  # a sweep
torchrun --nproc-per-node 2 train.py                     # several devices or processes
python train.py resume=RUN_FOLDER                        # go on with a stopped run
python train.py init=RUN_FOLDER pos=rope_mixed preserve=true  # fine-tune, from one encoding to another
"""

import hydra
from omegaconf import DictConfig

from vitpos import cli, config, data, runs, seeds, states, training


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
@cli.task
def main(cfg: DictConfig) -> None:
    # config: checked as a whole before anything is written
    run = config.typed(config.chosen(cfg))
    config.check_folder(run)
    accelerator = training.start(run.train)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes

    # data: validation is carved from train by the seed; the test set is eval.py's alone
    train_set, val_set = (data.load(run.data, split, run.seed).to(device) for split in ("train", "val"))
    shares = {"rank": rank, "world": world, "repeats": run.train.repeats}
    steps_per_epoch = len(data.epoch_batches(len(train_set), run.train.batch_size, run.seed, 0, **shares))
    steps = run.train.epochs * steps_per_epoch

    # model: at one seed every encoding starts from the same backbone weights
    model = training.create_model(run, train_set.info).to(device)
    training.check_sizes(model, run)
    ema = training.create_ema(model, run.train)
    unsharded = training.shard(run.train, accelerator, model, ema)
    criterion = training.create_loss(run.train)

    # optimizer
    state = states.State(accelerator, model, training.create_optimizer(model, run.train), ema, unsharded)

    with runs.RunFolder(run, accelerator, train_set, val_set) as folder:
        folder.restore(state)
        done = len(folder.rows)
        if done >= run.train.epochs:
            accelerator.print(f"{folder.path} is finished: {done} of {run.train.epochs} epochs are done")
            return
        parallel, optimizer = training.prepare(accelerator, state)
        meter = training.Meter(accelerator, run, steps, state.step)

        # loop: (epoch, step) decides every random draw
        with meter:
            for epoch in range(done, run.train.epochs):
                parallel.train()
                batches = data.epoch_batches(len(train_set), run.train.batch_size, run.seed, epoch, **shares)
                left = batches[state.step - epoch * steps_per_epoch :]
                sizes = training.sizes(run, range(state.step, state.step + len(left)))
                images = train_set.iterate(left, seed=run.seed, epoch=epoch, sizes=sizes)
                for step, (x, y) in enumerate(meter.steps(images), state.step):
                    training.set_learning_rate(optimizer, run.train, step, steps)
                    training.set_fade(model, run.train, step, steps)
                    seeds.seed_all(seeds.stream(run.seed, "regularize", step, rank))
                    x, y = training.mix(data.normalize(x, train_set.info), y, train_set.info, run, step)
                    told = training.coordinates(model, x, run, step)
                    loss, accuracy = training.backward(accelerator, parallel, criterion, x, y, told, run.train)
                    norm = None
                    if run.train.clip_grad > 0:
                        norm = accelerator.clip_grad_norm_(parallel.parameters(), run.train.clip_grad)
                    if folder.accepts(state, loss, norm):
                        optimizer.step()
                        if ema is not None:
                            ema.update(model, step=step)
                        state.add(loss, accuracy)
                    optimizer.zero_grad()
                    folder.stepped(state)

                train_loss, train_accuracy, taken = state.means()
                row = {
                    "epoch": epoch + 1,
                    "step": state.step,
                    "skipped_steps": steps_per_epoch - taken,
                    "lr": training.learning_rate(run.train, state.step - 1, steps),
                    "train_loss": train_loss,
                    "train_accuracy": train_accuracy,
                    **training.evaluate(state.evaluated(), val_set, run.train.eval_batch_size, accelerator),
                    "images_per_second": meter.rate,
                    "seconds": folder.seconds,
                }
                folder.epoch(state, row)
                meter.epoch(row)

        accelerator.print(
            f"{folder.path}: {run.pos}, seed {run.seed}, val accuracy {row['val_accuracy']:.3f} after "
            f"{row['epoch']} epochs, {row['seconds']:.0f} s, {row['images_per_second']:,.0f} images/s"
        )


if __name__ == "__main__":
    cli.run(main)
