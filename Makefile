# CI runs these targets. Every target installs what it needs, also on a fresh clone.

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# Tried in this order; 3.11 first, the version that is tested. `make BASE_PYTHONS=/path/to/python` takes another.
BASE_PYTHONS := python3.11 python3.12 python3.13 python3.14 python3

# For Linux, PyPI's torch brings gigabytes of CUDA. The CPU build `+cpu` is only in PyTorch's own index, or in the
# mirror that pip is configured with, which is tried first. The build for macOS has no CUDA.
TORCH_VERSION := 2.13.0
ifeq ($(shell uname -s),Darwin)
TORCH := torch
else
TORCH := torch==$(TORCH_VERSION)+cpu
endif
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# Where the environment forbids it, each of the hundreds of processes of the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install lint format typecheck size pytest test test-hosts test-gpu test-frameworks campaign torture mutants scale storm demo bench docs dist clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with torch's CPU build, this package (editable) and the pinned tools

# Installs again only when a dependency or this file has changed. Package, extras and tools are resolved together, since
# s3fs allows few versions of botocore, and boto3 must agree. torch is named again so that it is not replaced.
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

size: $(INSTALLED) ## Print the size of package and tests, and what a save and a restore execute
	$(PYTHON) -m tests.support.size

# Three processes share the tests, since each waits for half of its time; tests of real ranks stay in one of them. One in
# eight of the campaign's cases runs, and a few examples of each property.
pytest: $(INSTALLED) ## Run the tests alone; ARGS="-k manifest -x" goes to pytest
	$(PYTHON) -m pytest --ignore tests/hosts --numprocesses 3 --dist loadgroup --smoke $(ARGS)

# The types are checked beside the tests.
test: lint ## Check style, types and tests: what every change must pass
	@$(MAKE) --no-print-directory --jobs 2 typecheck pytest

# By itself, because what ends in time on an idle machine may be late on a busy one; the tests mostly wait.
test-hosts: $(INSTALLED) ## Test on several hosts (namespaces: Linux, root, nftables) and print a table of all outcomes
	$(PYTHON) -m pytest tests/hosts --numprocesses 4 $(ARGS)

# The CPU build sees no GPU: on a fresh clone, TORCH=torch installs the build that does.
test-gpu: $(INSTALLED) ## Test on a GPU and print what saves block there (make TORCH=torch test-gpu; skipped without one)
	$(PYTHON) -m pytest tests/gpu $(ARGS)
	$(PYTHON) -m tests.gpu.measure
	$(PYTHON) -m tests.gpu.beside

# Frameworks pin what our tools do not, and what other frameworks need, so three environments hold them. They outlive
# `make clean`, and with them the extension that DeepSpeed compiles in its first run, in one to three minutes.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_NAMES := shared llamafactory axolotl
FRAMEWORKS_INSTALLED := $(FRAMEWORKS_NAMES:%=$(FRAMEWORKS)/%/.installed)
FRAMEWORKS_TESTS_shared := tests/frameworks
FRAMEWORKS_TESTS_llamafactory := tests/frameworks/test_llamafactory.py tests/frameworks/test_launch.py
FRAMEWORKS_TESTS_axolotl := tests/frameworks/test_axolotl.py

# Removed again: PyPI's torchvision and torchaudio need the CUDA build of torch, and cannot be imported beside another.
FRAMEWORKS_REMOVED_llamafactory := torchvision torchaudio

# The frameworks first, and no version of theirs changes afterwards: pip would let botocore move under aiobotocore.
$(FRAMEWORKS_INSTALLED): VENV = $(@D)
$(FRAMEWORKS_INSTALLED): PYTHON = $(@D)/bin/python
$(FRAMEWORKS_INSTALLED): PIP = $(@D)/bin/python -m pip --disable-pip-version-check
$(FRAMEWORKS_INSTALLED): $(FRAMEWORKS)/%/.installed: tests/frameworks/requirements/%.txt \
    tests/frameworks/requirements/tools.txt pyproject.toml
	@$(make_venv)
	@echo "== $(TORCH) =="
	@$(install_torch)
	@echo "== the frameworks of $* =="
	$(PIP) install "$(TORCH)" --requirement $<
	$(PIP) freeze --exclude-editable >$(@D)/constraints.txt
	$(PIP) install --constraint $(@D)/constraints.txt --editable . --requirement tests/frameworks/requirements/tools.txt
	$(if $(FRAMEWORKS_REMOVED_$*),$(PIP) uninstall --yes $(FRAMEWORKS_REMOVED_$*))
	@$(PYTHON) -c '$(check_torch)'
	@touch $@

# Python of an environment, and where DeepSpeed keeps its extension; ninja, which compiles it, is sought on PATH.
frameworks_python = PATH="$(CURDIR)/$(FRAMEWORKS)/$*/bin:$$PATH" \
    TORCH_EXTENSIONS_DIR="$(CURDIR)/$(FRAMEWORKS)/$*/torch_extensions" $(FRAMEWORKS)/$*/bin/python

$(FRAMEWORKS_NAMES:%=$(FRAMEWORKS)/%/.compiled): $(FRAMEWORKS)/%/.compiled: $(FRAMEWORKS)/%/.installed
	rm -rf $(FRAMEWORKS)/$*/torch_extensions # a compilation that was killed leaves a lock, at which the next one waits
	$(frameworks_python) tests/frameworks/programs/compile_deepspeed.py
	@touch $@

# In one environment: `make test-frameworks-shared`, whose first steps are targets, too.
$(FRAMEWORKS_NAMES:%=install-frameworks-%): install-frameworks-%: $(FRAMEWORKS)/%/.installed
$(FRAMEWORKS_NAMES:%=compile-frameworks-%): compile-frameworks-%: $(FRAMEWORKS)/%/.compiled

$(FRAMEWORKS_NAMES:%=test-frameworks-%): test-frameworks-%: $(FRAMEWORKS)/%/.compiled
	$(frameworks_python) -m pytest -m "not torture" $(FRAMEWORKS_TESTS_$*) $(ARGS)

test-frameworks: $(FRAMEWORKS_NAMES:%=test-frameworks-%) ## Test with the real frameworks; ARGS="-m torture" runs the long ones

.PHONY: $(foreach step,install compile test,$(FRAMEWORKS_NAMES:%=$(step)-frameworks-%))

campaign: $(INSTALLED) ## Run every case of the campaign, briefly (14 minutes); CI runs it after `make test`
	$(PYTHON) -m pytest --numprocesses 3 --dist loadgroup -m torture $(ARGS)

# Length of each part that has no end (fuzzers, mutations, random faults). The rest, in which every property tries other
# examples and five times as many, takes about an hour. From 60 on, large states have their full size.
TORTURE_SECONDS := 60

torture: $(INSTALLED) ## Run the campaign for an hour and print figures; TORTURE_SECONDS=3600 makes it long
	$(PYTHON) -m pytest -m torture --torture-seconds $(TORTURE_SECONDS) --durations 15 $(ARGS)

mutants: $(INSTALLED) ## Put 400 small faults into the package, one at a time, and list those that no test finds (two hours)
	$(PYTHON) -m tests.support.mutants $(ARGS)

scale: $(INSTALLED) ## Count what real ranks ask the key-value store; ARGS="--ranks 512" takes two minutes and 12 GiB
	$(PYTHON) -m tests.scale.run $(ARGS)

storm: $(INSTALLED) ## Count what ranks that begin at once send to a store that answers 503; ARGS="--job-ranks 1000"
	$(PYTHON) -m tests.scale.storm $(ARGS)

demo: $(INSTALLED) ## Train on a local S3 server, kill the job in mid-save, resume at other world sizes
	$(PYTHON) examples/demo.py

# Installs the peers into the same .venv.
bench: $(INSTALLED) ## Measure save and load beside s3fs, s3torchconnector and boto3 (half an hour; ARGS=--quick: 4 minutes)
	$(PIP) install --quiet "$(TORCH)" --editable ".[dev,bench]"
	$(PYTHON) -m tests.benchmark.run $(ARGS)

# --strict: a link or anchor that leads nowhere, and a name that the API page does not find, fail the build.
docs: $(INSTALLED) ## Build the site of the documentation into site/
	$(PIP) install --quiet "$(TORCH)" --editable ".[dev,docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# REPOSITORY is missed before anything is installed.
dist: $(if $(REPOSITORY),$(INSTALLED)) ## Build sdist and wheel in dist/ and check them; REPOSITORY=https://host/owner/name gets their links
	$(if $(REPOSITORY),,$(error Pass the public repository, where links lead: make dist REPOSITORY=https://host/owner/name))
	$(PIP) install --quiet "$(TORCH)" --editable ".[dev,dist]"
	$(PYTHON) -m tests.support.release "$(REPOSITORY)"

clean: ## Remove what the tools, the tests and the demo left; .venv stays
	rm -rf build dist bench-output demo-output mutants-output site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# ---- recipes, each one shell command line

# Keeps an environment that works; replaces an incomplete one, or one whose Python is gone or too old.
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

# The first attempt fails if pip has no mirror with local versions; this is not an error.
define install_torch
$(PIP) install --no-deps "$(TORCH)" 2>/dev/null || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) "$(TORCH)"
endef

# No single quotes, because the shell quotes this text with them. nvidia-ml-py, which Axolotl needs, is Python alone.
define check_torch
import importlib.metadata, sys, torch; \
names = {d.name.lower() for d in importlib.metadata.distributions()}; \
cuda = sorted(name for name in names - {"nvidia-ml-py"} if name.startswith("nvidia-")); \
sys.exit(f"$(VENV) holds CUDA; remove it and begin again. cuda={torch.version.cuda} packages={cuda}" \
if "+cpu" in "$(TORCH)" and (torch.version.cuda or cuda) else 0)
endef
