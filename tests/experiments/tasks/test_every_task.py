"""Properties of every trained task on the command line: the run, its resume, where weights go, what is refused."""

import csv
import re
from collections import defaultdict
from functools import partial
from itertools import chain, count, islice

import pytest
import torch
import transformers
from helpers.covering import slow
from helpers.refusals import check_error, check_refused
from helpers.small_bert import write_glue, write_model, write_text, write_words
from helpers.small_images import write_images
from helpers.small_speech import write_digits
from helpers.stopping import stopped_and_continued
from helpers.task_options import SHORT, TASKS, composed_task
from helpers.toy import records
from omegaconf import OmegaConf

from crt_exp import swap_attention, train
from crt_exp.experiments.data import DataError, warn
from crt_exp.experiments.data.plan import Limit
from crt_exp.experiments.data.sources import select
from crt_exp.experiments.models import conformer_transducer, language, lstm, vision
from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.configuration import load_task
from crt_exp.experiments.tasks.base import Plan, Reader
from crt_exp.experiments.tasks.mlm import MaskedModel
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError, import_object

KEPT = [name for name in TASKS if name != "lra"]  # task=lra keeps no model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_text(root / "text.txt", 300)
    write_glue(root / "MNLI", "mnli")
    write_model(root / "bert")
    write_images(root / "images")
    write_digits(root / "digits")
    write_words(root / "words.txt")
    return root


@pytest.fixture
def run(typed, data, tmp_path, monkeypatch, one_thread):
    """Runs the command line of a task with further words, which take the place of its own, and without some."""
    monkeypatch.delenv("CRT_DATA", raising=False)
    warn.cache_clear()

    def go(name, *more, directory="run", root=tmp_path, without=("-",), processes=1):
        given = {word.split("=")[0].lstrip("+") for word in more}
        own = []
        for word in [*TASKS[name], *SHORT]:
            if word.split("=")[0].lstrip("+") not in given:
                own.append(word)
        own = [word for word in own if not word.startswith(without)]
        words = [word.replace("DATA", str(data)) for word in [*own, *more]]
        return typed(*words, f"hydra.run.dir={root / directory}", processes=processes)

    return go


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def finished(run, folder):
    """The directory of the task's short run, made when it is first asked for."""

    def go(name):
        if not (folder / name).exists():
            code, out, err = run(name, directory=name, root=folder)
            assert code == 0, err
            assert err == "", err
            assert f"[{folder / name}]" in out, err
        return folder / name

    return go


def same_run(one, two):
    assert records(one) == records(two)
    for file in (one / "model").glob("*.safetensors"):
        here = checkpoint.load_tensors(file)
        there = checkpoint.load_tensors(two / "model" / file.name)
        assert here.keys() == there.keys(), file.name
        for key in here:
            assert torch.equal(here[key], there[key]), file.name


# ---- the run ---------------------------------------------------------------------------------------------------------


def of_transformers(auto, directory):
    """Its projections are those of the folder, whatever the seed."""
    return swap_attention(auto.from_pretrained(directory / "model"), "favorpp", m=8, seed=7)


def of_ptb(directory):
    kept = lstm.load(directory, "run")
    return lstm.LSTMLanguageModel(kept.body, None, kept.temperature)


def of_speech(directory):
    kept, tensors = conformer_transducer.load(directory, "run")
    return kept.build(tensors)


LOAD = dict.fromkeys(KEPT, lambda directory: language.load(directory, "run").build()) | {
    "mlm": lambda directory: MaskedModel(
        of_transformers(transformers.AutoModelForMaskedLM, directory)
    ),
    "causal": lambda directory: MaskedModel(
        of_transformers(transformers.AutoModelForCausalLM, directory)
    ),
    "glue": partial(of_transformers, transformers.AutoModelForSequenceClassification),
    "mae": partial(of_transformers, transformers.AutoModelForPreTraining),
    "ptb": of_ptb,
    "librispeech": of_speech,
    "imagenet": lambda directory: vision.load(directory).model,
}


@pytest.mark.parametrize("name", TASKS)
def test_kept_model_gives_the_recorded_metrics(name, finished, data):
    """Metrics of the last record, of the model that is loaded anew, in batches of another size."""
    actual = records(finished(name))
    assert actual[-1]["final"]
    assert actual[-1]["step"] == 6
    assert {record["split"] for record in actual} > {"train"}
    if name in LOAD:
        task = load_task(finished(name))
        with torch.no_grad():
            metrics = task.evaluate(
                LOAD[name](finished(name)).eval(), actual[-1]["split"], Reader(task, Plan(5))
            )
        assert metrics.keys() <= actual[-1].keys()
        assert task.metric in metrics
        for key, value in metrics.items():
            assert actual[-1][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize(
    "name, more",
    [
        *[(name, []) if name in ("ptb", "trembl") else slow(name, []) for name in TASKS],
        slow("ptb", ["task.softmax=full", "trainer.accumulate=2"]),
        slow("trembl", ["attention=reformer", "attention.chunk=8", "attention.buckets=4"]),
        slow(
            "imagenet",
            [
                "task.augment.policy=rand-m9-mstd0.5-inc1",
                "task.augment.erase=0.5",
                "task.augment.mixup=0.8",
                "task.augment.cutmix=1.0",
                "task.drop_path=0.2",
                "task.layer_decay=0.7",
                "task.workers=2",
            ],
        ),
        slow("librispeech", ["+task.sizes.norm=batch", "task.workers=2"]),
    ],
    ids=str,
)
def test_stopped_run_continues_to_the_same_numbers(
    name, more, finished, run, tmp_path, monkeypatch, interruptible
):
    """Bit for bit: in the middle of an epoch, dropout, statistics, tables of samplers and augmentation included."""
    without = ("-",)
    if "task.softmax=full" in more:
        without = ("attention", "features")
    elif "attention=reformer" in more:
        without = ("features",)
    run = partial(run, name, without=without)
    whole = tmp_path / "run" if more else finished(name)
    if more:
        assert run(*more)[0] == 0
    task = import_object(OmegaConf.load(whole / "config.yaml").task["_target_"])
    stopped_and_continued(run, monkeypatch, task, 5, *more)
    same_run(whole, tmp_path / "stopped")


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_micro_batches_and_processes_give_the_same_losses(processes, finished, run, tmp_path):
    """Batches of another number of letters, in micro-batches or processes: losses are means over all of them, and
    statistics and projections do not change within a step."""
    words = ["task.dropout=0", "attention.redraw_every=2", "trainer.batch=16"]
    assert run("trembl", *words)[0] == 0
    code, _, err = run(
        "trembl",
        *words,
        f"trainer.accumulate={4 // processes}",
        directory="parts",
        processes=processes,
    )
    assert code == 0, err
    whole = [record["loss"] for record in records(tmp_path / "run")]
    parts = [record["loss"] for record in records(tmp_path / "parts")]
    assert parts == pytest.approx(whole, rel=1e-4)


def test_histograms_hold_every_query_and_every_key(finished):
    rows = [*csv.DictReader((finished("ptb") / "lengths.csv").read_text().splitlines())]
    assert sum(int(r["queries"]) for r in rows) == 60
    assert sum(int(r["keys"]) for r in rows) == 12
    assert (finished("ptb") / "lengths.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "args, place",
    [
        (
            ["trainer.lr=1e12"],
            "step 2: no loss; first not finite: bert.encoder.layer.0.attention.self.",
        ),
        (["trainer.lr=1e12", "trainer.steps=1"], "step 1: evaluation on dev; first"),
    ],
    ids=str,
)
def test_divergence_that_a_fit_or_a_metric_meets_first(args, place, run):
    """Exit code 3, step and layer, as where the loss shows it."""
    check_error(run("glue", *args, "trainer.warmup=0"), place, "checkpoint", code=3)


def trained(task, attention, steps, lr, batch=10):
    """Without the runner."""
    torch.manual_seed(0)
    model = task.build(Mechanism.parse(attention)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    epochs = (task.batches("train", Plan(batch, epoch=epoch)) for epoch in count())
    for step, rows in enumerate(islice(chain.from_iterable(epochs), steps)):
        optimizer.zero_grad()
        task.loss(model, rows).backward()
        optimizer.step()
        task.updated(model, step + 1)
    return model.eval()


FAVORPP = "favorpp m=8"
LISTS = [
    "+task.rules.longest=5",
    "+task.rules.shortest=3",
    "+task.rules.depth=2",
    "+task.rules.train=300",
    "+task.rules.test=60",
]
LEARNED = {  # attention, options, steps, what is better
    "trembl": ("exact", ["task.dropout=0"], 120, lambda m: m["loss"] < m["unigram_loss"] - 0.2),
    "lra": (
        FAVORPP,
        ["task.dropout=0", *LISTS],
        100,
        lambda m: m["accuracy"] > m["majority_accuracy"] + 0.1,
    ),
    **{
        f"ptb {name}": (
            FAVORPP,
            [f"task.softmax={name}", "task.dropout=0"],
            80,
            lambda m: m["loss"] < m["unigram_loss"],
        )
        for name in ("full", "uniform", "log_uniform", "unigram", "exact", "features", "quadratic")
    },
    "mlm": (FAVORPP, [], 100, lambda m: m["perplexity"] < 50),
    "glue": (
        FAVORPP,
        ["task.dataset=sst2", "task.data_dir=DATA/SST-2"],
        72,
        lambda m: m["accuracy"] > 0.9,
    ),
    "imagenet": (FAVORPP, [], 60, lambda m: m["accuracy"] > 0.6),
    "mae": (
        "exact",
        ["task.data_dir=null", "task.size=null", "task.sizes.patch=null"],
        150,
        lambda m: m["loss"] < 0.9,
    ),
}


FAST = ("trembl", "lra", "ptb full", "ptb log_uniform", "ptb quadratic", "ptb features")


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")
@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in LEARNED])
def test_training_beats_the_baseline(name, data, one_thread):
    attention, more, steps, better = LEARNED[name]
    write_glue(data / "SST-2", "sst2")
    given = {word.split("=")[0] for word in more}
    words = [*[word for word in TASKS[name.split()[0]] if word.split("=")[0] not in given], *more]
    task = composed_task([word.replace("DATA", str(data)) for word in words])
    model = trained(
        task,
        attention,
        steps,
        lr={"glue": 2e-3, "imagenet": 2e-3, "ptb": 2e-2}.get(name.split()[0], 1e-2),
    )
    with torch.no_grad():
        metrics = task.evaluate(model, task.validation, Reader(task))
    assert better(metrics), metrics


def read(task, limit):
    plan = Plan(2, limit=limit and Limit(limit))
    batches = list(islice(Reader(task, plan).batches(task.validation), 1))
    return batches, limit is not None and plan.limit.partial


@pytest.mark.parametrize("name", TASKS)
def test_a_partial_evaluation_does_not_read_the_first_rows(name, data, one_thread):
    words = [word.replace("DATA", str(data)) for word in TASKS[name]]
    words += ["task.batch_seconds=4"] if name == "librispeech" else []  # several batches
    task = composed_task(words)
    (sample, is_part), (again, _), (first, is_whole) = (read(task, n) for n in (1, 1, None))
    assert is_part
    assert not is_whole
    assert str(sample) == str(again) != str(first)


# ---- where weights go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trembl", slow("mlm"), slow("imagenet"), slow("mae")])
def test_a_run_of_the_same_attention_keeps_weights_and_projections(name, finished, run, tmp_path):
    code, _, err = run(
        name, "trainer.steps=0", "seed=7", f"task.init={finished(name)}", without=("task.size",)
    )
    assert code == 0, err
    for file in (tmp_path / "run" / "model").glob("*.safetensors"):
        one = checkpoint.load_tensors(finished(name) / "model" / file.name)
        two = checkpoint.load_tensors(file)
        for key in one:
            assert torch.equal(one[key], two[key])


def test_another_attention_is_refused_and_its_weights_alone_are_not(finished, run, tmp_path):
    """The keys that differ are named, and the way that the message names works."""
    before = finished("mlm")
    glue = ["trainer.steps=0", "attention=favorp", "features.m=16"]
    check_error(
        run("glue", *glue, f"task.init={before}", directory="wrong", without=("task.model",)),
        "features.m (it was 8, now 16)",
        f"task.init=uptrain task.model={before}/model",
    )
    assert not (tmp_path / "wrong").exists()
    code, _, err = run("glue", *glue, "task.init=uptrain", f"task.model={before}")
    assert code == 0, err


@torch.no_grad()
@pytest.mark.parametrize("name", ["mlm", "trembl", "librispeech", "imagenet"])
def test_weights_of_exact_attention_under_features(name, data, tmp_path, one_thread):
    """All weights are those of the exact model, with calibrated statistics; more features come closer to it."""
    words = [word.replace("DATA", str(data)) for word in TASKS[name]]
    exact = composed_task(words)
    model = exact.build(Mechanism.of("exact")).eval()
    if name != "librispeech":
        for parameter in model.parameters():
            parameter.mul_(1.5)  # sharp enough for attention to matter
    exact.export(model, model.state_dict(), tmp_path)
    given = {"mlm": ["task.init=uptrain", f"task.model={tmp_path / 'model'}"]}.get(
        name, [f"task.init={tmp_path}"]
    )
    words = [word for word in words if name == "librispeech" or ".sizes." not in word]
    task = composed_task([*words, *given])
    batch = next(
        iter(Reader(exact, Plan(8)).batches("validation" if name != "imagenet" else "val"))
    )
    losses = {"exact": float(exact.loss(model, batch))}
    for m in (4, 512):
        actual = task.build(Mechanism.of("favorpp", m=m)).eval()
        state = actual.state_dict()
        for key, tensor in model.state_dict().items():
            assert torch.equal(state[key], tensor)
        losses[m] = float(task.loss(actual, batch))
    assert 0 < abs(losses[512] - losses["exact"]) < abs(losses[4] - losses["exact"]), losses


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, args, words",
    [
        (
            "mlm",
            ["+task.sizes.hidden_sise=3"],
            ["hidden_sise", "did you mean task.sizes.hidden_size?"],
        ),
        (
            "causal",
            ["task.vocabulary=vocab.txt"],
            ["task.vocabulary: expected null with task.causal=true"],
        ),
        (
            "glue",
            ["task.model=google-bert/bert-base-uncased"],
            ["hf download google-bert/bert-base-uncased --local-dir"],
        ),
        ("ptb", ["task.softmax=unigram"], ["does not use attention=favorpp"]),
        (
            "ptb",
            ["task.corpus=ptb", "task.source=files"],
            ["CRT_DATA is not set", "crt_exp data fetch ptb"],
        ),
        ("books", ["task.text=null"], ["set CRT_DATA=DIR", "fetch wikitext2"]),
        (
            "trembl",
            ["task.generated.shortest=20"],
            ["task.generated.shortest=20: expected at most longest=16"],
        ),
        ("pixels", ["task.size=16"], ["task.size=16: image 0 has 8 x 8 pixels"]),
        ("recall", ["task.pairs=300"], ["task.pairs=300: expected at most task.symbols=8"]),
        ("lra", ["+task.rules.depht=3"], ["unknown key 'task.rules.depht'", "depth"]),
        ("imagenet", ["task.size=13"], ["error: task.size=13: expected a multiple", "4 pixels"]),
        (
            "librispeech",
            ["task.max_seconds=0.1"],
            ["train: no utterances; expected at least one"],
        ),
    ],
    ids=str,
)
def test_what_is_refused(name, args, words, run, tmp_path):
    check_refused(run(name, *args), words, tmp_path / "run")


# ---- data that stand in for others, and data of one class ------------------------------------------------------------


@pytest.fixture
def untrained(typed, monkeypatch):
    """The lines that a run prints whose training and evaluation are left out."""

    def run(*args):
        monkeypatch.setattr(train, "run_training", lambda *_: [defaultdict(float, split="test")])
        code, out, err = typed(*args, "logger=none", "trainer.steps=0")
        assert code == 0, err
        return out.splitlines()

    return run


@pytest.mark.parametrize(
    "task", ["ptb", "imagenet", "mae", "pixels", "trembl", "books", "librispeech"]
)
def test_stand_ins_are_named_first_and_last(task, untrained, data, tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text("a bird sings , and a bird flies .\n" * 200)
    options = {
        "books": [f"task.data_dir={tmp_path}", "task.vocabulary_size=300"],
        "trembl": [word for word in TASKS["trembl"] if "generated" in word],
        "librispeech": [
            "task.corpus=fsdd",
            f"task.data_dir={data / 'digits'}",
            "task.strings.train=24",
        ],
    }
    first, last = untrained(f"task={task}", *options.get(task, []))
    actual = re.fullmatch(
        r"no .+ here: .+ \(task\.\S+=\S+ after `python -m crt_exp data fetch (\S+)`\)", first
    )
    assert select(actual[1])
    assert f"; {first}  [" in last


def test_data_of_the_name_are_no_stand_in(untrained, data):
    (line,) = untrained("task=imagenet", f"task.data_dir={data / 'images'}")
    assert "here:" not in line


@pytest.mark.parametrize("name", ["glue", "imagenet"])
def test_one_class_is_refused(name, data, tmp_path):
    """Any model is right about examples of a single class."""
    file = write_glue(tmp_path / "glue", "mnli") / "train.tsv"
    head, *rows = file.read_text().splitlines()
    neutral = [row for row in rows if row.endswith("\tneutral")]
    file.write_text("\n".join([head, *neutral]) + "\n")
    write_images(tmp_path / "imagenet", classes=1)
    words = []
    for word in TASKS[name]:
        if "data_dir" not in word:
            words.append(word.replace("DATA", str(data)))
    with pytest.raises((ConfigError, DataError), match="one class only"):
        composed_task([*words, f"task.data_dir={tmp_path / name}"])
