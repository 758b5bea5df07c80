"""Adding an encoding is one new file: it is registered, named in timm, documented and tested, no other file touched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEW = '''
"""A bias that falls with the city-block distance."""

from torch import Tensor

from vitpos.encoding import OffsetBias
from vitpos.positions import Extent
from vitpos.spec import register


@register("cityblock")
class CityBlock(OffsetBias):
    """Logit of (query, key) += -slope (|dy| + |dx|).

    >>> import torch
    >>> from vitpos.encoding import Geometry
    >>> encoding = CityBlock(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(8, 8)), slope=0.5)
    >>> encoding.at(torch.tensor([3.0, -4.0]), (8, 8)).item()
    -3.5
    """

    summary = "logits fall linearly with the city-block distance"
    paper = "none: a test"
    laws = frozenset({LAWS})

    def __init__(self, geometry, *, slope: float = 0.25) -> None:
        super().__init__(geometry)
        self.slope = slope

    def at(self, offset: Tensor, extent: Extent) -> Tensor:
        return -self.slope * offset.abs().sum(-1, keepdim=True).movedim(-1, 0)
'''
SPIN = '''
"""A rotary embedding that turns by the sum of row and column."""

import torch
from torch import Tensor

from vitpos.encoding import NO_PREFIX, Geometry, LinearRotary
from vitpos.positions import Positions
from vitpos.spec import register


@register("spin")
class Spin(LinearRotary):
    """Channel pair k rotates by (y + 2 x) / (k + 1).

    >>> encoding = Spin(Geometry(dim=4, heads=1, head_dim=4, depth=1, grid=(4, 4)))
    >>> pos = Positions(torch.tensor([[[2.0, 3.0]]]), extent=(4, 4))
    >>> encoding.angles(pos).phase.flatten().tolist()
    [8.0, 4.0]
    """

    summary = "q and k rotate by a sum of row and column"
    paper = "none: a test"
    laws = frozenset({"offset" + NO_PREFIX})

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)

    def frequencies(self, pos: Positions) -> Tensor:
        step = 1 / torch.arange(1.0, self.geometry.head_dim // 2 + 1, device=pos.coords.device)
        return torch.stack([step, 2 * step], dim=-1).unsqueeze(0)
'''
TRUE_LAWS = '{"offset", "transpose"}'


def run(folder, *command):
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "vitpos", tmp_path / "vitpos", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def add(folder, laws):
    (folder / "vitpos" / "encodings" / "cityblock.py").write_text(NEW.replace("{LAWS}", laws))


CORE = [
    "laws",
    "attention",
    "spec",
    "checkpoint",
    "composition",
    "docs",
    "robustness",
    "backbone",
    "positions",
    "names",
]


def test_one_new_file_is_enough(copy):
    """A bias and a rotary encoding: every test over the registry runs on them, and passes."""
    add(copy, TRUE_LAWS)
    (copy / "vitpos" / "encodings" / "spin.py").write_text(SPIN)
    code = (
        "import runpy, vitpos, timm; print(vitpos.list_encodings(), vitpos.describe('cityblock')); "
        "print(timm.list_models('vitpos_tiny*_spin')); "
        "runpy.run_module('vitpos.encodings', run_name='__main__')"
    )
    shown = run(copy, "-c", code)
    assert "'cityblock'" in shown.stdout, shown.stderr
    assert "transpose: holds" in shown.stdout
    assert "slope=0.25" in shown.stdout
    assert "vitpos_tiny_patch16_224_spin" in shown.stdout
    assert "[`cityblock`](cityblock.md)" in shown.stdout
    files = [f"tests/test_{name}.py" for name in CORE]
    chosen = "cityblock or CityBlock or spin or Spin or overview"
    tests = run(copy, "-m", "pytest", "-q", "-k", chosen, "-p", "no:cacheprovider", *files, "vitpos/encodings")
    assert tests.returncode == 0, tests.stdout
    assert int(tests.stdout.strip().splitlines()[-1].split(" passed")[0].split()[-1]) > 200


def test_a_false_law_is_caught(copy):
    """Declared and false, and true but undeclared."""
    for laws, failing in [
        ('{"offset", "transpose", "circular"}', "circular"),
        ('{"transpose"}', "offset"),
    ]:
        add(copy, laws)
        tests = run(
            copy,
            *("-m", "pytest", "-q", "-k", f"cityblock and {failing} and test_law", "-p", "no:cacheprovider"),
            "tests/test_laws.py",
        )
        assert tests.returncode == 1, tests.stdout
        assert "failed" in tests.stdout
