# make demo | test | lint | docs | figures | bench | bench-train | bench-eval: each installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: install demo test test-slow lint docs figures bench bench-train bench-eval clean
.DEFAULT_GOAL := test

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

test: install
	$(BIN)/python -m pytest -n $(JOBS)

test-slow: install
	$(BIN)/python -m pytest -n $(JOBS) -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two trainings at a time, one thread each, then both probes on all of them.
DEMO := runs/demo
TRAIN_DEMO := $(BIN)/python train.py -m experiment=demo hydra/launcher=joblib hydra.launcher.n_jobs=$(JOBS)

demo: install
	rm -rf $(DEMO)
	$(TRAIN_DEMO) pos=none,ape1d,ape2d,sincos2d,rope_axial,rpb out=$(DEMO)/home
	$(TRAIN_DEMO) data.placement=uniform pos=sincos2d,rope_axial out=$(DEMO)/uniform
	$(BIN)/python eval.py runs=$(DEMO)

# Puts the demo's table in the place of the README's.
define REPLACE_TABLE
import pathlib, re
readme, table = pathlib.Path("README.md"), pathlib.Path("$(DEMO)/eval/table.md").read_text()
new, count = re.subn(r"\| encoding \| trained at .*?\n(?!\|)", lambda _: table, readme.read_text(), count=1, flags=re.S)
assert count == 1, "README.md has no table of results"
readme.write_text(new)
endef
export REPLACE_TABLE

# The README's figures and table, from the demo's results.
figures: $(DEMO)/eval/results.json
	cp $(DEMO)/eval/figures/position.png $(DEMO)/eval/figures/shift.png assets/
	$(BIN)/python -c "$$REPLACE_TABLE"

$(DEMO)/eval/results.json:
	$(MAKE) demo

# What encodings cost next to timm's and to none; on an idle machine, about twenty minutes.
bench: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kernels.py

# Reading and steps next to torchvision's and timm's; on an idle machine, about ten minutes.
bench-train: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/training.py

# Five shifts of every image next to a plain loop over images; about five minutes.
bench-eval: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/evaluation.py

docs: install
	$(BIN)/python -m vitpos.encodings --docs docs/encodings
	$(BIN)/python -m vitpos.backbone > docs/models.md

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
