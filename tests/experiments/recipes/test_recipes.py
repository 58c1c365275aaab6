"""The recipes of conf/experiment: composed and compared with the papers; two steps of each small one."""

import csv
import json
import os
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

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


def test_every_recipe_has_its_row_and_its_small_one():
    files = {
        path.stem
        for path in FOLDER.glob("*.yaml")
        if path.stem.split("_")[0] in ("crt", "hrf", "performers")
    }
    assert files == {*PAPERS, *(f"{name}_small" for name in PAPERS)}


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
        sizes = (
            conformer_transducer.PRESETS[preset]
            if preset == "paper"
            else language.sizes_of(preset, {}, "task.sizes")
        )
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


MAY_DIFFER = {
    "batch",
    "steps",
    "epochs",
    "lr",
    "warmup",
    "precision",
    "processes",
    "accumulate",
    "eval_every",
    "eval_batch",
}
KEPT = {
    "direction",
    "chains",
    "rows",
    "softmax",
    "causal",
    "share",
    "vocabulary",
    "positions",
    "temperature",
}


def test_small_recipes_have_other_sizes_steps_and_data():
    for name in PAPERS:
        small = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}_small.yaml"))
        assert small["defaults"] == [name, "_self_"]
        assert small.keys() <= {
            "defaults",
            "task",
            "trainer",
            "features",
        }
        assert small.get("trainer", {}).keys() <= MAY_DIFFER, name
        assert small.get("features", {}).keys() <= {"m"}, name
        assert not small.get("task", {}).keys() & KEPT, name


# ---- two steps -------------------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("CRT_DATA", "none"))
DIGITS = "speech/free-spoken-digit-dataset"
NEEDS = {"crt_glue": "glue/CoLA", "crt_conformer_960h": DIGITS, "hrf_conformer_960h": DIGITS}
BEFORE = {
    "crt_uptrain": "task.model",
    "crt_glue": "task.model",
}  # take a run of crt_bert_pretrain_small
FAST = ("performers_trembl",)
FAVORPP = ["attention=favorpp", "features.m=8"]
TEXT = ["task.text=wordnet", "trainer.batch=4"]  # in place of WikiText-2
BERT = [*TEXT, "task.vocabulary_size=500"]
PIECES = [*TEXT, "task.vocabulary_size=600"]
SPEECH = ["task.strings.train=40", "task.strings.validation=4", "task.strings.test=4"]
SHORT = [
    "trainer.steps=2",
    "trainer.eval_every=2",
    "trainer.warmup=0",
    "trainer.log_every=1",
    "logger=none",
]
OWN = {
    **dict.fromkeys(("crt_vit_mae_uptrain", "crt_vit_scratch"), FAVORPP),
    "crt_conformer_960h": [*SPEECH, *FAVORPP],
    "crt_glue": ["task.examples=64", *FAVORPP],
    "crt_vit_steps": ["task.sizes.depth=1", "task.size=32", "trainer.eval_batch=200", *FAVORPP],
    "crt_bert_pretrain": [*BERT, *FAVORPP],
    "crt_uptrain": [*TEXT, *FAVORPP],
    "hrf_ptb_softmax": ["task.softmax=full"],
    "hrf_wikitext2_softmax": ["task.softmax=full"],
    "hrf_conformer_960h": [*SPEECH, "attention=hrf_cluster", "features.m=8"],
    "performers_pg19": [*PIECES, "attention=favorp", "features.m=8"],
    "performers_lm1b": [*PIECES, "attention=exact"],
    "performers_trembl": [
        "task.generated.sequences=300",
        "attention=relu",
        "features.m=8",
        "task.direction=unidirectional",
    ],
    "performers_trembl_concat": ["attention=relu", "features.m=8"],
    "performers_kernels": [
        "attention=generalized",
        "task.direction=unidirectional",
        "features.m=8",
    ],
    "performers_imagenet64": ["attention=relu", "features.m=8"],
    "performers_lra": ["attention=favorp", "features.m=8"],
}


def marks_of(name):
    marks = [pytest.mark.data] if name in NEEDS else []
    return marks if name in FAST else [*marks, pytest.mark.slow]


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")  # two steps fit none
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks_of(name)) for name in PAPERS],
)
def test_two_steps_of_the_small_recipe(name, typed, tmp_path):
    if name in NEEDS and not (DATA / NEEDS[name]).exists():
        pytest.skip(f"reads {NEEDS[name]} of CRT_DATA")

    def run(name, folder, *words):
        code, _, err = typed(
            f"experiment={name}_small", f"hydra.run.dir={tmp_path / folder}", *SHORT, *words
        )
        assert code == 0, err

    own = [
        *OWN[name],
        *([f"task.cache_dir={tmp_path}"] if "cache_dir" in composed(name).task else []),
    ]
    if name in BEFORE:
        run("crt_bert_pretrain", "before", "attention=exact", *BERT)
        own.append(f"{BEFORE[name]}={tmp_path / 'before'}")
    run(name, "run", *own)
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert records[-1]["final"]
    assert records[-1]["step"] == 2
