"""task=mlm, task=books and task=ptb: blocks, masks and columns, losses by their definitions, what does not fit."""

import numpy as np
import pytest
import torch
import transformers
from helpers.small_bert import write_text, write_words
from helpers.task_options import composed_task, options_of
from torch.nn import functional as F
from torch.testing import assert_close

from crt_exp.experiments import infer
from crt_exp.experiments.data import DataError, corpora
from crt_exp.experiments.data.text import IGNORED, running_blocks
from crt_exp.experiments.models import lstm
from crt_exp.experiments.tasks.base import Plan, Reader
from crt_exp.experiments.tasks.mlm import MLM, MaskedModel, following
from crt_exp.experiments.tasks.ptb import PTB
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
MASKED = options_of("mlm") | {
    "source": "files",
    "sizes": SIZES,
    "vocabulary_size": 300,
    "block": 16,
    "cache_dir": None,
}
WORDS = options_of("ptb") | {"width": 16, "dropout": 0.0, "bptt": 7, "eval_columns": 4}
WORDS["sampling"] |= {"negatives": 5, "rebuild_every": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_text(root / "text.txt", 300)
    write_words(root / "words.txt")
    return root


@pytest.fixture
def mlm(files, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    return lambda **options: MLM(**MASKED | {"text": str(files / "text.txt")} | options)


@pytest.fixture
def ptb(files, monkeypatch, one_thread):
    monkeypatch.delenv("CRT_DATA", raising=False)
    return lambda **options: PTB(**WORDS | {"corpus": str(files / "words.txt")} | options)


# ---- task=mlm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_held_out_blocks_are_not_trained_on(causal, mlm, files):
    """They are the last ones of the text; masks of an evaluation are the same each time, others in every epoch."""
    task = mlm(causal=causal)
    train = task.splits["train"]
    validation = task.splits["validation"]
    end = "\n" if causal else ""
    whole = running_blocks(files / "text.txt", task.tokenizer, train.shape[1], None, end)
    assert len(validation) == -(-len(whole) // 50)
    assert task.test is None
    actual = np.concatenate([train, validation])
    assert np.array_equal(actual, whole)

    def labels(split, **plan):
        return [batch["labels"] for batch in task.batches(split, Plan(4, **plan))]

    assert all(map(torch.equal, labels("validation"), labels("validation")))
    actual = labels("train", epoch=0)[0]
    expected = labels("train", epoch=1)[0]
    assert not torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["Bert", "DistilBert", "Albert", "Roberta", "Electra"])
def test_logits_of_the_masked_tokens_alone(kind):
    """Equal to the whole model's at those places, with equal gradients."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "embedding_size": 16,
    }
    if kind == "DistilBert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    ids = torch.randint(5, 50, (3, 9))
    chosen = torch.rand(3, 9) < 0.3
    labels = torch.where(chosen, ids, -100)
    whole = model(input_ids=ids, labels=labels)
    whole.loss.backward()
    expected = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            expected[name] = p.grad.clone()
    model.zero_grad()
    logits, kept = MaskedModel(model)(ids, labels)
    assert_close(logits, whole.logits[chosen])
    F.cross_entropy(logits, kept).backward()
    for name, gradient in expected.items():
        assert_close(model.get_parameter(name).grad, gradient, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_compiles_without_graph_breaks(causal, mlm):
    task = mlm(causal=causal)
    model = task.build(Mechanism.of("favorpp", m=16)).eval()
    batch = next(task.batches("train", Plan(4)))
    expected, _ = model(**batch)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual, _ = compiled(**batch)
    assert_close(actual, expected)


def test_a_decoder_predicts_the_next_token(tmp_path, mlm):
    """Architecture and tokenizer of task.model, random weights; the loss is the mean over all next tokens."""
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    actual = following(ids).tolist()
    assert actual == [[4, 5, IGNORED], [7, 8, IGNORED]]
    mlm(causal=True).tokenizer.save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=300, num_key_value_heads=1, pad_token_id=None, **SIZES
    )
    config.save_pretrained(tmp_path)
    task = mlm(causal=True, model=str(tmp_path))
    model = task.build(Mechanism.of("exact")).eval()
    batch = next(iter(Reader(task, Plan(4)).batches("validation")))
    logits, labels = model(**batch)
    whole = model.model(batch["input_ids"], labels=batch["input_ids"])
    expected = whole.logits[:, :-1].flatten(0, 1)
    assert_close(logits, expected)
    actual = task.loss(model, batch)
    assert_close(actual, whole.loss)
    F.cross_entropy(logits, labels).backward()
    assert type(model.model).__name__ == "LlamaForCausalLM"
    for p in model.parameters():
        assert p.grad is not None


def test_longer_blocks_go_on_from_a_model(mlm, files, tmp_path):
    """Its weights and tokenizer; causal layers of features get statistics of the training text at the swap."""
    first = mlm(causal=True)
    model = first.build(Mechanism.of("exact"))
    first.export(model, model.state_dict(), tmp_path)
    given = {
        "causal": True,
        "model": str(tmp_path / "model"),
        "init": "uptrain",
    }
    task = mlm(block=40, **given)
    assert (
        running_blocks(files / "text.txt", task.tokenizer, 40)[: len(task.splits["train"])]
        == task.splits["train"]
    ).all()
    actual = task.build(Mechanism.of("exact")).state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(actual[key], tensor)
    cases = [
        (0, lambda weights: max(weights) == 0),
        (2, lambda weights: min(weights) > 0),
    ]
    for count, check in cases:
        layers = mlm(calibration=count, **given).build(Mechanism.of("favorpp", m=8)).modules()
        assert check(
            [float(part.running_weight) for part in layers if hasattr(part, "running_weight")]
        )
    with pytest.raises(ConfigError, match="expected at most 512"):
        mlm(block=600, **given)


def test_repeated_rows_say_the_first_half_again(mlm):
    """With repeat = 1 each row's second half is its first one from some place on; which ones depends on the seed."""
    task = mlm(causal=True, repeat=1.0, block=15)
    plain = mlm(causal=True, block=15)
    batch = next(task.batches("train", Plan(40)))
    whole = next(plain.batches("train", Plan(40)))["input_ids"]
    ids = batch["input_ids"]
    starts = set()
    for row in ids:
        starts.add(
            int(next(s for s in range(7) if torch.equal(row[7:], row[:7].roll(-s).repeat(2)[:8])))
        )
    assert len(starts) > 3
    actual = batch["labels"][:, :-1]
    assert torch.equal(actual, ids[:, 1:])
    assert torch.equal(ids[:, :7], whole[:, :7])
    some = next(mlm(causal=True, repeat=0.3, block=15).batches("train", Plan(40)))["input_ids"]
    assert 20 <= (some == whole).all(1).sum() <= 36


@pytest.mark.parametrize(
    "options, words",
    [
        ({"text": None}, "(?s)wiki.train.tokens.*CRT_DATA is not set.*fetch wikitext2"),
        (
            {"sizes": SIZES | {"hidden_act": "abc"}},
            "'hidden_act': 'abc'.*transformers cannot build the model",
        ),
        ({"repeat": 0.5}, "task.repeat"),
    ],
    ids=str,
)
def test_options_of_mlm_that_do_not_fit(options, words, mlm):
    with pytest.raises((ConfigError, DataError), match=words):
        mlm(**options).build(Mechanism.of("exact"))


# ---- task=books ------------------------------------------------------------------------------------------------------


def books(text, *words):
    sizes = []
    for key, value in {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}.items():
        sizes.append(f"+task.sizes.{key}={value}")
    return composed_task(
        [
            "task=books",
            f"task.text={text}",
            "task.vocabulary_size=300",
            "task.max_length=16",
            "task.cache_dir=null",
            *sizes,
            *words,
        ]
    )


@torch.no_grad()
@pytest.mark.parametrize("rows", ["packed", "apart"])
def test_perplexity_of_a_word_is_that_of_its_tokens(rows, files):
    task = books(files / "text.txt", f"task.rows={rows}", "task.evaluated=8")
    found = task.evaluate(task.build(Mechanism.of("exact")).eval(), "test", Reader(task))
    actual = found["word_perplexity"]
    expected = np.exp(found["loss"] * found["tokens_per_word"])
    assert actual == pytest.approx(expected, rel=1e-6)
    assert 7 * 16 < found["tokens"] <= 8 * 16 or rows == "apart"  # the last row is a part of one


def test_masked_tokens_are_those_of_both_sides(files):
    """A bidirectional model predicts masked tokens, of which the end of a text is none."""
    task = books(files / "text.txt", "task.direction=bidirectional", "task.rows=apart")
    batches = []
    for split in ("train", "train", "test"):
        batches.append(next(iter(task.batches(split, Plan(64, seed=1)))))
    for batch in batches:
        chosen = batch["labels"] != IGNORED
        assert 0.1 < chosen[batch.get("key_mask", chosen | True)].float().mean() < 0.25
        actual = (batch["tokens"][chosen] == task.predictable).float().mean()
        assert actual > 0.6
        assert not (batch["labels"] == task.end).any()
        assert (batch["tokens"][~chosen] < task.predictable).all()
    assert torch.equal(batches[0]["labels"], batches[1]["labels"])


def test_books_are_written_with_the_tokenizer_of_the_run(files, tmp_path, capsys):
    """A run that goes on from it on another text keeps its vocabulary; a bidirectional one writes no text."""
    for words in ([], ["task.direction=bidirectional"]):
        task = books(files / "text.txt", *words)
        model = task.build(Mechanism.of("favorp", m=8))
        task.export(model, model.state_dict(), tmp_path)
        code = infer.main([f"run={tmp_path}", "prompt=a bird", "n=2", "length=12"])
        actual = (code, capsys.readouterr().out.count("a bird") >= 2)
        expected = (2, False) if words else (0, True)
        assert actual == expected
        actual = books(files / "words.txt", f"task.init={tmp_path}", *words).vocabulary
        assert actual == task.vocabulary
    with pytest.raises(ConfigError, match="trained with other symbols; expected"):
        books(files / "text.txt", f"task.init={tmp_path}")
    with pytest.raises(DataError, match="task.max_length=20000.*has only"):
        books(files / "text.txt", "task.max_length=20000")


# ---- task=ptb --------------------------------------------------------------------------------------------------------


def built(task, **options):
    return task.build(Mechanism.of(features="oprf", m=8, **options))


def test_the_loss_of_an_epoch_is_that_of_the_text_read_at_once(ptb):
    """The state goes from batch to batch and begins anew with an epoch; micro-batches have their own."""
    task = ptb()
    model = built(task)
    cases = [(Plan(4), 1), (Plan(4, micro=2), 2)]
    for plan, parts in cases:
        for _ in range(2):
            batches = [*task.batches("train", plan)]
            losses = [task.loss(model, batch).detach() for batch in batches]
            sizes = [batch["labels"].numel() for batch in batches]
        mean = sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)
        whole = corpora.columns(task.text.parts["train"], 4, task.text.eos, whole=False)
        outputs, _ = model.body(torch.from_numpy(whole[0]))
        expected = F.cross_entropy(
            (outputs @ model.body.embedding.weight.T).flatten(0, 1),
            torch.from_numpy(whole[1]).flatten(),
        ).detach()
        assert_close(
            mean,
            expected,
        )
        actual = task.state_dict().keys()
        expected = set("01"[:parts])
        assert actual == expected
        assert len(batches) == parts * task.epoch_steps(plan)
        task.load_state_dict({})


def test_metrics_do_not_depend_on_the_batches_they_are_computed_in(ptb):
    task = ptb()
    other = ptb(bptt=50)
    model = built(task).eval()
    with torch.no_grad():
        expected = task.evaluate(model, "validation", Reader(task))
        actual = other.evaluate(model, "validation", Reader(other, Plan(3)))
    assert actual == pytest.approx(expected, rel=1e-6)
    assert actual["words"] == 60


def test_processes_share_columns(ptb):
    """In an evaluation each word is in one process; in training they read the micro-batches of one."""
    task = ptb(eval_columns=5)
    parts = [[*task.batches("test", Plan(1, rank=rank, world=3))] for rank in range(3)]
    rows = []
    for part in parts:
        rows.append(torch.cat([batch["labels"] for batch in part], 1))
    joined = torch.cat([row.flatten() for row in rows])
    actual = joined[joined != IGNORED].tolist()
    expected = task.text.parts["test"].tolist()
    assert actual == expected
    actual = [len(row) for row in rows]
    assert actual == [1, 2, 2]
    actual = [*ptb(eval_columns=1).batches("test", Plan(1, rank=0, world=2))]
    assert actual == []
    halves = []
    for rank in (0, 1):
        halves.append([*ptb().batches("train", Plan(4, rank=rank, world=2))])
    both = []
    for pair in zip(*halves):
        for batch in pair:
            both.append(batch)
    for one, two in zip(ptb().batches("train", Plan(4, micro=2)), both, strict=True):
        assert torch.equal(one["tokens"], two["tokens"])
        assert torch.equal(one["labels"], two["labels"])


def test_lengths_and_temperature_of_the_loss(ptb):
    lengths = {"queries": 0.3, "keys": 0.7}
    task = ptb(temperature=0.5, lengths=lengths)
    model = built(task)
    batch = next(task.batches("train", Plan(4)))
    outputs = model.body(batch["tokens"])[0].flatten(0, 1)
    e = model.body.embedding.weight
    cost = (
        0.3 * (outputs.norm(dim=1) - 1).square().mean() + 0.7 * (e.norm(dim=1) - 1).square().mean()
    )
    expected = F.cross_entropy(2 * outputs @ e.T, batch["labels"].flatten()) + cost
    actual = task.loss(model, batch)
    assert_close(actual, expected)
    alone = model.eval()(batch["tokens"], batch["labels"])
    actual = alone.loss.float() / len(outputs)
    assert_close(actual, (expected - cost))
    assert_close(alone.lengths, outputs.norm(dim=1))


def test_a_model_is_continued_with_sampled_negatives(ptb, tmp_path):
    task = ptb()
    model = task.build(Mechanism.of("exact"))
    lstm.save_model(model.body, task.text.words, 1.0, model.body.state_dict(), tmp_path)
    actual = (
        ptb(init=str(tmp_path), softmax="unigram").build(Mechanism.of("exact")).body.state_dict()
    )
    for name, tensor in model.body.state_dict().items():
        assert torch.equal(actual[name], tensor)
    cases = [
        {"width": task.width + 1},
        {"layers": task.layers + 1},
        {"temperature": 0.5},
    ]
    for other in cases:
        with pytest.raises(ConfigError, match="task.init=.*other words or sizes"):
            ptb(init=str(tmp_path), **other).build(Mechanism.of("exact"))


def test_texts_and_runs_that_are_not_of_ptb(ptb, tmp_path):
    cases = [
        ("train", "a b\n"),
        ("valid", "a\n"),
        ("test", "a c\n"),
    ]
    for part, text in cases:
        (tmp_path / f"ptb.{part}.txt").write_text(text)
    with pytest.raises(DataError, match="'c' and <unk> are not in the training text"):
        ptb(corpus="ptb", data_dir=str(tmp_path))
    (tmp_path / "config.json").write_text('{"kind": "other"}')
    with pytest.raises(DataError, match="run=.*expected a run of task=ptb"):
        lstm.load(tmp_path, "run")
    with pytest.raises(ConfigError, match="task.softmax=unigram: not supported with trainer=fsdp"):
        ptb(softmax="unigram").check_shards()
