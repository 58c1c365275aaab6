"""Two steps of every recipe, with its overlay of small sizes and data, by the command line; the model that a run trains
is the one that stands in the plan."""

import json
import os
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from crt_exp import recipes
from crt_exp.mechanism import Mechanism
from crt_exp.models.lstm import LSTMLanguageModel
from crt_exp.outlines import Facts, outline

DATA = Path(os.environ.get("CRT_DATA", "none"))
DIGITS = "speech/free-spoken-digit-dataset"
NEEDS = {"crt_glue": "glue/CoLA", "crt_conformer_960h": DIGITS, "hrf_conformer_960h": DIGITS}
BEFORE = {"crt_uptrain": "task.model", "crt_glue": "task.model"}   # take a run of crt_bert_pretrain_small
FAST = ("hrf_ptb_softmax", "performers_trembl")
TEXT = [f"task.text={Path(__file__).parents[2] / 'docs/training.md'}", "trainer.batch=4"]   # in place of WikiText-2
SHORT = ["trainer.steps=2", "trainer.eval_every=2", "trainer.warmup=0", "trainer.log_every=1", "logger=none"]
OWN = {"crt_conformer_960h": ["task.strings.train=40", "task.strings.validation=4", "task.strings.test=4"],
       "crt_glue": ["task.examples=64"],
       "crt_vit_steps": ["task.sizes.depth=1", "task.size=32", "trainer.eval_batch=200"],
       "performers_pg19": [*TEXT, "task.vocabulary_size=600"], "performers_lm1b": [*TEXT, "task.vocabulary_size=600"],
       "crt_bert_pretrain": [*TEXT, "task.vocabulary_size=500"], "crt_uptrain": TEXT,
       "performers_trembl": ["task.generated.sequences=300"]}
OWN["hrf_conformer_960h"] = OWN["crt_conformer_960h"]


def attention(name):
    words = next(iter(recipes.runs(name))).words
    chosen = [word for word in words if word.startswith(("attention=", "task.direction", "task.softmax"))]
    random = any(word.startswith("attention=") and word != "attention=exact" for word in chosen)
    return [*chosen, "features.m=8"] if random else chosen


@pytest.mark.filterwarnings("ignore:ClusteredHybrid attention has no clusters yet:UserWarning")   # two steps fit none
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
                                  for name in recipes.names()])
def test_two_steps_of_the_small_recipe(name, typed, tmp_path):
    if name in NEEDS and not (DATA / NEEDS[name]).exists():
        pytest.skip(f"reads {NEEDS[name]} of CRT_DATA")
    own = list(OWN.get(name, []))
    if "cache_dir" in recipes.composed(name).task:
        own.append(f"task.cache_dir={tmp_path}")
    if name in BEFORE:
        words = ["attention=exact", *OWN["crt_bert_pretrain"]]
        code, _, err = run(typed, tmp_path, "crt_bert_pretrain", "before", words)
        assert code == 0, err
        own.append(f"{BEFORE[name]}={tmp_path / 'before'}")
    code, out, err = run(typed, tmp_path, name, "run", [*attention(name), *own])
    assert code == 0 and str(tmp_path / "run") in out, err
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["final"] and records[-1]["step"] == 2
    check_parameters(name, tmp_path / "run")


def run(typed, tmp_path, name, directory, words):
    return typed(f"experiment={name}_small", f"hydra.run.dir={tmp_path / directory}", *SHORT, *words)


def check_parameters(name, directory):
    """Of the model that the run kept, and of the outline of its configuration."""
    if not (directory / "model").exists():  # the Arena's runs keep none
        return
    cfg = OmegaConf.load(directory / "config.yaml")
    kept = load_file(directory / "model/model.safetensors")
    facts = facts_of(name, cfg, directory, kept)
    if facts is None:
        return
    made = outline(cfg, Mechanism.of("exact"), facts)
    model = made.model.body if isinstance(made.model, LSTMLanguageModel) else made.model  # what a run keeps of it
    own = {key: part.shape for key, part in model.named_parameters()}
    shapes = {key: part.shape for key, part in kept.items() if key in own}
    assert shapes and shapes == {key: own[key] for key in shapes}
    assert sum(map(torch.Size.numel, shapes.values())) > 0.9 * made.parameters


def facts_of(name, cfg, directory, kept):
    """What the data of the run decided; None where the model is another run's."""
    config = json.loads((directory / "model/config.json").read_text())
    if name in BEFORE:
        return None
    if "hrf_ptb" in name or "wikitext2" in name:
        return Facts(symbols=len(config["words"]))
    if name.endswith("960h"):
        return Facts(symbols=len(config["symbols"]["entries"]))
    if name == "crt_bert_pretrain":
        return Facts(symbols=config["vocab_size"])
    if name in ("performers_pg19", "performers_lm1b"):
        return Facts(symbols=config["symbols"] - (0 if config["causal"] else 1))
    return Facts(classes=10) if name.startswith("crt_vit") else Facts()
