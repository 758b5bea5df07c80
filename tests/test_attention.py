"""The wiring, against an attention written token by token with loops, for every encoding of the registry."""

import itertools
import math

import pytest
import torch
from common import ENCODINGS, GRIDS, PREFIXES, SPECS, coordinates, images, randomize_, relative_change, tiny
from torch.nn.functional import scaled_dot_product_attention

from vitpos import kernels, positions
from vitpos.attention import Part, Signal, expand_angles, expand_bias
from vitpos.encoding import Angles, Contextual, OffsetTable, PairBias, Rotations, SeparableAngles
from vitpos.positions import Positions
from vitpos.spec import REGISTRY

COMBINED_SLOPES = [
    "lookhere + rpb",
    "alibi2d + lookhere",
    "lookhere + irpe + logn",
    "irpe + deberta",
    "deberta + logn",
    "rope_axial(free_prefix=True) + lookhere",
]


def by_hand(model, x, grid, mistake=None):
    """Tokens [B, T, D] after all blocks and the final norm: token by token, no structured signal, no padding."""
    cells = coordinates(grid)
    prefix = model.num_prefix_tokens
    shared = list(model.position.shared.values())
    rows = list(model.patch_embed(x).flatten(1, -2).unbind(1))
    for encoding in shared:
        if "tokens" in encoding.sites():
            table = [model.pos_embed[:, 0 if model.no_embed_class else prefix :]] if encoding.model_parameter else []
            for n, cell in enumerate(cells):
                rows[n] = rows[n] + encoding.tokens(Positions(cell.view(1, 1, 2), grid), *table)[0, 0]
    before = [t[0, i] for t in (model.cls_token, model.reg_token) if t is not None for i in range(t.shape[1])]
    if model.pos_embed is not None and not model.no_embed_class:
        before = [token + model.pos_embed[0, i] for i, token in enumerate(before)]
    tokens = torch.stack([token.expand(len(x), -1) for token in before + rows], dim=1)
    for layer, block in enumerate(model.blocks):
        own = model.position.layers[layer].values() if len(model.position.layers) else ()
        active = [*shared, *own]
        normed = block.norm1(tokens)
        tokens = tokens + attention_by_hand(block.attn, normed, cells, grid, prefix, active, layer, mistake)
        tokens = tokens + block.mlp(block.norm2(tokens))
        for encoding in active:
            if "mix" in encoding.sites() and layer == 0:
                mixed = encoding.mix(tokens[:, prefix:], positions.grid(*grid, dtype=torch.float64))
                tokens = torch.cat([tokens[:, :prefix], mixed], dim=1)
    return model.norm(tokens)


def attention_by_hand(attn, tokens, cells, grid, prefix, encodings, layer, mistake):
    width, count = attn.head_dim, tokens.shape[1]
    rotary = [e for e in encodings if "angles" in e.sites()]
    angles = [[e.angles(Positions(cell.view(1, 1, 2), grid)) for cell in cells] for e in rotary]
    biased = [(e, 1.0 if mistake == "slope" else e.slope_of(layer)) for e in encodings if "bias" in e.sites()]
    pairs = {}
    for a in range(count - prefix):
        for b in range(count - prefix):
            where = Positions(torch.stack([cells[a], cells[b]])[None], grid)
            pairs[a, b] = [(e.bias(where), slope) for e, slope in biased]
    scale = math.prod(e.scale(positions.grid(*grid)) for e in encodings if "scale" in e.sites()) / math.sqrt(width)
    free_prefix = any(signals[0].free_prefix for signals in angles)
    heads = []
    for h in range(attn.num_heads):
        q, k, v = (attn.qkv(tokens).view(-1, count, 3, attn.num_heads, width)[:, :, i, h] for i in range(3))
        q, k = attn.q_norm(q).unbind(1), attn.k_norm(k).unbind(1)
        turned_q, turned_k = list(q), list(k)
        for signals in angles:
            for token in range(count):
                at = signals[max(token - prefix, 0)]
                turned_q[token] = turn(q[token], at, h, 0.0 if token < prefix else 1.0)
                turned_k[token] = turn(k[token], at, h, 0.0 if token < prefix else -1.0 if mistake == "sign" else 1.0)
        logits = torch.empty(len(tokens), count, count, dtype=torch.float64)
        for a in range(count):
            for b in range(count):
                plain = free_prefix and (a < prefix or b < prefix)
                product = q[a] * k[b] if plain else turned_q[a] * turned_k[b]
                logit = scale * product.sum(-1)
                for bias, slope in pairs[max(a - prefix, 0), max(b - prefix, 0)]:
                    of_pair = pair_bias(bias, h, a < prefix, b < prefix, scale * q[a], scale * k[b], mistake)
                    logit = logit + slope * of_pair
                logits[:, a, b] = logit
        heads.append(logits.softmax(-1) @ v)
    return attn.proj(attn.norm(torch.cat(heads, dim=-1)))


def turn(row, signal, h, sign):
    """One token's q or k [B, d], rotated by pairs (or by blocks); ``sign`` 0 leaves only the change of basis."""
    if isinstance(signal, Rotations):
        blocks = signal.matrix[0, h % signal.matrix.shape[1], 0]
        parts = [part @ block.T for block, part in zip(blocks, row.chunk(len(blocks), dim=-1))]
        return torch.cat(parts, dim=-1) if sign else row
    if signal.basis is not None:
        row = row @ signal.basis[h % len(signal.basis)].T
    phase = sign * signal.phase[0, h % signal.phase.shape[1], 0]
    c, s = phase.cos(), phase.sin()
    interleaved = signal.layout == "interleaved"
    first, second = (row[:, 0::2], row[:, 1::2]) if interleaved else row.chunk(2, dim=-1)
    turned = c * first - s * second, s * first + c * second
    return torch.stack(turned, dim=-1).flatten(1) if interleaved else torch.cat(turned, dim=-1)


def pair_bias(bias, h, query_is_prefix, key_is_prefix, q, k, mistake):
    """The bias of one pair, from what an encoding says of two patches (the first is the query)."""
    outside = query_is_prefix or key_is_prefix
    if isinstance(bias, Contextual):
        bucket = -1 if outside else bias.buckets[0, 0, 1]
        parts = [(bias.on_q, q), (bias.on_k, k)]
        return sum(row @ vectors[h % len(vectors), bucket] for vectors, row in parts if vectors is not None)
    if outside:
        case = {(True, False): 0, (False, True): 1, (True, True): 2}[query_is_prefix, key_is_prefix]
        return 0.0 if bias.prefix is None else bias.prefix[h % len(bias.prefix), case]
    first, second = (1, 0) if mistake == "sign" else (0, 1)
    return bias.values[0, h % bias.values.shape[1], first, second]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", [*SPECS, "rope_axial + ape1d", "rope_mixed + rpb + ape2d", *COMBINED_SLOPES])
def test_model_equals_attention_by_hand(name, grid, prefix):
    model = tiny(name, grid, prefix, heads=2, dim=24)
    x = images(grid)
    with torch.no_grad():
        assert relative_change(model.forward_features(x), by_hand(model, x, grid)) < 1e-12


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("rope_axial", "sign"),
        ("rope_mixed", "sign"),
        ("rpb", "sign"),
        ("lookhere", "slope"),
        ("rpb + lookhere", "slope"),
    ],
)
def test_by_hand_sees_a_mistake(name, mistake):
    model = tiny(name, (3, 5), 1, heads=2, dim=24)
    x = images((3, 5))
    with torch.no_grad():
        assert relative_change(model.forward_features(x), by_hand(model, x, (3, 5), mistake=mistake)) > 1e-4


@pytest.mark.parametrize("options", [{"qk_norm": True}, {"no_embed_class": True}, {"qkv_bias": False}])
@pytest.mark.parametrize("name", ["rope_mixed", "rpb + ape1d"])
def test_model_options(name, options):
    model = tiny(name, (3, 5), 5, heads=2, dim=24, **options)
    x = images((3, 5))
    with torch.no_grad():
        assert relative_change(model.forward_features(x), by_hand(model, x, (3, 5))) < 1e-12


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotation_layouts(layout):
    """One pair at a quarter turn: (a, b) becomes (-b, a); the other pair stays."""
    phase = torch.tensor([math.pi / 2, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    turned = expand_angles(Angles(phase, layout), prefix=0)(x).flatten()
    expected = {"interleaved": [-2.0, 1.0, 3.0, 4.0], "half": [-3.0, 2.0, 1.0, 4.0]}[layout]
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_rotation_leaves_prefix_tokens_bit_for_bit():
    x = torch.randn(2, 3, 5 + 4, 8)
    phase = torch.randn(1, 3, 4, 4)
    turned = expand_angles(Angles(phase), prefix=5)(x)
    assert torch.equal(turned[:, :, :5], x[:, :, :5])
    assert not torch.equal(turned[:, :, 5:], x[:, :, 5:])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_separable_angles_are_the_sum_of_their_parts():
    y, x = torch.randn(3, 2, 6), torch.randn(3, 5, 6)
    rotation = expand_angles(SeparableAngles(y, x), prefix=1)
    for i in range(2):
        for j in range(5):
            phase = y[:, i] + x[:, j]
            expected = torch.stack([phase.cos(), phase.sin()], dim=-1)
            torch.testing.assert_close(rotation.turn[0, :, i * 5 + j], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("grid", [(3, 5), (5, 2), (1, 7), (1, 1)])
def test_offset_table_is_read_at_query_minus_key(grid):
    height, width = grid
    table = torch.arange(2.0 * (2 * height - 1) * (2 * width - 1)).view(2, 2 * height - 1, 2 * width - 1)
    dense = expand_bias(OffsetTable(table), prefix=0)[0]
    cells = [(i, j) for i in range(height) for j in range(width)]
    for q, (qi, qj) in enumerate(cells):
        for k, (ki, kj) in enumerate(cells):
            assert torch.equal(dense[:, q, k], table[:, qi - ki + height - 1, qj - kj + width - 1])


def test_bias_of_prefix_pairs_is_zero():
    bias = PairBias(torch.ones(1, 2, 3, 3))
    expanded = Signal(prefix=2, biases=(Part(bias), Part(bias))).expand().bias
    assert expanded.shape == (1, 2, 5, 5)
    assert torch.equal(expanded[:, :, 2:, 2:], 2 * bias.values)
    assert expanded[:, :, :2].abs().sum() == expanded[:, :, :, :2].abs().sum() == 0


@pytest.mark.parametrize("name", ["none", "rope_axial", "rpb"])
@pytest.mark.parametrize("fused", [True, False])
def test_caller_masks(name, fused):
    """A boolean mask, the same mask added to the logits, and causality as a mask agree; so do both kernels."""
    grid = (3, 5)
    model, reference = tiny(name, grid, 1), tiny(name, grid, 1)
    for block in model.blocks:
        block.attn.fused_attn = fused
    x = images(grid)
    allowed = torch.rand(16, 16, generator=torch.Generator().manual_seed(4)) < 0.6
    allowed |= torch.eye(16, dtype=torch.bool)
    added = torch.zeros(16, 16, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    lower = torch.ones(16, 16, dtype=torch.bool).tril()
    with torch.no_grad():
        assert relative_change(model(x, attn_mask=allowed), reference(x, attn_mask=added)) < 1e-12
        assert relative_change(model(x, is_causal=True), reference(x, attn_mask=lower)) < 1e-12
        both = model(x, attn_mask=allowed, is_causal=True)
        assert relative_change(both, reference(x, attn_mask=allowed & lower)) < 1e-12
        assert relative_change(model(x, attn_mask=added, is_causal=True), both) < 1e-12
        assert relative_change(both, model(x)) > 1e-4


@pytest.mark.parametrize("name", [n for n in ENCODINGS if n != "none"])
def test_gradients_reach_every_parameter(name):
    mean_pooled, with_prefix = tiny(name, (3, 5), 0), tiny(name, (3, 5), 5)
    mean_pooled(images((3, 5))).pow(2).sum().backward()
    assert not [n for n, p in mean_pooled.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    with_prefix(images((3, 5))).pow(2).sum().backward()  # a class token sees no bias in the last block: zero, not None
    assert not [n for n, p in with_prefix.named_parameters() if p.grad is None]


@pytest.mark.parametrize("name", ENCODINGS)
def test_dropped_patches_equal_each_sample_alone(name):
    """Patch dropout: a batch equals each sample run alone on its kept patches at their own coordinates."""
    grid = (3, 5)
    model = tiny(name, grid, 1, patch_drop_rate=0.4, heads=2, dim=24)
    x = images(grid)
    model.patch_drop.train()
    torch.manual_seed(7)
    with torch.no_grad():
        together = model.forward_features(x)
        torch.manual_seed(7)
        kept = torch.argsort(torch.randn(2, 15), dim=-1)[:, :9]
        for sample in range(2):
            cells = coordinates(grid)[kept[sample]]
            model.patch_drop.eval()
            full, pos = model._embed(x[sample : sample + 1], None, None)
            tokens = torch.cat([full[:, :1], full[:, 1:][:, kept[sample]]], dim=1)
            alone, _ = model._blocks(tokens, Positions(cells[None], grid), None, False, 2)
            model.patch_drop.train()
            assert pos.full
            assert relative_change(model.norm(alone), together[sample : sample + 1]) < 1e-12


def test_randomized_models_differ_by_encoding():
    """Otherwise the comparisons above would compare nothing."""
    x = images((3, 5))
    outputs = {}
    positional = [name for name in ENCODINGS if name != "logn"]  # 1 on the training grid
    for name in positional:
        model = tiny(name, (3, 5), 0)
        randomize_(model)
        outputs[name] = model(x).detach()
    for a in positional:
        for b in positional:
            if a < b:
                assert relative_change(outputs[a], outputs[b]) > 1e-4, (a, b)


BIASED = [name for name in ENCODINGS if "bias" in REGISTRY[name].sites()]
LEARNED = [name for name in BIASED if tiny(name, depth=1).position.state_dict()]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def fuse(model, fused):
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", [*BIASED, "rope_axial + rpb", "rope_mixed(free_prefix=True) + cpb"])
def test_everything_meets_in_one_dtype(spec, device, monkeypatch):
    """Fused kernels err, or are silently wrong, where the bias has another dtype than q, k and v: in a model of any
    dtype and under autocast they share it, a caller's mask included. Ours adds a bias in float32 or better."""
    met = []

    def spy_on(kernel, exact):
        def spy(q, k, v, attn_mask=None, *rest, **kwargs):
            kinds = {t.dtype for t in (q, k, v, attn_mask) if t is not None and t.dtype != torch.bool}
            if exact and attn_mask is not None:
                kinds.discard(torch.promote_types(q.dtype, torch.float32))
            met.append(kinds or {q.dtype})
            return kernel(q, k, v, attn_mask, *rest, **kwargs)

        return spy

    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", spy_on(scaled_dot_product_attention, exact=False)
    )
    for name in ("attend", "attend_fused"):
        monkeypatch.setattr(kernels, name, spy_on(getattr(kernels, name), exact=True))
    model = fuse(tiny(spec, (3, 5), 1, randomize=False), True).to(device)
    mask = torch.zeros(25, 25, device=device)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for given in ({}, {"attn_mask": mask}):
            model.to(dtype)(images((4, 6)).to(device, dtype), **given)
            assert all(kinds == {dtype} for kinds in met), (dtype, met)
            assert len(met) >= 2
            met.clear()
    model.float()
    with torch.autocast(device, dtype=torch.bfloat16):
        model(images((4, 6)).to(device).float(), attn_mask=mask)
    assert met[-1] == {torch.bfloat16}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", LEARNED)
def test_kernels_agree_on_gradients(spec, device):
    """Fused and plain attention, forwards and backwards, with 17, 65 and 197 tokens and with four registers more."""
    for side, prefix in itertools.product((4, 8, 14), (1, 5)):
        found = []
        for fused in (True, False):
            model = fuse(tiny(spec, (3, 5), prefix, heads=2, dim=24), fused).float().to(device)
            for name, parameter in model.named_parameters():  # only the bias learns: kernels have crashed on that
                parameter.requires_grad_(name.startswith("position."))
            out = model.forward_features(images((side, side), batch=1).float().to(device))
            (out * torch.linspace(-1, 1, out.numel(), device=device).sin().view(out.shape)).sum().backward()
            found.append([out.detach(), *(p.grad for p in model.position.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert theirs.norm() > 1e-4
            assert relative_change(ours, theirs) < 1e-4


def test_a_bias_without_gradient_is_seen():
    """The control of the above: a table whose values are cut from the graph."""
    model = tiny("rpb", (3, 5), 0, depth=1)
    rpb = model.position.layers[0]["rpb"]
    model(images((3, 5))).square().sum().backward()
    assert rpb.table.grad.norm() > 1e-6
    rpb.table.grad = None
    rpb.bias = lambda pos: OffsetTable(rpb.table.detach())
    model(images((3, 5))).square().sum().backward()
    assert rpb.table.grad is None


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("spec", ["rope_axial", "rope_axial(free_prefix=True)", "rpb", "irpe", "lookhere + logn"])
def test_a_mask_of_keys_is_a_mask_of_all_pairs(spec, fused):
    model, x = fuse(tiny(spec, (3, 5), 1), fused), images((3, 5))
    keys = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    keys[0, ..., 4:9] = keys[1, ..., 12] = False
    out = model(x, attn_mask=keys)
    torch.testing.assert_close(
        out, model(x, attn_mask=keys.expand(-1, -1, 16, -1).contiguous()), atol=1e-12, rtol=1e-11
    )
    torch.testing.assert_close(out[:1], model(x[:1], attn_mask=keys[0, 0]), atol=1e-12, rtol=1e-11)
    assert (out - model(x)).abs().max() > 1e-4
