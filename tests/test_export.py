"""Compiled, exported, traced and cut by timm's FX: one graph serves every size, and says what the model says.

Each is made at one grid and run at others. The backends of ``torch.compile`` only count graphs or run them as they are,
but for one test that generates code.
"""

import warnings

import pytest
import timm
import torch
from common import ENCODINGS, SPECS, images, relative_change, tiny
from timm.models import create_feature_extractor
from torch import nn

import vitpos
from vitpos.encoding import OffsetTable

GRIDS = [
    (4, 6),
    (5, 3),
    (3, 5),
    (6, 4),
    (7, 8),
    (2, 9),
]  # tiny's training grid among them
SOME = ["ape1d", "rope_axial", "rpb", "logn"]  # one of each kind of site, and of each that has needed care
MORE = ["ape1d + rope_mixed + cpb", "rope_axial(resize='ntk')", "rope_mixed(wrap=True)", "rpb(prefix=True)"]
ONNX = ["none", "sincos2d", "rope_axial", "rope_mixed", "rpb", "alibi2d", "ape1d"]
NATIVE = {  # timm's own encodings, and the options that make their models small
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_small_patch16_dinov3": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "beit_base_patch16_224": {},
    "vit_relpos_base_patch16_cls_224": {},
    "vit_relpos_base_patch16_224": {"rel_pos_type": "bias"},
}

# PyTorch's own tools warn about themselves; tracing warns of every Python number, which is what is under test here
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*:UserWarning")


class Counting:
    """A backend of ``torch.compile`` that counts graphs and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def compilations(model, given):
    """How many graphs ``torch.compile`` makes for these images, each result equal to the model's to 1e-5."""
    torch._dynamo.reset()
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for x in given:
            assert relative_change(compiled(x), model(x)) < 1e-5
    torch._dynamo.reset()
    return backend.graphs


def exported(model, x):
    sizes = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    with torch.no_grad():
        return torch.export.export(model, (x,), dynamic_shapes=(sizes,))


def traced(model, x):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, x, check_trace=False)


def deviation(graph, model, given):
    """The largest relative difference over images of all sizes."""
    with torch.no_grad():
        return max(relative_change(graph(x), model(x)) for x in given)


def native(name):
    torch.manual_seed(0)
    small = {"depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 7, "img_size": (48, 80), **NATIVE[name]}
    model = vitpos.create_model(name, **small).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no layer scale or zero table hides anything
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def pixels(grids, dtype=torch.float32, patch=16):
    return [torch.randn(2, 3, *(patch * side for side in grid), dtype=dtype) for grid in grids]


def given(grids=GRIDS, dtype=torch.float64):
    return [images(grid, dtype=dtype) for grid in grids]


def slow_but(some, everything):
    """All of them, those that are not in ``some`` for the slow run."""
    return [pytest.param(e, marks=[] if e in some else [pytest.mark.slow]) for e in everything]


EVERY = slow_but(SOME, [*SPECS, *MORE])


# --- torch.compile


@pytest.mark.parametrize("spec", EVERY)
def test_six_sizes_cost_two_compilations(spec):
    assert compilations(tiny(spec, prefix=1, depth=1), given()) <= 2


@pytest.mark.parametrize("name", slow_but(["vit_small_patch16_dinov3"], NATIVE))
def test_six_sizes_cost_two_compilations_with_timms_own_encoding(name):
    assert compilations(native(name), pixels(GRIDS)) <= 2


@pytest.mark.slow
def test_timms_own_dynamic_model_costs_six():
    """The control: what the counter says where sizes are written into the graph."""
    small = {"depth": 1, "embed_dim": 36, "num_heads": 3, "num_classes": 7, "img_size": (48, 80)}
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **small).eval()
    assert compilations(model, pixels(GRIDS)) == 6


def test_the_counter_counts():
    class Frozen(nn.Module):
        def forward(self, x):
            return x.unfold(2, x.shape[2], 1)

    assert compilations(Frozen(), given()) == len({grid[0] for grid in GRIDS})


@pytest.mark.parametrize("spec", slow_but(["ape1d"], ["ape1d", "rope_axial", "rpb", "irpe"]))
def test_compiled_gradients_are_the_models(spec):
    """With the autograd graph compiled too, and gradient checkpointing inside."""
    torch._dynamo.reset()
    model = tiny(spec, prefix=1, depth=1)
    model.set_grad_checkpointing()
    found = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        for x in given([(4, 6), (6, 4)]):
            forward(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch._dynamo.reset()
    for ours, theirs in zip(*found):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["ape1d", "rope_axial", "rope_mixed", "rpb"])
def test_generated_code_in_bfloat16(spec):
    """Code from PyTorch's default backend: as near to float32 as the model itself, within a factor of two."""
    torch._dynamo.reset()
    exact = tiny(spec, prefix=1).float()
    model = tiny(spec, prefix=1).bfloat16()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for x in given([(4, 6), (5, 3)]):
            expected = exact(x.float())
            error = relative_change(model(x.bfloat16()).float(), expected)
            assert 0 < error < 0.05
            assert relative_change(compiled(x.bfloat16()).float(), expected) < 2 * error + 0.005
    torch._dynamo.reset()


# --- torch.export


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("grid", [(4, 6), pytest.param((3, 5), marks=pytest.mark.slow)])
def test_exported_at_one_size_runs_at_others(spec, grid):
    """Exported off and on the training grid (3 x 5); the same numbers, so that no branch for export differs."""
    model = tiny(spec, prefix=1, depth=1)
    assert deviation(exported(model, images(grid)).module(), model, given()) < 1e-12


@pytest.mark.parametrize("name", slow_but(["vit_small_patch16_dinov3", "vit_small_patch16_rope_224"], NATIVE))
def test_timms_own_encodings_export(name):
    model = native(name)
    x, *others = pixels(GRIDS)
    assert deviation(exported(model, x).module(), model, [x, *others]) < 1e-5


@pytest.mark.parametrize("spec", slow_but(["rope_axial"], ENCODINGS))
def test_no_complex_numbers_in_an_exported_graph(spec):
    graph = exported(tiny(spec, prefix=1, depth=1), images((4, 6))).graph
    values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert len(values) > 10
    assert not any(value.is_complex() for value in values)


# --- torch.jit


@pytest.mark.parametrize("spec", slow_but(ENCODINGS, [*SPECS, *MORE]))
@pytest.mark.parametrize("grid", [(3, 5), pytest.param((4, 6), marks=pytest.mark.slow)])
def test_traced_at_one_size_runs_at_others(spec, grid):
    model = tiny(spec, prefix=1, depth=1)
    assert deviation(traced(model, images(grid)), model, given()) < 1e-5


@pytest.mark.parametrize("name", slow_but(["vit_small_patch16_dinov3", "beit_base_patch16_224"], NATIVE))
def test_timms_own_encodings_trace(name):
    model = native(name)
    x, *others = pixels(GRIDS)
    assert deviation(traced(model, x), model, [x, *others]) < 1e-5


def test_timms_own_traced_model_does_not():
    """The control: traced on its own grid, it has frozen that the table is not resampled."""
    small = {"depth": 1, "embed_dim": 36, "num_heads": 3, "num_classes": 7, "img_size": (48, 80)}
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **small).eval()
    first, turned, larger = pixels([(3, 5), (5, 3), (4, 6)])
    graph = traced(model, first)
    assert deviation(graph, model, [first]) < 1e-5
    assert deviation(graph, model, [turned]) > 1e-4
    with pytest.raises(RuntimeError, match="size"):
        graph(larger)


def test_script_is_refused():
    for model in (tiny("rope_axial"), nn.Sequential(tiny("none")), native("beit_base_patch16_224")):
        with pytest.raises(TypeError, match=r"torch\.jit\.script cannot compile a vitpos model; use torch\.export"):
            torch.jit.script(model)
    torch.jit.script(nn.Sequential(nn.Linear(2, 2)))  # (others are none of its business)


# --- timm's FX


@pytest.mark.parametrize("spec", slow_but(ENCODINGS, [*SPECS, *MORE]))
def test_fx_feature_extraction(spec):
    model = tiny(spec, prefix=1)
    cut = create_feature_extractor(model, {"blocks.0": "first", "norm": "last"})
    for x in given([(4, 6), (3, 5), (2, 9)]):
        with torch.no_grad():
            found = cut(x)
            first = model.forward_intermediates(x, [0], return_prefix_tokens=True, output_fmt="NLC")[1][0]
            assert relative_change(found["last"], model.forward_features(x)) < 1e-12
            if "mix" not in sites(spec):  # what mixes acts after the block, which is where the other route reads
                assert relative_change(found["first"], torch.cat([first[1], first[0]], dim=1)) < 1e-12


@pytest.mark.parametrize("name", slow_but(["vit_small_patch16_rope_224", "beit_base_patch16_224"], NATIVE))
def test_fx_with_timms_own_encodings(name):
    model = native(name)
    cut = create_feature_extractor(model, {"norm": "last"})
    for x in pixels(GRIDS[:2]):
        with torch.no_grad():
            assert relative_change(cut(x)["last"], model.forward_features(x)) < 1e-5


def sites(spec):
    return [site for term in vitpos.parse(spec).terms for site in vitpos.spec.lookup(term.name).sites()]


# --- ONNX


@pytest.mark.parametrize("spec", slow_but(["rope_axial"], ONNX))
def test_onnx_runs_at_every_size(spec):
    """In onnxruntime, from one file: 1e-5 of the model, resampled tables (antialiased, smaller too) among it."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = tiny(spec, (5, 6), prefix=1, depth=1).float()
    sizes = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    first, *others = given([(4, 6), (5, 6), (2, 3), (9, 7)], torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (first,), dynamo=True, dynamic_shapes=(sizes,), verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    name = session.get_inputs()[0].name

    def run(x):
        return torch.from_numpy(session.run(None, {name: x.numpy()})[0])

    assert deviation(run, model, [first, *others]) < 1e-5


# --- what they rest on


def test_an_offset_table_is_read_query_minus_key():
    """Against loops; the control is the table read the other way around."""
    height, width = 3, 4
    values = torch.randn(2, 2 * height - 1, 2 * width - 1)
    dense = vitpos.attention.expand_bias(OffsetTable(values), 0)[0]
    other = vitpos.attention.expand_bias(OffsetTable(values.flip(1, 2)), 0)[0]
    expected = torch.empty(2, height * width, height * width)
    for q in range(height * width):
        for k in range(height * width):
            dy, dx = q // width - k // width, q % width - k % width
            expected[:, q, k] = values[:, dy + height - 1, dx + width - 1]
    assert torch.equal(dense, expected)
    assert torch.equal(other, expected.mT)
    assert not torch.equal(other, expected)
