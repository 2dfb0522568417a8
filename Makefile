# make eval | make test | make test-all | make report | make lint: each does all set-up first; a second run installs nothing.
#
#   PYTHON=python3.12     use this interpreter, which already has the packages, and install nothing
#   TORCH='torch==2.13.0' which torch to install           TORCH_INDEX=URL  and from which package index
#   DRIVER=12 | 13 | none override what nvidia-smi says     BASE_PYTHON=...  the interpreter .venv is made with
#   ARGS='...'            passed on to `kbsub eval` or pytest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
BASE_PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# The driver's CUDA major version, or "none". Only the driver counts: wheels bring their own toolkit.
ifeq ($(origin DRIVER),undefined)
DRIVER := $(or $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n1),none)
endif
# The pin of the CPU runs. Where a driver is found, the newest torch that fits it is what one wants to measure.
TORCH ?= $(if $(filter none,$(DRIVER)),torch==2.13.0,torch>=2.9)
# A driver of CUDA 12 cannot run the CUDA 13 build that plain `torch` is; PyTorch keeps its CUDA 12 builds apart. Those
# for 12.8 bring an NVRTC that knows every architecture compiled for here; older ones would clash with the extra.
TORCH_INDEX ?= $(if $(filter 12,$(DRIVER)),https://download.pytorch.org/whl/cu128)
# Without a driver the CUDA 13 wheels still compile every kernel for every architecture.
EXTRAS := test,cuda$(if $(filter none,$(DRIVER)),13,$(if $(filter 12,$(DRIVER)),12,13))
ifneq ($(filter 8 9 10 11,$(DRIVER)),)
$(error The NVIDIA driver is for CUDA $(DRIVER); CUDA 12 is the oldest this project runs on. Update the driver, or use DRIVER=none)
endif
WORKERS ?= $(if $(filter none,$(DRIVER)),2,0)

# `kbsub` without an installation: links that spell the import packages out. mypy reads them too.
LINKS := build/types
export PYTHONPATH := $(if $(PYTHON),$(CURDIR)/$(LINKS)$(if $(PYTHONPATH),:$(PYTHONPATH)),$(PYTHONPATH))

ifeq ($(PYTHON),)
PY := $(VENV)/bin/python
# Named after what it was made from, so that a change of either installs again and a touched file does not.
READY := $(VENV)/.ready-$(shell (cat pyproject.toml setup.py; echo '$(TORCH) $(TORCH_INDEX) $(DRIVER) $(CURDIR)') | cksum | cut -d' ' -f1)
else
PY := $(PYTHON)
READY :=
endif
KBSUB := $(PY) -m kbsub.eval.cli
# A linter that a given PYTHON lacks is skipped aloud; in .venv it is always there.
check = if test -n '$(PYTHON)' && ! $(PY) -c 'import $1' 2>/dev/null; then echo '$1: SKIPPED: $(PY) has none'; else $2; fi
# import-linter has a command and no `python -m`. The links come first on the path: what is linted is this tree.
IMPORTS := PYTHONPATH='$(CURDIR)/$(LINKS)$(if $(PYTHONPATH),:$(PYTHONPATH))' $(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo --no-cache
PYTEST = $(PY) -m pytest $(if $(filter 0,$(WORKERS)),,-n $(WORKERS) --dist worksteal)

.PHONY: help setup links fetch eval test test-all lint report
help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 10
	@sed -n '3,6s/^# //p' Makefile

setup: $(READY) links ## make .venv and install everything (nothing when PYTHON= is given)

ifneq ($(READY),)
$(READY):
	@$(BASE_PYTHON) -c 'import sys; sys.exit(f"Python >= 3.10 is needed, {sys.executable} is {sys.version.split()[0]}: set BASE_PYTHON=" if sys.version_info < (3, 10) else 0)'
	@test -x $(PY) || $(BASE_PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and kb-submissions[$(EXTRAS)] into $(VENV) (CUDA driver: $(DRIVER))"
ifneq ($(TORCH_INDEX),)
	@$(PY) -m pip install -qq --index-url '$(TORCH_INDEX)' '$(TORCH)'
	@$(PY) -m pip freeze | grep '^torch==' >$(VENV)/torch.txt
	@$(PY) -m pip install -qq --constraint $(VENV)/torch.txt -e '.[$(EXTRAS)]'
else
	@$(PY) -m pip install -qq '$(TORCH)' -e '.[$(EXTRAS)]'
endif
	@rm -f $(VENV)/.ready-* && touch $@
endif

links:
	@mkdir -p $(LINKS)/kbsub
	@for top in adapters eval submissions; do ln -sfn ../../../$$top $(LINKS)/kbsub/$$top; done

# Never fatal: without the checkout the runs say what they could not certify.
fetch: setup
	@$(KBSUB) fetch --best-effort

eval: fetch ## judge every candidate: official verdict where there is a GPU, honest CPU rows where there is none
	$(KBSUB) eval $(ARGS)

lint: setup ## ruff, its format, mypy --strict, and who may import whom
	@$(call check,ruff,$(PY) -m ruff check .)
	@$(call check,ruff,$(PY) -m ruff format --check .)
	@$(call check,mypy,$(PY) -m mypy)
	@$(call check,importlinter,$(IMPORTS))

test: fetch lint ## lint, then every test but the slow ones; ends with what was skipped and why
	$(PYTEST) $(ARGS)

test-all: fetch lint ## the same with the slow tests
	$(PYTEST) --slow $(ARGS)

report: setup ## remake every table and plot from the committed results
	$(KBSUB) report
