# `make check` and `make test` also make the environment, so they run on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Keep bytecode in the tree; otherwise each process of the suite compiles the modules it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check test slow nightly deepspeed megatron torchtitan lint types bench clean

# The main checks, the fast ones first. Processor time on one core, about six minutes in all: fixtures,
# faults and failures take two seconds together, ranks 40 seconds, and random schedules, exploration
# and proofs the rest.
check: $(VENV)/.verify
	$(BIN)/qeffect check --fixtures
	$(BIN)/qeffect faults
	$(BIN)/qeffect failures
	$(BIN)/qeffect ranks
	$(BIN)/qeffect check --random 2000 --seed 0
	$(BIN)/qeffect explore
	$(BIN)/qeffect prove

# The test suite on the CPU, without the tests that take minutes. HYPOTHESIS_PROFILE=ci runs more
# examples and more rows of each test matrix than the default, dev. Each worker gets neighbouring tests,
# and an idle worker takes over tests of others, so a module's costly fixture is made by one or two
# workers, not by all. Tests wait for processes a third of their time, so two cores get three workers.
WORKERS := $(shell $(PYTHON) -c 'import os; print(max(2, (os.cpu_count() or 1) * 3 // 2))')
test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# `make slow RECORD=tests/records/NAME.json` writes a dated record of the run; likewise `make nightly`.
# With RESUME=1 it resumes the run of that record, if a time limit cut that run off.
RECORDED = $(if $(RECORD),--record=$(RECORD)) $(if $(RESUME),--resume)

# Tests that take minutes each: every proof, mutant and deleted guard, and the proofs from the wheel.
slow: $(VENV)/.test
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -m slow -n auto --dist loadgroup $(RECORDED)

# The longest tests: the remaining rows of every test matrix. `make test` runs some rows for each part.
nightly: $(VENV)/.test
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m nightly -n auto $(RECORDED)

# Tests of the guard for DeepSpeed's engine with the real package, on CPUs. The package has a folder of
# its own, so that the ordinary suite does not find it.
deepspeed: $(VENV)/.deepspeed
	PYTHONPATH=$(CURDIR)/$(VENV)/deepspeed DS_ACCELERATOR=cpu $(BIN)/python -m pytest -m deepspeed tests/deepspeed $(RECORDED)

$(VENV)/.deepspeed: $(VENV)/.test tests/deepspeed/requirements.txt
	rm -rf $(VENV)/deepspeed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-deps --no-build-isolation \
	  --target $(VENV)/deepspeed -r tests/deepspeed/requirements.txt
	touch $@

# Tests of the guard for Megatron-core's loops with the real package, on CPUs. Each release has a folder
# of its own. The wheels are built for Python 3.12; their code also runs on 3.11.
megatron: $(VENV)/.megatron
	MEGATRON_RELEASES=$(CURDIR)/$(VENV)/megatron $(BIN)/python -m pytest -m megatron tests/megatron $(RECORDED)

$(VENV)/.megatron: $(VENV)/.test tests/megatron/requirements.txt
	rm -rf $(VENV)/megatron
	for package in $$(grep '^megatron-core' tests/megatron/requirements.txt); do \
	  $(BIN)/python -m pip install -q --no-deps --only-binary=:all: \
	    --python-version 3.12 --ignore-requires-python \
	    --target $(VENV)/megatron/$${package##*==} $$package \
	    $$(grep -v '^#\|^megatron-core' tests/megatron/requirements.txt) || exit 1; \
	done
	touch $@

# Tests of the guard for TorchTitan's pipeline with the real trainer, and of the guard for torch's
# pipeline with the torch that TorchTitan needs, on CPUs. They have an environment of their own: 6 GB on
# disk.
TITAN := $(VENV)/torchtitan
torchtitan: $(VENV)/.torchtitan
	$(TITAN)/bin/python -m pytest -m torchtitan tests/torchtitan $(RECORDED)
	$(TITAN)/bin/python -m pytest tests/ranks/test_guard*.py tests/torchtitan/test_guard.py

$(VENV)/.torchtitan: tests/torchtitan/requirements.txt
	rm -rf $(TITAN)
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install -q -r tests/torchtitan/requirements.txt
	touch $@

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

bench: $(VENV)/.verify
	$(BIN)/qeffect bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.verify: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[verify]'
	touch $@

$(VENV)/.test: $(VENV)/.verify
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[verify,cvc5,train,export,tensorboard,torchao,plots,test,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
