# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# What the command line sets for itself so that glibc does not fault big blocks in again at every pass.
export MALLOC_MMAP_THRESHOLD_ ?= 8589934592
export MALLOC_TRIM_THRESHOLD_ ?= 17179869184
export MALLOC_TOP_PAD_ ?= 536870912

.PHONY: help demo test test-slow bench lint size clean vllm-check
help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/.installed ## answer a prompt with and without speculation, on the default model
	$(BIN)/outrider demo

test: .venv/.installed ## the tests (fetches the default model once)
	$(BIN)/outrider pull smollm2-135m
	$(BIN)/python -m pytest -m 'not slow'

test-slow: .venv/.installed ## the long checks: the 60-prompt sweep and large enumerations
	$(BIN)/outrider pull smollm2-135m
	$(BIN)/python -m pytest -m slow --timeout=7200

bench: .venv/.installed ## the figures of docs/benchmarks.md (three hours, nothing else running)
	$(BIN)/outrider pull smollm2-135m
	$(BIN)/python scripts/benchmark.py --all
	$(BIN)/python scripts/acceptance.py rules shapes sampled union drafters

vllm-check: .venv/.installed ## acceptance of our EAGLE-3 head in vLLM (environment: docs/interoperability.md)
	$(BIN)/python scripts/vllm_check.py

lint: .venv/.installed ## linters and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## forget the environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
