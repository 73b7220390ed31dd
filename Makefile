PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TRL_VERSIONS := 1.6.0 1.10.0 1.14.2 1.16.0
SEAM_TESTS := $(addprefix tests/test_,parity.py features.py exclusion.py compact.py compact_engines.py trainer.py checkpoint.py ranks.py engines.py reward_log.py cli.py)
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test format lint types check check-long test-versions bench gpu policy clean

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
	$(BIN)/pytest -m 'not slow and not gpu'

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

test-versions: $(TRL_VERSIONS:%=test-trl-%) ## the seam's tests with each supported version of TRL

test-trl-%:
	rm -rf .venv-trl-$*
	$(PYTHON) -m venv .venv-trl-$*
	grep -v '^trl==' constraints.txt > .venv-trl-$*/constraints.txt
	.venv-trl-$*/bin/pip install --quiet --constraint .venv-trl-$*/constraints.txt --editable '.[dev]' trl==$*
	.venv-trl-$*/bin/pytest -q -o filterwarnings= -W ignore -m 'not slow and not gpu' $(SEAM_TESTS)
	rm -rf .venv-trl-$*

bench: install ## the update phase against TRL's, and the share of our own code; writes outputs/ (some 20 minutes)
	$(BIN)/python benchmarks/update.py
	$(BIN)/python benchmarks/overhead.py

gpu: install ## parity, resume, bf16 and ZeRO-3 on the CUDA devices of this machine; writes outputs/gpu.md
	$(BIN)/pytest -rs -m gpu tests/test_gpu.py

policy: install ## train the shipped policy again (about half an hour on two cores)
	$(BIN)/python -m grpo_ext.testbed.pretrain

clean: ## remove .venv and outputs
	rm -rf .venv .venv-trl-* outputs
