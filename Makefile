# Each target works as the first command in a fresh clone: it makes the virtual environment that it needs.

VENV ?= .venv
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_TORCH ?=
PYTEST_ARGS ?= -n logical --maxprocesses 4

BIN := $(VENV)/bin

# Python 3.11 or newer that can make virtual environments (Debian packs that part separately).
PYTHON_OK := -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" $(PYTHON_OK) >/dev/null 2>&1 && { echo "$$p"; break; }; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo bench test test-mpi test-petsc lint format typecheck mpi clean help

demo: $(VENV)/.stamp-examples ## train a layer-parallel network on handwritten digits (options: DEMO_ARGS="...")
	$(BIN)/python examples/digits.py $(DEMO_ARGS)

bench: $(VENV)/.stamp-bench $(VENV)/.stamp-pymgrit ## compare with peers and with goals (options: BENCH_ARGS="--quick")
	JAXBRAID_BENCH_PYMGRIT=$(PYMGRIT) JAXBRAID_BENCH_TORCH=$(BENCH_TORCH) \
		$(BIN)/python -m benchmarks $(BENCH_ARGS)

test: $(VENV)/.stamp-test ## run all tests (options: PYTEST_ARGS="...")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-mpi: $(VENV)/.stamp-test mpi ## run the MPI tests (installs Debian's OpenMPI where it can and there is none)
	JAXBRAID_REQUIRE_MPI=1 $(BIN)/python -m pytest -m mpi $(PYTEST_ARGS)

test-petsc: $(VENV)/.stamp-test $(VENV)/.stamp-petsc ## run the PETSc tests (installs Debian's PETSc where it can and there is none)
	JAXBRAID_REQUIRE_PETSC=1 $(BIN)/python -m pytest -m petsc

lint: $(VENV)/.stamp-dev ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev ## mend style and format where that can be done by machine
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

typecheck: $(VENV)/.stamp-dev ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

mpi: $(VENV)/.stamp-openmpi $(VENV)/.stamp-mpi ## add mpi4py and mpi4jax to the environment

clean: ## remove the environments, builds and caches (not outputs/ and checkpoints/)
	rm -rf $(VENV) .venv312 build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The stamp .stamp-X says that the package is installed with its extra X (see pyproject.toml).
$(VENV)/.stamp-%: pyproject.toml $(VENV)/.stamp-python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

# PyMGRIT needs NumPy below 2, so it has an environment of its own, and an MPI, of which there is a wheel.
# Where it can't be installed the benchmarks do without. BENCH_TORCH=/path/to/python names an interpreter
# with PyTorch, if jaxbraid's own has none.
PYMGRIT := $(VENV)/pymgrit/bin/python
$(VENV)/.stamp-pymgrit: $(VENV)/.stamp-python
	@$(BIN)/python -m venv $(VENV)/pymgrit && $(PYMGRIT) -m pip install --quiet \
		--disable-pip-version-check "pymgrit==1.0.6" "numpy<2" && { $(PYMGRIT) -c 'import mpi4py.MPI' \
		2>/dev/null || $(PYMGRIT) -m pip install --quiet --disable-pip-version-check mpich; } \
		&& $(PYMGRIT) -c 'import pymgrit, mpi4py.MPI' || { rm -rf $(VENV)/pymgrit; echo >&2 \
		"PyMGRIT could not be installed: it will not be compared with."; }
	@touch $@

$(VENV)/.stamp-openmpi: $(VENV)/.stamp-python
	@command -v mpicc >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq openmpi-bin libopenmpi-dev; } >/dev/null || { echo >&2 \
		"No mpicc was found and none could be installed: install an MPI (Debian: openmpi-bin libopenmpi-dev)."; \
		exit 1; }
	@touch $@

# petsc4py must be of PETSc's version and built against the NumPy here (Debian's own is not), whose headers
# its build doesn't look for by itself.
PETSC_DIR ?= /usr/lib/petsc
$(VENV)/.stamp-petsc: export PETSC_DIR := $(PETSC_DIR)
$(VENV)/.stamp-petsc: $(VENV)/.stamp-test
	@test -e $(PETSC_DIR)/include/petscversion.h || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends libpetsc-real-dev; } >/dev/null || { echo >&2 \
		"No PETSc was found and none could be installed: name one by PETSC_DIR (Debian: libpetsc-real-dev)."; \
		exit 1; }
	CPATH=$$($(BIN)/python -c 'import numpy; print(numpy.get_include())') $(BIN)/python -m pip install \
		--quiet --disable-pip-version-check "petsc4py==$$(awk '/define PETSC_VERSION_(MAJOR|MINOR|SUBMINOR)/ \
		{ v = v s $$3; s = "." } END { print v }' $(PETSC_DIR)/include/petscversion.h)"
	@touch $@

$(VENV)/.stamp-python:
	@$(or $(PYTHON),false) $(PYTHON_OK) 2>/dev/null || { echo >&2 \
		"jaxbraid needs Python 3.11 or newer with the modules venv and ensurepip (Debian: python3-venv);" \
		"$(if $(PYTHON),$(PYTHON) is not one,none was found). Name one with make PYTHON=/path/to/python."; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Where it sees an nvcc, mpi4jax builds for CUDA too and fails without CUDA's headers. A CUDA_PATH that
# holds none turns that off; give your own for ranks on GPUs.
CUDA_PATH ?= $(CURDIR)
$(VENV)/.stamp-mpi: export CUDA_PATH := $(CUDA_PATH)
