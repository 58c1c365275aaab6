# make            this help
# VENV=path       another virtual environment (default .venv)
# SIZE=small      small (default, 2 cores), gpu (one data-centre GPU) or full (the papers' setting)
# OPTIONS=...     of attention-maps: key=value, such as OPTIONS='run=outputs/mine input=mine.fasta entry=P12345'
VENV   ?= .venv
SIZE   ?= small
OPTIONS ?=
PYTHON ?= python3
PY     := $(VENV)/bin/python
PARALLEL := -n auto --maxprocesses 8 --dist loadfile   # a test file stays in one process
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(PARALLEL)   # tests start many processes, which read bytecode sooner
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.docs

REPORTS := table1 table2 fig1 fig2 performers-fig2 performers-fig4 performers-fig14 hadamard fig3 fig4-left fig4-right \
  proteins kernels redraw proteins-long lra pixels books attention-maps hrf-lm hrf-sampled ptb-peer hrf-pointwise \
  hrf-qmc hrf-clusters hrf-flops hrf-speech fidelity copying recall sampling families bench-estimators speed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all gpu lint docs sweep-example report $(REPORTS)

help:  ## print this help
	@echo "usage: make TARGET [VENV=.venv] [SIZE=small|gpu|full]"; echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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
	@$(PYTEST) -m "not slow"

gpu: $(STAMP)  ## on a machine with a GPU: its tests, then speed-gpu for at most 8 minutes; repeat until it says written
	@$(PYTEST) -n 0 -m gpu
	@$(PY) -m crt_exp.report speed-gpu --size gpu --minutes 8

test-all: $(STAMP)  ## every test
	@$(PYTEST)

lint: $(STAMP)  ## ruff
	@$(PY) -m ruff check crt_exp tests

docs: $(DOCS)  ## the documentation as a site, in site/; a broken link or name is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

$(DOCS): $(STAMP)
	@if command -v uv >/dev/null; then uv pip install -q --compile-bytecode --python $(PY) -e '.[docs]'; \
	else $(PY) -m pip install -q --disable-pip-version-check -e '.[docs]'; fi
	@touch $@

$(REPORTS):  # each has what it needs, and the line of the help, in a rule of its own
	@$(PY) -m crt_exp.report $@ --size $(SIZE) $(OPTIONS)

table1: $(STAMP)  ## CRT Table 1: kernel regression on eight UCI sets, all mechanisms (needs CRT_DATA)
table2: $(STAMP)  ## CRT Table 2: exact encoders of text, their attention swapped, uptrained, fine-tuned on GLUE (needs CRT_DATA)
fig1: $(STAMP)  ## CRT Figure 1: the gain of OPRF over PosRF
fig2: $(STAMP)  ## CRT Figure 2: log variance of every mechanism in four regimes
performers-fig2: $(STAMP)  ## Performers Figure 2: where positive features beat trigonometric ones
performers-fig4: $(STAMP)  ## Performers Figure 4: MSE of attention against m, with every mechanism and sampler
performers-fig14: $(STAMP)  ## Performers Figure 14: how the error of attention goes through 1 to 12 layers (needs CRT_DATA)
hadamard: $(STAMP)  ## structured projections: MSE, bias and time of iid, orthogonal, Hadamard k = 1, 2, 3, Givens
fig3: $(STAMP)  ## CRT Figure 3: speech recognition with linear attention, word error rates (needs CRT_DATA)
fig4-left: $(STAMP)  ## CRT Figure 4, left: a ViT with linear attention, uptrained from MAE and from scratch (needs CRT_DATA)
fig4-right: $(STAMP)  ## CRT Figure 4, right: steps per second and memory of training a ViT, against the tokens
proteins: $(STAMP)  ## Performers Figure 6, Tables 1 and 2: language models of proteins with every attention (needs CRT_DATA)
kernels: $(STAMP)  ## Performers Figures 16 to 18: kernels of generalised attention, with and without denominators (needs CRT_DATA)
redraw: $(STAMP)  ## Performers Figures 5 and 15: exact weights in random features, their recovery, and redraws (needs CRT_DATA)
proteins-long: $(STAMP)  ## Performers Figure 7, right: chains of 8192 letters, exact against ours; time and memory (needs CRT_DATA)
lra: $(STAMP)  ## Performers Figure 19: the Long Range Arena with every attention (needs CRT_DATA)
pixels: $(STAMP)  ## Performers Figure 7, left: images value by value with every attention (needs CRT_DATA)
books: $(STAMP)  ## Performers Figure 5: exact weights in random features on texts, redraws, texts read on (needs CRT_DATA)
attention-maps: $(STAMP)  ## Performers Figures 10 to 13: attention of a protein model, amino acids beside BLOSUM62 (needs CRT_DATA)
hrf-lm: $(STAMP)  ## HRF Figures 3, 8, Tables 4, 5: a language model's softmax by random features (needs CRT_DATA)
hrf-sampled: $(STAMP)  ## HRF Figure 10: a language model trained by sampled softmax, by sampler (needs CRT_DATA)
ptb-peer: $(STAMP)  ## the language model of hrf-lm beside the same run in plain PyTorch (needs CRT_DATA)
hrf-pointwise: $(STAMP)  ## HRF Figures 2 and 5: relative error of every map over the angle of two vectors
hrf-qmc: $(STAMP)  ## HRF Table 1: the angular hybrid beside quasi-Monte Carlo samplers, on wine and boston
hrf-clusters: $(STAMP)  ## HRF Figure 6, Table 3: hybrids for vectors in clusters
hrf-flops: $(STAMP)  ## HRF Appendix L: columns for a FLOP, and the error at equal FLOPs
hrf-speech: $(STAMP)  ## HRF Table 2: speech recognition with hybrids, by an exact model made as that of fig3 (needs CRT_DATA)
fidelity: $(STAMP)  ## language models whose attention is swapped without training, and after a little of it (needs CRT_DATA)
copying: $(STAMP)  ## a model that copies, swapped without training: what it keeps, and at what time (needs CRT_DATA)
recall: $(STAMP)  ## near-far attention that reads the keys it asks for, where a single far key matters
sampling: $(STAMP)  ## sampled softmax: a step against 10^3 to 10^7 classes, and its gradient beside the full softmax's

report: $(STAMP)  ## all verdicts of the reports that are there: outputs/report/index.md
	@$(PY) -m crt_exp.report

families: $(STAMP)  ## every model type of transformers, timm, torch and torchaudio, swapped: exact, refused or wrong

sweep-example: $(STAMP)  ## a small sweep on this machine: mechanisms x m x seeds on wine, the table of the runs and the best
	@$(PY) -m crt_exp -m task=uci features=trig,gerf,oprf features.m=8,64 seed=0,1,2 logger=none hydra.sweep.dir=outputs/sweep-example \
	  resume=auto

bench-estimators: $(STAMP)  ## RandomFeatures beside scikit-learn's RBFSampler
speed: $(STAMP)  ## time and memory of attention against length, alone and in whole models, beside the peers
