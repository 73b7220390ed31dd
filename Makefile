PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test format lint types check check-long policy clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(INSTALLED) ## create .venv with the tested versions

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install ## set up, train the embedded policy with AVSPO, show the summary and the curves
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		examples/train.py --method avspo --eval_strategy steps --eval_on_start true --output_dir outputs/demo

test: install ## set up and run the tests
	$(BIN)/pytest -m 'not slow'

format: install ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## check types
	$(BIN)/mypy

check: lint types test ## all that has to be green: lint, types, tests

check-long: check ## check, and the slow repetitions
	$(BIN)/pytest -m slow

policy: install ## train the shipped policy again (about half an hour on two cores)
	$(BIN)/python -m grpo_ext.testbed.pretrain

clean: ## remove .venv and outputs
	rm -rf .venv outputs
