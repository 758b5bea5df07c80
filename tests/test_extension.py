"""Adding an encoding is one new file: it is registered, documented and tested with no other file touched."""

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
TRUE_LAWS = '{"offset", "transpose"}'


def run(folder, *command):
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "vitpos", tmp_path / "vitpos", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "common.py", "test_laws.py", "test_attention.py", "test_spec.py", "test_checkpoint.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def add(folder, laws):
    (folder / "vitpos" / "encodings" / "cityblock.py").write_text(NEW.replace("{LAWS}", laws))


def test_one_new_file_is_enough(copy):
    add(copy, TRUE_LAWS)
    shown = run(copy, "-c", "import vitpos; print(vitpos.list_encodings(), vitpos.describe('cityblock'))")
    assert "'cityblock'" in shown.stdout, shown.stderr
    assert "transpose: holds" in shown.stdout
    assert "slope=0.25" in shown.stdout
    overview = run(copy, "-m", "vitpos.encodings")
    assert "cityblock" in overview.stdout, overview.stderr
    tests = run(
        copy,
        "-m",
        "pytest",
        "-q",
        "-k",
        "cityblock or CityBlock",
        "-p",
        "no:cacheprovider",
        "tests",
        "vitpos/encodings",
    )
    assert tests.returncode == 0, tests.stdout
    assert int(tests.stdout.strip().splitlines()[-1].split(" passed")[0].split()[-1]) > 40


def test_a_false_law_is_caught(copy):
    """Declared and false, and true but undeclared."""
    for laws, failing in [
        ('{"offset", "transpose", "circular"}', "circular"),
        ('{"transpose"}', "offset"),
    ]:
        add(copy, laws)
        tests = run(
            copy, "-m", "pytest", "-q", "-k", f"cityblock and {failing} and test_law", "-p", "no:cacheprovider", "tests"
        )
        assert tests.returncode == 1, tests.stdout
        assert "failed" in tests.stdout
