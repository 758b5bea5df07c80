"""The best settings of each encoding, from what runs leave behind; and refusals of unequal chances."""

import itertools
import subprocess
import sys

import pytest
import yaml

from vitpos import tuning
from vitpos.evaluation import find_runs
from vitpos.tables import markdown


def leave(root, pos, seed, accuracy, **train):
    folder = root / f"{pos}-{seed}-{'-'.join(map(str, train.values()))}"
    folder.mkdir()
    config = {"pos": pos, "seed": seed, "out": str(folder), "data": {"name": "digits"}, "train": {"epochs": 2, **train}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.csv").write_text(f"epoch,val_accuracy\n1,0.99\n2,{accuracy}\n")
    (folder / "last.safetensors").touch()


def sweep(root, best):
    for (pos, lr), seed in itertools.product(best, (0, 1)):
        leave(root, pos, seed, best[pos, lr] + 0.01 * seed, lr=lr)


BEST = {("none", 0.001): 0.5, ("none", 0.003): 0.4, ("rpb", 0.001): 0.6, ("rpb", 0.003): 0.8}


def test_the_best_by_the_mean_over_seeds_after_the_last_epoch(tmp_path):
    sweep(tmp_path, BEST)
    lines = markdown(tuning.chosen(tuning.scores(find_runs(str(tmp_path))))).splitlines()
    assert lines[2:] == [
        "| `none` | 2 x 2 | train.lr=0.001 | 50.5 | 40.5 with train.lr=0.003 |",
        "| `rpb` | 2 x 2 | train.lr=0.003 | 80.5 | 60.5 with train.lr=0.001 |",
    ]


def test_options_of_an_encoding_are_settings_too(tmp_path):
    sweep(tmp_path, {("none", 0.001): 0.5, ("none", 0.003): 0.4, ("rpb(std=0.5)", 0.001): 0.6, ("rpb", 0.003): 0.3})
    found = tuning.scores(find_runs(str(tmp_path)))
    assert set(found["rpb"]) == {("pos=rpb(std=0.5)", "train.lr=0.001"), ("train.lr=0.003",)}


@pytest.mark.parametrize("missing", list(BEST))
def test_unequal_chances_are_refused(tmp_path, missing):
    sweep(tmp_path, {key: value for key, value in BEST.items() if key != missing})
    with pytest.raises(
        ValueError, match=rf"not the same budget: .* with train.lr={missing[1]} and seeds 0, 1, {missing[0]} was"
    ):
        tuning.scores(find_runs(str(tmp_path)))


def test_a_missing_seed_is_a_smaller_chance(tmp_path):
    sweep(tmp_path, BEST)
    leave(tmp_path, "none", 2, 0.9, lr=0.001)
    with pytest.raises(ValueError, match="seeds 0, 1, 2, rpb was not"):
        tuning.scores(find_runs(str(tmp_path)))


def test_two_runs_of_the_same(tmp_path):
    sweep(tmp_path, BEST)
    (tmp_path / "again").mkdir()
    leave(tmp_path / "again", "none", 1, 0.9, lr=0.001)
    with pytest.raises(ValueError, match=r"a second run of none with train\.lr=0\.001 and seed 1"):
        tuning.scores(find_runs(str(tmp_path)))


def test_on_the_command_line(tmp_path):
    sweep(tmp_path, BEST)
    done = subprocess.run(
        [sys.executable, "-m", "vitpos.tuning", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "| `rpb` |" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nowhere"], "runs=nowhere: no such folder"), ([], "usage: python -m vitpos.tuning FOLDER")],
)
def test_errors_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tuning", *words])
    with pytest.raises(SystemExit) as stop:
        tuning.main()
    assert (stop.value.code, capsys.readouterr()) == (2, ("", f"error: {message}\n"))
