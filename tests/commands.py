"""What the tests of train.py share: calling it in this process, stopping it, and a small image folder."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from PIL import Image

from vitpos import data, runs, states

TRAIN = Path(__file__).parents[1] / "train.py"
TINY = [
    "model.kwargs.embed_dim=16", "model.kwargs.depth=1", "model.kwargs.num_heads=2", "train.batch_size=300",
    "train.epochs=2", "train.threads=1", "train.cpu=true", "train.pictures=0",
]  # fmt: skip


def train(monkeypatch, *words: str, tiny: bool = True) -> int:
    """Call train.py in this process; its exit code."""
    GlobalHydra.instance().clear()
    if not any("hydra.mode" in word for word in words):  # then -m alone says it: Hydra need not read all files for it
        monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["train.py", *(TINY if tiny else []), *words])
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


class Stop(BaseException):
    """Stands for a killed process."""


def stop_after(monkeypatch, epochs: int):
    epoch = runs.RunFolder.epoch

    def stopping(self, state, row):
        epoch(self, state, row)
        if row["epoch"] == epochs:
            raise Stop

    monkeypatch.setattr(runs.RunFolder, "epoch", stopping)


def stopped(monkeypatch, *words: str) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            train(patch, *words)


def latest() -> Path:
    return max(Path("run").glob("state-*"))


def tamper(change) -> None:
    path = latest()
    state = torch.load(path, weights_only=True)
    path.unlink()
    change(state)
    states.write(path.parent, state["step"], state)


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


def at_step(monkeypatch, wanted: int, action) -> None:
    """Do something at a step (validation's batches count too)."""
    normalize, steps = data.normalize, []

    def acting(x, info):
        steps.append(1)
        if len(steps) == wanted:
            action()
        return normalize(x, info)

    monkeypatch.setattr(data, "normalize", acting)


def make_folder(root: Path) -> Path:
    for part in ("train", "val"):
        for name in ("ant", "bee"):
            (root / part / name).mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (20, 20), (30 * i, 0, 200 if name == "ant" else 0)).save(
                    root / part / name / f"{i}.png"
                )
    return root


FOLDER = [
    "data=folder", "data.root=images", "data.img_size=16", "data.val_fraction=0.25", "model.kwargs.patch_size=8",
    "train.batch_size=4", "model.kwargs.embed_dim=16", "model.kwargs.depth=1", "model.kwargs.num_heads=2",
    "train.epochs=1", "train.cpu=true", "train.threads=1", "train.pictures=0",
]  # fmt: skip
