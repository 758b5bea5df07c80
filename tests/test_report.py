"""The report from made-up numbers: what stands beside what, what is said, and that the page needs nothing else."""

import ast
import copy
import html
import io
import json
import re
from pathlib import Path

import pytest
from madeup import SHIFTS, Page, changed, interval, plain_page, results, run
from rich.console import Console

from vitpos import report, stats
from vitpos.report import figures, grouping, words

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
    assert [(g.data, g.variant, g.kinds) for g in groups] == [
        ("cifar10", "crop", ("upsample",)),
        ("digits", "canvas", ("canvas",)),
    ]
    assert groups[0].columns[0].title == "accuracy"
    assert "shifted (crop)" in printed(mixed)
    assert not words.certificates(groups[0])  # cut-off content is no invariance


CANVAS = "probes.translation.variants.canvas"
APART = [
    ("data.object_size", 8), ("data.canvas", 32), ("image_size", [24, 28]), ("images", 99),
    ("probes.translation.patch_size", [8, 8]), (f"{CANVAS}.patch.shifts", [[0, 0], *SHIFTS]),
    (f"{CANVAS}.subpatch.shifts", SHIFTS[:4]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), APART, ids=lambda v: str(v)[-20:])
def test_what_was_measured_otherwise_is_neither_beside_it_nor_compared_with_it(path, value):
    none, other = run("none"), changed(run("ape1d"), path, value)
    assert len(report.groups(results(none, other))) == 2
    assert report.baselines([none, other]) == [None, None]
    assert report.baselines([none, run("ape1d")]) == [None, 0]


@pytest.mark.parametrize(
    "key", ["placement", "val_fraction", "workers", "crop_padding", "flip", "download", "augment", "erase", "train"]
)
def test_what_only_training_saw_is_no_difference(key):
    other = changed(run("ape1d"), f"data.{key}", "other")
    assert len(report.groups(results(run("none"), other))) == 1
    assert report.baselines([run("none"), other]) == [None, 0]


def test_groups_of_one_data_set_say_what_tells_them_apart():
    small = changed(run("ape1d"), "data.object_size", 8)
    large = changed(run("ape1d"), "data.object_size", 12)
    text = printed(results(small, large), 160)
    assert "digits (object_size 8): 100 test images" in text
    assert "digits (object_size 12): 100 test images" in text
    assert "digits: 100 test images" in printed(results(small))


def test_baseline_is_a_none_trained_alike():
    ours = run("ape1d")
    for kind, value in (
        ("seed", 1),
        ("epochs", 9),
        ("architecture", "vit_small_patch16_224"),
        ("placement", "uniform"),
    ):
        assert report.baselines([ours, run("none") | {kind: value}]) == [None, None], kind
    control = run("ape1d", "uniform")
    assert report.baselines([run("none", seed=1), run("none"), control]) == [None, None, 1]  # home, where it must
    assert report.baselines([run("none"), run("none", "uniform"), control, ours]) == [None, None, 1, 0]


def with_scales(*scales):
    rows = [
        {"size": [round(24 * s)] * 2, "scale": [s, s], "policy": "-", "accuracy": interval(0.5)} for s in (1.0, *scales)
    ]
    return changed(run("ape1d"), "probes.resolution.kinds.canvas.rows", rows)


@pytest.mark.parametrize(
    ("scales", "shown"),
    [
        ((1.5, 2.0), ["1.5x canvas", "2x canvas"]),
        ((1.4, 2.1), ["1.5x canvas", "2x canvas"]),
        ((1.3, 1.75, 2.25), []),
        ((3.0,), []),
    ],
)
def test_a_size_column_shows_that_size_only(scales, shown):
    columns = report.groups(results(with_scales(*scales)))[0].columns
    assert [c.title for c in columns if "canvas" in c.title] == shown
    for column, scale in zip([c for c in columns if c.title in shown], scales):
        assert f"({round(24 * scale)}x{round(24 * scale)} px)" in column.note  # what "about 1.5x" was


def with_both_kinds(encoding, policy="extrapolate"):
    one, resized = run(encoding), run(encoding, kind="upsample")
    one["probes"]["resolution"]["kinds"] |= resized["probes"]["resolution"]["kinds"]
    for found in one["probes"]["resolution"]["kinds"].values():
        for row in found["rows"]:
            row["policy"] = policy
    return one


def test_a_larger_canvas_and_a_resized_image_stand_side_by_side():
    both = results(with_both_kinds("ape1d", "interpolate"), with_both_kinds("rope_axial"), with_both_kinds("none", "-"))
    (group,) = report.groups(both)
    assert [c.title for c in group.columns][-4:] == ["1.5x canvas", "2x canvas", "1.5x resized", "2x resized"]
    assert group.columns[-1].key == "resolution/upsample/48x48"
    text = " ".join(printed(both).split())
    assert "canvas enlarged, image resized" in text
    assert "its own policy: interpolate (ape1d: all coordinates are scaled into the training grid" in text
    assert "extrapolate (rope_axial: coordinates run on). Differences there" in text
    assert "its own policy" not in printed(results(with_both_kinds("none", "-")))


@pytest.mark.parametrize(("width", "parts"), [(80, 2), (130, 1), (40, 4)])
def test_a_table_wider_than_the_console_goes_on_below(width, parts):
    text = printed(results(with_both_kinds("ape1d"), with_both_kinds("rope_axial")), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("encoding   ") == parts
    assert sum(line.startswith("rope_axial ") for line in text.splitlines()) == parts


def test_figures_draw_the_mean_of_seeds_and_how_far_they_lie():
    seeds = [changed(run("ape1d", seed=seed), f"{CANVAS}.patch.accuracy", [interval(v)] * 9)
             for seed, v in ((0, 0.2), (1, 0.3), (2, 0.7))]  # fmt: skip
    other = run("rpb") | {"recipe": {"train": {"lr": 0.1}}}
    one, two, alone = grouping.over_seeds([*seeds, other, other | {"recipe": {"train": {"lr": 0.2}}}])
    assert one["seeds"] == [0, 1, 2]
    (first, *_) = one["probes"]["translation"]["variants"]["canvas"]["patch"]["accuracy"]
    assert (first["value"], first["low"], first["high"]) == (pytest.approx(0.4), 0.2, 0.7)
    assert one["accuracy"]["low"] == one["accuracy"]["high"] == 0.93  # no seed differs
    assert one["probes"]["translation"]["variants"]["canvas"]["patch"]["shifts"] == SHIFTS
    errors = [changed(run("ape1d", seed=seed), "ece", value) for seed, value in ((0, 0.1), (1, interval(0.3)))]
    (mixed,) = grouping.over_seeds(errors)  # of a seed there may be no interval, but a number
    assert (mixed["ece"]["value"], mixed["ece"]["low"], mixed["ece"]["high"]) == (pytest.approx(0.2), 0.1, 0.3)
    assert "seeds" not in two  # another recipe is no other seed
    assert two["recipe"] != alone["recipe"]
    found = results(*seeds, run("none"))
    position, shift, *_ = figures.drawings(found, report.groups(found)[0])
    shown = [text.get_text() for text in position.draw(2).axes[0].texts]
    assert shown == ["40"] * 9
    assert "mean of seeds 0, 1, 2" in position.caption
    assert "from the lowest seed to the highest" in shift.caption
    assert "Bars of one seed: 95% over images" in shift.caption
    page = report.to_html(results(*(shown_run("rpb", level) | {"seed": i} for i, level in enumerate((0.2, 0.4)))))
    assert "What it means. Mean of seeds 0, 1; small numbers from the lowest seed to the highest." in page
    assert "<b>30.0</b><small>20.0 to 40.0</small>" in page
    single = results(seeds[0], run("none"))
    assert "seed to the highest" not in figures.drawings(single, report.groups(single)[0])[1].caption


def test_legend_holds_for_every_row_of_a_mixed_group():
    mixed = results(run("ape1d", "uniform"), run("native", None) | {"trained": False}, run("none", seed=1), run("rpb"))
    text = " ".join(words.legend(report.groups(mixed)[0]))
    for false in ("as training had it", "held-out", "one trained model", "difference to none"):
        assert false not in text
    caption = figures.drawings(mixed, report.groups(mixed)[0])[0].caption
    assert "home, as trained, is up to a patch away" in caption
    alone = report.groups(results(run("ape1d", "uniform")))[0]
    assert "as trained" not in figures.drawings(mixed, alone)[0].caption
    curves = figures.drawings(mixed, report.groups(mixed)[0])[1]
    assert "Grey: none, run none-home (trained home, seed 1)." in curves.caption


README = Path(__file__).parents[1] / "README.md"


def test_markdown_is_the_readmes_table():
    text = report.to_markdown(RESULTS)
    lines = text.splitlines()
    both = report.to_markdown(results(with_both_kinds("ape1d"), with_both_kinds("none"))).splitlines()
    assert "\n".join(both[:2]) in README.read_text()
    assert lines[2] == (
        "| `ape1d` | home | 93.0 (86.3–96.6) | 50.0 (40.4–59.6) | 15.0 (9.3–23.3) | 50.0 (40.4–59.6) "
        "| 61.0 (51.2–70.0) | 37.0 (28.2–46.8) |"
    )
    assert len(lines) == 2 + len(RESULTS["runs"])
    assert lines[-1].startswith("| `none` | home |")
    assert text.endswith("|\n")


def test_markdown_of_seeds_other_data_and_missing_cells():
    bare = run("a|b", None, data="cifar10", variant="crop", kind="upsample") | {"seed": None}
    bare["probes"]["resolution"]["kinds"] = {}
    text = report.to_markdown(results(run("none"), run("none", seed=1), bare))
    assert "| encoding | trained at | seed | home |" in text
    assert "| `none` | home | 1 | 93.0" in text
    assert "cifar10: 100 test images, image shifted over black\n\n| encoding | accuracy | shifted (crop) |" in text
    assert "| `a\\|b` | 93.0" in text
    partly = changed(run("ape1d"), "probes.resolution.kinds.canvas.rows", run("ape1d")["probes"]["resolution"]["kinds"]["canvas"]["rows"][:2])  # fmt: skip  # noqa: E501
    assert report.to_markdown(results(run("none"), partly)).splitlines()[2].endswith("| – |")


def test_a_folder_holds_one_evaluation(tmp_path):
    report.save(results(run("ape1d")), tmp_path, predictions=b"one")
    (tmp_path / "figures" / "mine.png").write_text("not ours")
    assert (tmp_path / "predictions.npz").read_bytes() == b"one"
    bare = run("ape1d") | {"probes": {}}
    report.save(results(bare), tmp_path, page=False)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")) == [
        "figures/mine.png", "predictions.npz", "results.json", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip
    report.save(results(bare, bare), tmp_path, page=False)
    assert not (tmp_path / "predictions.npz").exists()  # of one run; these are two
    with pytest.raises(ValueError, match="JSON"):
        report.save(results(run("none") | {"images": float("nan")}), tmp_path, predictions=b"two")
    assert not (tmp_path / "predictions.npz").exists()


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
    look = figures.styles(results(*(run(f"e{i}") for i in range(20)), run("none")))
    assert look["none"][0] == figures.GREY
    assert figures.GREY not in [colour for name, (colour, _) in look.items() if name != "none"]
    assert len(set(look.values())) == 21  # beyond the palette the marker tells them apart
    assert len({look[f"e{i}"][0] for i in (0, 1, 10, 11, 12, 13, 14, 15)}) == 8


def test_heat_map_shows_the_measured_numbers_where_they_were_measured():
    group = report.groups(results(run("ape1d")))[0]
    axis = figures.drawings(RESULTS, group)[0].draw(1).axes[0]
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
    assert written == {"results.json", "report.html", "table.md", "table.csv", "table.tex"} | figures
    assert report.read(tmp_path / "results.json") == result
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in figures)


@pytest.fixture(scope="module")
def page_text():
    return report.to_html(RESULTS)


def test_page_is_self_contained_and_complete(page_text):
    page = Page(page_text)
    assert page.fetched == []
    assert page.scripts == 1  # the one that sorts tables
    for text in (
        '<img src="https://example.com/x.png">',
        '<script src="x.js">',
        '<link href="x">',
        '<b onclick="x()">',
    ):
        assert Page(text).fetched  # the check can fail
    assert Page("<style>a { background: url(x.png) }</style>").fetched
    assert len(page.ids) == len(set(page.ids)) > 0
    text = " ".join(" ".join(page.text).split())
    for needed in ("python eval.py runs=runs", "a definition", "torch 2.9", report.SCHEMA, "What this does not show"):
        assert needed in text
    for link in re.findall(r'href="#([^"]+)"', page_text):
        assert link in page.ids


def test_page_escapes_what_it_shows():
    page = report.to_html(results(run("x<script>alert(1)</script>")))
    assert Page(page).scripts == 1
    assert "alert(1)</script>" not in page
    assert html.escape("x<script>") in page


def test_page_shows_the_difference_to_none():
    one = run("ape1d")
    one["difference_to_none"] = {
        "baseline": "none-home",
        "placement": "home",
        "seed": 7,
        "rows": [
            {"kind": "canvas", "size": [36, 36], "policy": "extrapolate"}
            | {"difference": stats.paired_difference([1, 1, 0, 0], [0, 1, 1, 1]).as_dict()}
        ],
    }
    page = plain_page(results(one, run("none"), run("rpb")))
    assert "Δ −25.0" in page
    assert page.count("Δ to none-home (trained home, seed 7)") == 2  # in the row of each table that shows differences
    assert "Larger sizes change more" in page
    assert "Δ −" not in plain_page(results(run("ape1d"), run("none")))


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
    found = set()
    files = Path(report.__file__).parent.glob("*.py")
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    assert "matplotlib" in found
    assert not found & {"torch", "timm", "torchvision", "kornia"}  # of vitpos: tests/test_imports.py


def shown_run(encoding, level):
    one = run(encoding)
    views = [
        {"kind": "table", "key": "t", "title": "A table of its own", "note": "What it means.", "brief": True,
         "columns": [{"title": "block", "unit": ""}, {"title": "kept", "unit": "percent"}],
         "rows": [["2x2", interval(level)], ["4x4", None]]},
        {"kind": "curves", "key": "c", "title": "Curves of its own", "note": "n", "x": "layer", "y": "share (%)",
         "unit": "percent", "series": [{"name": "row", "x": ["embedding", "block 1"], "y": [interval(level), 0.2]},
                                       {"name": "column", "x": ["embedding", "block 1"], "y": [None, level]}]},
        {"kind": "maps", "key": "m", "title": "Maps of its own", "note": "n", "unit": "logits",
         "panels": [{"name": "logit", "values": [[level, None], [0.5, 1.0]]}]},
    ]  # fmt: skip
    one["probes"]["mine"] = {"definitions": {"kept": "a share"}, "options": {}, "views": views}
    one["probes"]["other"] = {"definitions": {}, "options": {}, "part": {"not_applicable": "it has no patches"}}
    return one


def test_what_a_new_probe_shows_is_drawn_without_knowing_it(tmp_path):
    result = results(shown_run("none", 0.25), shown_run("ape1d", 0.75))
    names = {path.name for path in report.save(result, tmp_path)}
    assert {"probe-mine-c.png", "probe-mine-m.png"} <= names
    page = (tmp_path / "report.html").read_text()
    text = " ".join(re.sub(r"<[^>]+>", " ", page[: page.rindex("What this does not show")]).split())
    table = text[text.rindex("A table of its own") :]
    assert "ape1d trained home 2x2 75.0 65.7 to 82.5 ape1d 4x4 –" in table
    assert "none trained home 2x2 25.0 17.5 to 34.3" in table
    assert {"Curves of its own", "Maps of its own"} <= set(re.findall(r"<strong>(.*?)</strong>", page))
    assert "not measured: part of other: it has no patches" in text  # by none of them
    partly = results(result["runs"][0], changed(result["runs"][1], "probes.other.part", {}))
    assert "not measured (none): part of other" in " ".join(printed(partly).split())
    assert "A table of its own" in printed(result)
    result["runs"][0]["probes"]["mine"]["views"][0]["brief"] = False
    for one in result["runs"][1:]:
        one["probes"].pop("mine")
    assert "A table of its own" not in printed(result)
    report.save(results(run("none")), tmp_path)  # figures of an earlier evaluation go
    assert not list((tmp_path / "figures").glob("probe-*"))


def test_a_series_has_one_colour_in_all_panels_though_some_lack_another():
    first, second = shown_run("ape1d", 0.5), shown_run("none", 0.5)
    lines = second["probes"]["mine"]["views"][1]["series"]
    del lines[0]
    found = results(first, second)
    curves = next(d for d in figures.drawings(found, report.groups(found)[0]) if d.title == "Curves of its own")
    figure = curves.draw(2)
    drawn = [[bars.lines[0].get_color() for bars in axis.containers] for axis in figure.axes]
    assert [len(colours) for colours in drawn] == [2, 1]
    assert drawn[1] == drawn[0][1:]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["row", "column"]


def test_the_page_says_what_was_tested():
    home = " ".join(plain_page(results(run("none"), run("ape1d"))).split())
    both = " ".join(plain_page(results(run("none"), run("ape1d", "uniform"))).split())
    assert "100 test images of digits, 24x24 pixels in patches of 4x4; always answering" in home
    assert "right on 10.0%. Trained home: with objects in the top left corner only" in home
    assert "none of these models is a control trained at uniform placement" in home
    assert "the control trained at uniform placement says how much" in both
    assert "Trained uniform: with objects anywhere" in both
    taught = run("ape1d") | {"recipe": {"train": {"lr": 0.003, "ema": None}, "init": False}}
    assert "recipe of all</dt><dd><code>train.lr 0.003, init False</code>" in plain_page(results(taught))
    other = run("rpb") | {"recipe": {"train": {"lr": 0.1}}}
    assert "recipe of rpb</dt><dd><code>train.lr 0.1</code>" in plain_page(results(taught, other))
    lines = ["a and b are of one seed: leave out one"]
    assert "Not compared over seeds: a and b are of one seed" in plain_page(results(run("a")) | {"not_compared": lines})
    few = shown_run("ape1d", 0.5)
    few["probes"]["mine"]["images_used"] = 64
    assert "What it means. On 64 images." in plain_page(results(few))
    assert "On 64 images" not in plain_page(results(shown_run("ape1d", 0.5)))


def test_other_options_of_a_probe_are_another_measurement():
    one, other = shown_run("ape1d", 0.5), shown_run("none", 0.5)
    assert len(report.groups(results(one, other))) == 1
    other["probes"]["mine"]["options"] = {"steps": 3}
    assert len(report.groups(results(one, other))) == 2
