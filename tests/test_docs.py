"""The generated pages are those of the code as it is, and every encoding can be drawn."""

import subprocess
import sys
from pathlib import Path

import pytest

import vitpos
from vitpos import pages

DOCS = Path(__file__).parent.parent / "docs" / "encodings"


def test_the_overview_is_current():
    assert (DOCS / "README.md").read_text() == pages.overview() + "\n", "run make docs"


@pytest.mark.parametrize("name", vitpos.list_encodings())
def test_the_page_is_current(name):
    assert (DOCS / f"{name}.md").read_text() == pages.page(name) + "\n", "run make docs"
    has_figure = f"{name}.png" in pages.page(name)
    assert (DOCS / f"{name}.png").exists() == has_figure
    assert has_figure == (name not in ("none", "native", "logn"))


@pytest.mark.parametrize("name", [n for n in vitpos.list_encodings() if n not in ("none", "native", "logn")])
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


def run(*words):
    command = [sys.executable, "-m", "vitpos.encodings", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_line(tmp_path):
    path = tmp_path / "figure.png"
    drawn = run("rope_axial(theta=50.0)", "--grid", "7x11", "--out", path)
    assert drawn.returncode == 0, drawn.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    for words, message in [
        (("rope_axail",), "did you mean rope_axial"),
        (("rope_axial", "--grid", "7by11"), "must be HxW"),
        (("logn", "--grid", "7x11"), "no map"),
        (("--grid", "7x11"), "specs given before it"),
    ]:
        refused = run(*words)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
