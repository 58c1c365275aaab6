"""Linformer whose mixtures are learned, and Performers', whose mixtures are random and drawn again."""

import io

import pytest
import torch

from crt_exp.attention import Linformer, softmax_attention
from crt_exp.mechanism import Mechanism

H, D, L = 2, 4, 9
Q, K, V = torch.randn(3, 3, H, L, D, generator=torch.Generator().manual_seed(0))


def layer_of(seed=0, layer=0, **options):
    return Mechanism.of("linformer", length=12, rank=3, seed=seed, **options).layer(H, D, layer=layer)


def trained(layer, passes):
    for _ in range(passes):
        layer.train()(Q, K, V)
    return layer


def test_learned_mixtures_are_parameters_alone():
    """As checkpoints of it hold them: nothing is drawn again, and nothing else is kept."""
    torch.manual_seed(5)
    layer = layer_of()
    torch.manual_seed(5)
    assert torch.equal(layer.key_projection, torch.randn(3, 12) / 12**0.5)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert {*before} == {"key_projection", "value_projection"} == {name for name, _ in layer.named_parameters()}
    assert all(torch.equal(value, before[name]) for name, value in trained(layer, 3).state_dict().items())


def test_random_mixtures_are_those_of_keys_and_values():
    layer = layer_of(redraw_every=2).eval()
    keys, values = (layer.mixtures[:, :L] @ t for t in (K, V))
    torch.testing.assert_close(layer(Q, K, V), softmax_attention(D**-0.25 * Q, D**-0.25 * keys, values))
    assert not [*layer.parameters()]
    many = Linformer(1, 4, length=200, rank=100, redraw_every=1).mixtures
    assert many.mean().abs() < 5 / many.numel()**0.5 / 200**0.5 and many.std() == pytest.approx(200**-0.5, rel=0.03)


def test_mixtures_are_drawn_from_seed_layer_and_pass():
    """The same on every process, whatever was drawn there before; in eval mode and in a backward pass they stay."""
    torch.manual_seed(1)
    one = layer_of(redraw_every=2)
    torch.manual_seed(2)
    assert torch.equal(one.mixtures, layer_of(redraw_every=2).mixtures)
    assert not any(torch.equal(one.mixtures, layer_of(redraw_every=2, **other).mixtures)
                   for other in ({"seed": 1}, {"layer": 1}))
    seen = []
    for _ in range(5):
        trained(one, 1).eval()(Q, K, V)
        seen.append(one.mixtures.clone())
    assert [torch.equal(a, b) for a, b in zip(seen, seen[1:])] == [True, False, True, False] and int(one.draws) == 2


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_restored_layer_goes_on_bit_for_bit(passes):
    whole, saved = trained(layer_of(redraw_every=2), passes), io.BytesIO()
    torch.save(whole.state_dict(), saved)
    saved.seek(0)
    other = layer_of(redraw_every=2)
    other.load_state_dict(torch.load(saved))
    for _ in range(4):
        assert torch.equal(trained(whole, 1).mixtures, trained(other, 1).mixtures)
        assert torch.equal(whole(Q, K, V), other(Q, K, V)) and int(whole.draws) == int(other.draws)


def test_a_graph_keeps_the_mixtures_that_it_was_made_with():
    layer, k = layer_of(redraw_every=1).train(), K.clone().requires_grad_()
    out = layer(Q, k, V)
    expected = torch.autograd.grad(layer_of(redraw_every=1).eval()(Q, k, V).sum(), k)[0]
    trained(layer, 2)
    assert torch.equal(torch.autograd.grad(out.sum(), k)[0], expected)
