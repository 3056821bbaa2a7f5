# dexviz: `make run` sets everything up and serves the app; `make test` runs all tests.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := run

PORT ?= 8501
ADDRESS ?= 127.0.0.1
MODEL ?= smollm2-135m
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Idle OpenMP threads sleep: several processes share the cores while tests run.
export OMP_WAIT_POLICY ?= PASSIVE

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# A stamp carries the checksum of what it stands for, so a second run installs nothing and needs no network.
sum = $(shell cat $(1) | sha256sum | cut -c1-12)
RUNTIME := $(VENV)/installed-$(call sum,requirements.txt constraints.txt)
DEV := $(VENV)/installed-dev-$(call sum,requirements.txt constraints.txt requirements-dev.txt)

.PHONY: run setup setup-dev fetch browser test lint format bench adapter results retrieval gallery screenshots clean check-python

run: setup fetch
	$(PY) -m dexviz serve --port $(PORT) --address $(ADDRESS)

setup: $(RUNTIME)

setup-dev: $(DEV)

fetch: setup
	@$(PY) -m dexviz fetch $(MODEL)

test: setup-dev fetch browser
	$(PY) -m pytest -raR $(PYTEST_FLAGS)

# Browser tests drive the system's Chromium; a machine without one gets it from its package manager.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  sudo=$$([ "$$(id -u)" -eq 0 ] || echo sudo); $$sudo apt-get update -qq && \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; }

lint: setup-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The GPU's rows go into the page where there is a GPU; the plot is drawn by Chromium.
bench: setup fetch browser
	@mkdir -p build/performance
	@! $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  $(PY) -m benchmarks.gpu --json build/performance/gpu.json
	$(PY) -m benchmarks.performance

adapter: setup fetch
	$(PY) -m dexviz train --model $(MODEL) --data sotu:1990-2024 --out adapters/$(MODEL) --steps 150 --anneal 50 \
	  --precision bf16 --evaluate-every 50 --seed 0

results: setup-dev fetch
	$(PY) -m benchmarks.results

# Six trainings of about twenty minutes on one core each; what is there already is not made again.
retrieval: setup-dev
	$(PY) -m benchmarks.retrieval_pair

gallery: setup fetch
	$(PY) -m benchmarks.gallery

screenshots: setup-dev fetch browser
	$(PY) -m benchmarks.screenshots

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(PY):
	@$(MAKE) --silent check-python
	$(PYTHON) -m venv $(VENV)

check-python:
	@test -n "$(PYTHON)" || { echo "dexviz needs Python 3.11 or later; none was found. On Debian or Ubuntu: apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

$(RUNTIME): | $(PY)
	$(PIP) install -r requirements.txt -c constraints.txt
	$(PIP) install --no-deps --editable .
	@rm -f $(VENV)/installed-*
	@touch $@

$(DEV): $(RUNTIME)
	$(PIP) install -r requirements-dev.txt -c constraints.txt
	@rm -f $(VENV)/installed-dev-*
	@touch $@
