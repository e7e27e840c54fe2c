# `make` lists the targets. Each target creates or updates .venv when needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.up-to-date
# The shell parses ARGS like any command line.
ARGS ?=
NAME ?= default
STUDY ?=
# A make variable, because the shell's own SECONDS counts up.
SECONDS ?= 600
# Quote all other values, so that the shell cannot run them as commands.
text = '$(subst ','\'',$(value $(1)))'
unexport NAME STUDY SECONDS
# Keep compiled bytecode: compiling in each worker takes a tenth of the test time.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: sweeps and tests run one process per core, and results do not depend on the number of cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup sweep test test-all mutants chaos study verify-results lint format docs dashboard setup-gpu gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5) and "simbal needs Python 3.11.5 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt --upgrade pip  # the pip that comes with Python 3.11 takes twice as long
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'  # most modules are never imported, so skip compiling them
	touch $@

sweep: $(STAMP) ## train simbal and lbl with two seeds each, and print their table (more: ARGS="seed=0-4")
	$(BIN)/python train.py -m name=quickstart balancing=simbal,lbl seed=0,1 $(ARGS)

test: $(STAMP) ## run the fast tests (one folder: ARGS=tests/model)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" --durations=10 $(ARGS)

test-all: $(STAMP) ## run all tests with coverage (ten times the examples: ARGS=--hypothesis-profile=thorough)
	$(BIN)/python -m slipcover --source src/simbal --skip-covered -m pytest -n 4 --dist worksteal --durations=10 $(ARGS)

mutants: $(STAMP) ## check that `make test` detects each deliberate mistake (some files: ARGS=balancing/lbl.py)
	$(BIN)/python -m tests.mutants $(ARGS)

chaos: $(STAMP) ## check that no run is lost to random kills or damaged files (SECONDS=600)
	$(BIN)/python -m tests.chaos.campaign --seconds $(call text,SECONDS) $(ARGS)

study: $(STAMP) ## run or resume a study, then write its tables and figures (STUDY=results/collapse)
	$(BIN)/python -m results.tools.study $(call text,STUDY) $(ARGS)

verify-results: $(STAMP) ## recompute the tables in results/ from rows.csv
	$(BIN)/python -m results.tools.verify

lint: $(STAMP) ## check style, import order and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(STAMP) ## fix style, and regenerate the comments of conf/ from the schema
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	PYTHONPATH=docs $(BIN)/python -m generators.comments

docs: $(STAMP) ## build the documentation site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

dashboard: $(STAMP) ## start TensorBoard for a sweep (NAME=quickstart)
	$(BIN)/tensorboard --logdir outputs/$(call text,NAME)

setup-gpu: $(STAMP) ## install Triton and MegaBlocks for GPU backends; nothing is compiled
	$(BIN)/python -m simbal.experts.megablocks_setup

gpu-check: $(STAMP) ## check that expert backends are correct, and time them (SMOKE=1: dry run on a CPU)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

clean: ## remove .venv and caches; keep outputs and prepared data
	rm -rf .venv build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
