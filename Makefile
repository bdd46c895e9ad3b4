# Everything runs in .venv, which is made on first use from Python 3.11+ and pip alone.
PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := constraints.txt

.PHONY: demo test lint bench netlab bucket chaos parity parity-quick clean

demo: .venv/ready  ## two replicas train a small model on this machine, two to three minutes
	$(BIN)/diloco train recipes/demo.toml

test: .venv/ready
	$(BIN)/python -m pytest -m alone
	$(BIN)/python -m pytest -m 'not alone' -n 2 --dist worksteal

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/ready  ## measured figures: benchmarks/results/*.json and the tables in docs/benchmarks.md
	$(BIN)/python -m benchmarks.codec
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.reduce
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.table

netlab: .venv/ready  ## utilisation over a slow link, all methods; as root, about an hour of both cores
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[netlab]'
	$(BIN)/python -m studies.netlab --fresh
	$(BIN)/python -m benchmarks.table

bucket: .venv/ready  ## what the bucket costs and survives, beside torchft; as root, about 15 minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[netlab]'
	$(BIN)/python -m studies.bucket
	$(BIN)/python -m benchmarks.table

chaos: .venv/ready  ## members of a bucket are killed, stopped and restarted; at most 20 minutes
	$(BIN)/python -m studies.bucket.chaos
	$(BIN)/python -m benchmarks.table

parity: .venv/ready  ## does it train as well as data-parallel? hours of both cores; goes on where it was interrupted
	$(BIN)/python -m studies.parity
	$(BIN)/python -m studies.parity.page

parity-quick: .venv/ready  ## the same for four comparisons on two seeds, at most 10 minutes
	$(BIN)/python -m studies.parity --quick

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
