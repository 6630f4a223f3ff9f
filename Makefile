# Every target sets up what it needs: Python 3.10 or later, git and make are enough to start.

PYTHON ?= python3
VENV ?= .venv
# Empty (`make test CONSTRAINTS=`) installs the newest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What `make quickstart` needs, and what the tests need beside it: each is installed when first asked.
RUN_STAMP := $(VENV)/.hvt-train-installed
STAMP := $(VENV)/.hvt-dev-installed

.DEFAULT_GOAL := help
.PHONY: help quickstart reproduce docs test tests test-lowest test-slow test-npm lint format types clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

quickstart: $(RUN_STAMP) ## Train three models of equal cost on digits, compare, predict
	@$(BIN)/python examples/quickstart.py

# Hours on two CPU cores; an interrupted one resumes. DATA is the folder that has CIFAR-100 in it.
DATA ?= data
reproduce: $(RUN_STAMP) ## Train the rows of the paper's tables at 32 pixels and fill the tables
	@$(BIN)/python -m reproduction run all --root $(DATA) --download
	@$(BIN)/python -m reproduction run long --root $(DATA)
	@$(BIN)/python -m reproduction report

docs: $(STAMP) ## Build the documentation into site/
	@$(BIN)/python -m mkdocs build --strict --quiet

test: lint ## Everything that must pass: lint, types, tests
	@$(MAKE) --no-print-directory -j2 types tests

# Beside the types, whose check leaves a core idle.
tests: $(STAMP)
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-lowest: ## The tests with the lowest versions that pyproject.toml allows, in .venv-lowest
	@$(MAKE) --no-print-directory environment VENV=.venv-lowest
	@.venv-lowest/bin/python -m pip --disable-pip-version-check install -qq uv
	@.venv-lowest/bin/uv pip install -q --python .venv-lowest/bin/python --upgrade --resolution lowest-direct -e '.[dev]'
	@.venv-lowest/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP) ## The longer tests, by hand
	@$(BIN)/python -m pytest -m slow

# No install scripts: onnxruntime-node's would fetch CUDA's libraries.
test-npm: $(STAMP) ## Exported folders in transformers.js and in Chromium, by Node and npm
	@npm install --prefix $(VENV)/npm --ignore-scripts --no-save --silent @huggingface/transformers@4.3.1 onnxruntime-web@1.30.0
	@HVT_NODE_MODULES=$(abspath $(VENV)/npm/node_modules) $(BIN)/python -m pytest -m npm

lint: $(STAMP) ## Check style and format
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .

format: $(STAMP) ## Fix what can be fixed and format the rest
	@$(BIN)/python -m ruff check --fix-only .
	@$(BIN)/python -m ruff format .

types: $(STAMP) ## Check the types
	@$(BIN)/python -m mypy

clean: ## Remove build output and caches, and keep the environment
	@rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp goes first and comes back last, so an install that stopped half-way is done again.
$(RUN_STAMP): pyproject.toml $(CONSTRAINTS) | environment
	@rm -f $@
	@echo "Installing hvt and what training needs into $(VENV); the first time takes a few minutes."
	@$(PIP) install -qq $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[train]'
	@touch $@

$(STAMP): pyproject.toml $(CONSTRAINTS) | environment
	@rm -f $@
	@echo "Installing hvt and what its tests need into $(VENV); the first time takes a few minutes."
	@$(PIP) install -qq $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	@touch $@ $(RUN_STAMP)

# An environment whose pip does not run is one whose creation stopped half-way.
# An editable install from pyproject.toml needs pip 21.3. At -qq pip prints errors alone.
.PHONY: environment
environment:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "hvt needs Python 3.10 or later, and '$(PYTHON)' is not: name one that is, as in 'make PYTHON=python3.12 $(or $(firstword $(MAKECMDGOALS)),test)'." >&2; exit 1; }; \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: install its venv module (on Debian and Ubuntu the package python3-venv)." >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV); }
	@$(BIN)/python -c 'import pip, sys; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [21, 3])' \
	  || $(PIP) install -qq --upgrade pip
