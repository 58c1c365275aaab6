"""task=swap_text, swap_embeddings, swap_images, dictation and swap_copying on tiny models with random weights; heads
in which one far key matters, and the dense baselines that read them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from crt_exp.attention import exact_attention
from crt_exp.experiments.measure import pretrained, recall, whisper
from crt_exp.experiments.measure.recall import FarKey, SwapCopying
from crt_exp.experiments.measure.whisper import Dictation, exact_transcript
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

KINDS = [*pretrained.ROWS]


@pytest.fixture(autouse=True)
def nothing_is_kept():
    for each in (pretrained.exact_losses, pretrained.tokens, whisper.utterances):
        each.cache_clear()


def read(arm, kind, length=512, seed=0):
    task = pretrained.SwapText("", kind, length, 2, "train")
    [actual] = task.rows(replace(Mechanism.parse(arm), seed=seed), seed)
    return actual


@pytest.mark.parametrize("kind", KINDS)
def test_attention_that_sees_all_loses_nothing(reader, kind):
    """Other attention differs, and the model is restored."""
    exact = read("exact", kind)
    uniform = read("uniform", kind)
    assert exact["above"] == 0
    assert uniform["above"] != 0 != read("favorpp m=8", kind)["above"]
    for arm in ("nearfar", "window block=1024"):
        assert read(arm, kind)["above"] == pytest.approx(0, abs=1e-5)
    pretrained.exact_losses.cache_clear()
    assert read("exact", kind) == exact


def test_losses_are_those_of_the_whole_model(reader):
    row = pretrained.new_row("", 512, 0)
    actual = float(pretrained.token_losses(reader, row).mean())
    expected = float(reader(input_ids=row.ids, labels=row.ids).loss.detach())
    assert actual == pytest.approx(expected, abs=1e-5)


def test_a_row_repeats_its_first_half(reader):
    again = pretrained.repeated_row("", 512, 0)
    actual = again.ids[0, again.positions]
    expected = again.ids[0, again.positions - 256]
    assert torch.equal(actual, expected)
    assert again.positions[0] == 256 + pretrained.MIN_CONTEXT


def test_words_of_the_text_are_plain(tmp_path, monkeypatch):
    (tmp_path / "wiki.valid.tokens").write_text(" one @-@ way , ( 24 @.@ 5 in ) of <unk> . \n \n")
    monkeypatch.setattr(
        pretrained, "official_file", lambda name, split: tmp_path / "wiki.valid.tokens"
    )
    assert pretrained.plain_text("valid").strip() == "one-way, (24.5 in) of <unk>."


# ---- other models


@pytest.mark.parametrize("arm", ["exact", "uniform", "nearfar exact_until=0"])
def test_encoders_are_read_with_each_attention(arm, monkeypatch, letters):
    model = BertModel(
        BertConfig(
            vocab_size=100,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            initializer_range=0.5,
        )
    ).eval()
    monkeypatch.setattr(pretrained, "load_pretrained", lambda name: (model, letters))
    pieces = torch.randint(1, 97, (40, 128), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(pretrained, "wikitext_rows", lambda *_: pieces)
    monkeypatch.setattr(pretrained, "official_file", lambda name, split: split)
    task = pretrained.SwapEmbeddings("", 128, 3, 4)
    [found] = task.rows(Mechanism.parse(arm), 0)
    assert len(found["cosine"]) == 3
    actual = min(found["cosine"]) > 1 - 1e-5
    assert (actual) == (arm == "exact")


@pytest.mark.parametrize("arm", ["exact", "favormix m=8"])
def test_images_are_seen_with_each_attention(arm, tmp_path, monkeypatch):
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(0)
    made = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1, init_values=1.0
    )
    save_for_hf(made, tmp_path, model_args={"img_size": 32, "depth": 1, "init_values": 1.0})
    digits = {
        split: replace(each, sources=each.sources.repeat(4, 1).repeat(4, 2))
        for split, each in pretrained.images.digits().items()
    }
    monkeypatch.setattr(pretrained.images, "load", lambda dataset: digits)
    task = pretrained.SwapImages(str(tmp_path), "digits", 32, 3, 4)
    [found] = task.rows(Mechanism.parse(arm), 0)
    assert len(found["cosine"]) == 3
    actual = min(found["cosine"]) > 1 - 1e-5
    assert (actual) == (arm == "exact")


@pytest.mark.parametrize("model", ["minilm", "smollm2-135m"])
def test_a_model_that_was_not_fetched_is_named_with_the_command_that_brings_it(
    model, tmp_path, monkeypatch
):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    with pytest.raises(
        ConfigError, match=f"models/{model}: .*run `python -m crt_exp data fetch models/{model} "
    ):
        pretrained.load_pretrained(f"models/{model}")


def test_dictation_is_the_transcript_of_exact_attention(speaker):
    """Nats and agreement of its own tokens, of which exact attention finds each the likeliest."""
    task = Dictation("", "train", 2, 1)
    [exact] = task.rows(Mechanism.parse("exact"), 1)
    [uniform] = task.rows(Mechanism.parse("uniform"), 1)
    assert exact["above"] == pytest.approx(0, abs=1e-6)
    assert uniform["above"] != 0
    tokens, nats = exact_transcript("", "train", "2")
    assert nats.shape == (tokens.shape[1] - 1,)
    assert int(tokens[0, 0]) == 1
    assert int(tokens[0, -1]) == 2
    with pytest.raises(ValueError, match="seed=2: expected a group of task.count=2"):
        [*Dictation("", "train", 2, 1).rows(Mechanism.parse("exact"), 2)]


# ---- a far key


FAR = {
    "heads": 4,
    "d": 32,
    "far": 96,
    "weight": 0.9,
    "clusters": 0,
    "queries": 256,
    "methods": ["uniform"],
}


def test_a_query_gives_its_far_key_the_stated_weight():
    q, k, _ = FarKey(512, **FAR).sample_heads(0)
    places = torch.arange(512 - 256, 512)
    future = torch.arange(512) > places.unsqueeze(1)
    weights = (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1)
    most, at = weights.max(-1)
    expected = torch.full_like(most, 0.9)
    assert_close(most, expected, rtol=1e-3, atol=0)
    assert (places - at >= 96).all()


def test_near_far_attention_finds_the_far_key():
    near = "nearfar block=32 heavy=16 open=128"
    exact = "nearfar open=1 exact_until=512"
    task = FarKey(512, **FAR | {"methods": [near, exact, "uniform"]})
    actual = {row["method"]: row["error"] for row in task.rows(None, 0)}
    assert actual[exact] < 1e-5 < actual[near] < 0.2 < actual["uniform"]


# ---- a model that copies


@pytest.fixture
def heads():
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 160, 8, generator=g, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("baseline", recall.RANKS)
def test_baselines_are_exact_on_all_keys_weigh_to_one_and_see_no_later_token(heads, baseline):
    def attend(q, k, v, keys):
        mechanism = recall.dense_baseline(f"{baseline} keys={keys} first=16")
        return mechanism.layer(2, 8, causal=True, scaling=1.0)(q, k, v)

    q, k, v = heads
    actual = attend(*heads, 160)
    expected = exact_attention(*heads, causal=True)
    assert_close(actual, expected)
    ones = torch.ones_like(v)
    for count in (0, 16):
        assert_close(attend(q, k, ones, count), ones)
        actual = attend(q, k, v, count)[:, :, :96]
        expected = attend(*(t[:, :, :96] for t in heads), count)
        assert_close(actual, expected)


def test_a_model_is_read_with_each_attention_and_is_itself_again(monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    ).eval()
    monkeypatch.setattr(recall, "load_pretrained", lambda folder: (model, None))
    text = torch.randint(50, (8, 160), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(recall, "wikitext_rows", lambda start, split, length: text)
    rows = recall.passages("", "test", 160, 3)
    expected = recall.passages("", "test", 160, 3)
    assert torch.equal(rows, expected)
    assert rows.shape == (
        recall.ROWS,
        160,
    )
    half = (rows[:, 80:, None] == rows[:, None, :80]).any(-1)
    assert half.all()  # the second half repeats the first

    def losses(attention, baseline=None):
        [actual] = SwapCopying("", 160, baseline).rows(Mechanism.parse(attention), 0)
        assert actual["gain"] == actual["new"] - actual["copied"]
        return actual

    exact = losses("exact")
    for actual in (
        losses("nearfar"),
        *(losses("exact", each) for each in ("largest keys=160", "pages keys=160")),
    ):
        for kind in exact:
            assert np.allclose(actual[kind], exact[kind], atol=1e-5)
    assert losses("uniform")["new"] != exact["new"]
    assert losses("exact") == exact
