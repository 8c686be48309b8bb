# Development commands. They need Python >= 3.11 with pip and venv; `make venv` installs the rest.

PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest --numprocesses=logical --dist=worksteal
# Tests with the mark `export` only: each test process needs some seconds to import torch.
TORCH_TESTS := tests/attnserve/nn tests/attnserve/recovery tests/benchmarks/test_training.py

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-clients support lint types docs bench clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Install everything into .venv, again only when requirements change

demo: $(INSTALLED) ## Export, optimize, verify, measure and serve a real encoder
	$(BIN)/python -m benchmarks.demo

test: $(INSTALLED) ## Run the default tests; ARGS="tests/attnserve -k prune" runs some of them
	$(PYTEST) $(addprefix --ignore=,$(TORCH_TESTS)) -m "not (export or process or timing or fuzz or gpu or clients)" $(ARGS)

test-all: $(INSTALLED) ## Run all tests but those of clients; ARGS="-m export" runs those with one mark
	$(PYTEST) -m "not clients" $(ARGS)

test-clients: $(INSTALLED) ## Run the tests that install other packages, which needs a registry
	ATTNSERVE_CLIENTS=build/clients $(PYTEST) -m clients --write-clients $(ARGS)

support: $(INSTALLED) ## Export every architecture in every way, and write docs/support.md
	$(PYTEST) -m export tests/attnserve/test_architectures.py --write-support $(ARGS)

lint: $(INSTALLED) ## Check style and format (ruff), and the direction of imports (import-linter)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: $(INSTALLED) ## Check types (pyright, strict)
	$(BIN)/pyright

docs: $(INSTALLED) ## Build the documentation site into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED) ## Run the benchmarks of all tables; ARGS="--data FOLDER --only NAME" selects
	$(BIN)/python -m benchmarks.readme $(ARGS)

clean: ## Remove .venv, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first, at its exact version, so that packages which depend on it keep this build.
# The stamp file is written last: an interrupted installation starts again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) must be Python 3.11 or later: make PYTHON=/path/to/python3.11 ..." >&2; \
		exit 2; \
	}
	@if nvidia-smi >/dev/null 2>&1; then runtime=gpu; else runtime=cpu; fi; \
	echo "Installing .[$$runtime,demo,dev] into $(VENV): some minutes, once" >&2; \
	set -e; \
	$(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"; \
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[$$runtime,demo,dev]"
	@touch $@
