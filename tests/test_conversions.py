"""A converted model computes what it did; what does not convert is refused and left alone."""

import copy

import pytest
import torch
from common import PREFIXES, SPECS, images, relative_change, tiny

import vitpos
from vitpos.conversions import convert
from vitpos.encoding import OffsetBias
from vitpos.spec import REGISTRY, parse

TO_MIXED = ["rope_axial", "rope_axial(theta=30.0, resize='interpolate')", "rope_axial(resize='ntk')"]
TO_MIXED += ["rope_axial(free_prefix=True)", "rope_axial(wrap=True)", "string", "string(learned=True)"]
TO_MIXED += ["string(resize='ntk', free_prefix=True)"]
MASKED = ["lookhere"]  # infinite where a head does not see: no learned table holds that
READ_Q_AND_K = ["irpe", "deberta"]  # biases of content, not of the offset only
OFFSETS = [s for s in SPECS if issubclass(REGISTRY[parse(s).names[0]], OffsetBias)]
TO_TABLE = [s for s in OFFSETS if parse(s).names[0] not in {"rpb", *MASKED, *READ_Q_AND_K}]
TO_TABLE += ["irpe(on='bias')"]


def logits(model, grid):
    with torch.no_grad():
        return model(images(grid))


def unchanged(model, other):
    states = model.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(v, states[1][k]) for k, v in states[0].items())


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("spec", TO_MIXED)
def test_to_rope_mixed_on_every_grid(spec, prefix):
    model = tiny(spec, (3, 5), prefix)
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    assert convert(model, "rope_mixed") is model
    assert torch.equal(torch.get_rng_state(), state)
    assert model.position.spec.names == ("rope_mixed",)
    assert vitpos.resize_policy(model) == vitpos.resize_policy(before)
    for grid in [(3, 5), (5, 2), (6, 10)]:
        assert relative_change(logits(model, grid), logits(before, grid)) < 1e-12
    with torch.no_grad():
        model.position.layers[0]["rope_mixed"].weight[0, 0] += 1.0
    assert relative_change(logits(model, (3, 5)), logits(before, (3, 5))) > 1e-5


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}])
def test_string_needs_its_basis_folded(options):
    """Weights of q and k change, those of v do not; put back, the model computes something else."""
    model = tiny("string", prefix=1, **options)
    before = copy.deepcopy(model)
    convert(model, "rope_mixed")
    assert relative_change(logits(model, (3, 5)), logits(before, (3, 5))) < 1e-12
    for new, old in zip(model.blocks, before.blocks):
        assert torch.equal(new.attn.qkv.weight[72:], old.attn.qkv.weight[72:])
        for part in (slice(36), slice(36, 72)):
            assert relative_change(new.attn.qkv.weight[part], old.attn.qkv.weight[part]) > 0.1
        new.attn.qkv.load_state_dict(old.attn.qkv.state_dict())
    assert relative_change(logits(model, (3, 5)), logits(before, (3, 5))) > 1e-4


def test_whole_cycles_taken_anew_differ_off_the_training_grid():
    model = tiny("rope_axial(wrap=True, resize='extrapolate')", (6, 14))
    before = copy.deepcopy(model)
    convert(model, "rope_mixed")
    assert relative_change(logits(model, (6, 14)), logits(before, (6, 14))) < 1e-12
    assert relative_change(logits(model, (12, 8)), logits(before, (12, 8))) > 1e-5


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "spec", [*TO_TABLE, "alibi2d + rpb(prefix=True)", "rpb + alibi2d(wrap=True)", "irpe(on='bias')"]
)
def test_to_a_table_on_the_training_grid(spec, prefix):
    model = tiny(spec, (3, 5), prefix)
    before = copy.deepcopy(model)
    convert(model, "rpb")
    assert model.position.spec.names == ("rpb",)
    assert relative_change(logits(model, (3, 5)), logits(before, (3, 5))) < 1e-12
    with torch.no_grad():
        model.position.layers[0]["rpb"].table[:, 2, 5] += 1.0  # the offset (0, 1) of a 5 x 9 table
    assert relative_change(logits(model, (3, 5)), logits(before, (3, 5))) > 1e-5


def test_prefix_values_move_with_the_table():
    model = tiny("rpb(prefix=True) + alibi2d", prefix=5)
    before = copy.deepcopy(model)
    convert(model, "rpb")
    for new, old in zip(model.position.layers, before.position.layers):
        assert torch.equal(new["rpb"].prefix, old["rpb"].prefix)
        with torch.no_grad():
            new["rpb"].prefix.zero_()
    assert relative_change(logits(model, (3, 5)), logits(before, (3, 5))) > 1e-5


def test_other_encodings_stay(tmp_path):
    """Their weights, the order of terms, the pooled table of ape1d, gradients, and saving."""
    model = tiny("ape2d + alibi2d + string + ape1d", prefix=1)
    before = copy.deepcopy(model)
    convert(convert(model, "rope_mixed"), "rpb")
    assert str(model.position.spec) == "ape2d + rpb + rope_mixed + ape1d"
    assert relative_change(logits(model, (3, 5)), logits(before, (3, 5))) < 1e-12
    assert torch.equal(model.position.shared["ape2d"].rows, before.position.shared["ape2d"].rows)
    again = vitpos.load(vitpos.save(model.float(), tmp_path / "m.safetensors"))
    x = images((3, 5), dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    model.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_of_a_pruned_model_and_another_input_size():
    model = tiny("string", (3, 5), 1, depth=3)
    model.prune_intermediate_layers([1])
    model.set_input_size(img_size=(12, 8))
    before = copy.deepcopy(model)
    convert(model, "rope_mixed")
    assert model.position.geometry.grid == (3, 5)
    assert len(model.position.layers) == len(model.blocks)
    with torch.no_grad():
        x = images((6, 4))
        assert relative_change(model.forward_features(x), before.forward_features(x)) < 1e-12


@pytest.mark.parametrize("spec", ["rope_axial", "string", *TO_TABLE])
def test_float32_stays_float32(spec):
    model = tiny(spec, prefix=1).float()
    before = copy.deepcopy(model)
    convert(model, "rpb" if spec in TO_TABLE else "rope_mixed")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    x = images((3, 5), dtype=torch.float32)
    with torch.no_grad():
        assert relative_change(model(x), before(x)) < 1e-5


@pytest.mark.parametrize(
    ("spec", "target", "words"),
    [
        (
            "ape1d",
            "rope_mixed",
            "nothing in 'ape1d' converts to 'rope_mixed'; known: rope_axial and string",
        ),
        ("rope_mixed", "rope_axial", "nothing in 'rope_mixed' converts to 'rope_axial'"),
        ("rope_mixed", "rope_mixed", "nothing in 'rope_mixed'"),
        ("rpb", "rpb", "nothing in 'rpb'"),
        ("liere", "rope_mixed", "nothing in 'liere'"),
        ("rope_axial", "rpb", "biases that depend on the offset only to rpb"),
        ("none", "rpd", "nothing in 'none' converts to 'rpd'"),
        *[(name, "rpb", "masks pairs with an infinite bias") for name in MASKED],
        *[(name, "rpb", f"nothing in '{name}'") for name in READ_Q_AND_K],
        *[(f"string + {name}", "rope_mixed", f"{name} reads them") for name in READ_Q_AND_K],
    ],
)
def test_what_does_not_convert_is_refused_and_left_alone(spec, target, words):
    model = tiny(spec, prefix=1)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError) as caught:
        convert(model, target)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert unchanged(model, before)
    assert str(model.position.spec) == spec


def test_a_normalized_q_takes_no_basis():
    model = tiny("string", qk_norm=True)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="the model normalizes"):
        convert(model, "rope_mixed")
    assert unchanged(model, before)
    axial = tiny("rope_axial", qk_norm=True)  # nothing to fold here
    before = copy.deepcopy(axial)
    assert relative_change(logits(convert(axial, "rope_mixed"), (3, 5)), logits(before, (3, 5))) < 1e-12


def test_a_model_without_an_encoding():
    with pytest.raises(TypeError, match="no vitpos encoding"):
        convert(torch.nn.Linear(2, 2), "rpb")


def test_a_switched_policy_stays_switched():
    model = tiny("rope_axial + alibi2d")
    x = images((6, 10))
    vitpos.set_resize(model, "interpolate")
    with torch.no_grad():
        expected = model(x)
        vitpos.convert(model, "rope_mixed")
        assert vitpos.resize_policy(model) == "interpolate + interpolate"
        assert relative_change(model(x), expected) < 1e-12
    vitpos.set_resize(model, "default")
    assert vitpos.resize_policy(model) == "extrapolate + extrapolate"
