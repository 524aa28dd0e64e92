# Every target sets up what it needs; a fresh machine needs Python 3.11 or 3.12, gcc and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc src -type f \( -name '*.cpp' -o -name '*.h' \)) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: demo bench test test-slow check sanitize clean

$(VENV)/.ready: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
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
	$(BIN)/python -m pytest -m slow $(WORKERS) --fresh-seeds

check: $(VENV)/.ready
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

# The C++ tests of the CPU core under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.ready
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DMOEFUSE_CPP_TESTS=ON -DMOEFUSE_SANITIZE=address,undefined
	$(BIN)/cmake --build build/sanitize
	build/sanitize/test_core

clean:
	rm -rf $(VENV) build demo dist
