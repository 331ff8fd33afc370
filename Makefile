# One command for each thing. A clean clone needs only make and python3 >= 3.11 with venv; once the
# environment in .venv is made, nothing here touches the network.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Which part of the nightly tests, K/N.
PART ?= 1/1

# Tests run side by side, a process for each core; JOBS=0 runs them in one.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# What whole jobs do on a device that is late, in `make devices` as late as many seeds make it.
ON_DEVICES := tests/system/state $(patsubst %,tests/system/test_%.py,\
	smoke accumulate evaluation resume runner streams skipped_steps offload recompute user_ops)
SEEDS := $(shell seq 0 49)

# What jobs computed there, of one state of the code.
RECORDS = build/late-gpus/$(shell git describe --always --dirty)

# Environments of tests/suite.py: the oldest numpy that pyproject.toml allows; torch, 1.2 GB; the
# packages of the extras [mpi], [ray] and [docs], 0.5 GB; and those of [cuda] and [cudnn], 2 GB.
OLD_VENV := .venv-oldest
OLD_STAMP := $(OLD_VENV)/.installed
OLD_NUMPY := 1.26.*
ORACLE_VENV := .venv-oracle
ORACLE_STAMP := $(ORACLE_VENV)/.installed
EXTRAS_VENV := .venv-extras
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
RELEASE_VENV := .venv-release
RELEASE_STAMP := $(RELEASE_VENV)/.installed
SUITE := $(BIN)/python tests/suite.py

# The versions of NVRTC whose registers are kept in tests/data/gpt2_kernels.json.
NVRTCS := 13.0 13.5

# The stamps tell what is installed; a changed pyproject.toml installs anew.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev

# Where the rivals of `actorflow bench` live; another folder is told to it with --env.
BENCH_ENV ?= .bench-env
BENCH_STAMPS := $(patsubst %,$(BENCH_ENV)/%/.installed,torch jax tensorflow onnxruntime openvino)

# OpenBLAS reads these when it is loaded. A value exported for another machine halves every matrix
# product of numpy: `.venv/bin/python -m actorflow doctor` tells.
unexport OPENBLAS_CORETYPE
unexport OPENBLAS_L2_SIZE

# pip runs, and the checkers' reports, one after the other.
.NOTPARALLEL:

.DEFAULT_GOAL := help

.PHONY: help demo test nightly durations devices late-gpus oldest cuda hosts golden oracle oracle-store \
	check lint types contracts model soak bench bench-env docs release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN_STAMP) ## train the character model; options in ARGS="--steps 100"
	@$(BIN)/python examples/char_gpt.py $(ARGS)

test: lint types contracts ## lint, types, import contracts, and each case once, of slow ones a sample, on the path that users run
	$(SUITE) merge --jobs $(JOBS) -- $(ARGS)

nightly: $(DEV_STAMP) ## all tests in all configurations; PART=3/8 for the third of eight parts; 4 GB of environments
	$(SUITE) nightly --jobs $(JOBS) --part $(PART) -- $(ARGS)

durations: ## put what the last runs measured into tests/durations.json
	$(SUITE) keep

devices: $(DEV_STAMP) ## jobs scattered over two simulated devices, and on one, late as each of 50 seeds; SEEDS="0 1"
	$(SUITE) nightly --jobs $(JOBS) --only two-devices -- $(ARGS)
	set -e; for seed in $(SEEDS); do \
		$(PYTEST) -q --device sim --sim-seed $$seed $(ON_DEVICES) $(ARGS); done

late-gpus: $(DEV_STAMP) ## every job of tests/system on an emulated GPU, late as each of 50 seeds, bits compared; goes on where it was stopped
	set -e; for seed in $(SEEDS); do \
		test -e $(RECORDS)/cuda-$$seed/whole || { \
			echo "== seed $$seed"; \
			$(PYTEST) -q --device cuda --sim-seed $$seed --record=$(RECORDS) --hypothesis-seed 0 tests/system $(ARGS); \
			touch $(RECORDS)/cuda-$$seed/whole; }; done
	$(BIN)/python tests/recorder/same_bits.py $(RECORDS)

oldest: $(DEV_STAMP) ## what depends on numpy, with the oldest that is supported
	$(SUITE) nightly --jobs $(JOBS) --only oldest-numpy -- $(ARGS)

cuda: $(DEV_STAMP) ## what CUDA's own compiler and libraries say of kernels, products and attention; needs no GPU
	$(SUITE) nightly --jobs $(JOBS) --only cuda-packages -- $(ARGS)

hosts: $(DEV_STAMP) ## ranks on several hosts by MPI, and jobs under Ray, all on this machine
	$(SUITE) nightly --jobs $(JOBS) --only extras -- $(ARGS)

golden: $(CUDA_STAMP) ## registers and spills of GPT-2's kernels anew, by each NVRTC whose numbers are kept
	set -e; for version in $(NVRTCS); do \
		$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps --upgrade \
			--target $(CUDA_VENV)/nvrtc-$$version "nvidia-cuda-nvrtc==$$version.*"; \
		PYTHONPATH=$(CUDA_VENV)/nvrtc-$$version $(CUDA_VENV)/bin/python benchmarks/gpu/usage_gpt2.py; done

oracle: $(DEV_STAMP) ## functions and layers against torch itself; natively and on cuda, emulated, too
	$(SUITE) nightly --jobs $(JOBS) --only torch,torch-native,torch-cuda -- $(ARGS)

oracle-store: $(ORACLE_STAMP) ## store what torch computes, for tests without it
	PYTHONPATH=tests/shared $(ORACLE_VENV)/bin/python tests/oracle/store.py
	PYTHONPATH=tests/shared $(ORACLE_VENV)/bin/python tests/shared/task_programs.py

check: lint types contracts ## after a change: lint, types, import contracts, and the tests that belong to it
	$(PYTEST) --tier merge $$($(BIN)/python tests/affected.py) $(ARGS)

lint: $(DEV_STAMP) ## style of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP) ## static types
	$(BIN)/mypy

contracts: $(DEV_STAMP) ## imports only go down the floors
	$(BIN)/lint-imports

model: $(RUN_STAMP) ## prove the actors' protocol on small plans with spin, every order of events
	@$(BIN)/python -m actors.testing.spin $(ARGS)

soak: $(RUN_STAMP) ## a million random runs of the actors' machine; ARGS="--first 0 --count 1000"
	@$(BIN)/python -m actors.testing.soak $(ARGS)

bench: $(RUN_STAMP) ## all benchmarks, in the order of their names
	@set -e; found=; for file in benchmarks/bench_*.py; do \
		test -e "$$file" || continue; found=1; \
		echo "== $$file"; $(BIN)/python "$$file" $(ARGS); \
	done; \
	test -n "$$found" || { echo "make bench: there is no benchmarks/bench_*.py" >&2; exit 1; }

bench-env: $(BENCH_STAMPS) ## an environment for each rival of `actorflow bench`

docs: $(DOCS_STAMP) ## the pages of docs/ and the reference as a site in build/docs, to be opened as a file
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet
	@echo "make: build/docs/index.html"

release: $(RELEASE_STAMP) ## build wheel and sdist into dist/ and try both in environments of their own; uploads nothing
	rm -rf dist
	$(RELEASE_VENV)/bin/python -m build --outdir dist .
	$(RELEASE_VENV)/bin/python -m twine check --strict dist/*
	$(PYTHON) tests/release.py dist

clean: ## remove .venv, caches and build products; runs and checkpoints stay
	rm -rf $(VENV) $(OLD_VENV) $(CUDA_VENV) $(ORACLE_VENV) $(EXTRAS_VENV) $(DOCS_VENV) $(RELEASE_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# A rival's environment holds that rival alone; the stamp says that pip came to its end.
$(BENCH_ENV)/torch/.installed: RIVAL := torch==2.13.0
$(BENCH_ENV)/jax/.installed: RIVAL := jax
$(BENCH_ENV)/tensorflow/.installed: RIVAL := tensorflow==2.21.0
# Those that read ONNX have our exporter beside them, which writes the rows for them.
$(BENCH_ENV)/onnxruntime/.installed: RIVAL := onnxruntime
$(BENCH_ENV)/openvino/.installed: RIVAL := openvino
$(BENCH_ENV)/onnxruntime/.installed $(BENCH_ENV)/openvino/.installed: EXPORTER := --editable .[onnx]
$(BENCH_ENV)/%/.installed:
	@echo "make: installing $(RIVAL) into $(@D)"
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check "$(RIVAL)" numpy $(EXPORTER)
	@touch $@

# A kill may have left half an environment, so it is pip that is asked and not the folder.
$(RUN_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "make: actorflow needs Python 3.11 or later, and '$(PYTHON)' is" \
			"'$$($(PYTHON) --version 2>&1)'." >&2; \
		echo "      Install it, or name another: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: '$(PYTHON)' cannot make virtual environments: its venv module is missing." >&2; \
		echo "      On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "make: making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "make: installing actorflow into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(OLD_STAMP): pyproject.toml
	@echo "make: installing actorflow with numpy $(OLD_NUMPY) into $(OLD_VENV)"
	@$(PYTHON) -m venv --clear $(OLD_VENV)
	@$(OLD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable ".[test]" "numpy==$(OLD_NUMPY)"
	@touch $@

$(EXTRAS_STAMP): pyproject.toml
	@echo "make: installing actorflow with MPI, Ray and mkdocs into $(EXTRAS_VENV)"
	@$(PYTHON) -m venv --clear $(EXTRAS_VENV)
	@$(EXTRAS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable ".[test,mpi,ray,docs]"
	@touch $@

$(DOCS_STAMP): pyproject.toml
	@echo "make: installing actorflow with mkdocs into $(DOCS_VENV)"
	@$(PYTHON) -m venv --clear $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	@touch $@

$(CUDA_STAMP): pyproject.toml
	@echo "make: installing actorflow with CUDA's packages into $(CUDA_VENV)"
	@$(PYTHON) -m venv --clear $(CUDA_VENV)
	@$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable ".[test,cuda,cudnn]"
	@touch $@

$(RELEASE_STAMP):
	@echo "make: installing what builds and checks releases into $(RELEASE_VENV)"
	@$(PYTHON) -m venv --clear $(RELEASE_VENV)
	@$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check build twine
	@touch $@

$(ORACLE_STAMP): pyproject.toml
	@echo "make: installing actorflow with torch into $(ORACLE_VENV)"
	@$(PYTHON) -m venv --clear $(ORACLE_VENV)
	@$(ORACLE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(ORACLE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "make: installing the tools for tests into $(VENV)"
	@$(PIP) --editable ".[dev]"
	@touch $@
