"""Model types of transformers, timm, torch and torchaudio: each is exact when swapped, or refused at the swap; none is
wrong. A fixed sample is fast; the slow test tries all.

A model is judged in float64 by laws that hold whatever its attention: `exact` in place of its own changes nothing, with
and without padding, and unswapping gives every bit back; random features change it, let no token see the future where
the model's own attention does not, and keep padding out."""

import copy

import pytest
import torch
import transformers
from helpers import tiny_models
from helpers.covering import slow
from helpers.tiny_models import BATCH, NotBuilt, outputs, spread
from transformers.models.florence2.modeling_florence2 import Florence2VisionBackbone

from crt_exp import swap_attention, unswap_attention
from crt_exp.swap import families

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
LIBRARIES = {
    "transformers": (tiny_models.model_types, tiny_models.of_transformers),
    "timm": (tiny_models.timm_names, tiny_models.of_timm),
    "torch": (lambda: tiny_models.TORCH, tiny_models.of_torch),
    "torchaudio": (lambda: tiny_models.TORCHAUDIO, tiny_models.of_torchaudio),
}
EXACT = 1e-6  # relative difference in float64 that counts as none: some models go through float32 in places
SOFTMAX = torch.nn.functional.softmax
LEAK = 1e-12  # of the future, in float64: rounding, since sums are scaled by what a chunk holds
FAST = {
    "transformers": [
        "bart",
        "bert",
        "gemma3_text",
        "gpt2",
        "llama",
        "llama4_text",
        "qwen2_vl",
        "whisper",
    ],
    "torch": ["MultiheadAttention", "Transformer", "TransformerDecoder", "TransformerEncoder"],
    "torchaudio": ["Conformer"],
    "timm": ["eva02_tiny_patch14_224"],
}
SLOW = {
    "transformers": [
        "albert",
        "beit",
        "clip",
        "cohere",
        "detr",
        "gpt_neox",
        "llava",
        "marian",
        "modernbert",
        "opt",
        "paligemma",
        "roberta",
        "vit_mae",
    ],
    "timm": ["vit_small_patch16_rope_224"],
}
# layers that cannot be swapped beside layers that can: what the own attention function of the former takes
MIXED = {
    "canary": "a mask of its own",
    "dots3_note": "a sparse index",
    "gemma3_text": "a sliding window",
    "llama4_text": "chunks",
    "mimo_v2_flash": "sinks",
    "modernbert": "a sliding window, bidirectional",
    "seamless_m4t": "a position bias",
}
REFUSED = {
    "deepseek_v32": "sparse index",
    "dory": "runs several times",
    "gemma2": "softcap",
    "gpt_oss": "sinks",
    "mistral": "has a window",
    "pixtral": "packed",
    "parakeet_encoder": "masks pairs",
    "t5": "position bias",
    "t5gemma2": "one softmax",
    "wav2vec2-conformer": "position bias",
    "wavlm_model": "computed by WavLMSelfAttention",
}


@pytest.fixture(autouse=True)
def softmax_in_double(monkeypatch):
    """Models whose own attention asks for a softmax in float32 get the one of their inputs.

    Its rounding differs between processors, and would be taken for a difference of the swap.
    """
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda input, dim=-1, dtype=None: SOFTMAX(input, dim)
    )


def judge(library, name):
    """(outcome, why): exact, refused, wrong, no attention or not tried."""
    try:
        model, batch = LIBRARIES[library][1](name)
        return judge_model(model, batch)
    except NotBuilt as error:
        return "not tried", str(error)


def judge_model(model, batch):
    cases = {"plain": batch} | padded(model, batch)
    before = {}
    for name, case in cases.items():
        before[name] = outputs(model, case)
    if any(distance(outputs(model, case), before[name]) for name, case in cases.items()):
        raise NotBuilt("its own output is not the same twice")
    causal = future_leak(model, batch) < LEAK
    try:
        swap_attention(model, "exact")
    except ValueError as error:
        why = " ".join(str(error).split())
        if "no supported attention" in why and "unsupported: none" in why:
            return "no attention", why
        return "refused", why
    try:
        check_laws(model, cases, before, causal)
    except NotBuilt:
        raise
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "exact", "causal" if causal else ""


def check_laws(model, cases, before, causal):
    for name, case in cases.items():
        found = outputs(model, case)
        mask = case.get("attention_mask")
        off = distance(found, before[name], mask)
        if not off < EXACT and hasattr(
            model, "set_attn_implementation"
        ):  # fused ones may drop the causal order
            twin = unswap_attention(copy.deepcopy(model))
            twin.set_attn_implementation("eager")
            off = distance(found, outputs(twin, case), mask)
        assert off < EXACT, f"{name}: exact attention is {off:.2g} off"
    unswap_attention(model)
    for name, case in cases.items():
        actual = distance(outputs(model, case), before[name])
        assert actual == 0, "not restored"
    swap_attention(model, "favorpp", m=16)
    after = outputs(model, cases["plain"])
    if not any(part.swapped.reached for part in model.modules() if "swapped" in part._modules):
        raise NotBuilt("the batch reaches none of the layers that were swapped")
    assert EXACT < distance(after, before["plain"]) < float("inf"), (
        "favorpp changes nothing, or is not finite"
    )
    assert not causal or future_leak(model, cases["plain"]) < LEAK, "favorpp: the future leaks"
    for name in cases.keys() - {"plain"}:
        assert padding_leak(model, cases[name]) < LEAK, f"favorpp: {name} changes the output"


def padded(model, batch):
    """The batch with its last or first tokens masked in one row, where the model itself honours such a mask."""
    cases = {}
    for name, tokens in (
        ("padding on the right", slice(-3, None)),
        ("padding on the left", slice(0, 3)),
    ):
        mask = torch.ones_like(batch.get("input_ids", torch.ones(BATCH, 4, dtype=torch.long)))
        mask[1, tokens] = 0
        case = batch | {"attention_mask": mask}
        try:
            if all(t.isfinite().all() for t in outputs(model, case)) and not padding_leak(
                model, case
            ):
                cases[name] = case
        except Exception:
            continue
    return cases


@torch.no_grad()
def padding_leak(model, batch):
    """How much other tokens at the masked places change what stands at the kept ones."""
    mask = batch["attention_mask"]
    other = batch["input_ids"].clone()
    other[mask == 0] = 5 + (other[mask == 0] + 1) % 40
    return distance(outputs(model, batch | {"input_ids": other}), outputs(model, batch), mask)


@torch.no_grad()
def future_leak(model, batch):
    """How much the later half of the (decoder's) tokens changes the output at the earlier half;
    inf where it has none."""
    key = next((key for key in ("decoder_input_ids", "input_ids", "tgt") if key in batch), None)
    if key is None:
        return float("inf")
    changed = batch[key].clone()
    half = batch[key].shape[1] // 2
    late = changed[:, half:]
    changed[:, half:] = -late if late.is_floating_point() else 5 + (late + 1) % 40

    def early(values):
        """The first output by tokens, at the earlier half; none where there is none."""
        for t in outputs(model, batch | {key: values}):
            if t.ndim == 3 and t.shape[:2] == changed.shape[:2]:
                return [t[:, :half]]
        return []

    before = early(batch[key])
    if not before:
        return float("inf")
    return distance(before, early(changed))


def distance(one, two, mask=None):
    """The largest |a - b| / max |b| of a pair; with a mask, at its kept places, and only of tensors that have them."""
    if [t.shape for t in one] != [t.shape for t in two]:
        return float("inf")
    worst = 0.0
    for a, b in zip(one, two):
        if mask is not None:
            if a.shape[:2] != mask.shape:
                continue
            a = a[mask.bool()]
            b = b[mask.bool()]
        if a.numel():
            difference = (a - b).abs().max() / b.abs().max().clamp(min=1e-300)
        else:
            difference = torch.zeros(())
        worst = max(worst, float(torch.nan_to_num(difference, nan=torch.inf)))
    return worst


def judge_partly(name, implementation=None):
    """(case, layers, distance) of a model that gets exact attention in some of its layers."""
    model, batch = LIBRARIES["transformers"][1](name)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    cases = {"plain": batch} | padded(model, batch)
    if implementation == "eager":
        cases["with matrices"] = batch | {"output_attentions": True}
    before = {}
    for case in cases:
        before[case] = outputs(model, cases[case])
    for layers in ("supported", 0):
        try:
            swap_attention(model, "exact", layers=layers)
        except ValueError:  # no layer, or not the first one, can be swapped
            continue
        parts = [part for _, part in families.attention_modules(model)]
        stays = any("swapped" not in part._modules for part in parts)
        for case, own in before.items() if stays else ():
            mask = cases[case].get("attention_mask")
            yield case, layers, distance(outputs(model, cases[case]), own, mask)
        unswap_attention(model)
        for case in cases:
            actual = distance(outputs(model, cases[case]), before[case])
            assert actual == 0


# ---- the verdicts


SWAPPED = []
for library, names in FAST.items():
    SWAPPED += [(library, name) for name in names]


@pytest.mark.parametrize("library, name", SWAPPED)
def test_exact_when_swapped(library, name):
    outcome, why = judge(library, name)
    assert outcome == "exact", why


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_swap_with_the_reason(name):
    library = "transformers"
    if name == "wavlm_model":
        library = "torchaudio"
    outcome, why = judge(library, name)
    assert outcome == "refused", (outcome, why)
    assert REFUSED[name] in why, (outcome, why)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_model_type_is_wrong(library):
    exact = {*FAST[library], *SLOW.get(library, [])}
    actual = {}
    for name in {*LIBRARIES[library][0](), *exact}:
        actual[name] = judge(library, name)
    assert not {name: why for name, (outcome, why) in actual.items() if outcome == "wrong"}
    assert not {name: actual[name] for name in exact if actual[name][0] != "exact"}


def test_attention_over_layers_or_channels_is_refused():
    """Its axes would be taken for heads and tokens, so that every call would fail."""
    text = tiny_models.tiny_model("inkling2_text")
    depth = []
    for path, part in text.named_modules():
        if "AttentionResidual" in str(type(part)):
            depth.append(path)
    places = [path for path, _ in families.attention_modules(text)]
    assert depth
    assert {*depth} < {*places}
    with pytest.raises(ValueError, match="no layer can be swapped"):
        swap_attention(text, "exact", layers="supported")
    with pytest.raises(ValueError, match="another axis than tokens"):
        layers = [places.index(path) for path in depth]
        swap_attention(text, "exact", layers=layers)
    sizes = {
        "embed_dim": [32],
        "num_heads": [4],
        "num_groups": [4],
        "depths": [1],
    }
    shapes = {
        "patch_size": [7],
        "patch_stride": [4],
        "patch_padding": [3],
        "patch_prenorm": [False],
    }
    config = transformers.Florence2VisionConfig(**sizes, **shapes, projection_dim=32)
    vision = Florence2VisionBackbone(config).eval()
    with pytest.raises(ValueError, match="channel_attn.*another axis than tokens.*swaps \\[0\\]"):
        swap_attention(vision, "exact")


@pytest.mark.parametrize("name", ["hrm_text", "zamba2"])
@torch.no_grad()
def test_layers_that_run_twice_keep_the_keys_of_each_time(name):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    mamba = {"mamba_d_state": 4, "n_mamba_heads": 2, "mamba_headdim": 32, "chunk_size": 4}
    layers = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4}
    special = {
        "hrm_text": {"num_layers_per_stack": 1},
        "zamba2": mamba | layers | {"num_mem_blocks": 1},
    }
    config = transformers.CONFIG_MAPPING[name](
        **sizes, intermediate_size=48, vocab_size=64, **special[name]
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    ids = tiny_models.tokens()
    whole = swap_attention(model, "nearfar")(input_ids=ids, use_cache=False).logits
    input_ids = ids[:, :7]
    cached = model(input_ids=input_ids, use_cache=True)
    last = model(input_ids=ids[:, 7:8], past_key_values=cached.past_key_values, use_cache=True)
    expected = whole[:, 7:8]
    torch.testing.assert_close(last.logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("name", [*MIXED, "bart", "bert", "llama"])
def test_unswapped_layers_are_unchanged(name, implementation):
    actual = list(judge_partly(name, implementation))
    assert actual
    assert not [case for case in actual if not case[-1] < EXACT]


@pytest.mark.parametrize("name, plain", [("gemma3_text", "sdpa"), ("mimo_v2_flash", "eager")])
@pytest.mark.parametrize("own", ["flash_attention_2", "flex_attention"])
def test_unswapped_layers_get_an_implementation_that_takes_their_arguments(name, plain, own):
    model = tiny_models.tiny_model(name)
    model.config._attn_implementation_internal = own
    swap_attention(model, "exact", layers="supported")
    parts = [part for _, part in families.attention_modules(model)]
    stay = [part for part in parts if "swapped" not in part._modules]
    assert stay
    assert {part.config._attn_implementation for part in stay} == {plain}
    unswap_attention(model)
    assert {part.config._attn_implementation for part in parts} == {own}


@pytest.mark.parametrize("name", ["dots3_note", "hy_v4_vl"])
@torch.no_grad()
def test_unswapped_layers_select_the_same_keys(name):
    """A sparse index that leaves keys out, which those of small models do not."""
    model, batch = tiny_models.of_transformers(name)
    whole = outputs(model, batch)
    batch = {"input_ids": batch["input_ids"]}
    for part in model.modules():
        if hasattr(part, "index_topk"):
            part.index_topk = 2
    before = outputs(model, batch)
    assert distance(before, whole) > EXACT
    swap_attention(model, "exact", layers="supported")
    assert distance(outputs(model, batch), before) < EXACT


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_unswapped_layers_of_all_models_are_unchanged():
    wrong = []
    for name in tiny_models.model_types():
        try:
            wrong += [(name, *case) for case in judge_partly(name) if not case[-1] < EXACT]
        except NotBuilt:
            continue
    assert not wrong


@pytest.mark.parametrize("name", ["ClapText", "AlignText"])
def test_encoders_stay_bidirectional_where_their_modules_say_causal(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=99,
        max_position_embeddings=64,
    )
    model = getattr(transformers, f"{name}Model")(config).double().eval()
    spread(model)
    actual = judge_model(model, {"input_ids": tiny_models.tokens()})
    assert actual == ("exact", "")


# ---- masks


def odd_masks(ids):
    """Of other sizes and kinds than (batch, tokens); a padded one leaves out the last tokens."""
    B, L = ids.shape

    def ones(*sizes):
        return torch.ones(sizes, dtype=torch.long)

    def padded(mask):
        return mask.masked_fill(torch.arange(mask.shape[-1]) >= mask.shape[-1] - 2, 0)

    sizes = {
        "shorter": (B, L - 4),
        "longer": (B, L + 3),
        "one row": (1, L),
        "too many rows": (B + 1, L),
        "one column": (B, 1),
        "no column": (B, 0),
        "one axis": (L,),
        "pairs": (B, L, L),
    }
    masks = {}
    for name, size in sizes.items():
        masks[name] = ones(*size)
    masks |= {
        f"{name}, padded": padded(masks[name])
        for name in ("shorter", "longer", "one row", "too many rows")
    }
    return masks | {
        "causal pairs": ones(B, L, L).tril(),
        "boolean": padded(ones(B, L)).bool(),
        "boolean, shorter": padded(ones(B, L - 4)).bool(),
        "numbers": padded(ones(B, L)).double(),
    }


def answer(model, batch):
    try:
        return outputs(model, batch)
    except Exception as error:
        return error


@pytest.mark.parametrize(
    "name",
    [
        "bart",
        "bert",
        "gemma3_text",
        "llama",
        *map(slow, ("distilbert", "gpt2", "modernbert", "qwen2_vl")),
    ],
)
def test_a_mask_of_any_form_means_what_it_did_or_is_refused(name):
    """Where the model itself takes it."""
    model, batch = tiny_models.of_transformers(name)
    for key in ("input_ids", "decoder_input_ids"):
        for what, mask in odd_masks(batch[key]).items() if key in batch else ():
            case = batch | {key.replace("input_ids", "attention_mask"): mask}
            own = answer(model, case)
            new = answer(swap_attention(model, "exact"), case)
            unswap_attention(model)
            if isinstance(own, Exception):
                continue
            if isinstance(new, Exception):
                assert isinstance(new, ValueError), (
                    key,
                    what,
                    new,
                )
                assert "attention_mask" in str(new), (
                    key,
                    what,
                    new,
                )
            else:
                assert distance(new, own) < 1e-6, (key, what)
