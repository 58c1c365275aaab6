"""Tiny models with attention, and batches that they take:
every model type of transformers, timm's, torch's and torchaudio's.

Nothing here knows a model of transformers by name: sizes are recognised by what the keys of a configuration are called.
A type whose configuration does not shrink to a model, or whose model takes no batch of the usual arguments, raises
`NotBuilt` with the reason. All models have random weights, float64, and are in eval mode.
"""

import inspect
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from helpers.seeds import seeded

HIDDEN = 32
HEADS = 4
HEAD_DIM = 8
LAYERS = 2
VOCABULARY = 99
LENGTH = 10
BATCH = 2
IMAGE = 64
PATCH = 16
POSITIONS = 64
WINDOW = 4  # of layers that see one: below LENGTH
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window_size")
PARAMETERS = 70_000_000  # of the largest model that counts as tiny

# What a key is called -> what it becomes; the first pattern that fits the whole name decides.
SIZES = (
    (
        r"(.*_)?(num_)?(hidden_|encoder_|decoder_|self_attn_|cross_attn_|transformer_|text_|attention_)*"
        r"(layers|blocks|layer)(_num)?",
        LAYERS,
    ),
    (r"n_layers?|depth|num_(hidden_)?layers|.*_num_layers|num_.*_layers|.*_depth", LAYERS),
    (r"(.*_)?(num_)?(key_value|kv)_heads?|multi_query_group_num|n_kv_heads?", "kv_heads"),
    (r"(.*_)?(num_)?(attention_)?heads?|n_heads?|num_heads|.*_num_heads|.*_attention_heads", HEADS),
    (
        r"(.*_)?head_(dim|size)|kv_channels|d_kv|attention_head_size|rotary_dim|head_size|dim_head",
        HEAD_DIM,
    ),
    (r".*lora_rank", 16),
    (
        r"(.*_)?(intermediate_size|ffn_dim|ff_dim|mlp_dim|d_ff|n_inner|ffn_hidden_size|feedforward_dim|inner_dim|ffn_size"
        r"|linear_units)",
        2 * HIDDEN,
    ),
    (r"(.*_)?vocab_size(_.*)?|.*num_tokens|num_embeddings|vocab_size_per_.*", VOCABULARY),
    (
        r"(.*_)?(num_)?(local_|routed_|n_routed_)?experts|n_routed_experts|moe_num_experts|num_experts",
        4,
    ),
    (r"(.*_)?(num_)?experts_per_(tok|token)|moe_top_?k|top_k|.*router_top_k", 2),
    (r"(.*_)?n_group|topk_group", 1),
    (r"(.*_)?image_size|img_size|input_size", IMAGE),
    (r"(.*_)?patch_size", PATCH),
    (
        r"max_source_positions|max_target_positions|(.*_)?max_position_embeddings|n_positions|n_ctx|seq_length"
        r"|max_seq_len(gth)?|max_2d_position_embeddings",
        POSITIONS,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|hidden_channels|projection_dim|embedding_size"
        r"|embedding_dim|word_embed_proj_dim|emb_dim|output_dim|proj_dim|latent_dim|width|d_embed|qk_dim|qk_channels"
        r"|v_channels|d_latents|dim|out_features_dim|encoder_dim|decoder_dim|aggregate_dim|output_hidden_size"
        r"|initial_hidden_size)",
        HIDDEN,
    ),
    (r"(.*_)?(conv_dim|num_conv_pos_embeddings)", 16),
    (r"(.*_)?(num_queries|num_query_tokens|num_latents|num_object_queries)", 6),
)


class NotBuilt(Exception):
    """No tiny model of this type, or no batch for it; the text says why."""


Made = tuple[nn.Module, dict[str, Any]]  # a model and a batch


# ---- transformers


def of_transformers(kind: str) -> Made:
    """The base model of a model type. Raises NotBuilt."""
    model = tiny_model(kind)
    return model, accepted_batch(model)


def model_types() -> list[str]:
    """All model types that transformers has a base model for."""
    from transformers import MODEL_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = {config.model_type for config in MODEL_MAPPING}
    return sorted(name for name in CONFIG_MAPPING_NAMES if name in known)


def tiny_model(kind: str) -> nn.Module:
    """Its model without a batch. Raises NotBuilt."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    try:
        config = shrink(CONFIG_MAPPING[kind]())
        config._experts_implementation = "eager"  # grouped products know no float64
        with torch.device("meta"):
            parameters = sum(p.numel() for p in AutoModel.from_config(config).parameters())
        if parameters > PARAMETERS:
            raise NotBuilt(f"{parameters / 1e6:.0f} million parameters when shrunk")
        model = AutoModel.from_config(config).double().eval()
    except NotBuilt:
        raise
    except (Exception, SystemExit) as error:
        raise NotBuilt(f"not built: {_line(error)}") from None
    spread(model)
    return model


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Random weights so large that attention is far from uniform and tokens differ."""
    generator = seeded(1)
    for p in model.parameters():
        if p.ndim > 1 and p.is_floating_point() and p.numel():
            p.copy_(
                torch.randn(p.shape, generator=generator, dtype=p.dtype) * (2 / p[0].numel() ** 0.5)
            )
        elif p.is_floating_point():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def shrink(config: Any) -> Any:
    """The configuration with tiny sizes, in place; those inside it too. A window that cuts sequences still does."""
    from transformers import PreTrainedConfig

    longest = getattr(config, "max_position_embeddings", None)
    heads = next(
        (
            value
            for key, value in vars(config).items()
            if _size(key) == HEADS and isinstance(value, int)
        ),
        None,
    )
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
            continue
        new = shrunk(key, value)
        if key in WINDOWS and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            new = POSITIONS
            if value < (longest or float("inf")):
                new = WINDOW
        if _size(key) == "kv_heads" and value and value == heads:
            new = HEADS  # no groups
        if new is not value:
            try:
                setattr(config, key, new)
            except Exception:  # a key that the class computes
                continue
    return config


def shrunk(key: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    texts = isinstance(value, list) and value and all(isinstance(v, str) for v in value)
    if key == "layer_types" or (texts and key.endswith("layer_types")):
        return _two_kinds(value)
    if re.search("dropout|drop_path|layerdrop|drop_rate", key):
        return 0.0 if isinstance(value, (int, float)) else value
    if (
        re.fullmatch(r".*token_(id|index)|.*_token_ids", key)
        and isinstance(value, int)
        and value >= VOCABULARY
    ):
        return VOCABULARY - 1 - sum(map(ord, key)) % 40
    if key == "mrope_section" or key.endswith("mrope_section"):
        return [1, 1, 2]
    if (
        key in ("rope_scaling", "rope_parameters")
        and isinstance(value, dict)
        and "full_attention" not in value
    ):
        return value | {"mrope_section": [1, 1, 2]}  # ignored where rotations have no sections
    if isinstance(value, int):
        size = _size(key)
        if size == "kv_heads":
            return min(value, 2) if value > 0 else value
        return value if size is None else min(size, value) if value > 0 else value
    if isinstance(value, (list, tuple)) and value and all(type(entry) is int for entry in value):
        size = _size(key)
        if isinstance(size, int) and len(set(value)) == 1:
            return type(value)(min(size, v) for v in value)
    return value


def _size(key: str) -> int | str | None:
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)


def _two_kinds(types: list[str]) -> list[str]:
    """Two layers, of different kinds where there are."""
    kinds = list(dict.fromkeys(types))
    return (kinds[:2] if len(kinds) > 1 else kinds * 2)[:LAYERS]


# ---- batches


def tokens(length: int = LENGTH, batch: int = BATCH, seed: int = 0, high: int = 50) -> Tensor:
    return torch.randint(5, high, (batch, length), generator=seeded(seed))


def batches(model: nn.Module) -> list[dict[str, Any]]:
    """Batches that a model may take, to be tried in turn, after the names of its arguments."""
    names = list(inspect.signature(model.forward).parameters)
    config = model.config
    g = seeded()
    randn = partial(torch.randn, generator=g, dtype=torch.float64)
    text = {"input_ids": tokens()} if "input_ids" in names else {}
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = tokens(seed=3)
    vision = getattr(config, "vision_config", config)
    size, channels = (
        _first(vision, names, default)
        for names, default in (
            (("image_size", "img_size", "input_size"), IMAGE),
            (("num_channels", "in_channels", "in_chans"), 3),
        )
    )
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    result = []
    if "pixel_values" in names:
        images = {"pixel_values": randn(BATCH, channels, height, width)}
        result += [text | images, images] if text else [images]
        result.append(
            {
                "pixel_values": randn(
                    BATCH, _first(config, ("num_frames",), 4), channels, height, width
                )
            }
        )
        result.append({"pixel_values": randn(BATCH, channels, 64, 64)})
    if text:
        result.append(text)
        result.append(text | {"bbox": torch.ones(BATCH, LENGTH, 4, dtype=torch.long)})
    if "input_values" in names:
        result += [{"input_values": randn(BATCH, 2000)}, {"input_values": randn(BATCH, 1, 2000)}]
        shape = _first(config, ("max_length",), 64), _first(config, ("num_mel_bins",), 80)
        result.append({"input_values": randn(BATCH, *shape)})
    if "input_features" in names:
        mels = _first(
            config,
            (
                "num_mel_bins",
                "feature_size",
                "input_dim",
                "feature_projection_input_dim",
                "input_feat_per_channel",
            ),
            80,
        )
        frames = 2 * _first(config, ("max_source_positions",), POSITIONS)
        cases = [
            (BATCH, mels, frames),
            (BATCH, frames, mels),
            (BATCH, 1, 64, 64),
        ]
        for shape in cases:
            decoded = {"decoder_input_ids": tokens(seed=3)} if "decoder_input_ids" in names else {}
            result.append({"input_features": randn(*shape)} | decoded)
    if "past_values" in names:
        shape = _first(config, ("context_length",), 32), _first(config, ("num_input_channels",), 1)
        result.append({"past_values": randn(BATCH, *shape)})
    return result


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


@torch.no_grad()
def accepted_batch(model: nn.Module) -> dict[str, Any]:
    """The first batch of `batches` that the model computes something finite from. Raises NotBuilt."""
    why = "no argument that a batch is made for"
    for batch in batches(model):
        try:
            if all(t.isfinite().all() for t in outputs(model, batch)):
                return batch
            why = "not finite"
        except Exception as error:
            why = _line(error)
    raise NotBuilt(f"takes no usual batch: {why}")


@torch.no_grad()
def outputs(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """All floating tensors of the model's output; what is random in it drawn alike at each call."""
    torch.manual_seed(0)
    if "use_cache" in inspect.signature(model.forward).parameters:
        options = {"use_cache": False}
    else:
        options = {}
    return list(_tensors(model(**batch, **options)))


def _tensors(out: Any):
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
    elif isinstance(out, dict):
        for value in out.values():
            yield from _tensors(value)
    elif isinstance(out, (tuple, list)):
        for value in out:
            yield from _tensors(value)


def _line(error: BaseException) -> str:
    text = re.sub(
        r"/\S*/site-packages/", "", str(error).strip()
    ).splitlines()  # of any machine alike
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


# ---- timm, torch, torchaudio


def timm_names() -> list[str]:
    """For each file of timm that defines models, the smallest of those with the shortest names."""
    import timm

    files: dict[str, list[str]] = {}
    for name in timm.list_models():
        files.setdefault(timm.model_entrypoint(name).__module__, []).append(name)
    short = (sorted(names, key=lambda name: (len(name), name))[:6] for names in files.values())
    return sorted(min(names, key=_timm_parameters) for names in short)


def _timm_parameters(name: str) -> int:
    import timm

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name).parameters())
    except Exception:  # a model that cannot be counted without memory comes last
        return 2**62


def of_timm(name: str) -> Made:
    """A model of timm in its own size, and one image."""
    import timm

    count = _timm_parameters(name)
    if count > PARAMETERS:
        raise NotBuilt(f"{count / 1e6:.0f} million parameters, or none that can be counted")
    torch.manual_seed(0)
    try:
        model = timm.create_model(name).double().eval()
        batch = {"x": torch.randn(1, *model.pretrained_cfg["input_size"], dtype=torch.float64)}
        outputs(model, batch)
    except Exception as error:
        raise NotBuilt(f"not built: {_line(error)}") from None
    return model, batch


def _vectors(*names: str, length: int = LENGTH) -> dict[str, Tensor]:
    generator = seeded()
    return {
        name: torch.randn(BATCH, length, HIDDEN, generator=generator, dtype=torch.float64)
        for name in names
    }


def _torch_layer(kind: type) -> nn.Module:
    return kind(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True)


def _causal(name: str) -> dict[str, Any]:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    return {f"{name}_mask": mask, f"{name}_is_causal": True}


TORCH = {
    "MultiheadAttention": lambda: (
        nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True),
        _vectors("query", "key", "value"),
    ),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(_torch_layer(nn.TransformerEncoderLayer), LAYERS),
        _vectors("src"),
    ),
    "TransformerDecoder": lambda: (
        nn.TransformerDecoder(_torch_layer(nn.TransformerDecoderLayer), LAYERS),
        _vectors("tgt", "memory") | _causal("tgt"),
    ),
    "Transformer": lambda: (
        nn.Transformer(HIDDEN, HEADS, LAYERS, LAYERS, 2 * HIDDEN, 0.0, batch_first=True),
        _vectors("src", "tgt") | _causal("tgt"),
    ),
}


def of_torch(name: str) -> Made:
    """A module of torch with attention."""
    return _ready(*TORCH[name]())


def _speech(make: str, **sizes: int) -> Made:
    """wav2vec 2.0, HuBERT or WavLM with an encoder of two layers."""
    from torchaudio import models

    convolutions = [(HIDDEN, 10, 5), (HIDDEN, 3, 2)]
    common = {
        "extractor_mode": "group_norm",
        "extractor_conv_layer_config": convolutions,
        "extractor_conv_bias": False,
        "encoder_embed_dim": HIDDEN,
        "encoder_projection_dropout": 0.0,
        "encoder_pos_conv_kernel": 15,
        "encoder_pos_conv_groups": 2,
        "encoder_num_layers": LAYERS,
        "encoder_num_heads": HEADS,
        "encoder_attention_dropout": 0.0,
        "encoder_ff_interm_features": 2 * HIDDEN,
        "encoder_ff_interm_dropout": 0.0,
        "encoder_dropout": 0.0,
        "encoder_layer_norm_first": False,
        "encoder_layer_drop": 0.0,
        "aux_num_out": None,
    }
    generator = seeded()
    waveforms = torch.randn(BATCH, 800, generator=generator, dtype=torch.float64)
    return getattr(models, make)(**common, **sizes), {"waveforms": waveforms}


def _conformer() -> Made:
    from torchaudio.models import Conformer

    model = Conformer(HIDDEN, HEADS, 2 * HIDDEN, LAYERS, depthwise_conv_kernel_size=3)
    return model, _vectors("input") | {"lengths": torch.tensor([LENGTH, LENGTH - 3])}


TORCHAUDIO = {
    "Conformer": _conformer,
    "wav2vec2_model": lambda: _speech("wav2vec2_model"),
    "wavlm_model": lambda: _speech("wavlm_model", encoder_num_buckets=8, encoder_max_distance=16),
}


def of_torchaudio(name: str) -> Made:
    """A model of torchaudio with attention."""
    return _ready(*TORCHAUDIO[name]())


def _ready(model: nn.Module, batch: dict[str, Any]) -> Made:
    model = model.double().eval()
    spread(model)
    return model, batch
