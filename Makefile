# A thin face for CMake. Every goal sets up what it needs (scripts/setup.sh): as root it installs Debian's packages,
# otherwise it says which are missing.
#
#     make            build the library, the command and the examples in build/
#     make test       build and run every test
#     make test-gpu   build and run the GPU's tests; skipped, with the reason, where there is no GPU
#     make test-emulated-gpu  the GPU's case list on an emulated GPU of four architectures, and Hopper's own kernels (make test runs a part of it)
#     make test-python  install the Python package and PyTorch into build/venv and run the package's tests
#     make test-python-gpu  the package's tests on CUDA tensors, with the PyTorch of $(PYTHON); skipped without a GPU
#     make demo       build, check, train a small GPT for 30 seconds, print the bench table: two minutes on two cores
#     make check      compare this machine's kernels with the reference
#     make bench      time attention on this machine
#     make install    PREFIX=/usr/local by default; DESTDIR is honoured
#     make format     clang-format over the C sources
#     make clean

BUILD   ?= build
PREFIX  ?= /usr/local
JOBS    ?= $(shell nproc 2>/dev/null || echo 2)
PYTHON  ?= python3
SECONDS_OF_TRAINING ?= 30
FLAGS   ?=
CTEST_FLAGS ?=
GENERATOR := $(shell command -v ninja >/dev/null 2>&1 && echo -G Ninja)
# A build folder keeps the generator that it was made with.
ifneq ($(wildcard $(BUILD)/CMakeCache.txt),)
GENERATOR :=
endif

.PHONY: all build build-tests test test-gpu test-emulated-gpu test-python test-python-gpu demo check bench install format clean setup-build setup-test setup-python setup-format

all: build

# A static pattern: make looks for no other rule for goals that are phony.
setup-build setup-test setup-python setup-format: setup-%:
	@scripts/setup.sh $(if $(filter test,$*),build test,$*)

build: setup-build
	@cmake -S . -B $(BUILD) $(GENERATOR) -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=$(PREFIX) \
	    -DFLASH_ATTN_TESTS=OFF $(FLAGS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@rm -f $(BUILD).log
	cmake --build $(BUILD) -j $(JOBS)

# The same folder, with the tests added.
build-tests: setup-test
	@cmake -S . -B $(BUILD) $(GENERATOR) -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=$(PREFIX) \
	    -DFLASH_ATTN_TESTS=ON $(FLAGS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@rm -f $(BUILD).log
	cmake --build $(BUILD) -j $(JOBS)

# The last line says how many passed and failed: ctest's own list of skipped tests hides its summary.
test: build-tests
	@cd $(BUILD) && status=0; ctest --output-on-failure --no-tests=error -j $(JOBS) -O tests.log $(CTEST_FLAGS) || status=$$?; \
	    awk '/tests failed out of/ { failed = $$4; all = $$NF } /\(Skipped\)$$/ { skipped++ } \
	         END { printf "%d passed, %d failed, %d skipped\n", all - failed - skipped, failed, skipped }' tests.log; exit $$status

# A kernel is built when it is first needed and kept in the user's cache, so the first run takes longer.
test-gpu: build-tests
	cd $(BUILD) && ctest --verbose -j $(JOBS) -R '^test_cuda(|_.*)$$|^test_jit$$|^cuda_sanitizer$$' $(CTEST_FLAGS)

# Some minutes: each architecture has tiles of its own, and each variant is compiled.
test-emulated-gpu: build-tests
	printf '%s\n' sm90.0 sm90.1 sm90.2 sm90.3 few latent 80 86 90 120 | xargs -P $(JOBS) -n 1 sh $(BUILD)/tests/emulator/all_cases.sh
	$(PYTHON) tests/emulator/mistakes.py $(BUILD)/tests/test_cuda_sm90 $(abspath $(BUILD))/tests/emulator src/cuda/kernels

# A private environment, so that nothing of the system's Python changes. What pip installs there is not asked for again.
test-python: setup-build setup-python
	@[ -x $(BUILD)/venv/bin/python ] || python3 -m venv $(BUILD)/venv
	$(BUILD)/venv/bin/pip install -q --disable-pip-version-check ".[test]"
	$(BUILD)/venv/bin/python -m pytest -q $(PYTEST_FLAGS)

# Nothing is installed: whoever has a GPU has a PyTorch for it. Where pytest-xdist is there, kernels compile side by side.
test-python-gpu: build
	@if $(PYTHON) -c 'import torch, pytest, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    FLASHATTN_LIBRARY=$(abspath $(BUILD)/libflashattn.so) PYTHONPATH=python $(PYTHON) -m pytest -q python/tests/test_cuda.py \
	        $$($(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses=4) $(PYTEST_FLAGS); \
	else echo "skipped: $(PYTHON) needs pytest and a PyTorch that sees a GPU (PYTHON=... names another)"; fi

demo: build
	$(BUILD)/cli/flashattn check --quick
	$(BUILD)/examples/train_gpt --seconds $(SECONDS_OF_TRAINING)
	$(BUILD)/cli/flashattn bench --quick

check: build
	$(BUILD)/cli/flashattn check

bench: build
	$(BUILD)/cli/flashattn bench

install: build
	cmake --install $(BUILD)

format: setup-format
	clang-format -i $$(git ls-files '*.c' '*.h')

clean:
	rm -rf $(BUILD)
