"""One self-contained HTML page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jinja2

from vitpos.report.compare_tables import covers, explained, heading, leaders, rank_text, scattered, sign, unit_of
from vitpos.report.figures import drawings, styles
from vitpos.report.files import SCHEMA
from vitpos.report.grouping import Group, Run, compared_with, difference, groups, over_seeds, sizes_of
from vitpos.report.views import shown, views
from vitpos.report.words import about, certificates, legend, policies, recipes, remarks, title, told
from vitpos.tables import change, marks, number, percent, points, span


def to_html(results: dict[str, Any]) -> str:
    """One self-contained page: no request, light and dark by the reader's setting. Its one script sorts tables; without
    it everything is there all the same."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "percent": percent,
        "span": span,
        "points": points,
        "compared_with": compared_with,
        "told": lambda run, runs: ", ".join(told(run, runs)),
    }
    filters |= {"shown": shown, "marks": marks, "sign": sign, "rank_text": rank_text, "unit_of": unit_of}
    environment.filters |= filters | {"number": number, "change": change}
    look = styles(results)
    found = groups(results)
    definitions: dict[str, dict[str, str]] = {}
    for run in results["runs"]:
        for name, probe in run["probes"].items():
            definitions.setdefault(name, probe["definitions"])
    return environment.get_template("report.html").render(
        results=results,
        groups=[_page_group(results, group, i) for i, group in enumerate(found)],
        colours={name: colour for name, (colour, _) in look.items()},
        comparisons=[
            {
                "title": heading(one),
                "about": about(found[one["group"]]),
                "leaders": leaders(one),
                "scattered": scattered(one),
                "seeds": min(len(row["seeds"]) for row in one["rows"]),
                **one,
                "policies": policies(found[one["group"]]),
                "legend": explained(one),
            }
            for one in results.get("comparison", [])
        ],
        definitions=definitions,
        recipes=recipes(results["runs"]),
        schema=SCHEMA,
    )


def _page_group(results: dict[str, Any], group: Group, index: int) -> dict[str, Any]:
    figures = [
        {"title": d.title, "caption": d.caption, "wide": d.svg(d.columns), "narrow": d.svg(2 if d.columns == 5 else 1)}
        for d in drawings(results, group, f"g{index}-")
    ]
    sizes = []
    for kind in ("canvas", "upsample"):
        measured = {tuple(row["size"]): None for run in group.runs for row in sizes_of(run, kind)}
        if len(measured) > 1:
            sizes.append(
                {
                    "kind": kind,
                    "sizes": [list(size) for size in sorted(measured, key=lambda s: (s[0] != s[1], s))],
                    "rows": [entry for run in group.runs for entry in _size_rows(run, kind)],
                }
            )
    return {
        "title": title(group),
        "about": about(group),
        "data": group.data,
        "images": group.images,
        "placed": group.placed,
        "runs": group.runs,
        "columns": group.columns,
        "legend": legend(group),
        "certificates": certificates(group),
        "remarks": remarks(group),
        "figures": figures,
        "sizes": sizes,
        "shifts": [row for run in group.runs for row in _shift_rows(run)],
        "tables": views(dataclasses.replace(group, runs=over_seeds(group.runs)), "table"),
        "covered": covers(results, index, group),
        "compared": any(compared_with(run) for run in group.runs),
    }


def _shift_rows(run: Run) -> list[dict[str, Any]]:
    """One row a variant and group of shifts, everything measured there."""
    variants = run["probes"].get("translation", {}).get("variants", {})
    names = {"patch": "whole patches", "subpatch": "less than a patch"}
    return [
        {"run": run, "variant": variant, "reach": names[group], "count": len(entry["shifts"])} | entry
        for variant, found in variants.items()
        for group, entry in found.items()
        if group in names
    ]


def _size_rows(run: Run, kind: str) -> list[dict[str, Any]]:
    """One row a policy: accuracy and difference to `none` by size."""
    rows: dict[str, dict[str, Any]] = {}
    for row in sizes_of(run, kind):
        entry = rows.setdefault(row["policy"], {"run": run, "policy": row["policy"], "cells": {}})
        change = difference(run, kind, row["size"], row["policy"])
        entry["cells"][tuple(row["size"])] = {"accuracy": row["accuracy"], "difference": change}
    return list(rows.values())
