# What CI runs is a target here, and every target makes what it needs: `make test` on a fresh clone installs first.

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# Tried in this order; 3.11 first, since that is what we run on. `make BASE_PYTHONS=/path/to/python` takes another.
BASE_PYTHONS := python3.11 python3.12 python3.13 python3.14 python3

# The plain torch of PyPI brings gigabytes of CUDA for Linux; the same version without is `+cpu`, which only PyTorch's
# own index has (or the mirror that pip is configured with, asked first). macOS has one build, and it is without.
TORCH_VERSION := 2.13.0
ifeq ($(shell uname -s),Darwin)
TORCH := torch
else
TORCH := torch==$(TORCH_VERSION)+cpu
endif
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install lint format typecheck pytest test campaign torture demo bench clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with torch's CPU build, this package (editable) and the pinned tools

# Installs again when a dependency or this file changed, and otherwise never. Package, extras and tools in one resolve:
# s3fs allows few versions of botocore, and boto3 must agree. torch is named again so that nothing replaces it.
$(INSTALLED): pyproject.toml Makefile
	@$(make_venv)
	@echo "== $(TORCH) =="
	@$(install_torch)
	@echo "== dcp_remote and its tools =="
	$(PIP) install "$(TORCH)" --editable ".[dev]"
	@$(PYTHON) -c '$(check_torch)'
	@touch $@

lint: $(INSTALLED) ## Check style and formatting
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

format: $(INSTALLED) ## Repair style and formatting where that can be done safely
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

typecheck: $(INSTALLED) ## Check the types of package, tests and examples
	$(VENV)/bin/mypy

# Two processes share the tests; those of real ranks stay with one. Of the campaign's cases one in eight runs, and of
# each property a few examples, the same each time: a change that breaks nothing is never red by chance.
pytest: $(INSTALLED) ## Run the tests alone; ARGS="-k manifest -x" goes to pytest
	$(PYTHON) -m pytest --numprocesses 2 --dist loadgroup --smoke $(ARGS)

test: lint typecheck pytest ## Check style, types and tests: what every change must pass

campaign: $(INSTALLED) ## Every case of the campaign, briefly (10 minutes); CI runs it after `make test`
	$(PYTHON) -m pytest -m torture $(ARGS)

# Of each of the parts that could go on for ever (fuzzers, mutations, random faults); the rest, in which every property
# tries other examples and five times as many, takes about an hour. From 60 on, what is large is as large as it gets.
TORTURE_SECONDS := 60

torture: $(INSTALLED) ## Attack everything for an hour and print figures; TORTURE_SECONDS=3600 makes it long
	$(PYTHON) -m pytest -m torture --torture-seconds $(TORTURE_SECONDS) --durations 15 $(ARGS)

demo: $(INSTALLED) ## Train on a local S3 server, kill the job in mid-save, resume at other world sizes
	$(PYTHON) examples/demo.py

# Into the same .venv, where its peers stand beside us.
bench: $(INSTALLED) ## Measure save and load beside s3fs, s3torchconnector and boto3 (half an hour; ARGS=--quick: 4 minutes)
	$(PIP) install --quiet "$(TORCH)" --editable ".[dev,bench]"
	$(PYTHON) -m tests.benchmark.run $(ARGS)

clean: ## Remove what the tools, the tests and the demo left; .venv stays
	rm -rf build dist bench-output demo-output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# ---- recipes, each one shell command line ----

# An environment that works is kept; one that is half made, or whose Python is gone or too old, is made again.
define make_venv
set -e; \
if ! $(PYTHON) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    base=; found=; \
    for candidate in $(BASE_PYTHONS); do \
        "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
        found="$$candidate"; \
        "$$candidate" -c 'import ensurepip, venv' 2>/dev/null || continue; \
        base="$$candidate"; break; \
    done; \
    if [ -z "$$found" ]; then \
        echo "dcp_remote needs Python 3.11 or newer; none of these is: $(BASE_PYTHONS)." >&2; \
        echo "Install one, or name it: make BASE_PYTHONS=/path/to/python3.11 install" >&2; exit 1; \
    fi; \
    if [ -z "$$base" ]; then \
        echo "$$found cannot make virtual environments (no venv or ensurepip)." >&2; \
        echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
    fi; \
    echo "== $(VENV), with $$("$$base" --version) =="; \
    "$$base" -m venv --clear $(VENV); \
fi
endef

# The first attempt fails where pip has no mirror of its own that holds local versions; then that is no error.
define install_torch
$(PIP) install --no-deps "$(TORCH)" 2>/dev/null || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) "$(TORCH)"
endef

# Without single quotes, for the shell.
define check_torch
import importlib.metadata, sys, torch; \
cuda = sorted(d.name for d in importlib.metadata.distributions() if d.name.lower().startswith("nvidia-")); \
sys.exit(f"$(VENV) holds CUDA; remove it and begin again. cuda={torch.version.cuda} packages={cuda}" \
if torch.version.cuda or cuda else 0)
endef
