# Each target does all the set-up it needs. `make venv` alone makes .venv and installs.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
NX := $(VENV)/bin/nxbucket
EXAMPLE := examples/tiny-llama/model.yaml
# Where PyTorch's CPU wheels are, on a machine that does not have them already.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/.installed

.PHONY: venv demo test check lint types bench clean

venv: $(STAMP)

$(STAMP): pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) VENV=$(VENV) TORCH_INDEX=$(TORCH_INDEX) bash scripts/install.sh
	touch $@

demo: $(STAMP)
	$(PY) scripts/demo.py $(EXAMPLE)

test: $(STAMP)
	$(PY) -m pytest

check: lint test

lint: $(STAMP) types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The editable install's import hook is invisible to type checkers: give them a tree to read.
types:
	mkdir -p build/typed/nxbucket
	for p in toolkit compile serve bucket_profiles; do ln -sfn ../../../$$p build/typed/nxbucket/$$p; done

bench: $(STAMP)
	$(PY) benchmarks/vs_vllm.py

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache
