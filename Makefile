# The developer interface. Needs Python >= 3.11 and make; everything else goes into .venv.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
# What `make gpu` runs; GPU_PYTHON=python3 takes a machine's own torch, with nothing installed.
GPU_PYTHON ?= $(BIN)/python

.DELETE_ON_ERROR:
.PHONY: help install lint test slow demo docs bench gpu clean

help:
	@echo "make install   .venv with the pinned versions and the tightfit command"
	@echo "make lint      ruff and strict typing"
	@echo "make test      the suite on the CPU, but for tests that take long"
	@echo "make slow      the tests that take long"
	@echo "make demo      train a small GPT on the Python standard library's source"
	@echo "make docs      write the generated pages of docs/ again, and the site in build/site"
	@echo "make bench     the benchmarks, recorded in results/"
	@echo "make gpu       the GPU tests, the quickstart and the benchmarks recorded, on a CUDA device"
	@echo "make clean     remove .venv and the caches"

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d, and tightfit needs 3.11 or later; run: make $(MAKECMDGOALS) PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv .venv
	@echo "installing the pinned versions into .venv: a few minutes, mostly torch"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

# Modules that are compiled once serve every worker, and the processes that tests start. malloc keeps freed memory, so
# that the system need not clear its pages anew.
MALLOC := MALLOC_MMAP_THRESHOLD_=67108864 MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_TOP_PAD_=16777216
test: install
	$(MALLOC) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# Runs of several processes are timed, so nothing runs beside them.
SLOW := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "(cold or full_size) and not gpu"
slow: install
	$(SLOW) tests/training
	$(SLOW) --numprocesses $(WORKERS) --dist worksteal --ignore=tests/training tests

demo: install
	$(BIN)/tightfit train quickstart

docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/build_site.py

# All but what has no command of its own, and what only a GPU tells: benchmarks/gpu.sh runs that.
GPU_ONLY := allocator_snapshots beyond_gpu context_bytes frontier gpu_ops gpu_tests plan_vs_gpu
bench: install
	for file in $$(grep -l __main__ $(filter-out $(GPU_ONLY:%=benchmarks/%.py),$(wildcard benchmarks/*.py))); do \
	  $(BIN)/python "$$file" || exit 1; done

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),install)
	@$(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch %s sees no CUDA device here" % torch.__version__)'
	PYTHONPATH=src PYTHON=$(GPU_PYTHON) benchmarks/gpu.sh

clean:
	rm -rf .cache .venv .mypy_cache .pytest_cache .ruff_cache
