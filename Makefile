# Everything here is plain papermill and pytest; `make -n <target>` shows the commands.
PYTHON ?= python3
PROFILE ?= small
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRA ?= notebooks
# `make setup BACKEND=cpu` (auto: where no driver is): PyTorch's CPU build, and none of these packages of the lock
ACCELERATED := ^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==
EXECUTED := outputs/executed
export OMP_WAIT_POLICY ?= PASSIVE
# notebooks/benchmarks imports benchmarks/, notebooks/pretraining imports pretraining/: neither is installed
export PYTHONPATH := $(CURDIR)

# A notebook's target is its folder and its name, of which the first word is enough: reefl/table1, extensions/text.
NOTEBOOKS := $(patsubst notebooks/%.ipynb,%,$(wildcard notebooks/*/*.ipynb))
SHORT := $(foreach n,$(NOTEBOOKS),$(firstword $(subst _, ,$(n))))
OBJECTS := $(sort $(SHORT) $(NOTEBOOKS))

.PHONY: help setup demo test quick test-all test-oldest core lint lab results pack notebooks site report bench pretrain lock clean atlas $(OBJECTS)

help:
	@echo "make demo                         walkthrough: ReeFL and DepthFL on real digits, in a few minutes"
	@echo "make reefl/table1 PROFILE=small   any notebook, by folder and first word (smoke | small | paper): notebooks/README.md"
	@echo "make reefl/table1 PROFILE=paper DEVICE=cuda   on a GPU: docs/gpu.md"
	@echo "make results                      outputs/README.md: every stored table, and a verdict on every claim of the papers"
	@echo "make notebooks                    every notebook as it looks when it has run, of stored runs: outputs/<paper>/notebooks/"
	@echo "make pack                         finished runs of outputs/runs into packs, which git holds; their folders go: docs/guide/results.md"
	@echo "make site                         guide, results and API as HTML, readable offline: outputs/site/html/"
	@echo "make atlas METHOD=mine.py         your own method on every task of the atlas, and on its map"
	@echo "make lab                          JupyterLab on this folder, open at the first notebook"
	@echo "make test, make bench             all tests; engine speed against Flower, pfl, BlazeFL and bare loops"
	@echo "make quick                        unit tests of what git diff touches, or of a folder: FOLDER=methods"
	@echo "make test-all                     and, for an hour, every method on every backbone with every tuner and task"
	@echo "make core                         the core without the lab, in an environment of its own"
	@echo "make test-oldest                  the tests on the oldest PyTorch that is supported"
	@echo "make ENV=active demo              any of these in the environment that is active, as conda's: nothing is installed"
	@echo "make setup BACKEND=cpu            once, before anything else: PyTorch's CPU build, without CUDA libraries (auto: if no driver is here)"

# Bytecode is compiled once here: where Python may not write it later, each process would compile what it imports anew.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode
# `make ENV=active …`: the environment that is active (conda's), which must have what is needed; nothing is installed
ifneq ($(ENV),)
$(if $(filter-out active,$(ENV)),$(error ENV = '$(ENV)' is not possible; allowed: active, or none for $(VENV)))
BIN := $(shell $(firstword $(if $(filter file,$(origin PYTHON)),python,$(PYTHON))) -c "import os, sys; print(os.path.dirname(sys.executable))")
VENV := .active
STAMP := $(VENV)/.has-$(EXTRA)
$(VENV)/.has-%:
	@"$(BIN)/python" docs/has.py $*
else
# What the lock pins of an extra of pyproject.toml, by its hashes; where PyTorch's CPU build is, nothing of CUDA
LOCKED = { test ! -e $(VENV)/.cpu || grep -oE '$(ACCELERATED)' requirements.lock | tr -d =; } | \
	    $(INSTALL) --require-hashes --excludes - -c requirements.lock -r pyproject.toml --extra
DRIVER = { command -v nvidia-smi || test -e /proc/driver/nvidia/version; } > /dev/null

$(STAMP): requirements.lock pyproject.toml
	$(if $(filter-out cpu auto,$(BACKEND)),$(error BACKEND = '$(BACKEND)' is not possible; allowed: cpu, auto, or none for what PyPI has))
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 14) else f'Python 3.11-3.14 is needed, this is {v[0]}.{v[1]}; try: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.lock
	rm -f $(VENV)/.cpu
ifneq ($(BACKEND),)
	@# PyTorch's own index holds the CPU builds; the lock knows PyPI's hashes alone, so these two come without.
	$(if $(filter auto,$(BACKEND)),$(DRIVER) ||) { UV_HTTP_RETRIES=1 $(INSTALL) --no-deps --torch-backend cpu $(shell grep -oE '^torch(vision)?==[0-9.]+' requirements.lock) \
	    2> $(VENV)/backend.log && touch $(VENV)/.cpu; } || \
	    { echo "make: https://download.pytorch.org/whl/cpu gave no CPU build of torch (see $(VENV)/backend.log); $(if $(filter auto,$(BACKEND)),PyPI's is taken,make setup without BACKEND=cpu takes PyPI's)" >&2; $(if $(filter auto,$(BACKEND)),true,false); }
endif
	$(LOCKED) $(EXTRA)
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@test -e $(VENV)/.cpu || $(DRIVER) || echo "make: no NVIDIA driver is here, and 4 GB of $(VENV) are for one; make clean, then make setup BACKEND=cpu, does without"
	touch $(STAMP)

# A further extra that a target needs: its stamp is a prerequisite
$(VENV)/.has-%: $(STAMP)
	$(LOCKED) $*
	touch $@
endif

setup: $(STAMP)

demo: setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/walkthrough/00_start_here.ipynb $(EXECUTED)/walkthrough-00-demo.ipynb -p profile demo
	@echo "The executed notebook: $(EXECUTED)/walkthrough-00-demo.ipynb   the figures: outputs/scratch/walkthrough/figures/   open both with: make lab"

# One thread in each of the two processes: two in each get in each other's way on two cores.
test: $(VENV)/.has-dev
	SINCE=$(SINCE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Unit tests alone, in under a minute: of the files that differ from main, or of FOLDER=methods
quick: $(VENV)/.has-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not system" $$($(BIN)/python -m tests.helpers.touched $(FOLDER))

# And what is marked slow: the cross product of tests/system/test_combinations.py, parts that change seldom (RARE in
# conftest.py), what takes long (tests/long.txt), and the notebooks that say nothing which those of `make test` do not
# say. Of the latter three, `make test SINCE=COMMIT` runs what tests a part that differs from that commit
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist load -m slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow notebooks

# The oldest PyTorch that is supported, in an environment of its own, with what else the lock holds
OLDEST := torch==2.11.0 torchvision==0.26.0
test-oldest:
	$(MAKE) .venv-oldest/.has-dev VENV=.venv-oldest
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --compile-bytecode $(OLDEST)
	$(MAKE) test VENV=.venv-oldest

# The core in an environment of its own that has the core's dependencies alone; no file of the lab can be imported
core:
	$(MAKE) setup VENV=.venv-core EXTRA=test
	OMP_NUM_THREADS=1 .venv-core/bin/python -m pytest -n 2 --dist loadfile -p tests.helpers.core_alone $(addprefix tests/,core layers data models methods engine)

lint: $(VENV)/.has-dev
	$(BIN)/ruff check fedlib fedlib_lab tests benchmarks pretraining docs
	$(BIN)/ruff format --check fedlib fedlib_lab tests benchmarks pretraining docs
	$(BIN)/basedpyright --pythonpath $(BIN)/python

lab: $(VENV)/.has-text
	$(BIN)/jupyter lab "--ServerApp.root_dir=$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/walkthrough/00_start_here.ipynb

results: $(VENV)/.has-text
	$(BIN)/python -m fedlib_lab.report.page

pack: $(STAMP)
	$(BIN)/python docs/packs.py --remove

notebooks: $(VENV)/.has-dev
	$(BIN)/python docs/notebooks.py

# A page is a file of this repository, so it is the source folder; a warning (a link that leads nowhere) is an error.
site: $(VENV)/.has-dev
	rm -rf docs/api
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d outputs/site/doctrees . outputs/site/html
	@echo "outputs/site/html/index.html"

report: site

$(filter cluster/%,$(OBJECTS)): $(VENV)/.has-cluster
$(filter benchmarks/%,$(OBJECTS)): $(VENV)/.has-bench
$(filter extensions/%,$(OBJECTS)): $(VENV)/.has-privacy
$(filter atlas/% cafedistill/% extensions/% raffm/% scalefl/%,$(OBJECTS)) atlas: $(VENV)/.has-text

# Of two notebooks that share a first word the whole name is asked for: papermill refuses two inputs.
$(OBJECTS): setup
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill $(wildcard notebooks/$@_*.ipynb notebooks/$@.ipynb) $(EXECUTED)/$(subst /,-,$@)-$(PROFILE).ipynb -p profile $(PROFILE) $(if $(shell grep -l run_missing $(wildcard notebooks/$@_*.ipynb notebooks/$@.ipynb)),-p run_missing True) $(if $(DEVICE),-p device $(DEVICE))

# A method of your own under the atlas's caps (CAPS: macs | memory | upload): its rates, and one seed on every task
atlas: setup
	@test -n "$(METHOD)" || { echo "make atlas METHOD=mine.py: name a file that registers a method, as notebooks/walkthrough/03_write_a_method.ipynb does" >&2; exit 2; }
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/atlas/map.ipynb $(EXECUTED)/atlas-map-$(PROFILE).ipynb -p profile $(PROFILE) -p method_file $(METHOD) $(if $(CAPS),-p caps $(CAPS)) $(if $(DEVICE),-p device $(DEVICE))
	@echo "The map with your method, its figures and its rank (which needs three seeds a row): $(EXECUTED)/atlas-map-$(PROFILE).ipynb   open it with: make lab"

.DEFAULT:
	@echo "make: no target '$@'$(if $(filter %/$@,$(OBJECTS)),; did you mean: make $(filter %/$@,$(OBJECTS)))" >&2
	@echo "A notebook's target is <folder>/<name>: $(sort $(SHORT))" >&2
	@exit 2

bench: $(VENV)/.has-bench
	@mkdir -p $(EXECUTED)
	$(BIN)/python -m benchmarks.setup_rivals
	$(BIN)/papermill notebooks/benchmarks/engine_speed.ipynb $(EXECUTED)/benchmarks-engine-small.ipynb -p profile small -p run_missing True

pretrain: $(VENV)/.has-dev
	@mkdir -p $(EXECUTED)
	$(BIN)/papermill notebooks/pretraining/deit_micro.ipynb $(EXECUTED)/pretraining-deit-small.ipynb -p profile small

lock: $(VENV)/.has-dev
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev pyproject.toml --output-file requirements.lock
	printf 'uv\nsetuptools-scm\n' | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -c requirements.lock - --output-file requirements-uv.lock

clean:
	rm -rf $(VENV) $(EXECUTED) outputs/site outputs/scratch docs/api
