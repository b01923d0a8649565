# Targets are what CI runs. `make demo` and `make test` set everything up themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STATE  ?=

.PHONY: setup check test gpu interop serving slow chaos bench-api bench-idle bench-extract bench-judge bench-prepare bench-train openapi serve demo clean
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,demo]'
	touch $@

setup: $(VENV)/.installed  ## make the venv

check: setup  ## lint, types, import rules, migrations match models
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -P -m server.db.check

test: setup  ## the suite, without slow, gpu, browser, interop, slurm, chaos and serving
	$(BIN)/python -P -m pytest -n 2 --dist worksteal -m 'not slow and not gpu and not browser and not interop and not slurm and not chaos and not serving'

gpu: setup  ## on a machine with an NVIDIA GPU: NVML, leases and training on it
	$(BIN)/python -P -m pytest -m gpu

slow: setup  ## tests that take minutes
	$(BIN)/python -P -m pytest -m slow

interop: setup  ## against the peers' own code, in a venv of their own
	$(BIN)/python -P -m pytest -m interop

serving: setup  ## a real vLLM serves what we convert, and every fault it can be given; runs the demo where it was not
	$(BIN)/python -P -m pytest -m serving -s

chaos: setup  ## 200 rounds of kills, lost answers, clock jumps and full disks; the last line is JSON
	$(BIN)/python -m tests.chaos $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED))

bench-train: setup  ## the training step beside those of speculators and SpecForge; the last line is JSON
	$(BIN)/python -m benchmarks.train $(if $(ROUNDS),--rounds $(ROUNDS))

bench-api: setup  ## asking for one job, here and of Ray's job server; waiters; a 2 GB log; the last line is JSON
	$(BIN)/python -m benchmarks.api

bench-idle: setup  ## what the daemon takes idle and with 20 running jobs; the last line is JSON
	$(BIN)/python -m benchmarks.idle

bench-judge: setup  ## the judge on 9.5 GB made in .bench/: rates, memory, a training beside it; the last line is JSON
	$(BIN)/python -m benchmarks.judge $(if $(ROUNDS),--rounds $(ROUNDS))

bench-extract: setup  ## extraction on SmolLM2-135M beside a bare forward pass and the naive way; eight-bit states; the last line is JSON
	$(BIN)/python -m benchmarks.extract $(if $(ROUNDS),--rounds $(ROUNDS))

bench-prepare: setup  ## prepare beside the tokenizer's own encode_batch, and the vocabulary map; the last line is JSON
	$(BIN)/python -m benchmarks.vocab
	$(BIN)/python -m benchmarks.prepare $(if $(VERIFIER),--verifier $(VERIFIER)) $(if $(ROUNDS),--rounds $(ROUNDS))

openapi: setup  ## write docs/openapi.json from the routes
	$(BIN)/eyas openapi > docs/openapi.json

serve: setup  ## start the daemon: make serve STATE=DIR
	$(BIN)/eyas serve $(if $(STATE),--state $(STATE))

demo: setup  ## the main job on a real verifier: prompts -> judged drafter
	$(BIN)/python examples/demo/demo.py

clean:  ## remove the venv and the demo
	rm -rf $(VENV) .venvs .demo .bench
