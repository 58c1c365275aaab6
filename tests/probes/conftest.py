"""Tiny pretrained models in folders, for probes that read some."""

import pytest
import torch

from crt_exp.data.text import bert_tokenizer


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
