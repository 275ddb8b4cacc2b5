# Every target sets up its own environment. PYTHON: the interpreter to build it with (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start hundreds of processes: what the first compiles, the others read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-deep test-gpu lint types setup regen clean

demo: $(READY)
	$(BIN)/fusion-advisor analyze examples/llama_block.py --out build/demo

# A worker takes a file at a time, in the order of their names: the many quick files of tests/pure come
# last, so that no worker is left with a long one.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not gpu and not deep" --durations 25

# What takes too long for every change: exhaustive tests, and modules drawn by the commit's hash.
test-deep: $(READY)
	$(PYTEST) -m deep
	$(BIN)/python -m benchmarks.drawn
	$(BIN)/python -m benchmarks.drawn.gradients --seed $$(git rev-parse --short=8 HEAD)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

# A link that is committed points to where one machine has the file: no other clone works.
lint: $(READY)
	! git ls-files --stage | grep '^120000'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

# Rewrite the golden files from what the code does now; read the diff before committing it.
regen: $(READY)
	$(PYTEST) -m "not gpu and not deep" --regen

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("PYTHON must be 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,dev]"
	touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
