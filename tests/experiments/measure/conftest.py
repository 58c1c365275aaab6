"""Tiny pretrained models in folders, for probes that read some."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from crt_exp.experiments.data.text import bert_tokenizer
from crt_exp.experiments.measure import pretrained, whisper


@pytest.fixture(scope="session")
def saved_models():
    """save(root, {name: model maker}, words): random weights in a folder each, and a tokenizer of the words beside
    them and in root / "vocab.txt". Attention is not flat."""

    def save(root, models, words):
        (root / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
        torch.manual_seed(0)
        for name, make in models.items():
            model = make()
            for p in model.parameters():
                torch.nn.init.normal_(p, std=0.5) if p.ndim > 1 else None
            model.save_pretrained(root / name)
            bert_tokenizer(root / "vocab.txt").save_pretrained(root / name)

    return save


@pytest.fixture
def letters():
    """A tokenizer of characters."""
    return lambda texts, **_: {"input_ids": [1 + ord(letter) % 96 for letter in texts]}


@pytest.fixture
def reader(monkeypatch, letters):
    """A Llama of two query heads that share one of keys, and texts without words."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=16,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.5,
        )
    ).eval()
    monkeypatch.setattr(pretrained, "load_pretrained", lambda name: (model, letters))
    texts = {}
    for split in ("train", "valid"):
        g = torch.Generator().manual_seed(len(split))
        texts[split] = torch.randint(1, 97, (28_000,), generator=g)
    monkeypatch.setattr(pretrained, "tokens", lambda name, split: texts[split])
    pretrained.exact_losses.cache_clear()
    yield model
    pretrained.exact_losses.cache_clear()


@pytest.fixture
def speaker(monkeypatch):
    """Of the probes of Whisper: a tiny one, and five utterances, each by a speaker of its own."""
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=60,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_mel_bins=8,
            max_source_positions=64,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    ).eval()
    processor = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: " ".join(f"w{int(i)}" for i in ids)
    )
    said = [
        SimpleNamespace(text=f"w{i} w{i + 1}", name=f"{i}", number=i, seconds=1.0) for i in range(5)
    ]
    monkeypatch.setattr(whisper, "AT_MOST", 4)
    monkeypatch.setattr(whisper, "load", lambda name: whisper.Recogniser(model, processor))
    monkeypatch.setattr(whisper, "utterances", lambda subset, seconds=0: said)
    monkeypatch.setattr(
        whisper,
        "features",
        lambda processor, each: torch.randn(
            1, 8, 128, generator=torch.Generator().manual_seed(each.number)
        ),
    )
    whisper.exact_transcript.cache_clear()
    yield model
    whisper.exact_transcript.cache_clear()
