# make demo   set up, then plan a mixed cluster, print its Megatron flags and prove the plan on CPU
# make test   set up, then run the checks and the tests
# make test-gpu   set up, then what needs NVIDIA GPUs, on a machine that has some
# make pages  set up, then refresh all that README and docs show of commands, results and pictures
# make dist   a wheel and a source archive in dist/: what the machines of a job install
# make image  a container image of the runtime, from the wheel (needs Docker)
#
# Each creates .venv by itself (PYTHON=... chooses the interpreter, TORCH=... another build of
# torch); later runs reuse it until requirements-dev.txt changes.

VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
PYTEST_WORKERS ?= 2
IMAGE ?= megatron-hetero:latest

.PHONY: pages docs demo test test-slow test-pairs test-gpu check lint types layers schemas env clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

env: $(VENV)/.installed

$(VENV)/.installed: setup.py requirements-dev.txt tools/make_env.sh
	@tools/make_env.sh $(VENV)
	@touch $@

demo: env
	@tools/demo.sh $(BIN) $(DEMO)

test: env
	@$(MAKE) --no-print-directory -j2 check docs
	$(BIN)/python -m pytest -q -m "not slow" -n $(PYTEST_WORKERS)

test-slow: env
	$(BIN)/python -m pytest -q -m slow -n $(PYTEST_WORKERS) --timeout 1200

# Generated plans with every pair of features; -m "" so that the slow ones run too.
test-pairs: env
	$(BIN)/python -m pytest -q -m "" -n $(PYTEST_WORKERS) --timeout 600 tests/runtime/test_pairs.py

# The kit first; then the tests with the mark gpu.
test-gpu: env
	$(BIN)/megatron-hetero doctor --train --output build/doctor
	$(BIN)/python -m pytest -q -m gpu --timeout 1200 tests

check: lint types layers

lint: env
	$(BIN)/ruff check .

types: env
	$(BIN)/mypy

layers: env
	$(BIN)/lint-imports --no-cache

schemas: env
	$(BIN)/python tools/export_schemas.py

.PHONY: dist image
# The wheel is made from the unpacked source archive, so that nothing stale gets into it.
dist: env
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || date +%s) \
	    MEGATRON_HETERO_PURE=1 $(BIN)/python -m build --no-isolation --outdir dist

image: dist
	docker build --tag $(IMAGE) .

docs: env
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

# Outputs and pictures are made anew (minutes); tables come from benchmarks/results, each made anew by
# tools/results.py or, the paper's claims, tools/paper_claims.py.
pages: schemas
	PYTHONHASHSEED=0 $(BIN)/python tools/pages.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis
