# Every target sets up what it needs; a fresh machine needs Python 3.11 to 3.13, gcc and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find csrc src -type f \( -name '*.cpp' -o -name '*.h' \)) CMakeLists.txt pyproject.toml constraints.txt

PACKAGE := $(SOURCES) $(shell find src -name '*.py' -o -name '*.metal' -o -name '*.gguf')

.PHONY: demo bench test test-slow test-oldest test-newest test-install check docs sanitize wheels clean

$(VENV)/.ready: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt torch
	$(BIN)/python $(PIP) -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

# Text from the model in the box, how fast it came, which experts wrote it, and how transformers' own path compares.
demo: $(VENV)/.ready
	mkdir -p demo
	$(BIN)/moefuse run --max-tokens 120 --temperature 0.8 --seed 2 --dtype float32 --exact --stats --plot demo/experts.png --compare

# The kernels are right on this machine, and this is how fast they are.
bench: $(VENV)/.ready
	mkdir -p demo
	$(BIN)/moefuse info
	$(BIN)/moefuse check
	$(BIN)/moefuse bench olmoe --tokens 1,8,64 --against hf-grouped,hf-eager --plot demo/bench.png --save demo/bench.json

# A worker per core, with one thread each; a file stays whole, for the fixtures its tests share.
WORKERS := -n logical --dist loadfile

# The short suite. Seeds are fixed, so that a failure comes back.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow" $(WORKERS)

# The long sweeps, with fresh seeds: each run looks where none has looked; a failure prints its seed.
test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow -n logical --dist worksteal --fresh-seeds

check: $(VENV)/.ready
	$(BIN)/ruff check src tests examples .ci
	$(BIN)/ruff format --check src tests examples .ci
	$(BIN)/mypy

# The documents as a site, in build/site; a warning is an error. The variable silences the theme's notice of its successor.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The C++ tests of the CPU core under AddressSanitizer and UndefinedBehaviorSanitizer; -O2 takes the compiler three times as long.
sanitize: $(VENV)/.ready
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DMOEFUSE_CPP_TESTS=ON -DMOEFUSE_SANITIZE=address,undefined
	$(BIN)/cmake --build build/sanitize
	build/sanitize/test_core

# The sdist, and a wheel built from it.
dist/.ready: $(VENV)/.ready $(PACKAGE)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	touch $@

# Both as a user gets them: in an empty environment, away from the checkout, with a compiler and without.
test-install: dist/.ready
	$(PYTHON) .ci/try_install.py dist

# The parts that lean on other packages, with the oldest ones that pyproject.toml allows, on the built wheel.
test-oldest: build/oldest/.ready
	build/oldest/bin/python -m pytest -m "not slow" $(WORKERS) tests/hf tests/quant tests/nn tests/cli tests/bench \
		tests/test_box.py tests/test_documents.py

build/oldest/.ready: dist/.ready .ci/oldest.py
	$(PYTHON) -m venv --clear build/oldest
	$(PYTHON) .ci/oldest.py > build/oldest/constraints.txt
	grep ^torch constraints.txt >> build/oldest/constraints.txt
	build/oldest/bin/python $(PIP) -c build/oldest/constraints.txt torch
	build/oldest/bin/python $(PIP) -c build/oldest/constraints.txt "$$(ls dist/*.whl)[triton,hf,gguf,bench]" \
		accelerate peft pytest pytest-xdist hypothesis
	touch $@

# The short suite with the newest of everything, by hand: the newest torch brings gigabytes of CUDA.
NEWEST_PYTHON ?= $(PYTHON)
test-newest:
	$(NEWEST_PYTHON) -m venv --clear build/newest
	build/newest/bin/python $(PIP) --upgrade '.[dev]'
	build/newest/bin/moefuse info
	build/newest/bin/python -m pytest -m "not slow" $(WORKERS)

# Wheels for every Python we serve, tagged by what the compiled module asks of the system.
PYTHONS ?= python3.11 python3.12 python3.13
wheels: dist/.ready
	mkdir -p dist/wheels
	$(PYTHON) .ci/wheels.py dist/*.tar.gz dist/wheels $(PYTHONS)

clean:
	rm -rf $(VENV) build demo dist
