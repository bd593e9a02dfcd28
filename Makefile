# Everything here is plain papermill and pytest; `make -n <target>` shows the commands.
PYTHON ?= python3
PROFILE ?= small
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# `make setup BACKEND=cpu`: PyTorch's CPU build, and none of these packages of the lock
ACCELERATED := ^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==
EXECUTED := outputs/executed
export OMP_WAIT_POLICY ?= PASSIVE
# notebooks/benchmarks imports benchmarks/, which is not installed
export PYTHONPATH := $(CURDIR)

# Paper objects: `make <object>` executes the notebook whose name begins with it.
OBJECTS := table1 table2 table3 table4 table5 table6 table7 table8 table9 table10 table11 decomposition \
           figure1 figure2 figure3 figure4 figure7 adaptive speech privacy text ray

.PHONY: help setup demo test lint lab results report bench pretrain lock clean $(OBJECTS)

help:
	@echo "make demo                    walkthrough: ReeFL and DepthFL on real digits, in a few minutes"
	@echo "make test                    all tests"
	@echo "make table1 PROFILE=small    one table or figure (smoke | small | paper): $(OBJECTS)"
	@echo "make results                 outputs/README.md: every stored table, and a verdict on every claim of the paper"
	@echo "make report                  HTML of executed notebooks and results in outputs/report/, readable offline"
	@echo "make bench                   engine speed against Flower, pfl, BlazeFL and bare loops"
	@echo "make lab                     explore in JupyterLab"

# Bytecode is compiled once here: where Python may not write it later, each process would compile what it imports anew.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode

$(STAMP): requirements.lock pyproject.toml
	$(if $(filter-out cpu,$(BACKEND)),$(error BACKEND = '$(BACKEND)' is not possible; allowed: cpu, or none for what PyPI has))
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f'Python 3.11-3.13 is needed, this is {v[0]}.{v[1]}; try: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.lock
ifeq ($(BACKEND),cpu)
	@# PyTorch's own index holds the CPU builds; the lock knows PyPI's hashes alone, so these two come without.
	$(INSTALL) --no-deps --torch-backend cpu $(shell grep -oE '^torch(vision)?==[0-9.]+' requirements.lock) 2> $(VENV)/backend.log || \
	    { echo "make: the CPU build of torch could not be fetched from https://download.pytorch.org/whl/cpu (see $(VENV)/backend.log); make setup without BACKEND=cpu takes PyPI's" >&2; exit 1; }
	grep -oE '$(ACCELERATED)' requirements.lock | tr -d = | $(INSTALL) --require-hashes --excludes - -r requirements.lock
else
	$(INSTALL) --require-hashes -r requirements.lock
endif
	$(INSTALL) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

setup: $(STAMP)

demo: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/walkthrough/00_start_here.ipynb $(EXECUTED)/00_start_here.ipynb -p profile demo
	@echo "The executed notebook: $(EXECUTED)/00_start_here.ipynb   the figures: outputs/figures/   open both with: make lab"

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check fedlib tests benchmarks
	$(BIN)/ruff format --check fedlib tests benchmarks

lab: setup
	$(BIN)/jupyter lab notebooks

results: setup
	$(BIN)/python -m fedlib.report.page

report: setup
	$(BIN)/python -m fedlib.report.site

$(OBJECTS): setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill $(wildcard notebooks/*/$@_*.ipynb notebooks/*/$@.ipynb) $(EXECUTED)/$@-$(PROFILE).ipynb -p profile $(PROFILE)

bench: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/python -m benchmarks.setup_rivals
	$(BIN)/papermill notebooks/benchmarks/engine_speed.ipynb $(EXECUTED)/engine_speed.ipynb -p profile small

pretrain: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/pretraining/deit_micro.ipynb $(EXECUTED)/deit_micro.ipynb -p profile small

lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev pyproject.toml --output-file requirements.lock
	echo uv==0.13.8 | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header - --output-file requirements-uv.lock

clean:
	rm -rf $(VENV) $(EXECUTED) outputs/report
