"""Fine-tuning to another encoding: from where the model was (preserve), from a cold swap, and with what it had.

python benchmarks/preserving.py --out runs/preserving

Digits models are trained with ape1d, then fine-tuned for a quarter of the epochs. Each arm has the same tuning: the
learning rate of the best validation accuracy at seed 0. The test set is evaluated once, at the end. Intervals are over
seeds (paired, Student's t): they speak of this recipe, not of one model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

ROOT = Path(__file__).parent.parent
RATES = ("1e-3", "3e-3")
ARMS = {"native": "pos=native"} | {
    f"{pos}, {how}": f"pos={pos} preserve={str(how == 'preserve').lower()}"
    for pos in ("rope_mixed", "cpb")
    for how in ("preserve", "cold")
}


def run(script: str, *options: str) -> None:
    subprocess.run([sys.executable, str(ROOT / script), *options], check=True, cwd=ROOT)


def trained(folder: Path, *options: str) -> Path:
    """A run folder, trained unless it is there already."""
    if not (folder / "last.safetensors").exists():
        run("train.py", "experiment=demo", f"out={folder}", *options)
    return folder


def validation(folder: Path) -> pd.Series:
    return pd.read_csv(folder / "metrics.csv")["val_accuracy"]


def measured(folder: Path, evaluation: Path) -> dict[str, float]:
    """Validation accuracy after the first epoch of fine-tuning, and test accuracies."""
    (one,) = json.loads((evaluation / "results.json").read_text())["runs"]
    resolution = one["probes"]["resolution"]["kinds"]["upsample"]["rows"]
    return {
        "val, epoch 1": validation(folder).iloc[0],
        "home": one["accuracy"]["value"],
        "unseen positions": one["probes"]["translation"]["variants"]["canvas"]["patch"]["mean_shifted"]["value"],
        "2x upsampled": next(row["accuracy"]["value"] for row in resolution if row["scale"] == [2.0, 2.0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/preserving"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=7)
    given = parser.parse_args()
    out = given.out.resolve()
    rows, chosen = [], {}
    for seed in range(given.seeds):
        before = trained(out / f"base-s{seed}", "pos=ape1d", f"seed={seed}")
        for arm, options in ARMS.items():
            slug = arm.replace(", ", "-")

            def tuned(
                rate: str, seed: int = seed, slug: str = slug, options: str = options, before: Path = before
            ) -> Path:
                folder = out / f"{slug}-lr{rate}-s{seed}"
                return trained(
                    folder, f"init={before}", f"seed={seed}", f"train.epochs={given.epochs}", f"train.lr={rate}",
                    *options.split(),
                )  # fmt: skip

            if seed == 0:
                chosen[arm] = max(RATES, key=lambda rate: validation(tuned(rate)).iloc[-1])
            folder = tuned(chosen[arm])
            evaluation = folder / "eval"
            if not (evaluation / "results.json").exists():
                run("eval.py", f"checkpoint={folder}", "probes=[translation,resolution]", f"out={evaluation}")
            rows.append({"arm": arm, "seed": seed, **measured(folder, evaluation)})
    table = pd.DataFrame(rows).set_index(["arm", "seed"])
    table.to_csv(out / "preserving.csv")
    report(table, chosen)


def report(table: pd.DataFrame, chosen: dict[str, str]) -> None:
    """Means over seeds with standard deviations, then paired differences with 95% intervals, in points."""
    seeds = table.index.get_level_values("seed").nunique()
    print(f"n = {seeds} seeds; accuracy in %, mean (standard deviation over seeds)")
    print("| arm | lr | " + " | ".join(table.columns) + " |\n" + "| --- " * (len(table.columns) + 2) + "|")
    for arm in ARMS:
        values = 100 * table.loc[arm]
        cells = [f"{values[c].mean():.1f} ({values[c].std():.1f})" for c in table.columns]
        print(f"| {arm} | {chosen[arm]} | " + " | ".join(cells) + " |")
    print("\ndifferences in points, paired by seed, 95% interval over seeds")
    print("| difference | " + " | ".join(table.columns) + " |\n" + "| --- " * (len(table.columns) + 1) + "|")
    for pos in ("rope_mixed", "cpb"):
        for other in (f"{pos}, cold", "native"):
            difference = 100 * (table.loc[f"{pos}, preserve"] - table.loc[other])
            half = stats.t.ppf(0.975, seeds - 1) * difference.std() / np.sqrt(seeds)
            cells = [f"{difference[c].mean():+.1f} ({half[c]:.1f})" for c in table.columns]
            print(f"| {pos}: preserve - {other.removeprefix(pos + ', ')} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
