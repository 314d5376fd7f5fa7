# make demo: the main job.  make test: the tests.  Both set up all they need in a virtual environment of their own.
# PYTHON: the interpreter.  JAX: what pip is asked for.  VENV: where it goes.  PYTEST: options for pytest.
PYTHON ?= python3
JAX ?= jax
VENV ?= .venv
PYTEST ?=

BIN := $(VENV)/bin
SOURCES := $(shell find metal_src -type f)

.PHONY: demo test slow bench info clean

demo: $(VENV)/ready
	$(BIN)/python examples/train_lm.py --output out/train_lm.png

test: $(VENV)/ready
	JAX_FUSEDNORM_REQUIRE_KERNELS=1 $(BIN)/python -m pytest -q -n 2 $(PYTEST)

slow: $(VENV)/ready
	JAX_FUSEDNORM_REQUIRE_KERNELS=1 $(BIN)/python -m pytest -q -n 2 --slow $(PYTEST)

bench: $(VENV)/ready
	$(BIN)/pip install -q -e '.[benchmarks]'
	$(BIN)/python benchmarks/run.py

info: $(VENV)/ready
	$(BIN)/python -m jax_fusednorm info

# An editable install: the Python sources are used where they are, the native library is built again when its sources change.
$(VENV)/ready: pyproject.toml jax_fusednorm/__init__.py jax_fusednorm/core/ffi.py $(SOURCES)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[test,examples]' '$(JAX)'
	$(BIN)/python -m jax_fusednorm info
	touch $@

clean:
	rm -rf .venv* build out
