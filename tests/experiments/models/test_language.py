"""The sequence model and the encoders of transformers: properties with every attention, decoding, saved folders."""

import json

import pytest
import torch
import transformers
from helpers.covering import in_turn
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp.experiments.data import DataError
from crt_exp.experiments.infer import TokenChoice, generate
from crt_exp.experiments.models import encoders, language
from crt_exp.experiments.models.language import (
    LanguageDescription,
    LanguageModel,
    Rotary,
    rotate,
    sizes_of,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.swap.calibration import fill_statistics

SIZES = {"heads": 2, "layers": 2, "d_ff": 32, "d": 16}
NAMES = [
    "exact",
    "identity",
    "uniform",
    "window",
    "favor",
    "favorp",
    "favorpp",
    "smreg",
    "relu",
    "elu",
    "reformer",
    "nearfar",
]
POSITIONS = ["learned", "rotary", "none"]


def mechanism(name, **options):
    features = name not in (
        "exact",
        "identity",
        "uniform",
        "window",
        "linformer",
        "elu",
        "reformer",
        "nearfar",
    )
    own = {
        "window": {"block": 4},
        "reformer": {"buckets": 2, "chunk": 8},
        "linformer": {"length": 32, "rank": 8},
        "nearfar": {"block": 3, "heavy": 2, "cells": 4},
    }
    if features:
        options["m"] = 16
    return Mechanism.of(name, **own.get(name, {}), **options)


def model_of(name="exact", causal=True, **options):
    torch.manual_seed(0)
    changes = {}
    for key in ("positions", "tied", "dropout", "sizes"):
        if key in options:
            changes[key] = options.pop(key)
    description = LanguageDescription(11, 32, **{"sizes": SIZES, "causal": causal} | changes)
    return LanguageModel(description, mechanism(name).layer, **options)


def tokens(batch=2, length=20):
    return torch.randint(11, (batch, length), generator=seeded(1))


def calibrated(name, **options):
    """In float64, so that differences are errors and not rounding, with statistics where the features are fitted."""
    model = model_of(name, **options).double().eval()
    if name in ("favorpp", "nearfar"):
        fill_statistics(model, [tokens(4)])
    return model


# ---- properties ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_later_symbol_changes_nothing_before_it(name):
    model = calibrated(name)
    ids = tokens()
    actual = model(ids)[:, :13]
    expected = model(ids[:, :13])
    assert_close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("name, causal", [*in_turn(NAMES, [True, False]), ("linformer", False)])
def test_padding_is_truncation(name, causal):
    model = calibrated(name, causal=causal)
    ids = tokens()
    keep = torch.arange(20) < torch.tensor([[13], [20]])
    found = model(torch.where(keep, ids, 3), keep)
    actual = found[0, :13]
    expected = model(ids[:1, :13])[0]
    assert_close(actual, expected)
    actual = found[1]
    expected = model(ids[1:])[0]
    assert_close(actual, expected)


def test_the_past_is_not_lost_by_checkpointing():
    model = model_of("favorp", checkpointing=True)
    pasts = model.begin()
    first = model(tokens()[:, :9], pasts=pasts)
    then = model(tokens()[:, 9:], pasts=pasts)
    actual = torch.cat([first, then], 1)
    expected = model(tokens())
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name, positions", in_turn(NAMES, POSITIONS))
def test_symbol_by_symbol_is_the_parallel_pass(name, positions):
    """A prompt at once, then one by one."""
    model = calibrated(name, positions=positions)
    ids = tokens()
    whole = model(ids)
    pasts = model.begin()
    parts = [
        model(ids[:, :6], pasts=pasts),
        *(model(ids[:, i : i + 1], pasts=pasts) for i in range(6, 20)),
    ]
    actual = torch.cat(parts, 1)
    assert_close(actual, whole)


@pytest.mark.parametrize("name", ["exact", "favorpp", "reformer", "nearfar"])
def test_checkpointing_changes_no_output_and_no_gradient(name):
    """Dropout and running statistics included."""
    actual = []
    for again in (False, True):
        model = model_of(name, checkpointing=again, dropout=0.2).train()
        torch.manual_seed(3)
        for _ in range(2):
            out = model(tokens())
            out.square().mean().backward()
        actual.append((out, [p.grad for p in model.parameters()], list(model.buffers())))
    for one, two in zip(*actual):
        assert_close(one, two, rtol=0, atol=0)


def test_chosen_places_are_those_of_the_whole():
    model = model_of("favorp", causal=False).eval()
    ids = tokens()
    chosen = torch.rand(ids.shape) < 0.3
    actual = model(ids, chosen=chosen)
    expected = model(ids)[chosen]
    assert_close(actual, expected)


def test_rotary_is_that_of_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_theta=10_000.0)
    q = torch.randn(2, 4, 7, 8)
    k = torch.randn(2, 4, 7, 8)
    places = torch.arange(5, 12)[None]
    expected = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, places))
    turn = Rotary(8)(5, 7)
    for ours, theirs in zip((rotate(q, turn), rotate(k, turn)), expected):
        assert_close(ours, theirs)


@torch.no_grad()
def test_learned_positions_and_the_order_of_symbols():
    """Without positions a bidirectional model sees a set; with them it does not."""
    order = torch.randperm(20)
    for positions in POSITIONS:
        model = model_of("exact", causal=False, positions=positions).double().eval()
        model.place is None or torch.nn.init.normal_(model.place.weight)
        same = torch.allclose(model(tokens()[:, order]), model(tokens())[:, order])
        assert same == (positions == "none"), positions


def test_tied_embeddings_are_one_parameter():
    for tied in (True, False):
        names = dict(model_of(tied=tied).named_parameters())
        assert ("head.weight" in names) != tied
        actual = names["symbol.weight"].std().item()
        assert actual == pytest.approx(0.02, rel=0.2)


# ---- drawing sequences ----------------------------------------------------------------------------------------------

PROMPT = torch.tensor([9, 1, 4])


@torch.no_grad()
@pytest.mark.parametrize("name", ["exact", "favor", "favorpp", "reformer", "nearfar"])
def test_symbols_are_drawn_by_the_chances_of_the_parallel_pass(name):
    """Each is what the same generator draws from the logits of the whole sequence at its place."""
    model = calibrated(name)
    choice = TokenChoice(0.8, top_p=0.9)
    actual = generate(model, PROMPT, 20, choice, [3, 4], never=[0])
    for seed, row in zip([3, 4], actual):
        whole = model(torch.cat([PROMPT, torch.tensor(row)])[None])[0, 2:-1]
        whole[:, 0] = -torch.inf
        assert len(row) == 20
        assert 0 not in row
        generator = seeded(seed)
        assert choice.draw(whole, [generator] * len(row)).tolist() == row


@torch.no_grad()
def test_frequencies_are_the_chances():
    model = calibrated("favorpp")
    logits = model(PROMPT[None])[:, -1]
    expected = (2 * logits[0]).softmax(-1)
    drawn = [row[0] for row in generate(model, PROMPT, 1, TokenChoice(0.5), range(4000))]
    counts = torch.bincount(torch.tensor(drawn), minlength=11) / 4000
    assert ((counts - expected).abs() < 5 * (expected / 4000).sqrt()).all()


def test_the_end_ends_a_sequence():
    model = calibrated("exact")
    free, ended = (
        generate(model, PROMPT, 25, TokenChoice(), range(6), end=end) for end in (None, 7)
    )
    for whole, cut in zip(free, ended):
        expected = whole[: whole.index(7) if 7 in whole else None]
        assert cut == expected
    assert any(7 in row for row in free)


LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def test_temperature_and_nuclei_of_the_chances():
    order = torch.tensor([2, 0, 3, 1])
    cases = [
        (TokenChoice(), [0.4, 0.3, 0.2, 0.1]),
        (TokenChoice(temperature=0), [1, 0, 0, 0]),
        (TokenChoice(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (TokenChoice(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (TokenChoice(top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (TokenChoice(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (TokenChoice(top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
    ]
    for choice, expected in cases:
        assert_close(
            choice.probabilities(LOGITS[:, order])[0],
            torch.tensor(expected).double()[order],
            msg=str(choice),
        )


def test_a_symbol_without_a_chance_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).expand(200, -1)
    actual = TokenChoice().draw(logits, [seeded(0)] * 200).tolist()
    assert {*actual} == {1, 2}


# ---- the folder ------------------------------------------------------------------------------------------------------


def save_calibrated(tmp_path, name="favorpp", **options):
    model = calibrated(name, **options).float()
    language.save_model(
        model.description, mechanism(name), {"kind": "letters"}, model.state_dict(), tmp_path
    )
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    "name, tied", in_turn(["exact", "favorpp", "linformer", "reformer"], [True, False])
)
def test_saved_and_loaded_is_the_same_model(name, tied, tmp_path):
    model = save_calibrated(tmp_path, name, tied=tied, causal=name != "linformer")
    loaded = language.load(tmp_path, "run")
    assert loaded.symbols == {"kind": "letters"}
    assert loaded.mechanism.describe() == mechanism(name).describe()
    actual = loaded.build()(tokens())
    expected = model(tokens())
    assert torch.equal(actual, expected)


def test_loaded_projections_are_used_whatever_the_seed():
    """Those of the draw that training had come to, and no new draw."""
    model, other = (
        LanguageModel(model_of().description, mechanism("favorp", redraw_every=2, seed=seed).layer)
        for seed in (0, 7)
    )
    for _ in range(5):
        model.train()(tokens())
    other.load_state_dict(model.state_dict())
    actual = other.eval()(tokens())
    expected = model.eval()(tokens())
    assert_close(actual, expected)


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


def test_unloadable_models_are_refused(tmp_path):
    with pytest.raises(DataError, match="run=.*nowhere: no such directory"):
        language.load(tmp_path / "nowhere", "run")
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(DataError, match="no config.json"):
        language.load(tmp_path, "run")
    save_calibrated(tmp_path, "favorpp")
    config = tmp_path / "model" / "config.json"
    saved = config.read_text()
    fields = json.loads(saved)
    cases = [
        (fields | {"kind": "bert"}, "run=.*kind=bert"),
        ("{", "config.json, from line 1 on: not valid JSON"),
        (fields | {"attention": {"name": "favorq"}}, r"cannot be restored: attention\.m: missing"),
    ]
    for wrong, words in cases:
        config.write_text(wrong if wrong == "{" else json.dumps(wrong))
        with pytest.raises((DataError, ConfigError), match=words):
            language.load(tmp_path, "run")
    config.write_text(saved.replace('"length": 32', '"length": 33'))
    with pytest.raises(
        ConfigError, match=r"place.weight has shape \(32, 16\), expected \(33, 16\)"
    ):
        language.load(tmp_path, "run").build()
    config.write_text(saved)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"0" * 40)
    with pytest.raises(DataError, match="not readable"):
        language.load(tmp_path, "run")


def test_bad_sizes():
    actual = sizes_of("performer36", {"layers": 3}, "task.sizes")
    assert actual == {
        "heads": 8,
        "layers": 3,
        "d_ff": 1024,
        "d": 512,
    }
    with pytest.raises(ConfigError, match="d=64: expected a multiple of heads=3"):
        sizes_of("tiny", {"heads": 3}, "task.sizes")
    with pytest.raises(ValueError, match="33 symbols: expected at most 32"):
        model_of()(tokens(1, 33))
    with pytest.raises(ValueError, match="causal=False: .*causal=True"):
        model_of(causal=False).begin()


# ---- encoders of transformers ----------------------------------------------------------------------------------------

ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 60,
    "max_position_embeddings": 40,
}


@pytest.mark.parametrize(
    "kind, longest",
    [
        ("Bert", 40),
        ("Roberta", 38),
        ("Data2VecText", 38),
    ],
)
def test_the_longest_sequence_is_what_the_model_takes(kind, longest):
    """In models such as RoBERTa, positions begin after the number of the padding."""
    config = getattr(transformers, f"{kind}Config")(**ENCODER)
    model = transformers.AutoModel.from_config(config).eval()
    input_ids = torch.full((1, longest), 7)
    model(input_ids=input_ids)
    encoders.check_length(config, longest, "task.block")
    with pytest.raises(
        ConfigError, match=f"task.block={longest + 1}: expected at most {longest} tokens"
    ):
        encoders.check_length(config, longest + 1, "task.block")


@pytest.mark.parametrize(
    "kind, head",
    [("Roberta", "AutoModelForMaskedLM"), ("DistilBert", "AutoModelForSequenceClassification")],
)
def test_encoders_that_are_not_bert(kind, head, tmp_path):
    """Pretrained weights with another attention, and a head made anew."""
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    }
    sizes = ENCODER
    if kind == "DistilBert":
        sizes = {names.get(key, key): value for key, value in ENCODER.items()}
    saved = transformers.AutoModelForMaskedLM.from_config(
        getattr(transformers, f"{kind}Config")(**sizes)
    )
    saved.save_pretrained(tmp_path)
    origin = encoders.origin_of(str(tmp_path), "uptrain")
    model = encoders.load_model(
        head, encoders.load_config(origin), origin, Mechanism.of("favorpp", m=8)
    ).eval()
    assert model(input_ids=torch.full((2, 9), 7)).logits.isfinite().all()
    loaded = model.base_model.state_dict()
    weights = saved.base_model.state_dict()
    for name in weights:
        assert torch.equal(loaded[name], weights[name])
