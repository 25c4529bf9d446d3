# Every command a developer, CI or a new user needs. Nothing but Python 3.10+ and make is expected:
# the first target that needs it creates .venv from constraints.txt.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
MODEL ?=
PROMPT_FILE ?=
ARGS ?=

RUN := $(VENV)/bin/python
CLI := $(VENV)/bin/flash-qsa
CONSTRAIN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
INSTALLED := $(VENV)/.installed
RUNTIME := $(VENV)/.runtime

# pytest reports "no test collected" as 5. A tier without tests is a broken tier, so it fails too,
# but says what it means.
define tier
	@echo "== $(1) =="
	@$(3) $(RUN) -m pytest $(2) -q -n $(JOBS) $(ARGS); status=$$?; \
	if [ $$status -eq 5 ]; then echo "tier '$(1)' collected no test" >&2; exit 1; fi; \
	exit $$status
endef

.PHONY: help install test lint generated unit interpret compile gpu demo bench test-vllm-ops \
        test-vllm-engine clean

help:
	@echo "make demo               a small QSA model, long document, compared with stock transformers"
	@echo "make demo MODEL=DIR     the same with a real checkpoint (PROMPT_FILE=FILE for your text)"
	@echo "make test               what CI runs: lint, then the unit, interpret and compile tiers"
	@echo "make unit|interpret|compile|gpu|lint     one tier"
	@echo "make test-vllm-ops      against vLLM's own kernels; make test-vllm-engine: in its engine"
	@echo "make bench              CPU benchmark of one layer against stock transformers"

# Torch goes first and alone, so that nothing else can decide which build of it is installed.
$(RUNTIME): pyproject.toml $(CONSTRAINTS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(CONSTRAIN) torch
	$(RUN) -m pip install --quiet $(CONSTRAIN) -e '.[hf]'
	@touch $@

$(INSTALLED): $(RUNTIME)
	$(RUN) -m pip install --quiet $(CONSTRAIN) -e '.[test]'
	@touch $@

install: $(INSTALLED)

test: lint generated unit interpret compile

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Files that are derived from the tree and checked in; tests compare them with what they derive from.
generated: $(INSTALLED)
	$(RUN) tests/parity_table.py --write
	$(RUN) docs/architecture.py --write
	$(RUN) benchmarks/render.py --write

unit: $(INSTALLED) generated
	$(call tier,unit,tests --ignore=tests/interpret --ignore=tests/compile --ignore=tests/gpu,)

interpret: $(INSTALLED)
	$(call tier,interpret,tests/interpret,TRITON_INTERPRET=1)

compile: $(INSTALLED)
	$(call tier,compile,tests/compile,)

gpu: $(INSTALLED)
	$(call tier,gpu,tests/gpu,)

# Each has an environment of its own, made on first use.
test-vllm-ops:
	bash tests/vllm/run_ops.sh

test-vllm-engine:
	bash tests/vllm/run_engine.sh

demo: $(RUNTIME)
	$(CLI) demo $(if $(MODEL),--model $(MODEL)) $(if $(PROMPT_FILE),--prompt-file $(PROMPT_FILE)) $(ARGS)

bench: $(INSTALLED)
	$(RUN) benchmarks/layer.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
