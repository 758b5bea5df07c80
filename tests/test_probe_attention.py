"""Attention: planted ones have the distance and divergence they must, terms and kernels those of their formulas."""

import math

import numpy as np
import pytest
import torch
from fakes import Constant, Squares
from probing import OTHERS, encoded, other, probe, subject

from vitpos.encodings.alibi2d import Alibi2d
from vitpos.probes import attention

GRID, PATCH = (3, 4), (4, 4)
IMAGES = Squares(n=6, textured=True)


def test_distances_and_divergence_hand_worked():
    apart = attention.distances((2, 3), (4, 8))
    assert apart[0].tolist() == pytest.approx([0, 8, 16, 4, math.hypot(4, 8), math.hypot(4, 16)])
    one = torch.eye(2)[None]  # two heads that look at other keys
    apart_heads = torch.stack([one, one.flip(-1)], dim=1)
    assert attention.divergence(apart_heads).item() == pytest.approx(math.log(2))
    assert attention.divergence(torch.stack([one, one], dim=1)).item() == 0
    mixed = torch.tensor([[[[0.75, 0.25]], [[0.25, 0.75]]]])
    expected = math.log(2) + 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    assert attention.divergence(mixed).item() == pytest.approx(expected)


@pytest.mark.parametrize("prefix", [0, 1])
def test_uniform_attention_has_the_distance_of_its_null(prefix):
    kwargs = {"class_token": True, "global_pool": "token"} if prefix else {}
    model = encoded("none", **kwargs)
    for block in model.blocks:
        block.attn.qkv.weight.data[:32].zero_(), block.attn.qkv.bias.data[:32].zero_()  # q and k
    found, arrays = probe("attention", model, IMAGES)
    assert found["uniform"] == pytest.approx(attention.distances(GRID, PATCH).mean().item())
    for layer in found["layers"]:
        assert layer["over_uniform"]["value"] == pytest.approx(1, abs=1e-5)
        assert layer["heads"] == pytest.approx([1, 1], abs=1e-5)
        assert layer["diversity"]["value"] == pytest.approx(0, abs=1e-6)
        assert layer["on_patches"] == pytest.approx(12 / (12 + prefix))
    assert arrays["distance"].shape == (2, 2, 6)
    # and one that is not uniform has not
    assert abs(probe("attention", encoded("none"), IMAGES)[0]["layers"][0]["over_uniform"]["value"] - 1) > 1e-3


def weights(model, x):
    """The first block's attention, written out, [n, h, N, N] without prefix."""
    block, prefix = model.blocks[0], model.num_prefix_tokens
    tokens = model._pos_embed(model.patch_embed(x))
    q, k, _ = block.attn.qkv(block.norm1(tokens)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    a = (q @ k.mT * block.attn.scale).softmax(-1)[..., prefix:, prefix:]
    return a / a.sum(-1, keepdim=True)


def test_attention_is_that_of_the_model():
    model = other("vit_tiny_patch16_224")
    _, arrays = probe("attention", model, IMAGES)
    x = subject(model).normalized(IMAGES.batch(range(6)))
    with torch.no_grad():
        a = weights(model, x)
    expected = (a * attention.distances(GRID, PATCH)).sum(-1).mean(-1).mT
    np.testing.assert_allclose(arrays["distance"][0], expected, rtol=1e-4)
    np.testing.assert_allclose(arrays["diversity"][0], attention.divergence(a), atol=1e-6)


def test_a_class_token_apart_is_read_too():
    model = encoded("rope_axial(free_prefix=True)", class_token=True, global_pool="token")
    found, _ = probe("attention", model, IMAGES)
    assert all(0 < layer["on_patches"] < 1 for layer in found["layers"])
    assert found["kernels"]["rotation"]["offset_only"] == pytest.approx(1)


def test_the_share_of_the_offset_is_what_was_planted():
    h, w = GRID
    index = attention.offset_index(GRID)
    assert index[0, 0] == (h - 1) * (2 * w - 1) + w - 1
    assert index[5, 0] == h * (2 * w - 1) + w  # query (1, 1), key (0, 0)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn((2 * h - 1) * (2 * w - 1), generator=generator, dtype=torch.float64)
    relative = table[index].expand(400, -1, -1)
    noise = torch.randn(400, 12, 12, generator=generator, dtype=torch.float64)
    query = torch.randn(12, 1, generator=generator, dtype=torch.float64).expand(400, 12, 12)

    def share(term):
        squares, explained = attention.offset_shares(term, GRID)
        return (explained.sum() / squares.sum()).item()

    assert share(relative) == pytest.approx(1)
    assert share(noise) == pytest.approx(0, abs=0.01)
    mixed = relative * (3 / relative.var(correction=0)) ** 0.5 + noise
    assert share(mixed) == pytest.approx(0.75, abs=0.02)
    assert 0.01 < share(query) < 0.9  # a function of the query alone: the offset tells a little of it
    # By its own mean instead of the others' noise would count as explained.
    means = attention.by_offset(noise[:4], index, len(table)) / attention.by_offset(
        torch.ones(12, 12), index, len(table)
    )
    assert (means[:, index].square().sum() / noise[:4].square().sum()) > 0.15


def test_terms_add_up_to_the_logits_and_position_alone_is_position_alone():
    model = encoded("sincos2d", std=0.3)
    exact = subject(model, IMAGES).precise()
    images = exact.pixels(exact.indices)
    with torch.no_grad():
        full = attention._entering(exact, exact.model)
        content = exact.model.patch_embed(exact.normalized(images))
        q, k, scale = attention._split(exact.model.blocks[0], content, full - content)
        ours = scale * q.sum(0) @ k.sum(0).mT
        block = exact.model.blocks[0]
        theirs_q, theirs_k, _ = block.attn.qkv(block.norm1(full)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(ours, theirs_q @ theirs_k.mT / 8**0.5, rtol=1e-10, atol=1e-10)

    found, _ = probe("attention", model, IMAGES)
    assert sum(term["share"]["value"] for term in found["terms"].values()) == pytest.approx(1)
    assert 0 < found["norm_ratio"]["value"] < 10
    model.patch_embed.proj.weight.data.zero_(), model.patch_embed.proj.bias.data.fill_(1e-9)
    found, _ = probe("attention", model, IMAGES)
    shares = {name: term["share"]["value"] for name, term in found["terms"].items()}
    assert shares["position-position"] + shares["rest"] == pytest.approx(1, abs=1e-6)
    assert found["norm_ratio"]["value"] > 1e6


def test_each_term_is_the_one_of_its_name():
    """Query first: content-position is the query's content with the key's position."""
    model = encoded("sincos2d", std=0.3)
    _, arrays = probe("attention", model, IMAGES)
    exact = subject(model, IMAGES).precise()
    with torch.no_grad():
        images = exact.normalized(exact.pixels(exact.indices))
        content = exact.model.patch_embed(images)
        position = attention._entering(exact, exact.model) - content
        q, k, scale = attention._split(exact.model.blocks[0], content, position)
    for t, (i, j) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        term = scale * q[i] @ k[j].mT  # [n, h, N, N]
        squares = (term - term.mean((0, 2, 3), keepdim=True)).square().sum((1, 2, 3))
        np.testing.assert_allclose(arrays["terms/total"][t], squares.numpy(), rtol=1e-8)
    assert not np.allclose(arrays["terms/total"][1], arrays["terms/total"][2], rtol=0.01)


def test_numbers_of_stored_attention_worked_by_hand():
    ones = np.ones(2)
    arrays = {
        "layers": np.array(["block 1"]), "images": np.arange(2), "grid": np.array(GRID), "uniform": np.array(8.0),
        "distance": np.array([[[2.0, 4.0], [6.0, 4.0]]]), "diversity": np.array([[0.2, 0.3]]) * math.log(2),
        "on_patches": np.full((1, 2, 2), 0.75), "kernel/not_applicable": np.array("none"),
        "terms/total": np.stack([4 * ones, 3 * ones, 2 * ones, ones, 0 * ones]),
        "terms/relative": np.stack([ones, 0 * ones, ones, ones, 0 * ones]),
        "terms/content_norm": np.array([3.0, 5.0]), "terms/position_norm": np.array(2.0),
    }  # fmt: skip
    found = attention.Attention().summarize(arrays, np.zeros(2))
    (layer,) = found["layers"]
    assert (layer["distance"]["value"], layer["over_uniform"]["value"], layer["heads"]) == (4, 0.5, [0.375, 0.625])
    assert layer["diversity"]["value"] == pytest.approx(0.25)
    assert found["norm_ratio"]["value"] == pytest.approx(0.5)
    assert [entry["share"]["value"] for entry in found["terms"].values()] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0])
    alone = [entry["relative"]["value"] for entry in list(found["terms"].values())[:4]]
    assert alone == pytest.approx([0.25, 0, 0.5, 1])


def test_kernels_are_those_of_their_formulas():
    found, _ = probe("attention", encoded("sincos2d"), IMAGES)
    kernel = found["kernels"]["tokens"]
    omega = 10000.0 ** -(torch.arange(4) / 4).double()
    expected = [[(torch.cos(omega * i) + torch.cos(omega * j)).sum() for j in range(-3, 4)] for i in range(-2, 3)]
    np.testing.assert_allclose(kernel["map"], expected, rtol=1e-6)
    assert kernel["offset_only"] == pytest.approx(1)
    assert kernel["anisotropy"] == pytest.approx(1)

    rows, _ = probe("attention", encoded("sincos1d"), IMAGES)
    assert rows["kernels"]["tokens"]["anisotropy"] > 1.02  # a step down is four steps along the row
    learned, _ = probe("attention", encoded("ape1d"), IMAGES)
    assert learned["kernels"]["tokens"]["offset_only"] < 0.9

    rotary = probe("attention", encoded("rope_axial"), IMAGES)[0]["kernels"]
    theta = 100.0 ** -(torch.arange(2) / 2).double()  # head width 8: two pairs an axis
    expected = [[(torch.cos(theta * i) + torch.cos(theta * j)).mean() / 2 for j in range(-3, 4)] for i in range(-2, 3)]
    np.testing.assert_allclose(rotary["rotation"]["map"], expected, rtol=1e-6)
    assert set(rotary) == {"rotation"}

    linear = probe("attention", encoded("alibi2d"), IMAGES)[0]["kernels"]["bias"]
    at = np.array(linear["map"])
    assert at[2, 3] == 0
    assert at[2, 5] == pytest.approx(2 * at[2, 4])
    assert linear["anisotropy"] == pytest.approx(1)
    assert linear["rises"] == 0
    assert linear["aliasing"] is None


def test_the_map_of_a_bias_has_the_slope_of_the_first_layer(monkeypatch):
    model = encoded("alibi2d")
    before = np.array(probe("attention", model, IMAGES)[0]["kernels"]["bias"]["map"])
    monkeypatch.setattr(Alibi2d, "slope_of", lambda self, layer: 3.0 - layer)
    sloped = np.array(probe("attention", model, IMAGES)[0]["kernels"]["bias"]["map"])
    np.testing.assert_allclose(sloped, 3 * before, rtol=1e-6)
    assert before.min() < -0.1


def test_decay_and_norms_are_shown():
    found, _ = probe("attention", encoded("sincos1d"), IMAGES)
    shown = {view["key"]: view for view in attention.Attention().views(found) if view["kind"] != "maps"}
    lines = {line["name"]: line["y"] for line in shown["decay"]["series"]}
    at = np.array(found["kernels"]["tokens"]["scaled"])
    assert lines["tokens, down"] == at[2:, 3].tolist()
    assert lines["tokens, right"] == at[2, 3:].tolist()
    assert lines["tokens, down"][0] == pytest.approx(1)
    assert lines["tokens, down"][1] != pytest.approx(lines["tokens, right"][1])
    assert f"has {found['norm_ratio']['value']:.3g} (" in shown["kernels"]["note"]


def test_rising_similarity_is_counted():
    line = np.array([[0.2, 0.6, 1.0, 0.6, 0.2]])
    assert attention._kernel(line, 1.0, "tokens")["rises"] == 0
    assert attention._kernel(line, 1.0, "tokens")["aliasing"] == pytest.approx(0.2)  # two cells away, of three
    assert attention._kernel(np.ones((1, 1)), 1.0, "tokens")["aliasing"] is None
    wavy = np.array([[0.9, 0.2, 0.6, 1.0, 0.6, 0.2, 0.9]])
    entry = attention._kernel(wavy, 1.0, "tokens")
    assert entry["rises"] == pytest.approx(1 / 3)
    assert entry["aliasing"] == pytest.approx(0.9)
    assert entry["anisotropy"] is None


@pytest.mark.parametrize(
    ("name", "kernels", "terms"),
    [
        ("vit_tiny_patch16_224", {"tokens"}, True),
        ("vit_relpos_small_patch16_224", {"bias"}, "rotation or bias alone"),
        ("vit_small_patch16_rope_224", {"rotation"}, "rotation or bias alone"),
        ("vit_small_patch16_dinov3", {"rotation"}, "rotation or bias alone"),
    ],
)
def test_timms_own_encodings(name, kernels, terms):
    assert name in OTHERS
    found, _ = probe("attention", other(name), IMAGES)
    assert set(found["kernels"]) == kernels
    assert len(found["layers"]) == 2
    if terms is True:
        assert set(found["terms"]) == set(attention.TERMS)
    else:
        assert terms in found["terms"]["not_applicable"]


def test_what_does_not_apply():
    assert "no attention over patches" in probe("attention", Constant())[0]["not_applicable"]
    assert "no attention over patches" in probe("attention", other("resnet10t"))[0]["not_applicable"]
    normalised = encoded("ape1d", qk_norm=True)
    assert "normalised themselves" in probe("attention", normalised, IMAGES)[0]["terms"]["not_applicable"]
    before = encoded("ape1d", pre_norm=True)
    assert "before the first block" in probe("attention", before, IMAGES)[0]["terms"]["not_applicable"]
    bare = probe("attention", encoded("none"), IMAGES)[0]
    assert "nothing" in bare["kernels"]["not_applicable"]
