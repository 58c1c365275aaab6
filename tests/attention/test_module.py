"""RandomFeatureAttention: its state changes when it should, and only then."""

import copy
import math
import warnings

import pytest
import torch
from maps import SIMPLE
from module_cases import B, D, H, L, make, qkv, same, state
from timm.utils import ModelEmaV3
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from crt_exp import samplers
from crt_exp.attention import (
    Exact,
    Generalized,
    Identity,
    Linformer,
    RandomFeatureAttention,
    attention,
    softmax_attention,
)
from crt_exp.attention.base import Redraws, same_step
from crt_exp.config import known_names
from crt_exp.features import GERF, OPRF, ClusteredHybrid, GeomRF, GeomRFPlus, PosRF, Statistics, TrigRF
from crt_exp.mechanism import Mechanism


@pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
@pytest.mark.parametrize("phi", [p for p in SIMPLE if p.kernel == "softmax"], ids=repr)
def test_is_attention_with_its_own_noise_and_fit(phi):
    module, (q, k, v) = make(phi).eval(), qkv()
    x, y = q * D**-0.25, k * D**-0.25
    params = phi.fit(Statistics.of(q, k, scale=D**-0.25))  # scaled as there: a count may turn on the last bit of a rate
    torch.testing.assert_close(module(q, k, v), attention(x, y, v, phi, module.noise, params))


def test_approaches_softmax():
    q, k, v = (t / 2 for t in qkv())
    out = make(m=8000).eval()(q, k, v)
    assert (out - softmax_attention(q * D**-0.25, k * D**-0.25, v)).abs().max() < 0.02


def test_scaling_and_normalisation():
    q, k, v = qkv()
    module = make(scaling=1.0).eval()
    torch.testing.assert_close(module(q * D**-0.25, k * D**-0.25, v), make().eval()(q, k, v))
    module = make(normalize_qk=True).eval()
    torch.testing.assert_close(module(3 * q, 0.1 * k, v), module(q, k, v))


def test_heads_and_layers_differ_and_seeds_repeat():
    one = make(seed=1, layer=0)
    assert torch.equal(one.omega, make(seed=1, layer=0).omega)
    assert not torch.equal(one.omega, make(seed=1, layer=1).omega) and not torch.equal(one.omega, make(seed=2).omega)
    assert not torch.equal(one.omega[0], one.omega[1]) and one.omega.shape == (H, 16, D)


@pytest.mark.parametrize("every, redraws", [(0, 0), (1, 6), (3, 2)])
def test_redraws_after_every_n_training_passes(every, redraws):
    module, inputs = make(PosRF(), redraw_every=every), qkv()
    for _ in range(7):
        module(*inputs)
    assert int(module.draws) == redraws
    frozen = state(module)
    module.eval()
    for _ in range(5):
        module(*inputs)
    assert same(state(module), frozen)


def test_restored_module_draws_what_the_original_would():
    module, inputs = make(causal=True, redraw_every=2), qkv()
    for _ in range(3):
        module(*inputs)
    other = make(causal=True, redraw_every=2)
    other.load_state_dict(module.state_dict())
    for seed in range(4):
        torch.testing.assert_close(other(*qkv(seed)), module(*qkv(seed)), rtol=0, atol=0)
    assert same(state(module), state(other))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_checkpointed_layer_sees_the_same_state_twice(causal, reentrant):
    plain, saved = (make(causal=causal, redraw_every=1) for _ in range(2))
    for step in range(4):
        grads = []
        for module, wrap in ((plain, False), (saved, True)):
            q, k, v = (t.requires_grad_() for t in qkv(step))
            out = checkpoint(module, q, k, v, use_reentrant=reentrant) if wrap else module(q, k, v)
            out.square().sum().backward()
            grads.append((out.detach(), q.grad, k.grad, v.grad))
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert same(state(plain), state(saved))


def test_two_passes_before_one_backward_with_redraws():
    """A redraw between the two must not touch the graph of the first."""
    module = make(PosRF(), redraw_every=1)
    q, k, v = (t.requires_grad_() for t in qkv())
    (module(q, k, v).sum() + module(q, k, v).sum()).backward()
    assert q.grad.isfinite().all() and int(module.draws) == 1


def test_causal_statistics_come_from_earlier_batches_only():
    module = make(causal=True)
    first = module(*qkv(0))
    zero = make(PosRF(), causal=True)
    torch.testing.assert_close(first, zero(*qkv(0)))  # nothing seen yet: A = 0 is FAVOR+
    module(*qkv(1))
    q, k, _ = qkv(0)
    x, y = (t.transpose(0, 1).flatten(1, 2) * D**-0.25 for t in (q, k))
    expected = OPRF().fit(Statistics.of(x, y)).A  # one batch folded in, corrected for the start
    torch.testing.assert_close(module._running_params().A, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("phi", [OPRF(), GeomRF(), GeomRFPlus()], ids=repr)
def test_no_future_in_causal_training(phi):
    module = make(phi, causal=True)
    module(*qkv(0))
    other = copy.deepcopy(module)
    q, k, v = qkv(1)
    k2, v2, q2 = k.clone(), v.clone(), q.clone()
    for t in (q2, k2, v2):
        t[:, :, 7:] = 5.0
    torch.testing.assert_close(module(q, k, v)[:, :, :7], other(q2, k2, v2)[:, :, :7], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [L, 2 * L], ids=["its own sequence", "others"])
def test_micro_batches_of_a_step_are_read_as_a_whole(length):
    """Their statistics are those of all rows, padding left out, and nothing changes between them."""
    options = {"redraw_every": 1, **({"causal": True} if length == L else {"cross": True})}
    whole, parts = make(GERF(), **options), make(GERF(), **options)
    for seed in range(3):
        (q, _, _), (_, k, v) = qkv(seed, batch=4), qkv(seed, batch=4, length=length)
        mask = torch.arange(length) < torch.tensor([length, 9, 5, 7])[:, None]
        expected, found = whole(q, k, v, mask), []
        for i in (0, 2):
            with same_step(parts, i > 0):
                found.append(parts(*(t[i:i + 2] for t in (q, k, v, mask))))
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)
    one, two = state(whole), state(parts)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
    assert int(parts.draws) == 2 and int(parts.folds) == 2


def test_a_step_is_of_one_model():
    """Another one that is trained in between, or within it, has steps of its own."""
    alone, other, held = (make(causal=True, redraw_every=1) for _ in range(3))
    model = torch.nn.Sequential(held)
    for seed in range(3):
        alone(*qkv(seed))
        with same_step(model, seed > 0):
            held(*qkv(seed))
            other(*qkv(seed))
    assert int(other.draws) == int(alone.draws) == 2 and int(held.draws) == 0
    one, two = state(alone), state(other)
    assert all(torch.equal(one[name], two[name]) for name in one)
    held(*qkv(3))
    assert int(held.draws) == 1


def test_running_average_is_bias_corrected():
    module = make(causal=True, decay=0.9)
    for seed in range(30):
        module(*qkv(seed))
    module._fold((1 - module.decay) * module.pending_weight)
    means = [(qkv(s)[0] * D**-0.25).square().mean((0, 2)) for s in range(30)]
    weights = torch.tensor([0.9 ** (29 - s) for s in range(30)])
    expected = (torch.stack(means) * (weights / weights.sum())[:, None, None]).sum(0)
    torch.testing.assert_close(module.running_x_mean_sq / module.running_weight, expected, rtol=1e-4, atol=1e-5)


def test_calibration_takes_the_mean_of_all_passes_and_silences_the_warning():
    module = make(causal=True).eval()
    with pytest.warns(UserWarning, match="calibrate_attention"):
        module(*qkv(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(*qkv(0))  # said once
        with module.calibration():
            for seed in range(3):
                module(*qkv(seed))
        module(*qkv(5))
    expected = torch.stack([(qkv(s)[0] * D**-0.25).square().mean((0, 2)) for s in range(3)]).mean(0)
    torch.testing.assert_close(module.running_x_mean_sq, expected)
    assert int(module.folds) == 3


def test_padding_enters_no_statistics():
    q, k, v = qkv()
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[:, 9:] = False
    for causal in (False, True):
        module, short = make(causal=causal), make(causal=causal)
        for t in (q, k, v):
            t[:, :, 9:] = 1e3
        for _ in range(2):
            padded, cut = module(q, k, v, mask), short(*(t[:, :, :9] for t in (q, k, v)))
        torch.testing.assert_close(padded[:, :, :9], cut, rtol=1e-4, atol=1e-5)


def test_grouped_heads_share_their_parameters():
    module = make(kv_heads=2).eval()
    q, k, v = qkv(kv_heads=2)
    q[:, 0] *= 3
    x, y = q * D**-0.25, k * D**-0.25
    A = module.fitted_params(q, k, None).A
    assert A.shape == (B, H, 1, 1) and torch.equal(A[:, 0], A[:, 1]) and not torch.equal(A[:, 1], A[:, 2])
    expected = OPRF().fit(Statistics.of(x[:, :2].flatten(1, 2), y[:, 0])).A
    torch.testing.assert_close(A[:, 0], expected, rtol=1e-5, atol=0)
    assert module(q, k, v).shape == (B, H, L, D)
    causal = make(kv_heads=2, causal=True)
    causal(q, k, v)
    assert causal(q, k, v).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning")
def test_decoding_equals_the_whole_sequence():
    module = make(causal=True)
    module(*qkv(3))
    module.eval()
    q, k, v = qkv()
    decoder, scale = module.decoding(), D**-0.25
    steps = [decoder.step((q * scale)[:, :, i:i + 1], (k * scale)[:, :, i:i + 1], v[:, :, i:i + 1],
                          version=module.version) for i in range(L)]
    torch.testing.assert_close(torch.cat(steps, 2), module(q, k, v), rtol=1e-4, atol=1e-5)
    module.redraw()
    with pytest.raises(ValueError, match="have changed"):
        decoder.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], version=module.version)


@pytest.mark.parametrize("options", [
    {}, {"causal": True, "redraw_every": 2},
    *(pytest.param(each, marks=pytest.mark.slow) for each in ({"causal": True}, {"redraw_every": 2}))], ids=str)
def test_compiles_without_graph_breaks(options):
    torch._dynamo.reset()
    module = make(**options)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    for seed in range(4):
        torch.testing.assert_close(compiled(*qkv(seed)), module(*qkv(seed)), rtol=1e-4, atol=1e-5)


def test_generalised_kernels_and_baselines():
    q, k, v = qkv()
    for f in ("relu", "elu+1"):
        for projection in (True, False):
            module = make(Generalized(f=f, projection=projection), causal=True)
            assert module(q, k, v).isfinite().all()
    torch.testing.assert_close(Exact(H, D)(q, k, v), softmax_attention(q * D**-0.25, k * D**-0.25, v))
    assert torch.equal(Identity(H, D, causal=True)(q, k, v), v)
    assert Linformer(H, D, length=L, rank=4)(q, k, v).shape == v.shape


@pytest.mark.parametrize("causal", [False, True])
def test_unnormalised_attention_is_the_numerator(causal):
    """In a pass over the sequence and symbol by symbol."""
    module, (q, k, v) = make(Generalized(f="gelu"), causal=causal, normalize=False).eval(), qkv()
    x, y = q * D**-0.25, k * D**-0.25
    wanted = attention(x, y, v, module.phi, module.noise, causal=causal, normalize=False)
    torch.testing.assert_close(module(q, k, v), wanted, rtol=1e-4, atol=1e-5)
    if causal:
        past = module.past()
        steps = [past.step(*(t[:, :, i:i + 1] for t in (q, k, v))) for i in range(L)]
        torch.testing.assert_close(torch.cat(steps, 2), wanted, rtol=1e-4, atol=1e-5)


def test_signed_denominators_are_counted():
    module = make(TrigRF(), m=2).eval()
    q, k, v = (3 * t for t in qkv())
    module(q, k, v)
    assert module.denominators.fraction > 0


def test_state_of_another_m_is_refused():
    with pytest.raises(ValueError, match="use m=16"):
        make(m=32).load_state_dict(make(m=16).state_dict())


def test_bad_options():
    with pytest.raises(ValueError, match="redraw_every"):
        make(redraw_every=-1)
    with pytest.raises(ValueError, match="needs kernel='softmax'"):
        make(OPRF("gaussian"))
    with pytest.raises(ValueError, match="needs causal"):
        make().decoding()


def test_moves_and_halves():
    module = make().to(torch.bfloat16).eval()
    out = module(*(t.bfloat16() for t in qkv()))
    assert out.dtype == torch.bfloat16 and math.isfinite(out.float().sum())


def test_an_empty_batch_changes_nothing():
    """As the last part of a batch that is split over processes may be: outputs, gradients and statistics."""
    for phi in (OPRF(), PosRF(), ClusteredHybrid()):
        layer = RandomFeatureAttention(phi, samplers.orthogonal, 6, 2, 4, causal=True)
        torch.manual_seed(0)
        x = torch.randn(3, 2, 5, 4)
        layer(x, x, x)
        before = {name: t.clone() for name, t in layer.state_dict().items() if "pending" in name}
        empty = torch.zeros(0, 2, 5, 4, requires_grad=True)
        with same_step(layer):
            layer(empty, empty, empty).sum().backward()
        assert empty.grad.shape == empty.shape
        assert all(torch.equal(t, layer.state_dict()[name]) for name, t in before.items())


AVERAGES = {
    "timm": lambda model: ModelEmaV3(model, decay=0.9),
    "timm without buffers": lambda model: ModelEmaV3(model, decay=0.9, exclude_buffers=True),
    "torch": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "torch with buffers": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "mean with buffers": lambda model: AveragedModel(model, use_buffers=True),
}
DRAWN = [name for name in known_names("attention") if isinstance(Mechanism.of(name).layer(2, 4), Redraws)]


def average(averaged, model):
    (averaged.update if isinstance(averaged, ModelEmaV3) else averaged.update_parameters)(model)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name, redraw_every", [(name, n) for name in DRAWN for n in (0, 1)
                                                if (name, n) != ("hedgehog", 1)])  # its rows are trained
def test_an_average_of_states_is_a_state(name, redraw_every):
    """Its projections are those of some draw, its outputs finite; that of one state gives the outputs of this state."""
    options = {"m": 8} if Mechanism.of(name).draws else {}
    options |= {"fit_steps": 3} if "fit_steps" in Mechanism.of(name).options else {}
    layer = Mechanism.of(name, redraw_every=redraw_every, **options).layer(2, 4, causal=name != "linformer")
    model, (q, k, v) = torch.nn.Sequential(layer, torch.nn.Linear(4, 4)), torch.randn(3, 2, 2, 12, 4)
    averages = {kind: made(model) for kind, made in AVERAGES.items()}
    for _ in range(6):
        layer(q, k, v)
        for averaged in averages.values():
            average(averaged, model)
    layer.eval()
    for kind, averaged in averages.items():
        copied = averaged.module[0].eval()
        assert copied(q, k, v).isfinite().all(), kind
        if name != "linformer" or redraw_every:
            drawn = copied.rows_of_draw(copied.held)
            assert all(torch.equal(copied.rows(rows), t) for rows, t in drawn.items()), kind
        assert "buffers" in kind and kind != "timm without buffers" or copied.held == layer.held, kind
        averaged = AVERAGES[kind](model)
        for _ in range(3):
            average(averaged, model)
        torch.testing.assert_close(averaged.module[0](q, k, v), layer(q, k, v), msg=kind)
        other = copy.deepcopy(layer)
        other.load_state_dict(copied.state_dict())
        assert torch.equal(other(q, k, v), copied(q, k, v)), kind


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", sorted({*DRAWN} - {"hedgehog", "elu", "relu", "generalized", "favormix"}))
def test_a_buffer_that_was_replaced_counts(name):
    """As by torch.func.functional_call, and by accelerate when it loads a checkpoint."""
    ours, other = (Mechanism.of(name, redraw_every=1).layer(2, 4, layer=i).eval() for i in (0, 1))
    inputs = torch.randn(3, 2, 2, 12, 4)
    before, expected = ours(*inputs), other(*inputs)
    assert torch.equal(torch.func.functional_call(ours, other.state_dict(), tuple(inputs)), expected)
    assert torch.equal(ours(*inputs), before) and not torch.equal(before, expected)
    for buffer, value in other.state_dict().items():
        module, _, own = buffer.rpartition(".")
        setattr(ours.get_submodule(module), own, value)
    assert torch.equal(ours(*inputs), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", sorted({*DRAWN} - {"reformer", "linformer"}))
def test_half_precision_is_rounded_at_its_ends_alone(name):
    """At a scale that is no power of two: a log feature magnifies what is rounded before."""
    for dtype, causal in ((torch.bfloat16, False), (torch.float16, False), (torch.float16, True)):
        layer = Mechanism.of(name).layer(2, 65, causal=causal).eval()
        q, k, v = torch.randn(3, 2, 2, 16, 65, generator=torch.Generator().manual_seed(0)).to(dtype)
        out, past = layer(q, k, v), layer.past() if causal else None
        exact = layer.double()(q.double(), k.double(), v.double())
        assert (out - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max()
        if causal:
            last = torch.cat([past.step(*(t[:, :, i:i + 1] for t in (q, k, v))) for i in range(16)], 2)
            assert last.dtype == dtype and (last - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DRAWN)
def test_integer_masks_and_other_heads_are_refused(name):
    layer, (q, k, v) = Mechanism.of(name).layer(2, 4).eval(), torch.randn(3, 2, 2, 12, 4)
    with pytest.raises(ValueError, match="torch.int64 .*boolean .*True = keep"):
        layer(q, k, v, torch.ones(2, 12, dtype=torch.long))
    if name not in ("elu", "linformer"):   # theirs are of any number of heads
        with pytest.raises(ValueError, match="batch|heads=2"):
            layer(*(t.repeat(1, 2, 1, 1) for t in (q, k, v)))
