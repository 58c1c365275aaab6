"""One law for every attention of conf/attention: a row of a batch gives what its tokens give alone, whichever side its
padding is on, and whatever that holds."""

import pytest
import torch

pytest.importorskip("transformers")
from decoders import CONTROLS, layer, mechanisms  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")]
LENGTH, REAL = 27, {"left": slice(5, 27), "right": slice(0, 22), "both": slice(9, 24), "not": slice(0, 27)}
CASES = [(name, causal) for name in mechanisms() for causal in (False, True) if not (name == "linformer" and causal)]


def drawn(batch, heads, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, LENGTH, 16, generator=g, dtype=torch.float64)


def made(name, causal):
    """Calibrated."""
    kind, options = mechanisms()[name]
    attention = layer(kind, options, causal=causal).double().eval()
    if kind not in CONTROLS:
        with attention.calibration(), torch.no_grad():
            attention(drawn(4, 4, 6), drawn(4, 2, 7), drawn(4, 2, 8))
    return attention


def padded(rows, holes=()):
    """q, k, v and the mask: padded keys and values are NaN, which no output may show."""
    at = torch.arange(LENGTH)
    keep = torch.stack([(at >= row.start) & (at < row.stop) for row in rows])
    keep[:, holes] = False
    q, *rest = drawn(len(rows), 4, 0), drawn(len(rows), 2, 1), drawn(len(rows), 2, 2)
    return q, *(torch.where(keep[:, None, :, None], t, torch.nan) for t in rest), keep


# Of every mechanism one direction is fast, in turn; of near-far, whose directions are two computations, both.
TURNS = [*{name: None for name, _ in CASES}]


@pytest.mark.parametrize("name, causal", [pytest.param(
    name, causal, id=f"{name}-{'causal' if causal else 'both'}", marks=[] if name.startswith(("nearfar", "linformer"))
    or causal == TURNS.index(name) % 2 else [pytest.mark.slow]) for name, causal in CASES])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(name, causal):
    """Also where tokens within do not count, which keep their places."""
    attention, rows = made(name, causal), [*REAL.values()]
    for holes in ((), (10, 11, 17)):
        q, k, v, keep = padded(rows, list(holes))
        out = attention(q, k, v, keep)
        for row, at in enumerate(rows):
            own = keep[row:row + 1, at] if holes else None
            alone, real = attention(*(t[row:row + 1, :, at] for t in (q, k, v)), own), keep[row, at]
            torch.testing.assert_close(out[row, :, at][:, real], alone[0][:, real], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [name for name, causal in CASES if causal and name != "reformer"])
@torch.no_grad()
def test_the_last_queries_of_a_padded_sequence_see_what_they_see_alone(name):
    attention, rows = made(name, True), [*REAL.values()]
    q, k, v, keep = padded(rows)
    whole = attention(q, k, v, keep)
    for last in (1, 7):
        out, real = attention(q[:, :, -last:], k, v, keep), keep[:, None, -last:, None].expand(-1, 4, -1, 16)
        torch.testing.assert_close(out[real], whole[:, :, -last:][real], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["window", "linformer"])
def test_gradients_of_padding_are_nothing(name):
    attention = made(name, False)
    inputs = [t.nan_to_num(3.0).requires_grad_() for t in padded([REAL["left"]])[:3]]
    keep = padded([REAL["left"]])[3]
    alone = [t.detach()[:, :, 5:].requires_grad_() for t in inputs]
    found = torch.autograd.grad(attention(*inputs, keep)[:, :, 5:].square().sum(), inputs)
    expected = torch.autograd.grad(attention(*alone).square().sum(), alone)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours[:, :, 5:], theirs)
        assert (ours[:, :, :5] == 0).all()


@torch.no_grad()
def test_a_window_counts_places_and_not_tokens():
    """From the first real token; one after it that does not count keeps its place, first ones too."""
    attention = layer("window", {"block": 4, "first": 2}, causal=True).double()
    q, k, v, keep = padded([slice(3, 27)], [4, 12])
    at, real = torch.arange(LENGTH) - 3, keep[0]
    near = (at // 4 >= at[:, None] // 4 - 1) | (at < 2)
    allowed = near & (at <= at[:, None]) & real
    k, v = (t.nan_to_num(0.0).repeat_interleave(2, 1) for t in (k, v))
    expected = (q @ k.mT / 4).masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(attention(q, k[:, ::2], v[:, ::2], keep)[:, :, real], expected[:, :, real])
