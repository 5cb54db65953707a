# Commands for contributors. `make test` is what CI runs; it only needs Python 3.10 to 3.15 and network access.

# The newest fitting interpreter that runs (a version manager's stub may be on the PATH but not work).
FITS := import sys, venv; assert (3, 10) <= sys.version_info < (3, 16); print(sys.executable)
PYTHON ?= $(shell for p in python3.15 python3.14 python3.13 python3.12 python3.11 python3.10 python3 python; do \
	$$p -c "$(FITS)" 2>/dev/null && break; done)
VENV ?= .venv
# What pip installs as torch, before the packages that depend on it. On Linux PyPI's build includes CUDA, 2 GB;
# without CUDA: make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# Tests that run in parallel: one more than a small machine has cores, because many of them wait.
WORKERS ?= 3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORLDS := $(BIN)/python -m tests.sim.worlds
# Which worlds `make worlds` plays.
SEEDS ?= 2000
FIRST ?= 0
# How long `make fuzz` plays.
MINUTES ?= 10

.PHONY: help setup test test-fast worlds fuzz chaos lint format traces demo bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

setup: $(STAMP)  ## build .venv with all that tests and demo need

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.15 found; name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,plot,hf,lightning,otlp]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' $(VENV)/lib || true  # on all cores; pip would use one
	touch $(STAMP)

test: $(STAMP)  ## style, types, unit tests, simulated worlds, real peers in their own processes; eight minutes and more
	@$(BIN)/python -m compileall -qq p2p_diloco examples tests  # not once in each process, whatever PYTHONDONTWRITEBYTECODE says
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-fast: $(STAMP)  ## fast tests that start no other processes, in parallel; two minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not real and not slow and not chaos"

worlds: $(STAMP)  ## play SEEDS simulated worlds from FIRST on; of one KIND, or of a mix (docs/testing.md)
	$(WORLDS) --seeds $(SEEDS) --first $(FIRST) $(addprefix --kind ,$(KIND))

fuzz: $(STAMP)  ## feed damaged bytes for MINUTES to all that reads what comes from outside (docs/testing.md)
	$(BIN)/python -m tests.fuzz.campaign --minutes $(MINUTES) --seed $(FIRST)

chaos: $(STAMP)  ## cut links (root on Linux, else skipped), corrupted wires, 14,000 simulated worlds; 45 minutes and more
	$(WORLDS) --seeds 10000
	$(WORLDS) --seeds 2000 --kind private
	$(WORLDS) --seeds 2000 --kind hostile
	$(BIN)/python -m pytest -m chaos

lint: $(STAMP)  ## style, layout and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## format the code with ruff
	$(BIN)/ruff format .

traces: $(STAMP)  ## write docs/traces again, after a change of the protocol or its texts
	$(BIN)/python -m tests.sim.stories

demo: $(STAMP)  ## run four peers on this machine and kill one
	$(BIN)/p2p-diloco demo

bench: $(STAMP)  ## measure rounds between real processes; flags in ARGS, --help among them (docs/performance.md)
	$(BIN)/python -m examples.benchmarks $(ARGS)

clean:  ## remove build results and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
