"""Scores that encodings are compared by: their means are what the probes say, of the images that they took."""

import numpy as np
import pytest
from fakes import Squares
from hydra.core.override_parser.overrides_parser import OverridesParser
from probing import encoded, subject

from vitpos import hierarchy, probes, stats
from vitpos.probes import location

N, SOME = 24, 16
OPTIONS = {
    "translation": {"variants": ["canvas"], "phase": False},
    "resolution": {},
    "shuffle": {"images": SOME},
    "location": {"images": SOME, "folds": 2},
    "equivariance": {"images": SOME},
    "attention": {"images": SOME, "exact_images": 6},
    "factorial": {"images": SOME, "gradient_images": 4},
}


def said(found):
    """What `summarize` says, by the keys of scores."""
    rows = {"accuracy": found["accuracy"]}
    own = found["probes"]
    for group, entry in own["translation"]["variants"]["canvas"].items():
        key = f"translation/canvas/{group}"
        if group == "zhang":
            rows[key] = entry["consistency"]
        if group in ("patch", "subpatch"):
            rows |= {f"{key}/{name}": entry[name] for name in ("mean_shifted", "worst", "every")}
            rows |= {f"{key}/{name}": entry["consistency"][name] for name in ("pairwise", "vs_reference")}
    for kind, entry in own["resolution"]["kinds"].items():
        for row in entry["rows"]:
            rows.setdefault(f"resolution/{kind}/{row['size'][0]}x{row['size'][1]}", row["accuracy"])
    rows |= {f"shuffle/{row['block']}x{row['block']}": row["shuffled"] for row in own["shuffle"]["rows"]}
    layers = {
        "location": (own["location"]["nets"]["trained"]["layers"], ("row", "column", "cells", "position_share")),
        "equivariance": (
            own["equivariance"]["features"]["layers"], ("error", "border", "interior", "unrelated", "cosine"),
        ),
        "attention": (own["attention"]["layers"], ("distance", "over_uniform", "diversity")),
    }  # fmt: skip
    for name, (entries, keys) in layers.items():
        for layer in entries:
            rows |= {f"{name}/{key}/{layer['layer'].replace(' ', '_')}": layer[key] for key in keys}
    for term, entry in own["attention"]["terms"].items():
        rows |= {f"attention/{key}/{term}": entry[key] for key in ("share", "relative")}
    rows["attention/norm_ratio"] = own["attention"]["norm_ratio"]
    for row in own["factorial"]["rows"]:
        at = "{:g}x{:g}".format(*row["offset"])
        for kind in ("accuracy", "decisions", "drift"):
            rows |= {f"factorial/{kind}/{name}/{at}": entry for name, entry in row[kind].items()}
    rows["factorial/offset_share"] = own["factorial"]["gradient"]["offset_share"]
    return {key: entry["value"] for key, entry in rows.items() if entry}


@pytest.fixture(scope="module")
def arrays():
    return probes.evaluate(subject(encoded("sincos2d"), Squares(N, textured=True)), OPTIONS)


@pytest.fixture(scope="module")
def scores(arrays):
    return probes.scores(arrays)


def test_means_of_scores_are_what_summarize_says(arrays, scores):
    """Of every probe; shares and drifts that are all alike would not tell."""
    wanted = said(probes.summarize(arrays))
    assert scores.keys() == wanted.keys()
    assert {key.split("/")[0] for key in wanted} == {"accuracy", *OPTIONS}
    for key, score in scores.items():
        assert score.values.mean() == pytest.approx(wanted[key], abs=1e-12, rel=1e-12), key
    assert len({round(value, 9) for value in wanted.values()}) > 100


def test_scores_know_their_images_and_their_scale(scores):
    for key, score in scores.items():
        places = np.arange(N) if score.images is None else score.images
        assert score.values.shape == places.shape, key
        probe = key.split("/")[0]
        few = key.startswith(("attention/share", "attention/relative", "attention/norm")) * 6
        few = few or (key == "factorial/offset_share") * 4
        assert len(places) == (few or (SOME if "images" in OPTIONS.get(probe, {}) else N)), key
        assert places.tolist() == [i * N // len(places) for i in range(len(places))]  # spread evenly
        if score.bounded:
            assert score.unit == "percent"
            assert 0 <= score.values.min() <= score.values.max() <= 1
    units = {"location/row/block_1": "", "location/position_share/embedding": "percent",
             "equivariance/error/block_2": "", "attention/distance/block_1": "px",
             "attention/diversity/block_1": "percent",
             "factorial/drift/encoding/1x0": "", "factorial/decisions/encoding/1x0": "percent"}  # fmt: skip
    assert {key: scores[key].unit for key in units} == units
    assert [scores[key].bounded for key in units] == [False] * 6 + [True]


def test_keys_can_be_written_on_a_command_line(scores):
    words = f"compare.metrics=[{','.join(scores)}]"
    assert OverridesParser.create().parse_override(words).value() == list(scores)
    assert " " not in words


def test_a_planted_code_is_decoded_whole_by_every_seed():
    """R^2 of 1, and its interval is about 1 whatever lies beyond."""
    h, w, n = 3, 4, 10
    columns = {
        "trained/layers": np.array(["block 1"]), "trained/grids": np.array([[h, w]]),
        "trained/row": np.zeros((1, n)), "trained/column": np.full((1, n), 1e-3) * np.arange(n),
        "trained/cells": np.ones((1, n)),
        "trained/between": np.full((1, n), 2.0), "trained/total": np.full((1, n), 8.0),
    }  # fmt: skip
    found = location.Location().scores(columns, np.zeros(n))
    assert found["row/block 1"].values.tolist() == [1] * n
    assert found["position_share/block 1"].values.tolist() == pytest.approx([0.25] * n)
    # squares of 0..3 about 1.5 are 5, in each of three rows
    assert found["column/block 1"].values == pytest.approx(1 - 1e-3 * np.arange(n) / 15)
    found = hierarchy.mean(np.stack([found["column/block 1"].values] * 2), bounded=False)
    assert found.low < found.value < found.high < 1


class Odd:
    defaults: dict = {}

    def __init__(self, score):
        self.score = score

    def scores(self, arrays, truth):
        return {"a (b) c": self.score, "undefined": None}


def test_scores_of_other_images_than_they_say_are_refused(monkeypatch):
    arrays = {"labels": np.zeros(4), "plain/pred": np.zeros(4), "meta": np.array('{"probes": {"odd": {}}}'),
              "odd/images": np.array([0, 2])}  # fmt: skip

    def found(score):
        monkeypatch.setitem(probes.REGISTRY, "odd", Odd(score))
        return probes.scores(arrays)

    two = found(stats.Score(np.ones(2)))
    assert two.keys() == {"accuracy", "odd/a_b_c"}  # what is undefined is left out
    assert two["odd/a_b_c"].images.tolist() == [0, 2]
    assert found(stats.Score(np.ones(1), images=np.array([3])))["odd/a_b_c"].images.tolist() == [3]
    with pytest.raises(ValueError, match=r"odd/a \(b\) c: expected scores of 2 images, got shape \(4,\)"):
        found(stats.Score(np.ones(4)))
