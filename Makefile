# `make` lists the targets. Each sets up .venv first if it is missing or older than the pinned versions.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.up-to-date
# ARGS is read by the shell as if it were typed there: quotes, $ and ; mean in it what they mean on any command line.
ARGS ?=
NAME ?= default
STUDY ?=
# Not the shell's own variable of this name, which counts up: make puts its value into the command.
SECONDS ?= 600
# The other values are text, in which neither make nor the shell finds a command.
text = '$(subst ','\'',$(value $(1)))'
unexport NAME STUDY SECONDS
# What is compiled is kept, or each of two workers would compile the project and its tests anew, for a tenth of the time.
unexport PYTHONDONTWRITEBYTECODE
# One thread a process: sweeps and tests run one process per core, and results do not depend on the core count.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup sweep test test-all mutants chaos study verify-results lint format docs dashboard setup-gpu gpu-check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "simbal needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt --upgrade pip  # that of Python 3.11 takes twice as long for the rest
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'  # most of it is never imported
	touch $@

sweep: $(STAMP) ## the main job: simbal against lbl, two seeds each, to a table (more: ARGS="seed=0-4")
	$(BIN)/python train.py -m name=quickstart balancing=simbal,lbl seed=0,1 $(ARGS)

test: $(STAMP) ## the tests that answer in minutes (one file: ARGS=tests/model)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" --durations=10 $(ARGS)

test-all: $(STAMP) ## all tests, and what of src/ they run (ten times the examples: ARGS=--hypothesis-profile=thorough)
	$(BIN)/python -m slipcover --source src/simbal --skip-covered -m pytest -n 4 --dist worksteal --durations=10 $(ARGS)

mutants: $(STAMP) ## does `make test` see each of 118 deliberate mistakes? (some files: ARGS=balancing/lbl.py)
	$(BIN)/python -m tests.mutants $(ARGS)

chaos: $(STAMP) ## random kills, damaged files, a full disk: nothing may be lost (SECONDS=600)
	$(BIN)/python -m tests.chaos.campaign --seconds $(call text,SECONDS) $(ARGS)

study: $(STAMP) ## run a study or continue it, then write its tables and figures (STUDY=results/collapse)
	$(BIN)/python -m results.tools.study $(call text,STUDY) $(ARGS)

verify-results: $(STAMP) ## recompute the numbers of the tables in results/ from rows.csv
	$(BIN)/python -m results.tools.verify

lint: $(STAMP) ## linter, formatter check, order of imports and type checker
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(STAMP) ## let the linter and formatter fix what they can; comments in conf/ as the schema has them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	PYTHONPATH=docs $(BIN)/python -m generators.comments

docs: $(STAMP) ## the documentation as a site: site/index.html, for any browser, no server needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

dashboard: $(STAMP) ## TensorBoard of a sweep: make dashboard NAME=quickstart
	$(BIN)/tensorboard --logdir outputs/$(call text,NAME)

setup-gpu: $(STAMP) ## for GPU backends: Triton and MegaBlocks, nothing compiled
	$(BIN)/python -m simbal.experts.megablocks_setup

gpu-check: $(STAMP) ## are the expert backends right, and how fast (SMOKE=1: dry run on a CPU)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

clean: ## remove .venv and caches; outputs and prepared data stay
	rm -rf .venv build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
