# Outrider. `make help` lists the targets; the first one is what most people want.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON3 ?= python3
VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
SETUP := $(PYTHON3) -m setup
PROCESSES ?= 4
unexport PYTHONDONTWRITEBYTECODE  # with it every process of the tests compiles our modules, and pytest rewrites each file

.PHONY: help demo test test-fast test-vllm-next lint deps deps-demo deps-fast code bench recording crds docs profile simulate clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /|/' | column -t -s '|'

demo: deps-demo ## the main job: a real Kubernetes, one manifest, real requests, a new draft (KEEP=1 leaves it up)
	@$(PY) -m demo $(if $(KEEP),--keep)

test: deps lint ## every test, with a real cluster and real engines, in PROCESSES=4; .outrider/features.md says what was seen right
	OUTRIDER_REQUIRE_CLUSTER=1 $(PY) -m pytest -n $(PROCESSES) --no-loadscope-reorder --durations=20 --file-budgets=tests/file_budgets.toml \
	  --features=.outrider/features.md

test-fast: code ## the unit tests without those marked slow
	$(PY) -m pytest -q -n 2 --no-loadscope-reorder -m "not slow" tests/unit

test-vllm-next: deps ## the faster half of the engine's tests on the newest supported vLLM (TESTS=... chooses others)
	$(PY) -m setup.next_vllm $(TESTS)

lint: deps-fast ## formatting, lint, types, import rules, generated files, words
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/outrider-crds --check
	$(PY) -m setup.reference --check
	$(PY) -m setup.words

crds: deps-fast ## write what is generated from the models, the chart and the programs: the CRD, docs/reference
	$(VENV)/bin/outrider-crds
	$(PY) -m setup.reference

docs: deps-fast ## build the documentation's site in .outrider/site; a broken link fails
	$(VENV)/bin/mkdocs build --strict

bench: $(if $(ONLY),deps,code) ## replay recorded proposals against the bars, in at most MINUTES=20 (ONLY=real_cores runs that benchmark)
	$(PY) -m bench.$(or $(ONLY),replay) $(if $(MINUTES),--minutes $(MINUTES))

recording: deps ## record again what the drafters propose (PROMPTS=FILE in the form of Spec-Bench; docs/how-to/simulate.md)
	OMP_WAIT_POLICY=passive $(PY) -m bench.record $(PROMPTS) $(if $(MINUTES),--minutes $(MINUTES)) --output runtime/outrider_runtime/simulate/data/recordings/smollm2.npz

profile: deps ## measure the example's latency profile on this machine and print the report
	$(VENV)/bin/outrider-profile -f examples/smollm2-cpu.yaml --report .outrider/profile

simulate: deps-fast ## what the example's pool would do on an H100 at 8 requests a second (docs/how-to/simulate.md)
	$(VENV)/bin/outrider-simulate --manifest examples/llama-h200.yaml --system h100_sxm --rate 8 --compare --output .outrider/simulation

deps: ## system packages, virtual environment, compiled code, cluster binary, helm, model (cached)
	@$(SETUP) all

deps-demo: ## what `make demo` needs of it (cached)
	@$(SETUP) demo

deps-fast: ## the virtual environment only (cached)
	@$(SETUP) venv

code: deps-fast ## machine code of the control core (cached)
	@$(SETUP) code

clean: ## remove what this checkout built (caches in ~/.cache/outrider stay)
	rm -rf $(VENV) .outrider .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find runtime -name '*.nbc*' -delete
