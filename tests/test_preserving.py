"""Function-preserving conversion: a new encoding begins without effect, an old one at the tokens fades."""

import copy
import warnings

import pytest
import timm
import torch
from common import images, randomize_, relative_change, tiny
from timm.utils import ModelEmaV3

import vitpos
from vitpos import easing
from vitpos.encoding import OffsetTable, PairBias
from vitpos.positions import grid
from vitpos.spec import lookup

IMPOSSIBLE = {"deberta": r"divides the logits by sqrt\(3 d\)", "lookhere": "hides keys"}
OURS = [name for name in vitpos.list_encodings() if name not in ("native", "none", "ape1d")]
POSSIBLE = [name for name in OURS if name not in IMPOSSIBLE]
VARIANTS = [
    "rope_mixed(wrap=True)",
    "rope_axial(free_prefix=True)",
    "liere(block=12)",
    "comrope(kind='ld')",
    "kerple(wrap=True)",
]
VARIANTS += ["string(learned=True)", "rpb(prefix=True)", "irpe(on='bias')", "irpe(on='qk')", "rope_axial + cpb + cpe"]
BIASES = {name for name in POSSIBLE if "bias" in lookup(name).sites()}
INEXACT = BIASES | {"cpe"}  # whose sum has another memory layout, which the next matrix product rounds otherwise
GRID = (3, 5)


def new_parameters(model):
    return {name: p for name, p in model.named_parameters() if name.startswith("position.")}


CASES = [(pos, 1) for pos in POSSIBLE + VARIANTS]
CASES += [
    (pos, prefix) for prefix in (0, 5) for pos in ("rope_mixed", "rope_axial", "rpb", "kerple", "cpe", "sincos2d")
]


@pytest.mark.parametrize(("pos", "prefix"), CASES)
def test_the_first_step_computes_what_the_model_did(pos, prefix):
    """Bit for bit where q and k rotate or tokens get vectors; what is new then learns: it has a gradient."""
    before = tiny("ape1d", GRID, prefix=prefix)
    x = images(GRID, batch=3)
    expected = before(x)
    model = vitpos.attach(copy.deepcopy(before), pos, preserve=True)
    out = model(x)
    exact = not INEXACT & set(model.position.spec.names) and "free_prefix" not in pos
    if exact:
        assert torch.equal(out, expected)
    assert relative_change(out, expected) < 1e-12
    cold = vitpos.attach(copy.deepcopy(before), pos, preserve=False)
    if pos != "logn":
        assert relative_change(randomize_(cold) or cold(x), expected) > 1e-4
        out.square().sum().backward()
        assert max(p.grad.abs().max() for p in new_parameters(model).values()) > 1e-9
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad) or pos == "logn"


@pytest.mark.parametrize("pos", ["rope_mixed", "rope_axial", "cpb", "alibi2d", "kerple"])
def test_in_single_precision(pos):
    before = tiny("ape1d", GRID, prefix=1).float()
    x = images(GRID, dtype=torch.float32)
    with torch.no_grad():
        expected = before(x)
        out = vitpos.attach(copy.deepcopy(before), pos, preserve=True)(x)
    assert torch.equal(out, expected) or pos in BIASES
    assert relative_change(out, expected) < 1e-6


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {"no_embed_class": True, "reg_tokens": 2}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_small_patch16_rope_ape_224", {"depth": 2}),
        ("beit_base_patch16_224", {"depth": 2}),
        ("vit_relpos_small_patch16_224", {"depth": 2}),
    ],
)
def test_models_of_other_classes_keep_what_they_have(name, kwargs):
    kwargs = {"embed_dim": 48, "num_heads": 4, "depth": 2, "img_size": (48, 80), "num_classes": 3, **kwargs}
    model = timm.create_model(name, **kwargs).eval()
    x = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        expected = model(x)
        vitpos.attach(model, "native + rpb + cpe", preserve=True)
        assert relative_change(model(x), expected) < 1e-6
        randomize_(model)
        assert relative_change(model(x), expected) > 1e-4


@pytest.mark.parametrize(("pos", "why"), IMPOSSIBLE.items())
def test_encodings_without_such_a_beginning_are_refused(pos, why):
    model = tiny("ape1d", GRID)
    with pytest.raises(ValueError, match=why):
        vitpos.attach(model, pos, preserve=True)
    assert str(model.position.spec) == "ape1d"
    assert str(vitpos.attach(model, f"native + {pos}", preserve=False).position.spec) == f"ape1d + {pos}"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("rope_axial", "rpb", "cannot give up rope_axial, which acts in every block"),
        ("ape1d + rpb", "rope_axial", "cannot give up rpb"),
        ("rope_axial", "rope_axial(theta=50.0)", "so that it cannot become"),
        ("none", "rope_axial(wrap=True)", "whole cycles"),
        ("none", "cpb(center=False)", "begins 8 above"),
        ("rope_axial", "native + rope_mixed", "both rotate"),
    ],
)
def test_what_cannot_be_preserved(before, after, why):
    model = tiny(before, GRID)
    with pytest.raises(ValueError, match=why):
        vitpos.attach(model, after, preserve=True)
    assert str(model.position.spec) == before


def test_a_models_own_rotation_is_not_given_up():
    model = timm.create_model("vit_small_patch16_rope_224", img_size=32, depth=1)
    with pytest.raises(ValueError, match=r"cannot give up the model's own encoding.*native \+ rpb"):
        vitpos.attach(model, "rpb", preserve=True)


def test_the_old_table_fades():
    """At each share the tokens get that part of it; at 0 it can be dropped, and prefix tokens never noticed."""
    before = tiny("ape1d", GRID, prefix=5)
    x = images((4, 3))
    with torch.no_grad():
        model = vitpos.attach(copy.deepcopy(before), "rope_mixed", preserve=True)
        assert str(model.position.spec) == "rope_mixed + fading(ape1d)"
        for share in (1.0, 0.25, 0.0):
            scaled = copy.deepcopy(before)
            scaled.pos_embed[:, 5:] *= share
            assert relative_change(vitpos.set_fade(model, share)(x), scaled(x)) < 1e-12
        again = vitpos.attach(copy.deepcopy(model), "rope_mixed", preserve=True)
        assert str(again.position.spec) == "rope_mixed"
        assert again.pos_embed is None
        assert torch.equal(again(x), model(x))
        vitpos.set_fade(model, 0.5)
        expected = model(x)
        half = vitpos.attach(model, "rope_mixed", preserve=True)
        assert str(half.position.spec) == "rope_mixed + fading(ape1d)"
        assert torch.equal(half(x), expected)


def test_any_encoding_at_the_tokens_fades():
    before = tiny("sincos2d + ape2d", GRID)
    x = images(GRID)
    model = vitpos.attach(copy.deepcopy(before), "rope_axial", preserve=True)
    assert str(model.position.spec) == "gated(rope_axial) + fading(sincos2d) + fading(ape2d)"
    assert torch.equal(model(x), before(x))
    nothing = vitpos.attach(copy.deepcopy(before), "none", preserve=True)
    assert torch.equal(nothing(x), before(x))
    plain = vitpos.attach(copy.deepcopy(before), "none", preserve=False)
    assert torch.equal(vitpos.set_fade(nothing, 0)(x), plain(x))


def test_a_gate_is_what_its_name_says():
    """At 1 it is the model with the encoding: its tables bit for bit, and its logits but for rounding, since the
    processor multiplies tables of each head in other runs than one for all; one number a head."""
    model = tiny("gated(rope_axial) + gated(alibi2d)", GRID)
    x = images(GRID)
    gates = [encoding.gate for encoding in model.position.encodings()]
    with torch.no_grad():
        for gate in gates:
            gate.fill_(1.0)
        open_ = vitpos.attach(copy.deepcopy(model), "rope_axial + alibi2d", preserve=False)
        assert relative_change(model(x), open_(x)) < 1e-14
        ours, theirs = (one.position("shared_signal", grid(*GRID), 1) for one in (model, open_))
        assert torch.equal(ours.rotation.turn, theirs.rotation.turn.expand_as(ours.rotation.turn))
        assert torch.equal(ours.bias, theirs.bias)
        gates[0][1:] = 0.0
        assert relative_change(model(x), open_(x)) > 1e-4
    assert [gate.shape for gate in gates] == [(3,), (3,)]


def test_an_average_of_weights_copies_the_fade():
    model = vitpos.set_fade(vitpos.attach(tiny("ape1d", GRID), "rope_mixed", preserve=True), 1.0)
    ema = ModelEmaV3(model, decay=0.9)
    before = ema.module.pos_embed.clone()
    with torch.no_grad():
        model.pos_embed += 1.0
    vitpos.set_fade(model, 0.5)
    ema.update(model)
    assert ema.module.position.faded == model.position.faded == 32768
    assert torch.allclose(ema.module.pos_embed, before + 0.1)  # what is learned is averaged


def test_saved_and_loaded(tmp_path):
    model = vitpos.create_model("vit_tiny_patch16_224", "ape1d", img_size=(48, 80), embed_dim=48, num_heads=4, depth=2)
    vitpos.set_fade(vitpos.attach(model, "rope_axial + cpb", preserve=True), 0.75)
    randomize_(model)
    again = vitpos.load(vitpos.save(model, tmp_path / "model.safetensors"))
    x = torch.randn(2, 3, 80, 32)
    with torch.no_grad():
        assert torch.equal(again(x), model.eval()(x))
        vitpos.set_fade(again, 0.0)
        assert relative_change(again(x), model(x)) > 1e-4


def test_a_cold_swap_warns():
    before = tiny("ape1d", GRID)
    for pos in ("rope_axial", "none", "ape1d + rpb", "ape2d"):
        with pytest.warns(vitpos.ColdSwapWarning, match="fine-tune it before use.*preserve=True"):
            vitpos.attach(copy.deepcopy(before), pos)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pos in ("native", "ape1d", "ape1d(std=0.5)", "native + logn"):
            vitpos.attach(copy.deepcopy(before), pos)
        vitpos.attach(copy.deepcopy(before), "rope_axial", preserve=False)
        vitpos.attach(copy.deepcopy(before), "rope_axial", preserve=True)
        vitpos.create_model("vit_tiny_patch16_224", "rope_axial", depth=1)


@pytest.mark.parametrize(
    ("pos", "why"),
    [
        ("fading", r"fading holds one encoding, as in fading\(ape1d\)"),
        ("gated()", "gated holds one encoding"),
        ("gated(rope_axial, 1)", "gated holds one encoding"),
        ("gated(fading(ape1d))", "fading and gated at once"),
        ("gated(rope_axail)", "did you mean rope_axial"),
        ("gated(rpb)", "rpb has no gate"),
        ("gated(lookhere)", "hides keys"),
        ("fading(rope_axial)", "rope_axial cannot fade"),
        ("fading(ape1d) + ape1d", "named twice"),
    ],
)
def test_specs_that_make_no_sense(pos, why):
    with pytest.raises(ValueError, match=why):
        tiny(pos)


def test_a_share_out_of_range():
    model = vitpos.attach(tiny("ape1d", GRID), "rpb", preserve=True)
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"lies in 0\.\.1"):
            vitpos.set_fade(model, share)
    with pytest.raises(TypeError, match="is a number in"):
        vitpos.set_fade(model, "a")
    with pytest.raises(ValueError, match="nothing fades in 'rpb'"):
        vitpos.set_fade(tiny("rpb"), 0.5)
    with pytest.raises(TypeError, match="no vitpos encoding"):
        vitpos.set_fade(timm.create_model("vit_tiny_patch16_224", depth=1), 0.5)


def test_a_name_for_a_modifier_cannot_be_registered():
    with pytest.raises(ValueError, match="none of gated, fading"):
        vitpos.register("gated")(type("Gated", (vitpos.Encoding,), {}))


@pytest.mark.parametrize("before", ["ape1d", "ape2d"])
def test_what_fades_learns_no_more(before, tmp_path):
    """It would grow against its schedule."""
    model = vitpos.create_model("vit_tiny_patch16_224", before, img_size=(48, 80), embed_dim=48, num_heads=4, depth=2)
    vitpos.attach(model, "rope_mixed", preserve=True)
    vitpos.save(model, tmp_path / "model.safetensors")
    for one in (model, vitpos.load(tmp_path / "model.safetensors")):
        frozen = {name for name, p in one.named_parameters() if not p.requires_grad}
        table = {"pos_embed"} if before == "ape1d" else {f"position.shared.ape2d.{n}" for n in ("rows", "columns")}
        assert frozen == table
    assert all(p.requires_grad for p in vitpos.attach(model, before, preserve=False).parameters())


def test_a_second_conversion_begins_where_the_first_ended():
    """Also where what is new of the first must fade in the second."""
    x = images(GRID)
    for share in (1.0, 0.5, 0.0):
        model = vitpos.attach(tiny("ape1d", GRID), "sincos2d", preserve=True)
        with torch.no_grad():
            model.position.shared["sincos2d"].gate.fill_(0.7)
            expected = vitpos.set_fade(model, share)(x)
            if share == 0.5:
                with pytest.raises(ValueError, match=r"ape1d has faded to 0\.5"):
                    vitpos.attach(model, "rope_axial", preserve=True)
                continue
            assert torch.equal(vitpos.attach(model, "rope_axial", preserve=True)(x), expected)
        names = {1.0: {"ape1d", "sincos2d"}, 0.0: {"sincos2d"}}
        assert model.position.fading == names[share]
        assert vitpos.fade_of(model) == 1


def test_half_precision_fades_to_nothing():
    model = vitpos.attach(tiny("ape1d", GRID), "rope_axial", preserve=True).half()
    x = images(GRID).half()
    for share in (1e-4, 0.0):
        assert vitpos.set_fade(model, share)(x).isfinite().all()


@pytest.mark.parametrize(
    ("gated", "target"), [("rope_axial", "rope_mixed"), ("string", "rope_mixed"), ("kerple", "rpb")]
)
def test_a_gated_encoding_converts_exactly(gated, target):
    model = tiny(f"gated({gated})", GRID, prefix=1)  # every parameter random, gates too
    x = images(GRID)
    with torch.no_grad():
        expected = model(x)
        assert relative_change(vitpos.convert(copy.deepcopy(model), target)(x), expected) < 1e-12
        for encoding in model.position.encodings():
            encoding.gate.fill_(1.0)
        assert relative_change(vitpos.convert(model, target)(x), expected) > 1e-4


def test_losing_what_was_learned_warns():
    for before, pos in (("rope_mixed", "rope_mixed"), ("rpb", "rpb"), ("gated(rope_axial)", "gated(rope_axial)")):
        with pytest.warns(vitpos.ColdSwapWarning):
            vitpos.attach(tiny(before, GRID), pos)
    faded = vitpos.set_fade(vitpos.attach(tiny("ape1d", GRID), "none", preserve=True), 0)
    with pytest.warns(vitpos.ColdSwapWarning):
        vitpos.attach(faded, "ape1d")


@pytest.mark.parametrize("kind", [OffsetTable, PairBias])
def test_a_gate_holds_back_the_bias_of_prefix_tokens_too(kind):
    values = torch.ones(2, 3, 3) if kind is OffsetTable else torch.ones(1, 2, 4, 4)
    given = easing.gated(kind(values, torch.ones(1, 3)), torch.tensor([0.0, 0.5]))
    assert given.prefix.tolist() == [[0.0] * 3, [0.5] * 3]
