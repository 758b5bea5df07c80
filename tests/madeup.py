"""Made-up results of evaluations, and what a page holds."""

import copy
import re
from html.parser import HTMLParser

import pytest

from vitpos import report, stats

SHIFTS = [[y, x] for y in (0, 4, 8) for x in (0, 4, 8)]


def interval(value, n=100):
    return stats.accuracy([1] * round(value * n) + [0] * (n - round(value * n))).as_dict()


def translation(levels, variant="canvas"):
    group = {
        "shifts": SHIFTS,
        "accuracy": [interval(v) for v in levels],
        "mean_shifted": interval(sum(levels[1:]) / 8),
        "worst": interval(min(levels)) | {"shifts": [[8, 8], [8, 8]]},
        "consistency": {"pairwise": interval(0.5), "vs_reference": interval(0.6)},
        "by_distance": [{"distance": d, "shifts": 1, "accuracy": interval(v)} for d, v in zip((0, 4, 8), levels)],
        "logit_change": {
            "largest": 3e-6,
            "decisions": 800,
            "differing_decisions": 2,
            "images_with_a_difference": 1,
        },
    }
    subpatch = {**group, "by_distance": group["by_distance"][:2]}
    return {
        "definitions": {"worst": "a definition"},
        "patch_size": [4, 4],
        "variants": {variant: {"patch": group, "subpatch": subpatch}},
    }


def resolution(kind="canvas"):
    rows = [
        {"size": [s, s], "scale": [s / 24] * 2, "policy": "extrapolate", "accuracy": interval(v)}
        for s, v in ((24, 0.9), (36, 0.61), (48, 0.37))
    ]
    return {"definitions": {kind: "another"}, "kinds": {kind: {"rows": rows}}}


def run(encoding, placement="home", seed=0, variant="canvas", kind="canvas", data="digits"):
    levels = [0.9] * 9 if encoding == "none" else [0.95 - 0.1 * i for i in range(9)]
    return {
        "label": f"{encoding}-{placement}",
        "encoding": encoding,
        "placement": placement,
        "seed": seed,
        "epochs": 3,
        "architecture": "vit_tiny_patch16_224",
        "parameters": 123456,
        "checkpoint": "runs/x/last.safetensors",
        "trained": True,
        "data": {"name": data},
        "image_size": [24, 24],
        "images": 100,
        "majority_class": 0.1,
        "accuracy": interval(0.93),
        "probes": {"translation": translation(levels, variant), "resolution": resolution(kind)},
    }


def results(*runs):
    about = {"command": "python eval.py runs=runs", "versions": {"torch": "2.9"}}
    return {"schema": report.SCHEMA, "provenance": about, "runs": list(runs)}


def changed(one, path, value):
    one = copy.deepcopy(one)
    *parents, last = path.split(".")
    target = one
    for key in parents:
        target = target[key]
    target[last] = value
    return one


class Page(HTMLParser):
    """Collects ids, and everything that a browser would fetch; counts scripts."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.fetched, self.text, self.scripts = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            outside = name in ("src", "href", "xlink:href", "srcset", "data") and not (value or "").startswith("#")
            if outside or name.startswith("on"):
                self.fetched.append((tag, name, value))
        if tag in ("link", "iframe", "object"):
            self.fetched.append((tag, "", ""))
        self.scripts += tag == "script"

    def handle_data(self, data):
        self.text.append(data)
        self.fetched += re.findall(r"@import.*|url\((?!#)[^)]*\)", data)


def plain_page(results):
    """The HTML page without its figures, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.page, "drawings", lambda *_: [])
        return report.to_html(results)
