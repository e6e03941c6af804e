# make serve | sla | gpu | check | test | test-all | test-vllm | lint | format | fetch | wheel | images | release | clean. `make` lists all targets.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?= smollm2-135m
ARGS ?=
# Number of test files that run at the same time. Many wait for processes that they started.
JOBS ?= 3
# Tests of pure code: no processes, no models; a few seconds in total.
PURE := tests/test_layers.py tests/test_documented.py $(addprefix tests/common/,blocks cluster config engine/kv engine/worker/test_step_times.py grammar/test_token_rules.py observe wire) \
  $(addprefix tests/common/engine/transfer/test_,connection.py frames.py incoming.py mailbox.py outgoing.py) $(addprefix tests/router/,policy text observe/test_slo.py cli/test_size.py) \
  $(addprefix tests/router/access/test_,audit.py keys.py limits.py tls.py) $(addprefix tests/router/dispatch/test_,admission.py prompt.py stream.py) \
  $(addprefix tests/router/fleet/test_,estimates.py prefix_index.py registry.py slices.py) tests/prefill_worker/test_scheduler.py \
  $(addprefix tests/decode_worker/,test_scheduler.py drafting/test_draft_tokens.py)

BIN := $(VENV)/bin
# Tests start hundreds of processes: without bytecode each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# pip shows progress on a terminal, and only errors in a file.
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,--quiet)
NEWER := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve fetch bench compare sla gpu check test quick test-all test-vllm clients chaos soak lint style types format docs docs-site docs-serve wheel images release lock clean

help:
	@echo "make serve      run the service on this machine (PORT=8000 MODEL=smollm2-135m ARGS='--prefill 2 --decode 2')"
	@echo "make fetch      download MODEL without serving it"
	@echo "make bench      put load on a server; report latencies and throughput (ARGS='--help')"
	@echo "make compare    measure Diptych and another engine on this machine (ARGS='--peer openvino --peer-env DIR'; --help)"
	@echo "make sla        simulate how well goals are met and at what cost: tables and plots (ARGS='--only policies'; --help)"
	@echo "make gpu        test and measure this machine's GPU in ten minutes, results in a folder (OUT=build/gpu ARGS='--parts first'; --help)"
	@echo "make check      lint, and tests without processes or models; about a minute"
	@echo "make test       lint and all quick tests; lists the 30 slowest"
	@echo "make test-all   lint and all tests that this machine can run, except those of make clients"
	@echo "make test-vllm  test --engine vllm in an environment of its own, build/vllm (ARGS='-k test_contract')"
	@echo "make clients    test the clients in docs/reference/clients.md, each in its own environment (ARGS='-k aider')"
	@echo "make chaos      kill, freeze and disconnect workers under load (SEED=1 DURATION=180)"
	@echo "make soak       half an hour of load to find leaks (DURATION=1800 PLOT=build/soak.png)"
	@echo "make lint       ruff, mypy, package layers and style"
	@echo "make format     fix and format the code with ruff"
	@echo "make docs       regenerate docs/reference/configuration.md and the generated files in helm/"
	@echo "make docs-site  build the documentation with search in build/site"
	@echo "make docs-serve preview the documentation; reloads after each change"
	@echo "make wheel      build wheel and sdist in dist/ (KERNELS=all, or names of CPU instruction sets such as avx2)"
	@echo "make images     build images of the router and of workers for cpu, cuda and rocm (REGISTRY=ghcr.io/acme PUSH=yes IMAGES=router,worker-cpu)"
	@echo "make release    build wheel, sdist, SBOMs, images, chart and signatures in dist/ (REGISTRY=...; IMAGES=none)"
	@echo "make lock       update the hashes of packages that images install, from helm/images/constraints.txt"
	@echo "make clean      delete build outputs and the virtual environment"

# ------------------------------------------------------------------ environment: created on demand, updated when NEWER changes

$(BIN)/python:
	@for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "Diptych needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	echo "creating $(VENV) with $$("$$found" --version)"; "$$found" -m venv "$(VENV)"

$(VENV)/.serve: $(NEWER) | $(BIN)/python
	@echo "installing Diptych into $(VENV), two or three minutes, only once: forty packages of 70 MB, and PyTorch,"
	@echo "250 MB as a CPU build or 2.5 GB as a CUDA build: docs/quickstart.md#pytorchs-build"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.bench: $(NEWER) | $(BIN)/python
	@$(PIP) -c constraints.txt -e ".[bench]"
	@touch $@

$(VENV)/.docs: $(NEWER) | $(BIN)/python
	@$(PIP) -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.dev: $(NEWER) | $(BIN)/python
	@echo "installing Diptych and its test tools into $(VENV) (a few minutes, only once)"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $(VENV)/.serve $(VENV)/.bench $@

# ------------------------------------------------------------------ run

serve: $(VENV)/.serve
	@exec $(BIN)/diptych serve --port $(PORT) --model $(MODEL) $(ARGS)

fetch: $(VENV)/.serve
	@exec $(BIN)/diptych pull $(MODEL)

bench: $(VENV)/.bench
	@exec $(BIN)/diptych bench $(ARGS)

compare: $(VENV)/.serve $(VENV)/.bench
	@exec $(BIN)/python -m benchmarks.compare $(ARGS)

sla: $(VENV)/.serve $(VENV)/.bench
	@exec $(BIN)/python -m benchmarks.sla $(ARGS)

# A GPU machine may have no network and its own Python with torch, so this installs nothing.
OUT ?= build/gpu
gpu:
	@TAIL=200 PYTHON="$(if $(wildcard $(VENV)/.serve),$(BIN)/python,$(PYTHON))" benchmarks/gpu_machine.sh "$(OUT)" \
	  "node:$(LIMIT):$(ARGS)"
LIMIT ?= 570

# ------------------------------------------------------------------ check

lint: style types

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/phrases.py

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/python docs/reference/write_configuration.py > docs/reference/configuration.md
	@for page in schema readme dashboards; do $(BIN)/python helm/write_$$page.py; done

docs-site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html"

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

check: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --hypothesis-profile quick -m "not slow" $(PURE) $(ARGS)

# mypy uses one core and takes most of a minute on a fresh checkout, so the tests run meanwhile.
test: style
	@$(MAKE) --no-print-directory -j 2 types quick

quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --longest-first --durations=30 --budget-s 300 --hypothesis-profile quick -m "not slow and not gpu and not chaos and not vllm" $(ARGS)

# Chaos and GPU tests run last, one at a time, because they need all cores.
test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --longest-first --durations=30 -m "not chaos and not gpu and not clients and not vllm" $(ARGS)
	$(BIN)/pytest -m "chaos or gpu" $(ARGS)
	@$(BIN)/python -m tests.with_vllm --optional $(ARGS)

test-vllm: $(VENV)/.dev
	@$(BIN)/python -m tests.with_vllm $(ARGS)

clients: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs --durations=0 -m clients tests/clients $(ARGS)

chaos: $(VENV)/.dev
	CHAOS_SEED=$(or $(SEED),1) CHAOS_SECONDS=$(or $(DURATION),180) $(BIN)/pytest -s -m chaos tests/chaos $(ARGS)

soak: $(VENV)/.dev
	SOAK_SECONDS=$(or $(DURATION),1800) SOAK_PLOT=$(or $(PLOT),build/soak.png) $(BIN)/pytest -s tests/chaos/test_soak.py

# ------------------------------------------------------------------ release

KERNELS ?= all
wheel: $(VENV)/.dev
	@echo "compiling CPU kernels: $(KERNELS); 'all' takes several minutes"
	@DIPTYCH_KERNELS=$(KERNELS) $(BIN)/python -P -m build --quiet --no-isolation --outdir dist .

# REGISTRY has no default: push images to your own registry.
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

# Run after a change of helm/images/constraints.txt.
lock: $(VENV)/.release
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python helm/images/write_requirements.py

clean:
	rm -rf build dist .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
