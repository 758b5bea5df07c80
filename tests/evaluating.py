"""What the tests of eval.py share: calling it in this process, and run folders that were never trained."""

import runpy
import sys
from pathlib import Path

import torch

import vitpos
from vitpos import report

EVAL = Path(__file__).parents[1] / "eval.py"
SMALL = dict(
    img_size=24, patch_size=4, in_chans=1, num_classes=10, embed_dim=16, depth=1, num_heads=2, class_token=False,
    global_pool="avg",
)  # fmt: skip


def make_run(folder, pos, placement="home", seed=0, model=None, **changes):
    """A run folder of a small model with random weights on digits."""
    torch.manual_seed(0)
    model = vitpos.create_model("vit_tiny_patch16_224", pos=pos, **SMALL | (model or {}))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    card = {
        "classes": [str(c) for c in range(10)],
        "preprocessing": {"mean": [0.08], "std": [0.21], "img_size": [24, 24], "in_chans": 1},
        "extra": {"data": {"name": "digits", "placement": placement}, "seed": seed, "epochs": 1, "run": folder.name},
    } | changes
    vitpos.save(model, folder / "last.safetensors", **card)
    return folder


def call(monkeypatch, capsys, *words, **kwargs):
    """Call eval.py in this process: its exit code, output and errors."""
    return start(monkeypatch, *words, **kwargs), *capsys.readouterr()


def start(monkeypatch, *words, figures=False):
    """The exit code alone. Figures are drawn where they are looked at."""
    monkeypatch.setattr(sys, "argv", ["eval.py", *words])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)  # a run before this one has set it
    code = 0
    with monkeypatch.context() as patch:
        if not figures:
            for drawn in (report, report.page):
                patch.setattr(drawn, "drawings", lambda *_: [])
        try:
            runpy.run_path(str(EVAL), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    return code
