"""RandomFeatureAttention with maps that have parts: several noises in one layer."""

import copy
import itertools
import os
import pickle
import subprocess
import sys

import pytest
import torch
from module_cases import D, L, make, qkv, same, state

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention, attention, attention_reference
from crt_exp.features import OPRF, GeomRF, PosRF, Product, Statistics, Sum, TrigRF
from crt_exp.samplers import DenseNoise

SEVERAL = {
    "sum": (Sum(TrigRF(), OPRF(), weights=(0.3, 0.7)), 16, {"omega_0", "omega_1"}),
    "shared": (Sum(TrigRF(), OPRF(), weights=(0.3, 0.7), shared=True), 16, {"omega"}),
    "product": (Product(OPRF(A=-0.02), PosRF()), (6, 5), {"omega_0", "omega_1"}),
    "hybrid": (Sum(Product(PosRF(), OPRF()), GeomRF(), weights=(0.5, 0.5)), ((4, 3), 12),
               {"omega_0_0", "omega_0_1", "omega_1"}),
}
several = pytest.mark.parametrize("phi, m, names", SEVERAL.values(), ids=SEVERAL.keys())


def noises(module):
    return {name: getattr(module, name) for name in module.gaussian}


@pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
@several
def test_several_noises_give_attention_with_them(phi, m, names):
    module, (q, k, v) = make(phi, m=m).double().eval(), (t.double() for t in qkv())
    held = noises(module)
    assert held.keys() == names and len({t.data_ptr() for t in held.values()}) == len(names)
    assert not any(torch.equal(a[:, :3], b[:, :3]) for a, b in itertools.combinations(held.values(), 2))
    by_hand = phi.noise(m, lambda p: DenseNoise(held["_".join(filter(None, ("omega", p.name)))], gaussian=True))
    params, scale = phi.fit(Statistics.of(q, k, scale=D**-0.25)), D**-0.25
    torch.testing.assert_close(module(q, k, v), attention(q * scale, k * scale, v, phi, by_hand, params))
    torch.testing.assert_close(module(q, k, v), attention_reference(q * scale, k * scale, v, phi, by_hand, params))
    assert module.width == phi.width(m)


def test_a_product_in_a_layer_is_unbiased():
    """Its unnormalised estimate, over draws, with two noises that the layer draws."""
    phi, (q, k, _) = Product(PosRF(), PosRF()), (t[:1, :1, :2] / 3 for t in qkv())
    x, y = (t.double() * D**-0.25 for t in (q, k))
    layers = [RandomFeatureAttention(phi, samplers.iid, (4, 4), 64, D, seed=seed) for seed in range(100)]
    estimates = torch.cat([phi.phi_q(x, n, ((), ())).exp() @ phi.phi_k(y, n, ((), ())).exp().mT
                           for n in (layer.noise for layer in layers)], 1)[0]
    exact, sem = phi.log_kernel(x[0, 0, :, None], y[0, 0, None]).exp(), estimates.std(0) / len(estimates) ** 0.5
    assert (sem < 0.02 * exact).all() and ((estimates.mean(0) - exact).abs() < 5 * sem).all()


@several
def test_several_noises_are_saved_restored_and_redrawn(phi, m, names):
    module, other = (make(phi, m=m, causal=True, redraw_every=2, seed=seed) for seed in (3, 3))
    first = {name: t.clone() for name, t in noises(module).items()}
    for seed in range(3):
        module(*qkv(seed))
    assert int(module.draws) == 1 and all(not torch.equal(t, first[name]) for name, t in noises(module).items())
    other.load_state_dict(module.state_dict())
    for seed in range(4):
        assert torch.equal(other(*qkv(seed)), module(*qkv(seed)))
    assert same(state(module), state(other)) and int(module.draws) > 1


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")
@several
def test_decoding_with_several_noises_equals_the_whole_sequence(phi, m, names):
    module, (q, k, v) = make(phi, m=m, causal=True, kv_heads=2), qkv(kv_heads=2)
    module(*qkv(3, kv_heads=2))
    module.eval()
    decoder = module.decoding()
    steps = [decoder.step(module.scaled(q[:, :, i:i + 1]), module.scaled(k[:, :, i:i + 1]), v[:, :, i:i + 1])
             for i in range(L)]
    torch.testing.assert_close(torch.cat(steps, 2), module(q, k, v), rtol=1e-3, atol=1e-4)
    module.redraw()
    with pytest.raises(ValueError, match="have changed"):
        decoder.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], version=module.version)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_noises_compile_without_graph_breaks(shared):
    torch._dynamo.reset()
    phi = Sum(TrigRF(), PosRF(), shared=True) if shared else Product(PosRF(), PosRF())
    module = make(phi, m=4 if shared else (3, 4), redraw_every=2)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    for seed in range(4):
        torch.testing.assert_close(compiled(*qkv(seed)), module(*qkv(seed)), rtol=1e-3, atol=1e-4)


def test_noises_move_with_the_layer_and_keep_their_names_in_copies():
    module = make(SEVERAL["hybrid"][0], m=SEVERAL["hybrid"][1]).double().eval()
    assert {t.dtype for t in noises(module).values()} == {torch.float64}
    other = copy.deepcopy(module)
    other.redraw()
    assert {t.dtype for t in noises(other).values()} == {torch.float64}
    assert not any(torch.equal(t, noises(other)[name]) for name, t in noises(module).items())
    inputs = [t.double() for t in qkv()]
    assert torch.equal(pickle.loads(pickle.dumps(module))(*inputs), module(*inputs))


@several
def test_noises_are_those_of_seed_layer_draw_and_name_on_every_rank(phi, m, names):
    """Whatever the state of the global generator; a single noise is that of a map without parts."""
    torch.manual_seed(1)
    one = noises(make(phi, m=m, seed=5, layer=2))
    torch.manual_seed(2)
    assert same(one, noises(make(phi, m=m, seed=5, layer=2)))
    assert not any(torch.equal(t, one[name]) for name, t in noises(make(phi, m=m, seed=5, layer=3)).items())
    if names == {"omega"}:
        assert torch.equal(one["omega"], make(seed=5, layer=2).omega)


def test_what_maps_with_parts_refuse():
    with pytest.raises(ValueError, match="omega_1: saved .* use m=3"):
        phi = Product(PosRF(), PosRF())
        make(phi, m=(4, 5)).load_state_dict(make(phi, m=(4, 3)).state_dict())
    with pytest.raises(ValueError, match="need 4 and 3 rows"):
        make(Sum(TrigRF(), PosRF(), shared=True), m=(4, 3))
    with pytest.raises(ValueError, match="params: 2 entries, expected 3"):
        make(Sum(TrigRF(), PosRF(), OPRF()), m=(4, 3))
    with pytest.raises(ValueError, match="kernel=gaussian; attention needs kernel='softmax'"):
        make(Product(OPRF(), TrigRF("gaussian")))


@pytest.mark.slow
def test_another_process_draws_the_same():
    code = ("import torch; from crt_exp import samplers; from crt_exp.attention import RandomFeatureAttention; "
            "from crt_exp.features import PosRF, Product; "
            "layer = RandomFeatureAttention(Product(PosRF(), PosRF()), samplers.orthogonal, (3, 5), 4, 8, "
            "seed=5, layer=2); layer.redraw(); "
            "print([t.double().sum().item() for t in layer.noise[0].tensors() + layer.noise[1].tensors()])")
    found = [subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": hashes}, text=True,
                            capture_output=True, check=True).stdout for hashes in "12"]
    layer = make(Product(PosRF(), PosRF()), m=(3, 5), seed=5, layer=2)
    layer.redraw()
    assert found == [f"{[t.double().sum().item() for t in noises(layer).values()]}\n"] * 2
