"""task=approximation: what it captures are the model's own tensors, its errors are those of their definition, and every
bad input is one clear message."""

import json
import math

import numpy as np
import pytest
import torch
from helpers.refusals import check_error

from crt_exp.attention import attention_reference, softmax_attention
from crt_exp.attention.reference import attention_matrix
from crt_exp.experiments.measure.approximation import Approximation, Synthetic
from crt_exp.experiments.measure.attention_errors import HeadErrors
from crt_exp.experiments.measure.fidelity import DocumentBench
from crt_exp.features import OPRF, GeomRF, PosRF, Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.samplers import orthogonal

transformers = pytest.importorskip("transformers")
WORDS = ("the", "cat", "dog", "sat", "ran", "on", "a", "mat", "red", "big", ".")
TEXT = "the cat sat on a mat . the big red dog ran on the mat . a dog sat"
TOKENS = len(TEXT.split())  # and [CLS], [SEP]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 16,
    "max_position_embeddings": 40,
}
SMALL = {
    "ms": [8, 32],
    "samples": 3,
    "rows": 8,
    "heads": 2,
    "d": 8,
    "scale": 1.0,
}
MODELS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(**SIZES, pad_token_id=1)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=3, n_head=4, vocab_size=16, n_positions=40)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, saved_models):
    """Tiny models of random weights, a tokenizer beside each, and texts."""
    root = tmp_path_factory.mktemp("models")
    saved_models(root, MODELS, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))
    (root / "text.txt").write_text(TEXT)
    return root


def mechanism(features="oprf", sampler="orthogonal"):
    return Mechanism.of(features=features, sampler=sampler, m=8)


# ---- the matrix


@pytest.mark.parametrize(
    "phi, causal",
    [
        (OPRF(), True),
        (PosRF(), False),
        (GeomRF(), True),
    ],
    ids=repr,
)
def test_matrix_is_attention_to_unit_vectors(phi, causal):
    x = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    y = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    noise = orthogonal(16, 8)
    params = phi.fit(Statistics.of(x, y))
    eye = torch.eye(7, dtype=torch.float64).expand(2, 4, 7, 7)
    matrix = attention_matrix(x, y, phi, noise, params, causal=causal)
    expected = attention_reference(x, y, eye, phi, noise, params, causal=causal)
    torch.testing.assert_close(matrix, expected)
    actual = attention_matrix(x, y, causal=causal)
    expected = softmax_attention(x, y, eye, causal=causal)
    torch.testing.assert_close(actual, expected)
    rows = torch.tensor([0, 3])
    actual = attention_matrix(x, y, phi, noise, params, causal=causal, rows=rows)
    torch.testing.assert_close(actual, matrix[:, :, rows])
    if not phi.fitted:
        grouped = attention_matrix(
            x, y[:, :2], phi, noise, params
        )  # heads 0, 1 and 2, 3 share keys
        expected = attention_matrix(x, y[:, [0, 0, 1, 1]], phi, noise, params)
        torch.testing.assert_close(grouped, expected)


# ---- what is captured


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_captured_tensors_give_the_models_own_attention(folder, name):
    source = DocumentBench(str(folder / name), str(folder / "text.txt"), length=TOKENS)
    [layers] = source.calls
    assert len(layers) == len(source.exact[0].states) == 3
    assert layers[0].causal == (name in ("gpt2", "llama"))
    given = []
    end = {"gpt2": "attn.c_proj", "llama": "o_proj"}.get(name, "attention.output.dense")
    ends = [part for path, part in source.model.named_modules() if path.endswith(end)]

    def record(_, args):
        given.append(args[0])

    hooks = [part.register_forward_pre_hook(record) for part in ends]
    hidden = source.run(source.rows).hidden_states[1:]
    for hook in hooks:
        hook.remove()
    assert len(given) == 3
    for layer, own in zip(layers, given):
        actual = layer.output.transpose(1, 2).flatten(2)
        torch.testing.assert_close(actual, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(list(hidden), source.exact[0].states, rtol=1e-4, atol=1e-5)
    assert not any("swapped" in path for path, _ in source.model.named_modules())


def test_synthetic_queries_have_the_requested_scale():
    for scale in (0.5, 2.0):
        layer = Synthetic(256, 4, 16, scale).layers(0, 0)[0]
        actual = [layer.x.std() * 2, layer.y.std() * 2]
        assert actual == pytest.approx([scale] * 2, rel=0.03)


# ---- the records


def test_records_resume_and_hold_what_they_say():
    task = Approximation(**SMALL, length=64)
    other = Approximation(**SMALL, length=64)
    whole = list(task.records(mechanism(), 3))
    assert [r["split"] for r in whole] == ["layer", "layer", "test"]
    assert whole[-1]["final"]
    assert list(other.records(mechanism(), 3, whole[:1])) == whole[1:]
    actual = json.loads(json.dumps(whole, allow_nan=False))
    assert actual == whole
    few, many = whole[:2]
    assert many["output_error"] < few["output_error"]
    assert many["matrix_error"] < few["matrix_error"]
    assert whole[-1]["output_error"] == many["output_error"]
    with pytest.raises(ValueError, match="attention=exact"):
        next(task.records(Mechanism.of("exact"), 0))


def test_uniform_attention_stands_beside_every_error_and_where_it_wins_that_is_told():
    weak = Approximation(**SMALL | {"ms": [2, 1024], "samples": 1}, length=64)
    records = list(weak.records(mechanism(), 0))
    few, many, last = records
    layer = weak.layers(0, 0)[0]
    mean = layer.v.mean(2, keepdim=True).expand_as(layer.v)
    error = (mean - layer.output).square().sum((-2, -1))
    expected = (error / layer.output.square().sum((-2, -1))).sqrt().mean()
    assert few["uniform_error"] == many["uniform_error"] == last["uniform_error"]
    assert few["uniform_error"] == pytest.approx(expected.item(), rel=1e-5)
    assert many["output_error"] < few["uniform_error"] < few["output_error"]
    summary = weak.summary(records)
    assert "WARNING: 1 layers are further from exact than uniform attention with m = 2" in summary
    assert "of uniform attention" in summary.splitlines()[0]
    assert not [*weak.warnings([many])]


# ---- the command


def test_command(folder, typed, tmp_path):
    def run(*args):
        return typed(
            "task=approximation",
            "logger=none",
            f"hydra.run.dir={tmp_path}/run",
            f"task.model={folder}/llama",
            *args,
        )

    check_error(run(), "task.model and task.text: expected both")
    assert not (tmp_path / "run").exists()
    code, out, err = run(
        f"task.text={folder}/text.txt",
        f"task.length={TOKENS}",
        "task.ms=[4,16]",
        "task.samples=2",
        "features=pos",
        "sampler=hadamard",
    )
    assert code == 0, err
    assert "relative error of the output" in out
    assert "approximate sampler" in out
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["final"]
    actual = len([r for r in lines if r["split"] == "layer"])
    assert actual == 2 * 3


# ---- the reports


def head_errors(text, ms, turn=0.3, **sizes):
    options = {"length": 256, "d": 16, "sum": 8, "samples": 3} | sizes
    task = HeadErrors(ms=ms, turn=turn, **options)
    records = task.records(Mechanism.parse(text), 0)
    return [record["mse"] for record in records]


def test_errors_of_heads_are_over_those_of_uniform_attention():
    """With few features the mean of V is nearer; with many, and where attention matters, the map is."""
    few, many = head_errors("oprf", [2, 4096], sum=16)
    assert np.min(few) > np.max(many)
    assert np.max(many) < 1
    actual = head_errors("uniform", [8])
    expected = [pytest.approx([1.0] * 3)]
    assert actual == expected


def test_matched_queries_lie_near_the_keys_at_their_positions():
    cos = {}
    for turn in (None, 0.3):
        layer = Synthetic(512, 2, 16, 1.0, turn).layers(0, 0)[0]
        x = layer.x[0]
        y = layer.y[0]
        cos[turn] = torch.cosine_similarity(x, y, -1).mean().item()
        length = x.square().sum(-1).mean().item()
        assert length == pytest.approx(4.0, rel=0.1)
    assert cos[None] == pytest.approx(0, abs=0.05)
    actual = cos[0.3]
    expected = math.cos(0.3)
    assert actual == pytest.approx(expected, abs=0.03)
