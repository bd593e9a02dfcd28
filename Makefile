# Everything here is plain papermill and pytest; `make -n <target>` shows the commands.
PYTHON ?= python3
PROFILE ?= small
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXECUTED := outputs/executed
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup demo test lint lab table1 pretrain lock clean

help:
	@echo "make demo                    walkthrough: ReeFL and DepthFL on real digits, in a few minutes"
	@echo "make test                    all tests"
	@echo "make table1 PROFILE=small    one table (smoke | small | paper)"
	@echo "make lab                     explore in JupyterLab"

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f'Python 3.11-3.13 is needed, this is {v[0]}.{v[1]}; try: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $(STAMP)

setup: $(STAMP)

demo: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/walkthrough/00_start_here.ipynb $(EXECUTED)/00_start_here.ipynb -p profile demo
	@echo "The executed notebook: $(EXECUTED)/00_start_here.ipynb   the figures: outputs/figures/   open both with: make lab"

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check fedlib tests
	$(BIN)/ruff format --check fedlib tests

lab: setup
	$(BIN)/jupyter lab notebooks

table1: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/reefl/table1_four_exits.ipynb $(EXECUTED)/table1_four_exits-$(PROFILE).ipynb -p profile $(PROFILE) -p run_missing True

pretrain: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/pretraining/deit_micro.ipynb $(EXECUTED)/deit_micro.ipynb -p profile small

lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev pyproject.toml --output-file requirements.lock
	echo uv==0.13.8 | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header - --output-file requirements-uv.lock

clean:
	rm -rf $(VENV) $(EXECUTED)
