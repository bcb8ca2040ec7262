# `make check` is what CI runs.
.PHONY: check format lint types test slow
PYTHON ?= python

check: lint types test

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest -m "not slow"

slow:
	$(PYTHON) -m pytest -m slow
