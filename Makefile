# make serve | sla | gpu | check | test | test-all | lint | format | fetch | wheel | images | release | clean. `make` alone says what each does.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?= smollm2-135m
ARGS ?=
# Test files that run side by side: many of them wait for processes of their own.
JOBS ?= 3
# Tests of what is pure: no process, no model, seconds in all.
PURE := tests/test_layers.py tests/test_documented.py $(addprefix tests/common/,blocks cluster config engine/kv engine/worker/test_step_times.py grammar/test_token_rules.py observe wire) \
  $(addprefix tests/common/engine/transfer/test_,connection.py frames.py incoming.py mailbox.py outgoing.py) $(addprefix tests/router/,policy text observe/test_slo.py cli/test_size.py) \
  $(addprefix tests/router/access/test_,audit.py keys.py limits.py tls.py) $(addprefix tests/router/dispatch/test_,admission.py prompt.py stream.py) \
  $(addprefix tests/router/fleet/test_,estimates.py prefix_index.py registry.py slices.py) tests/prefill_worker/test_scheduler.py \
  $(addprefix tests/decode_worker/,test_scheduler.py drafting/test_draft_tokens.py)

BIN := $(VENV)/bin
# Tests start hundreds of processes: each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# On a terminal pip shows what it downloads; into a file it says what went wrong, and no more.
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,--quiet)
NEWER := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve fetch bench compare sla gpu check test test-all clients chaos soak lint format docs docs-site docs-serve wheel images release lock clean

help:
	@echo "make serve      a service on this machine (PORT=8000 MODEL=smollm2-135m ARGS='--prefill 2 --decode 2')"
	@echo "make fetch      download MODEL only"
	@echo "make bench      load generator (ARGS='--help')"
	@echo "make compare    Diptych beside another engine (ARGS='--peer openvino --peer-env DIR'; --help)"
	@echo "make sla        how well goals are met and at what cost, in virtual time: tables and plots (ARGS='--only policies'; --help)"
	@echo "make gpu        what a GPU node can tell, in ten minutes, into a folder (OUT=build/gpu ARGS='--parts first'; --help)"
	@echo "make check      lint and the tests of what is pure, in a minute"
	@echo "make test       lint and every quick test; says which 30 were slowest"
	@echo "make test-all   lint and every test that this machine can run, but for make clients"
	@echo "make clients    every client of docs/reference/clients.md, in environments of their own (ARGS='-k aider')"
	@echo "make chaos      kills, freezes and cuts off workers for minutes (SEED=1 DURATION=180)"
	@echo "make soak       half an hour of load, to see what grows (DURATION=1800 PLOT=build/soak.png)"
	@echo "make lint       ruff and mypy;  make format  rewrites as ruff wants it;  make docs  rewrites docs/reference/configuration.md and helm/"
	@echo "make docs-site  the documentation with search in build/site;  make docs-serve  shows it while you write"
	@echo "make wheel      wheel and sdist into dist/, with CPU kernels for KERNELS=all instruction sets or those named"
	@echo "make images     router, and workers for cpu, cuda and rocm (REGISTRY=ghcr.io/acme PUSH=yes IMAGES=router,worker-cpu)"
	@echo "make release    wheel, sdist, bills of materials, images, chart, signatures into dist/ (REGISTRY=...; IMAGES=none)"
	@echo "make lock       hashes of what the images install, from helm/images/constraints.txt"
	@echo "make clean      remove what was built, the virtual environment included"

# ------------------------------------------------------------------ environment: made on demand, remade when NEWER changes

$(BIN)/python:
	@for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "Diptych needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	echo "creating $(VENV) with $$("$$found" --version)"; "$$found" -m venv "$(VENV)"

$(VENV)/.serve: $(NEWER) | $(BIN)/python
	@echo "installing Diptych into $(VENV): torch and some thirty packages, two or three minutes, once"
	@$(PIP) -c constraints.txt -e ".[router,worker]"
	@touch $@

$(VENV)/.bench: $(NEWER) | $(BIN)/python
	@$(PIP) -c constraints.txt -e ".[bench]"
	@touch $@

$(VENV)/.docs: $(NEWER) | $(BIN)/python
	@$(PIP) -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.dev: $(NEWER) | $(BIN)/python
	@echo "installing Diptych and its test tools into $(VENV) (a few minutes, once)"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $(VENV)/.serve $(VENV)/.bench $@

# ------------------------------------------------------------------ run

serve: $(VENV)/.serve
	@exec $(BIN)/diptych serve --port $(PORT) --model $(MODEL) $(ARGS)

fetch: $(VENV)/.serve
	@exec $(BIN)/diptych fetch $(MODEL)

bench: $(VENV)/.bench
	@exec $(BIN)/diptych bench $(ARGS)

compare: $(VENV)/.serve $(VENV)/.bench
	@exec $(BIN)/python -m benchmarks.compare $(ARGS)

sla: $(VENV)/.serve $(VENV)/.bench
	@exec $(BIN)/python -m benchmarks.sla $(ARGS)

# A bare GPU machine has its own Python with torch, no network, and perhaps a folder of wheels: nothing is installed.
OUT ?= build/gpu
gpu:
	@TAIL=200 PYTHON="$(if $(wildcard $(VENV)/.serve),$(BIN)/python,$(PYTHON))" benchmarks/gpu_machine.sh "$(OUT)" \
	  "node:$(LIMIT):$(ARGS)"
LIMIT ?= 570

# ------------------------------------------------------------------ check

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tests/phrases.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/python docs/reference/write_configuration.py > docs/reference/configuration.md
	@for page in schema readme dashboards; do $(BIN)/python helm/write_$$page.py; done

# The site, with search: build/site/index.html. docs-serve shows pages while they are written.
docs-site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html"

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

check: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --hypothesis-profile quick -m "not slow" $(PURE) $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --longest-first --durations=30 --budget-s 300 --hypothesis-profile quick -m "not slow and not gpu and not chaos" $(ARGS)

# Storms and chips come last and alone: they are about what happens while nothing else takes the cores.
test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --longest-first --durations=30 -m "not chaos and not gpu and not clients" $(ARGS)
	$(BIN)/pytest -m "chaos or gpu" $(ARGS)

clients: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs --durations=0 -m clients tests/clients $(ARGS)

chaos: $(VENV)/.dev
	CHAOS_SEED=$(or $(SEED),1) CHAOS_SECONDS=$(or $(DURATION),180) $(BIN)/pytest -s -m chaos tests/chaos $(ARGS)

soak: $(VENV)/.dev
	SOAK_SECONDS=$(or $(DURATION),1800) SOAK_PLOT=$(or $(PLOT),build/soak.png) $(BIN)/pytest -s tests/chaos/test_soak.py

# ------------------------------------------------------------------ release

KERNELS ?= all
wheel: $(VENV)/.dev
	@DIPTYCH_KERNELS=$(KERNELS) $(BIN)/python -P -m build --no-isolation --outdir dist .

# REGISTRY has no default: images are pushed to a registry of your own.
REGISTRY ?=
IMAGES ?=
ENGINE ?=
PUSH ?= no
PYTHON_IMAGE ?=
TORCH_INDEX ?=
CUDA_VERSION ?=
PIP_CONF ?=
IMAGE_FLAGS = --registry "$(REGISTRY)" --images "$(IMAGES)" --engine "$(ENGINE)" --push "$(PUSH)" \
  --python-image "$(PYTHON_IMAGE)" --torch-index "$(TORCH_INDEX)" --cuda-version "$(CUDA_VERSION)" --pip-conf "$(PIP_CONF)"
images:
	@$(PYTHON) -m helm.images.build $(IMAGE_FLAGS)

$(VENV)/.release: $(NEWER) | $(BIN)/python
	@$(PIP) -c constraints.txt -e ".[release]" "setuptools>=77"
	@touch $@

release: $(VENV)/.release
	@$(BIN)/python -m helm.images.release $(IMAGE_FLAGS) --kernels "$(KERNELS)"

# Hashes of what the images install, after a change of helm/images/constraints.txt.
lock: $(VENV)/.release
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python helm/images/write_requirements.py

clean:
	rm -rf build dist .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
