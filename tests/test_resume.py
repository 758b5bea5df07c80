"""A run that was stopped, killed or short of disk goes on as if nothing had been; one that cannot says so."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from commands import Stop, train

from vitpos import runs, states

pytestmark = pytest.mark.usefixtures("somewhere")
# dropout, an average, clipping and steps of unequal rate: what a resumed run may get wrong
RICH = ["pos=ape2d", "train.ema=0.9", "model.kwargs.proj_drop_rate=0.1"]
TIMINGS = ["images_per_second", "seconds"]


def contents(folder) -> dict[str, object]:
    """All that a finished run is compared by: the bytes of its weights, its metrics, and its last state."""
    rows = pd.read_csv(f"{folder}/metrics.csv").drop(columns=TIMINGS)
    path, damaged = states.newest(Path(folder))
    assert not damaged
    state = torch.load(path, weights_only=True)
    numbers = {f"{kind}.{k}": v for kind in ("model", "ema") for k, v in (state[kind] or {}).items()}
    numbers |= {f"{i}.{k}": v for i, moments in state["optimizer"]["state"].items() for k, v in moments.items()}
    return {
        "weights": Path(folder, "last.safetensors").read_bytes(),
        "rows": rows.to_csv(),
        "tensors": {k: v.numpy().tobytes() for k, v in numbers.items()},
        "groups": state["optimizer"]["param_groups"],
        "position": (state["step"], state["skips"], state["totals"].tolist(), state["scaler"]),
    }


def stop_at(monkeypatch, step: int) -> None:
    """Stands for a process that dies right after a step, with no chance to save."""
    stepped = runs.RunFolder.stepped

    def stopping(self, state):
        stepped(self, state)
        if state.step == step:
            raise Stop

    monkeypatch.setattr(runs.RunFolder, "stepped", stopping)


def killed(monkeypatch, step: int, *words: str, tiny: bool = True) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(Stop):
            train(patch, *words, tiny=tiny)


def saved_step(folder: str) -> int:
    return int(max(Path(folder).glob("state-*")).name[6:14])


def test_a_run_that_is_stopped_again_and_again_is_the_same_run(monkeypatch):
    """In mid-epoch, with the epoch's last step but not its evaluation done, and where the state is a step behind."""
    assert train(monkeypatch, "out=whole", *RICH) == 0
    whole = contents("whole")
    killed(monkeypatch, 2, "out=part", *RICH, "train.save_every=2")
    killed(monkeypatch, 4, "resume=part", tiny=False)
    assert not Path("part/metrics.csv").exists()
    killed(monkeypatch, 7, "resume=part", tiny=False)
    assert saved_step("part") == 6
    assert train(monkeypatch, "resume=part", tiny=False) == 0
    assert contents("part") == whole
    assert train(monkeypatch, "out=other", *RICH, "seed=1") == 0
    assert all(contents("other")[k] != whole[k] for k in ("weights", "rows", "tensors"))


@pytest.mark.slow
def test_resumed_after_any_step_it_is_the_same_run(monkeypatch):
    assert train(monkeypatch, "out=whole", *RICH) == 0
    for step in range(1, 9):
        killed(monkeypatch, step, f"out=part{step}", *RICH, "train.save_every=1")
        assert saved_step(f"part{step}") == step
        assert train(monkeypatch, f"resume=part{step}", tiny=False) == 0
        assert contents(f"part{step}") == contents("whole"), step
