"""task=swap_text, swap_embeddings, swap_images and swap_speech on tiny models with random weights."""

from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from crt_exp.config import ConfigError
from crt_exp.measure import pretrained, recall, whisper
from crt_exp.measure.recall import Baseline, attention_of
from crt_exp.mechanism import Mechanism

KINDS = [*pretrained.ROWS]
ARMS = ("exact", "uniform", "nearfar exact_until=0", "favorpp m=8", "window block=8 first=2")


class Letters:
    """A tokenizer of characters."""

    def __call__(self, texts, add_special_tokens=True, verbose=True):
        return {"input_ids": [1 + ord(letter) % 96 for letter in texts]}


@pytest.fixture(autouse=True)
def nothing_is_kept():
    for each in (pretrained.exact_reading, pretrained.tokens, whisper.utterances):
        each.cache_clear()


@pytest.fixture
def reader(monkeypatch):
    """A Llama of two query heads that share one of keys."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        initializer_range=0.5)).eval()
    monkeypatch.setattr(pretrained, "load_model_and_tokenizer", lambda name: pretrained.Opened(model, Letters()))
    text = torch.randint(1, 97, (28_000,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(pretrained, "tokens", lambda name, split: text)
    return model


def read(arm, kind, length=512, seed=0, dtype=None):
    task = pretrained.SwapText("", kind, length, dtype, 2, "train")
    [found] = task.rows(replace(Mechanism.parse(arm), seed=seed), seed)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arm", ["nearfar", "window block=1024"])
def test_attention_that_sees_all_loses_nothing(reader, kind, arm):
    exact, found = read("exact", kind), read(arm, kind)
    assert exact["above"] == 0 and exact["agrees"] == 1 and found["above"] == pytest.approx(0, abs=1e-5)
    assert found["nats"] == pytest.approx(exact["nats"], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_other_attention_differs_and_the_model_is_restored(reader, kind):
    before = read("exact", kind)
    assert read("uniform", kind)["above"] != 0 and read("favorpp m=8", kind)["above"] != 0
    pretrained.exact_reading.cache_clear()
    assert read("exact", kind) == before


@pytest.mark.parametrize("kind", KINDS)
def test_another_precision_differs_a_little_and_is_a_copy(reader, kind):
    found = read("exact", kind, dtype="bfloat16")
    assert 0 < abs(found["above"]) < 0.1 and found["agrees"] > 0.8
    assert {each.dtype for each in reader.parameters()} == {torch.float32}


def test_places_are_told_apart_in_another_precision(reader):
    """Frequencies of 8 bits would turn places 300 and 301 into one."""
    copy = pretrained.in_type(reader, "bfloat16")
    assert {each.dtype for each in copy.parameters()} == {torch.bfloat16}
    assert copy.model.rotary_emb.inv_freq.dtype == torch.float32


def test_above_is_against_the_loss_of_the_whole_model(reader):
    found = read("exact", "new")
    ids = pretrained.passage("", "valid", 0, 512)[None]
    assert found["nats"] == pytest.approx(float(reader(input_ids=ids, labels=ids).loss.detach()), abs=1e-5)


def test_a_row_repeats_its_first_half(reader):
    again = pretrained.repeated("", 512, 0)
    assert torch.equal(again.ids[0, again.places], again.ids[0, again.places - 256])
    assert again.places[0] == 256 + pretrained.MIN_CONTEXT


def test_a_text_that_is_too_short_is_refused(reader):
    with pytest.raises(ValueError, match="seed=3: rows of 8192 tokens.*28000"):
        read("exact", "new", 8192, 3)


def test_words_of_the_text_are_plain(tmp_path, monkeypatch):
    (tmp_path / "wiki.valid.tokens").write_text(" one @-@ way , ( 24 @.@ 5 in ) of <unk> . \n \n")
    monkeypatch.setattr(pretrained, "official_file", lambda name, split: tmp_path / "wiki.valid.tokens")
    assert pretrained.plain_text("valid").strip() == "one-way, (24.5 in) of <unk>."


# ---- encoders


@pytest.mark.parametrize("arm", ARMS)
def test_encoders_are_read_with_each_attention(arm, monkeypatch):
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=16, initializer_range=0.5)).eval()
    monkeypatch.setattr(pretrained, "load_model_and_tokenizer", lambda name, kind: (model, Letters()))
    pieces = torch.randint(1, 97, (40, 128), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(pretrained, "local_blocks", lambda *_: pieces.numpy())
    monkeypatch.setattr(pretrained, "official_file", lambda name, split: split)
    for text in ("train", "code"):
        [found] = pretrained.SwapEmbeddings("", 128, 3, 4, text).rows(Mechanism.parse(arm), 0)
        assert len(found["cosine"]) == 3 and (min(found["cosine"]) > 1 - 1e-5) == (arm == "exact")


def test_code_is_another_text():
    assert "import os" in pretrained.plain_text("code") and len(pretrained.plain_text("code")) == pretrained.CHARACTERS


@pytest.mark.parametrize("arm", ["exact", "uniform", "favorpp m=8", "favormix m=8"])
def test_images_are_seen_with_each_attention(arm, tmp_path, monkeypatch):
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(0)
    made = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1, init_values=1.0)
    save_for_hf(made, tmp_path, model_args={"img_size": 32, "depth": 1, "init_values": 1.0})
    digits = {split: replace(each, sources=each.sources.repeat(4, 1).repeat(4, 2))
              for split, each in pretrained.images.digits().items()}
    monkeypatch.setattr(pretrained.images, "load", lambda dataset: digits)
    [found] = pretrained.SwapImages(str(tmp_path), "digits", 32, 3, 4).rows(Mechanism.parse(arm), 0)
    assert len(found["cosine"]) == 3 and (min(found["cosine"]) > 1 - 1e-5) == (arm == "exact")


def test_baselines_refuse_padding():
    layer = Baseline(recall.top_weight_keys, 2, 4, kv_heads=1, causal=True)
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    with pytest.raises(ValueError, match="key_mask: not supported"):
        layer(q, k, k, torch.tensor([[True, True, False]]))
    assert attention_of("exact") is None


@pytest.mark.parametrize("arm", [*ARMS, "bfloat16"])
def test_speech_is_heard_with_each_attention(speaker, arm):
    dtype = "bfloat16" if arm == "bfloat16" else None
    probe = whisper.SwapSpeech("", "train", 2, dtype, 1)
    mechanism = Mechanism.parse("exact" if dtype else arm)
    [found] = probe.rows(mechanism, 1)
    assert found["wer"] > 0 and [found] == [*probe.rows(mechanism, 1)]


def test_speech_that_attention_is_fitted_to_is_not_judged(speaker):
    with pytest.raises(ValueError, match="seed=0: expected a group of task.count=5"):
        [*whisper.SwapSpeech("", "train", 5, None, 1).rows(Mechanism.parse("exact"), 0)]


@pytest.mark.parametrize("model", ["minilm", "smollm2-135m"])
def test_a_model_that_was_not_fetched_is_named_with_the_command_that_brings_it(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=f"models/{model}: .*run `python -m crt_exp.data fetch models/{model} "):
        pretrained.load_model_and_tokenizer(f"models/{model}")
