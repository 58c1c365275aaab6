# make            this help
# VENV=path       another virtual environment (default .venv)
# SIZE=small      small (default, 2 cores) or full (the papers' setting)
# FILES=...       of test and test-all: folders or files, such as FILES=tests/swap
# METHODS=, SEEDS=   of pages: only these methods, METHODS="exact, favorp", and the first seeds; written to outputs/report/part
VENV   ?= .venv
SIZE   ?= small
METHODS ?= $(ARMS)
SEEDS   ?=
FILES  ?=
PYTHON ?= python3
PY      = $(VENV)/bin/python
PARALLEL := -n auto --maxprocesses 8 --dist loadfile   # a test file stays in one process
PYTEST  = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(PARALLEL)   # tests start many processes, which read bytecode sooner
STAMP  := $(VENV)/.installed
UV     := $(shell command -v uv)

define CREATE
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "crt_exp needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }; \
echo "installing in $(VENV) with $(if $(UV),uv,pip): a few GB, one to three minutes"; \
$(if $(UV),uv venv -q --allow-existing --python $(PYTHON),$(PYTHON) -m venv) $(VENV)
endef
INSTALL = $(if $(UV),uv pip install -q --compile-bytecode --python $(PY),$(PY) -m pip install -q --disable-pip-version-check)

# The tables and figures of the papers, each a sweep of a page: make TARGET = python -m crt_exp report TARGET --run
crt_variance  := fig1 fig2
crt_uci       := table1
crt_glue      := table2 encoders
crt_speech    := fig3 fig3-whisper
crt_vit       := fig4-left fig4-left-vit
perf_error    := performers-fig2 performers-fig4 performers-fig14
perf_redraw   := redraw redraw-scratch books
perf_proteins := proteins proteins-long
perf_kernels  := kernels
perf_maps     := attention-maps
perf_long     := pixels lra
perf_speed    := speed speed-gpu fig4-right
whole_models  := whole-models
hrf_kernels   := hrf-pointwise hrf-qmc hrf-clusters hrf-flops
hrf_language  := hrf-lm hrf-sampled
hrf_speech    := hrf-speech
hrf_robotics  := hrf-robotics
hadamard      := hadamard
swap          := fidelity pretrained
recall        := recall copying
adapt         := adapt-smollm2
mixture       := mixture mixture-state
sampling      := sampling
PAGES   := crt_variance crt_uci crt_glue crt_speech crt_vit perf_error perf_redraw perf_proteins perf_kernels perf_maps \
           perf_long perf_speed whole_models hrf_kernels hrf_language hrf_speech hrf_robotics hadamard swap mixture recall adapt \
           sampling
# what they read; the last is 6.3 GB, CIFAR-10 is got by hand
DATA    := uci glue/SST-2 glue/QNLI glue/STS-B wikitext2 ptb mnist protein speech/free-spoken-digit-dataset \
           models/minilm models/smollm2-135m models/whisper-tiny.en images/cifar10 speech/LibriSpeech/train-clean-100
TARGETS := $(sort $(PAGES) $(foreach page,$(PAGES),$($(page))))

.DEFAULT_GOAL := help
.PHONY: help setup lock newest oldest ranges demo test test-avx2 test-data test-all golden gpu gpu-check lint docs data sweep-example report $(TARGETS)

help:  ## print this help
	@echo "usage: make TARGET [VENV=.venv] [SIZE=small|full]"
	@echo "  FILES=tests/swap                     of test, test-all, newest, oldest: only these folders or files"
	@echo "  METHODS=\"exact, favorp\" SEEDS=2     of pages: only these methods, the first seeds; written to outputs/report/part"
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "tables and figures of the papers, by page outputs/report/PAGE.md (make data fetches what they read):"; echo
	@$(foreach page,$(PAGES),printf '  %-15s %s\n' $(page) '$($(page))';)

setup: $(STAMP)  ## create $(VENV) with the versions of requirements.txt and crt_exp (by uv where it is on the PATH, by pip else)

$(STAMP): pyproject.toml requirements.txt
	@$(CREATE)
	@$(INSTALL) -r requirements.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

lock:  ## write requirements.txt: the newest versions that the ranges allow; PINS="torch==2.14.1" keeps some (needs uv)
	@uv pip compile -q pyproject.toml --extra dev --universal --generate-hashes --no-annotate --upgrade \
	  --custom-compile-command "make lock" $(foreach pin,$(PINS),-P $(pin)) -o requirements.txt

newest: VENV := .venv-newest
newest: ranges  ## the fast tests in a fresh environment, with the newest versions that the ranges allow

oldest: VENV := .venv-oldest
oldest: RESOLUTION = $(if $(UV),--resolution lowest-direct,$(error make oldest needs uv on the PATH))
oldest: ranges  ## the fast tests in a fresh environment, with the oldest versions that the ranges allow (needs uv)

ranges:
	@rm -rf $(VENV)
	@$(CREATE)
	@$(INSTALL) $(RESOLUTION) -e '.[dev]'
	@$(PYTEST) -m "not slow" $(FILES)

demo: $(STAMP)  ## the maps of CRT and Performers on real embedded data: a table and a picture (one minute after the install)
	@$(PY) -m crt_exp report demo --run --out outputs/demo

test: $(STAMP)  ## the fast tests
	@$(PYTEST) -m "not slow" $(FILES)

test-avx2: $(STAMP)  ## the fast tests as on a processor without AVX-512
	@CC="$(or $(CC),cc) -mno-avx512f" ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	  $(PYTEST) -m "not slow" $(FILES)

test-data: $(STAMP)  ## the fast tests that read the official files of CRT_DATA
	@$(PYTEST) -m "data and not slow" $(FILES)

gpu: $(STAMP)  ## the tests that need a GPU
	@$(PYTEST) -n 0 -m gpu

gpu-check: gpu  ## on a machine with a GPU, in 6 minutes: its tests, times of attention and BERT, slowest launches
	@$(PY) -m crt_exp.experiments.measure.gpu_check

test-all: $(STAMP)  ## every test
	@$(PYTEST) $(FILES)

golden: $(STAMP)  ## the golden suite: outputs, gradients, metrics and configurations are those of tests/golden/*.json
	@$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal tests/golden/compare.py

lint: $(STAMP)  ## ruff: the layout, and what a linter finds; mypy: the types of the library
	@$(PY) -m ruff format --check README.md crt_exp tests docs
	@$(PY) -m ruff check crt_exp tests docs
	@$(PY) -m mypy

docs: $(STAMP)  ## the documentation as a site, in site/; a broken link or name is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

data: $(STAMP)  ## fetch what the small pages read into CRT_DATA (default data): prints sizes; rerun to continue
	@$(PY) -m crt_exp data fetch $(DATA)

data $(TARGETS): export CRT_DATA ?= data

$(TARGETS): $(STAMP)
	@$(PY) -m crt_exp report $@ --run --size $(SIZE) $(if $(METHODS),--methods "$(METHODS)") $(if $(SEEDS),--seeds $(SEEDS))

report: $(STAMP)  ## render all pages, results.md and index.md from their committed rows
	@$(PY) -m crt_exp report --size $(SIZE)

sweep-example: $(STAMP)  ## a small sweep on this machine: mechanisms x m x seeds on digits, the table of the runs and the best
	@$(PY) -m crt_exp -m task=uci task.dataset=digits features=trig,gerf,oprf features.m=8,128 seed=0,1,2 logger=none hydra.sweep.dir=outputs/sweep-example \
	  resume=auto
