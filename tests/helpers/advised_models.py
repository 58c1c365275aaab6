"""Small models whose attention is not flat, tokens and images, for tests of advice."""

import torch
import transformers

from crt_exp.experiments.models import vision
from helpers.seeds import seeded
from helpers.small_bert import VOCABULARY

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = HEADS | {"hidden_size": 16, "vocab_size": len(VOCABULARY), "max_position_embeddings": 256}
CLASSES = ("class0", "class1", "class2")
DESCRIPTION = vision.VisionDescription(
    vision.SIZED, 12, vision.NEW | {"patch_size": 3, "embed_dim": 32, "depth": 2}, CLASSES
)


def peaked(model):
    """Attention that is not flat."""
    torch.manual_seed(0)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def llama():
    return peaked(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))


def bert():
    return peaked(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)))


def vit():
    return peaked(DESCRIPTION.make())


def ids(count=1200):
    return torch.randint(5, len(VOCABULARY), (count,), generator=seeded())


def images(count=7):
    return torch.randn(count, 3, 12, 12, generator=seeded())
