# `make demo` and `make test` need Python 3.11 or newer and make. The first one creates .venv, with uv if it is on PATH
# (UV= turns it off), otherwise with pip.
PYTHON ?= python3
UV ?= $(shell command -v uv 2> /dev/null)
VENV := .venv
BIN := $(VENV)/bin
ROOT ?= demo-root
SEED ?= 0
DEPLOYMENTS ?= prefect.yaml
PORT ?= 4200
CODE := storage training detectors vlbert flows demo benchmarks docker notebooks tests  # not the user's own files

export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: demo demo-full compare ui serve test test-all lint format docs clean install help

demo: $(VENV)/installed  ## draw and serve images, and run the whole pipeline on them: 4 to 7 minutes on 2 cores
	$(BIN)/python -m demo --root "$(ROOT)" --seed $(SEED)

demo-full: ROOT = demo-full-root
demo-full: $(VENV)/installed  ## the demo with detector training and five seeds: 30 minutes at most
	$(BIN)/python -m demo full --root "$(ROOT)" --seed $(SEED)

compare: ROOT = compare-root
compare: $(VENV)/installed  ## compare the architectures with ten seeds each: 40 minutes at most
	$(BIN)/python -m demo compare --root "$(ROOT)" --seed $(SEED)

ui: $(VENV)/installed  ## start Prefect's UI and a worker on a finished demo, to run its deployments again
	$(BIN)/python -m vlbert serve --deployments "$(ROOT)/prefect.yaml" --home "$(ROOT)/prefect" --port $(PORT)

serve: $(VENV)/installed  ## start Prefect's server and a worker with the deployments of prefect.yaml
	$(BIN)/python -m vlbert serve --deployments "$(DEPLOYMENTS)" --port $(PORT) $(if $(LIMIT),--limit $(LIMIT))

test: $(VENV)/installed lint  ## run the quick tests: 4 to 7 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test-all: $(VENV)/installed lint  ## run the quick and slow tests: an hour
	$(BIN)/python -m pytest -m "not far"

lint: $(VENV)/installed  ## check format, lint and types
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ty check

format: $(VENV)/installed  ## format, and fix lint
	$(BIN)/python -m ruff format $(CODE)
	$(BIN)/python -m ruff check --fix $(CODE)

docs: $(VENV)/installed  ## build docs/ as a website in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:  ## remove the demo's files; .venv is kept
	@if [ -f "$(ROOT)/data/demo.json" ]; then rm -rf "$(ROOT)"; \
	elif [ -e "$(ROOT)" ]; then echo "$(ROOT) has no data/demo.json, so it is not a demo's folder; not removed" >&2; exit 1; fi

install: $(VENV)/installed  ## install into .venv

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

# Installed again if the requirements change or an installation was interrupted: touch comes last.
$(VENV)/installed: pyproject.toml constraints.txt
ifneq ($(UV),)
	$(UV) venv --quiet --seed --allow-existing --python "$$(command -v $(PYTHON))" $(VENV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
else
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
endif
	touch $@
