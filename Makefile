PYTHON ?= python3
BIN := .venv/bin

.PHONY: up down test prove bench lint screenshots environment test-environment

up: environment
	@exec $(BIN)/speclab up

down:
	@$(BIN)/speclab down

environment:
	@$(PYTHON) environment/build.py

test-environment:
	@$(PYTHON) environment/build.py --tests

test: test-environment
	$(BIN)/pytest -m "not prove" -n 2 --dist loadgroup --no-loadscope-reorder --durations 15

prove: test-environment
	$(BIN)/pytest -m prove

bench: test-environment
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

lint: test-environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

screenshots: test-environment
	$(BIN)/python -m tests.e2e.screenshots
