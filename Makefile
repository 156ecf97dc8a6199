# Every target is one line over a command that works by hand. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Of `make mutants`: how many of each group (0: all), of which seed, and which groups.
SAMPLE ?= 200
SEED ?= 1
GROUPS ?=

.PHONY: demo test sanitize fuzz mutants check format clean

demo: $(INSTALLED)
	$(BIN)/quantkit demo -o demo-output

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -p no:cacheprovider tests

sanitize: $(INSTALLED)
	$(BIN)/python tests/sanitize.py

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --cases 20000 --seed 1000

mutants: $(INSTALLED)
	$(BIN)/python tests/mutation $(GROUPS) --sample $(SAMPLE) --seed $(SEED)

check: $(INSTALLED)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/codespell

format: $(INSTALLED)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
