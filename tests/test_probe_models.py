"""Every probe on models that are not vitpos's: it measures, or says why not; and leaves the model as it found it."""

import copy
import json
import random

import numpy as np
import pytest
import torch
from fakes import Constant, Scenes, Squares
from probing import OTHERS, other, subject

from vitpos import probes

QUICK = {  # options that keep a probe short, by its name
    "shortcut": {"steps": 1, "batch": 4, "test_images": 4, "tasks": ["red_green", "quadrant"]},
    "location": {"folds": 2},
    "factorial": {"offsets": [[0.25, 0], [0, 1]]},
}


# what does not apply to them, by their name: probes, or parts of one
NO_COORDINATES = {
    "factorial", "location.nets.no_encoding", "equivariance.identities.offset",
    "equivariance.identities.offset_fractional", "equivariance.identities.permutation",
}  # fmt: skip
NOT_ADDED = {"attention.terms"}  # to the tokens
APPLIES_NOT = {
    "resnet10t": NO_COORDINATES | {"attention"},
    "swin_tiny_patch4_window7_224": NO_COORDINATES | {"attention", "equivariance.features"},
    "vit_tiny_patch16_224": set(),
    "vit_relpos_small_patch16_224": NOT_ADDED,
    "vit_small_patch16_rope_224": NOT_ADDED,
    "vit_small_patch16_dinov3": NOT_ADDED,
}


def reasons(entry, place):
    """(dotted place, why) of everything in a probe's results that does not apply."""
    if isinstance(entry, dict):
        if "not_applicable" in entry:
            yield place, entry["not_applicable"]
        for key, value in entry.items():
            yield from reasons(value, f"{place}.{key}")


def run(name, model, images=None):
    images = images or Squares(n=6, textured=True)
    if "ResNet" in type(model).__name__:
        images.canvas = (16, 24)  # whole steps of its stride
    if "Swin" in type(model).__name__:
        images.canvas = model.patch_embed.img_size  # its windows fit no smaller image
    arrays = probes.evaluate(subject(model, images), {name: QUICK.get(name, {})})
    return probes.summarize(arrays)["probes"][name], arrays


@pytest.mark.parametrize("model", OTHERS)
@pytest.mark.parametrize("name", probes.names())
def test_every_probe_on_timms_models(name, model):
    found, arrays = run(name, other(model))
    json.dumps(found, allow_nan=False)
    said = dict(reasons(found, name))
    assert set(said) == {place for place in APPLIES_NOT[model] if place.split(".")[0] == name}
    assert all(len(why.split()) > 4 for why in said.values())
    assert not any(array.dtype == object for array in arrays.values())


@pytest.mark.parametrize("name", probes.names())
def test_every_probe_on_a_model_that_tells_nothing_of_itself(name):
    json.dumps(run(name, Constant(), Scenes(n=6))[0], allow_nan=False)


def state(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    parameters = [(p.requires_grad, p.grad is None, p.is_inference()) for p in model.parameters()]
    switches = [(m.training, getattr(m, "fused_attn", None), type(m)) for m in model.modules()]
    return hooks, parameters, switches


@pytest.mark.parametrize("name", probes.names())
def test_every_probe_leaves_the_model_and_the_random_states(name):
    model = other("vit_tiny_patch16_224").train()
    model.blocks[0].eval()
    model.blocks[1].mlp.fc1.weight.requires_grad_(False)
    before, weights = state(model), copy.deepcopy(model.state_dict())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    _, first = run(name, model)
    assert state(model) == before
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert random.getstate() == states[2]
    again = run(name, model)[1]
    assert first.keys() == again.keys()
    for key in first:
        np.testing.assert_array_equal(first[key], again[key], err_msg=key)
    assert model(torch.zeros(1, 1, 12, 16)).requires_grad


def test_the_check_of_a_changed_model_can_fail():
    model = other("vit_tiny_patch16_224")
    before = state(model)
    model.blocks[0].attn.fused_attn = not model.blocks[0].attn.fused_attn
    assert state(model) != before
