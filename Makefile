# make            this help
# VENV=path       another virtual environment (default .venv)
# SIZE=small      small (default, 2 cores), gpu (one data-centre GPU) or full (the papers' setting)
# FILES=...       of test and test-all: folders or files, such as FILES=tests/swap
# ARMS=, SEEDS=   of reports: some of their arms, ARMS="exact favorp", and so many seeds; the page goes to outputs/report/part
VENV   ?= .venv
SIZE   ?= small
ARMS    ?=
SEEDS   ?=
FILES  ?=
PYTHON ?= python3
PY     := $(VENV)/bin/python
PARALLEL := -n auto --maxprocesses 8 --dist loadfile   # a test file stays in one process
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(PARALLEL)   # tests start many processes, which read bytecode sooner
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.docs

# Every report: a page of conf/report
PAGES   := $(basename $(notdir $(wildcard conf/report/*.yaml)))
REPORTS := $(sort $(filter-out demo report,$(PAGES)))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all golden gpu lint docs sweep-example report $(REPORTS)

help:  ## print this help
	@echo "usage: make TARGET [VENV=.venv] [SIZE=small|gpu|full]"; echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "reports, each of them outputs/report/NAME.md:"; echo
	@awk -v reports=' $(REPORTS) ' '{name = FILENAME; gsub(/.*\/|[.].*/, "", name)} \
	  /^title: / {gsub(/^title: "?|"$$/, ""); line[name] = $$0 line[name]} \
	  /^data: / {sub(/^data: /, ""); line[name] = line[name] " (needs " $$0 ")"} \
	  END {for (name in line) if (index(reports, " " name " ")) printf "  %-18s %s\n", name, line[name]}' \
	  conf/report/*.yaml | sort

setup: $(STAMP)  ## create $(VENV) and install crt_exp in it (uv where it is on the PATH, pip else)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "crt_exp needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	@if command -v uv >/dev/null; then \
	  echo "installing with uv"; uv venv -q --allow-existing --python $(PYTHON) $(VENV) && uv pip install -q --compile-bytecode --python $(PY) -e '.[dev]'; \
	else \
	  echo "installing with pip (a few GB, one to three minutes)"; \
	  $(PYTHON) -m venv $(VENV) && $(PY) -m pip install -q --disable-pip-version-check -e '.[dev]'; \
	fi
	@touch $@

demo: $(STAMP)  ## the maps of CRT and Performers on real embedded data: a table and a picture, in under a minute
	@$(PY) -m crt_exp.report demo --out outputs/demo

test: $(STAMP)  ## the fast tests
	@$(PYTEST) -m "not slow" $(FILES)

gpu: $(STAMP)  ## the tests that need a GPU
	@$(PYTEST) -n 0 -m gpu

test-all: $(STAMP)  ## every test
	@$(PYTEST) $(FILES)

golden: $(STAMP)  ## the golden suite: outputs, gradients, metrics and configurations are those of tests/golden/*.json
	@$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal tests/golden/compare.py

lint: $(STAMP)  ## ruff
	@$(PY) -m ruff check crt_exp tests

docs: $(DOCS)  ## the documentation as a site, in site/; a broken link or name is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

$(DOCS): $(STAMP)
	@if command -v uv >/dev/null; then uv pip install -q --compile-bytecode --python $(PY) -e '.[docs]'; \
	else $(PY) -m pip install -q --disable-pip-version-check -e '.[docs]'; fi
	@touch $@

$(REPORTS): $(STAMP)
	@$(PY) -m crt_exp.report $@ --size $(SIZE) $(if $(ARMS),--arms "$(ARMS)") $(if $(SEEDS),--seeds $(SEEDS))

report: $(STAMP)  ## all verdicts of the reports that are there: outputs/report/index.md
	@$(PY) -m crt_exp.report --all --size $(SIZE)

sweep-example: $(STAMP)  ## a small sweep on this machine: mechanisms x m x seeds on digits, the table of the runs and the best
	@$(PY) -m crt_exp -m task=uci task.dataset=digits features=trig,gerf,oprf features.m=8,128 seed=0,1,2 logger=none hydra.sweep.dir=outputs/sweep-example \
	  resume=auto
