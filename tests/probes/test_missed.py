"""What queries miss of real weight, beside what they state of it."""

import pytest
import torch
from data_folder import lying

from crt_exp.mechanism import Mechanism
from crt_exp.nearfar import stated
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.layer import NearFar
from crt_exp.nearfar.looks import looks
from crt_exp.nearfar.recall import RecallNearFar
from crt_exp.probes.approximation import head_errors
from crt_exp.probes.captured import LayerInputs, Pretrained
from crt_exp.probes.missed import STATEMENTS, missed_weight, statements

SIZES = {"block": 8, "heavy": 3, "cells": 4, "open": 6, "exact_until": 32}


def tensors(S=120, d=16):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(1, heads, S, d, generator=g) * d**-0.25 for heads in (4, 2, 2))


def test_missed_weight_is_that_of_keys_that_are_neither_near_nor_heavy_nor_opened():
    x, y, _ = tensors()
    sizes = NearFar(4, 16, kv_heads=2, causal=True, **SIZES).sizes
    found = missed_weight(x, y, sizes)
    epochs = RecallNearFar(sizes).choose(x[0].unflatten(0, (2, 2)), y[0], None, slice(None)).epochs
    assert (found[:, :, :32] == 0).all() and (found[:, :, 32:] > 0).all()
    for h, i in ((0, 32), (1, 57), (2, 100), (3, 119)):
        epoch = next(e for e in epochs if e.start <= i < e.stop)
        weight = (x[0, h, i].double() @ y[0, h // 2, :i + 1].double().T).softmax(-1)
        look = looks(x[:, h, i:i + 1], y[:, h // 2])[0, 0, :(i // 8 - 1) * 8]
        look[epoch.heavy[h // 2]] = -torch.inf
        rest = look.argsort(descending=True, stable=True)[6:len(look) - 3]
        torch.testing.assert_close(found[0, h, i], weight[rest].sum())


def test_statements_stand_beside_the_errors_of_heads():
    layer = LayerInputs("layer", *tensors(), causal=True)
    found = {error: head_errors(layer, Mechanism.of("nearfar", **SIZES, error=error)) for error in (None, 0.3, 0.01)}
    for error, each in found.items():
        missed, bound, largest, sent, read = (each[name] for name in STATEMENTS)
        assert (missed < bound).all() and (bound < 1.3 * missed).all() and (bound <= largest).all()
        assert torch.equal(largest, found[None]["largest_bound"]) and (sent > 0).all() == (error is not None)
        assert (read == 6).all() if error is None else (read > 6).all()
    assert (found[0.01]["output_error"] < found[0.3]["output_error"]).all()
    assert (found[0.3]["output_error"] < found[None]["output_error"]).all()
    both = LayerInputs("layer", *tensors())
    assert not set(STATEMENTS) & set(head_errors(both, Mechanism.of("nearfar", **SIZES)))
    x, y, _ = tensors(S=30)
    assert statements(NearFar(4, 16, kv_heads=2, causal=True, scaling=1.0, **SIZES), x, y) == {}


@pytest.mark.slow
@pytest.mark.parametrize("model, length, until, open", [
    ("smollm2-135m", 1536, 256, 16), ("smollm2-135m", 1536, 256, 96), ("minilm", 512, 64, 16)])
@torch.no_grad()
def test_no_query_of_a_real_model_misses_more_than_it_states(model, length, until, open):
    """All heads of all layers; those of a model of both directions as if they were causal. How near bounds are is what
    docs/attention.md says."""
    _, text = lying(f"models/{model}", "wikitext2/wiki.valid.tokens")
    sizes, ratios, count = Sizes(32, 16, 64, open=open, exact_until=until), [], 0
    for layer in Pretrained(f"models/{model}", str(text), length=length).layers(0, 0):
        bound, missed = (t[:, :, until:] for t in (stated(layer.x, layer.y, sizes).bound,
                                                   missed_weight(layer.x, layer.y, sizes)))
        assert (bound >= missed).all()
        count += bound.numel()
        ratios.append(float(bound.median() / missed.median()))
    assert count >= 3 * 10**5 or model == "minilm"
    assert max(ratios) < 2


@pytest.mark.slow
@torch.no_grad()
def test_no_block_of_real_keys_can_be_passed_over():
    """Why queries look at all keys of the past: what bounds the logits of a block of 64 keys, by its centre and radius
    or by its longest key, is above the least logit that is read in nearly all, though few hold such a key."""
    _, text = lying("models/smollm2-135m", "wikitext2/wiki.valid.tokens")
    length, far, block, open = 4096, 3840, 64, 128
    for layer in Pretrained("models/smollm2-135m", str(text), length=length, layers=[2, 18]).layers(0, 0):
        q, y = layer.x[0, :, far::8], layer.y_of_heads[0, :, :far]
        rows = y.unflatten(1, (-1, block))
        centre, size = rows.mean(2), torch.linalg.vector_norm(q, dim=-1, keepdim=True)
        radius = torch.linalg.vector_norm(rows - centre.unsqueeze(2), dim=-1).amax(-1).unsqueeze(1)
        longest = torch.linalg.vector_norm(rows, dim=-1).amax(-1).unsqueeze(1)
        bound = torch.minimum(q @ centre.mT + size * radius, size * longest)
        logits = q @ y.mT
        least = logits.topk(open).values[..., -1:]
        held = logits.unflatten(-1, (-1, block)).amax(-1) >= least
        assert (bound >= least).float().mean() > 0.99 and held.float().mean() < 0.7
