# make demo   set up, then plan a mixed cluster, print its Megatron flags and prove the plan on CPU
# make test   set up, then run the checks and the tests
#
# Each creates .venv by itself (PYTHON=... chooses the interpreter, TORCH=... another build of
# torch); later runs reuse it until setup.py or constraints.txt change.

VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
PYTEST_WORKERS ?= 2

.PHONY: docs demo test test-slow test-pairs check lint types layers schemas env clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

env: $(VENV)/.installed

$(VENV)/.installed: setup.py constraints.txt tools/make_env.sh
	@tools/make_env.sh $(VENV)
	@touch $@

demo: env
	@tools/demo.sh $(BIN) $(DEMO)

test: check docs
	$(BIN)/python -m pytest -q -m "not slow" -n $(PYTEST_WORKERS)

test-slow: env
	$(BIN)/python -m pytest -q -m slow -n $(PYTEST_WORKERS) --timeout 1200

# Generated plans with every pair of features; -m "" so that the slow ones run too.
test-pairs: env
	$(BIN)/python -m pytest -q -m "" -n $(PYTEST_WORKERS) --timeout 600 tests/runtime/test_pairs.py

check: lint types layers

lint: env
	$(BIN)/ruff check .

types: env
	$(BIN)/mypy

layers: env
	$(BIN)/lint-imports --no-cache

schemas: env
	$(BIN)/python tools/export_schemas.py

docs: env
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .import_linter_cache .hypothesis
