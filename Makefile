# Every target is one line over a command that works by hand. PYTHON chooses the interpreter.
PYTHON ?= python3
# Each process of a test would compile what it imports of PyTorch and of quantkit again.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/$(if $(findstring Windows,$(OS)),Scripts,bin)
INSTALLED := $(VENV)/.installed
FAST := project/test_architecture.py storage/test_files.py storage/test_inputfile.py numerics \
	recipe/test_recipe.py models calibration/test_rescaling.py sparsity/test_sparsity.py \
	checkpoint/test_layout.py checkpoint/test_spec.py checkpoint/test_validate.py \
	checkpoint/test_malformed.py eval/test_verdict.py eval/test_statistics.py
# Of the oldest versions that pyproject.toml allows: their Python, their environment, and what runs there.
OLDEST_PYTHON ?= python3.10
OLDEST := .venv-oldest
OLD := $(filter-out project/%,$(FAST)) pipelines $(patsubst %,inference/test_%.py,adapters attention \
	attention_companions behaving companions dtypes inference loading operators projections saving \
	text_encoders unet_processors)
KERNELS := $(wildcard $(foreach end,hip h cpp,kernels/*.$(end) kernels/*/*.$(end)))
# A process a core and a thread each: threads of several processes get in each other's way. What the
# tests of a file share is made once.
RUN := -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder -p no:cacheprovider
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(RUN)

# Of `make mutants`: how many of each group (0: all), of which seed, and which groups.
SAMPLE ?= 200
SEED ?= 1
GROUPS ?=

.PHONY: help demo test test-all slow fast nightly oldest sanitize fuzz mutants golden check format docs dist objects clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(INSTALLED) ## the whole job on the bundled pipeline; opens as demo-output/index.html
	$(BIN)/quantkit demo -o demo-output

test: $(INSTALLED) ## all tests but slow and exhaustive ones
	$(PYTEST) -m "not slow and not exhaustive" tests

test-all: $(INSTALLED) ## all tests
	$(PYTEST) tests

slow: $(INSTALLED) ## tests of whole ways and of more than five seconds, which make test leaves out
	$(PYTEST) -m "slow and not gpu and not exhaustive" tests

fast: $(INSTALLED) ## tests of the numbers, files and rules: 90 seconds
	$(PYTEST) -m "not slow and not gpu and not exhaustive" $(FAST:%=tests/%)

nightly: $(INSTALLED) ## property tests on values drawn anew; make prints the seed
	$(PYTEST) -m hypothesis --hypothesis-profile drawn --hypothesis-seed $(shell date +%Y%m%d%H%M) tests

oldest: $(INSTALLED) ## tests of numbers, files, pipelines, loading and torch.compile on the oldest versions allowed
	$(BIN)/uv venv --quiet --clear --python $(OLDEST_PYTHON) $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST) --resolution lowest-direct --editable '.[dev]'
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(RUN) -m "not slow and not gpu and not exhaustive" $(OLD:%=tests/%)

sanitize: $(INSTALLED) ## host kernels under AddressSanitizer and UBSan
	$(BIN)/python -m tests.device.sanitize

fuzz: $(INSTALLED) ## 20,000 damaged files
	$(BIN)/python -m tests.fuzz --cases 20000 --seed 1000

mutants: $(INSTALLED) ## which small changes do the tests notice?
	$(BIN)/python -m tests.mutation $(GROUPS) --sample $(SAMPLE) --seed $(SEED)

golden: $(INSTALLED) ## is all that is written and compiled as the tables in tests/golden have it?
	$(BIN)/python -m tests.golden artefacts --check
	$(BIN)/python -m tests.golden kernels --check

check: $(INSTALLED) ## linter, formatters, types, spelling
	# Windows reads text in an encoding of its own.
	$(BIN)/ruff check --quiet --preview --select PLW1514 .
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(KERNELS)

format: $(INSTALLED) ## format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(KERNELS)

docs: $(INSTALLED) ## build the pages strictly; opens as build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

dist: $(INSTALLED) ## what a release uploads: sdist and wheel, built twice and equal to the byte
	.ci/dist dist $(OBJECTS)

# Those of the wheel quantkit-kernels: `make objects`, then `make dist OBJECTS=build/objects`.
OBJECTS ?=
objects: $(patsubst %,build/objects/%,gfx12-generic gfx11-generic gfx10-3-generic) ## kernels for all Radeons; clang-22 takes minutes

build/objects/%: $(INSTALLED)
	$(BIN)/quantkit kernels build --target $* -o $@

clean: ## remove what was built and installed
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info demo-output

# An index of PyTorch's wheels for ROCm, or for CPUs alone: `make demo TORCH=...`. What is installed stays.
TORCH ?=
INSTALL := $(BIN)/uv pip install --quiet --python $(VENV)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	test -z '$(TORCH)' || $(INSTALL) torch torchvision --index-url '$(TORCH)'
	$(INSTALL) --editable '.[dev,docs]'
	touch $@
