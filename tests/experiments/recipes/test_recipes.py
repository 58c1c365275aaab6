"""The recipes of conf/experiment: composed and compared with the papers; two steps of each at a small size."""

import csv
import json
import os
from functools import cache
from pathlib import Path

import pytest

from crt_exp.experiments.models import conformer_transducer, language
from crt_exp.experiments.runner.command_line import compose
from crt_exp.experiments.runner.configuration import check_plain, plain_config
from crt_exp.registry import CONF

FOLDER = CONF / "experiment"
PAPERS = {
    row["recipe"]: row for row in csv.DictReader((Path(__file__).parent / "papers.csv").open())
}
recipes = pytest.mark.parametrize("name", PAPERS)
composed = cache(lambda name: compose([f"experiment={name}"]))


def number(text):
    return float(text) if text else None


def test_every_recipe_has_its_row():
    files = {
        path.stem
        for path in FOLDER.glob("*.yaml")
        if path.stem.split("_")[0] in ("crt", "hrf", "performers")
    }
    assert files == {*PAPERS}


def test_decay_rates_of_adam_are_those_of_bert_hrf_and_performers():
    for name, rate in {
        "crt_bert_pretrain": 0.999,
        "hrf_ptb_softmax": 0.99,
        "performers_pg19": 0.98,
    }.items():
        assert composed(name).trainer.betas == [0.9, rate], name


@recipes
def test_full_size_is_the_papers(name):
    cfg = composed(name)
    row = PAPERS[name]
    check_plain(plain_config(cfg))
    assert cfg.trainer.steps == number(row["steps"])
    expected = float(row["lr"])
    assert cfg.trainer.lr == pytest.approx(expected)
    assert cfg.trainer.steps or cfg.trainer.epochs == number(row["epochs"])
    assert row["batch"] == "" or cfg.trainer.batch == int(row["batch"])
    preset = cfg.task.get("preset")
    if preset:
        if preset == "paper":
            sizes = conformer_transducer.PRESETS[preset]
        else:
            sizes = language.sizes_of(preset, {}, "task.sizes")
        made = [
            sizes["layers"],
            sizes["heads"],
            sizes.get("d", sizes.get("dim")),
            sizes.get("d_ff", sizes.get("ffn")),
        ]
        expected = [int(row[key]) for key in ("layers", "heads", "width", "ffn")]
        assert made == expected
    assert row["source"].startswith(
        {"crt": "CRT", "hrf": "HRF", "performers": "Performers"}[name.split("_")[0]]
    )


# ---- two steps -------------------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("CRT_DATA", "none"))
DIGITS = "speech/free-spoken-digit-dataset"
NEEDS = {"crt_glue": "glue/CoLA", "crt_conformer_960h": DIGITS, "hrf_conformer_960h": DIGITS}
BEFORE = ("crt_uptrain", "crt_glue")  # task.model is a run of crt_bert_pretrain
FAST = ("performers_trembl",)
WORDNET = "task.text=wordnet task.validation_text=null trainer.batch=4"
BERT = f"{WORDNET} task.hub.name=null task.block=64"
BOOKS = f"{WORDNET} task.test_text=null task.vocabulary_size=600 task.evaluated=64 task.preset=tiny"
DIGIT_IMAGES = """task.dataset=digits task.model=null task.size=8 task.workers=0 trainer.batch=64
    task.augment.scale=[1,1] task.augment.policy=null task.augment.erase=0"""
DIGIT_STRINGS = """task.corpus=fsdd task.symbols=words task.preset=small task.batch_seconds=30
    task.strings.train=40 task.strings.validation=4 task.strings.test=4"""
FAMILIES = """task.dataset=generated task.generated.sequences=300 task.preset=tiny task.families=null
    task.validation_share=0.05 task.test_share=0.05 task.direction=unidirectional"""
SMALL = {
    "crt_bert_pretrain": f"{BERT} task.model=null task.vocabulary_size=500 attention=favorpp",
    "crt_conformer_960h": f"{DIGIT_STRINGS} attention=favorpp",
    "crt_glue": "task.dataset=cola task.examples=64 task.max_length=32 attention=favorpp",
    "crt_uptrain": f"{BERT} attention=favorpp",
    "crt_vit_mae_uptrain": f"{DIGIT_IMAGES} task.init=scratch attention=favorpp",
    "crt_vit_scratch": f"{DIGIT_IMAGES} task.augment.repeats=1 attention=favorpp",
    "crt_vit_steps": """task.sizes.width=64 task.sizes.depth=1 task.sizes.heads=4 task.size=32
        task.workers=0 trainer.eval_batch=200 attention=favorpp""",
    "hrf_conformer_960h": f"{DIGIT_STRINGS} attention=hrf_cluster",
    "hrf_ptb_softmax": "task.corpus=wordnet task.width=32 task.softmax=full",
    "hrf_wikitext2_softmax": "task.corpus=wordnet task.width=48 task.softmax=full",
    "performers_imagenet64": """task.dataset=digits task.size=8 task.evaluated=100 task.preset=tiny
        trainer.batch=16 attention=relu""",
    "performers_kernels": f"{FAMILIES} task.max_length=96 trainer.batch=32 attention=generalized",
    "performers_lm1b": f"{BOOKS} task.max_length=64 attention=exact",
    "performers_lra": "task.scale=small task.max_length=null task.preset=tiny attention=favorp",
    "performers_pg19": f"{BOOKS} task.max_length=128 attention=favorp",
    "performers_trembl": f"{FAMILIES} task.max_length=96 trainer.batch=32 attention=relu",
    "performers_trembl_concat": f"{FAMILIES} task.max_length=512 trainer.batch=8 attention=relu",
}
SHORT = """trainer.steps=2 trainer.eval_every=2 trainer.warmup=0 trainer.log_every=1
    trainer.precision=no trainer.accumulate=1 logger=none"""


def marks_of(name):
    marks = [pytest.mark.data] if name in NEEDS else []
    return marks if name in FAST else [*marks, pytest.mark.slow]


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")  # two steps fit none
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks_of(name)) for name in PAPERS],
)
def test_two_steps_at_a_small_size(name, typed, tmp_path):
    if name in NEEDS and not (DATA / NEEDS[name]).exists():
        pytest.skip(f"reads {NEEDS[name]} of CRT_DATA")

    def run(name, folder, *words):
        place = f"hydra.run.dir={tmp_path / folder}"
        short = [*SHORT.split(), *SMALL[name].split()]
        code, _, err = typed(f"experiment={name}", place, *short, *words)
        assert code == 0, err

    words = []
    if "attention=exact" not in SMALL[name] and "softmax=full" not in SMALL[name]:
        words.append("features.m=8")
    if "cache_dir" in composed(name).task:
        words.append(f"task.cache_dir={tmp_path}")
    if name in BEFORE:
        run("crt_bert_pretrain", "before", "attention=exact")
        words.append(f"task.model={tmp_path / 'before'}")
    run(name, "run", *words)
    records = []
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        records.append(json.loads(line))
    assert records[-1]["final"]
    assert records[-1]["step"] == 2
