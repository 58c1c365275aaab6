"""The plain Transformer takes every attention."""

import pytest
import torch
import transformers

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.models import encoders
from crt_exp.models.language import Transformer


@pytest.mark.parametrize("name", ["exact", "identity", "favorp", "favorpp", "relu", "linformer"])
def test_transformer(name):
    options = {} if name in ("exact", "identity", "linformer") else {"m": 8}
    model = Transformer(2, 3, 32, 16, Mechanism.of(name, **options).layer)
    x = torch.randn(2, 7, 16, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad.isfinite().all() and len({id(b.attention) for b in model.blocks}) == 3


def test_padding_equals_truncation():
    model = Transformer(2, 2, 32, 16, Mechanism.of("favorpp", m=8).layer).eval()
    x, mask = torch.randn(2, 9, 16), torch.arange(9).expand(2, 9) < 6
    torch.testing.assert_close(model(x, mask)[:, :6], model(x[:, :6]), rtol=1e-4, atol=1e-5)


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 60,
         "max_position_embeddings": 40}


@pytest.mark.parametrize("kind, longest", [("Bert", 40), ("Electra", 40), ("Roberta", 38), ("MPNet", 38)])
def test_the_longest_sequence_is_what_the_model_takes(kind, longest):
    """RoBERTa's positions begin after the number of the padding."""
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = transformers.AutoModel.from_config(config).eval()
    model(input_ids=torch.full((1, longest), 7))
    encoders.check_length(config, longest, "task.block")
    with pytest.raises(ConfigError, match=f"task.block={longest + 1}: expected at most {longest} tokens"):
        encoders.check_length(config, longest + 1, "task.block")


@pytest.mark.parametrize("kind, head", [
    ("Roberta", "AutoModelForMaskedLM"), ("Electra", "AutoModelForSequenceClassification"),
    ("DistilBert", "AutoModelForSequenceClassification")])
def test_encoders_that_are_not_bert(kind, head, tmp_path):
    """Pretrained weights with another attention, and a head made anew."""
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
             "intermediate_size": "hidden_dim"}
    sizes = {names.get(key, key): value for key, value in SIZES.items()} if kind == "DistilBert" else SIZES
    saved = transformers.AutoModelForMaskedLM.from_config(getattr(transformers, f"{kind}Config")(**sizes))
    saved.save_pretrained(tmp_path)
    origin = encoders.origin_of(str(tmp_path), "uptrain")
    model = encoders.load_model(head, encoders.load_config(origin), origin, Mechanism.of("favorpp", m=8)).eval()
    assert model(input_ids=torch.full((2, 9), 7)).logits.isfinite().all()
    loaded, weights = model.base_model.state_dict(), saved.base_model.state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
