"""On the meta device a program that asks for a value fails: what runs there keeps no GPU waiting."""

import pytest
import torch

from crt_exp import Mechanism
from crt_exp.config import choices

LENGTH = 1100                    # several chunks, and more than a segment
FAR = 2200                       # beyond what near-far attention computes exactly
OTHERS = ("linformer",)          # made for one length
# a value decides what runs next: rows whose denominator vanishes in a chunk, quantiles, clusters, buckets
CHUNKS = ("elu", "favor", "generalized", "geom", "geom_plus", "gerf", "hedgehog", "hrf_angular", "hrf_gaussian", "relu")
WAITS = {*((name, True) for name in CHUNKS),
         *((name, causal) for name in ("pois", "pois_plus", "hrf_cluster", "favormix", "reformer")
           for causal in (False, True))}


def step(name, causal, masked=False, **options):
    layer = Mechanism.of(name, **options).layer(4, 16, causal=causal).to("meta")
    length = FAR if name == "nearfar" else LENGTH
    key_mask = torch.ones(2, length, dtype=torch.bool, device="meta") if masked else None
    q, k, v = (torch.randn(2, 4, length, 16, device="meta", requires_grad=True) for _ in range(3))
    out = layer(q, k, v, key_mask)
    out.sum().backward()
    assert out.shape == (2, 4, length, 16) and v.grad.shape == v.shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in choices("attention") if name not in OTHERS])
def test_a_training_step_asks_for_no_value(name, causal):
    if (name, causal) not in WAITS:
        return step(name, causal)
    with pytest.raises(RuntimeError, match="item|nonzero|meta"):      # docs/attention.md names those that wait
        step(name, causal)
    return None


# near-far attention where no row is exact or of another order for its length: by_rows would compute both for all rows
MASKED = [("favorp", False, {}), ("favorpp", True, {}), ("nearfar", False, {"exact_until": 0, "first_order": True})]


@pytest.mark.parametrize("name, causal, options", MASKED)
def test_nor_with_a_padding_mask(name, causal, options):
    step(name, causal, masked=True, **options)
