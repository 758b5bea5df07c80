"""Shared by all tests: one thread a process, no display, and small float64 models over the whole registry."""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest  # noqa: E402  (the thread counts are read at import)
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _reproducible():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_configure(config):
    """Swaps of encodings are what most tests are about; tests/test_preserving.py sees that they warn."""
    config.addinivalue_line("filterwarnings", r"ignore:\w+ had .* now. it computes something else")


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    """An empty folder to work in, for tests of the commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    return tmp_path


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """eval.py, called by its words: exit code, output, errors."""
    from evaluating import call  # (needs the extras)

    return lambda *words, **kwargs: call(monkeypatch, capsys, *words, **kwargs)
