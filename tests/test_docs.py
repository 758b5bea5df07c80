"""The generated pages are those of the code as it is, and every encoding can be drawn."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitpos
from vitpos import pages
from vitpos.composition import Position
from vitpos.encodings.__main__ import main
from vitpos.spec import REGISTRY

DOCS = Path(__file__).parent.parent / "docs" / "encodings"


MAPLESS = [name for name in vitpos.list_encodings() if set(REGISTRY[name].sites()) <= {"scale"}]
WRITTEN = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "README")


def test_the_overview_is_current():
    """Of the encodings that have a page; a new one gets its own with the next ``make docs``."""
    new = [name for name in vitpos.list_encodings() if name not in WRITTEN]
    lines = [line for line in pages.overview().splitlines() if not any(f"`{name}`" in line for name in new)]
    written = [line for line in (DOCS / "README.md").read_text().splitlines() if not any(n in line for n in new)]
    assert [line for line in lines if line.startswith("| [")] == [line for line in written if line.startswith("| [")], (
        "run make docs"
    )
    assert new or pages.overview() + "\n" == (DOCS / "README.md").read_text(), "run make docs"


@pytest.mark.parametrize("name", vitpos.list_encodings())
def test_every_encoding_has_a_page(name):
    page = pages.page(name)
    assert page.startswith(f"# `{name}`\n")
    assert REGISTRY[name].paper in page
    assert ">>>" in page  # the value worked out by hand
    assert (f"{name}.png" in page) == (name not in MAPLESS)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_pages_are_current(name):
    assert (DOCS / f"{name}.md").read_text() == pages.page(name) + "\n", "run make docs"
    assert (DOCS / f"{name}.png").exists() == (name not in MAPLESS)


def test_mapless_encodings():
    assert MAPLESS == ["logn", "native", "none"]


@pytest.mark.parametrize("name", [n for n in vitpos.list_encodings() if n not in MAPLESS])
def test_maps_have_the_shape_of_the_grid(name):
    shown = pages.panels(vitpos.parse(name), (3, 5))
    assert shown
    for title, values in shown:
        assert values.shape == (3, 5), title
        assert values.isfinite().any()


def test_maps_show_what_the_encoding_does():
    """Column channels vary along rows of the image only, and the other way round."""
    maps = dict(pages.panels(vitpos.parse("rope_axial"), (3, 5)))
    assert maps["cos, pair 0"].std(dim=0).max() < 1e-6 < maps["cos, pair 0"].std(dim=1).min()
    assert maps["cos, pair 4"].std(dim=1).max() < 1e-6 < maps["cos, pair 4"].std(dim=0).min()
    assert maps["q = k: logit against the centre"].argmax() == 7


@pytest.mark.parametrize(
    ("spec", "twice", "first"),
    [  # cycles across 7 and across 14 columns of the pair that turns fastest with x
        ("rope_axial(theta=50.0)", 2, 7 / (2 * math.pi)),  # one radian a patch
        ("sincos2d(temperature=50.0)", 2, 7 / (2 * math.pi)),
        ("rope_axial(theta=50.0, resize='interpolate')", 1, 14 / (2 * math.pi)),  # trained on 14 columns
        ("rope_axial(wrap=True)", 1, 7.0),  # whole cycles: half as many as columns
        ("rope_dinov3(base=50.0)", 1, 2.0),  # from -1 to 1 in full turns
        ("rope1d", 2, 7 / (2 * math.pi)),
        ("sincos1d", 1, 14 / (2 * math.pi)),  # a table of the training grid
    ],
)
def test_cycles_over_an_image(spec, twice, first):
    """Which unit the coordinates have: an image of twice the columns has twice the cycles, or as many."""
    encoding = next(Position(vitpos.parse(spec), pages.VIT_B).encodings())
    narrow, wide = (pages.cycles(encoding, extent)[0, :, 1] for extent in ((5, 7), (5, 14)))
    assert narrow.max().item() == pytest.approx(first)
    torch.testing.assert_close(wide, twice * narrow)


def test_cycles_by_hand():
    """Pair k of rope_axial: 50^(-k/16) radians a patch, first across, then down; learned ones as they are now."""
    encoding = next(Position(vitpos.parse("rope_axial(theta=50.0)"), pages.VIT_B).encodings())
    expected = [[0.0, 7 * 50 ** (-k / 16)] for k in range(16)] + [[5 * 50 ** (-k / 16), 0.0] for k in range(16)]
    found = pages.cycles(encoding, (5, 7))[0] * 2 * math.pi
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    mixed = next(Position(vitpos.parse("rope_mixed"), pages.VIT_B).encodings())
    found = pages.cycles(mixed, (5, 7)) * 2 * math.pi
    torch.testing.assert_close(found, mixed.weight.detach() * torch.tensor([5.0, 7.0], dtype=torch.float64))
    for name in vitpos.list_encodings():
        lines = (DOCS / f"{name}.md").read_text() if name in WRITTEN else pages.page(name)
        assert ("cycles over an image" in lines) == (pages.cycles(one(name), (5, 7)) is not None)


def one(name):
    return next(Position(vitpos.parse(name), pages.VIT_B).encodings())


def run(monkeypatch, capsys, *words):
    """Exit code, output and errors of ``python -m vitpos.encodings``."""
    monkeypatch.setattr(sys, "argv", ["python -m vitpos.encodings", *map(str, words)])
    return main(), *capsys.readouterr()


def test_command_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "figure.png"
    code, out, _ = run(monkeypatch, capsys, "rope_axial(theta=50.0)", "--grid", "7x11", "--out", path)
    assert (code, out) == (0, f"{path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    for words, message in [
        (("rope_axail",), "did you mean rope_axial"),
        (("rope_axial", "--grid", "7by11"), "must be HxW"),
        (("rope_axial", "--cycles", "7"), "--cycles '7' must be HxW"),
        (("logn", "--grid", "7x11"), "no map"),
        (("rpb", "--cycles", "7x11"), "rpb has no phases that turn with the coordinates"),
        (("--grid", "7x11"), "specs given before it"),
    ]:
        code, _, error = run(monkeypatch, capsys, *words)
        assert code == 2
        assert message in error
        assert len(error.strip().splitlines()) == 1


def test_a_spec_is_described_by_its_encodings(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "rope_axial(theta=50) + ape1d")
    assert code == 0
    assert out == f"{vitpos.describe('rope_axial')}\n\n{vitpos.describe('ape1d')}\n"


def test_cycles_are_listed(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "rope_dinov3 + rpb", "--cycles", "7x11")
    head, *rows = out.splitlines()[0], *out.splitlines()[2:]
    assert (code, head) == (0, "rope_dinov3: cycles over an image of 7 x 11 patches")
    assert [float(v) for v in rows[0].split()] == [0, 2, 0]
    assert len(rows) == 32


def test_the_module_runs():
    command = [sys.executable, "-m", "vitpos.encodings", "rope_axial"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout == vitpos.describe("rope_axial") + "\n"
