"""What is said beside a group's numbers: its title, its legend, checks of the measurement, why cells are empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitpos.report.groups import Group, base_name, compared_with, decided, row_at_scale, shifts_of
from vitpos.tables import percent, span


def title(group: Group) -> str:
    shift = {"canvas": "object moved on its canvas", "crop": "image shifted over black", "circular": "image rolled"}
    size = {"canvas": "canvas enlarged", "upsample": "image resized"}
    data = f"{group.data} ({group.apart})" if group.apart else group.data
    parts = [f"{data}: {group.images} test images", shift.get(str(group.variant)), size.get(str(group.kind))]
    return ", ".join(part for part in parts if part)


def legend(group: Group) -> list[str]:
    """What the columns and intervals are over, and what not to conclude."""
    lines = [f"{column.title}: {column.note}." for column in group.columns]
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
    if any(row_at_scale(run, group.kind, 2.0) and compared_with(run) for run in group.runs):
        lines.append("Larger sizes change more than positions: read them as the difference to none on the same images.")
    return lines


def certificates(group: Group) -> list[str]:
    """How far `none` is from exact invariance: certain in theory, so it checks the measurement itself."""
    lines = []
    for run in group.runs:
        patch = shifts_of(run).get("patch")
        if base_name(run) == "none" and patch and group.variant in ("canvas", "circular"):
            change = patch["logit_change"]
            lines.append(
                f"none (seed {run['seed']}): largest logit change between whole-patch positions "
                f"{change['largest']:.1e}; {change['differing_decisions']} of {change['decisions']} decisions differ"
            )
    return lines


def remarks(group: Group) -> list[str]:
    """Why cells are empty, and what else a row needs said."""
    found: dict[str, None] = {}
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
                found[f"not measured ({base_name(run)}): {', '.join(place)}: {why}"] = None
        for name, entry in run["probes"].get("resolution", {}).get("kinds", {}).items():
            for refused in entry.get("refused", [])[:1]:
                count = len(entry["refused"])
                found[f"not measured ({base_name(run)}): {name} at {count} sizes: {refused['why']}"] = None
    return list(found)


def _not_applicable(entry: dict[str, Any], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every place in a probe's results that says why something does not apply, at any depth."""
    if "not_applicable" in entry:
        yield place, entry["not_applicable"]
        return
    for name, inner in entry.items():
        if isinstance(inner, dict) and name not in ("definitions", "options"):
            hidden = name in ("variants", "kinds")  # mere containers
            yield from _not_applicable(inner, place if hidden else (*place, name))
