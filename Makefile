# Everything runs in .venv, which is made on first use. It needs Python 3.11 or newer, with pip.
PYTHON ?= python3
BIN := .venv/bin
# One more than the cores of a small machine where tests wait for processes.
JOBS ?= 3
FAST_JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --dist worksteal
export PIP_CONSTRAINT := constraints.txt
# Images often set this. The tests start many interpreters, and each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo picture docs test test-frameworks test-slurm test-fast fuzz newest lint format wheel sanitize browser bench netlab autopilot bucket scale chaos nightly parity parity-quick clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/ready  ## two replicas train a small model on this machine
	$(BIN)/diloco train demo

picture: .venv/ready  ## the pictures of docs/, of a demo that is run for them; needs Chromium (make browser)
	$(BIN)/python -m docs.pictures

test: .venv/ready  ## all tests, in random order
	$(PYTEST) -n $(JOBS)

test-frameworks: .venv/ready  ## docs/frameworks.md with the real frameworks, in an environment of their own
	.ci/frameworks

test-slurm: .venv/ready  ## a real Slurm with two nodes on this machine, installed from the distribution; as root
	.ci/slurm

test-fast: .venv/ready  ## tests that start no process: half a minute
	$(PYTEST) -n $(FAST_JOBS) -m 'not slow'

fuzz: .venv/ready  ## 30,000 damaged objects and 20,000 names for members of a bucket to read; ten minutes
	FUZZ=100 $(BIN)/python -m pytest --timeout 0 tests/bucket/test_fuzz.py

nightly: .venv/ready  ## the bucket's guarantees in 2,000 runs of 80 actions, twice: with whole deltas and with shares; an hour
	EXAMPLES=2000 STEPS=80 $(PYTEST) --timeout 0 -n 2 tests/bucket/test_protocol.py

newest: .venv/ready  ## replace torch and numpy in .venv by their newest versions, for `make test`; `make clean` undoes it
	PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade torch numpy

lint: .venv/ready  ## formatting, lint, types, directions of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: .venv/ready  ## repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/ready  ## the site into build/site, to be opened from disk; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --quiet

wheel: .venv/ready  ## sdist, pure wheel and manylinux wheel into dist/; each wheel is tried in a clean environment
	.ci/wheel build
	.ci/wheel try

sanitize: .venv/ready  ## the kernels' tests, with a library that checks every access to memory
	mkdir -p build
	cc -O1 -g -std=c11 -fPIC -shared -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover \
	   -o build/sanitized.so diloco/codecs/kernels.c
	LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 DILOCO_KERNELS=$$PWD/build/sanitized.so \
	   $(BIN)/python -m pytest tests/core/test_kernels.py -k 'not replica and not arm'

browser:  ## install Chromium, which the tests of the report, the dashboard and the site need (Debian, Ubuntu; as root or with sudo)
	.ci/browser

bench: .venv/ready  ## measured figures: benchmarks/results/*.json and the tables in docs/benchmarks.md
	$(BIN)/python -m benchmarks.codec
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.reduce
	$(BIN)/python -m benchmarks.accelerator
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.table

netlab: .venv/ready  ## utilization over a slow link, all methods; as root; keeps both cores busy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[netlab]'
	$(BIN)/python -m studies.netlab --fresh
	$(BIN)/python -m benchmarks.table

autopilot: .venv/ready  ## the autopilot beside the best fixed settings on shaped links; as root; ten minutes
	$(BIN)/python -m studies.autopilot
	$(BIN)/python -m benchmarks.table

bucket: .venv/ready  ## what the bucket costs and survives, beside torchft; as root
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[netlab]'
	$(BIN)/python -m studies.bucket
	$(BIN)/python -m benchmarks.table

scale: .venv/ready  ## what a round of a bucket costs as members are many, in virtual time
	$(BIN)/python -m studies.bucket.scale

chaos: .venv/ready  ## members of a bucket and what they meet in are disturbed a thousand times; as root for full disks; 25 minutes
	$(BIN)/python -m studies.bucket.chaos
	$(BIN)/python -m benchmarks.table

direct: .venv/ready  ## payloads of a bucket straight from their owner, over slow links and harmed 300 times; as root; 15 minutes
	$(BIN)/python -m studies.bucket.direct

parity: .venv/ready  ## does it train as well as data-parallel? takes hours; continues after an interruption
	$(BIN)/python -m studies.parity
	$(BIN)/python -m studies.parity.page

parity-quick: .venv/ready  ## the same for a few rows, Muon among them, on two seeds with fewer steps
	$(BIN)/python -m studies.parity --quick

.venv/ready: pyproject.toml constraints.txt hatch_build.py diloco/codecs/kernels.c
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:  ## remove the environment and what was built
	rm -rf .venv build dist *.egg-info
