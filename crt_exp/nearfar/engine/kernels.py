"""The Triton kernels of fused.py, whose legend is that of this file. Rows of keys lie one after the other in a head. A
key that a group does not hold has logit -inf; one that is masked has HIDDEN, and so counts only where there is no
other. Derived here.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e38)     # where running maxima begin: below HIDDEN


@triton.jit
def _rows(base, at, valid, width, WIDE: tl.constexpr):
    """Rows `at` of a matrix with `width` columns; 0 for those that are not valid."""
    columns = tl.arange(0, WIDE)
    return tl.load(base + at[:, None] * width + columns[None, :],
                   mask=valid[:, None] & (columns[None, :] < width), other=0.0)


@triton.jit
def _logits(q, k, bias, hidden, rows, at, slot, valid, r, W, HIDE: tl.constexpr, PRECISION: tl.constexpr):
    """(ROWS, COLUMNS) of queries `rows` of a block and keys `at`, which stand at `slot` of the window."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) + tl.load(bias + at, mask=valid, other=0.0)[None, :]
    if HIDE:
        seen = (rows[:, None] < r) & valid[None, :]
        logits += tl.load(hidden + rows[:, None] * W + slot[None, :], mask=seen, other=0.0)
    return tl.where(valid[None, :], logits, -float("inf"))


@triton.jit
def _add(q, top, total, acc, keys, values, bias, hidden, rows, start, count, limit, r, d, dv, HIDE: tl.constexpr,
         COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):
    """The keys of a group into a running softmax; returns it with the sum of their own weights."""
    own = tl.zeros_like(total)
    for j in range(0, count, COLUMNS):
        slot = j + tl.arange(0, COLUMNS)
        at = start + slot
        valid = (slot < count) & (at >= 0) & (at < limit)
        k = _rows(keys, at, valid, d, D)
        logits = _logits(q, k, bias, hidden, rows, at, slot, valid, r, count, HIDE, PRECISION)
        highest = tl.maximum(top, tl.max(logits, 1))
        weight = tl.exp(logits - highest[:, None])
        less, here = tl.exp(top - highest), tl.sum(weight, 1)
        v = _rows(values, at, valid, dv, DV)
        acc = acc * less[:, None] + tl.dot(weight, v, input_precision=PRECISION)
        total, own, top = total * less + here, own * less + here, highest
    return top, total, acc, own


@triton.jit
def forward(q, keys, values, bias, hidden, heavy, heavy_values, heavy_bias, cells, cell_values, cell_bias,
            out, share, logsum, n, N, r, b, W, heavies, K, d, dv,
            heavy_head, heavy_value_head, heavy_bias_head, heavy_block, heavy_value_block, heavy_bias_block,
            cell_head, cell_value_head, cell_bias_head, cell_block, cell_value_block, cell_bias_block,
            NEAR: tl.constexpr, HEAVY: tl.constexpr, HIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):
    """ROWS queries of a block: window, heavy keys, cells."""
    z, t = tl.program_id(0) // n, tl.program_id(0) % n
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, at = rows < r, tl.program_id(0) * r + rows
    x = _rows(q, at, there, d, D)
    top, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DV), tl.float32)
    if NEAR:
        first = z * N * b
        top, total, acc, _ = _add(x, top, total, acc, keys + first * d, values + first * dv, bias + first, hidden, rows,
                                  (N - n + t - 1) * b, W, N * b, r, d, dv, HIDE, COLUMNS, D, DV,
                                  PRECISION)
    if HEAVY:
        top, total, acc, _ = _add(x, top, total, acc, heavy + z * heavy_head + t * heavy_block,
                                  heavy_values + z * heavy_value_head + t * heavy_value_block,
                                  heavy_bias + z * heavy_bias_head + t * heavy_bias_block, hidden, rows, 0, heavies,
                                  heavies, r, d, dv, False, COLUMNS, D, DV, PRECISION)
    top, total, acc, own = _add(x, top, total, acc, cells + z * cell_head + t * cell_block,
                                cell_values + z * cell_value_head + t * cell_value_block,
                                cell_bias + z * cell_bias_head + t * cell_bias_block, hidden, rows, 0, K, K, r, d, dv,
                                False, COLUMNS, D, DV, PRECISION)
    columns = tl.arange(0, DV)
    tl.store(out + at[:, None] * dv + columns[None, :], acc / total[:, None],
             mask=there[:, None] & (columns[None, :] < dv))
    tl.store(share + at, own / total, mask=there)
    tl.store(logsum + at, top + tl.log(total), mask=there)


@triton.jit
def _slopes(x, g, delta, log_total, gain, keys, values, bias, hidden, rows, at, slot, valid, r, W, d, dv,
            HIDE: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):
    """Weights of some keys, the gradients to their logits, and the keys."""
    k, v = _rows(keys, at, valid, d, D), _rows(values, at, valid, dv, DV)
    logits = _logits(x, k, bias, hidden, rows, at, slot, valid, r, W, HIDE, PRECISION)
    weight = tl.where((rows < r)[:, None], tl.exp(logits - log_total[:, None]), 0.0)
    slope = tl.dot(g, tl.trans(v), input_precision=PRECISION) - delta[:, None]
    if LAST:
        slope += gain[:, None]
    return weight, weight * slope, k


@triton.jit
def queries_backward(q, keys, values, bias, hidden, logsum, grad, delta, gain, dq, n, N, r, b, W, d, dv,
                     key_head, value_head, bias_head, key_block, value_block, bias_block,
                     NEAR: tl.constexpr, HIDE: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr,
                     COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):
    """What the keys of a group give to the gradients to ROWS queries, added to dq (float32)."""
    z, t = tl.program_id(0) // n, tl.program_id(0) % n
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, mine = rows < r, tl.program_id(0) * r + rows
    x, g = _rows(q, mine, there, d, D), _rows(grad, mine, there, dv, DV)
    log_total, lost = tl.load(logsum + mine, mask=there, other=0.0), tl.load(delta + mine, mask=there, other=0.0)
    more = tl.load(gain + mine, mask=there, other=0.0)
    if NEAR:
        start, limit = (N - n + t - 1) * b, N * b
    else:
        start, limit = 0, W
    keys += z * key_head + t * key_block
    values += z * value_head + t * value_block
    bias += z * bias_head + t * bias_block
    total = tl.zeros((ROWS, D), tl.float32)
    for j in range(0, W, COLUMNS):
        slot = j + tl.arange(0, COLUMNS)
        at = start + slot
        valid = (slot < W) & (at >= 0) & (at < limit)
        _, slope, k = _slopes(x, g, lost, log_total, more, keys, values, bias, hidden, rows, at, slot, valid, r, W, d,
                              dv, HIDE, LAST, D, DV, PRECISION)
        total += tl.dot(slope, k, input_precision=PRECISION)
    columns = tl.arange(0, D)
    place, kept = dq + mine[:, None] * d + columns[None, :], there[:, None] & (columns[None, :] < d)
    tl.store(place, tl.load(place, mask=kept, other=0.0) + total, mask=kept)


@triton.jit
def keys_backward(q, keys, values, bias, hidden, logsum, grad, delta, gain, dkeys, dvalues, dbias, n, N, r, m, W, d, dv,
                  key_head, value_head, bias_head, key_block, value_block, bias_block,
                  NEAR: tl.constexpr, AROUND: tl.constexpr, HIDE: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients to COLUMNS of the m keys of a block: near ones, of all query blocks that see it; others, of one."""
    blocks = N if NEAR else n
    z, s = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid, mine = at < m, tl.program_id(0) * m + at
    keys += z * key_head + s * key_block
    values += z * value_head + s * value_block
    bias += z * bias_head + s * bias_block
    dk, dvalue = tl.zeros((COLUMNS, D), tl.float32), tl.zeros((COLUMNS, DV), tl.float32)
    db = tl.zeros((COLUMNS,), tl.float32)
    for i in range(AROUND):
        t = s + 1 - i - (N - n) if NEAR else s
        here = (t >= 0) & (t < n)
        for first in range(0, r, ROWS):
            rows = first + tl.arange(0, ROWS)
            there, of = (rows < r) & here, (z * n + t) * r + rows
            x, g = _rows(q, of, there, d, D), _rows(grad, of, there, dv, DV)
            log_total = tl.load(logsum + of, mask=there, other=float("inf"))     # no weight where no query is
            lost, more = tl.load(delta + of, mask=there, other=0.0), tl.load(gain + of, mask=there, other=0.0)
            weight, slope, _ = _slopes(x, g, lost, log_total, more, keys, values, bias, hidden, rows, at, i * m + at,
                                       valid, r, W, d, dv, HIDE, LAST, D, DV, PRECISION)
            dk += tl.dot(tl.trans(slope), x, input_precision=PRECISION)
            dvalue += tl.dot(tl.trans(weight), g, input_precision=PRECISION)
            db += tl.sum(slope, 0)
    columns, wide = tl.arange(0, D), tl.arange(0, DV)
    tl.store(dkeys + mine[:, None] * d + columns[None, :], dk, mask=valid[:, None] & (columns[None, :] < d))
    tl.store(dvalues + mine[:, None] * dv + wide[None, :], dvalue, mask=valid[:, None] & (wide[None, :] < dv))
    tl.store(dbias + mine, db, mask=valid)


# The keys that each query reads for itself: rows of a table (Z, S, .) at places (Z, R, o), -1 for none.


@triton.jit
def _read(table, places, first, slot, o, S, width, WIDE: tl.constexpr):
    """Some of the rows that a query reads, 0 for none; which are there; where they begin."""
    place = tl.load(places + first * o + slot, mask=slot < o, other=-1)
    valid = (place >= 0) & (place < S)
    start = place * width
    columns = tl.arange(0, WIDE)
    there = valid[:, None] & (columns[None, :] < width)
    return tl.load(table + start[:, None] + columns[None, :], mask=there, other=0.0), valid, start


@triton.jit
def read_logits(given, table, places, out, R, o, S, width, none, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """out (Z, R, o): the products of each row of `given` (Z, R, width) with the rows that it reads, `none` for none."""
    first = tl.program_id(0).to(tl.int64)
    slot, columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    x = tl.load(given + first * width + columns, mask=columns < width, other=0.0)
    rows, valid, _ = _read(table + first // R * S * width, places, first, slot, o, S, width, WIDE)
    tl.store(out + first * o + slot, tl.where(valid, tl.sum(rows * x[None, :], 1), none), mask=slot < o)


@triton.jit
def read_sums(weight, table, places, out, R, o, S, width, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """out (Z, R, width): the rows that each query reads, with weights (Z, R, o)."""
    first, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    total = tl.zeros((WIDE,), tl.float32)
    for j in range(0, o, COLUMNS):
        slot = j + tl.arange(0, COLUMNS)
        rows, valid, _ = _read(table + first // R * S * width, places, first, slot, o, S, width, WIDE)
        total += tl.sum(rows * tl.load(weight + first * o + slot, mask=valid, other=0.0)[:, None], 0)
    tl.store(out + first * width + columns, total, mask=columns < width)


@triton.jit
def read_backward(weight, given, table, places, grad, R, o, S, width, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Adds the rows of `given` (Z, R, width), with weights (Z, R, o), to those of grad (Z, S, width) that they read."""
    first = tl.program_id(0).to(tl.int64)
    slot, columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    _, valid, start = _read(table + first // R * S * width, places, first, slot, o, S, width, WIDE)
    x = tl.load(given + first * width + columns, mask=columns < width, other=0.0)
    slope = tl.load(weight + first * o + slot, mask=valid, other=0.0)
    to = grad + first // R * S * width + start[:, None] + columns[None, :]
    tl.atomic_add(to, slope[:, None] * x[None, :], mask=valid[:, None] & (columns[None, :] < width))
