# `make train` and `make test` work on a fresh machine: they make .venv first where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
ARGS ?=

.PHONY: setup train test test-slow test-cloud check docs format clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

train: setup  ## PPO on Breakout with two processes; `make train ARGS="--env-id PongNoFrameskip-v4"` adds flags
	$(BIN)/torchrun --standalone --nnodes=1 --nproc_per_node=$(NPROC) ppo_atari_multigpu.py $(ARGS)

test: setup  ## the fast suite; `make test ARGS="tests/test_atari.py"` runs a part
	$(BIN)/python -m pytest -m "not slow and not cloud" $(ARGS)

test-slow: setup  ## the longer proofs: twenty kills, nodes that leave and join
	$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

test-cloud: setup  ## the schedulers' real parts: Terraform, SLURM, kubectl, an image
	cloud/tests/setup $(BIN)
	$(BIN)/python -m pytest -m cloud --timeout 1800 $(ARGS)

check: setup  ## what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

docs: setup  ## the pages, in site/
	$(BIN)/mkdocs build --strict

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache site
