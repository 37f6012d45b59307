# `make demo` and `make test` need Python 3.11 or newer and make; they set up .venv by themselves, once: with uv where that
# is on PATH (UV= goes without it), else with pip.
PYTHON ?= python3
UV ?= $(shell command -v uv 2> /dev/null)
VENV := .venv
BIN := $(VENV)/bin
ROOT ?= demo-root
SEED ?= 0
DEPLOYMENTS ?= prefect.yaml
PORT ?= 4200

export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: demo demo-full compare ui serve test test-all lint format docs clean

demo: $(VENV)/installed  ## draws images, serves them, runs the whole pipeline on them: 5 to 7 minutes on 2 cores
	$(BIN)/python -m demo --root "$(ROOT)" --seed $(SEED)

demo-full: ROOT = demo-full-root
demo-full: $(VENV)/installed  ## also trains the detector, adds VCR and takes three seeds: 30 minutes at most
	$(BIN)/python -m demo full --root "$(ROOT)" --seed $(SEED)

compare: ROOT = compare-root
compare: $(VENV)/installed  ## compares VL-BERT, Unicoder-VL and ViLBERT, three seeds each: 40 minutes at most
	$(BIN)/python -m demo compare --root "$(ROOT)" --seed $(SEED)

ui: $(VENV)/installed  ## the flow UI over a finished demo, and a worker: its deployments can be run again
	$(BIN)/python -m vlbert serve --deployments "$(ROOT)/prefect.yaml" --home "$(ROOT)/prefect" --port $(PORT)

serve: $(VENV)/installed  ## Prefect's server, a worker and the deployments of prefect.yaml
	$(BIN)/python -m vlbert serve --deployments "$(DEPLOYMENTS)" --port $(PORT) $(if $(LIMIT),--limit $(LIMIT))

test: $(VENV)/installed lint  ## 4 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test-all: $(VENV)/installed lint  ## also the slow tests: an hour
	$(BIN)/python -m pytest -m "not far"

lint: $(VENV)/installed
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ty check

format: $(VENV)/installed
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

docs: $(VENV)/installed  ## the pages of docs/ as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:  ## what the demo made; the virtual environment stays
	@if [ -f "$(ROOT)/data/demo.json" ]; then rm -rf "$(ROOT)"; \
	elif [ -e "$(ROOT)" ]; then echo "$(ROOT) has no data/demo.json, so no demo made it: not removed" >&2; exit 1; fi

# Installed once; again when what is to be installed changes, or where an installation broke off: touch comes last.
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
