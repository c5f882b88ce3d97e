PYTHON ?= python3
SUITE ?= short
OUT ?= out/gpu
ARGS ?=
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1

VENV := .venv
SETUP := .ci/setup.py pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all docs package faults interrupts models islands gpu readme support torches frameworks mutants clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.ready-run  ## every plan of two operators, checked, and a picture of what they bring; CPU ranks, or GPUs if there are two (ARGS="--ranks 2")
	@PYTHONPATH=src $(VENV)/bin/python -m counterpoint demo $(ARGS)

test: $(VENV)/.ready-dev  ## all checks: ruff, pyright, pytest with cases drawn of large grids (ARGS="-k graded" for pytest)
	@$(VENV)/bin/python tests/expected.py $(ARGS)
	@echo "[1/4] ruff check"
	@$(VENV)/bin/ruff check --quiet .
	@echo "[2/4] ruff format"
	@$(VENV)/bin/ruff format --quiet --check .
	@echo "[3/4] pyright"
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright
	@echo "[4/4] pytest"
	@$(VENV)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

test-all:  ## the same with every case of each grid
	@$(MAKE) --no-print-directory test ARGS="--all-cases $(ARGS)"

docs: $(VENV)/.ready-docs  ## the site, to out/site: every warning is an error, and its pages fetch nothing
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build
	@echo "out/site/index.html; with search: $(VENV)/bin/python -m http.server -d out/site"

package:  ## the wheel, without a checkout, in empty environments: light, pictures, torch, notebook; then the docs
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) .ci/package.py
	@$(MAKE) --no-print-directory docs

faults: $(VENV)/.ready-dev  ## CPU ranks that are killed, stopped, late or gone: 200 trials, 5 minutes (ARGS="--trials 20", "--guard --trials 50", or "--soak 30" for minutes in which groups are rebuilt)
	@PYTHONPATH=src:tests:. $(VENV)/bin/python -m fault_trials $(ARGS)

models: $(VENV)/.ready-dev  ## random models, compiled, against torch's own compile and fp64: 1,000 as written, 60 by Inductor cold, warm and on other ranks; 75 minutes (ARGS="--models 20 --inductor 2 --seed 100")
	@PYTHONPATH=src:tests:. $(VENV)/bin/python -m random_models $(ARGS)

mutants: $(VENV)/.ready-dev  ## 60 faults put into src one by one: whether make test sees them; an hour (ARGS="--only 3 7" with out/reached.json of a run before)
	@test -n "$(ARGS)" || $(VENV)/bin/python -m pytest -q -n auto --dist worksteal -p reached --reached out/reached.json
	@PYTHONPATH=src:tests:. $(VENV)/bin/python -m mutants run $(ARGS)

interrupts: $(VENV)/.ready-dev  ## CPU ranks that leave a call at some line, by an interrupt, an error or their end: 200 trials, 6 minutes (ARGS="--trials 20")
	@PYTHONPATH=src:tests:. $(VENV)/bin/python -m left_calls $(ARGS)

islands: $(VENV)/.ready-dev  ## ranks on several islands, in network namespaces: bytes, times, 60 faults; 25 minutes, then docs/islands.md (ARGS="--trials 6")
	@PYTHONPATH=src:. $(VENV)/bin/python -m benchmarks.islands $(ARGS)
	@PYTHONPATH=src:. $(VENV)/bin/python -m benchmarks.readme

gpu:  ## tests and short tables on the GPUs here, with the python3 at hand (SUITE=decode for one in full; OUT=folder)
	PYTHONPATH=src:. python3 -m benchmarks.gpu_suite --suite $(SUITE) --out $(OUT)

readme: $(VENV)/.ready-run  ## tables and pictures of README.md and docs/results, from the committed measurements
	@PYTHONPATH=src:. $(VENV)/bin/python -m benchmarks.readme

support: $(VENV)/.ready-dev  ## docs/support.md, from tests that pass and say what they show, 4 minutes; rows of GPUs are those of make gpu
	@rm -f benchmarks/results/support-cpu.jsonl
	@$(VENV)/bin/python -m pytest -q -n auto --dist worksteal -m shows --all-cases -p benchmarks.support --rows benchmarks/results/support-cpu.jsonl
	@PYTHONPATH=src:. $(VENV)/bin/python -m benchmarks.readme

torches:  ## FSDP2 of each torch: tests/fsdp under 2.11 to 2.14, an environment for each; 5 GiB a version (TORCHES="2.14.1")
	@set -e; for version in $(TORCHES); do \
	  at=out/torch-$$version; echo "torch $$version, in $$at"; \
	  test -f $$at/.ready || { $(PYTHON) -m venv $$at; \
	    $$at/bin/python -m pip install -q torch==$$version numpy pytest pytest-xdist rich typer hypothesis matplotlib; \
	    touch $$at/.ready; }; \
	  $$at/bin/python -m pytest -q -n auto -p no:cacheprovider -W default tests/fsdp; \
	done

frameworks: $(VENV)/.ready-dev  ## models of transformers, accelerate, Lightning, torchtitan, TorchRec and vLLM: the real packages on CPU ranks; 14 minutes, 2 GiB
	@$(VENV)/bin/python .ci/frameworks.py

clean:  ## remove all that make made
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.ready-run: $(SETUP)
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) .ci/setup.py run

$(VENV)/.ready-docs $(VENV)/.ready-dev: $(VENV)/.ready-run
	@$(PYTHON) .ci/setup.py $(@:$(VENV)/.ready-%=%)
