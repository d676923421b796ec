# Everything runs in .venv, which the first target that needs it makes: Python 3.11+, make and a package index
# are all that a machine must have. No root, no docker.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
# How large a partition `make bench` opens: `make bench BENCH_GB=10` takes that much room on the disk.
BENCH_GB ?= 1
# How many schedules `make sim` runs, and from which seed on.
SEEDS ?= 1000
FIRST ?= 0
BENCH_READY := $(VENV)/.bench-ready
# Classes that Java maps into memory when a test starts Spark, instead of reading them from Spark's jars.
JAVA_ARCHIVE := $(VENV)/java-archive/.ready
MADE := $(VENV)/pyvenv.cfg
# pytest, and then the end of every process that it has left.
PYTEST := $(BIN)/python -m tests.run
# Tests start hundreds of Python processes. Where this variable is set, each of them compiles all of pxrs anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# In this order, so that the files that take longest are not the last: one process would do them while the other waits.
SUITES := tests/acceptance tests/integration tests/contract tests/simulation tests/unit

.PHONY: help demo test check lint types unit sim soak runs bench screenshots wheel clean

help: ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pxrs needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# The extra `dev` contains `demo`: after it, `make demo` has nothing to install.
$(READY): pyproject.toml constraints.txt | $(MADE)
	@$(BIN)/python -m tests.installation dev
	@touch $(DEMO_READY) $@

$(DEMO_READY): pyproject.toml constraints.txt | $(MADE)
	@$(BIN)/python -m tests.installation demo
	@touch $@

$(BENCH_READY): $(READY)
	@$(BIN)/python -m tests.installation bench
	@touch $@

demo: $(DEMO_READY) ## Show what it does: a kill, a zombie, a Spark pipeline, an exact account
	$(BIN)/pxrs demo

$(JAVA_ARCHIVE): $(READY) tests/java_archive.py
	@$(BIN)/python -m tests.java_archive
	@touch $@

# Four at a time on two cores, a file each: many of them wait for a server or a lease.
test: $(READY) ## Run every test, with real servers
	@$(MAKE) --no-print-directory --jobs 3 lint types $(JAVA_ARCHIVE)
	$(PYTEST) --numprocesses 4 --dist loadfile --no-loadscope-reorder $(SUITES)

check: lint types unit ## Lint, types and unit tests: under a minute

lint: $(READY) ## Ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## Strict mypy
	$(BIN)/mypy
	$(BIN)/mypy benchmarks

unit: $(READY) ## The tests that need no server
	$(PYTEST) tests/unit tests/simulation

sim: $(READY) ## Groups and clusters by seed: SEEDS=1000 of each, or SEED=n with its schedule; OF=clusters for one kind
	$(BIN)/python -m pxrs.testing.simulator --first $(FIRST) --seeds $(SEEDS) $(if $(SEED),--seed $(SEED)) $(if $(OF),--of $(OF))

soak: $(READY) ## All cases of sampled tests, and the fault tests with larger numbers: hours; an interrupted one goes on
	$(BIN)/python -m tests.soak

runs: $(READY) ## Ten whole runs of `make test`, seven idle and three on a busy machine, and a table of them
	$(BIN)/python -m tests.repeat --idle 7 --busy 3

bench: $(BENCH_READY) ## Ratios against references measured in the same run
	$(BIN)/python -m benchmarks.registry
	$(BIN)/python -m benchmarks.log --gigabytes $(BENCH_GB)
	$(BIN)/python -m benchmarks.waiting
	$(BIN)/python -m benchmarks.groups
	$(BIN)/python -m benchmarks.queue
	$(BIN)/python -m benchmarks.spark
	$(BIN)/python -m benchmarks.serve
	$(BIN)/python -m benchmarks.cluster
	$(BIN)/python -m benchmarks.metrics
	$(BIN)/python -m benchmarks.events
	$(BIN)/python -m benchmarks.web

screenshots: $(READY) ## Pictures of every page of `pxrs web`, into docs/images; needs Chromium
	$(BIN)/python docs/screenshots.py

# setuptools copies what it finds in build/ into the wheel, also modules that were deleted since: it begins empty.
wheel: $(MADE) ## Build dist/pxrs-VERSION-py3-none-any.whl
	rm -rf build dist/pxrs-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@rm -rf build
	@ls dist/pxrs-*.whl

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
