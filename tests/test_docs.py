"""The generated pages are those of the code as it is, and every encoding can be drawn."""

import subprocess
import sys
from pathlib import Path

import pytest

import vitpos
from vitpos import pages
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
        (("logn", "--grid", "7x11"), "no map"),
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


def test_the_module_runs():
    command = [sys.executable, "-m", "vitpos.encodings", "rope_axial"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout == vitpos.describe("rope_axial") + "\n"
