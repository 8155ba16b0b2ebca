# Everything a contributor does, from a fresh clone with make alone. `make` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
ARGS ?=

.PHONY: help setup quickstart doctor test test-slow lint format docs plan-env clean

help: ## List these targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Pass options with ARGS, for example: make test ARGS="-k recipe -x"'

setup: ## Make .venv and install what is missing (returns at once when nothing changed)
	@scripts/setup.sh

quickstart: setup ## The whole road on this machine, from data to report
	$(BIN)/gemma-ray quickstart $(ARGS)

doctor: setup ## What this machine can do, and what is missing
	$(BIN)/gemma-ray doctor $(ARGS)

test: setup ## The tests, without those that take minutes
	$(BIN)/pytest $(ARGS)

test-slow: setup ## The tests that take minutes
	$(BIN)/pytest -m slow $(ARGS)

lint: setup ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: setup ## Fix style and formatting in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup ## Write docs/recipe.md again from the recipe's models
	$(BIN)/python scripts/recipe_docs.py

plan-env: setup ## The environment that `gemma-ray plan` compiles in (made on first use otherwise)
	$(BIN)/python scripts/plan_env.py

clean: ## Remove caches and build leftovers; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
