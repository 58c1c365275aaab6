"""The probes of the page pretrained, on tiny models of the same classes with weights that are drawn here."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from crt_exp.data import DataError
from crt_exp.data.speech import AudioPart, Utterance
from crt_exp.measure import pretrained, recall, whisper
from crt_exp.measure.recall import BASELINES, Baseline, attention_of
from crt_exp.mechanism import Mechanism

READ = [*pretrained.ROWS]
ARMS = ("exact", "uniform", "nearfar exact_until=0", "favorpp m=8", "window block=8 first=2")


class Letters:
    """A tokenizer of characters, with marks around what a model is to read whole."""

    all_special_tokens = ("<", ">")
    all_special_ids, mask_token_id = [97, 98], 99

    def __call__(self, texts, add_special_tokens=True, verbose=True, truncation=False, max_length=None):
        if not isinstance(texts, str):
            return {"input_ids": [self(each, truncation=truncation, max_length=max_length)["input_ids"]
                                  for each in texts]}
        ids = [1 + ord(letter) % 96 for letter in texts]
        return {"input_ids": [97, *ids[:max_length and max_length - 2], 98] if add_special_tokens else ids}

    def apply_chat_template(self, said, tokenize, add_generation_prompt):
        return f"[{said[0]['content']}]"


@pytest.fixture(autouse=True)
def nothing_is_kept():
    for each in (pretrained.exact_of, pretrained.tokens, pretrained.blocks, pretrained.paragraphs, whisper.utterances):
        each.cache_clear()


@pytest.fixture
def reader(monkeypatch):
    """A Llama of two query heads that share one of keys."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        initializer_range=0.5)).eval()
    monkeypatch.setattr(pretrained, "opened", lambda name: pretrained.Opened(model, Letters()))
    text = torch.randint(1, 97, (28_000,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(pretrained, "tokens", lambda name, split: text)
    return model


def split(arm):
    """A method, or a dense baseline in its place."""
    return (Mechanism.parse("exact"), arm) if arm.split()[0] in BASELINES else (Mechanism.parse(arm), None)


def read(arm, row, length=None, seed=0, dtype=None):
    mechanism, baseline = split(arm)
    length = length or (1024 if row == "pass_keys" else 512)
    return [*pretrained.SwapText("", row, length, baseline, dtype).rows(replace(mechanism, seed=seed), seed)]


@pytest.mark.parametrize("row", READ)
@pytest.mark.parametrize("arm", ["largest keys=1024", "pages keys=1024", "nearfar", "window block=1024"])
def test_attention_that_sees_all_loses_nothing(reader, row, arm):
    exact, found = read("exact", row), read(arm, row)
    assert [each["distance"] for each in found] == [each["distance"] for each in exact]
    for ours, theirs in zip(found, exact):
        assert theirs["above"] == 0 and theirs["agrees"] == 1 and ours["above"] == pytest.approx(0, abs=1e-5)
        assert ours["nats"] == pytest.approx(theirs["nats"], abs=1e-5)


@pytest.mark.parametrize("row", READ)
def test_attention_that_does_not_see_is_another_and_the_model_is_itself_again(reader, row):
    before = read("exact", row)
    assert read("uniform", row)[0]["above"] != 0 and read("favorpp m=8", row)[0]["above"] != 0
    pretrained.exact_of.cache_clear()
    assert read("exact", row) == before


@pytest.mark.parametrize("row", READ)
def test_another_precision_is_a_little_else_and_of_a_copy(reader, row):
    exact, found = read("exact", row), read("exact", row, dtype="bfloat16")
    assert [each["distance"] for each in found] == [each["distance"] for each in exact]
    assert all(0 < abs(each["above"]) < 0.1 and each["agrees"] > 0.8 for each in found)
    assert {each.dtype for each in reader.parameters()} == {torch.float32}


def test_places_are_told_apart_in_another_precision(reader):
    """Frequencies of 8 bits would turn places 300 and 301 into one."""
    copy = pretrained.in_type(reader, "bfloat16")
    assert {each.dtype for each in copy.parameters()} == {torch.bfloat16}
    assert copy.model.rotary_emb.inv_freq.dtype == torch.float32


def test_above_is_against_the_loss_of_the_whole_model(reader):
    [found] = read("exact", "new")
    ids = pretrained.passage("", "valid", 0, 512)[None]
    assert found["nats"] == pytest.approx(float(reader(input_ids=ids, labels=ids).loss.detach()), abs=1e-5)


def test_rows_hold_what_they_ask_for(reader):
    """What is said again was said as far away as the axis says, and pass keys are in the text."""
    again = pretrained.repeated("", 512, 0)
    places = again.places
    assert torch.equal(again.ids[0, places], again.ids[0, places - 256]) and places[0] == 256 + pretrained.UNSURE
    apart = pretrained.distances("", 512, 1)
    segment = pretrained.SEGMENT
    assert [*apart.asked] == [64, 256, 512]
    for far, asked in apart.asked.items():
        for place in asked[:, 0].tolist():
            j = place // segment - 4
            before = place - (2 * j + 1) * segment
            assert apart.ids[0, place] == apart.ids[0, before] and far / 2 < place - before <= far
    for row, count in (("pass_key", 1), ("pass_keys", 8)):
        made = pretrained.ROWS[row]("", 1024, 3)
        [asked] = made.asked.values()
        assert made.ids.shape == (1, 1024) and asked.shape == (count, 5)
        assert len({*map(tuple, made.ids[0, asked].tolist())}) == count
        first = made.ids[0, :int(asked.min())].unfold(0, 5, 1)
        assert all((first == made.ids[0, each]).all(-1).any() for each in asked), "a key that the text does not say"


def test_an_answer_is_what_exact_attention_goes_on_with(reader):
    [exact], [other] = read("exact", "answer"), read("uniform", "answer")
    assert exact["kept"] == pretrained.ANSWER and exact["right"] == 1 and other["kept"] < pretrained.ANSWER


def test_a_text_that_is_too_short_is_refused(reader):
    with pytest.raises(ValueError, match="row 3 of 8192 tokens ends at token 32768.*28000: take fewer seeds"):
        read("exact", "new", 8192, 3)
    with pytest.raises(ValueError, match="8 pass keys and their questions take"):
        read("exact", "pass_keys", 512)


def test_time_is_of_all_methods_in_turn(reader):
    methods = ["exact", "nearfar exact_until=32"]
    rows = [*whisper.SwapTimes("", 256, None, methods, 2).rows(None, 0)]
    assert [row["method"] for row in rows] == methods and all(len(row["ms"]) == 2 for row in rows)


def test_words_of_the_text_are_plain(tmp_path, monkeypatch):
    (tmp_path / "wiki.valid.tokens").write_text(" one @-@ way , ( 24 @.@ 5 in ) of <unk> . \n \n")
    monkeypatch.setattr(pretrained, "official_file", lambda name, split: tmp_path / "wiki.valid.tokens")
    assert pretrained.plain_text("valid").strip() == "one-way, (24.5 in) of <unk>."


# ---- encoders


@pytest.fixture
def sentences(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=16)).eval()
    monkeypatch.setattr(pretrained, "encoder", lambda name: (model, Letters()))
    pairs = SimpleNamespace(sentence1=["a red cat", "two men", "a dog runs", "snow"],
                            sentence2=["one cat", "three women", "a dog ran", "the sun"], labels=[4.0, 2.0, 4.5, 0.5])
    pairs.subsample = lambda count: pairs
    monkeypatch.setattr(pretrained.glue, "load", lambda name, split: pairs)
    text = torch.randint(1, 97, (40, 128), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(pretrained, "local_blocks", lambda *_: text.numpy())
    lines = "\n".join("".join(chr(32 + int(i) % 90) for i in row) for row in text)
    (tmp_path / "lines").write_text(lines + "\nshort\n")
    monkeypatch.setattr(pretrained, "official_file", lambda name, split: tmp_path / "lines")
    return model


def test_sentences_of_one_length_are_read_together_as_alone(sentences):
    rows = [[97, 5, 6, 98], [97, 7, 98], [97, 8, 9, 98], [97, 98]]
    alone = torch.cat([pretrained.states(sentences, [row]) for row in rows])
    assert_close(pretrained.states(sentences, rows), alone)


def embeddings(arm, kind, length=128, texts=3):
    mechanism, baseline = split(arm)
    [found] = pretrained.SwapEmbeddings("", kind, length, texts, baseline).rows(mechanism, 0)
    return found


@pytest.mark.parametrize("arm", ARMS)
def test_encoders_are_read_with_each_attention(sentences, arm, monkeypatch):
    monkeypatch.setattr(pretrained, "TENTHS", 2)
    found = embeddings(arm, "pairs")
    assert len(found["spearman"]) == 2 and -1 <= found["all_pairs"] <= 1
    cosines, kept = embeddings(arm, "texts")["cosine"], embeddings(arm, "paragraphs", 64, 20)["nearest"]
    assert len(cosines) == 3 and len(kept) == 20
    if arm == "exact":
        assert cosines == pytest.approx([1, 1, 1]) and kept == [1.0] * 20


@pytest.mark.parametrize("arm", ["pages keys=128 both=true", "largest keys=128 both=true", "monarch turns=2",
                                 "query_clusters keys=16"])
def test_baselines_of_both_directions_stand_in_an_encoder(sentences, arm):
    found = embeddings(arm, "texts")["cosine"]
    assert min(found) > 0.5 and (not arm.endswith("both=true") or found == pytest.approx([1, 1, 1]))


def test_too_few_paragraphs_are_refused(sentences):
    with pytest.raises(ValueError, match="has 40 paragraphs of 64 tokens, not 41"):
        embeddings("exact", "paragraphs", 64, 41)


def test_baselines_refuse_padding():
    layer = Baseline(recall.largest, 2, 4, kv_heads=1, causal=True)
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    with pytest.raises(ValueError, match="take no padding"):
        layer(q, k, k, torch.tensor([[True, True, False]]))
    assert attention_of("exact") is None


def test_utterances_of_a_chapter_are_joined_to_what_fits():
    said = [Utterance(f"{chapter}-{i:04d}", f"{chapter}{i}", (AudioPart(f"{chapter}{i}", seconds),))
            for chapter, lengths in {"a-1": (9, 10, 8, 12, 20, 3), "b-1": (28, 1, 26, 5)}.items()
            for i, seconds in enumerate(lengths)]
    made = whisper.clips(said, 28)
    assert [each.text for each in made] == ["a-10 a-11 a-12", "a-13", "b-10", "b-11 b-12"]
    assert [each.seconds for each in made] == [27, 12, 28, 27]
    assert [len(each.gaps) + 1 for each in made] == [len(each.parts) for each in made] == [3, 1, 1, 2]


@pytest.mark.parametrize("arm", [*ARMS, "bfloat16"])
def test_speech_is_heard_with_each_attention(speaker, arm):
    dtype = "bfloat16" if arm == "bfloat16" else None
    probe = whisper.SwapSpeech("", "train", 2, 0, dtype)
    mechanism = Mechanism.parse("exact" if dtype else arm)
    [found] = probe.rows(mechanism, 1)
    assert found["wer"] > 0 and [found] == [*probe.rows(mechanism, 1)]


def test_speech_that_attention_is_fitted_to_is_not_judged(speaker):
    with pytest.raises(ValueError, match="train has 5 utterances: group 0 of 5 is not there"):
        [*whisper.SwapSpeech("", "train", 5, 0, None).rows(Mechanism.parse("exact"), 0)]
    rows = whisper.SwapTimes("", 1, "train", ["exact", "nearfar exact_until=0"], 2).rows(None, 0)
    assert [len(row["ms"]) for row in rows] == [2, 2]


# ---- the page


@pytest.mark.parametrize("model", ["minilm", "smollm2-135m"])
def test_a_model_that_was_not_fetched_is_named_with_the_command_that_brings_it(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    probe = pretrained.opened if model.startswith("smol") else pretrained.encoder
    with pytest.raises(DataError, match=f"get it with `python -m crt_exp.data fetch models/{model}`"):
        probe(f"models/{model}")
