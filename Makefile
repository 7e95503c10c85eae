# make test     lint, types and all CPU tests, in a .venv built on first use
# make test-gpu the tests marked gpu, with whatever Python has torch here
# make test-integrations the tests of training frameworks, in a .venv-integrations built on first use
# make test-torch VERSION=2.9.1   the library's tests (all but the lab's) on that torch, in a .venv-torch-2.9.1
# make soak     MINUTES=30 of random kills, damages and resumes of tiny runs; not part of make test
# make dist     build the wheel and the sdist, check them, and run the quickstart from the wheel in a new environment
# make docs     this documentation as a site in docs/_build/html, in a .venv-docs built on first use
# make docs-links the same, and then tries every link to another site; only reports if there is no network
# make demo     a few minutes of pre-training on CPU, four optimizers side by side

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# One BLAS thread a worker: more oversubscribes the cores, and forked gloo ranks are safe with one only.
JOBS   ?= 2
ENV    := OMP_NUM_THREADS=1
# Byte code is kept even where the environment says otherwise: tests start many processes, and each would spend more than
# half of its start on compiling torch's sources again.
export PYTHONDONTWRITEBYTECODE :=
# A machine with a GPU usually has its own CUDA build of torch: prefer .venv, else that Python.
GPU_PY ?= $(if $(wildcard $(STAMP)),$(PY),$(PYTHON))

# The oldest torch that pyproject.toml allows.
VERSION ?= 2.9.1
TORCH_PY = .venv-torch-$(VERSION)/bin/python

.PHONY: test lint types pytest test-gpu test-torch test-integrations soak dist demo docs docs-links clean
test: lint types pytest

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --no-compile -c constraints.txt torch
	$(PY) -m pip install -q --no-compile -c constraints.txt -e '.[lab,data,test]'
	$(PY) -m pip install -q --no-compile -c constraints.txt --no-deps timm  # it asks for torchvision, a CUDA build
	touch $@

lint: $(STAMP)
	$(PY) -m ruff check .

types: $(STAMP)
	$(PY) -m mypy

# Tests of frameworks run separately: they start threads, and a forked rank may hang on a lock that such a thread held.
RUN_TESTS = $(ENV) $(PY) -m pytest -m "not gpu" -n $(JOBS) --dist worksteal --timeout 300 --durations 15 $(ARGS)
pytest: $(STAMP)
	$(RUN_TESTS) --ignore tests/integrations
	$(RUN_TESTS) tests/integrations

test-gpu:
	PYTHONPATH=src $(GPU_PY) -m pytest -m gpu $(ARGS)

# Torch brings the Triton that fits it; a CPU build brings none, and then the newest is installed. If pip knows an index
# of CPU builds (PIP_EXTRA_INDEX_URL), it prefers those, which are far smaller.
.venv-torch-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	(echo torch==$*; grep -vE '^(torch|triton)==' constraints.txt) > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -q --no-compile -c $(@D)/constraints.txt torch
	$(@D)/bin/python -m pip install -q --no-compile -c $(@D)/constraints.txt -e '.[test]'
	touch $@

test-torch: .venv-torch-$(VERSION)/.installed
	$(ENV) $(TORCH_PY) -m pytest -m "not gpu" -n $(JOBS) --dist worksteal --timeout 300 tests src/cosmos_optim --ignore tests/lab $(ARGS)
	@$(TORCH_PY) -c 'import torch, triton; print("passed with torch", torch.__version__, "and Triton", triton.__version__)'

MINUTES ?= 30
soak: $(STAMP)
	$(ENV) PYTHONPATH=src:. $(PY) -m tests.soak.soak --minutes $(MINUTES) $(ARGS)

# Frameworks are many and large, and some exclude each other's versions, so they have their own environment.
INT_VENV  := .venv-integrations
INT_PY    := $(INT_VENV)/bin/python
INT_STAMP := $(INT_VENV)/.installed
INT_PIP   := $(INT_PY) -m pip install -q --no-compile -c constraints-integrations.txt
# Installed with their dependencies; the second line has what those below need.
INT_WHOLE := pytest pytest-timeout hypothesis 'numpy<2.4' transformers accelerate peft trl lightning 'jsonargparse[signatures]' \
	schedulefree ema-pytorch omegaconf sentencepiece tiktoken blobfile tyro tensorboard torchdata spmd_types einops
# Installed without: timm asks for torchvision, a CUDA build; litgpt and torchtitan for older versions of the others.
INT_ALONE := timm litgpt torchtune torchao torchtitan torch_checkpointing triton megatron-core

$(INT_STAMP): pyproject.toml constraints-integrations.txt
	$(PYTHON) -m venv $(INT_VENV)
	$(INT_PIP) torch setuptools wheel
	$(INT_PIP) -e . $(INT_WHOLE)
	DS_BUILD_OPS=0 $(INT_PIP) deepspeed
	$(INT_PIP) --no-deps $(INT_ALONE)
	touch $@

test-integrations: $(INT_STAMP)
	$(ENV) $(INT_PY) -m pytest tests/integrations --timeout 300 --durations 15 $(ARGS)

DOCS_PY    := .venv-docs/bin/python
DOCS_STAMP := .venv-docs/.installed
DOCS_BUILD  = $(DOCS_PY) -m sphinx --fail-on-warning --keep-going --quiet docs

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(DOCS_PY) -m pip install -q --no-compile -c constraints.txt torch
	$(DOCS_PY) -m pip install -q --no-compile -c constraints.txt -e '.[docs]'
	touch $@

# A link or an anchor inside the site that does not resolve is a warning, and so an error.
docs: $(DOCS_STAMP)
	$(DOCS_BUILD) docs/_build/html -b html
	@echo open docs/_build/html/index.html

docs-links: docs
	-$(DOCS_BUILD) docs/_build/links -b linkcheck

# The demo needs no test tools: it takes .venv if that is there, and else makes a smaller environment.
DEMO_VENV := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
.venv-demo/.installed: pyproject.toml constraints.txt
	@echo "First installs torch and the lab's packages into .venv-demo, once: about 1 GB with a CPU build of torch (a CUDA"
	@echo "build is several GB) and some minutes. Then trains four optimizers, which takes about 3 minutes on two cores."
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --no-compile --progress-bar on -c constraints.txt torch
	$(@D)/bin/python -m pip install --no-compile -q -c constraints.txt -e '.[lab]'
	touch $@

# glibc would hand every large tensor back to the kernel and ask for it again: about a tenth of the time of a small model.
demo: $(if $(wildcard $(STAMP)),,.venv-demo/.installed)
	MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=4294967296 $(DEMO_VENV)/bin/cosmos-lab demo $(ARGS)

# In environments of their own, so that nothing installed here can hide what the wheel lacks.
DIST_VENV := build/dist-tools
WHEEL_VENV := build/dist-wheel
dist:
	rm -rf dist $(DIST_VENV) $(WHEEL_VENV)
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install -q build twine
	$(DIST_VENV)/bin/python -m build -o dist .
	$(DIST_VENV)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install -q --no-compile -c constraints.txt torch
	$(WHEEL_VENV)/bin/python -m pip install -q --no-compile -c constraints.txt dist/*.whl
	cd build && dist-wheel/bin/python ../examples/quickstart.py

clean:
	rm -rf $(VENV) $(INT_VENV) .venv-demo .venv-docs .venv-torch-* build dist docs/_build .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis
