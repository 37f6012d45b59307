# `make demo` and `make test` need Python 3.11 or newer and make; they set up .venv by themselves, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT ?= demo-root

export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: demo ui test test-all lint format clean

demo: $(VENV)/installed  ## from URLs to a fine-tuned model in a drawn world: 6 minutes on 2 cores
	$(BIN)/python -m demo --root $(ROOT)

ui: $(VENV)/installed  ## the flow UI over what `make demo` did
	$(BIN)/python -m demo ui --root $(ROOT)

test: $(VENV)/installed lint  ## 10 minutes at most on 2 cores
	$(BIN)/python -m pytest

test-all: $(VENV)/installed lint  ## with the slow ones: 45 minutes at most
	$(BIN)/python -m pytest -m ""

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## what the demo made; the virtual environment stays
	rm -rf $(ROOT)

# Installed once; again when what is to be installed changes.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
