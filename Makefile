# make demo: the main job.  make test: the tests.  make models: the comparisons with Hugging Face's models, which need PyTorch; make mamba2 and
# make serve: one each, the latter timed.
# Each sets up all it needs in a virtual environment of its own.
# PYTHON: the interpreter.  JAX: what pip is asked for.  VENV: where it goes.  PYTEST: options for pytest.  OPTIMIZED: 1 for XLA's optimizations.
PYTHON ?= python3
JAX ?= jax
VENV ?= .venv
PYTEST ?=

BIN := $(VENV)/bin
SOURCES := $(shell find metal_src -type f)

.PHONY: demo models mamba2 serve test slow faults coverage bench info docs macos standin clean

demo: $(VENV)/examples-ready
	$(BIN)/python examples/train_lm.py --output out/train_lm.png

models: $(VENV)/models-ready
	for example in gemma nemotron_h serve_qwen3 mamba2 mla count; do echo "== $$example" && $(BIN)/python examples/$$example.py || exit 1; done

mamba2: $(VENV)/models-ready
	$(BIN)/python examples/mamba2.py

serve: $(VENV)/models-ready
	$(BIN)/python examples/serve_qwen3.py --time

# The kernels are tested wherever they can run: Metal's on Apple silicon, and on x86-64 Linux over a stand-in for its driver.
MACHINE := $(shell uname -sm)
IMPLEMENTATIONS = jnp,host
ifeq ($(MACHINE),Darwin arm64)
IMPLEMENTATIONS = jnp,host,metal
else ifeq ($(MACHINE),Linux x86_64)
IMPLEMENTATIONS = jnp,host,metal
DRIVER = JAX_FUSEDNORM_METAL_DRIVER=$(STANDIN)
WITH_METAL = --config-settings=cmake.define.JAX_FUSEDNORM_METAL=ON
test slow coverage: standin
endif
# A third of the tests' time would be XLA's optimizations, which the kernels have nothing of. OPTIMIZED=1 tests beside what users run.
OPTIMIZED ?= 0
RUN_TESTS = JAX_DISABLE_MOST_OPTIMIZATIONS=$(if $(filter 1,$(OPTIMIZED)),0,1) JAX_FUSEDNORM_REQUIRE_KERNELS=1 $(DRIVER) $(BIN)/python -m pytest -q -n 2 --implementations $(IMPLEMENTATIONS)

test: $(VENV)/test-ready
	$(RUN_TESTS) $(PYTEST)

slow: $(VENV)/test-ready
	$(RUN_TESTS) --slow $(PYTEST)

# The lines of the Metal launcher that no test runs.
coverage: $(VENV)/test-ready
	$(RUN_TESTS) -n 0 -s --slow tests/test_metal_coverage.py

# The faults of tests/faults, planted one by one, must be seen by the tests that each names. FAULTS: their names, or patterns of them.
# JOBS: how many at once, each in a copy of its own in build/faults.
FAULTS ?= *
JOBS ?= 1
faults: $(VENV)/test-ready
	FAULTS='$(FAULTS)' $(BIN)/python -m pytest -v -n $(if $(filter 1,$(JOBS)),0,$(JOBS)) --faults -k test_the_fault_is_caught tests/test_faults.py $(PYTEST)

bench: $(VENV)/benchmarks-ready
	$(BIN)/python benchmarks/run.py

info: $(VENV)/examples-ready
	$(BIN)/python -m jax_fusednorm info

# The site, in build/site.
docs:
	test -x $(VENV)-docs/bin/pip || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install -q --disable-pip-version-check mkdocs-material 'mkdocstrings[python]'
	$(VENV)-docs/bin/mkdocs build -q --strict

# The wheel for Apple silicon, built on any machine, in dist.
macos: $(VENV)/test-ready
	JAX_FUSEDNORM_MACOS=1 $(BIN)/pip wheel -q --no-deps -w dist .
	JAX_FUSEDNORM_MACOS_WHEEL=$$(ls -t dist/*macosx*.whl | head -1) $(BIN)/python -m pytest -q --slow tests/test_macos.py

# The stand-in for Apple's Metal driver, for tests (metal_src/emulator). Prints where it is.
STANDIN := $(CURDIR)/build/standin/libstandin.so
standin: $(STANDIN)
	@echo $(STANDIN)

$(STANDIN): $(wildcard metal_src/emulator/* metal_src/compat/* metal_src/kernels/*) metal_src/embed.py metal_src/launch/shape.h
	rm -rf $(@D) && mkdir -p $(@D)
	$(PYTHON) metal_src/embed.py $(@D)/kernel_texts.h
	$(CXX) -std=c++17 -O1 -g -Wall -Wextra -shared -fPIC -Imetal_src -I$(@D) -DCOMPILER='"$(CXX)"' -DSOURCES='"$(CURDIR)/metal_src"' \
	  metal_src/emulator/*.cc -o $@.new -pthread
	mv $@.new $@

# An editable install with one of the extras of pyproject.toml: the Python sources are used where they are, the native library is built
# again when its sources change. Off a Mac the demo has no use for the launcher of the Metal kernels.
OTHERS = $(filter-out $(VENV)/examples-ready,$@ $(wildcard $(VENV)/*-ready))
$(VENV)/%-ready: pyproject.toml jax_fusednorm/__init__.py jax_fusednorm/core/ffi.py $(SOURCES)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(if $(OTHERS),$(WITH_METAL)) -e '.[$*]' '$(JAX)'
	$(BIN)/python -m jax_fusednorm info
	touch $@

clean:
	rm -rf .venv* build out
