# make demo   train through failures on this machine, in .venv
# make test   install what the tests need (apt, pip) and run them all
# make test-torchtitan   TorchTitan as an engine, in an environment of its own
# make native build the native modules for this machine's GPU platform, in .venv
# make lint   formatting, lint, types, import direction
# make bench  recovery times

PYTHON ?= python3
VENV ?= .venv
TITAN := $(VENV)-torchtitan
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test test-here test-slurm test-rdma test-quick test-torchtitan native lint format bench clean

demo: $(VENV)/.train
	$(BIN)/monarch-slurm train --local --replicas 4 --model tiny --tokens 900000 --fail-every 6 --step-deadline 3

test: $(VENV)/.dev
	bash tests/install_packages.sh
	bash tests/native/vendor_headers.sh $(BIN)/python $(VENV)/vendor
	$(MAKE) lint
	$(MAKE) --jobs=2 --keep-going --output-sync=target test-slurm test-here

# Two lanes: there is one cluster. Tests mostly wait, hence several workers; the tests of a file stay together.
test-slurm:
	bash tests/lane.sh $(BIN)/python -m pytest -m "slurm and not slow" tests
	bash tests/lane.sh $(BIN)/python -m pytest -m "slurm and slow" tests

test-here:
	bash tests/lane.sh $(BIN)/python -m pytest --numprocesses 3 --dist loadfile -m "not slow and not slurm" tests
	bash tests/lane.sh $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "slow and not slurm" tests

# Only the transfers over soft-RoCE devices, in QEMU guests.
test-rdma: $(VENV)/.dev
	bash tests/rdma_vm.sh install
	$(BIN)/python -m pytest -m rdma tests/rdma

# TorchTitan as an engine, on CPUs, in an environment of its own (2 GB; Python >= 3.11).
test-torchtitan: $(TITAN)/.ready
	MONARCH_SLURM_TEST_TORCHTITAN=1 $(TITAN)/bin/python -m pytest tests/train/test_titan*.py

test-quick: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile -m "not slow and not slurm and not train" tests

# Needs a C++ compiler; PLATFORM=rocm, cuda or none where another is meant than the one found.
native: $(VENV)/.train
	$(BIN)/monarch-slurm build-native $(if $(PLATFORM),--platform $(PLATFORM))

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	git ls-files 'native/*.cpp' 'native/*.h' | xargs --no-run-if-empty $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files 'native/*.cpp' 'native/*.h' | xargs --no-run-if-empty $(BIN)/clang-format -i

bench: $(VENV)/.train
	$(BIN)/python bench/recovery.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is older than 3.10; say make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

# The versions of constraints.txt.
$(VENV)/.train: setup.cfg constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable ".[train]"
	@touch $@

$(VENV)/.dev: setup.cfg constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable ".[train,dev]"
	@touch $@ $(VENV)/.train

$(TITAN)/.ready: setup.cfg constraints.txt
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[torchtitan]" hypothesis pytest triton
	@touch $@

clean:
	rm -rf $(VENV) $(TITAN) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
