# `make train` sets up an environment in .venv and trains on the bundled Cora graph; `make test` runs the tests.
# Stamp files in the environment and under build keep repeated calls quick.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TRAIN ?=
BENCH ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# Tests of a file stay together, so that they share what is captured once.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SANITIZERS := address undefined thread
CSRC := CMakeLists.txt $(shell find csrc -name '*.?pp' -o -name CMakeLists.txt)

# CMake may come from the environment, see .tools.
export PATH := $(abspath $(BIN)):$(PATH)
# Two test workers share the processors; kernels that need several threads ask for them.
test-python test-all fuzz: export OMP_NUM_THREADS ?= 1
# Idle OpenMP threads that spin starve the others where cores are few or shared.
train test-python test-all fuzz: export OMP_WAIT_POLICY ?= passive

.PHONY: train test fuzz test-all test-python test-cpp lint format sanitize bench-cpp callgrind clean distclean
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/joestar train $(TRAIN)

test: test-cpp test-python

test-python: $(VENV)/.installed
	$(PYTEST) -m "not slow and not gpu and not fuzz"

# Also what `make test` traces in a quicker way (tests/captures.py), captured in the real one.
fuzz: $(VENV)/.installed
	$(PYTEST) -m "fuzz and not slow"
	JOESTAR_REAL_CAPTURES=1 $(PYTEST) tests/fusion tests/lowering -m "quick and not slow and not gpu and not fuzz"

test-all: export JOESTAR_REAL_CAPTURES := 1
test-all: test-cpp $(VENV)/.installed
	$(PYTEST) -m "not gpu"

test-cpp: build/ctest/.built
	ctest --test-dir build/ctest --output-on-failure

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sanitize: $(SANITIZERS:%=build/sanitize-%/.built)
	set -e; for kind in $(SANITIZERS); do ctest --test-dir build/sanitize-$$kind --output-on-failure; done

# Times of the C++ kernels on a planted graph; BENCH='--only spmm --json times.json' chooses.
bench-cpp: build/bench/.built
	build/bench/csrc/bench/bench_kernels $(BENCH)

# Instructions per sampled edge in graphs of two sizes; needs valgrind.
callgrind: build/bench/.built
	$(BIN)/python benchmarks/callgrind_sampling.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# --- the environment, in steps that are repeated only when their inputs change ---

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Joestar needs Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# PyTorch first and alone: the pinned version is settled before anything else can ask for another one.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(PIP) torch
	touch $@

$(VENV)/.tools: $(VENV)/.torch
	$(PIP) ruff scikit-build-core pybind11
	command -v cmake || $(PIP) cmake ninja
	touch $@

# Without build isolation, which would resolve unpinned versions of the build tools.
$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(CSRC)
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

# --- the C++ tests ---

build/ctest/.built: $(VENV)/.tools $(CSRC)
	cmake -S . -B build/ctest -DJOESTAR_BUILD_TESTS=ON -DJOESTAR_BUILD_PYTHON=OFF
	cmake --build build/ctest --parallel $(WORKERS)
	touch $@

build/bench/.built: $(VENV)/.tools $(CSRC)
	cmake -S . -B build/bench -DJOESTAR_BUILD_BENCH=ON -DJOESTAR_BUILD_PYTHON=OFF
	cmake --build build/bench --parallel $(WORKERS)
	touch $@

build/sanitize-%/.built: $(VENV)/.tools $(CSRC)
	cmake -S . -B build/sanitize-$* -DJOESTAR_BUILD_TESTS=ON -DJOESTAR_BUILD_PYTHON=OFF -DJOESTAR_SANITIZE=$*
	cmake --build build/sanitize-$* --parallel $(WORKERS)
	touch $@
