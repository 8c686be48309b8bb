# Development commands. They need Python >= 3.11 with pip and venv.

PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types docs bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Make .venv with everything in it (again only when its requirements change)

demo: $(INSTALLED) ## Export, optimize, verify, measure and serve a real encoder
	$(BIN)/python -m benchmarks.demo

test: $(INSTALLED) ## Run all tests; ARGS="-m 'not slow' tests/attnserve" runs some
	$(BIN)/python -m pytest --numprocesses=logical --dist=worksteal $(ARGS)

lint: $(INSTALLED) ## Check style and format (ruff)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED) ## Check types (pyright, strict on graph_passes and attnserve)
	$(BIN)/pyright

docs: $(INSTALLED) ## Build the documentation site into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED) ## Run every benchmark that needs no data; each writes into benchmarks/results
	@set -e; for file in $(filter-out benchmarks/demo.py benchmarks/fidelity.py benchmarks/mixing.py benchmarks/reuse_prune.py benchmarks/serving_load.py,$(wildcard benchmarks/[a-z]*.py)); do \
		echo "$$file"; $(BIN)/python $$file; \
	done

clean: ## Remove .venv, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first, at its exact version: what depends on it then takes the build that is there. The
# stamp is written last, so that an interrupted installation starts again.
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
