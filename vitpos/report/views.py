"""What a probe says of its own (`vitpos/probes/_views.py`): tables, curves and maps of a group's runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitpos.report.grouping import Group, Run
from vitpos.tables import number


@dataclass
class Shown:
    """One view of a probe, with the runs of a group that have it, each with its own numbers."""

    probe: str
    view: dict[str, Any]
    runs: list[tuple[Run, dict[str, Any]]]

    @property
    def note(self) -> str:
        """What to see; the number of images, where a probe took some of them; and how a table shows seeds."""
        used = {run["probes"][self.probe].get("images_used", run["images"]) for run, _ in self.runs}
        on = f" On {min(used)} images." if used != {run["images"] for run, _ in self.runs} else ""
        seeds: list[int] = next((run["seeds"] for run, _ in self.runs if "seeds" in run), [])
        numbers = any(isinstance(cell, dict) for _, view in self.runs for row in view.get("rows", []) for cell in row)
        if seeds and self.view["kind"] == "table":
            on += f" Mean of seeds {', '.join(map(str, seeds))}"
            on += "; small numbers from the lowest seed to the highest." if numbers else "."
        return f"{self.view['note']}{on}"

    @property
    def name(self) -> str:
        return f"probe-{self.probe}-{self.view['key']}"


def views(group: Group, kind: str) -> list[Shown]:
    """The views of one kind (table, curves, maps) of a group's runs, by probe."""
    found: dict[tuple[str, str], Shown] = {}
    for run in group.runs:
        for probe, entry in run["probes"].items():
            for view in entry.get("views", []):
                if view["kind"] == kind:
                    found.setdefault((probe, view["key"]), Shown(probe, view, [])).runs.append((run, view))
    return list(found.values())


def shown(value: Any, unit: str) -> tuple[str, str]:
    """A cell's number and its interval, as text; either may be empty."""
    if isinstance(value, dict):
        low, high = (number(value[key], unit) for key in ("low", "high"))
        return number(value["value"], unit), f"{low} to {high}"
    if value is None:
        return "–", ""
    return (value if isinstance(value, str) else number(value, unit)), ""
