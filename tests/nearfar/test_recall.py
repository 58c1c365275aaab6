"""Near-far attention with recall: each key counts once, what a query sees depends on its place and past alone, and a
single key that matters is found."""

import pytest
import torch
from native_cases import needs_library
from nearfar_cases import as_integers, same
from scipy.special import log_ndtr

from crt_exp.attention import exact_attention, uniform_attention
from crt_exp.nearfar import causal as recall, decoding as past, native, near_far_attention, retrieval
from crt_exp.nearfar.choice import CENTRE_SAMPLES, RIDGE, Sizes
from crt_exp.nearfar.layer import NearFar
from crt_exp.nearfar.decoding import RecallState

SIZES = Sizes(block=4, heavy=3, cells=6, open=12, exact_until=10)
LENGTH = 330


def drawn(B=2, H=2, kv_heads=1, S=LENGTH, L=None, d=5, dv=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda heads, n, k: torch.randn(B, heads, n, k, generator=g, dtype=dtype)
    return draw(H, L or S, d), draw(kv_heads, S, d) + 0.5, draw(kv_heads, S, dv)


def attend(x, y, v, sizes=SIZES, keep=None):
    return near_far_attention(x, y, v, sizes, causal=True, key_mask=keep)


# ---- the sums ----


def mean_below(mu, sd, bar):
    """Log of the mean of e^l over l < bar, l normal."""
    if sd < 1e-6:
        return mu if mu < bar else bar
    t = (bar - mu) / sd
    return mu + sd**2 / 2 + log_ndtr(t - sd) - log_ndtr(t)


def dense(x, y, v, sizes, keep):
    """One head of queries x (S, d) to keys y (S, d) by the matrix of all pairs; cells, heavy keys and what is read are
    those that were chosen."""
    S, b, out = len(x), sizes.block, []
    places = recall.renewals(sizes, S)
    _, epochs = recall.Causal(sizes).choose(x[None, None], y[None], keep[None], slice(None))
    for i in range(S):
        past = keep & (torch.arange(S) <= i)
        if i < places[0]:
            out.append(((x[i] @ y[past].T).softmax(-1) @ v[past]) if past.any() else torch.zeros_like(v[0]))
            continue
        epoch = next(e for e in epochs if e.start <= i < e.stop)
        t, z = i // b, lambda k, e=epoch: (k - e.metric.shift[0]) @ e.metric.root[0]
        near, heavy = past & (torch.arange(S) >= (t - 1) * b), torch.zeros(S, dtype=torch.bool)
        heavy[epoch.heavy[0][epoch.there[0]]] = True
        far = past & ~near & ~heavy
        read = retrieval.retrieved_positions(y[None], far[None, None], x[i][None, None], sizes.open).flatten()
        read = read[read >= 0]
        numbers, step = as_integers(y)
        look = ((numbers @ as_integers(x[i])[0]).float() * step.float()).masked_fill(~far, -torch.inf)
        best = look.topk(min(sizes.open, int(far.sum()))).indices
        assert set(read.tolist()) == set(best.tolist())
        assert len(read) <= sizes.open and len(read.unique()) == len(read)
        assert far[read].all()                                       # each key counts once
        is_read = torch.zeros(S, dtype=torch.bool)
        is_read[read] = True
        logits, values = [x[i] @ y[near | heavy | is_read].T], [v[near | heavy | is_read]]
        cell = torch.cdist(z(y), epoch.centres[0]).argmin(-1)
        for k in range(len(epoch.centres[0])):
            mine = far & (cell == k)
            if (mine & ~is_read).any():
                tau = (z(y[mine]) - z(y[mine]).mean(0)).square().sum(-1).mean()
                sd = (x[i] @ epoch.metric.root[0]).norm() * tau.sqrt()
                mu = x[i] @ y[mine].mean(0)
                each = mean_below(mu.item(), sd.item(), (x[i] @ y[is_read].T).min().item())
                logits.append((mu + each - mu.item() + (mine & ~is_read).sum().log())[None])
                values.append(v[mine & ~is_read].mean(0)[None])
        out.append(torch.cat(logits).softmax(-1) @ torch.cat(values))
    return torch.stack(out)


@pytest.mark.parametrize("masked, sizes", [(False, SIZES), (True, SIZES._replace(heavy=0, open=5, block=8))])
def test_outputs_and_gradients_are_those_of_all_pairs(masked, sizes):
    x, y, v = (t.requires_grad_() for t in drawn(B=1, S=150))
    keep = torch.rand(1, 150, generator=torch.Generator().manual_seed(1)) < (0.7 if masked else 2.0)
    keep[:, 0] = True
    out = attend(x, y, v, sizes, keep if masked else None)
    expected = torch.stack([dense(x[0, h], y[0, 0], v[0, 0], sizes, keep[0]) for h in range(2)])[None]
    same(out, expected, (x, y, v))


def test_exact_where_every_key_is_read():
    x, y, v = (t.requires_grad_() for t in drawn())
    sizes = SIZES._replace(open=LENGTH)
    same(attend(x, y, v, sizes), exact_attention(x, y, v, causal=True), (x, y, v))


def test_a_part_that_is_computed_again_in_the_backward_pass(monkeypatch):
    x, y, v = (t.requires_grad_() for t in drawn(B=1, S=170))
    expected = attend(x, y, v)
    monkeypatch.setattr(recall, "NUMBERS", 1)
    same(attend(x, y, v), expected, (x, y, v))


# ---- laws ----


@torch.no_grad()
def test_outputs_depend_on_places_and_past_alone():
    """The whole, its first tokens, its last ones; in steps of any size; and behind padding."""
    x, y, v = drawn()
    for sizes in (SIZES._replace(open=1), SIZES):
        whole = attend(x, y, v, sizes)
        for n in (1, 9, 100, 200):
            first = attend(x[:, :, :n], y[:, :, :n], v[:, :, :n], sizes)
            torch.testing.assert_close(first, whole[:, :, :n], rtol=0, atol=1e-10)
            torch.testing.assert_close(attend(x[:, :, -n:], y, v, sizes), whole[:, :, -n:], rtol=0, atol=1e-10)
    padded = [torch.cat([torch.full_like(t[:, :, :7], torch.nan), t], 2) for t in (x, y, v)]
    padded = [torch.cat([p[:1], torch.cat([t[1:], t[1:, :, :7]], 2)]) for p, t in zip(padded, (x, y, v))]
    keep = torch.ones(2, LENGTH + 7, dtype=torch.bool)
    keep[0, :7], keep[1, LENGTH:] = False, False                    # on the left, and on the right
    found = attend(*padded, keep=keep)
    torch.testing.assert_close(found[0, :, 7:], whole[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1, :, :LENGTH], whole[1], rtol=0, atol=1e-10)
    assert (found[0, :, :7] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("more", [100, 10**6])
def test_token_by_token_is_the_parallel_pass(more, monkeypatch):
    """Also where more keys are read than `open`, from `more` tokens on."""
    monkeypatch.setattr("crt_exp.nearfar.choice.GROWTH_START", more)
    x, y, v = drawn(H=4, kv_heads=2)
    keep = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.8
    keep[0, :23], keep[1, :2], keep[:, 30] = False, False, True
    for mask in (None, keep):
        whole, state, start, parts = attend(x, y, v, keep=mask), RecallState(SIZES, 2), 0, []
        for n in (3, 40, 1, 1, 90, 1, 7, 120, 1, 66):
            at = slice(start, start + n)
            parts.append(state.step(x[:, :, at], y[:, :, at], v[:, :, at], None if mask is None else mask[:, at]))
            start += n
        real = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask
        for row in range(2):
            torch.testing.assert_close(torch.cat(parts, 2)[row][:, real[row]], whole[row][:, real[row]], rtol=0,
                                       atol=1e-10)


@needs_library
@pytest.mark.parametrize("seed, heads, kv_heads, S, L, d, dv, block, heavy, cells, open, until", [
    (0, 2, 1, 300, 300, 16, 16, 32, 4, 16, 1000, 128), (1, 2, 2, 905, 905, 20, 7, 16, 0, 16, 9, 128),
    (2, 4, 2, 1500, 333, 64, 48, 8, 16, 64, 33, 500), (3, 3, 1, 1111, 1, 33, 5, 64, 1, 5, 1, 0),
    (4, 2, 2, 400, 400, 32, 32, 32, 16, 300, 64, 64)])
def test_c_is_the_twin(monkeypatch, seed, heads, kv_heads, S, L, d, dv, block, heavy, cells, open, until):
    """Outputs and gradients; masks, groups, fewer queries than keys, odd sizes."""
    x, y, v = (t.requires_grad_() for t in drawn(2, heads, kv_heads, S, L, d, dv, seed, torch.float32))
    g = torch.Generator().manual_seed(seed)
    keep, weight = torch.rand(2, S, generator=g) < 0.8, torch.randn(2, heads, L, dv, generator=g)
    sizes = Sizes(block, heavy, cells, open=open, exact_until=until)

    def found(mask):
        out = attend(0.6 * x, y, v, sizes, mask)
        return out, *torch.autograd.grad((out * weight).sum(), (x, y, v))

    for mask in (None, keep):
        ours = found(mask)
        with monkeypatch.context() as patched:
            patched.setattr(native, "applies", lambda *tensors: False)
            theirs = found(mask)
        for one, other in zip(ours, theirs):
            assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("seed", range(60))
def test_c_is_the_twin_at_any_shape(seed, monkeypatch):
    """float32; where two keys promise alike, the twins may read another."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))
    group, kv_heads, S, d, dv = pick(1, 3), pick(1, 2), pick(40, 1200), pick(1, 70), pick(1, 70)
    sizes = Sizes(8 * 2**pick(0, 3), pick(0, 20), pick(1, 80), open=pick(1, 90), exact_until=pick(0, 200))
    x, y, v = drawn(2, group * kv_heads, kv_heads, S, pick(1, S), d, dv, seed, torch.float32)
    inputs, found = [t.requires_grad_() for t in (x, y, v)], []
    keep = None if seed % 2 else torch.rand(2, S, generator=g) < 0.7
    for in_c in (True, False):
        if not in_c:
            monkeypatch.setattr(native, "applies", lambda *tensors: False)
        out = attend(0.7 * x, y, v, sizes, keep)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, theirs, most in zip(*found, (2e-4, *[5e-4] * 3)):
        assert (ours - theirs).norm() <= most * theirs.norm()


@needs_library
@pytest.mark.parametrize("d", [16, 64])          # 64: looked at in tiles where the processor has them
@torch.no_grad()
def test_places_and_past_alone_in_c(d):
    x, y, v = drawn(1, 2, 1, 800, d=d, dv=16, dtype=torch.float32)
    sizes = Sizes(16, 4, 8, open=16, exact_until=100)
    whole = attend(x, y, v, sizes)
    for n in (100, 333, 500):
        torch.testing.assert_close(attend(x[:, :, :n], y[:, :, :n], v[:, :, :n], sizes), whole[:, :, :n])
        torch.testing.assert_close(attend(x[:, :, -n:], y, v, sizes), whole[:, :, -n:])


@torch.no_grad()
@pytest.mark.parametrize("in_c", [False, pytest.param(True, marks=needs_library)])
def test_states_go_on_in_two_ways_and_change_their_rows(in_c, monkeypatch):
    x, y, v = drawn(B=3, d=16, dv=16, dtype=torch.float32) if in_c else drawn(B=3)
    sizes, close = (SIZES._replace(block=8), {}) if in_c else (SIZES, {"rtol": 0, "atol": 1e-10})
    monkeypatch.setattr(past, "LEAST_ROOM", 64)
    keep = torch.ones(3, LENGTH, dtype=torch.bool)
    keep[1, :5] = False
    whole, first = attend(x, y, v, sizes, keep), RecallState(sizes, 1)
    token = lambda t, i, rows=slice(None): t[rows, :, i:i + 1]
    out = first.step(*(t[:, :, :150] for t in (x, y, v)), keep[:, :150])                       # a prompt
    torch.testing.assert_close(out, whole[:, :, :150], **close)
    if in_c:                                                        # what is known after it serves the next tokens
        assert all(int(known.state.kept[0, :2].view(torch.int64)) == 149 // 8 for known in first.known.values())
    first.take(y[:, :, 150:200], v[:, :, 150:200], keep[:, 150:200])
    first.step(*(token(t, 200) for t in (x, y, v)))
    other = first.copy()
    other.step(*(token(t, 5) for t in (x, y, v)))                   # another token, in the same buffer
    out = first.step(*(token(t, 201) for t in (x, y, v)))
    torch.testing.assert_close(out, whole[:, :, 201:202], **close)
    assert all(isinstance(known, past.KnownInC) == in_c for known in first.known.values())
    rows = torch.tensor([2, 1, 1])
    first.select(rows)
    for i in range(202, 230):
        out = first.step(*(token(t, i, rows) for t in (x, y, v)))
        torch.testing.assert_close(out, whole[rows, :, i:i + 1], **close)
        if i == 215:                                                # a copy that goes on does not change what is here
            ahead = first.copy()
            for j in range(216, 226):
                ahead.step(*(token(t, j - 200, rows) for t in (x, y, v)))


@needs_library
@torch.no_grad()
def test_one_thread_takes_a_token(monkeypatch):
    """Several would wait for each other longer than it takes."""
    threads, call = [], native.Call
    monkeypatch.setattr(native, "Call", lambda **fields: (threads.append(fields.get("threads")), call(**fields))[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x, y, v = drawn(1, 4, 4, d=16, dv=16, dtype=torch.float32)
    state = RecallState(SIZES._replace(block=8), 4)
    for at in (slice(0, 200), slice(200, 201), slice(201, 202)):
        state.step(*(t[:, :, at] for t in (x, y, v)))
    assert threads == [None, 3, 1, 1]       # the first is asked for a size


@torch.no_grad()
@pytest.mark.parametrize("d, dv", [(16, 16), (24, 7)])
@pytest.mark.parametrize("before, after", [(1, 16), (16, 1), (16, 16)])
def test_threads_decide_nothing_of_a_state(d, dv, before, after, one_thread):
    """One row with few heads for 16 threads, then four."""
    x, y, v = drawn(1, 3, 3, d=d, dv=dv, dtype=torch.float32)
    whole, state = attend(x, y, v), RecallState(SIZES, 3)
    torch.set_num_threads(before)
    for at in (slice(0, 250), slice(250, 251)):
        torch.testing.assert_close(state.step(*(t[:, :, at] for t in (x, y, v))), whole[:, :, at])
    state.select(torch.zeros(4, dtype=torch.long))
    torch.set_num_threads(after)
    for i in range(251, 270):
        out = state.step(*(t[:, :, i:i + 1].expand(4, -1, -1, -1) for t in (x, y, v)))
        torch.testing.assert_close(out, whole[:, :, i:i + 1].expand_as(out))


# ---- what is found ----


@torch.no_grad()
def test_one_key_of_many_is_found():
    """Every query asks for a key of its own, with 0.9 of its weight: cells alone lose it."""
    g = torch.Generator().manual_seed(0)
    S, d = 1024, 32
    y, v = torch.randn(1, 2, S, d, generator=g), torch.randn(1, 2, S, d, generator=g)
    target = (torch.rand(2, S, generator=g) * (torch.arange(S) - 96).clamp(min=1)).long()
    x = 0.45 * y[0].gather(1, target.unsqueeze(-1).expand(-1, -1, d))[None]
    exact = exact_attention(x, y, v, causal=True)[:, :, 512:]
    error = lambda **sizes: float((attend(x, y, v, Sizes(open=1, exact_until=128)._replace(**sizes))[:, :, 512:]
                                   - exact).norm() / exact.norm())
    uniform = uniform_attention(x, y, v, causal=True)[:, :, 512:]
    assert float((uniform - exact).norm() / exact.norm()) > 0.9
    few, many = error(open=8), error(open=128)
    assert few < 0.25 and many < 0.15


def test_centres_are_of_keys_from_everywhere():
    """However many there are, and whatever small period they have."""
    for keys in (5, 63, 64, 200, 1024, 4096, 5000):
        places = recall.sample(keys, CENTRE_SAMPLES * 4, torch.device("cpu"))
        assert len(places.unique()) == len(places) >= min(keys, CENTRE_SAMPLES * 4)
        assert places.min() >= 0 and places.max() < keys and len(places) < 2 * CENTRE_SAMPLES * 4
        if len(places) > 3:
            assert all(len((places % period).unique()) > 1 for period in (2, 3, 4))


# ---- layers and models ----


@pytest.mark.parametrize("masked", [False, True])
def test_what_all_keys_of_a_block_share_is_not_measured(masked):
    """Rotary positions turn the mean of the keys: places would be told apart by it, not keys."""
    y = drawn()[1].flatten(0, 1)
    keep = torch.rand(y.shape[:2], generator=torch.Generator().manual_seed(1)) < 0.8 if masked else None
    shared = 10 * drawn(seed=1)[1].flatten(0, 1)[:, :-(-LENGTH // SIZES.block)]
    moved = y + shared.repeat_interleave(SIZES.block, 1)[:, :LENGTH]
    sizes = SIZES._replace(exact_until=200)
    root = recall.metric_of(y, keep, sizes).root
    torch.testing.assert_close(recall.metric_of(moved, keep, sizes).root, root)
    torch.testing.assert_close(torch.linalg.matrix_norm(root @ root.mT), root.new_ones(len(root)))


@pytest.mark.parametrize("masked", [False, True])
def test_keys_are_measured_about_the_means_of_their_blocks(masked):
    y = drawn()[1].flatten(0, 1)
    keep = torch.ones(y.shape[:2], dtype=torch.bool)
    keep[:, 1:7] = not masked                       # a block without a key beside one with one
    sizes = SIZES._replace(exact_until=200)
    metric, far = recall.metric_of(y, keep if masked else None, sizes), recall.renewals(sizes, 0)[0] - sizes.block
    for z in range(len(y)):
        apart = torch.cat([rows - rows.mean(0) for at in range(0, far, sizes.block)
                           if len(rows := y[z, at:at + sizes.block][keep[z, at:at + sizes.block]])])
        moments = apart.T @ apart
        moments += RIDGE * moments.diagonal().mean() * torch.eye(y.shape[-1])
        torch.testing.assert_close(metric.root[z] @ metric.root[z].T, moments / torch.linalg.matrix_norm(moments))


def test_a_layer_needs_no_calibration_and_holds_nothing():
    layer = NearFar(2, 5, kv_heads=1, causal=True, block=4, cells=6, open=12, exact_until=16, scaling=1.0)
    x, y, v = drawn(dtype=torch.float32)
    assert not layer.state_dict() and not layer.learns and layer.serves_causal
    out, sizes = layer(x, y, v), layer.sizes
    torch.testing.assert_close(out, attend(x, y, v, sizes))
    assert type(layer.decoding()) is RecallState


def test_transforms_and_export():
    layer = NearFar(2, 4, causal=True, block=8, cells=3, heavy=2, open=4, exact_until=8).double().eval()
    q, k, v = torch.randn(3, 1, 2, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keep = torch.ones(1, 30, dtype=torch.bool)
    with pytest.raises(ValueError, match="key_mask: not supported by causal near-far"):
        torch.func.vmap(layer)(*(t.unsqueeze(0) for t in (q, k, v, keep)))
    out, tangent = torch.func.jvp(lambda v: layer(q, k, v), (v,), (torch.ones_like(v),))
    torch.testing.assert_close(out, layer(q, k, v))
    torch.testing.assert_close(tangent, torch.ones_like(out))            # weights sum to 1
    program = torch.export.export(layer, (q, k, v), strict=False).module()
    torch.testing.assert_close(program(q, k, v), out)


@torch.no_grad()
def test_keys_that_are_all_alike():
    """Every weight is the same, whatever cells there are."""
    x, y, v = drawn(dtype=torch.float32)
    y = y[:, :, :1].expand_as(y)
    expected = uniform_attention(x, y, v, causal=True)
    torch.testing.assert_close(attend(x, y, v), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend(x, y, v, SIZES._replace(block=16)), expected, rtol=1e-4, atol=1e-5)


def test_an_empty_batch():
    x, y, v = (t[:0].requires_grad_() for t in drawn())
    out = attend(x, y, v)
    out.sum().backward()
    assert out.shape == (0, 2, LENGTH, 3) and x.grad.shape == x.shape
    assert RecallState(SIZES, 1).step(x.detach(), y.detach(), v.detach()).shape == out.shape


def test_half_precision_and_large_scores():
    x, y, v = drawn(dtype=torch.float32)
    half = [t.to(torch.bfloat16) for t in (x, y, v)]
    out, expected = attend(*half), attend(*(t.float() for t in half))
    assert out.dtype == torch.bfloat16 and (out - expected).norm() < 0.01 * expected.norm()
    assert attend(100 * x, 10 * y, v).isfinite().all()


def test_what_is_refused():
    x, y, v = drawn(S=20)
    with pytest.raises(ValueError, match="open=0: expected an integer >= 1"):
        attend(x, y, v, SIZES._replace(open=0))
    with pytest.raises(ValueError, match="NaN, infinity"):
        attend(x, y * torch.nan, v)
    with pytest.raises(ValueError, match="2 sequences, got 1"):
        state = RecallState(SIZES, 1)
        state.take(y, v)
        state.take(y[:1], v[:1])
    with pytest.raises(ValueError, match=r"d, dv = \(5, 3\), got \(4, 3\)"):
        state.take(y[..., :4], v)


@torch.no_grad()
def test_a_swapped_decoder_generates_as_without_a_cache(one_thread):
    """Rows of two lengths, padded on the left: greedy text, and that of each row alone."""
    transformers = pytest.importorskip("transformers")
    from crt_exp import swap_attention

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=50, max_position_embeddings=512, pad_token_id=0, eos_token_id=None, bos_token_id=1)).double().eval()
    for p in model.parameters():
        p.normal_(std=0.4) if p.ndim > 1 else None
    swap_attention(model, "nearfar", block=4, cells=6, heavy=2, open=8, exact_until=16)
    ids = torch.randint(2, 50, (2, 180))
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    text = model.generate(**given)
    assert torch.equal(text, model.generate(**given, use_cache=False))
    alone = model.generate(input_ids=ids[:1, 37:], max_new_tokens=24, do_sample=False)
    assert torch.equal(alone[0], text[0, 37:])
    assert model.generate(**given, num_beams=3).shape == text.shape


@pytest.mark.slow
@torch.no_grad()
def test_compiled_queries_read_the_same_keys():
    x, y, v = (t.float() for t in drawn(B=1, S=170))
    eager = attend(x, y, v)
    torch.testing.assert_close(torch.compile(attend)(x, y, v), eager, rtol=1e-4, atol=1e-5)
