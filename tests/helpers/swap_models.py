"""Small models whose attention tests swap, what they are given, and what they give."""

import warnings

import pytest
import torch
import transformers
from torch import nn

from crt_exp import calibrate_attention, from_pretrained, swap_attention
from helpers.seeds import seeded

B = 2
L = 9


SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 40,
    "max_position_embeddings": 40,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
IMAGES = SIZES | {"image_size": 8, "patch_size": 4}
LOOSE = {"rtol": 1e-4, "atol": 1e-5}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)


def roberta():
    return transformers.RobertaModel(
        transformers.RobertaConfig(**SIZES, pad_token_id=1), add_pooling_layer=False
    )


def distilbert():
    return transformers.DistilBertModel(
        transformers.DistilBertConfig(
            dim=16,
            n_layers=2,
            n_heads=4,
            hidden_dim=32,
            vocab_size=40,
            max_position_embeddings=40,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=16,
            n_layer=2,
            n_head=4,
            vocab_size=40,
            n_positions=40,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


def llama(**sizes):
    defaults = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 40,
        "max_position_embeddings": 40,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**defaults | sizes))


def vit():
    return transformers.ViTModel(transformers.ViTConfig(**IMAGES), add_pooling_layer=False)


def vit_mae():
    return transformers.ViTMAEModel(transformers.ViTMAEConfig(**IMAGES, mask_ratio=0.0))


class Timm(nn.Module):
    def __init__(self):
        super().__init__()
        import timm

        self.inner = timm.models.VisionTransformer(
            img_size=8,
            patch_size=4,
            embed_dim=16,
            depth=2,
            num_heads=4,
            num_classes=0,
            qk_norm=True,
        )

    def forward(self, pixel_values):
        return self.inner.forward_features(pixel_values)


class Encoder(nn.Module):
    """nn.TransformerEncoder with the arguments of the others."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.inner = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2
        )
        spread(self, 0.2)  # a clone of one layer has equal parameters

    def forward(self, input_ids, attention_mask=None):
        padding = None if attention_mask is None else attention_mask == 0
        return self.inner(self.embedding(input_ids), src_key_padding_mask=padding)


TEXT = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "llama": llama,
    "encoder": Encoder,
}
IMAGE = {"vit": vit, "vit_mae": vit_mae, "timm": Timm}
ALL = TEXT | IMAGE
CAUSAL = {"gpt2": gpt2, "llama": llama}
HF = {
    name: ALL[name] for name in ("bert", "roberta", "distilbert", "gpt2", "llama", "vit", "vit_mae")
}


ALIKE = ("roberta", "distilbert", "vit_mae", "marian")
SEQ2SEQ_SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 40,
    "init_std": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def neox():
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SIZES, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    )


def bart():
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**SEQ2SEQ_SIZES, max_position_embeddings=40)
    )


def marian():
    return transformers.MarianMTModel(
        transformers.MarianConfig(**SEQ2SEQ_SIZES, max_position_embeddings=40)
    )


def whisper():
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **SEQ2SEQ_SIZES,
            num_mel_bins=4,
            max_source_positions=L,
            max_target_positions=40,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def bert2gpt2():
    decoder = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=4,
        vocab_size=40,
        n_positions=40,
        add_cross_attention=True,
        is_decoder=True,
    )
    return spread(
        transformers.EncoderDecoderModel(
            transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
                transformers.BertConfig(**SIZES), decoder
            )
        )
    )


class Seq2Seq(nn.Module):
    """nn.Transformer with the arguments of the others."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.inner = nn.Transformer(16, 4, 1, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        spread(self)

    def forward(self, input_ids, decoder_input_ids, attention_mask=None):
        source = self.embedding(input_ids)
        target = self.embedding(decoder_input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        past = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.inner(
            source,
            target,
            tgt_mask=past,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )


HF_SEQ2SEQ = {"bart": bart, "marian": marian, "whisper": whisper, "bert2gpt2": bert2gpt2}


def for_each_model(models):
    """One test for each model; models that share all code with another one are slow."""
    cases = []
    for name, make in models.items():
        marks = [pytest.mark.slow] if name in ALIKE else []
        cases.append(pytest.param(make, id=name, marks=marks))
    return pytest.mark.parametrize("make", cases)


def spread(model, std=0.3):
    """Random weights with which attention is not flat."""
    for p in model.parameters():
        nn.init.normal_(p, std=std) if p.ndim > 1 else None
    return model


def build_model(make, scale=4.0, seed=0):
    """A model in eval mode whose attention is not flat."""
    torch.manual_seed(seed)
    model = make().eval()
    if not isinstance(model, transformers.PreTrainedModel):
        scale = 1.5
    with torch.no_grad():
        for name, p in model.named_parameters():
            of_attention = any(part in name for part in ("attn", "attention", "q_proj", "k_proj"))
            if p.ndim == 2 and of_attention:
                p.mul_(scale)
    return model


def inputs(make, length=L, batch=B, seed=0):
    g = seeded(seed)
    if make in IMAGE.values():
        actual = {"pixel_values": torch.randn(batch, 3, 8, 8, generator=g)}
        if make is vit_mae:
            actual["noise"] = torch.rand(batch, 4, generator=g)
        return actual
    return {"input_ids": torch.randint(2, 40, (batch, length), generator=g)}


def run(model, **batch):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no statistics yet.*")
        out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out[0]


def swapped(make, name="favorpp", **options):
    if name not in ("exact", "identity"):
        options = {"m": 32} | options
    model = swap_attention(build_model(make), name, **options)
    if make in CAUSAL.values() and name not in ("exact", "identity"):
        calibrate_attention(model, [inputs(make, seed=s) for s in (1, 2)])
    return model


def attention(**options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, **options)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
    return module


BARE = {bert: {"add_pooling_layer": False}, vit: {"add_pooling_layer": False}}


def alike(model, other, make):
    return torch.equal(run(model, **inputs(make)), run(other, **inputs(make)))


def back(folder, make=bert, auto=None, **options):
    """The model of a folder, in eval mode."""
    kind = auto or type(build_model(make))
    return from_pretrained(kind, folder, **BARE.get(make, {}), **options).eval()
