"""The report from made-up numbers: what stands beside what, what is said, and that the page needs nothing else."""

import ast
import copy
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

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
    return {"definitions": {"worst": "a definition"}, "variants": {variant: {"patch": group, "subpatch": subpatch}}}


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
        "accuracy": interval(0.93),
        "probes": {"translation": translation(levels, variant), "resolution": resolution(kind)},
    }


def results(*runs):
    about = {"command": "python eval.py runs=runs", "versions": {"torch": "2.9"}}
    return {"schema": report.SCHEMA, "provenance": about, "runs": list(runs)}


RESULTS = results(
    run("none"), run("sincos2d", "uniform"), run("rope_axial(theta=50.0) + ape1d"), run("sincos2d"), run("ape1d")
)


def printed(result, width=100, **kwargs):
    out = io.StringIO()
    report.print_table(result, Console(file=out, width=width, **kwargs))
    return out.getvalue()


def test_controls_stand_beside_their_encoding_and_none_is_last():
    rows = [(r["encoding"], r["placement"]) for r in report.groups(RESULTS)[0].runs]
    assert rows == [
        ("ape1d", "home"), ("rope_axial(theta=50.0) + ape1d", "home"), ("sincos2d", "home"), ("sincos2d", "uniform"),
        ("none", "home"),
    ]  # fmt: skip
    titles = [column.title for column in report.groups(RESULTS)[0].columns]
    assert titles == [
        "home", "unseen positions", "worst position", "consistency (pairwise)", "1.5x canvas", "2x canvas",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 160])
def test_table_is_plain_text_of_the_asked_width_when_not_on_a_terminal(width):
    text = printed(RESULTS, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "\x1b" in printed(RESULTS, width, force_terminal=True)  # colours where there is a terminal
    for number in ("93.0", "61.0", "37.0", "86.3–96.6"):
        assert number in text


def test_table_says_what_intervals_are_over_and_what_not_to_conclude():
    text = " ".join(printed(RESULTS).split())
    assert "95% over images, for this one model" in text
    assert "says nothing about the encoding in general" in text
    assert "largest logit change between whole-patch positions 3.0e-06; 2 of 800 decisions differ" in text
    for column in report.groups(RESULTS)[0].columns:
        assert f"{column.title}: " in text
    # Without `none` there is nothing to certify, and no difference to point to.
    alone = printed(results(run("ape1d")))
    assert "logit change" not in alone and "difference to none" not in alone  # noqa: PT018


def test_seeds_are_rows_of_their_own():
    text = printed(results(run("none"), run("none", seed=1)))
    assert "seed 0" in text
    assert "seed 1" in text
    assert "seed 0" not in printed(results(run("ape1d")))
    assert len(report.groups(results(run("none"), run("none", seed=1)))[0].runs) == 2


def test_runs_measured_differently_do_not_share_a_table():
    mixed = results(run("none"), run("none", None, variant="crop", kind="upsample", data="cifar10"))
    groups = report.groups(mixed)
    assert [(g.data, g.variant, g.kind) for g in groups] == [
        ("cifar10", "crop", "upsample"),
        ("digits", "canvas", "canvas"),
    ]
    assert groups[0].columns[0].title == "accuracy"
    assert "shifted (crop)" in printed(mixed)
    assert not report.certificates(groups[0])  # cut-off content is no invariance


def test_missing_cells_say_why():
    broken = copy.deepcopy(run("ape1d"))
    broken["probes"]["resolution"]["kinds"]["canvas"] = {"not_applicable": "no blank canvas here"}
    broken["probes"]["resolution"]["kinds"]["upsample"] = {
        "rows": [],
        "refused": [{"size": [9, 9], "why": "takes one size"}],
    }
    text = " ".join(printed(results(broken)).split())
    assert "no blank canvas here" in text
    assert "takes one size" in text
    report.to_html(results(broken))
    untrained = run("native") | {"trained": False}
    assert "random weights" in printed(results(untrained))
    bare = run("ape1d") | {"probes": {}}
    assert "93.0" in printed(results(bare))
    report.to_html(results(bare))


def test_one_colour_an_encoding_and_grey_for_none():
    look = report.styles(results(*(run(f"e{i}") for i in range(20)), run("none")))
    assert look["none"][0] == report.GREY
    assert report.GREY not in [colour for name, (colour, _) in look.items() if name != "none"]
    assert len(set(look.values())) == 21  # beyond the palette the marker tells them apart
    assert len({look[f"e{i}"][0] for i in (0, 1, 10, 11, 12, 13, 14, 15)}) == 8


def test_heat_map_shows_the_measured_numbers_where_they_were_measured():
    group = report.groups(results(run("ape1d")))[0]
    axis = report.drawings(RESULTS, group)[0].draw(1).axes[0]
    shown = {t.get_position(): t.get_text() for t in axis.texts}
    assert shown[(0.5, 0.5)] == "95"
    assert shown[(1.5, 0.5)] == "85"  # dx = 4, one to the right
    assert shown[(0.5, 1.5)] == "65"  # dy = 4, one row down
    assert axis.yaxis_inverted()


@pytest.mark.parametrize(("variant", "kind"), [("canvas", "canvas"), ("crop", "upsample"), ("circular", "canvas")])
def test_files(tmp_path, variant, kind):
    result = results(run("none", variant=variant, kind=kind), run("ape1d", variant=variant, kind=kind))
    written = {path.relative_to(tmp_path).as_posix() for path in report.save(result, tmp_path)}
    figures = {f"figures/{name}.png" for name in ("position", "shift", f"resolution-{kind}")}
    assert written == {"results.json", "report.html"} | figures
    assert report.read(tmp_path / "results.json") == result
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in figures)


class Page(HTMLParser):
    """Collects ids, and everything that a browser would fetch or run."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.fetched, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            outside = name in ("src", "href", "xlink:href", "srcset", "data") and not (value or "").startswith("#")
            if outside or name.startswith("on") or tag in ("script", "link", "iframe", "object"):
                self.fetched.append((tag, name, value))

    def handle_data(self, data):
        self.text.append(data)
        self.fetched += re.findall(r"@import.*|url\((?!#)[^)]*\)", data)


@pytest.fixture(scope="module")
def page_text():
    return report.to_html(RESULTS)


def test_page_is_self_contained_and_complete(page_text):
    page = Page(page_text)
    assert page.fetched == []
    assert Page('<img src="https://example.com/x.png"><script></script>').fetched  # the check can fail
    assert Page("<style>a { background: url(x.png) }</style>").fetched
    assert len(page.ids) == len(set(page.ids)) > 0
    text = " ".join(" ".join(page.text).split())
    for needed in ("python eval.py runs=runs", "a definition", "torch 2.9", report.SCHEMA, "What this does not show"):
        assert needed in text
    for link in re.findall(r'href="#([^"]+)"', page_text):
        assert link in page.ids


def test_page_escapes_what_it_shows():
    page = report.to_html(results(run("x<script>alert(1)</script>")))
    assert "<script" not in page
    assert html.escape("x<script>") in page


def test_page_shows_the_difference_to_none():
    one = run("ape1d")
    one["difference_to_none"] = {
        "baseline": "none-home",
        "rows": [
            {"kind": "canvas", "size": [36, 36], "policy": "extrapolate"}
            | {"difference": stats.paired_difference([1, 1, 0, 0], [0, 1, 1, 1]).as_dict()}
        ],
    }
    assert "Δ −25.0" in report.to_html(results(one, run("none")))
    assert "Δ −" not in report.to_html(results(run("ape1d"), run("none")))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "list"), ('{"schema": "vitpos.results/0"}', "results/0")]
)
def test_unknown_results_are_refused(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        report.read(tmp_path / "r.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = report.write(tmp_path / "sub" / "x.txt", "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in target.parent.iterdir()] == ["x.txt"]


def test_not_a_number_never_reaches_the_file():
    with pytest.raises(ValueError, match="JSON compliant"):
        report.to_json(results(run("none") | {"accuracy": float("nan")}))
    json.loads(report.to_json(RESULTS))


def test_report_imports_no_torch_and_no_model_code():
    tree = ast.parse(Path(report.__file__).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    assert "matplotlib" in found
    assert not found & {"torch", "timm", "torchvision", "kornia", "vitpos"}
