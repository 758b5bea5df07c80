"""Which runs stand in one table, in which order and columns, and what they are compared with."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Keys of a data configuration that shape training alone: the test images are the same whatever they are.
TRAINING_ONLY = {
    "placement", "val_fraction", "crop_padding", "flip", "min_crop_area", "workers", "download", "augment", "erase",
    "color_jitter", "train", "val",
}  # fmt: skip
SIZE_KINDS = {  # of the resolution probe: what a column is called, and what it means
    "canvas": ("canvas", "canvas grown, object on the tokens it was on; only positions and background are new"),
    "upsample": ("resized", "image resized; things have another size too"),
}
Run = dict[str, Any]
Interval = dict[str, Any]


def base_name(run: Run) -> str:
    return str(run["encoding"])


def ordered(runs: Iterable[Run]) -> list[Run]:
    """By encoding, each followed by its control of uniform placement; seeds in order; `none` last."""
    return sorted(runs, key=lambda r: (base_name(r) == "none", base_name(r), r["placement"] != "home", r["seed"] or 0))


def setup(run: Run) -> dict[str, Any]:
    """What was measured on what. Only runs with equal setups stand in one table or are compared as pairs."""
    translation = run["probes"].get("translation", {})
    resolution = run["probes"].get("resolution", {})
    return {
        **{key: value for key, value in run["data"].items() if key not in TRAINING_ONLY},
        "image_size": run["image_size"],
        "images": run["images"],
        "classes": decided(run),
        "precision": "bf16" if "float32" in run else "float32",
        "patch_size": translation.get("patch_size", resolution.get("patch_size")),
        "options": {name: probe.get("options") for name, probe in run["probes"].items()},
        "shifts": {
            f"{variant}, {name}": entry["shifts"]
            for variant, found in translation.get("variants", {}).items()
            for name, entry in found.items()
            if "shifts" in entry
        },
    }


def settings(run: Run) -> dict[str, Any]:
    """How a run was trained, but for encoding, placement and seed; which weights, of a model not trained here."""
    own = {key: run[key] for key in ("architecture", "epochs")}
    if run["seed"] is None:
        own["weights"] = run["checkpoint"] or ("published" if run["trained"] else "random")
    recipe = flat(run.get("recipe") or {})
    again = {"model.name": run["architecture"], "train.epochs": run["epochs"]}  # the same by another name
    return own | {key: value for key, value in recipe.items() if key not in again or value != again[key]}


def apart(run: Run, runs: Iterable[Run]) -> str:
    """What of its settings tells a run from those of `runs` with its encoding, e.g. "train.lr 0.01"; '' if nothing.

    Weights only from others of its architecture, and a recipe from others whose recipe is known.
    """
    mine = settings(run)
    kin = [(other, settings(other)) for other in runs if base_name(other) == base_name(run)]
    said = []
    for key, value in mine.items():
        if key == "weights":
            others = [theirs for other, theirs in kin if other["architecture"] == run["architecture"]]
            shown = _end_of(value, [theirs[key] for theirs in others if key in theirs])
        else:
            others = [theirs for other, theirs in kin if key in ("architecture", "epochs") or other.get("recipe")]
            shown = value
        if value is not None and any(value != theirs.get(key) for theirs in others):
            said.append(str(shown) if key == "architecture" else f"{key} {shown}")
    if run["seed"] is not None and not run.get("recipe") and any(other.get("recipe") for other, _ in kin):
        said.append("recipe unknown")
    return ", ".join(said)


def _end_of(path: str, paths: Iterable[str]) -> str:
    """As much of the end of a path as no other one has."""
    parts = Path(path).parts
    ends = ("/".join(parts[-n:]) for n in range(1, len(parts)))
    return next((end for end in ends if not any(p != path and p.endswith(end) for p in paths)), path)


def decided(run: Run) -> str:
    """Among which classes is decided, where a model knows more of them than the images show; else ''."""
    found = run.get("decision")
    if not found:
        return ""
    among = f"all {found['known']}" if found["among"] == found["known"] else f"these {found['among']}"
    return f"{found['classes']} of {found['known']} ({found['names']}), decided among {among}"


def baselines(runs: list[Run]) -> list[int | None]:
    """For each run the index of the `none` that it is compared with; None where there is none, and for `none`.

    It was measured in the same way (`setup`) and trained alike: architecture, epochs and seed are the run's; so is
    the placement where there is such a one, else it is home; then so is the recipe. The first of several.
    """
    setups = [setup(run) for run in runs]

    def alike(i: int, j: int) -> bool:
        same = all(runs[i][key] == runs[j][key] for key in ("architecture", "epochs", "seed"))
        return base_name(runs[j]) == "none" and same and setups[i] == setups[j]

    found: list[int | None] = []
    for i, run in enumerate(runs):
        able = [j for j in range(len(runs)) if alike(i, j)] if base_name(run) != "none" else []
        ranked = [j for place in (run["placement"], "home") for j in able if runs[j]["placement"] == place]
        ranked.sort(
            key=lambda j: (runs[j]["placement"] != run["placement"], runs[j].get("recipe") != run.get("recipe"))
        )
        found.append(ranked[0] if ranked else None)
    return found


def compared_with(run: Run) -> str:
    """Which `none` the differences of a run are to; '' if it has none."""
    other = run.get("difference_to_none")
    return which(other | {"label": other["baseline"]}) if other else ""


def which(run: Run) -> str:
    extra = [f"trained {run['placement']}"] if run.get("placement") else []
    extra += [f"seed {run['seed']}"] if run.get("seed") is not None else []
    return f"{run['label']}" + (f" ({', '.join(extra)})" if extra else "")


def shift_variant(run: Run) -> str | None:
    """The variant of the translation probe that the table shows: canvas where there is one, else crop."""
    variants = run["probes"].get("translation", {}).get("variants", {})
    return next((v for v in ("canvas", "crop", "circular") if "patch" in variants.get(v, {})), None)


def size_kinds(run: Run) -> tuple[str, ...]:
    """Of `SIZE_KINDS` those that were measured at several sizes."""
    return tuple(kind for kind in SIZE_KINDS if len(sizes_of(run, kind)) > 1)


def shifts_of(run: Run) -> dict[str, Any]:
    variant = shift_variant(run)
    return run["probes"]["translation"]["variants"][variant] if variant else {}


def sizes_of(run: Run, kind: str) -> list[dict[str, Any]]:
    return run["probes"].get("resolution", {}).get("kinds", {}).get(kind, {}).get("rows", [])


@dataclass
class Column:
    """One column of the table; `pick` gives its interval, or None where a run does not have it."""

    title: str
    pick: Callable[[Run], Interval | None]
    note: str
    key: str  # of the per-image score that it is the mean of (`probes.scores`)
    delta: Callable[[Run], Interval | None] = lambda run: None  # difference to `none`, shown in the page


@dataclass
class Group:
    """Runs that can stand in one table."""

    runs: list[Run]
    variant: str | None
    kinds: tuple[str, ...]
    columns: list[Column] = field(default_factory=list)
    apart: str = ""  # what tells it from other groups of the same data, e.g. "object_size 8"

    @property
    def data(self) -> str:
        return str(self.runs[0]["data"]["name"])

    @property
    def placed(self) -> bool:
        return any(run["placement"] for run in self.runs)

    @property
    def images(self) -> int:
        return int(self.runs[0]["images"])


def row_at_scale(run: Run, kind: str, scale: float) -> dict[str, Any] | None:
    """The square enlargement nearest to `scale`, under the first policy listed."""
    rows = [row for row in sizes_of(run, kind) if row["scale"][0] == row["scale"][1]]
    near = [row for row in rows if abs(row["scale"][0] - scale) <= 0.15]
    return min(near, key=lambda row: abs(row["scale"][0] - scale), default=None)


def groups(results: dict[str, Any]) -> list[Group]:
    def key(run: Run) -> tuple[Any, ...]:
        kinds = run["data"]["name"], str(shift_variant(run)), size_kinds(run)
        return *kinds, json.dumps(setup(run), sort_keys=True)

    found = []
    for _, members in itertools.groupby(sorted(results["runs"], key=key), key=key):
        runs = ordered(members)
        group = Group(runs, shift_variant(runs[0]), size_kinds(runs[0]))
        group.columns = _columns(group)
        found.append(group)
    for group in found:
        group.apart = ", ".join(_apart(group, [other for other in found if other.data == group.data]))
    return found


def _apart(group: Group, others: list[Group]) -> list[str]:
    """What of a group's setup is not the same in all of `others`, for its title."""
    setups = [setup(other.runs[0]) for other in others]
    mine = setup(group.runs[0])
    varied = [
        key
        for key in mine
        if key not in ("images", "shifts", "options") and any(mine[key] != s.get(key) for s in setups)
    ]
    return [f"{key} {'x'.join(map(str, v)) if isinstance(v := mine[key], list) else v}" for key in varied]


def _columns(group: Group) -> list[Column]:
    patch = shifts_of(group.runs[0]).get("patch")
    canvas = group.variant == "canvas"
    home = "home" if canvas else "accuracy"
    where = (
        "with the object where training at home has it: anywhere within the first patch of the corner"
        if canvas
        else "on the images as they are"
    )
    note = f"accuracy {where}; read everything else beside it"
    columns = [Column(home, lambda run: run["accuracy"], note, "accuracy")]
    if patch:
        key = f"translation/{group.variant}/patch/"
        others = len(patch["shifts"]) - 1
        columns += [
            Column(
                "unseen positions" if canvas else f"shifted ({group.variant})",
                lambda run: shifts_of(run)["patch"]["mean_shifted"],
                f"mean accuracy over the {others} whole-patch "
                + ("positions other than the corner (0, 0)" if canvas else f"shifts ({group.variant})")
                + ("; training at home has not seen them" if canvas else ""),
                key + "mean_shifted",
            ),
            Column(
                "worst position" if canvas else "worst shift",
                lambda run: shifts_of(run)["patch"]["worst"],
                f"the worst of all {others + 1}, chosen on one half of the images and scored on the other, both ways",
                key + "worst",
            ),
            Column(
                "consistency (pairwise)",
                lambda run: shifts_of(run)["patch"]["consistency"]["pairwise"],
                "share of pairs of positions with the same decision, right or wrong; a constant answer has 100",
                key + "pairwise",
            ),
        ]
    for kind, (scale, label) in itertools.product(group.kinds, ((1.5, "1.5x"), (2.0, "2x"))):
        rows = [row for run in group.runs if (row := row_at_scale(run, kind, scale))]
        if rows:
            larger, meaning = SIZE_KINDS[kind]
            sizes = " or ".join(dict.fromkeys(f"{row['size'][0]}x{row['size'][1]} px" for row in rows))
            columns.append(
                Column(
                    f"{label} {larger}",
                    functools.partial(_accuracy_at, kind, scale),
                    f"accuracy with both sides {label} ({sizes}): {meaning}",
                    f"resolution/{kind}/" + "x".join(map(str, rows[0]["size"])),
                    functools.partial(_difference_at, kind, scale),
                )
            )
    return columns


def _accuracy_at(kind: str, scale: float, run: Run) -> Interval | None:
    row = row_at_scale(run, kind, scale)
    return row["accuracy"] if row else None


def _difference_at(kind: str, scale: float, run: Run) -> Interval | None:
    row = row_at_scale(run, kind, scale)
    return difference(run, kind, row["size"], row["policy"]) if row else None


def difference(run: Run, kind: str, size: list[int], policy: str) -> Interval | None:
    for entry in (run.get("difference_to_none") or {}).get("rows", []):
        if entry["kind"] == kind and entry.get("size") == size and entry.get("policy") == policy:
            return entry["difference"]
    return None


def over_seeds(runs: Iterable[Run]) -> list[Run]:
    """For figures and long tables: one run in the place of those that differ in nothing but the seed, which it names as
    `seeds`. Its numbers are their means, its intervals reach from the lowest seed to the highest."""
    families: dict[str, list[Run]] = {}
    for i, run in enumerate(runs):
        alone = i if run["seed"] is None else None
        key = json.dumps([run["encoding"], run["placement"], settings(run), alone], sort_keys=True)
        families.setdefault(key, []).append(run)
    return [
        one[0] if len(one) == 1 else _merged(one) | {"seeds": [run["seed"] for run in one]} for one in families.values()
    ]


def _merged(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if any(part is None for part in parts):
        return None
    interval = next((part for part in parts if isinstance(part, dict) and "low" in part), None)
    if interval is not None:  # some may be numbers alone
        values = [part["value"] if isinstance(part, dict) else part for part in parts]
        low, high = min(values), max(values)
        return interval | {"value": min(max(sum(values) / len(values), low), high), "low": low, "high": high}
    if all(isinstance(part, dict) for part in parts):
        return {key: _merged([part[key] for part in parts]) for key in first if all(key in part for part in parts)}
    if all(isinstance(part, list) and len(part) == len(first) for part in parts):
        return [_merged(items) for items in zip(*parts)]
    if all(isinstance(part, str) for part in parts):
        return " / ".join(dict.fromkeys(parts))
    if all(part == first for part in parts) or not all(isinstance(part, int | float) for part in parts):
        return first
    return sum(parts) / len(parts)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
