"""The recipes of the papers at full size: composed, built on the meta device, and compared with the papers."""

import csv
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from crt_exp import recipes
from crt_exp.config import CONF, ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.outlines import Facts, attention_flops, outline
from crt_exp.report import page
from crt_exp.runner.command_line import compose
from crt_exp.runner.configuration import check_plain, plain

ROOT = Path(__file__).parents[2]
FOLDER = CONF / "experiment"
NAMES = recipes.names()
PAPERS = {row["recipe"]: row for row in csv.DictReader((Path(__file__).parent / "papers.csv").open())}
SIZES = ("layers", "heads", "width", "ffn")
HOURS = re.compile(r"# ([\d.,]+) GPU hours a run \(docs/recipes\.md\)")


@cache
def first(name):
    """The run of the paper itself: the first setting and arm."""
    return next(iter(recipes.runs(name)))


def number(text):
    return float(text) if text else None


def test_every_recipe_is_declared_and_has_its_row_and_its_small_one():
    files = {path.stem for path in FOLDER.glob("*.yaml") if path.stem.split("_")[0] in ("crt", "hrf", "performers")}
    assert files == {*NAMES, *(f"{name}_small" for name in NAMES)}
    assert set(PAPERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_full_size_is_the_papers(name):
    run, row = first(name), PAPERS[name]
    check_plain(plain(recipes.composed(name)))
    made, trainer = outline(run.cfg, run.mechanism, run.facts), run.cfg.trainer
    assert all(parameter.is_meta for parameter in made.model.parameters())
    assert made.parameters / 1e6 == pytest.approx(float(row["parameters_millions"]), rel=5e-3)
    assert [made.layers, made.heads, made.width, made.ffn] == [int(row[key]) for key in SIZES]
    assert trainer.steps == number(row["steps"]) and trainer.lr == pytest.approx(float(row["lr"]))
    assert trainer.steps or trainer.epochs == number(row["epochs"])
    assert row["batch"] == "" or trainer.batch == int(row["batch"])
    assert (run.mechanism.m or run.cfg.features.m) == int(row["m"])
    assert row["source"].startswith({"crt": "CRT", "hrf": "HRF", "performers": "Performers"}[name.split("_")[0]])


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_its_source_its_command_and_its_hours(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    head = text[:text.index("defaults:")]
    assert re.search(r"(Table|Fig\.) \d", head) and re.search(rf"python -m crt_exp (-m )?experiment={name}\b", head)
    assert HOURS.search(head)[1] == recipes.short(recipes.cost_of(first(name)).hours)


FULL = {name: str(page.load(name)["sizes"].get("full")) for name in page.names()}
HELD = [(name, recipe) for name, full in FULL.items() for recipe in NAMES if f"'experiment={recipe}'" in full]


@pytest.mark.parametrize("name, recipe", HELD)
def test_facts_of_a_page_at_full_are_of_the_recipe(name, recipe):
    """Its steps or epochs, and its rows where a batch is counted in them."""
    facts = " ".join(page.load(name)["sizes"]["full"]["facts"].split())
    cfg = recipes.composed(recipe)
    epochs, trainer = f"{cfg.trainer.epochs:g} ", cfg.trainer
    assert (f"{trainer.steps:,}" if trainer.steps else f"{epochs}epochs") in facts
    assert not trainer.steps or recipe == "crt_uptrain" or f" of {trainer.batch} " in facts


MAY_DIFFER = {"batch", "steps", "epochs", "lr", "warmup", "precision", "processes", "accumulate", "eval_every",
              "eval_batch"}
KEPT = {"direction", "chains", "rows", "softmax", "causal", "share", "vocabulary", "positions", "temperature"}


@pytest.mark.parametrize("name", NAMES)
def test_the_small_one_is_the_recipe_with_other_sizes_steps_and_data(name):
    small = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}_small.yaml"))
    assert small["defaults"] == [name, "_self_"]
    assert small.keys() <= {"defaults", "task", "trainer", "features"} and small.get("trainer", {}).keys() <= MAY_DIFFER
    assert not small.get("task", {}).keys() & KEPT and small.get("features", {}).keys() <= {"m"}


# ---- arms ------------------------------------------------------------------------------------------------------------


def test_buckets_of_reformer_follow_the_length():
    names = [name for name in NAMES if any("attention=reformer" in words for *_, words in recipes.lines(name))]
    made = [run for name in names for run in recipes.runs(name) if run.mechanism.name == "reformer"]
    assert {run.recipe for run in made} == {"performers_trembl", "performers_imagenet64"}
    for run in made:
        options, length = run.mechanism.options, recipes.outline_of(run).tokens
        length = run.cfg.task.get("max_length", length)
        assert options["buckets"] == 2 * length // options["chunk"], run.words
    of_images = {tuple(run.mechanism.options[key] for key in ("chunk", "buckets", "hashes")) for run in made
                 if run.recipe == "performers_imagenet64"}
    assert of_images == {(128, 192, 2)}                      # trax's reformer_imagenet64.gin


def test_ten_variants_of_hybrids_in_speech():
    """Columns as the paper counts them, two for a trigonometric projection."""
    columns = {run.arm: run.mechanism.map().rank(run.mechanism.m) for run in recipes.runs("hrf_conformer_960h")}
    assert columns == {"HRF-C(3,3)": 432, "HRF-C(2,3)": 432, "HRF-C(3,2)": 432, "HRF-C(2,2)": 256, "HRF-A(16,8)": 432,
                       "HRF-A(8,8)": 216, "FAVOR+ 432": 432, "FAVOR+ 256": 256, "Trig 432": 432, "Trig 256": 256}


def test_small_transformers_of_long_chains():
    sizes = {run.arm: dict(run.cfg.task.sizes) for run in recipes.runs("performers_trembl_concat")}
    assert sizes == {"relu": {}} | {f"exact, {n} layer{'s' * (n > 1)}": {"layers": n, "d": 256, "d_ff": 256}
                                    for n in (1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_arm_composes_as_it_is_typed(name):
    for run in recipes.runs(name):
        cfg = compose([f"experiment={name}", *run.words])
        check_plain(plain(cfg))
        chosen = {"attention": None, **cfg.hydra.runtime.choices}.get
        if chosen("attention"):
            assert Mechanism.composed(cfg, chosen).describe() == run.mechanism.describe(), run.words
        assert (cfg.task, cfg.trainer) == (run.cfg.task, run.cfg.trainer)


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_products_are_those_that_torch_counts(causal):
    """Of a whole forward pass on the meta device, where every token's logits are computed."""
    cfg, exact = recipes.composed("performers_trembl_concat").copy(), Mechanism.of("exact")
    cfg.task.direction, cfg.task.share = ("unidirectional", 0.15) if causal else ("bidirectional", 0.999999)
    made = outline(cfg, exact, Facts())
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        made.model(torch.zeros(1, made.tokens, dtype=torch.long))
    whole = attention_flops(exact, made.tokens, 8, 64, causal=False)
    half = made.layers * whole / 2 if causal else 0          # torch counts all pairs
    assert counter.get_total_flops() == pytest.approx(made.flops(exact) + half, rel=1e-3)


def test_attention_costs_what_its_kind_says():
    cost = lambda text, causal=False: attention_flops(Mechanism.parse(text), 1024, 8, 64, causal)
    assert cost("exact", True) == cost("exact") / 2 == 4 * 8 * 64 * 1024**2 / 2
    assert cost("favorp m=256") == cost("relu m=256") == 4 * cost("elu") == 2 * cost("favorp m=128")
    assert cost("favor m=128") == cost("favorp m=256")                       # two columns for a projection
    assert cost("linformer rank=600") == pytest.approx(2 * 600 / 1024 * cost("exact")) and cost("uniform") == 0
    with pytest.raises(ConfigError, match="FLOPs are not known here"):
        cost("nearfar")


def test_hours_steps_and_disk_by_hand():
    """100,000 steps of 64 rows of 8192 letters: 6 FLOPs a weight and token, and the products of attention."""
    run = first("performers_trembl_concat")
    cost = recipes.cost_of(run)
    assert cost.steps == 100_000 and cost.tokens == 100_000 * 64 * 8192
    weights, products = 6 * (4 * 512**2 + 2 * 512 * 2048) + 29 * 512, 6 * 8 * 512 * 256
    flops = cost.tokens * 3 * (2 * weights + products)
    assert cost.hours == pytest.approx(flops / (312e12 * 0.3) / 3600, rel=1e-6)
    assert recipes.count("crt_glue") == 8 * 5 * 4 and recipes.count("performers_lra") == 5 * 6 * 4
    assert recipes.steps_of(first("crt_glue")) == round(3 * 392702 / 32)
    assert recipes.steps_of(first("hrf_ptb_softmax")) == round(80 * 929589 / (20 * 35))


def test_what_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="unknown recipe 'crt_glu'.*did you mean crt_glue"):
        recipes.spec_of("crt_glu")
    run = first("crt_vit_scratch")
    with pytest.raises(ConfigError, match="crt_vit_scratch needs rows"):
        recipes.steps_of(run._replace(facts=Facts()))
    with pytest.raises(ConfigError, match="known are the models of TrEMBL"):
        outline(compose(["task=uci"]), run.mechanism, Facts())


def test_numbers_are_short():
    assert list(map(recipes.short, (0.0055, 0.34, 5.1, 24, 1100, 50_000, 1e6, 76.2e6, 42.6e9))) == [
        "0.0055", "0.34", "5.1", "24", "1,100", "50,000", "1 M", "76.2 M", "42.6 G"]


def test_the_table_of_the_docs_is_the_one_that_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["recipes"])
    recipes.main()
    printed = capsys.readouterr().out
    assert printed.startswith("| recipe | runs |") and printed.count("\n| `") == len(NAMES)
    assert printed in (ROOT / "docs/recipes.md").read_text(), "paste what `make plan` prints"


