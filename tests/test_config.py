import importlib
import importlib.metadata
from datetime import datetime
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from vitpos import cli, config, data

CONFIGS = config.Path(__file__).parents[1] / "configs"


def composed(*overrides: str):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))


@pytest.mark.parametrize("name", sorted(data.CONFIGS))
def test_every_dataset_has_a_model_and_a_training_recipe(name):
    run = config.typed(composed(f"data={name}"))
    assert run.data.name == name
    assert run.model.name.startswith("vit_")


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_composes(path):
    config.typed(composed(f"experiment={path.stem}", *(["init=x"] if path.stem == "finetune" else [])))


def test_fine_tuning_needs_a_run_to_begin_from():
    with pytest.raises(ValueError, match="it needs init=RUN_FOLDER"):
        config.typed(composed("experiment=finetune"))


def test_digits_patch_is_the_models_patch():
    assert config.typed(composed("data.patch=3")).model.kwargs["patch_size"] == 3


def test_pos_becomes_canonical():
    assert config.typed(composed("pos='rope_axial( theta=50 )+ape1d'")).pos == "rope_axial(theta=50.0) + ape1d"


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1", "train.epochs=0", "train.batch_size=0", "train.lr=0", "train.pos_lr_mult=-1",
        "train.weight_decay=-0.1", "train.betas=[0.9]", "train.betas=[0.9,1.0]", "train.warmup=1",
        "train.label_smoothing=1", "train.optimizer=adamwx", "train.layer_decay=0", "train.loss=mse",
        "train.bce_threshold=1", "train.mixup=-1", "train.cutmix=-1", "train.mix_prob=2", "train.accumulate=0",
        "train.repeats=0", "train.clip_grad=-1", "train.ema=1", "train.precision=half", "train.threads=0",
        "train.pictures=-1",
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(override):
    key = override.split("=")[0]
    with pytest.raises(ValueError, match=rf"^{key}=.* must be "):
        config.typed(composed(override))


@pytest.mark.parametrize("sizes", ["[]", "[0]", "[[16]]", "[[16,24,8]]", "[big]", "[1.5]", "[[16,-8]]"])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match=r"^train.sizes"):
        config.typed(composed(f"train.sizes={sizes}"))
    assert config.typed(composed("train.sizes=[16,[24,32]]")).train.sizes == [16, [24, 32]]


def test_keys_that_hydra_lets_through():
    with pytest.raises(ValueError, match=r"unknown config key 'train.epoch'; did you mean epochs"):
        config.typed(composed("+train.epoch=3"))
    with pytest.raises(ValueError, match="unknown config key 'sed'; did you mean seed"):
        config.typed(composed("+sed=3"))
    with pytest.raises(ValueError, match=r"model.kwargs.img_size is not set here"):
        config.typed(composed("+model.kwargs.img_size=32"))


def test_suggestions():
    cfg = composed()
    assert config.suggest("epochs", cfg) == "did you mean train.epochs?"
    assert config.suggest("train.lrr", cfg) == "did you mean train.lr?"
    assert config.suggest("data.zzz", cfg).startswith("known: data.name, data.canvas")
    assert config.suggest("data.classes", cfg).startswith("known: data.name, data.canvas"), (
        "not model.kwargs.class_token"
    )
    assert config.suggest("train.seed", cfg) == "did you mean seed?"
    assert config.suggest("dta.zzz", cfg).startswith("known: pos, seed")
    with_hydra = OmegaConf.create({"hydra": {"run": {"dir": "."}, "verbose": False}, "seed": 0})
    assert config.suggest("hydra.foo", with_hydra) == "known: hydra.run, hydra.verbose"
    assert config.suggest("sed", with_hydra) == "did you mean seed?"


def test_new_folder():
    run = config.typed(composed("pos='rope_axial(theta=50) + ape1d'", "seed=3"))
    folder = config.new_folder(run)
    assert folder.parts[0] == "runs"
    assert folder.name.endswith("-rope_axial-theta-50.0-_ape1d-s3")
    assert config.new_folder(run) != config.new_folder(config.typed(composed("pos=ape1d")))
    run.out = "elsewhere"
    assert config.new_folder(run) == config.Path("elsewhere")


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "datetime", SimpleNamespace(now=lambda: datetime(2030, 1, 2, 3, 4, 5)))
    run = config.typed(composed("pos=ape1d"))
    made = []
    for _ in range(3):
        made.append(config.new_folder(run))
        made[-1].mkdir(parents=True)
    assert [p.name for p in made] == ["03-04-05-ape1d-s0", "03-04-05-ape1d-s0-2", "03-04-05-ape1d-s0-3"]


def test_check_folder(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("")
    (tmp_path / "empty").mkdir()
    run = config.typed(composed())
    for name, message in {
        "file": "file, expected a folder", "file/x/y": "file is a file, expected a folder",
        "taken": "holds files already", "z" * 300: "name too long",
    }.items():  # fmt: skip
        run.out = str(tmp_path / name)
        with pytest.raises(ValueError, match=rf"^out=.*(?i:{message})"):
            config.check_folder(run)
    (tmp_path / "empty" / ".saving-x").mkdir()  # by another process that tries the same
    for name in ("empty", "new/er"):
        run.out = str(tmp_path / name)
        config.check_folder(run)
    for key, path in (("out", "/proc/vitpos"), ("resume", "/proc/self")):  # where nobody can write, not root either
        run.out, run.resume = None, None
        setattr(run, key, path)
        with pytest.raises(ValueError, match=rf"^{key}={path}: cannot write into /proc"):
            config.check_folder(run)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({"a": 1, "b": {"c": [1]}}, {"b": {"c": [1]}, "a": 1}, None),
        ({"a": 1, "b": {"c": 1}}, {"a": 1, "b": {"c": 2}}, ("b.c", 1, 2)),
        ({"a": 1}, {"a": 1, "b": 2}, ("b", None, 2)),
        ({"a": {"b": 2}}, {"a": 3}, ("a", {"b": 2}, 3)),
    ],
)
def test_difference(ours, theirs, expected):
    assert config.difference(ours, theirs) == expected


def test_identity_is_all_but_where_and_how():
    run = config.typed(composed("data=folder", "data.root=x", "data.workers=1", "out=y", "train.threads=1"))
    moved = config.typed(composed("data=folder", "data.root=z", "data.workers=2", "train.cpu=true"))
    assert config.identity(run) == config.identity(moved)
    other = config.typed(composed("data=folder", "data.root=x", "data.flip=false"))
    assert config.difference(config.identity(other), config.identity(run)) == ("data.flip", False, True)


# the stored configuration of a run that is continued


def stored(tmp_path, *overrides: str):
    run = config.typed(composed(*overrides))
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(run)))
    return run


def test_resumed_takes_the_stored_values(tmp_path):
    run = stored(tmp_path, "seed=5", "pos=ape1d", "data=folder", "data.root=x")
    again = config.typed(config.resumed(composed(), tmp_path))
    assert again.resume == str(tmp_path)
    again.resume = None
    assert again == run


def test_resumed_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run there"):
        config.resumed(composed(), tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it has no pos, seed, data"), ("pos: [a\nb: }", "parsing a flow"), ("- a\n- b", "it has no pos"),
        ("pos: none\nseed: x\ndata: {}\nmodel: {}\ntrain: {}", "'x'"), ("\0", "not allowed"),
    ],
)  # fmt: skip
def test_damaged_configuration_is_named_in_one_line(tmp_path, content, message):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=rf"config.yaml is damaged: .*{message}") as caught:
        config.resumed(composed(), tmp_path)
    assert "\n" not in str(caught.value)


# words of the command line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("none,ape1d", ["none", "ape1d"]),
        ("a(x=1,y=(2,3)), b + c(z=[4,5])", ["a(x=1,y=(2,3))", "b + c(z=[4,5])"]),
        ("a(x='p,q'),b", ["a(x='p,q')", "b"]),
        ("a(x='(,'),b", ["a(x='(,')", "b"]),
        ("a", ["a"]),
    ],
)
def test_split_at_top_level_commas(text, parts):
    assert cli.split(text) == parts


@given(st.text(st.characters(exclude_characters="\n\r$", codec="utf-8"), min_size=1))
def test_quote_survives_hydras_grammar(text):
    """`$` is left out: Hydra's interpolation stays available in paths."""
    override = OverridesParser.create().parse_override(f"pos={cli.quote(text)}")
    assert str(getattr(override.value(), "text", override.value())) == text


@pytest.mark.parametrize(
    ("word", "sweeping", "expected"),
    [
        ("pos=rope_axial(theta=50)", False, "pos='rope_axial(theta=50)'"),
        ("pos=none,ape1d", False, "pos='none,ape1d'"),
        ("pos=none,a(b=1,c=2)", True, "pos='none','a(b=1,c=2)'"),
        ("pos='none'", False, "pos='none'"),
        ("resume=null", False, "resume=null"),
        ("data.root=/a=b (c)", False, "data.root='/a=b (c)'"),
        ("seed=0,1", True, "seed=0,1"),
        ("model.kwargs.qk_norm=true", False, "++model.kwargs.qk_norm=true"),
        ("model.kwargs={patch_size:16}", False, "++model.kwargs={patch_size:16}"),
        ("model.kwargsx=1", False, "model.kwargsx=1"),
        ("-m", True, "-m"),
    ],
)
def test_prepare(word, sweeping, expected):
    assert cli.prepare(word, sweeping) == expected


def test_explain_is_one_line():
    assert cli.explain(ValueError("first\n\n  second")) == "first second"
    assert cli.explain(ValueError()) == "ValueError"


@pytest.mark.parametrize("look", [importlib.metadata.version, importlib.import_module])
def test_a_missing_package_is_named_with_what_brings_it(look, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.task(look)("no_such_package")
    assert ended.value.code == 2
    brings = "pip install 'vitpos[train,eval]' brings all that is needed"
    assert capsys.readouterr().err == f"error: no_such_package is not installed; {brings}\n"


def test_every_process_says_what_went_wrong(monkeypatch, capsys):
    for rank, expected in {"0": "error: no\n", "1": "error in process 1: no\n"}.items():
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            cli.fail("no")
        assert (end.value.code, capsys.readouterr().err) == (2, expected)
