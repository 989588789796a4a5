# Everything a contributor does. Each command makes .venv and installs what it needs.

PYTHON ?= python3
MINUTES ?= 10
BIN = .venv/bin

.PHONY: demo demo-parallel test soak lint docs bench bench-full wheel clean

demo: .venv/installed-examples
	$(BIN)/python examples/train_digits.py

demo-parallel: .venv/installed-parallel
	@echo "starting two processes of MPICH, which is in .venv ..."
	$(BIN)/mpiexec -n 2 $(BIN)/python -m mpi4py examples/train_digits_parallel.py

test: .venv/installed-dev lint
	$(BIN)/python -m pytest
	@echo "executing the CUDA kernels on the CPU, with $(CXX) and its sanitizers ..."
	@ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(foreach library,asan ubsan,$(shell $(CXX) -print-file-name=lib$(library).so))" \
		$(BIN)/python -m pytest -n auto --dist loadfile --backend cuda-on-cpu

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: .venv/installed-dev
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

docs: .venv/installed-docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs
	@echo "built: build/docs/index.html"

bench: .venv/installed-dev
	$(BIN)/python benchmarks/run.py

bench-full: .venv/installed-dev
	$(BIN)/python benchmarks/run.py --full

wheel: .venv/installed-dev
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist *.egg-info

# One stamp file for each set of extras; CUNORM_EXTRAS adds to them (cuda12, say). The tests
# want CuPy even where there is no GPU.
EXTRAS = $(CUNORM_EXTRAS)
.venv/installed-dev: EXTRAS = $(or $(CUNORM_EXTRAS),cupy)

.venv/installed-%: pyproject.toml
	@echo "installing cunorm[$*] and what it needs into .venv ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*$(if $(EXTRAS),$(comma)$(EXTRAS))]"
	@touch $@

comma := ,
