"""Encodings over seeds: which runs make a row, what it is compared with, and what is said where nothing can be."""

import copy
import csv
import io
from dataclasses import replace

import numpy as np
import pytest
from madeup import Page, changed, plain_page, run
from rich.console import Console

from vitpos import compare, hierarchy, report, significance, tables
from vitpos.compare import Measured, Options
from vitpos.report import compare_tables
from vitpos.stats import Score

KEYS = {
    "home": "accuracy",
    "unseen positions": "translation/canvas/patch/mean_shifted",
    "worst position": "translation/canvas/patch/worst",
    "consistency (pairwise)": "translation/canvas/patch/pairwise",
    "1.5x canvas": "resolution/canvas/36x36",
    "2x canvas": "resolution/canvas/48x48",
}
LEVELS = {"none": 0.5, "ape1d": 0.52, "rope_axial": 0.9}


def measured(encoding, seed, level=None, placement="home", images=100, **changes):
    """A run, and made-up scores: harder images are hard for all, and each seed has its luck."""
    one = run(encoding, placement, seed) | {"label": f"{encoding}-{placement}-s{seed}"} | changes
    rng = np.random.default_rng([seed, len(encoding)])
    chance = np.clip((LEVELS[encoding] if level is None else level) + np.linspace(-0.1, 0.1, images), 0, 1)
    right = rng.random(images) < np.clip(chance + 0.01 * rng.standard_normal(), 0, 1)
    return Measured(one, np.arange(images), {key: Score(right) for key in KEYS.values()})


def sweep(encodings=("none", "ape1d", "rope_axial"), seeds=(0, 1, 2, 3, 4), **changes):
    return [measured(encoding, seed, **changes) for encoding in encodings for seed in seeds]


@pytest.fixture(scope="module")
def found():
    return compare.comparison(sweep(), Options(margin=0.3))[0]


def cell(found, encoding, title="home"):
    row = next(row for row in found["rows"] if row["encoding"] == encoding)
    return row["cells"][KEYS[title]]


def stacked(encoding):
    return np.stack([measured(encoding, seed).scores["accuracy"].values for seed in range(5)]).astype(float)


def test_a_row_is_an_encoding_and_its_numbers_are_those_of_its_seeds(found):
    assert [(row["encoding"], row["seeds"]) for row in found["rows"]] == [
        ("ape1d", [0, 1, 2, 3, 4]), ("rope_axial", [0, 1, 2, 3, 4]), ("none", [0, 1, 2, 3, 4]),
    ]  # fmt: skip
    assert [metric["title"] for metric in found["metrics"]] == list(KEYS)
    rope, none = stacked("rope_axial"), stacked("none")
    assert cell(found, "rope_axial")["mean"] == hierarchy.mean(rope).as_dict()
    assert cell(found, "rope_axial")["by_seed"] == pytest.approx(rope.mean(axis=1))
    difference = cell(found, "rope_axial")["difference"]
    expected = hierarchy.difference(rope, none).as_dict()
    assert {key: difference[key] for key in expected} == expected
    parts = hierarchy.paired(rope, none)
    assert difference["p"] == hierarchy.different(parts)
    assert difference["p_equivalent"] == hierarchy.equivalent(parts, 0.3)
    assert difference["p_sign_flip"] == difference["p_sign_flip_smallest"] == 1 / 16
    assert cell(found, "none")["difference"] is None
    assert (found["baseline"], found["margin"], found["images"], found["group"]) == ("none", 0.3, 100, 0)


def test_means_have_a_bootstrap_interval_where_asked_and_a_warning(found):
    """Differences and ranks stay as they are."""
    (other,) = compare.comparison(sweep(), Options(margin=0.3, interval="bootstrap"))
    ours, theirs = cell(other, "rope_axial"), cell(found, "rope_axial")
    assert ours["mean"] == hierarchy.bootstrap(stacked("rope_axial")).as_dict() != theirs["mean"]
    assert ours["mean"]["value"] == pytest.approx(theirs["mean"]["value"])
    assert {key: ours[key] for key in ("difference", "rank")} == {key: theirs[key] for key in ("difference", "rank")}
    assert [line for line in other["remarks"] if line not in found["remarks"]] == [compare.TOO_SURE]
    with pytest.raises(ValueError, match=r"compare\.interval=boostrap must be one of .*did you mean bootstrap"):
        Options(interval="boostrap")


def test_all_differences_of_the_table_are_corrected_together(found):
    differences = [c["difference"] for row in found["rows"] for c in row["cells"].values() if c["difference"]]
    assert found["tests"] == len(differences) == 2 * len(KEYS)
    np.testing.assert_allclose([d["p_holm"] for d in differences], significance.holm([d["p"] for d in differences]))
    assert cell(found, "rope_axial")["difference"]["p_holm"] > 5 * cell(found, "rope_axial")["difference"]["p"]


def test_marks_and_ranks(found):
    assert compare_tables.sign(cell(found, "rope_axial")["difference"]).startswith("*")
    assert compare_tables.sign(cell(found, "ape1d")["difference"]) == "≈"
    rope, ape = cell(found, "rope_axial")["rank"], cell(found, "ape1d")["rank"]
    assert (rope["low"], rope["high"], rope["of"]) == (1, 1, 3)
    assert (ape["low"], ape["high"]) == (2, 3)
    none = compare.comparison(sweep(), Options(margin=None))[0]
    assert compare_tables.sign(cell(none, "ape1d")["difference"]) == ""
    assert [tables.marks(p) for p in (None, 0.06, 0.05, 0.01, 0.001)] == ["", "", "*", "**", "***"]


def test_three_seeds_say_what_they_cannot(found):
    few = compare.comparison(sweep(seeds=(0, 1, 2)))[0]
    assert any("not attainable with 3 seeds" in remark and "0.25" in remark for remark in few["remarks"])
    many = compare.comparison(sweep(seeds=range(6)))[0]
    assert not any("attainable" in remark for remark in many["remarks"])


def remarks(members, **options):
    return " | ".join(compare.comparison(members, Options(**options))[0]["remarks"])


def test_what_is_no_row_is_named():
    pairs = sweep(seeds=(0, 1))
    assert "rope_axial: left out; one seed (7) says nothing" in remarks(
        [*sweep(("none", "ape1d"), (0, 1)), measured("rope_axial", 7)]
    )
    unknown = run("rope_axial") | {"seed": None, "epochs": 9}
    assert "rope_axial-home left out; no seed is known" in remarks([*pairs, Measured(unknown, pairs[0].images, {})])
    assert compare.comparison(sweep(seeds=(0,))) == []
    assert compare.comparison([]) == []
    assert compare.obstacles(sweep(seeds=(0,))) == []  # nothing is in the way of one seed each


def seeds_of(members, encoding="rope_axial"):
    return [row["seeds"] for row in compare.comparison(members)[0]["rows"] if row["encoding"] == encoding]


def test_a_seed_that_is_there_twice_is_left_out_alone():
    """A second recipe that nothing tells apart takes no other seed and no other encoding with it."""
    again = measured("rope_axial", 1, 0.7, label="again-s1")
    members = [*sweep(), again]
    assert seeds_of(members) == [[0, 2, 3, 4]]
    assert seeds_of(members, "none") == [[0, 1, 2, 3, 4]]
    text = remarks(members)
    assert "rope_axial-home-s1, again-s1 left out; all are seed 1 and no config.yaml tells them apart" in text
    assert "leave out all but one of them" in text
    told = [measured(one.run["encoding"], one.run["seed"], recipe={"train": {"lr": 1}}) for one in members[:-1]]
    third = measured("rope_axial", 1, 0.7, recipe={"train": {"lr": 1}})
    assert "their configuration is the same" in remarks([*told, third])
    # a copy is no second recipe
    copy = measured("rope_axial", 1, label="copy")
    assert seeds_of([*sweep(), copy]) == [[0, 1, 2, 3, 4]]
    assert "rope_axial-home-s1, copy are seed 1 and decide alike: counted once" in remarks([*sweep(), copy])


def test_where_every_seed_is_there_twice_it_is_said_and_no_table_is_empty():
    both = [*sweep(seeds=(0, 1)), *[measured(e, s, 0.7) for e in LEVELS for s in (0, 1)]]
    both = [Measured(m.run | {"checkpoint": f"runs/{i}/last.safetensors"}, m.images, m.scores)
            for i, m in enumerate(both)]  # fmt: skip
    assert compare.comparison(both) == []
    lines = compare.obstacles(both)
    assert len(lines) == 6
    # labels are alike: folders tell them apart
    assert "none: runs/0, runs/6 left out; all are seed 0 and no config.yaml tells them apart: leave out all but" in " ".join(lines)  # fmt: skip  # noqa: E501
    assert compare.obstacles(sweep()) == []


def test_images_that_are_others_leave_out_their_run_alone():
    """Whichever run comes first."""
    for seed in (0, 1):
        members = sweep(seeds=(0, 1, 2))
        odd = next(m for m in members if (m.run["encoding"], m.run["seed"]) == ("ape1d", seed))
        members = [Measured(m.run, np.arange(1, 101), m.scores) if m is odd else m for m in members]
        assert seeds_of(members, "ape1d") == [[s for s in range(3) if s != seed]]
        assert seeds_of(members) == [[0, 1, 2]]
        assert f"ape1d-home-s{seed} left out; the test images are others" in remarks(members)


def test_the_baseline_was_trained_alike_where_there_is_such_a_one():
    home, uniform = sweep(("none",), (0, 1)), [measured("none", s, 0.6, "uniform") for s in (0, 1)]
    control = [measured("ape1d", s, 0.7, "uniform") for s in (0, 1)]
    for bases, place in ((home, "home"), (home + uniform, "uniform")):
        rows = compare.comparison([*bases, *control])[0]["rows"]
        row = next(row for row in rows if row["encoding"] == "ape1d")
        assert row["baseline"] == {"encoding": "none", "placement": place}
    assert "no none has its architecture" in remarks([*uniform, *sweep(("ape1d",), (0, 1))])
    assert "no none has its architecture" in remarks([*home, *sweep(("ape1d",), (0, 1), epochs=7)])
    assert "No differences: no none" in remarks(sweep(("ape1d", "rope_axial"), (0, 1)))
    assert "it shares 1 seeds with none, 2 are needed" in remarks([*home, *sweep(("ape1d",), (1, 2))])
    assert "over the shared seeds 0, 1" in remarks([*home, *sweep(("ape1d",), (0, 1, 2))])
    to_ape = compare.comparison(sweep(seeds=(0, 1)), Options(baseline="ape1d"))[0]
    assert cell(to_ape, "none")["difference"] is not None
    assert cell(to_ape, "ape1d")["difference"] is None
    alone = compare.comparison(sweep(seeds=(0, 1)), Options(baseline=None))[0]
    assert alone["baseline"] is None
    assert "Δ" not in " ".join(compare_tables.explained(alone))


def test_another_recipe_is_another_row_and_says_what_differs():
    recipes = [{"train": {"lr": lr, "epochs": 3}} for lr in (0.1, 0.2)]
    members = [*sweep(("none",), (0, 1), recipe=recipes[0])]
    for recipe in recipes:
        members += sweep(("ape1d",), (0, 1), recipe=recipe)
    rows = compare.comparison(members)[0]["rows"]
    assert [(row["encoding"], row["apart"]) for row in rows] == [
        ("ape1d", "train.lr 0.1"), ("ape1d", "train.lr 0.2"), ("none", ""),
    ]  # fmt: skip
    text = remarks(members)
    assert text.count("trained otherwise than the none") == 1
    assert "train.lr 0.2, not 0.1" in text
    runs = [member.run for member in members]
    page = plain_page(
        {"schema": report.SCHEMA, "provenance": {}, "runs": runs, "comparison": compare.comparison(members)}
    )
    table = page[page.index("<tbody>") : page.index("</tbody>")]
    assert "<small>train.lr 0.1</small>" in table


def test_a_row_of_other_seeds_takes_no_rank_from_the_others():
    members = [*sweep(("none", "ape1d"), (0, 1, 2)), *sweep(("rope_axial",), (7, 8, 9))]
    (found,) = compare.comparison(members)
    ranks = {row["encoding"]: row["cells"]["accuracy"]["rank"] for row in found["rows"]}
    assert ranks["rope_axial"] is None
    assert ranks["none"]["of"] == ranks["ape1d"]["of"] == 2
    assert "rope_axial: no rank; it shares too few seeds" in " ".join(found["remarks"])
    # fewer seeds in one row: the ranks are of those that all have, and it is said
    fewer = [*sweep(("none", "rope_axial")), *sweep(("ape1d",), (1, 2))]
    assert "Ranks of ape1d, rope_axial, none: over the shared seeds 1, 2" in remarks(fewer)
    assert "Ranks of" not in remarks(sweep())
    apart = [*sweep(("none",), (0, 1)), *sweep(("ape1d",), (2, 3))]
    assert all(row["cells"]["accuracy"]["rank"] is None for row in compare.comparison(apart)[0]["rows"])


def test_metrics_can_be_chosen_beforehand():
    one = compare.comparison(sweep(seeds=(0, 1)), Options(metrics=["resolution/canvas/48x48"]))[0]
    assert [metric["title"] for metric in one["metrics"]] == ["2x canvas"]
    assert one["tests"] == 2
    lacking = sweep(seeds=(0, 1))
    del lacking[0].scores["accuracy"]  # type: ignore[attr-defined]
    row = next(row for row in compare.comparison(lacking)[0]["rows"] if row["encoding"] == "none")
    assert "accuracy" not in row["cells"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "rope_axal"}, "compare.baseline=rope_axal is no encoding.*rope_axial"),
        ({"baseline": "alibi"}, "compare.baseline=alibi is none of the encodings; known: ape1d, none, rope_axial"),
        ({"metrics": ["acuracy"]}, "'acuracy' was not measured.*accuracy"),
        ({"margin": 2}, r"compare.margin=2 must be a share between 0 and 1"),
        ({"margin": 0}, r"compare.margin=0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compare.comparison(sweep(seeds=(0, 1)), Options(**options))


def test_runs_measured_otherwise_are_compared_apart():
    other = [Measured(changed(m.run, "data.object_size", 8), m.images, m.scores) for m in sweep(seeds=(0, 1))]
    first, second = compare.comparison([*sweep(seeds=(0, 1)), *other])
    assert (first["group"], second["group"]) == (0, 1)
    assert {first["apart"], second["apart"]} == {"", "object_size 8"} or "object_size 8" in (first["apart"], second["apart"])  # fmt: skip  # noqa: E501


# Scores that are no shares, and of fewer images

DISTANCE, CODE, SHARE = "attention/distance/block_1", "location/row/block_1", "location/position_share/block_1"


def with_others(members, chosen=range(0, 100, 2)):
    """With a distance in pixels, a linearised R^2 and a linearised share, of half of the images."""
    places, found = np.array(chosen), []
    for one in members:
        rng = np.random.default_rng([9, one.run["seed"], len(one.run["encoding"])])
        level = LEVELS[one.run["encoding"]] + 0.02 * rng.standard_normal()
        noise = rng.standard_normal(len(places)) - 0.5
        more = {
            DISTANCE: Score(40 * level + noise, bounded=False, unit="px", images=places),
            CODE: Score(2 * level - 1 + 0.1 * noise, bounded=False, unit="", images=places),
            SHARE: Score(level + 0.3 * noise, bounded=False, images=places),
        }
        found.append(Measured(one.run, one.images, {**one.scores, **more}))
    return found


@pytest.fixture(scope="module")
def mixed():
    options = Options(metrics=["accuracy", DISTANCE, CODE, SHARE], margin=0.3)
    return compare.comparison(with_others(sweep()), options)[0]


def test_what_is_no_share_is_compared_on_its_own_scale(mixed):
    rope, none = (
        np.stack([m.scores[DISTANCE].values for m in with_others(sweep((encoding,)))])
        for encoding in ("rope_axial", "none")
    )
    row = next(row for row in mixed["rows"] if row["encoding"] == "rope_axial")
    assert row["cells"][DISTANCE]["mean"] == hierarchy.mean(rope, bounded=False).as_dict()
    assert (row["cells"][DISTANCE]["mean"]["n"], row["cells"]["accuracy"]["mean"]["n"]) == (50, 100)
    expected = hierarchy.difference(rope, none, bounded=False).as_dict()
    assert {key: row["cells"][DISTANCE]["difference"][key] for key in expected} == expected
    assert row["cells"][DISTANCE]["difference"]["value"] > 10  # points would end at 1
    assert row["cells"][DISTANCE]["rank"]["low"] == row["cells"][DISTANCE]["rank"]["high"] == 1
    assert [(metric["key"], metric["title"], metric["unit"], metric["note"]) for metric in mixed["metrics"][1:]] == [
        (DISTANCE, f"{DISTANCE} (px)", "px", "on 50 of the images"),
        (CODE, CODE, "", "on 50 of the images"),
        (SHARE, SHARE, "percent", "on 50 of the images"),
    ]
    assert mixed["metrics"][0]["unit"] == "percent"


def test_a_margin_is_a_share_and_is_applied_to_shares_alone(mixed):
    ape = next(row for row in mixed["rows"] if row["encoding"] == "ape1d")["cells"]
    for key in (DISTANCE, CODE):
        assert ape[key]["difference"]["p_equivalent"] is ape[key]["difference"]["p_equivalent_holm"] is None
        assert ape[key]["difference"]["p_holm"] is not None
    for key in ("accuracy", SHARE):
        assert ape[key]["difference"]["p_equivalent"] < 0.05
    assert "of shares alone, since the margin is one" in " ".join(compare_tables.explained(mixed))


def test_runs_that_took_other_images_have_no_cell_in_that_column():
    members = with_others(sweep(seeds=(0, 1)))
    odd = with_others([members[0]], range(1, 100, 2))
    (found,) = compare.comparison([*odd, *members[1:]], Options(metrics=["accuracy", CODE]))
    cells = {row["encoding"]: row["cells"].keys() for row in found["rows"]}
    assert cells == {"none": {"accuracy"}, "ape1d": {"accuracy", CODE}, "rope_axial": {"accuracy", CODE}}
    assert f"none: no {CODE}; none-home-s0 took other images for it" in " ".join(found["remarks"])
    ape = next(row for row in found["rows"] if row["encoding"] == "ape1d")["cells"]
    assert ape[CODE]["difference"] is None
    assert ape[CODE]["rank"]["of"] == 2
    fewer = with_others([members[0]], range(0, 50, 2))  # another number of them
    (found,) = compare.comparison([*fewer, *members[1:]], Options(metrics=[CODE]))
    assert [row["cells"].keys() for row in found["rows"] if row["encoding"] == "none"] == [set()]


def test_a_copy_measured_elsewhere_is_known_in_spite_of_rounding():
    members = with_others(sweep())

    def again(by):
        first, found = members[0], {}
        for key, score in first.scores.items():
            found[key] = score if score.bounded else replace(score, values=score.values * (1 + by))
        return Measured(first.run | {"label": "again"}, first.images, found)

    assert "none-home-s0, again are seed 0 and decide alike: counted once" in remarks([*members, again(1e-7)])
    assert "none-home-s0, again left out; all are seed 0" in remarks([*members, again(1e-2)])


def test_numbers_are_shown_in_their_units(mixed):
    about = {"command": "x", "versions": {"torch": "2"}}
    results = {"schema": report.SCHEMA, "provenance": about, "runs": [m.run for m in sweep()], "comparison": [mixed]}
    rope = next(row for row in mixed["rows"] if row["encoding"] == "rope_axial")["cells"]
    distance, code, share = (rope[key] for key in (DISTANCE, CODE, SHARE))
    assert compare_tables.lines(distance, "px")[:2] == [
        f"{distance['mean']['value']:.3g}", f"{distance['mean']['low']:.3g}–{distance['mean']['high']:.3g}",
    ]  # fmt: skip
    assert 30 < float(compare_tables.lines(distance, "px")[0]) < 40
    assert compare_tables.lines(distance, "px")[2].startswith(f"Δ {distance['difference']['value']:+.3g}")
    assert compare_tables.lines(code, "")[0] == f"{code['mean']['value']:.3g}"
    assert compare_tables.lines(share, "percent")[0] == f"{100 * share['mean']['value']:.1f}"
    none = next(row for row in mixed["rows"] if row["encoding"] == "none")["cells"][CODE]
    assert compare_tables.lines(none, "")[1] == tables.span(none["mean"], "")
    assert tables.span({"low": -0.25, "high": 0.5}, "") == "−0.25 to 0.5"
    assert tables.change(-0.1234, "px") == "−0.123"
    assert tables.change(-0.1234, "percent") == "−12.3"
    text = report.to_markdown(results)
    assert f"{distance['mean']['value']:.3g}<br>" in text
    assert "(px)" in text
    out = io.StringIO()
    report.print_table(results, Console(file=out, width=130))
    assert "on 50 of the images" in " ".join(out.getvalue().split())
    line = next(
        line for line in csv.DictReader(io.StringIO(report.to_csv(results)))
        if (line["encoding"], line["metric"]) == ("rope_axial", DISTANCE)
    )  # fmt: skip
    assert (line["unit"], float(line["value"])) == ("px", distance["mean"]["value"])
    leading = {title: may for title, may, _ in compare_tables.leaders(mixed)}
    assert leading[f"{DISTANCE} (px)"] == f"rope_axial {distance['mean']['value']:.3g}"


def test_the_page_shows_units_and_bars_of_shares_alone(mixed):
    about = {"command": "x", "versions": {"torch": "2"}}
    results = {"schema": report.SCHEMA, "provenance": about, "runs": [m.run for m in sweep()], "comparison": [mixed]}

    def bars(found):
        text = plain_page({**results, "comparison": [found]})
        start = text.index('id="encodings-1"') if 'id="encodings-1"' in text else text.index("<caption>One row is one")
        return text[start : text.index("</table>", start)].count('class="range"'), text

    count, text = bars(mixed)
    assert count == 2 * len(mixed["rows"])  # accuracy and the linearised share
    rope = next(row for row in mixed["rows"] if row["encoding"] == "rope_axial")["cells"][DISTANCE]
    assert f"<b>{rope['mean']['value']:.3g}</b>" in text
    early = {**mixed, "metrics": [{k: v for k, v in m.items() if k != "unit"} for m in mixed["metrics"][:1]]}
    assert bars(early)[0] == len(mixed["rows"])  # files of early versions have shares alone


# What is shown of it


@pytest.fixture(scope="module")
def results(found):
    about = {"command": "python eval.py runs=runs", "versions": {"torch": "2.9"}}
    runs = [member.run for member in sweep()]
    return {"schema": report.SCHEMA, "provenance": about, "runs": runs, "comparison": [found]}


def test_console_shows_a_row_an_encoding_and_says_what_it_is_over(results):
    out = io.StringIO()
    report.print_table(results, Console(file=out, width=130))
    text = " ".join(out.getvalue().split())
    assert "encodings, over seeds and 100 test images" in text
    assert "for this one model" not in text  # the models are in the files
    assert "after Holm's correction for the 12 differences" in text
    assert "within ±30 points, p ≤ 0.05" in text
    assert "largest logit change between whole-patch positions" in text  # of none, the check of the measurement
    assert max(map(len, out.getvalue().splitlines())) <= 130
    partly = {**results, "runs": [*results["runs"], run("sincos2d")]}
    out = io.StringIO()
    report.print_table(partly, Console(file=out, width=130))
    assert "for this one model" in " ".join(out.getvalue().split())  # one of them stands in no row above


def test_markdown_latex_and_csv_hold_the_same_numbers(results, found):
    rope = cell(found, "rope_axial")
    value, low = (tables.percent(rope["mean"][key]) for key in ("value", "low"))
    delta = tables.points(rope["difference"]["value"])
    text = report.to_markdown(results)
    title, _, head, _, *rows = text.splitlines()
    assert title.startswith("digits: encodings, over seeds")
    assert head == f"| encoding | trained at | seeds | {' | '.join(KEYS)} |"
    assert rows[1].startswith(f"| `rope_axial` | home | 5 | {value}<br>{low}–")
    assert f"Δ {delta}\\*" in rows[1]
    assert "| encoding | trained at | seed | home |" in text  # each model below
    latex = report.to_latex(results)
    assert latex.count(r"\toprule") == latex.count(r"\end{tabular}") == 2
    assert rf"\texttt{{rope\_axial}} & home & 5 & \shortstack[r]{{{value} \\ {low}--" in latex
    assert rf"$\Delta$ {delta}$^{{*}}$" in latex
    lines = list(csv.DictReader(io.StringIO(report.to_csv(results))))
    ours = [line for line in lines if line["of"] == "encoding"]
    assert len(ours) == 3 * len(KEYS)
    assert len(lines) - len(ours) == 15 * len(KEYS)
    line = next(line for line in ours if (line["encoding"], line["metric"]) == ("rope_axial", "accuracy"))
    assert float(line["value"]) == rope["mean"]["value"]
    assert float(line["p_holm"]) == rope["difference"]["p_holm"]
    assert (line["rank_low"], line["rank_high"], line["difference_to"]) == ("1", "1", "none") or line["rank_low"] == "1.0"  # fmt: skip  # noqa: E501


def test_who_may_come_first(found):
    said = {title: (may, others) for title, may, others in compare_tables.leaders(found)}
    rope, *rest = (
        f"{name} {tables.percent(cell(found, name)['mean']['value'])}" for name in ("rope_axial", "ape1d", "none")
    )
    may, others = said["home"]
    assert may == rope
    assert set(others.split(", ")) == set(rest)
    undecided, lone = copy.deepcopy(found), copy.deepcopy(found)
    for row in undecided["rows"]:
        row["cells"]["accuracy"]["rank"] = {"value": 1, "low": 1, "high": 3, "of": 3}
    assert compare_tables.leaders(undecided)[0][2] == ""
    assert compare_tables.rank_text({"low": 1, "high": 3, "of": 3}) == ""  # it says nothing
    assert compare_tables.rank_text({"low": 2, "high": 3, "of": 3}) == "rank 2–3/3"
    for row in lone["rows"]:
        row["cells"]["accuracy"]["rank"] = None
    assert "home" not in dict((title, may) for title, may, _ in compare_tables.leaders(lone))


def test_seeds_that_disagree_are_named(found):
    """Of shares only, whose points are comparable."""
    apart, others = copy.deepcopy(found), copy.deepcopy(found)
    for one in (apart, others):
        cell(one, "ape1d")["by_seed"] = [0.5, 0.9, 0.701]
        cell(one, "none")["by_seed"] = [0.5, 0.69, 0.6]
    assert compare_tables.scattered(found) == []
    assert compare_tables.scattered(apart) == ["ape1d, home: 50.0, 90.0, 70.1"]
    others["metrics"][0]["unit"] = "px"
    assert compare_tables.scattered(others) == []


def test_latex_escapes_what_it_would_read(found):
    odd = copy.deepcopy(found)
    odd["rows"][0]["encoding"] = r"a_b(c=10%) & $x^2$ \d"
    assert r"\texttt{a\_b(c=10\%) \& \$x\textasciicircum{}2\$ \textbackslash{}d}" in tables.latex(
        compare_tables.table(odd)
    )


def test_page_has_the_comparison_first_and_no_request(results, found):
    text = plain_page(results)
    parsed = Page(text)
    assert parsed.fetched == []
    assert len(parsed.ids) == len(set(parsed.ids))
    shown = " ".join(" ".join(parsed.text).split())
    assert shown.index("Digits: encodings, over seeds") < shown.index("Digits: 100 test images")
    assert "Look at Δ" in shown
    assert f"Δ {tables.points(cell(found, 'rope_axial')['difference']['value'])}*" in shown
    assert "rank 1/3" in shown
    assert "What another recipe would do" in shown
    assert "Look at Δ" not in plain_page({**results, "comparison": []})
    assert "Seeds that differ" not in text
    apart = copy.deepcopy(found)
    cell(apart, "ape1d")["by_seed"] = [0.5, 0.9, 0.701]
    assert "ape1d, home: 50.0, 90.0, 70.1" in plain_page({**results, "comparison": [apart]})
