# Everything here is plain papermill and pytest; `make -n <target>` shows the commands.
PYTHON ?= python3
PROFILE ?= small
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXECUTED := outputs/executed
export OMP_WAIT_POLICY ?= PASSIVE
# notebooks/benchmarks imports benchmarks/, which is not installed
export PYTHONPATH := $(CURDIR)

# A notebook's target is its folder and its name, of which the first word is enough: reefl/table1, extensions/text.
NOTEBOOKS := $(patsubst notebooks/%.ipynb,%,$(wildcard notebooks/*/*.ipynb))
SHORT := $(foreach n,$(NOTEBOOKS),$(firstword $(subst _, ,$(n))))
OBJECTS := $(sort $(SHORT) $(NOTEBOOKS))

.PHONY: help setup demo test lint lab results report bench pretrain lock clean $(OBJECTS)

help:
	@echo "make demo                    walkthrough: ReeFL and DepthFL on real digits, in a few minutes"
	@echo "make test                    all tests"
	@echo "make reefl/table1 PROFILE=small"
	@echo "                             one notebook of a paper (smoke | small | paper): $(sort $(SHORT))"
	@echo "make results                 outputs/README.md: every stored table, and a verdict on every claim of the papers"
	@echo "make report                  HTML of executed notebooks and results in outputs/report/, readable offline"
	@echo "make bench                   engine speed against Flower, pfl, BlazeFL and bare loops"
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
	$(BIN)/papermill notebooks/walkthrough/00_start_here.ipynb $(EXECUTED)/walkthrough-00-demo.ipynb -p profile demo
	@echo "The executed notebook: $(EXECUTED)/walkthrough-00-demo.ipynb   the figures: outputs/walkthrough/figures/   open both with: make lab"

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

# Of two notebooks that share a first word the whole name is asked for: papermill refuses two inputs.
$(OBJECTS): setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill $(wildcard notebooks/$@_*.ipynb notebooks/$@.ipynb) $(EXECUTED)/$(subst /,-,$@)-$(PROFILE).ipynb -p profile $(PROFILE)

.DEFAULT:
	@echo "make: no target '$@'$(if $(filter %/$@,$(OBJECTS)),; did you mean: make $(filter %/$@,$(OBJECTS)))" >&2
	@echo "A notebook's target is <folder>/<name>: $(sort $(SHORT))" >&2
	@exit 2

bench: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/python -m benchmarks.setup_rivals
	$(BIN)/papermill notebooks/benchmarks/engine_speed.ipynb $(EXECUTED)/benchmarks-engine-small.ipynb -p profile small

pretrain: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/pretraining/deit_micro.ipynb $(EXECUTED)/pretraining-deit-small.ipynb -p profile small

lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev pyproject.toml --output-file requirements.lock
	echo uv==0.13.8 | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header - --output-file requirements-uv.lock

clean:
	rm -rf $(VENV) $(EXECUTED) outputs/report
