# The two commands of the README (demo, test) and the developers' habits. `make setup` fetches what the others need into .venv.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint check fmt bench results fuzz gpu-check gpu-kernels arm-check wheels clean

# The first of these that is a Python 3.11 or newer; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The Python that has CuPy; kvzip need not be installed in it.
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The Python that has the extra eval, for `make results` with a model.
EVAL_PYTHON ?= $(BIN)/python
STAMP := $(VENV)/.setup-done
TARGETS := x86_64-linux aarch64-linux aarch64-macos x86_64-windows

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with kvzip (editable) and the tools; no torch, no compiler needed.

$(STAMP): pyproject.toml hatch_build.py
	@test -n "$(PYTHON)" || { echo "kvzip needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing kvzip and its tools into $(VENV), then compiling the kernels: a minute or two, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -c 'from kvzip.devices.cpu import Cpu; Cpu()'
	@touch $@

demo: setup ## Compress, inspect, verify, measure and restore the sample caches.
	@samples/demo.sh $(BIN)/kvzip

test: setup ## Run the tests.
	$(BIN)/python -m pytest -n 2 -q

lint: setup ## Formatting, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test ## All that must hold before a commit: lint and the tests.

fmt: setup ## Format the code and mend what ruff can.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Measure kvzip beside its peers on inputs of its own making.
	$(BIN)/python -m benchmarks

fuzz: setup ## Fuzz every reader and decoder until something is found or Ctrl-C; see fuzz/README.md.
	$(BIN)/python -m fuzz

# CACHES='a.safetensors b.safetensors' names the real caches, MODEL=model.gguf a model that they are of (extra eval).
results: setup ## Measure all codecs on real caches and write docs/results.md.
	$(EVAL_PYTHON) -m benchmarks.results $(CACHES) $(if $(MODEL),--model $(MODEL))

gpu-check: ## On a machine with a GPU and CuPy: equal bytes, damaged input, speed. Nothing is installed or fetched.
	@$(GPU_PYTHON) -m tools.gpu_check

gpu-kernels: setup ## The CPU kernels for gpu-check on a machine without a compiler: copy kvzip/_native there.
	$(BIN)/python -c 'from kvzip.devices import build; [build.ensure_library(level) for level in build.Target.host().levels]'

arm-check: setup ## The aarch64 wheel under qemu-user: the codecs' tests, and the same bytes as here. Debian.
	$(BIN)/python -m tools.arm_check

wheels: setup ## Wheels of all platforms and the source archive, into dist/.
	rm -rf dist
	for target in $(TARGETS); do KVZIP_TARGET=$$target $(BIN)/python -m hatchling build -t wheel -d dist || exit 1; done
	$(BIN)/python -m hatchling build -t sdist -d dist

clean: ## Remove what was built; .venv stays.
	rm -rf dist build kvzip/_native .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
