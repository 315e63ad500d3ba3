# make chat           set everything up on a fresh machine (the first time) and open the chat
# make test           install what the tests need and run them
# make test-fast      the tests that start no engine and load no large model: for while something is being changed
# make test-soak      what takes longer: many rounds of kills, full products, whole programs, new random examples
# make test-papers    the tests of the benchmarks, the papers' comparisons among them
# make inventory      list anew what privatellm offers and says, which the tests compare with tests/inventory
# make logits         the same of the logits of tiny models of all families (takes some minutes)
# make papers         the three papers, rerun: prints benchmarks/results/papers.md (wants a quiet machine, under ten minutes)
# make check          linters, type checker, import contracts
# make bench          the starter and two synthetic models against transformers and llama.cpp (wants a quiet machine,
#                     28 GB of disk)
#
# PYTHON=/path/to/python3   another interpreter than the first one found (3.11 to 3.14)
# TORCH_INDEX=URL           a package index to take torch from, e.g. the CPU-only builds of pytorch.org
# PYTEST_ARGS="-k words"    more arguments for pytest;  BENCH_ARGS="--layers 1"  for the benchmark

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
BENCH_ARGS ?= --markdown
export PYTHON TORCH_INDEX

.PHONY: help chat install test test-fast test-soak test-papers check format inventory logits bench papers clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# An environment whose interpreter is gone (an upgraded Python) is set up again.
BROKEN := $(shell test -x $(BIN)/python || rm -f $(VENV)/.installed*)

# The native kernels are built by the installation, so that a changed source installs again.
NATIVE := $(wildcard engine/moe/kernels/native/*.[ch])

# A stamp is newer than pyproject.toml and the C sources only after everything it names was installed.
$(VENV)/.installed: pyproject.toml packaging/install.sh $(NATIVE)
	@sh packaging/install.sh "$(VENV)" "."
	@touch $@

# With a compiler, tests are of the kernels, too: without them this installation fails, where a person's goes on.
$(VENV)/.installed-test: $(VENV)/.installed
	@PRIVATELLM_REQUIRE_KERNELS=1 sh packaging/install.sh "$(VENV)" ".[test]"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-test
	@sh packaging/install.sh "$(VENV)" ".[bench]"
	@touch $@

# pytest rewrites the assertions of a file of tests once. Without this every worker would do so for all files, except on
# Linux, where workers are forked from one process that has done it. What fails here is printed by the tests themselves.
$(VENV)/.collected: $(VENV)/.installed-test
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --collect-only tests >/dev/null 2>&1 || true
	@touch $@

COLLECTED := $(VENV)/$(if $(filter Linux,$(shell uname)),.installed-test,.collected)

install: $(VENV)/.installed

chat: $(VENV)/.installed
	@sh packaging/ensure_starter.sh "$(BIN)/privatellm"
	@exec $(BIN)/privatellm

# Eight workers with one torch thread each, on two cores: a worker whose test waits for another process leaves its core
# to the others, and beside other programs eight get the larger share of the processors.
# A file's tests stay on one worker, in the order of tests/conftest.py: the files that take longest first.
# Compiled modules are kept, as the tests start hundreds of interpreters.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 8 --dist loadfile --no-loadscope-reorder

BENCHMARKS := tests/benchmarks

test: $(COLLECTED)
	@$(TESTS) $(addprefix --ignore ,$(BENCHMARKS)) $(PYTEST_ARGS)

# The folders whose tests need no ring of processes, no screen and none of the three runtimes.
FAST := $(addprefix tests/,engine/planning engine/generation engine/models engine/moe discovery test_import_contracts.py)

test-fast: $(VENV)/.installed-test
	@$(TESTS) -m "not slow and not soak" $(FAST) $(PYTEST_ARGS)

test-soak: $(COLLECTED)
	@NEW_EXAMPLES=1 $(TESTS) -m "soak or hypothesis" tests $(PYTEST_ARGS)

test-papers: $(COLLECTED)
	@$(TESTS) $(BENCHMARKS) $(PYTEST_ARGS)

check: $(VENV)/.installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

inventory: $(VENV)/.installed-test
	@$(BIN)/python tests/inventory/write_inventory.py

logits: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/python tests/inventory/write_inventory.py logits

bench: $(VENV)/.installed-bench
	@$(BIN)/python -m benchmarks.compare $(BENCH_ARGS)

papers: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.papers --out benchmarks/results/papers.md

clean:
	rm -rf $(VENV) build dist *.egg-info engine/moe/kernels/_native*.so .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
