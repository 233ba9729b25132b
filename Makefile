# Two commands matter: `make demo` and `make test`. Each sets everything up by itself.
PY      ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := .make/setup
NATIVE  := $(wildcard native/src/*.cc native/src/*.h native/CMakeLists.txt)
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: setup demo test test-all check bench proto docs fmt clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@echo "setting up $(VENV): a minute or more, with PyTorch to download"
	$(PY) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[trainer,demo,dev]'
	@mkdir -p .make && touch $@

demo: setup
	$(BIN)/python -m trainer.demo

test: setup
	$(BIN)/python -m pytest -m "not full"

test-all: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/python tools/stubs.py --check
	$(BIN)/python tools/configdoc.py --check
	$(BIN)/clang-format --dry-run --Werror native/src/* native/tests/*
	$(BIN)/clang-tidy --quiet $(filter-out native/src/bindings.cc,$(filter %.cc,$(NATIVE))) -- -std=c++17 -Inative/src

bench: setup
	$(BIN)/python -m tests.bench

proto: setup
	$(BIN)/python tools/stubs.py

docs: setup
	$(BIN)/python tools/configdoc.py

fmt: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	$(BIN)/clang-format -i native/src/* native/tests/*

clean:
	rm -rf $(VENV) .make build demo-out bench-out
