"""The Triton kernels of fused_causal.py, whose legend is that of this file.

Positions are those of keys; a side's tokens begin at position `first`, and what lies before is no token. A sweep goes
through a segment from its first position on, or REVERSE, from its last one back: then "before" is what comes later. A
log of -inf is one of a token, a key or a feature that is not there. All sums are of float32. Derived here.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-float("inf"))


@triton.jit
def _bounds(s, ahead, P, S, SEGMENT: tl.constexpr):
    """The positions of segment s, the first `ahead` of which cover the P keys before the first query."""
    start = tl.where(s < ahead, s * SEGMENT, P + (s - ahead) * SEGMENT)
    return start, tl.minimum(start + SEGMENT, tl.where(s < ahead, P, S))


@triton.jit
def _places(k, start, stop, TOKENS: tl.constexpr, REVERSE: tl.constexpr):
    """The positions of TOKENS tokens of a segment from the k-th on, and which of them it has."""
    steps = k + tl.arange(0, TOKENS)
    position = stop - 1 - steps if REVERSE else start + steps
    return position, steps < stop - start


@triton.jit
def _rows(base, at, valid, width, WIDE: tl.constexpr):
    """Rows `at` of a matrix with `width` columns in float32; 0 for those that are not valid."""
    columns = tl.arange(0, WIDE)
    return tl.load(base + at[:, None] * width + columns[None, :],
                   mask=valid[:, None] & (columns[None, :] < width), other=0.0).to(tl.float32)


@triton.jit
def _store_rows(base, at, valid, width, rows, WIDE: tl.constexpr):
    columns = tl.arange(0, WIDE)
    tl.store(base + at[:, None] * width + columns[None, :], rows, mask=valid[:, None] & (columns[None, :] < width))


@triton.jit
def _tokens(t, offset, values, last, z, at, valid, length, d, dv, D: tl.constexpr, DV: tl.constexpr):
    """Vectors, offsets of their logs, values and last values of tokens."""
    base = z * length
    return (_rows(t + base * d, at, valid, d, D), tl.load(offset + base + at, mask=valid, other=NOTHING),
            _rows(values + base * dv, at, valid, dv, DV), tl.load(last + base + at, mask=valid, other=0.0))


@triton.jit
def _logs(t, offset, w, bias, PRECISION: tl.constexpr):
    """Log features (tokens, features)."""
    return tl.dot(t, tl.trans(w), input_precision=PRECISION) + bias[None, :] + offset[:, None]


@triton.jit
def _features(m, t, offset, other, other_offset, weights, bias, z, M, d, FEATURES: tl.constexpr, D: tl.constexpr,
              PRECISION: tl.constexpr):
    """Features from the m-th on, which of them there are, their rows, and their logs of the tokens of both sides."""
    features = m + tl.arange(0, FEATURES)
    there = features < M
    w = _rows(weights, z * M + features, there, d, D)
    shared = tl.load(bias + z * M + features, mask=there, other=NOTHING)
    a, b = _logs(t, offset, w, shared, PRECISION), _logs(other, other_offset, w, shared, PRECISION)
    return features, there, w, a, b


@triton.jit
def _finite(top):
    return tl.where(top == NOTHING, 0.0, top)


@triton.jit
def _added(logs, values, last, sums, total, top, PRECISION: tl.constexpr):
    """A state with more tokens: sums and totals over exp(top), of features."""
    highest = tl.maximum(top, tl.max(logs, 0))
    less, weights = tl.exp(top - _finite(highest)), tl.exp(logs - _finite(highest)[None, :])
    sums = sums * less[:, None] + tl.dot(tl.trans(weights), values, input_precision=PRECISION)
    return sums, total * less + tl.sum(weights * last[:, None], 0), highest


@triton.jit
def _state(sums, total, top, place, features, there, dv, DV: tl.constexpr):
    base = place + features
    return (_rows(sums, base, there, dv, DV), tl.load(total + base, mask=there, other=0.0),
            tl.load(top + base, mask=there, other=NOTHING))


@triton.jit
def _store_state(sums, total, top, place, features, there, dv, new_sums, new_total, new_top, DV: tl.constexpr):
    base = place + features
    _store_rows(sums, base, there, dv, new_sums, DV)
    tl.store(total + base, new_total, mask=there)
    tl.store(top + base, new_top, mask=there)


@triton.jit
def summary(t, offset, values, last, weights, bias, sums, total, top, length, first, n, ahead, P, S, M, d, dv,
            SEGMENT: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
            PRECISION: tl.constexpr):
    """What the tokens of one segment leave in FEATURES features."""
    program = tl.program_id(0).to(tl.int64)
    z, s = program // n, program % n
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    there = features < M
    w = _rows(weights, z * M + features, there, d, D)
    shared = tl.load(bias + z * M + features, mask=there, other=NOTHING)
    start, stop = _bounds(s, ahead, P, S, SEGMENT)
    gathered, mass = tl.zeros((FEATURES, DV), tl.float32), tl.zeros((FEATURES,), tl.float32)
    highest = tl.full((FEATURES,), NOTHING, tl.float32)
    for k in range(0, SEGMENT, TOKENS):
        position, inside = _places(k, start, stop, TOKENS, False)
        vectors, offsets, given, ends = _tokens(t, offset, values, last, z, position - first,
                                                inside & (position >= first), length, d, dv, D, DV)
        logs = _logs(vectors, offsets, w, shared, PRECISION)
        gathered, mass, highest = _added(logs, given, ends, gathered, mass, highest, PRECISION)
    _store_state(sums, total, top, program * M, features, there, dv, gathered, mass, highest, DV)


@triton.jit
def entering(sums, total, top, n, M, dv, FEATURES: tl.constexpr, DV: tl.constexpr, REVERSE: tl.constexpr):
    """In place of what each segment leaves: what all segments before it have left."""
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    there = features < M
    gathered, mass = tl.zeros((FEATURES, DV), tl.float32), tl.zeros((FEATURES,), tl.float32)
    highest = tl.full((FEATURES,), NOTHING, tl.float32)
    for step in range(n):
        place = (tl.program_id(0).to(tl.int64) * n + (n - 1 - step if REVERSE else step)) * M
        here, weight, own = _state(sums, total, top, place, features, there, dv, DV)
        _store_state(sums, total, top, place, features, there, dv, gathered, mass, highest, DV)
        new = tl.maximum(highest, own)
        less, scale = tl.exp(highest - _finite(new)), tl.exp(own - _finite(new))
        gathered, mass = gathered * less[:, None] + here * scale[:, None], mass * less + weight * scale
        highest = new


@triton.jit
def forward(x, x_offset, y, y_offset, values, last, weights, bias, sums, total, top, out, logsum, L, n, ahead, P, S, M,
            d, dv, SEGMENT: tl.constexpr, PIECE: tl.constexpr, FEATURES: tl.constexpr, D: tl.constexpr,
            DV: tl.constexpr, PRECISION: tl.constexpr):
    """The rows of one segment of queries, piece by piece, from the state that enters it, which is overwritten."""
    program = tl.program_id(0).to(tl.int64)
    z, s = program // (n - ahead), program % (n - ahead) + ahead
    place, order = (z * n + s) * M, tl.arange(0, PIECE)
    visible = order[None, :] <= order[:, None]
    start, stop = _bounds(s, ahead, P, S, SEGMENT)
    for k in range(0, stop - start, PIECE):
        position, inside = _places(k, start, stop, PIECE, False)
        at = position - P
        vectors = _rows(x + z * L * d, at, inside, d, D)
        offsets = tl.load(x_offset + z * L + at, mask=inside, other=NOTHING)
        keys, key_offsets, given, ends = _tokens(y, y_offset, values, last, z, position, inside, S, d, dv, D, DV)
        acc, mass = tl.zeros((PIECE, DV), tl.float32), tl.zeros((PIECE,), tl.float32)
        highest = tl.full((PIECE,), NOTHING, tl.float32)
        pairs, pair_top = tl.zeros((PIECE, PIECE), tl.float32), tl.full((PIECE, PIECE), NOTHING, tl.float32)
        for m in range(0, M, FEATURES):
            features, there, w, a, b = _features(m, vectors, offsets, keys, key_offsets, weights, bias, z, M, d,
                                                 FEATURES, D, PRECISION)
            before, weight, ref = _state(sums, total, top, place, features, there, dv, DV)
            logs = a + ref[None, :]
            new = tl.maximum(highest, tl.max(logs, 1))
            less, q = tl.exp(highest - _finite(new)), tl.exp(logs - _finite(new)[:, None])
            acc = acc * less[:, None] + tl.dot(q, before, input_precision=PRECISION)
            mass, highest = mass * less + tl.sum(q * weight[None, :], 1), new
            both = a[:, None, :] + b[None, :, :]
            new_pair = tl.maximum(pair_top, tl.max(both, 2))
            pairs = (pairs * tl.exp(pair_top - _finite(new_pair))
                     + tl.sum(tl.exp(both - _finite(new_pair)[:, :, None]), 2))
            pair_top = new_pair
            before, weight, ref = _added(b, given, ends, before, weight, ref, PRECISION)
            _store_state(sums, total, top, place, features, there, dv, before, weight, ref, DV)
        pair_top = tl.where(visible, pair_top, NOTHING)
        new = tl.maximum(highest, tl.max(pair_top, 1))
        less, p = tl.exp(highest - _finite(new)), pairs * tl.exp(pair_top - _finite(new)[:, None])
        acc = acc * less[:, None] + tl.dot(p, given, input_precision=PRECISION)
        mass = mass * less + tl.sum(p * ends[None, :], 1)
        sure = tl.where(mass == 0, 1.0, mass)            # a row that sees no key
        _store_rows(out + z * L * dv, at, inside, dv, acc / sure[:, None], DV)
        tl.store(logsum + z * L + at, new + tl.log(sure), mask=inside)
        tl.debug_barrier()       # the next piece reads what other threads have written


@triton.jit
def backward(x, x_offset, x_values, x_last, y, y_offset, values, last, weights, bias, sums, total, top, dx, dx_values,
             rows, columns, row_first, column_first, norm_weight, n, ahead, P, S, M, d, dv, SEGMENT: tl.constexpr,
             PIECE: tl.constexpr, FEATURES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
             REVERSE: tl.constexpr):
    """The gradients to tokens x (`rows` in number) of one segment which meet tokens y (`columns`) of their own piece
    and the state that enters, which is overwritten. REVERSE: x are keys, whose values get their gradients too."""
    program = tl.program_id(0).to(tl.int64)
    skipped = 0 if REVERSE else ahead
    z, s = program // (n - skipped), program % (n - skipped) + skipped
    place, order = (z * n + s) * M, tl.arange(0, PIECE)
    start, stop = _bounds(s, ahead, P, S, SEGMENT)
    for k in range(0, stop - start, PIECE):
        position, inside = _places(k, start, stop, PIECE, REVERSE)
        at, other = position - row_first, position - column_first
        vectors, offsets, own, own_last = _tokens(x, x_offset, x_values, x_last, z, at, inside & (at >= 0), rows, d, dv,
                                                  D, DV)
        met, met_offsets, given, ends = _tokens(y, y_offset, values, last, z, other, inside & (other >= 0), columns, d,
                                                dv, D, DV)
        visible = order[None, :] <= order[:, None]
        slope = tl.dot(own, tl.trans(given), input_precision=PRECISION) + own_last[:, None] * ends[None, :]
        slope = tl.where(visible, slope, 0.0)
        grad, norms = tl.zeros((PIECE, D), tl.float32), tl.zeros((PIECE,), tl.float32)
        acc, pairs = tl.zeros((PIECE, DV), tl.float32), tl.zeros((PIECE, PIECE), tl.float32)
        for m in range(0, M, FEATURES):
            features, there, w, a, b = _features(m, vectors, offsets, met, met_offsets, weights, bias, z, M, d,
                                                 FEATURES, D, PRECISION)
            before, weight, ref = _state(sums, total, top, place, features, there, dv, DV)
            q = tl.exp(a + ref[None, :])                 # at most 1, as all weights of pairs
            gain = tl.dot(own, tl.trans(before), input_precision=PRECISION) + own_last[:, None] * weight[None, :]
            both = tl.exp(tl.where(visible[:, :, None], a[:, None, :] + b[None, :, :], NOTHING))
            dlogs = q * gain + tl.sum(both * slope[:, :, None], 1)
            grad += tl.dot(dlogs, w, input_precision=PRECISION)
            norms += tl.sum(dlogs, 1)
            if REVERSE:
                acc += tl.dot(q, before, input_precision=PRECISION)
                pairs += tl.sum(both, 2)
            before, weight, ref = _added(b, given, ends, before, weight, ref, PRECISION)
            _store_state(sums, total, top, place, features, there, dv, before, weight, ref, DV)
        if REVERSE:
            grad -= 2 * norm_weight * norms[:, None] * vectors
            acc += tl.dot(pairs, given, input_precision=PRECISION)
            _store_rows(dx_values + z * rows * dv, at, inside & (at >= 0), dv, acc, DV)
        _store_rows(dx + z * rows * d, at, inside & (at >= 0), d, grad, D)
        tl.debug_barrier()
