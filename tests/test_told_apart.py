"""Rows and panels of one encoding say what tells them apart: architecture, weights, recipe, placement, seed."""

import csv
import io
import itertools
import re

import pytest
from madeup import interval, plain_page, results, run
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from vitpos import report
from vitpos.report import figures, grouping, words

PUBLISHED = {"placement": None, "seed": None, "epochs": None, "encoding": "native", "checkpoint": None}


def timm(name, **changes):
    return run("native") | PUBLISHED | {"label": name, "architecture": name} | changes


MODELS = [timm("vit_tiny"), timm("vit_small"), timm("vit_small", checkpoint="own.pth"), timm("vit_tiny", trained=False)]
NAMES = {"vit_tiny, weights published", "vit_small, weights published", "vit_small, weights own.pth",
         "vit_tiny, weights random"}  # fmt: skip


def with_table(one, rows=2):
    """The run with a table of its own, that stands on the terminal."""
    view = {"kind": "table", "key": "t", "title": "A table of its own", "note": "n", "brief": True,
            "columns": [{"title": "block", "unit": ""}, {"title": "kept", "unit": "percent"}],
            "rows": [[f"{i}x{i}", interval(0.5)] for i in range(1, rows + 1)]}  # fmt: skip
    return one | {"probes": {**one["probes"], "mine": {"definitions": {}, "options": {}, "views": [view]}}}


def with_curves(one):
    view = {"kind": "curves", "key": "c", "title": "Curves of its own", "note": "n", "x": "layer", "y": "share (%)",
            "unit": "percent", "series": [{"name": "row", "x": ["1", "2"], "y": [0.1, 0.2]}]}  # fmt: skip
    return one | {"probes": {**one["probes"], "mine": {"definitions": {}, "options": {}, "views": [view]}}}


def with_map(one):
    view = {"kind": "maps", "key": "m", "title": "Maps of its own", "note": "n", "unit": "logits",
            "panels": [{"name": "logit", "values": [[1.0, 2.0], [0.5, 1.0]]}]}  # fmt: skip
    return one | {"probes": {**one["probes"], "mine": {"definitions": {}, "options": {}, "views": [view]}}}


def printed(result, width=120):
    out = io.StringIO()
    report.print_table(result, Console(file=out, width=width))
    return out.getvalue()


def own_table(*runs):
    """The first column of the runs' own table on the terminal, line by line."""
    text = printed(results(*runs))
    lines = text[text.index("A table of its own") :].splitlines()[3:]
    return [line[: lines[0].index("1x1")].strip() for line in lines if line.strip()]


def test_models_that_were_not_trained_here_are_told_apart_by_architecture_and_weights():
    result = results(*MODELS)
    (group,) = report.groups(result)
    assert {", ".join(words.told(one, group.runs)) for one in group.runs} == NAMES
    assert [words.told(one, [one]) for one in group.runs] == [[]] * 4  # alone there is nothing to say
    both = [timm("vit_tiny", trained=False), timm("vit_small")]
    assert [words.told(one, both) for one in both] == [["vit_tiny"], ["vit_small"]]  # their weights differ anyway
    assert words.told(run("ape1d"), [*MODELS, run("ape1d")]) == ["trained home"]  # the only seed there is
    assert words.told(MODELS[0], [*MODELS, run("ape1d"), run("ape1d", seed=1)]) == ["vit_tiny, weights published"]
    assert words.told(MODELS[0], [MODELS[0], run("native")]) == ["vit_tiny"]  # no "epochs None"

    flat = " ".join(printed(result).split())
    rows = list(csv.DictReader(io.StringIO(report.to_csv(result))))
    for name in NAMES:
        assert name in flat
        assert f"| `native ({name})` |" in report.to_markdown(result)
        assert {row["label"] for row in rows if row["recipe"] == name} == {name.partition(",")[0]}


def test_weights_are_named_by_the_end_of_their_path_that_tells_them_apart():
    paths = ["a/b/x/last.pth", "a/b/y/last.pth", "a/b/y/best.pth"]
    runs = [timm("vit", checkpoint=path) for path in paths]
    assert [words.told(one, runs)[0] for one in runs] == [
        "weights x/last.pth",
        "weights y/last.pth",
        "weights best.pth",
    ]
    runs = [timm("vit", checkpoint=path) for path in ("last.pth", "x/last.pth")]
    assert [words.told(one, runs)[0] for one in runs] == ["weights last.pth", "weights x/last.pth"]


def test_such_models_are_never_taken_for_seeds_of_one():
    assert grouping.over_seeds([timm("vit_small"), timm("vit_small", checkpoint="own.pth")] * 2) == [
        timm("vit_small"), timm("vit_small", checkpoint="own.pth"),
    ] * 2  # fmt: skip


def test_rows_of_a_table_of_its_own_begin_with_what_is_said_of_their_run():
    home, uniform = with_table(run("ape1d"), 2), with_table(run("ape1d", "uniform"), 1)
    assert own_table(home, uniform) == ["ape1d", "trained home", "", "", "ape1d", "trained uniform"]
    for row in home["probes"]["mine"]["views"][0]["rows"]:
        row[1] = 0.5  # rows of one line
    assert own_table(home, uniform) == ["ape1d", "trained home", "ape1d", "trained uniform"]
    one, other = with_table(run("ape1d"), 2), with_table(run("ape1d", seed=1), 1)
    said = own_table(one, other)
    assert said == ["ape1d", "trained home", "seed 0", "", "ape1d", "trained home", "seed 1"]  # more lines than rows


def recipe(one, lr):
    return one | {"recipe": {"train": {"lr": lr, "wd": 0.05, "epochs": 3}}, "checkpoint": f"runs/{lr}/last.safetensors"}


def test_recipes_are_told_apart_by_what_differs_and_only_among_one_encoding():
    one, two, other = recipe(run("ape1d"), 0.1), recipe(run("ape1d"), 0.2), recipe(run("none"), 0.3)
    runs = [one, two, other]
    assert [words.told(one, runs)[0] for one in runs] == ["train.lr 0.1", "train.lr 0.2", "trained home"]
    assert words.told(one | {"epochs": 9}, runs)[0] == "epochs 9, train.lr 0.1, train.epochs 3"
    text = printed(results(*runs))
    assert "train.lr 0.1" in text
    assert "train.lr 0.3" not in text
    assert "weights" not in text  # folders of runs that were trained here differ anyway


def test_what_a_recipe_says_twice_is_said_once_and_an_unknown_one_is_no_other():
    def trained(architecture, epochs, changes=()):
        model, train = {"name": architecture, "dim": 64 if architecture == "vit_small" else 32}, {"epochs": epochs}
        known = {"architecture": architecture, "epochs": epochs, "recipe": {"model": model, "train": train}}
        return run("ape1d") | known | dict(changes)

    runs = [trained("vit_small", 3), trained("vit_tiny", 9)]
    assert words.told(runs[0], runs)[0] == "vit_small, epochs 3, model.dim 64"
    stopped = trained("vit_small", 9, {"epochs": 3})  # of 9
    assert words.told(stopped, [trained("vit_small", 3), stopped])[0] == "train.epochs 9"
    runs = [trained("vit_small", 3), trained("vit_small", 3, {"recipe": None, "seed": 1})]
    assert [words.told(one, runs) for one in runs] == [
        ["trained home", "seed 0"],
        ["recipe unknown", "trained home", "seed 1"],
    ]
    assert words.told(runs[1], runs[1:]) == ["trained home"]  # of any
    other = timm("vit", encoding="ape1d")
    assert words.told(other, [other, *runs]) == ["vit"]


def test_means_of_seeds_keep_their_recipe():
    """Not the mean of it, which is not 0.1 of three times 0.1."""
    group = report.groups(results(*(recipe(run("ape1d", seed=seed), 0.1) for seed in (0, 1, 2))))[0]
    (mean,) = grouping.over_seeds(group.runs)
    assert words.told(mean, group.runs) == ["trained home", "3 seeds"]


def titles(drawing):
    return [axis.get_title() for axis in drawing.draw(3).axes if axis.get_visible()]


def drawn(*runs):
    result = results(*runs)
    return figures.drawings(result, report.groups(result)[0])


def test_curves_have_a_panel_a_setting_and_maps_a_panel_a_model():
    position, shift, *_ = drawn(*MODELS)
    for drawing in (shift, position):
        assert {title.removeprefix("native\n").replace("\n", " ") for title in titles(drawing)} == NAMES
    *_, own = drawn(*map(with_map, MODELS))
    assert {title.removesuffix("\nlogit").removeprefix("native\n").replace("\n", " ") for title in titles(own)} == {
        *NAMES, "",  # the colour bar
    }  # fmt: skip
    assert sum(title.endswith("\nlogit") for title in titles(own)) == 4
    *_, own = drawn(*map(with_curves, MODELS))
    assert {title.removeprefix("native\n").replace("\n", " ") for title in titles(own)} == NAMES
    _, shift, *_ = drawn(run("ape1d"), run("ape1d", "uniform"), run("none"))
    assert titles(shift) == ["ape1d", "none"]  # the control is a dashed line


@pytest.mark.parametrize("columns", [2, 5])
def test_long_names_do_not_run_into_each_other(columns):
    long = ("vit_small_patch16_rope_mixed_ape_224.naver_in1k", "vit_base_patch16_clip_quickgelu_224.metaclip_2pt5b",
            "vit_base_patch16_siglip_gap_512.v2_webli")  # fmt: skip
    short = drawn(*(with_map(timm(name)) for name in "abc"))
    for drawing, other in zip(drawn(*(with_map(timm(name)) for name in long)), short):
        with rc_context(figures.RC):
            figure, roomy = drawing.laid_out(columns), other.laid_out(columns)
            FigureCanvasAgg(figure).draw()
            FigureCanvasAgg(roomy).draw()
        axes = [axis for axis in figure.axes if axis.get_visible() and axis.get_title()]
        boxes = [axis.title.get_window_extent() for axis in axes]
        assert len(boxes) == 3
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)), drawing.name
        assert all(box.y1 <= figure.bbox.y1 for box in boxes), drawing.name
        for axis, free in zip(axes, roomy.axes):
            assert axis.get_window_extent().height > 0.97 * free.get_window_extent().height, drawing.name


def test_a_name_is_no_formula():
    for drawing in drawn(*(timm("vit", checkpoint=f"$a_1_{i}$/x.pth") for i in (2, 3))):
        assert drawing.png()


def test_curves_of_seeds_that_agree_are_drawn():
    """The mean of three equal numbers may be another one."""
    for drawing in drawn(*(run("ape1d", seed=seed) for seed in (0, 1, 2))):
        assert drawing.png()


def test_seeds_are_whole_numbers_in_the_spreadsheet():
    rows = list(csv.DictReader(io.StringIO(report.to_csv(results(run("ape1d"), run("none", seed=1), timm("vit"))))))
    assert {(row["encoding"], row["seeds"]) for row in rows} == {("ape1d", "0"), ("none", "1"), ("native", "")}


def low(none):
    """A `none` whose accuracy is 20% everywhere, not 90."""
    for point in none["probes"]["translation"]["variants"]["canvas"]["patch"]["by_distance"]:
        point["accuracy"] = interval(0.2)
    return none


def greys(drawing):
    """The grey curve of each panel, by its first number."""
    lines = {axis.get_title(): [line for line in axis.lines if line.get_color() == figures.GREY] for axis in
             drawing.draw(3).axes}  # fmt: skip
    return {
        title: [round(line.get_ydata()[0]) for line in found if len(line.get_xdata()) > 2]
        for title, found in lines.items()
    }


@pytest.mark.parametrize("order", [1, -1])
def test_grey_is_the_none_that_was_trained_alike(order):
    """Whichever stands first."""
    small = {"architecture": "vit_small"}
    nones = [run("none"), low(run("none") | small)][::order]
    _, shift, *_ = drawn(*nones, run("ape1d"), run("ape1d") | small, timm("vit_base"))
    assert "Grey: none, of the same recipe where there is one; only beside models of its" in shift.caption
    found = greys(shift)
    assert found["ape1d\nvit_tiny_patch16_224"] == [90]
    assert found["ape1d\nvit_small"] == [20]
    assert found["native"] == []  # of which there is no such none

    uniform = low(run("none", "uniform"))
    _, shift, *_ = drawn(recipe(run("none"), 0.1), recipe(uniform, 0.2), recipe(run("ape1d"), 0.2))
    assert greys(shift)["ape1d"] == [90]  # of its placement before its recipe, as tables compare it
    _, shift, *_ = drawn(run("none"), uniform, run("ape1d", "uniform"))
    assert greys(shift)["ape1d"] == [20]
    _, shift, *_ = drawn(run("none"), run("ape1d", "uniform"))
    assert greys(shift)["ape1d"] == [90]
    _, shift, *_ = drawn(uniform, run("ape1d"))
    assert greys(shift)["ape1d"] == []

    nones = [recipe(run("none"), 0.1), recipe(low(run("none")), 0.2)][::order]
    _, shift, *_ = drawn(*nones, *(recipe(run("ape1d"), lr) for lr in (0.1, 0.2)))
    found = greys(shift)
    assert (found["ape1d\ntrain.lr 0.1"], found["ape1d\ntrain.lr 0.2"]) == ([90], [20])


def test_captions_name_the_grey_that_is_drawn():
    def caption(*runs):
        return drawn(*runs)[1].caption.partition("Grey: ")[2].partition(". ")[0]

    longer = run("none") | {"epochs": 9}
    assert caption(run("none"), run("ape1d")) == "none, run none-home (trained home, seed 0)"
    assert caption(run("none"), longer, run("ape1d")) == "none, run none-home (trained home, seed 0)"
    assert caption(run("none"), timm("vit")) == caption(longer, run("ape1d")) == ""
    assert caption(run("none") | {"architecture": "vit_small"}, run("ape1d")) == ""
    assert caption(run("none"), run("ape1d"), timm("vit")) == (
        "none, run none-home (trained home, seed 0); only beside models of its architecture and epochs"
    )
    assert caption(run("none"), run("none", seed=1), run("ape1d")) == "none"  # the mean of both
    assert caption(run("none"), longer, run("ape1d"), run("ape1d") | {"epochs": 9}) == (
        "none, of the same recipe where there is one; only beside models of its architecture and epochs"
    )


def test_each_table_of_the_page_says_which_model_a_row_is():
    page = plain_page(results(*map(with_table, MODELS)))
    tables = [re.sub(r"<[^>]+>", " ", table) for table in re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL)]
    assert len(tables) == 5  # the main one, shifts, sizes, its own, provenance
    for name in NAMES:
        assert [name in " ".join(table.split()) for table in tables] == [True] * 4 + [False]  # which has columns for it
