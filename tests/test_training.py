import dataclasses
import math
import random

import numpy as np
import pytest
import timm
import torch
from torch import nn

import vitpos
from vitpos import config, data, runs, seeds, states, training

KWARGS = {
    "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "class_token": False,
    "global_pool": "avg",
}  # fmt: skip


def run_config(pos="none", seed=0, kwargs=None, **train) -> config.RunConfig:
    model = config.ModelConfig("vit_tiny_patch16_224", {**KWARGS, **(kwargs or {})})
    cfg = config.TrainConfig(**train)
    return config.RunConfig(pos=pos, seed=seed, data=data.resolve({"name": "digits"}), model=model, train=cfg)


INFO = data.Info("digits", [str(i) for i in range(10)], 1, (24, 24), [0.0], [1.0])


def backbone(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights that are not the encoding's."""
    return {k: v for k, v in model.state_dict().items() if not training.is_positional(k)}


# named random streams


@pytest.mark.parametrize("kwargs", [{}, {"class_token": True, "global_pool": "token", "reg_tokens": 2}])
@pytest.mark.parametrize("pos", [*vitpos.list_encodings(), "rope_axial + ape1d"])
def test_every_encoding_starts_from_the_same_backbone(pos, kwargs):
    reference = backbone(training.create_model(run_config("none", kwargs=kwargs), INFO))
    ours = backbone(training.create_model(run_config(pos, kwargs=kwargs), INFO))
    assert ours.keys() == reference.keys()
    for key, value in reference.items():
        assert torch.equal(value, ours[key]), key
    other = backbone(training.create_model(run_config(pos, seed=1, kwargs=kwargs), INFO))
    assert not torch.equal(other["blocks.0.attn.qkv.weight"], ours["blocks.0.attn.qkv.weight"])


def test_an_encodings_own_weights_follow_the_seed():
    first, again, other = (training.create_model(run_config("ape2d", seed=s), INFO).state_dict() for s in (0, 0, 1))
    names = [k for k in first if k.startswith("position.") and first[k].is_floating_point()]
    assert names
    assert all(torch.equal(first[k], again[k]) for k in names)
    assert not any(torch.equal(first[k], other[k]) for k in names)


def test_coordinate_augmentation_is_keyed_by_step_and_off_by_default():
    model = training.create_model(run_config("rope_axial"), INFO)
    x = torch.zeros(2, 1, 24, 24)
    assert training.coordinates(model, x, run_config(), 3) == {}
    run = run_config(coords=config.CoordsConfig(shift=0.2, jitter=0.3))
    first, again, later = (training.coordinates(model, x, run, step)["coords"] for step in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    other = training.coordinates(model, x, run_config(seed=1, coords=run.train.coords), 3)["coords"]
    assert not torch.equal(first, other)
    assert first.shape == (1, 36, 2)
    assert model(x, coords=first).shape == (2, 10)


def test_sizes_are_drawn_by_step():
    run = run_config(sizes=[24, [16, 32], [8, 12]])
    drawn = training.sizes(run, range(300))
    assert set(drawn) == {(24, 24), (16, 32), (8, 12)}
    assert min(drawn.count(size) for size in set(drawn)) > 70
    assert training.sizes(run, range(100, 300)) == drawn[100:], "wherever an epoch or a resumed run begins"
    assert training.sizes(run_config(seed=1, sizes=run.train.sizes), range(300)) != drawn
    assert training.sizes(run_config(), range(3)) == [None] * 3


def test_sizes_that_patches_do_not_fill():
    run = run_config(sizes=[24, [16, 30]])
    model = training.create_model(run, INFO)
    with pytest.raises(ValueError, match=r"train.sizes holds \(16, 30\), .* the nearest is \(16, 32\)"):
        training.check_sizes(model, run)
    training.check_sizes(model, run_config(sizes=[24, [16, 32]]))


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"num_heads": 5}, "dim should be divisible"), ({"patch_size": 0}, "by zero"), ({"depth": 0}, "no blocks"),
        ({"depth": -1}, "non-negative"), ({"embed_dim": "abc"}, "."), ({"deepth": 3}, "deepth"),
    ],
)  # fmt: skip
def test_model_that_cannot_be_built(kwargs, reason):
    with pytest.raises(
        ValueError, match=f"^timm cannot build vit_tiny_patch16_224 with .*: .*{reason}|^the model has {reason}"
    ) as e:
        training.create_model(run_config(kwargs=kwargs), INFO)
    assert next(iter(kwargs)) in str(e.value)
    assert "\n" not in str(e.value)


def test_model_that_is_no_vision_transformer():
    run = run_config()
    run.model.name = "resnet18.a1_in1k"
    with pytest.raises(ValueError, match=r"model.name=resnet18.* is of timm.models.resnet; served are .*VisionTransf"):
        training.create_model(run, INFO)


def test_a_convolutional_baseline_is_timms_own():
    """With pos=native only; what is made for encodings, or would train it otherwise, is refused."""
    run = run_config("native")
    run.model = config.ModelConfig("resnet10t", {"channels": [8, 8, 16, 16]})
    model = training.create_model(run, INFO)
    torch.manual_seed(seeds.stream(0, "backbone"))
    theirs = timm.create_model("resnet10t", num_classes=10, in_chans=1, channels=[8, 8, 16, 16])
    assert type(model) is type(theirs)
    for ours, wanted in zip(model.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(ours, wanted)
    run.pos = "none"
    with pytest.raises(ValueError, match="pos=native trains it as it is"):
        training.create_model(run, INFO)
    for wrong in ({"accumulate": 2}, {"sharding": "fsdp"}, {"coords": config.CoordsConfig(shift=0.1)}):
        other = dataclasses.replace(run, pos="native", train=config.TrainConfig(**wrong))
        with pytest.raises(ValueError, match=r"in one|vitpos encoding"):
            training.create_model(other, INFO)
    sized = dataclasses.replace(run, pos="native", train=config.TrainConfig(sizes=[24]))
    with pytest.raises(ValueError, match=r"train.sizes is for models with a vitpos encoding"):
        training.check_sizes(model, sized)
    swin = dataclasses.replace(
        run,
        pos="native",
        model=config.ModelConfig("swin_tiny_patch4_window7_224", {"depths": [1, 1, 1, 1], "window_size": 3}),
    )
    assert training.create_model(swin, INFO).patch_embed.img_size == (24, 24)


# optimizer


@pytest.mark.parametrize("pos", [*vitpos.list_encodings(), "rope_axial + ape1d"])
def test_optimizer_groups(pos):
    """Every trainable parameter once; no decay on positions, biases and norms; positions have their own rate."""
    model = training.create_model(run_config(pos), INFO)
    optimizer = training.create_optimizer(model, config.TrainConfig(pos_lr_mult=10.0, weight_decay=0.3))
    names = {id(p): n for n, p in model.named_parameters()}
    seen = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
    assert sorted(seen) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            assert group["lr_scale"] == (10.0 if training.is_positional(name) else 1.0)
            decays = p.ndim > 1 and not training.is_positional(name)
            assert group["weight_decay"] == (0.3 if decays else 0.0), name


@pytest.mark.parametrize("pos", ["none", "ape1d", "rpb", "ape2d + rope_mixed"])
def test_layer_decay_by_hand(pos):
    """Of two blocks: stem 1/8, blocks 1/4 and 1/2, head and last norm 1 - and positions as if there were none."""
    model = training.create_model(run_config(pos), INFO)
    cfg = config.TrainConfig(layer_decay=0.5, pos_lr_mult=3.0, weight_decay=0.3)
    groups = training.create_optimizer(model, cfg).param_groups
    found = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    expected = {"patch_embed": 0.125, "blocks.0": 0.25, "blocks.1": 0.5, "fc_norm": 1.0, "head": 1.0}
    for name, p in model.named_parameters():
        if training.is_positional(name):
            assert found[id(p)] == (3.0, 0.0), name
        else:
            scale = next(value for stem, value in expected.items() if name.startswith(stem))
            assert found[id(p)] == (scale, 0.3 if p.ndim > 1 else 0.0), name


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd", "muon", "lion"])
def test_timms_optimizers_learn(name):
    """One step against the gradient, at rates that differ as the groups say."""
    model = training.create_model(run_config("ape1d"), INFO)
    lr = {"sgd": 0.1, "adamw": 1e-3}.get(name, 2e-3)
    cfg = config.TrainConfig(optimizer=name, lr=lr, weight_decay=0.0, pos_lr_mult=0.0, layer_decay=0.9)
    optimizer = training.create_optimizer(model, cfg)
    training.set_learning_rate(optimizer, cfg, 1, 2)
    x, y = torch.rand(8, 1, 24, 24), torch.arange(8)
    before = model.pos_embed.clone()
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.02
    assert torch.equal(model.pos_embed, before), "its rate is 0"


def test_muon_leaves_tables_of_positions_to_adam():
    model = training.create_model(run_config("ape1d"), INFO)
    optimizer = training.create_optimizer(model, config.TrainConfig(optimizer="muon", lr=1e-3))
    model(torch.rand(8, 1, 24, 24)).logsumexp(1).sum().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    steps = {name: (p.detach() - before[name]).abs() for name, p in model.named_parameters()}
    torch.testing.assert_close(steps["pos_embed"], torch.full_like(before["pos_embed"], 1e-3), rtol=0.2, atol=0)
    other = steps["blocks.0.attn.proj.weight"]
    assert other.std() > 0.3 * other.mean(), "the control: Adam's first step is as large for each number"


def test_optimizer_that_cannot_be_built():
    model = training.create_model(run_config(), INFO)
    with pytest.raises(ValueError, match=r"^timm cannot build train.optimizer=bnbadamw: "):
        training.create_optimizer(model, config.TrainConfig(optimizer="bnbadamw"))


# loss, mixing, parts of a batch


def test_losses_by_hand():
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    hard, soft = torch.tensor([1]), torch.tensor([[0.3, 0.1, 0.6]])
    p = logits.softmax(1)[0]
    ce = training.create_loss(config.TrainConfig(label_smoothing=0.3))
    smooth = -(0.8 * p[1].log() + 0.1 * p[0].log() + 0.1 * p[2].log())
    assert ce(logits, hard) == pytest.approx(smooth.item(), rel=1e-5)
    mixed = training.create_loss(config.TrainConfig(label_smoothing=0.3, mixup=1.0))
    assert mixed(logits, soft) == pytest.approx(-(soft[0] * p.log()).sum().item(), rel=1e-5), "smoothed already"
    sigmoid = logits.sigmoid()[0]
    for threshold, target in {0.2: [1.0, 0.0, 1.0], 0.5: [0.0, 0.0, 1.0], None: [0.3, 0.1, 0.6]}.items():
        bce = training.create_loss(config.TrainConfig(loss="bce", mixup=1.0, bce_threshold=threshold))
        by_hand = -sum(t * s.log() + (1 - t) * (1 - s).log() for t, s in zip(target, sigmoid)) / 3
        assert bce(logits, soft) == pytest.approx(by_hand.item(), rel=1e-5)


def test_mixing_is_off_by_default():
    x, y = torch.rand(4, 1, 24, 24), torch.arange(4)
    assert all(a is b for a, b in zip(training.mix(x, y, INFO, run_config(), 0), (x, y)))


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_by_hand(kind):
    """Each image meets the one at the other end of the batch; labels say how much of each is there."""
    x, y = torch.rand(6, 1, 24, 24), torch.arange(6)
    run = run_config(label_smoothing=0.0, **{kind: 1.0})
    mixed, target = training.mix(x.clone(), y, INFO, run, 3)
    share = target[0, 0].item()
    assert 0 < share < 1
    if kind == "mixup":
        torch.testing.assert_close(mixed, share * x + (1 - share) * x.flip(0))
    else:
        kept = mixed == x
        assert torch.equal(torch.where(kept, x, x.flip(0)), mixed)
        assert kept[0].float().mean().item() == pytest.approx(share, abs=1e-6)
    expected = share * torch.eye(10)[y] + (1 - share) * torch.eye(10)[y.flip(0)]
    torch.testing.assert_close(target, expected)


def test_mixing_is_keyed_by_seed_and_step_and_leaves_global_generators_alone():
    x, y = torch.rand(4, 1, 24, 24), torch.arange(4)

    def mixed(seed, step, global_seed):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002
        result = training.mix(x.clone(), y, INFO, run_config(seed=seed, mixup=0.8, cutmix=1.0), step)[0]
        return result, (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002

    first, after = mixed(0, 3, 0)
    again, _ = mixed(0, 3, 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, mixed(0, 4, 0)[0])
    assert not torch.equal(first, mixed(1, 3, 0)[0])
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert after == (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002
    assert not torch.equal(first, x), "the control: something was drawn"


def test_parts_of_a_batch_have_its_gradient():
    accelerator = training.start(config.TrainConfig(cpu=True))
    x, y = torch.rand(12, 1, 24, 24), torch.arange(12) % 10
    found = {}
    for parts in (1, 3, 4):
        model = training.create_model(run_config("rpb"), INFO)
        cfg = config.TrainConfig(accumulate=parts)
        loss, accuracy = training.backward(accelerator, model, training.create_loss(cfg), x, y, {}, cfg)
        found[parts] = loss, accuracy, torch.cat([p.grad.flatten() for p in model.parameters()])
    for parts in (3, 4):
        for whole, cut in zip(found[1], found[parts]):
            torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)
    halved = torch.cat([found[1][2] / 2])
    assert not torch.allclose(halved, found[1][2], rtol=1e-4, atol=1e-6), "the control: what a wrong scale would give"


def test_a_batch_that_cannot_be_cut_or_paired():
    with pytest.raises(ValueError, match=r"train.accumulate=3 does not divide the 32 images"):
        training.start(config.TrainConfig(cpu=True, batch_size=32, accumulate=3))
    with pytest.raises(ValueError, match=r"pair images: the 33 of each process must be an even number"):
        training.start(config.TrainConfig(cpu=True, batch_size=33, cutmix=1.0))


def test_positional_parameters_exist_where_expected():
    """The control of the test above: without it a renamed parameter would pass as an ordinary one."""
    for pos, expected in {"ape1d": True, "rpb": True, "ape2d": True, "rope_axial": False, "none": False}.items():
        model = training.create_model(run_config(pos), INFO)
        assert any(training.is_positional(n) for n, _ in model.named_parameters()) is expected, pos


def test_schedule_by_hand():
    cfg = config.TrainConfig(lr=1.0, warmup=0.2)
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 10.0}], lr=1.0)
    rates = [training.learning_rate(cfg, step, 10) for step in range(10)]
    training.set_learning_rate(optimizer, cfg, 9, 10)
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(10 * rates[9])


@pytest.mark.parametrize("warmup", [0.0, 0.99])
def test_schedule_of_few_steps_is_finite(warmup):
    cfg = config.TrainConfig(lr=1.0, warmup=warmup)
    for steps in (1, 2, 3):
        for step in range(steps):
            assert 0 < training.learning_rate(cfg, step, steps) <= 1


# evaluation


def test_evaluate_counts_by_hand():
    dataset = data.load({"name": "digits"}, "val")

    class Constant(nn.Module):
        def forward(self, x):
            return torch.eye(10)[3].expand(len(x), 10) * 5

    accelerator = training.start(config.TrainConfig(cpu=True))
    result = training.evaluate(Constant(), dataset, 100, accelerator)
    is_three = (dataset.labels == 3).float().mean().item()
    log_sum = math.log(9 + math.exp(5))
    assert result["val_accuracy"] == pytest.approx(is_three)
    assert result["val_loss"] == pytest.approx(log_sum - 5 * is_three, rel=1e-5)


def run_folder(path, accelerator, **options) -> runs.RunFolder:
    parts = [data.load({"name": "digits"}, split) for split in ("train", "val")]
    run = run_config()
    for key, value in {"out": str(path), **options}.items():
        setattr(run, key, value)
    return runs.RunFolder(run, accelerator, *parts)


def test_the_loss_scale_of_fp16_goes_on(tmp_path):
    row = {"epoch": 1, "step": 5, "train_loss": 1.0, "seconds": 2.0}
    model = training.create_model(run_config(), INFO)
    optimizer = training.create_optimizer(model, config.TrainConfig())
    accelerator = training.start(config.TrainConfig(cpu=True))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    state = states.State(accelerator, model, optimizer)
    with run_folder(tmp_path / "run", accelerator) as folder:
        folder.epoch(state, row)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with run_folder(tmp_path / "run", accelerator, out=None, resume=str(tmp_path / "run")) as folder:
        folder.restore(state)
        assert len(folder.rows) == 1
    assert accelerator.scaler.get_scale() == 64.0


def test_another_run_takes_the_folder_meanwhile(tmp_path, monkeypatch):
    """After the check, before this run makes its own."""
    monkeypatch.chdir(tmp_path)
    check, taken = config.check_folder, []

    def overtaken(run):
        check(run)
        if not taken:
            taken.append(config.new_folder(run))
            taken[0].mkdir(parents=True)

    monkeypatch.setattr(config, "check_folder", overtaken)
    accelerator = training.start(config.TrainConfig(cpu=True))
    with run_folder(None, accelerator, out=None) as folder:
        assert folder.path != taken[0]
        assert (folder.path / "config.yaml").is_file()
    assert not list(taken[0].iterdir())


@pytest.mark.parametrize("pos", ["ape1d", "rope_axial", "rpb", "cpe"])
def test_dropped_patches_and_paths_follow_the_stream_not_the_encoding(pos):
    def dropped(pos, step):
        model = training.create_model(run_config(pos, kwargs={"drop_path_rate": 0.5, "patch_drop_rate": 0.25}), INFO)
        seen = []
        model.patch_drop.register_forward_hook(lambda _, args, out: seen.append(out[1].sort().values))
        for block in model.blocks[1:]:  # the first one's rate is 0
            for path in (block.drop_path1, block.drop_path2):
                path.register_forward_hook(lambda _, args, out: seen.append(out.abs().sum((1, 2)) > 0))
        torch.manual_seed(seeds.stream(0, "regularize", step, 0))
        model.train()(torch.rand(16, 1, 24, 24))
        return seen

    none, ours, later = dropped("none", 0), dropped(pos, 0), dropped(pos, 1)
    assert ours[0].shape == (16, 27)
    assert 0 < torch.cat(ours[1:]).float().mean() < 1
    assert all(torch.equal(a, b) for a, b in zip(none, ours))
    assert not any(torch.equal(a, b) for a, b in zip(none, later))


def test_streams_of_different_purposes_differ():
    names = ["backbone", "encoding", "order", "augment", "regularize", "split", "placement", "mix"]
    assert len({seeds.stream(0, n) for n in names}) == len(names)


# beginning from trained weights


def saved_run(folder, pos="ape1d"):
    model = training.create_model(run_config(pos), INFO)
    vitpos.save(model, folder / "last.safetensors")
    return model.eval()


def test_beginning_from_a_run_at_another_size_and_number_of_classes(tmp_path):
    before = saved_run(tmp_path)
    run = run_config("native")
    run.init = str(tmp_path)
    other = data.Info("digits", ["a", "b", "c"], 1, (32, 16), [0.0], [1.0])
    model = training.create_model(run, other).eval()
    x = torch.randn(2, 1, 32, 16)
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), before.forward_features(x))
        assert model(x).shape == (2, 3)
        again = vitpos.load(vitpos.save(model, tmp_path / "again.safetensors"))
        assert torch.equal(again(x), model(x))
    assert model.patch_embed.img_size == (32, 16)
    with pytest.raises(ValueError, match="takes 1 channels, rgb has 3"):
        training.create_model(run, data.Info("rgb", ["a", "b"], 3, (24, 24), [0.0], [1.0]))


@pytest.mark.parametrize("pos", ["rpb", "ape2d + rope_mixed"])
def test_the_same_encoding_goes_on_with_its_weights_on_its_grid(tmp_path, pos):
    before = saved_run(tmp_path, pos)
    run = run_config(pos)
    run.init = str(tmp_path)
    larger = data.Info("digits", INFO.classes, 1, (36, 36), [0.0], [1.0])
    model = training.create_model(run, larger).eval()
    assert model.position.geometry.grid == (6, 6)
    x = torch.randn(2, 1, 36, 36)
    with torch.no_grad():
        assert torch.equal(model(x), before(x))
        again = vitpos.load(vitpos.save(model, tmp_path / "again.safetensors"))
        assert torch.equal(again(x), model(x))


def test_preserving_begins_where_the_run_was_and_fades_what_it_replaces(tmp_path):
    before = saved_run(tmp_path)
    run = run_config("rope_mixed", fade=0.5)
    run.init, run.preserve = str(tmp_path / "last.safetensors"), True
    model = training.create_model(run, INFO).eval()
    x = torch.randn(2, 1, 24, 24)
    with torch.no_grad():
        assert torch.equal(model(x), before(x))
        run.preserve = False
        assert not torch.equal(training.create_model(run, INFO).eval()(x), before(x))
    left = []
    for step in range(8):
        training.set_fade(model, run.train, step, 8)
        left.append(1 - model.position.faded.item() / 65536)
    assert left == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0, 0.0, 0.0, 0.0, 0.0], abs=1e-5)
    vitpos.set_fade(model, 0.4)
    training.set_fade(model, run.train, 0, 8)  # it does not come back
    assert vitpos.fade_of(model) == pytest.approx(0.4, abs=1e-5)
    training.set_fade(model, config.TrainConfig(fade=1.0), 7, 8)
    assert vitpos.fade_of(model) == 0
    training.set_fade(before, run.train, 0, 8)  # nothing fades there


def test_preserve_needs_weights_to_begin_from():
    run = run_config("rope_mixed")
    run.preserve = True
    with pytest.raises(ValueError, match="it needs init=RUN_FOLDER"):
        config.check(run)
