# Two commands do everything on a fresh machine: `make check` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Bytecode is kept in the tree: without it each process of the suite compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check test slow nightly deepspeed megatron torchtitan lint types bench clean

# The main job, what takes seconds first. Processor time on one core: fixtures, faults and failures
# two seconds together, ranks 40 seconds; random schedules, exploration and proofs take the rest of
# about six minutes.
check: $(VENV)/.verify
	$(BIN)/qeffect check --fixtures
	$(BIN)/qeffect faults
	$(BIN)/qeffect failures
	$(BIN)/qeffect ranks
	$(BIN)/qeffect check --random 2000 --seed 0
	$(BIN)/qeffect explore
	$(BIN)/qeffect prove

# The test suite on the CPU, but for what takes minutes. HYPOTHESIS_PROFILE=ci runs more examples and
# more rows of each matrix; the default is dev. Workers take neighbouring tests and steal what is
# left at the end, so that a module's costly fixture is made once or twice, not everywhere. Tests
# wait for processes for a third of their time: three workers for two cores.
WORKERS := $(shell $(PYTHON) -c 'import os; print(max(2, (os.cpu_count() or 1) * 3 // 2))')
test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# `make slow RECORD=tests/records/NAME.json` keeps a dated record, likewise `make nightly`. With
# RESUME=1 it resumes the run of that record, if a time limit cut that run off.
RECORDED = $(if $(RECORD),--record $(RECORD)) $(if $(RESUME),--resume)

# What takes minutes: every proof, every mutant, every deleted guard, prove from the wheel.
slow: $(VENV)/.test
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -m slow -n auto --dist loadgroup $(RECORDED)

# What takes longest: the rest of every matrix. `test` has rows that hold each part of it.
nightly: $(VENV)/.test
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m nightly -n auto $(RECORDED)

# The guard of DeepSpeed's engine over the real package, on CPUs. The package is in a folder of its
# own, so that the ordinary suite stays without it.
deepspeed: $(VENV)/.deepspeed
	PYTHONPATH=$(CURDIR)/$(VENV)/deepspeed DS_ACCELERATOR=cpu $(BIN)/python -m pytest -m deepspeed tests/deepspeed $(RECORDED)

$(VENV)/.deepspeed: $(VENV)/.test tests/deepspeed/requirements.txt
	rm -rf $(VENV)/deepspeed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-deps --no-build-isolation \
	  --target $(VENV)/deepspeed -r tests/deepspeed/requirements.txt
	touch $@

# The guard of Megatron-core's loops over the real package, on CPUs: each release has a folder of its
# own. The wheels are those of Python 3.12; their code runs on 3.11 too.
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

# The guard of TorchTitan's pipeline over the real trainer, and that of torch's pipeline over the
# torch that TorchTitan needs, on CPUs. Both are in an environment of their own: 6 GB on disk.
TITAN := $(VENV)/torchtitan
torchtitan: $(VENV)/.torchtitan
	$(TITAN)/bin/python -m pytest -m torchtitan tests/torchtitan $(RECORDED)
	$(TITAN)/bin/python -m pytest tests/ranks/test_guard_evidence.py tests/ranks/test_guard_legal.py \
	  tests/ranks/test_guard_manners.py tests/ranks/test_guard_replicas.py tests/torchtitan/test_guard.py

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
