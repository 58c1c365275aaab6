"""RandomFeatureAttention, with maps of one part, of several parts and of clusters: its state changes when it should."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers.covering import slow
from helpers.hybrid_cases import draw
from helpers.module_cases import B, D, H, L, make, qkv, same, state
from helpers.nearfar_cases import at_tokens
from helpers.seeds import seeded
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from crt_exp import samplers
from crt_exp.attention import attention, attention_reference
from crt_exp.attention.base import same_step
from crt_exp.attention.checks import has_dynamic_size
from crt_exp.features import (
    CERF,
    GERF,
    OPRF,
    SDERF,
    AngularHybrid,
    ClusteredHybrid,
    GaussianHybrid,
    GaussianMixtureHybrid,
    GeomRF,
    Hybrid,
    PosRF,
    Product,
    Statistics,
    Sum,
    TrigRF,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices
from crt_exp.samplers import DenseNoise

ONE = (OPRF(), 16, {"omega"})
SEVERAL = {
    "sum": (Sum(TrigRF(), OPRF(), weights=(0.3, 0.7)), 16, {"omega_0", "omega_1"}),
    "product": (Product(OPRF(A=-0.02), PosRF()), 5, {"omega_0", "omega_1"}),
    "hybrid": (
        Sum(Product(PosRF(), OPRF()), GeomRF(), weights=(0.5, 0.5)),
        4,
        {"omega_0_0", "omega_0_1", "omega_1"},
    ),
}
every = pytest.mark.parametrize("phi, m, names", [ONE, *SEVERAL.values()], ids=["one", *SEVERAL])


def noises(module):
    return {name: getattr(module, name) for name in module.gaussian}


@pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
@every
def test_a_layer_is_attention_with_its_noises_and_fit(phi, m, names):
    module = make(phi, m=m).double().eval()
    q, k, v = (t.double() for t in qkv())
    held = noises(module)
    scale = D**-0.25
    assert held.keys() == names
    assert module.width == phi.width(m)

    def noise_of(part):
        name = f"omega_{part.name}" if part.name else "omega"
        return DenseNoise(held[name], gaussian=True)

    by_hand = phi.noise(m, noise_of)
    params = phi.fit(Statistics.of(q, k, scale=scale))
    for function in (attention, attention_reference):
        actual = module(q, k, v)
        expected = function(q * scale, k * scale, v, phi, by_hand, params)
        assert_close(actual, expected)


def test_scaling_and_normalisation():
    q, k, v = qkv()
    module = make(scaling=1.0).eval()
    actual = module(q * D**-0.25, k * D**-0.25, v)
    expected = make().eval()(q, k, v)
    assert_close(actual, expected)
    module = make(normalize_qk=True).eval()
    actual = module(3 * q, 0.1 * k, v)
    expected = module(q, k, v)
    assert_close(actual, expected)


@every
def test_noises_are_those_of_seed_layer_draw_and_name_on_every_rank(phi, m, names):
    """Whatever the state of the global generator; a single noise is that of a map without parts."""
    torch.manual_seed(1)
    one = noises(make(phi, m=m, seed=5, layer=2))
    torch.manual_seed(2)
    expected = noises(make(phi, m=m, seed=5, layer=2))
    assert same(one, expected)
    cases = [{"seed": 5, "layer": 3}, {"seed": 4, "layer": 2}]
    for other in cases:
        assert not any(
            torch.equal(t, one[name]) for name, t in noises(make(phi, m=m, **other)).items()
        )
    assert not any(torch.equal(t[0], t[1]) for t in one.values())  # heads differ
    if names == {"omega"}:
        actual = one["omega"]
        expected = make(seed=5, layer=2).omega
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("every, redraws", [(0, 0), (1, 6), (3, 2)])
def test_redraws_after_every_n_training_passes(every, redraws):
    module = make(PosRF(), redraw_every=every)
    inputs = qkv()
    for _ in range(7):
        module(*inputs)
    assert int(module.draws) == redraws
    frozen = state(module)
    module.eval()
    for _ in range(5):
        module(*inputs)
    assert same(state(module), frozen)


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")
@every
def test_a_restored_layer_goes_on_bit_for_bit(phi, m, names):
    """With the projections that were saved, also in a layer of another seed."""
    options = {"m": m, "causal": True, "redraw_every": 2}
    module = make(phi, **options, seed=3)
    other = make(phi, **options, seed=3)
    foreign = make(phi, **options, seed=4)
    first = {}
    for name, t in noises(module).items():
        first[name] = t.clone()
    for seed in range(3):
        module(*qkv(seed))
    assert int(module.draws) == 1
    for name, t in noises(module).items():
        assert not torch.equal(t, first[name])
    for layer in (other, foreign):
        layer.load_state_dict(module.state_dict())
    actual = foreign.eval()(*qkv())
    expected = copy.deepcopy(module).eval()(*qkv())
    assert torch.equal(actual, expected)
    assert same(state(foreign), state(module))
    for seed in range(4):
        actual = other(*qkv(seed))
        expected = module(*qkv(seed))
        assert torch.equal(actual, expected)
    assert same(state(module), state(other))
    assert int(module.draws) > 1


def test_noises_move_with_the_layer_and_keep_their_names_in_copies():
    module = make(*SEVERAL["hybrid"][:2]).double().eval()
    inputs = [t.double() for t in qkv()]
    actual = pickle.loads(pickle.dumps(module))(*inputs)
    assert torch.equal(actual, module(*inputs))
    other = copy.deepcopy(module)
    other.redraw()
    for name, t in noises(module).items():
        assert t.dtype == noises(other)[name].dtype
        assert torch.float64 == noises(other)[name].dtype
        assert not torch.equal(t, noises(other)[name])


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")
@pytest.mark.parametrize(
    "phi, options, reentrant",
    [
        (OPRF(), {"redraw_every": 1}, True),
        (OPRF(), {"redraw_every": 1, "causal": True}, False),
        (ClusteredHybrid(), {"fit_steps": 1}, False),
    ],
    ids=repr,
)
def test_a_checkpointed_layer_sees_the_same_state_twice(phi, options, reentrant):
    plain = make(phi, **options)
    saved = make(phi, **options)
    for step in range(4):
        grads = []
        for module, wrap in ((plain, False), (saved, True)):
            q, k, v = (t.requires_grad_() for t in qkv(step))
            if wrap:
                out = checkpoint(module, q, k, v, use_reentrant=reentrant)
            else:
                out = module(q, k, v)
            out.square().sum().backward()
            grads.append((out.detach(), q.grad, k.grad, v.grad))
        for a, b in zip(*grads):
            assert torch.equal(a, b)
    assert same(state(plain), state(saved))


def test_a_redraw_leaves_the_graph_of_earlier_passes():
    module = make(PosRF(), redraw_every=1)
    q, k, v = (t.requires_grad_() for t in qkv())
    (module(q, k, v).sum() + module(q, k, v).sum()).backward()
    assert q.grad.isfinite().all()
    assert int(module.draws) == 1


@pytest.mark.parametrize(
    "phi, unfitted",
    [(OPRF(), PosRF()), (SDERF(antithetic=True), PosRF(antithetic=True))],
    ids=repr,
)
def test_causal_statistics_come_from_earlier_batches_only(phi, unfitted):
    module = make(phi, causal=True)
    first = module(*qkv(0))
    expected = make(unfitted, causal=True)(*qkv(0))
    assert_close(first, expected, rtol=1e-4, atol=1e-5)
    module(*qkv(1))
    q, k, _ = qkv(0)
    x = q.transpose(0, 1).flatten(1, 2) * D**-0.25
    y = k.transpose(0, 1).flatten(1, 2) * D**-0.25
    fitted = phi.fit(Statistics.of(x, y))  # one batch folded in, corrected for the start
    for ours, expected in zip(module.fitted_params(), fitted):
        assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [L, 2 * L], ids=["its own sequence", "others"])
def test_micro_batches_of_a_step_are_read_as_a_whole(length):
    """Their statistics are those of all rows, padding left out, and nothing changes between them."""
    options = {"redraw_every": 1}
    if length == L:
        options["causal"] = True
    else:
        options["cross"] = True
    whole = make(GERF(), **options)
    parts = make(GERF(), **options)
    for seed in range(3):
        q, _, _ = qkv(seed, batch=4)
        _, k, v = qkv(seed, batch=4, length=length)
        mask = torch.arange(length) < torch.tensor([length, 9, 5, 7])[:, None]
        expected = whole(q, k, v, mask)
        actual = []
        for i in (0, 2):
            with same_step(parts, i > 0):
                actual.append(parts(*(t[i : i + 2] for t in (q, k, v, mask))))
        assert_close(torch.cat(actual), expected, rtol=1e-4, atol=1e-5)
    one = state(whole)
    two = state(parts)
    for name in one:
        assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
    assert int(parts.draws) == 2
    assert int(parts.folds) == 2


def test_steps_of_several_models_are_independent():
    """Another one that is trained in between, or within it, has steps of its own."""
    alone = make(causal=True, redraw_every=1)
    other = make(causal=True, redraw_every=1)
    held = make(causal=True, redraw_every=1)
    for seed in range(3):
        alone(*qkv(seed))
        with same_step(torch.nn.Sequential(held), seed > 0):
            held(*qkv(seed))
            other(*qkv(seed))
    assert int(other.draws) == 2
    assert int(held.draws) == 0
    assert same(state(alone), state(other))
    held(*qkv(3))
    assert int(held.draws) == 1


def mean_square(seed):
    """Of the scaled queries, by head and coordinate."""
    q, _, _ = qkv(seed)
    return (q * D**-0.25).square().mean((0, 2))


def test_running_average_is_bias_corrected():
    module = make(causal=True, decay=0.9)
    for seed in range(30):
        module(*qkv(seed))
    module._fold(1 - module.decay)
    means = []
    for s in range(30):
        means.append(mean_square(s))
    weights = 0.9 ** torch.arange(29, -1, -1)
    weights = weights / weights.sum()
    expected = (torch.stack(means) * weights[:, None, None]).sum(0)
    assert_close(module.running_x_mean_sq / module.running_weight, expected, rtol=1e-4, atol=1e-5)


def test_a_counter_that_is_written_through_data_is_read():
    """Averages of weights write so, which leaves the version of the tensor as it is."""
    module = make(PosRF(), redraw_every=10)
    before = module.rows("omega").clone()
    module.draws.data.fill_(1)
    assert not torch.equal(module.rows("omega"), before)


@pytest.mark.parametrize("trained", [False, True])
def test_calibration_takes_the_mean_of_all_its_passes_and_silences_the_warning(trained):
    """Of these alone: what a training pass left pending is forgotten."""
    module = make(causal=True)
    if trained:
        module(*qkv(9))
    module.eval()
    with pytest.warns(UserWarning, match="calibrate_attention"):
        module(*qkv(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(*qkv(0))  # warns once
        with module.calibration():
            for seed in range(3):
                module(*qkv(seed))
        module(*qkv(5))
    expected = (mean_square(0) + mean_square(1) + mean_square(2)) / 3
    assert_close(module.running_x_mean_sq, expected)


@pytest.mark.parametrize(
    "phi, options",
    [
        (OPRF(), {}),
        (OPRF(), {"causal": True}),
        (OPRF(), {"kv_heads": 2}),
        (OPRF(), {"causal": True, "kv_heads": 2}),
        (ClusteredHybrid(), {"fit_steps": 1}),
        (SDERF(antithetic=True), {}),
        (SDERF(antithetic=True), {"causal": True}),
    ],
    ids=repr,
)
def test_padding_enters_no_statistics(phi, options):
    q, k, v = qkv(kv_heads=options.get("kv_heads", H))
    mask = torch.arange(L).expand(B, L) < 9
    module = make(phi, **options)
    short = make(phi, **options)
    q[:, :, 9:] = 1e3
    k[:, :, 9:] = torch.nan
    v[:, :, 9:] = torch.nan
    for _ in range(2):
        padded = module(q, k, v, mask)
        cut = short(*at_tokens((q, k, v), slice(9)))
    actual = padded[:, :, :9]
    assert_close(actual, cut, rtol=1e-4, atol=1e-5)


def test_grouped_heads_share_their_parameters():
    module = make(kv_heads=2).eval()
    q, k, v = qkv(kv_heads=2)
    q[:, 0] *= 3
    A = module.fitted_params(q, k, None).A
    assert A.shape == (B, H, 1, 1)
    assert torch.equal(A[:, 0], A[:, 1])
    assert not torch.equal(A[:, 1], A[:, 2])
    first_group = q[:, :2].flatten(1, 2)
    statistics = Statistics.of(first_group, k[:, 0], scale=D**-0.25)
    assert_close(A[:, 0], OPRF().fit(statistics).A, rtol=1e-5, atol=0)
    assert module(q, k, v).shape == (B, H, L, D)


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")
@every
def test_decoding_equals_the_whole_sequence(phi, m, names):
    module = make(phi, m=m, causal=True, kv_heads=2)
    q, k, v = qkv(kv_heads=2)
    module(*qkv(3, kv_heads=2))
    module.eval()
    decoder = module.decoding()
    x = module.scaled(q)
    y = module.scaled(k)
    steps = []
    for i in range(L):
        steps.append(decoder.step(*at_tokens((x, y, v), slice(i, i + 1))))
    actual = torch.cat(steps, 2)
    expected = module(q, k, v)
    assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    past = module.past()
    module.redraw()
    with pytest.raises(ValueError, match="have changed"):
        past.step(q[:, :, :1], k[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize(
    "phi, m, options",
    [
        (OPRF(), 16, {"causal": True, "redraw_every": 2}),
        slow(OPRF(), 16, {}),
        slow(OPRF(), 16, {"causal": True}),
        slow(AngularHybrid(n=4), 4, {"redraw_every": 2}),
        slow(Product(PosRF(), PosRF()), 4, {"redraw_every": 2}),
    ],
    ids=str,
)
def test_compiles_without_graph_breaks(phi, m, options):
    torch._dynamo.reset()
    module = make(phi, m=m, **options)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    for seed in range(4):
        actual = compiled(*qkv(seed))
        expected = module(*qkv(seed))
        assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_signed_denominators_are_counted():
    module = make(TrigRF(), m=2).eval()
    q, k, v = (3 * t for t in qkv())
    module(q, k, v)
    assert module.denominators.fraction > 0


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")
@pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in choices("attention") if name not in ("generalized", "linformer")]
)
def test_an_empty_batch_has_an_empty_output(name, causal):
    layer = Mechanism.of(name).layer(H, D, causal=causal)
    empty = torch.zeros(0, H, L, D, requires_grad=True)
    for training in (True, False):
        out = layer.train(training)(empty, empty, empty)
        out.sum().backward()
        assert out.shape == empty.shape
    for length in (0, L):
        with pytest.raises(ValueError) as caught:
            layer(*(torch.zeros(2, H, size, D) for size in (length, 0, 0)))
        assert len(str(caught.value).splitlines()) == 1
    if hasattr(layer, "calibration"):
        with layer.calibration(), torch.no_grad():
            layer(empty, empty, empty)
            layer(*qkv())
    assert layer(*qkv()).isfinite().all()


@pytest.mark.parametrize("phi", [OPRF(), PosRF(), ClusteredHybrid()], ids=repr)
def test_an_empty_batch_changes_nothing(phi):
    """As the last part of a batch that is split over processes may be: outputs, gradients and statistics."""
    layer = make(phi, causal=True)
    layer(*qkv())
    before = state(layer)
    empty = torch.zeros(0, H, L, D, requires_grad=True)
    with same_step(layer):
        layer(empty, empty, empty).sum().backward()
    assert empty.grad.shape == empty.shape
    for name, t in before.items():
        if "pending" in name:
            expected = layer.state_dict()[name]
            assert torch.equal(t, expected)


# ---- bad input -------------------------------------------------------------------------------------------------------


POINTS = torch.randn(6, 3, generator=seeded())
BAD = {
    "redraw_every": lambda: make(redraw_every=-1),
    "needs kernel='softmax'": lambda: make(OPRF("gaussian")),
    "needs causal": lambda: make().decoding(),
    "omega_0: saved .* use m=3": lambda: make(Product(PosRF(), PosRF()), m=5).load_state_dict(
        make(Product(PosRF(), PosRF()), m=3).state_dict()
    ),
    "saved .* 3, 8": lambda: make(ClusteredHybrid(keys=2)).load_state_dict(
        make(ClusteredHybrid(keys=3)).state_dict()
    ),
    "queries: fewer than 7 distinct": lambda: ClusteredHybrid(queries=7).fit(
        Statistics.of(POINTS, POINTS)
    ),
    "keys: fewer than 2 distinct": lambda: ClusteredHybrid().fit(
        Statistics.of(POINTS, torch.ones(6, 3))
    ),
    r"r=.*larger sigma": lambda: GaussianHybrid(sigma=1e-3).fit(
        Statistics.of(1e-3 * POINTS, 1e-3 * POINTS)
    ),
    "params: expected a pair": lambda: AngularHybrid().phi_q(
        POINTS, draw(AngularHybrid(), 4, 3), ()
    ),
    "centres: 3 dimensions, expected 5": lambda: ClusteredHybrid().phi_q(
        torch.ones(2, 5), samplers.iid(4, 5), ClusteredHybrid().fit(Statistics.of(POINTS, POINTS))
    ),
    "default=None": lambda: GaussianMixtureHybrid(queries=1, keys=1, default=None),
    "coefficients: 1; .* bases .1": lambda: Hybrid(coefficients=["angular"], bases=["pos"]),
    "kernel=softmax: expected bases": lambda: Hybrid(
        coefficients=["angular"], bases=["pos", PosRF("gaussian")]
    ),
    "unknown key 'coefficients gaussian.m'": lambda: Hybrid(
        coefficients=["gaussian m=2"], bases=["pos", "trig"]
    ),
    "M=.* invertible": lambda: CERF(M=[[1, 2], [2, 4]]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_known_sizes_are_not_dynamic(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not has_dynamic_size(torch.ones(2, 3))
