# Everything a contributor runs. `make test` is what CI runs; it needs a Python from 3.10 to 3.12, the net, and no more.

# The newest interpreter that fits and answers (a version manager's stand-in may be found and not work).
FITS := import sys, venv; assert (3, 10) <= sys.version_info < (3, 13); print(sys.executable)
PYTHON ?= $(shell for p in python3.12 python3.11 python3.10 python3 python; do \
	$$p -c "$(FITS)" 2>/dev/null && break; done)
VENV ?= .venv
# What pip installs as torch, before anything that depends on it. On Linux PyPI's build brings CUDA along, 2 GB of it;
# without: make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# How many tests run side by side: one more than a small machine has cores, because many of them wait.
WORKERS ?= 3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup test test-fast chaos lint format traces demo clean

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

setup: $(STAMP)  ## build .venv with everything that the tests and the demo need

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3.10, 3.11 or 3.12 found; name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,plot]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true  # on all cores: pip compiles on one
	touch $(STAMP)

test: $(STAMP)  ## style, types, unit tests, simulated worlds, peers in processes of their own; ten minutes at most
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-fast: $(STAMP)  ## what needs no other processes and no patience, side by side; two minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not real and not slow and not chaos"

chaos: $(STAMP)  ## links cut (as root on Linux, else skipped), spoilt wires, 10,000 simulated worlds; three quarters of an hour
	$(BIN)/p2p-diloco simulate --seeds 10000
	$(BIN)/python -m pytest -m chaos

lint: $(STAMP)  ## style and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## put the code into one layout
	$(BIN)/ruff format .

traces: $(STAMP)  ## write docs/traces anew, after a change of the protocol
	$(BIN)/python -m tests.simulate.stories

demo: $(STAMP)  ## four peers on this machine, one of which is killed
	$(BIN)/p2p-diloco demo

clean:  ## remove what was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
