# Everything a contributor does. Each command makes .venv and installs what it needs.

PYTHON ?= python3
MINUTES ?= 10
BIN = .venv/bin

.PHONY: demo demo-parallel test test-compilers test-package soak lint docs bench bench-full wheel clean

demo: .venv/installed-examples
	$(BIN)/python examples/train_digits.py

demo-parallel: .venv/installed-parallel
	@echo "starting two processes of MPICH, which is in .venv ..."
	$(BIN)/mpiexec -n 2 $(BIN)/python -m mpi4py examples/train_digits_parallel.py

test: .venv/installed-dev lint
	$(BIN)/python -m pytest -n auto --dist worksteal
	@echo "executing the CUDA kernels on the CPU, with $(CXX) and its sanitizers ..."
	@ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(foreach library,asan ubsan,$(shell $(CXX) -print-file-name=lib$(library).so))" \
		$(BIN)/python -m pytest -n auto --dist worksteal --backend cuda-on-cpu

# All that is compiled of the CUDA kernels, for every architecture; `make test` takes a part of it.
test-compilers: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist worksteal --thorough tests/test_cuda_compile.py

# As users have it: the sdist and the wheel made from it, each in an environment of its own, with
# the newest and with the oldest versions of what it needs, tested away from the sources; and
# whether what the extras ask for can be had. (PYTHONSAFEPATH: no module of the current folder.)
test-package: wheel
	rm -rf build/newest build/oldest
	$(PYTHON) -m venv build/newest
	build/newest/bin/python -m pip install --quiet --disable-pip-version-check dist/*.tar.gz $(RUNNER)
	PYTHONSAFEPATH=1 build/newest/bin/pytest $(PACKAGE_TESTS)
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/oldest.txt dist/*.whl $(RUNNER)
	PYTHONSAFEPATH=1 build/oldest/bin/pytest -n auto --dist worksteal $(PACKAGE_TESTS) $(CPU_TESTS)
	for extras in cuda12,cudnn12 cuda13,cudnn13,mpi; do \
		build/newest/bin/python -m pip install --quiet --disable-pip-version-check --dry-run "$$(ls dist/*.whl)[$$extras]" || exit; \
	done

RUNNER = hypothesis pytest pytest-timeout pytest-xdist
PACKAGE_TESTS = $(addprefix tests/test_,kernel_cache.py package.py)
# With the oldest versions what runs all kernels (but `squares_rows`), not in all shapes.
CPU_TESTS = $(addprefix tests/test_,batch_norm.py concurrency.py conv_batch_norm.py double_backward.py elements.py entry.py \
	errors.py fold_batch_norm.py gradients.py group_norm.py kept_memory.py layers.py memory.py numerics.py plan.py \
	running_statistics.py scale_shift.py streaming.py sums.py usual.py)

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
	rm -rf dist
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
