# `make check` is what CI runs after the demo.
.PHONY: demo check format slow
SHELL := bash

demo:
	./demo

check:
	./check

format:
	. scripts/venv.sh && ensure_venv '.[dev]' pytest && \
	"$$VENV/bin/ruff" format . && "$$VENV/bin/ruff" check --fix .

slow:
	. scripts/venv.sh && ensure_venv '.[dev]' pytest && "$$VENV/bin/pytest" -m slow
