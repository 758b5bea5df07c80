"""What is said beside a group's numbers: its title, its legend, checks of the measurement, why cells are empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitpos.report.grouping import (
    Group,
    Run,
    apart,
    base_name,
    compared_with,
    decided,
    flat,
    setup,
    shifts_of,
    sizes_of,
)
from vitpos.tables import percent, span

POLICIES = {  # what an encoding does at a size beyond that of training
    "interpolate": "all coordinates are scaled into the training grid, those of an object that stays where it was too",
    "extrapolate": "coordinates run on",
}


def title(group: Group) -> str:
    shift = {"canvas": "object moved on its canvas", "crop": "image shifted over black", "circular": "image rolled"}
    size = {"canvas": "canvas enlarged", "upsample": "image resized"}
    data = f"{group.data} ({group.apart})" if group.apart else group.data
    parts = [
        f"{data}: {group.images} test images",
        shift.get(str(group.variant)),
        *(size[kind] for kind in group.kinds),
    ]
    return ", ".join(part for part in parts if part)


def told(run: Run, runs: list[Run]) -> list[str]:
    """What is said of a run below its encoding, so that it is told from the others of its table, `runs`."""
    said = [apart(run, runs), f"trained {run['placement']}" if run["placement"] else ""]
    if "seeds" in run:
        said.append(f"{len(run['seeds'])} seeds")
    elif run["seed"] is not None and len({other["seed"] for other in runs} - {None}) > 1:
        said.append(f"seed {run['seed']}")
    return [line for line in said if line]


def about(group: Group) -> str:
    """The images, what training saw of them, and what a constant answer reaches."""
    run = group.runs[0]
    h, w = run["image_size"]
    patch = setup(run)["patch_size"]
    text = f"{group.images} test images of {group.data}, {h}x{w} pixels"
    text += f" in patches of {patch[0]}x{patch[1]}" if patch else ""
    text += f"; always answering the most frequent class is right on {percent(run['majority_class'])}%."
    places = {run["placement"] for run in group.runs}
    if "home" in places:
        text += " Trained home: with objects in the top left corner only, within a patch of it."
    if "uniform" in places:
        text += " Trained uniform: with objects anywhere on the canvas."
    return text


def recipes(runs: list[Run]) -> list[tuple[str, str]]:
    """How the runs were trained: each recipe with its encodings; nothing where that is not known."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        if run.get("recipe"):
            text = ", ".join(f"{key} {value}" for key, value in flat(run["recipe"]).items() if value is not None)
            found.setdefault(text, {})[base_name(run)] = None
    return [(", ".join(names), text) for text, names in found.items()]


def legend(group: Group) -> list[str]:
    """What the columns and intervals are over, and what not to conclude."""
    lines = [f"{column.title}: {column.note}." for column in group.columns]
    lines += policies(group)
    lines += [
        f"All in percent, on {group.images} test images. Each interval is 95% over images, for this one model "
        "(positions of one image are not independent: clustered by image).",
        "One row is one model. An interval over images says nothing about the encoding in general: "
        "another seed can move a row by more than its interval. Several seeds of each encoding (seed=0,1,2) can be "
        "compared.",
    ]
    if any(compared_with(run) for run in group.runs):
        lines.append(
            "A star at a difference: McNemar's exact test of these two models, p ≤ 0.05 after Holm's correction for "
            "all differences of this evaluation (** 0.01, *** 0.001)."
        )
    if group.kinds and any(compared_with(run) for run in group.runs):
        lines.append("Larger sizes change more than positions: read them as the difference to none on the same images.")
    return lines


def policies(group: Group) -> list[str]:
    """What each encoding did with positions beyond its training grid: one line, or none."""
    found: dict[str, dict[str, None]] = {}
    for run in group.runs:
        for kind in group.kinds:
            policy = sizes_of(run, kind)[0]["policy"]
            found.setdefault(policy, {})[base_name(run)] = None
    known = [
        f"{policy} ({', '.join(names)}{': ' + POLICIES[policy] if policy in POLICIES else ''})"
        for policy, names in found.items()
        if policy != "-"
    ]
    if not known:
        return []
    return [
        "At larger sizes there are places that training had not, and each encoding follows its own policy: "
        f"{'; '.join(known)}. Differences there are those of encoding and policy together; resolution.policies=[...] "
        "measures several."
    ]


def certificates(group: Group) -> list[str]:
    """How far `none` is from exact invariance: certain in theory, so it checks the measurement itself."""
    runs = [run for run in group.runs if base_name(run) == "none" and shifts_of(run).get("patch")]
    if not runs or group.variant not in ("canvas", "circular"):
        return []
    seeds = ", ".join(str(run["seed"]) for run in runs)
    found = [shifts_of(run)["patch"]["logit_change"] for run in runs]
    differing, decisions = (sum(change[key] for change in found) for key in ("differing_decisions", "decisions"))
    return [
        f"none (seed {seeds}): largest logit change between whole-patch positions "
        f"{max(change['largest'] for change in found):.1e}; {differing} of {decisions} decisions differ"
    ]


def remarks(group: Group) -> list[str]:
    """Why cells are empty, and what else a row needs said."""
    found: dict[str, None] = {}
    lacking: dict[str, dict[str, None]] = {}
    for run in group.runs:
        if not run["trained"]:
            found[f"{base_name(run)} ({run['label']}): random weights, never trained; its accuracy means nothing"] = (
                None
            )
        if classes := decided(run):
            found[f"classes of the test images: {classes} classes of the model"] = None
        if full := run.get("float32"):
            found[
                f"{base_name(run)} ({run['label']}): computed in bf16; its plain decisions agree with float32 on "
                f"{percent(full['agreement']['value'])}% ({span(full['agreement'])}) of the images, where accuracy is "
                f"{percent(full['accuracy']['value'])}%"
            ] = None
        for probe, entry in run["probes"].items():
            for place, why in _not_applicable(entry, (probe,)):
                lacking.setdefault(f"{' of '.join(reversed(place))}: {why}", {})[base_name(run)] = None
        for name, entry in run["probes"].get("resolution", {}).get("kinds", {}).items():
            for refused in entry.get("refused", [])[:1]:
                sizes = f"{count} sizes" if (count := len(entry["refused"])) > 1 else "one size"
                lacking.setdefault(f"{name} at {sizes}: {refused['why']}", {})[base_name(run)] = None
    encodings = dict.fromkeys(map(base_name, group.runs))
    for what, names in lacking.items():
        who = "" if names.keys() == encodings.keys() else f" ({', '.join(names)})"
        found[f"not measured{who}: {what}"] = None
    return list(found)


def _not_applicable(entry: dict[str, Any], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every place in a probe's results that says why something does not apply, at any depth."""
    if "not_applicable" in entry:
        yield place, entry["not_applicable"]
        return
    for name, inner in entry.items():
        if isinstance(inner, dict) and name not in ("definitions", "options"):
            hidden = name in ("variants", "kinds", "nets", "tasks")  # mere containers
            yield from _not_applicable(inner, place if hidden else (*place, name))
