"""eval.py as it is used: run folders, a report, and one-line errors that leave nothing behind."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from evaluating import make_run
from safetensors.torch import save_file

import vitpos
from vitpos import data, evaluation, parts, probes, report, sources


def digits_run(folder, pos, seed=0, **data):
    """A run on digits of another kind."""
    extra = {"data": {"name": "digits"} | data, "seed": seed, "epochs": 1, "run": folder.name}
    return make_run(folder, pos, extra=extra)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "deep" / "a", "rope_axial")
    make_run(root / "b", "none")
    return root


def test_runs_side_by_side(runs, tmp_path, evaluate):
    words = ("images=12", "batch_size=5", "probes=[translation,resolution,factorial]")
    code, out, _ = evaluate(f"runs={runs}", f"out={tmp_path / 'out'}", *words, figures=True)
    assert code == 0
    assert "rope_axial" in out
    assert "unseen" in out
    assert "decisions differ" in " ".join(out.split())
    results = report.read(tmp_path / "out" / "results.json")
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    assert results["provenance"]["command"].startswith("python eval.py runs=")
    assert {r["encoding"] for r in results["runs"]} == {"none", "rope_axial"}
    none = next(r for r in results["runs"] if r["encoding"] == "none")
    patch = none["probes"]["translation"]["variants"]["canvas"]["patch"]
    assert len(patch["shifts"]) == 16
    assert patch["logit_change"]["largest"] < 1e-4  # weights are large here; at trained scale it is below 1e-5
    assert patch["logit_change"]["differing_decisions"] == 0
    rope = next(r for r in results["runs"] if r["encoding"] == "rope_axial")
    assert rope["probes"]["translation"]["variants"]["canvas"]["patch"]["logit_change"]["largest"] > 1e-3
    assert rope["difference_to_none"]["baseline"] == "b"
    kinds = {(row["kind"], *row.get("size", [])) for row in rope["difference_to_none"]["rows"]}
    assert {("plain",), ("canvas", 36, 36), ("canvas", 48, 48)} <= kinds

    # Every number again from the stored decisions, and the plain accuracy again from the model.
    assert not list(runs.rglob("eval"))  # out holds everything
    assert "| `rope_axial` | home |" in (tmp_path / "out" / "table.md").read_text()
    for folder, source, run in (("a", runs / "deep" / "a", rope), ("b", runs / "b", none)):
        folder = tmp_path / "out" / folder
        single = report.read(folder / "results.json")["runs"]
        with np.load(folder / "predictions.npz", allow_pickle=False) as file:
            stored = dict(file)
        again = json.loads(json.dumps(probes.summarize(stored)))
        assert {key: single[0][key] for key in again} == again == {key: run[key] for key in again}
        images = data.load({"name": "digits"}, "test")
        chosen = [images.ids.index(i) for i in stored["ids"]]
        logits = vitpos.load(source / "last.safetensors")(data.normalize(images.batch(chosen), images.info))
        np.testing.assert_array_equal(stored["plain/pred"], logits.argmax(1).numpy())
    figures = sorted(p.name for p in (tmp_path / "out" / "b" / "figures").iterdir())
    assert "probe-factorial-drift.png" in figures  # a probe's own, drawn from its data
    assert [name for name in figures if not name.startswith("probe-")] == [
        "position.png", "resolution-canvas.png", "resolution-upsample.png", "shift.png",
    ]  # fmt: skip


QUICK = ("images=4", "probes=[translation]", "translation.subpatch=false")


def test_only_equal_images_are_compared(tmp_path, evaluate):
    root = tmp_path / "with, comma"
    digits_run(root / "none8", "none", object_size=8)
    digits_run(root / "rope12", "rope_axial", object_size=12)
    digits_run(root / "rope8", "rope_axial", object_size=8, val_fraction=0.2)
    digits_run(root / "seed1", "rope_axial", seed=1, object_size=8)
    code, out, _ = evaluate(f"runs={root}", *QUICK)  # a name with a comma is one folder
    assert code == 0
    results = report.read(root / "eval" / "results.json")
    found = {run["label"]: run.get("difference_to_none", {}).get("baseline") for run in results["runs"]}
    assert found == {"none8": None, "rope12": None, "rope8": "none8", "seed1": None}
    groups = [[run["label"] for run in group.runs] for group in report.groups(results)]
    assert groups == [["rope12"], ["rope8", "seed1", "none8"]]
    text = " ".join(out.split())
    assert "over the 15 whole-patch positions" in text
    assert "over the 24 whole-patch positions" in text
    for run in results["runs"]:  # without out, each has its own beside its weights
        own = root / run["label"] / "eval"
        assert len(report.read(own / "results.json")["runs"]) == 1
        assert (own / "predictions.npz").exists()
    # A run folder's own evaluation is not to be overwritten by that of several.
    code, _, err = evaluate(f"runs={root / 'none8'},{root / 'rope8'}", *QUICK)
    assert code == 2
    assert re.search(r"runs=.* one run's results and all of them; give out=FOLDER", err)


@pytest.fixture
def sweep(tmp_path):
    for pos in ("none", "rope_axial"):
        for seed in (0, 1):
            make_run(tmp_path / "sweep" / f"{pos}{seed}", pos, seed=seed)
    return tmp_path / "sweep"


def test_encodings_are_compared_over_seeds_and_again_without_models(sweep, tmp_path, evaluate, monkeypatch):
    for folder in sweep.iterdir():
        (folder / "config.yaml").write_text("pos: x\nseed: 7\nout: y\ninit: null\ntrain: {lr: 0.1, threads: 3}\n")
    quick = ("images=12", "probes=[translation,equivariance]", "translation.subpatch=false", "equivariance.images=8",
             "equivariance.exact_images=1")  # fmt: skip
    code, out, err = evaluate(f"runs={sweep}", *quick, "compare.margin=0.5")
    assert code == 0, err
    assert "encodings, over seeds and 12 test images" in out
    first = report.read(sweep / "eval" / "results.json")
    (found,) = first["comparison"]
    assert [(row["encoding"], row["seeds"]) for row in found["rows"]] == [("rope_axial", [0, 1]), ("none", [0, 1])]
    assert (found["baseline"], found["margin"], found["tests"]) == ("none", 0.5, 4)
    assert first["runs"][0]["recipe"] == {"init": False, "train": {"lr": 0.1}}
    rows = [row for run in first["runs"] for row in run.get("difference_to_none", {}).get("rows", [])]
    assert all(row["difference"]["p"] <= row["difference"]["p_holm"] <= 1 for row in rows)
    for name in ("table.csv", "table.tex", "table.md", "report.html"):
        assert "rope" in (sweep / "eval" / name).read_text()

    monkeypatch.setattr("vitpos.load", lambda *_, **__: pytest.fail("a model was loaded"))
    code, _, err = evaluate(f"results={sweep}", f"out={tmp_path / 'again'}", "compare.margin=0.5")
    assert code == 0, err
    again = report.read(tmp_path / "again" / "results.json")
    assert again["comparison"] == first["comparison"]
    assert again["runs"] == first["runs"]
    assert len(again["provenance"]["recomputed_from"]) == 4
    code, out, _ = evaluate(f"results={sweep}", f"out={tmp_path / 'again'}", "compare.baseline=rope_axial",
                            "compare.metrics=equivariance/interior/block_1")  # fmt: skip
    assert code == 0
    assert "equivariance/interior/block_1: on 8 of the images" in " ".join(out.split())
    (other,) = report.read(tmp_path / "again" / "results.json")["comparison"]
    assert (other["baseline"], len(other["metrics"])) == ("rope_axial", 1)
    own = [run["probes"]["equivariance"]["features"]["layers"][1]["interior"]["value"] for run in again["runs"]]
    cells = [row["cells"]["equivariance/interior/block_1"] for row in other["rows"]]
    assert sorted(value for cell in cells for value in cell["by_seed"]) == pytest.approx(sorted(own))
    # Other decisions of the same run are not mixed with these.
    own = sweep / "none0" / "eval"
    shutil.copytree(own, sweep / "copy")
    with np.load(own / "predictions.npz") as file:
        changed = dict(file) | {"plain/pred": (file["plain/pred"] + 1) % 10}
    code, _, _ = evaluate(f"results={sweep}", f"out={tmp_path / 'again'}")
    assert code == 0  # a copy counts once
    (sweep / "copy" / "predictions.npz").write_bytes(parts.pack(changed))
    code, _, err = evaluate(f"results={sweep}", f"out={tmp_path / 'again'}")
    assert code == 2
    assert "different decisions of none0" in err


def test_differences_of_models_are_corrected_for_all_of_an_evaluation():
    right = np.arange(60) < 30
    decisions = []
    for gained in (0, 7, 9):  # images that a model has right and the first has not
        pred = np.where(right | (np.arange(60) >= 60 - gained), 0, 1)
        decisions.append({"labels": np.zeros(60, int), "ids": np.arange(60).astype(str), "plain/pred": pred})
    runs = [{"label": label, "placement": None, "seed": 0, "checkpoint": None} for label in "abc"]
    evaluation.add_differences(runs, decisions, [None, 0, 0])
    assert "difference_to_none" not in runs[0]
    found = [run["difference_to_none"]["rows"][0]["difference"] for run in runs[1:]]
    assert [one["value"] for one in found] == pytest.approx([7 / 60, 9 / 60])
    assert [one["p"] for one in found] == pytest.approx([2 / 2**7, 2 / 2**9])  # McNemar's, all in one direction
    assert [one["p_holm"] for one in found] == pytest.approx([2 / 2**7, 2 * 2 / 2**9])


def test_runs_that_nothing_tells_apart_are_named(tmp_path, evaluate):
    for seed in (0, 1):
        for depth in (1, 2):
            make_run(tmp_path / f"none{seed}-{depth}", "none", seed=seed, model={"depth": depth})
    code, out, err = evaluate(f"runs={tmp_path}", "images=8", "probes=[shuffle]")
    assert code == 0, err
    assert "not compared over seeds: none: none0-1, none0-2 left out; all are seed 0 and no config.yaml" in out
    results = report.read(tmp_path / "eval" / "results.json")
    assert "comparison" not in results
    assert [line.split()[1] for line in results["not_compared"]] == ["none0-1,", "none1-1,"]


def test_out_holds_all_of_one_evaluation(tmp_path, evaluate):
    run = make_run(tmp_path / "run", "rope_axial")
    assert evaluate(f"checkpoint={run}", *QUICK, "tensorboard=true")[0] == 0
    assert len(list((run / "eval" / "tb" / "run").glob("events.*"))) == 1
    assert evaluate(f"checkpoint={run}", *QUICK)[0] == 0
    assert not (run / "eval" / "tb").exists()
    before = {p: p.read_bytes() for p in (run / "eval").rglob("*.*")}
    assert evaluate(f"checkpoint={run}", *QUICK, "images=3", f"out={tmp_path / 'X'}")[0] == 0
    assert {p: p.read_bytes() for p in (run / "eval").rglob("*.*")} == before
    for folder, count in ((run / "eval", 4), (tmp_path / "X", 3)):
        with np.load(folder / "predictions.npz") as file:
            assert len(file["ids"]) == count
        assert report.read(folder / "results.json")["runs"][0]["images"] == count
    other = make_run(tmp_path / "other", "none")
    (other / "eval").write_text("in the way of its own results, which go elsewhere")
    assert evaluate(f"checkpoint={other}", *QUICK, f"out={tmp_path / 'X'}")[0] == 0  # an earlier one may be replaced
    assert report.read(tmp_path / "X" / "results.json")["runs"][0]["images"] == 4


def test_runs_of_one_name_keep_apart(tmp_path, evaluate):
    for parent in ("x", "y"):
        make_run(tmp_path / parent / "figures", "none")  # also a name that a report uses itself
    code, _, err = evaluate(f"runs={tmp_path}", *QUICK, f"out={tmp_path / 'out'}", figures=True)
    assert code == 0, err
    assert {p.parent.name for p in (tmp_path / "out").glob("*/predictions.npz")} == {"figures-2", "figures-3"}
    # What a broken-off evaluation leaves is no obstacle.
    (tmp_path / "out" / "results.json").unlink(), (tmp_path / "out" / "report.html").unlink()
    (tmp_path / "out" / "table.md").unlink()
    evaluation.claim(tmp_path / "out" / "figures-2", "out=")
    with pytest.raises(ValueError, match=r"holds other things \(e.g. figures\)"):
        evaluation.claim(tmp_path / "out", "out=")


def test_one_checkpoint_policies_and_variants(runs, evaluate):
    code, out, _ = evaluate(
        f"checkpoint={runs / 'deep' / 'a' / 'last.safetensors'}", "images=6", "probes=[translation,resolution]",
        "resolution.policies=[extrapolate,interpolate]", "resolution.upsample=[28,[24,28]]", "resolution.canvas=none",
        "translation.variants=[circular]", "translation.subpatch=false",
    )  # fmt: skip
    assert code == 0, out
    run = report.read(runs / "deep" / "a" / "eval" / "results.json")["runs"][0]
    rows = run["probes"]["resolution"]["kinds"]["upsample"]["rows"]
    assert [(r["size"], r["policy"]) for r in rows] == [
        ([h, w], policy) for policy in ("extrapolate", "interpolate") for h, w in ((24, 24), (24, 28), (28, 28))
    ] or [(r["size"], r["policy"]) for r in rows] == [
        ([h, w], policy) for policy in ("extrapolate", "interpolate") for h, w in ((24, 24), (28, 28), (24, 28))
    ]
    assert set(run["probes"]["translation"]["variants"]) == {"circular"}
    assert (runs / "deep" / "a" / "eval" / "report.html").exists()


def test_bf16_stands_in_a_table_of_its_own(runs, tmp_path, evaluate):
    words = [f"checkpoint={runs / 'b'}", *QUICK]
    code, out, _ = evaluate(*words, "precision=bf16", f"out={tmp_path / 'low'}")
    assert code == 0
    assert "plain decisions agree with float32 on" in " ".join(out.split())
    assert evaluate(*words, f"out={tmp_path / 'full'}")[0] == 0
    low, full = (report.read(tmp_path / name / "results.json") for name in ("low", "full"))
    assert (low["provenance"]["precision"], full["provenance"]["precision"]) == ("bf16", "float32")
    assert low["runs"][0]["float32"]["accuracy"] == full["runs"][0]["accuracy"]
    both = report.groups({**full, "runs": [*low["runs"], *full["runs"]]})
    assert [group.apart for group in both] == ["precision bf16", "precision float32"]


def test_timm_models_by_name(tmp_path, evaluate):
    code, out, _ = evaluate("model=resnet10t", "data=digits", "data.canvas=64", f"out={tmp_path / 'cnn'}", "images=4")
    assert code == 0
    assert "random weights" in " ".join(out.split())
    run = report.read(tmp_path / "cnn" / "results.json")["runs"][0]
    assert run["probes"]["translation"]["patch_source"] == "total stride"
    assert run["encoding"] == "native"
    code, out, _ = evaluate(
        "model=vit_tiny_patch16_224", "data=digits", "model_args={patch_size: 4, depth: 1, embed_dim: 24}",
        f"out={tmp_path / 'vit'}", "images=4",
    )  # fmt: skip
    assert code == 0
    assert "dynamic_img_size" in out  # one size only: the cell says what helps, the rest is measured
    run = report.read(tmp_path / "vit" / "results.json")["runs"][0]
    assert len(run["probes"]["resolution"]["kinds"]["canvas"]["rows"]) == 1


def test_random_weights_are_the_same_again():
    """Or an evaluation could not go on, and several processes would measure different models."""
    args = {"patch_size": 4, "depth": 1, "embed_dim": 24}
    state = torch.get_rng_state()
    one, two = (
        evaluation.from_timm(name, {"name": "digits"}, pretrained=False, model_args=args, device="cpu").model
        for name in ["vit_tiny_patch16_224"] * 2
    )
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.blocks[0].mlp.fc1.weight.std() > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of checkpoint="),
        (["checkpoint=nowhere"], "no such file"),
        (["checkpoint=."], "holds no last.safetensors"),
        (["runs=nowhere"], "no such folder"),
        (["results=nowhere"], "results=nowhere: no such folder"),
        (["results=."], "no predictions.npz below it"),
        (["results=.", "runs=."], "got runs and results"),
        (["results="], "results= is empty"),
        (["results=.", "images=4"], "images= does not go with results=, .* only out, compare, tensorboard"),
        (["results=.", "data.root=x"], "data.root= does not go with results="),
        (["results=.", "data=folder"], "data= does not go with results="),
        (["results=.", "pretrained=true", "compare.margin=0.1"], "pretrained= does not go with results="),
        (["results=.", "resolution.canvas=none"], "resolution.canvas= does not go with results="),
        (["checkpoint={run}", "probes=shuffle", "resolution.canvas=none"], "resolution is not among the probes to run"),
        (["checkpoint={run}", "shortcut.steps=1"], "shortcut is not among the probes to run, which are .*translation"),
        (["checkpoint={run}", "resolution.upsample=[1.5]"], "resolution.upsample: a size is a side or .* got 1.5"),
        (["checkpoint={run}", "compare.margin=abc"], "compare.margin='abc' is str, expected float or int or null"),
        (["checkpoint={run}", "compare.marign=1"], "did you mean compare.margin"),
        (["checkpoint={run}", "compare.margin=2"], "compare.margin=2 must be a share between 0 and 1"),
        (
            ["checkpoint={run}", "compare.interval=bootstap"],
            "one of crossed, bootstrap; did you mean bootstrap",
        ),
        (["checkpoint={run}", "compare.baseline=nonne"], "compare.baseline=nonne is no encoding: .*did you mean none"),
        (["runs=."], "no run folder below"),
        (["checkpoint=x", "model=y"], "give one of"),
        (["model=vit_tiny_patch16_224"], "data=digits"),
        (["model=vit_tny_patch16_224", "data=digits"], "did you mean vit_tiny_patch16_224"),
        (["model=vit_tiny_patch16_224", "data=digits", "model_args={num_classes: 7}"], "7 classes.*10"),
        (["model=vit_tiny_patch16_224", "data=digits", "model_args={nonsense: 7}"], "nonsense"),
        (["model=vit_tiny_patch16_224", "data=digits", "model_args={in_chans: 3}"], "channel"),
        (["checkpoint={run}", "pretrained=true"], "go with model="),
        (["checkpoint={run}", "translation.step=1"], "did you mean translation.steps"),
        (["checkpoint={run}", "checkpont=1"], "did you mean checkpoint"),
        (["checkpoint={run}", "probes=[shortcuts]"], "unknown probe"),
        (["checkpoint={run}", "probes=[shortcuts]", "shortcut.steps=1"], "unknown probe"),
        (["checkpoint={run}", "probes=[]", "shortcut.steps=1"], "the probes to run, which are none"),
        (["checkpoint={run}", "resolution.upsample=[26]"], "try 24 or 28"),
        (["checkpoint={run}", "resolution.policies=[stretch]"], "stretch"),
        (["checkpoint={run}", "data.canvs=32"], "did you mean canvas"),
        (["checkpoint={run}", "device=warp"], "device=warp"),
        (["checkpoint={run}", "batch_size=0"], "batch_size"),
        (["checkpoint={run}", "precision=fp16"], "precision=fp16 must be one of float32, bf16"),
        (["checkpoint={junk}"], "not a readable safetensors"),
        (["checkpoint={other}"], "do not fit|no vitpos card"),
        (["checkpoint={nine}"], "9 classes"),
        (["checkpoint={letters}"], "other classes.*'a' and '0'"),
        (["checkpoint={run}", "out={junk}"], "out=.*junk.safetensors is a file, expected a folder"),
        (["checkpoint={run}", "out={junk}/below"], "junk.safetensors is a file, expected a folder"),
        (["checkpoint={run}", "out={made}"], "out=.*holds other things .*junk.safetensors.* no earlier evaluation"),
        (["checkpoint={run}", "out=/proc/vitpos"], "out=/proc/vitpos: cannot write into /proc"),
        (["checkpoint={run}", "images=1"], "images=1 must be 0 .* at least 2"),
        (["checkpoint={run}", "images=-3"], "images=-3"),
        (["checkpoint={run}", "images=abc"], "images='abc' is str, expected int"),
        (["checkpoint={run}", "pretrained=3"], "pretrained=3 is int, expected bool"),
        (["checkpoint={run}", "threads=0"], "threads=0"),
        (["checkpoint={run}", "translation.steps=abc"], "translation.steps='abc' is str, expected int"),
        (["checkpoint={run}", "translation=5"], "translation=5 is int"),
        (["checkpoint={run}", "probes=foo"], "unknown probe 'foo': known: .*shuffle, translation"),
        (["checkpoint={run}", "probes=[5]"], "unknown probe '5'"),
        (["model=vit_tiny_patch16_224", "data=digits", "model_args=5"], "model_args=5 is int, expected dict or null"),
        (
            ["model=vit_tiny_patch16_224", "data=digits", "model_args={depth: 0}"],
            "model_args.depth=0 must be 1 or more",
        ),
        (["model=vit'tiny", "data=digits"], "unknown timm model"),
        (["model=", "data=digits"], "model= is empty"),
        (["checkpoint="], "checkpoint= is empty"),
        (["runs="], "runs= is empty"),
        (["checkpoint={run}", "out="], "out= is empty"),
        (["runs={run},nowhere, at all"], "runs=nowhere: no such folder"),
        (["runs={run},"], "between the commas is empty"),
        (
            ["runs={made}", "note={run}{foreign}"],
            r"foreign.last.safetensors holds weights but no vitpos card.*1 of 2 runs",
        ),
    ],
)
def test_errors_are_one_line_and_write_nothing(words, message, tmp_path, monkeypatch, evaluate):
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "made"
    made.mkdir()
    names = {"junk": made / "junk.safetensors", "run": made / "run", "made": made}
    names["junk"].write_text("junk")
    if "{run}" in "".join(words):
        make_run(names["run"], "rope_axial")
    for name, path in (("other", made / "other.safetensors"), ("foreign", made / "foreign" / "last.safetensors")):
        if f"{{{name}}}" in "".join(words):
            path.parent.mkdir(exist_ok=True)
            save_file({"x": torch.zeros(2)}, path)
            names[name] = path
    early = "out=", "images=", "note=", "compare."  # refused before anything is loaded
    if any(word.startswith(early) for word in words):
        monkeypatch.setattr("vitpos.load", lambda *_, **__: pytest.fail("a model was loaded"))
    for name, classes in (("nine", [*"012345678"]), ("letters", [*"abcdefghij"])):
        if words and name in words[0]:
            names[name] = make_run(made / name, "rope_axial", classes=classes)
    if "runs=." in words:
        names["junk"].unlink(), made.rmdir()
    before = sorted(tmp_path.rglob("*"))
    words = [word for word in words if not word.startswith("note=")]
    filled = [re.sub(r"\{(\w+)\}", lambda m: str(names[m[1]]), word) for word in words]
    code, out, err = evaluate(*filled)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("error: ")
    assert re.search(message, err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_unreachable_weights_fail_at_once(monkeypatch):
    def unresolved(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unresolved)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(ValueError, match="hub cannot be reached"):
        sources.from_timm("vit_tiny_patch16_224", {"name": "digits"}, pretrained=True, model_args={}, device="cpu")
