"""Triton kernels of attention with positive exponential features.

Features exist in registers only. A program forms the logits of a block of tokens, takes exponents in float32 and
multiplies at once; sums are float32. Half precision multiplies bfloat16 features on tensor cores. The directions, sums
over keys and float16 vectors then enter as two parts, high and low, because logits and differences of averages need
more than 8 bits. The sums of values and of features add the same rounded features, because gradients are differences of
both.

All logs are binary. With a_im = W_m.x_i + bias_m and b_jm = W_m.y_j + bias_m - norm_weight |y_j|^2 let r_m be a maximum
of b_jm over a set of keys, its reference, and

    sums_m = sum_j exp(b_jm - r_m) [v_j, 1].

Query i then adds sum_m exp(a_im + r_m - top_i) sums_m to its numerator and denominator. Its top_i grows as features and
keys are visited, so that no exponent is positive.

Causal attention has chunks of CHUNK tokens in tiles of TILE. A query reads the sums before its chunk, each earlier
tile of its chunk relative to the reference of all keys up to that tile, and the keys of its own tile one by one:
`diagonal` holds log sum_m exp(a_im + b_jm). A query sees every key that enters a reference it uses, so that its weights
do not underflow, whatever the norms.

With l_i the log-sum of a row, g_i the gradient of its output and G_i = [g_i, gradient of l_i - g_i.output_i], the
gradients are

    da_im = sum_j w_ijm G_i.[v_j, 1],    db_jm = sum_i w_ijm G_i.[v_j, 1],    w_ijm = exp(a_im + b_jm - l_i).

`query_sums` and `scan_back` sum exp(a_im + r_m - l_i) G_i over the later chunks, as `key_sums` and `scan` sum keys.

Shapes: x, grad, out (B,H,L,.), y, v (B,Hkv,S,.), states (B,HS,N+1,dv+1,M), references (B,HS,N+1,M). HS is Hkv where
the query heads of a key head share a map, else H. N counts chunks, and `first` of them lie before the first query.
"""

# ruff: noqa: RET505, SIM102 (the compiler drops branches of constants only where those stand alone)

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
TILE = tl.constexpr(16)  # the least size of a matrix product
PRECISION = tl.constexpr("ieee")
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(reference):
    """Replace -inf by 0, so that exp(-inf - 0) is 0 and not NaN."""
    return tl.where(reference == -float("inf"), 0.0, reference)


@triton.jit
def rounded(a, HALF: tl.constexpr):
    """Round float32 to the nearest bfloat16 in half precision, as products do."""
    if not HALF:
        return a
    elif INTERPRETED:  # its conversion truncates
        bits = a.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(a == a, bits.to(tl.float32, bitcast=True), float("nan"))
    else:
        return a.to(tl.bfloat16).to(tl.float32)


@triton.jit
def places(start, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of a block of rows; only that of its start may exceed 32 bits."""
    local = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    return tl.cast(start, tl.int64) * stride, local


@triton.jit
def load_tokens(pointer, start, stride, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load vectors of consecutive tokens; those not seen, and columns beyond D, are 0."""
    first, local = places(start, stride, seen.shape[0], BLOCK_D)
    mask = seen[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(pointer + first + local, mask=mask, other=0.0)


@triton.jit
def store_tokens(pointer, start, values, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store vectors of consecutive tokens in a contiguous tensor."""
    values = rounded(values, pointer.dtype.element_ty == tl.bfloat16)
    first, local = places(start, D, seen.shape[0], BLOCK_D)
    mask = seen[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(pointer + first + local, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def multiply(a, b, HALF: tl.constexpr):
    """Return a b in float32; half precision rounds float32 factors and splits those of float16."""
    kind: tl.constexpr = tl.bfloat16 if HALF and not INTERPRETED else tl.float32
    wide_a = a.to(tl.float32)
    wide_b = b.to(tl.float32)
    high_a = rounded(wide_a, HALF)
    high_b = rounded(wide_b, HALF)
    product = tl.dot(high_a.to(kind), high_b.to(kind), input_precision=PRECISION)
    if a.dtype == tl.float16:
        product += tl.dot((wide_a - high_a).to(kind), high_b.to(kind))
    if b.dtype == tl.float16:
        product += tl.dot(high_a.to(kind), (wide_b - high_b).to(kind))
    return product


@triton.jit
def multiply_exactly(a, b, HALF: tl.constexpr):
    """Return a b for float32 b, which half precision splits into a high and a low part."""
    product = multiply(a, b, HALF)
    if HALF:
        product += multiply(a, b - rounded(b, HALF), HALF)
    return product


@triton.jit
def load_map(
    rows, scale, bias, b, head, rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h, start, M,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Load directions (BLOCK_M, BLOCK_D) and bias (BLOCK_M,) of a head, in binary units."""
    m = start + tl.arange(0, BLOCK_M)
    directions = load_tokens(rows + b * rows_b + head * rows_h, start, rows_m, m < M, D, BLOCK_D)
    factor = tl.load(scale + b * scale_b + head * scale_h).to(tl.float32) * LOG2E
    bias += b * bias_b + head * bias_h
    offsets = tl.load(bias + m, mask=m < M, other=-float("inf")).to(tl.float32) * LOG2E
    return directions.to(tl.float32) * factor, offsets


@triton.jit
def part_of_program(M, BLOCK_M: tl.constexpr):
    """Return the part of the tokens, and the first feature.

    The programs of a part are neighbours, so that they read its tokens from the cache.
    """
    blocks = tl.cdiv(M, BLOCK_M)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_M


@triton.jit
def query_logs(x, weights, offsets, HALF: tl.constexpr):
    return multiply_exactly(x, tl.trans(weights), HALF) + offsets[None, :]


@triton.jit
def key_logs(y, seen, weights, offsets, norm_weight, HALF: tl.constexpr):
    wide = y.to(tl.float32)
    norms = tl.sum(wide * wide, 1) * (norm_weight * LOG2E)
    logs = multiply_exactly(y, tl.trans(weights), HALF) + offsets[None, :] - norms[:, None]
    return tl.where(seen[:, None], logs, -float("inf"))


@triton.jit
def load_sums(states, slot, m, M, DV: tl.constexpr, BLOCK_V: tl.constexpr):
    """Load sums of values (BLOCK_V, BLOCK_M) and of features (BLOCK_M,)."""
    columns = tl.arange(0, BLOCK_V)
    state = states + slot * (DV + 1) * M
    local = columns[:, None] * M + m[None, :]
    mask = (columns < DV)[:, None] & (m < M)[None, :]
    return (
        tl.load(state + local, mask=mask, other=0.0),
        tl.load(state + DV * M + m, mask=m < M, other=0.0),
    )


@triton.jit
def store_sums(states, slot, m, M, values, features, DV: tl.constexpr, BLOCK_V: tl.constexpr):
    columns = tl.arange(0, BLOCK_V)
    state = states + slot * (DV + 1) * M
    local = columns[:, None] * M + m[None, :]
    mask = (columns < DV)[:, None] & (m < M)[None, :]
    tl.store(state + local, values, mask=mask)
    tl.store(state + DV * M + m, features, mask=m < M)


@triton.jit
def load_references(references, slot, m, M):
    return tl.load(references + slot * M + m, mask=m < M, other=-float("inf"))


@triton.jit
def keys_seen(keep, b, j, end, S, MASKED: tl.constexpr):
    """Return which of the keys j exist and are not masked."""
    seen = j < end
    if MASKED:
        seen &= tl.load(keep + b * S + j, mask=seen, other=0) != 0
    return seen


@triton.jit
def output_gradient(
    grad,
    out,
    dlogsum,
    stride,
    row,
    start,
    seen,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_DLOGSUM: tl.constexpr,
):
    """Return G, as the gradient of the output and the last column."""
    g = load_tokens(grad, start, stride, seen, DV, BLOCK_V)
    output = load_tokens(out, start, DV, seen, DV, BLOCK_V)
    last = -tl.sum(g.to(tl.float32) * output.to(tl.float32), 1)
    if HAS_DLOGSUM:
        i = start + tl.arange(0, seen.shape[0])
        last += tl.load(dlogsum + row + i, mask=seen, other=0.0) / LN2
    return g, last


@triton.jit
def key_sums(
    y, v, keep, rows, scale, bias, states, references,
    y_b, y_h, y_t, v_b, v_h, v_t, rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h,
    norm_weight, HS, S, N, M, first, before, tokens,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, KEYS_OF_STATE: tl.constexpr,
    SHARED: tl.constexpr, MASKED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Sum the keys of one chunk, or of `tokens` tokens, relative to their maximum.

    `first` chunks have the `before` keys before the first query.
    """
    n, start = part_of_program(M, BLOCK_M)
    b = tl.program_id(1).to(tl.int64) // HS
    state_head = tl.program_id(1) % HS
    m = start + tl.arange(0, BLOCK_M)
    head = state_head // KEYS_OF_STATE
    y += b * y_b + head * y_h
    v += b * v_b + head * v_h
    map_head = state_head * SHARED
    weights, offsets = load_map(
        rows, scale, bias, b, map_head, rows_b, rows_h, rows_m, scale_b, scale_h,
        bias_b, bias_h, start, M, D, BLOCK_D, BLOCK_M,
    )  # fmt: skip
    begin = n * tokens
    end = tl.minimum(begin + tokens, before)
    if n >= first:
        begin = before + (n - first) * tokens
        end = tl.minimum(begin + tokens, S)
    reference = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    features = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
    for block in range(begin, end, CHUNK):
        j = block + tl.arange(0, CHUNK)
        seen = keys_seen(keep, b, j, end, S, MASKED)
        logs = key_logs(
            load_tokens(y, block, y_t, seen, D, BLOCK_D), seen, weights, offsets, norm_weight, HALF
        )
        largest = tl.maximum(reference, tl.max(logs, 0))
        shift = tl.exp2(reference - finite(largest))
        reference = largest
        K = rounded(tl.exp2(logs - finite(largest)[None, :]), HALF)
        vj = load_tokens(v, block, v_t, seen, DV, BLOCK_V)
        features = features * shift + tl.sum(K, 0)
        values = values * shift[None, :] + multiply(tl.trans(vj), K, HALF)
    slot = tl.program_id(1).to(tl.int64) * (N + 1) + n
    store_sums(states, slot, m, M, values, features, DV, BLOCK_V)
    tl.store(references + slot * M + m, reference, mask=m < M)


@triton.jit
def scan(
    states, chunk_references, references, N, M,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Replace the sums of each chunk by those of all chunks before it; slot N is the total.

    Without CAUSAL only the total is written.
    """
    base = tl.program_id(0).to(tl.int64) * (N + 1)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    places = row[:, None] * M + m[None, :]
    mask = (row < ROWS)[:, None] & (m < M)[None, :]
    writes = (m < M) & (tl.program_id(2) == 0)
    reference = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    for n in range(N):
        state = states + (base + n) * ROWS * M
        own = tl.load(state + places, mask=mask, other=0.0)
        own_reference = load_references(chunk_references, base + n, m, M)
        if CAUSAL:
            tl.store(state + places, sums, mask=mask)
            tl.store(references + (base + n) * M + m, reference, mask=writes)
        largest = tl.maximum(reference, own_reference)
        shift = tl.exp2(reference - finite(largest))
        own_shift = tl.exp2(own_reference - finite(largest))
        sums = sums * shift[None, :] + own * own_shift[None, :]
        reference = largest
    tl.store(states + (base + N) * ROWS * M + places, sums, mask=mask)
    tl.store(references + (base + N) * M + m, reference, mask=writes)


@triton.jit
def diagonal_logs(
    x, y, keep, rows, scale, bias, diagonal,
    x_b, x_h, x_t, y_b, y_h, y_t, rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h,
    norm_weight, H, L, S, M,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
    MASKED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write log sum_m exp(a_im + b_jm) of the pairs i >= j of a tile, -inf for others."""
    b = tl.program_id(1).to(tl.int64) // H
    head = tl.program_id(1) % H
    own = tl.arange(0, TILE)
    i_start = tl.program_id(0) * TILE
    j_start = i_start + S - L
    i = i_start + own
    j = j_start + own
    seen = keys_seen(keep, b, j, S, S, MASKED)
    xi = load_tokens(x + b * x_b + head * x_h, i_start, x_t, i < L, D, BLOCK_D)
    yj = load_tokens(y + b * y_b + head // GROUP * y_h, j_start, y_t, seen, D, BLOCK_D)
    top = tl.full((TILE, TILE), -float("inf"), tl.float32)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, M, BLOCK_M):
        weights, offsets = load_map(
            rows, scale, bias, b, head, rows_b, rows_h, rows_m, scale_b, scale_h,
            bias_b, bias_h, start, M, D, BLOCK_D, BLOCK_M,
        )  # fmt: skip
        a = query_logs(xi, weights, offsets, HALF)
        logs = key_logs(yj, seen, weights, offsets, norm_weight, HALF)
        pairs = a[:, None, :] + logs[None, :, :]
        largest = tl.maximum(top, tl.max(pairs, 2))
        shifted = finite(largest)
        total = total * tl.exp2(top - shifted)
        total += tl.sum(tl.exp2(pairs - shifted[:, :, None]), 2)
        top = largest
    logs = tl.where(own[:, None] >= own[None, :], top + tl.log2(total), -float("inf"))
    row = tl.program_id(1).to(tl.int64) * L + i
    tl.store(diagonal + row[:, None] * TILE + own[None, :], logs, mask=(i < L)[:, None])


@triton.jit
def load_diagonal(diagonal, row, start, L, CHUNK: tl.constexpr):
    """Load the logs of pairs (CHUNK queries, CHUNK keys) that share a tile, -inf for others."""
    own = tl.arange(0, CHUNK)
    i = start + own
    same = (own // TILE)[:, None] == (own // TILE)[None, :]
    places = (row + i)[:, None] * TILE + (own % TILE)[None, :]
    mask = same & (i < L)[:, None]
    return tl.load(diagonal + places, mask=mask, other=-float("inf"))


@triton.jit
def rescale(logs, top, numerator, denominator, HALF: tl.constexpr):
    """Return exp(logs) relative to the new tops, and the sums relative to them."""
    largest = tl.maximum(top, tl.max(logs, 1))
    shifted = finite(largest)
    shift = tl.exp2(top - shifted)
    weights = rounded(tl.exp2(logs - shifted[:, None]), HALF)
    return weights, largest, numerator * shift[:, None], denominator * shift


@triton.jit
def outputs(
    x, y, v, keep, rows, scale, bias, states, references, diagonal, out, logsum,
    x_b, x_h, x_t, y_b, y_h, y_t, v_b, v_h, v_t,
    rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h,
    norm_weight, H, L, S, N, M, first,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write outputs and log-sums of a chunk of queries."""
    chunk = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64) // H
    head = tl.program_id(1) % H
    row = tl.program_id(1).to(tl.int64) * L
    own = tl.arange(0, CHUNK)
    i_start = chunk * CHUNK
    i = i_start + own
    x += b * x_b + head * x_h
    y += b * y_b + head // GROUP * y_h
    v += b * v_b + head // GROUP * v_h
    xi = load_tokens(x, i_start, x_t, i < L, D, BLOCK_D)
    slot = (b * (H // SHARED) + head // SHARED) * (N + 1)
    slot += first + chunk if CAUSAL else N
    before = S - L
    top = tl.full((CHUNK,), -float("inf"), tl.float32)
    denominator = tl.zeros((CHUNK,), tl.float32)
    numerator = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        weights, offsets = load_map(
            rows, scale, bias, b, head, rows_b, rows_h, rows_m, scale_b, scale_h,
            bias_b, bias_h, start, M, D, BLOCK_D, BLOCK_M,
        )  # fmt: skip
        a = query_logs(xi, weights, offsets, HALF)
        reference = load_references(references, slot, m, M)
        values, features = load_sums(states, slot, m, M, DV, BLOCK_V)
        Q, top, numerator, denominator = rescale(
            a + reference[None, :], top, numerator, denominator, HALF
        )
        denominator += tl.sum(Q * features[None, :], 1)
        numerator += multiply_exactly(Q, tl.trans(values), HALF)
        if CAUSAL:
            for tile in range(CHUNK // TILE - 1):
                j_start = before + i_start + tile * TILE
                j = j_start + tl.arange(0, TILE)
                seen = keys_seen(keep, b, j, S, S, MASKED)
                yj = load_tokens(y, j_start, y_t, seen, D, BLOCK_D)
                vj = load_tokens(v, j_start, v_t, seen, DV, BLOCK_V)
                logs = key_logs(yj, seen, weights, offsets, norm_weight, HALF)
                reference = tl.maximum(reference, tl.max(logs, 0))
                K = tl.exp2(logs - finite(reference)[None, :])
                later = own // TILE > tile
                Q, top, numerator, denominator = rescale(
                    tl.where(later[:, None], a + reference[None, :], -float("inf")),
                    top, numerator, denominator, HALF,
                )  # fmt: skip
                pairs = rounded(multiply(Q, tl.trans(K), HALF), HALF)
                denominator += tl.sum(pairs, 1)
                numerator += multiply(pairs, vj, HALF)
    if CAUSAL:
        pairs, top, numerator, denominator = rescale(
            load_diagonal(diagonal, row, i_start, L, CHUNK), top, numerator, denominator, HALF
        )
        j = before + i
        seen = keys_seen(keep, b, j, S, S, MASKED)
        denominator += tl.sum(pairs, 1)
        numerator += multiply(pairs, load_tokens(v, before + i_start, v_t, seen, DV, BLOCK_V), HALF)
    sees = denominator > 0
    denominator = tl.where(sees, denominator, 1.0)
    numerator = numerator / denominator[:, None]
    store_tokens(out + row * DV, i_start, numerator, i < L, DV, BLOCK_V)
    tl.store(logsum + row + i, tl.where(sees, top + tl.log2(denominator), 0.0), mask=i < L)


@triton.jit
def query_sums(
    x, rows, scale, bias, references, grad, out, logsum, dlogsum, dstates,
    x_b, x_h, x_t, g_b, g_h, g_t, rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h,
    H, L, N, M, first, count, tokens,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_DLOGSUM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Sum exp(a_im + r_m - l_i) G_i over one chunk, or over `tokens` tokens."""
    n, start = part_of_program(M, BLOCK_M)
    b = tl.program_id(1).to(tl.int64) // H
    head = tl.program_id(1) % H
    row = tl.program_id(1).to(tl.int64) * L
    m = start + tl.arange(0, BLOCK_M)
    x += b * x_b + head * x_h
    grad += b * g_b + head * g_h
    weights, offsets = load_map(
        rows, scale, bias, b, head, rows_b, rows_h, rows_m, scale_b, scale_h,
        bias_b, bias_h, start, M, D, BLOCK_D, BLOCK_M,
    )  # fmt: skip
    slot = (b * (H // SHARED) + head // SHARED) * (N + 1)
    slot += first + n if CAUSAL else N
    reference = load_references(references, slot, m, M)
    features = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
    end = tl.minimum((n + 1) * tokens, L)
    for block in range(n * tokens, end, CHUNK):
        i = block + tl.arange(0, CHUNK)
        seen = i < end
        a = query_logs(load_tokens(x, block, x_t, seen, D, BLOCK_D), weights, offsets, HALF)
        g, last = output_gradient(
            grad, out + row * DV, dlogsum, g_t, row, block, seen, DV, BLOCK_V, HAS_DLOGSUM
        )
        sums = tl.load(logsum + row + i, mask=seen, other=0.0)
        logs = a + reference[None, :] - sums[:, None]
        Q = rounded(tl.exp2(tl.where(seen[:, None], logs, -float("inf"))), HALF)
        features += tl.sum(Q * last[:, None], 0)
        values += multiply(tl.trans(g), Q, HALF)
    slot = tl.program_id(1).to(tl.int64) * (count + 1) + n
    store_sums(dstates, slot, m, M, values, features, DV, BLOCK_V)


@triton.jit
def scan_back(
    dstates, references, N, M, first, count,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, SHARED: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Replace the sums over the queries of each chunk by those over all later chunks.

    The sums of the query heads that share a state are added, in the place of the first of them. The sums after chunk
    n are relative to the reference after it. Slot `count` is the total, relative to the reference before the first
    query; without CAUSAL only the total is written.
    """
    base = tl.program_id(0).to(tl.int64) * (N + 1) + first
    heads = tl.program_id(0).to(tl.int64) * SHARED
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    places = row[:, None] * M + m[None, :]
    mask = (row < ROWS)[:, None] & (m < M)[None, :]
    sums = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    target = dstates + heads * (count + 1) * ROWS * M
    for k in range(count):
        n = count - 1 - k
        own = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for g in range(SHARED):
            state = dstates + ((heads + g) * (count + 1) + n) * ROWS * M
            own += tl.load(state + places, mask=mask, other=0.0)
        if CAUSAL:
            tl.store(target + n * ROWS * M + places, sums, mask=mask)
            reference = load_references(references, base + n, m, M)
            after = load_references(references, base + n + 1, m, M)
            sums = sums * tl.exp2(reference - finite(after))[None, :]
        sums += own
    tl.store(target + count * ROWS * M + places, sums, mask=mask)


@triton.jit
def diagonal_gradients(
    x, y, v, keep, rows, scale, bias, grad, out, logsum, dlogsum, dx, dy,
    x_b, x_h, x_t, y_b, y_h, y_t, v_b, v_h, v_t, g_b, g_h, g_t,
    rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h,
    norm_weight, H, L, S, M,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    HAS_DLOGSUM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write what the pairs of a tile add to the gradients of its queries and keys.

    dx (B,H,L,d) is float32. dy (B,Hkv,L,d) is float32 and sums over the query heads of a key head.
    """
    b = tl.program_id(1).to(tl.int64) // (H // GROUP)
    key_head = tl.program_id(1) % (H // GROUP)
    own = tl.arange(0, TILE)
    i_start = tl.program_id(0) * TILE
    j_start = i_start + S - L
    i = i_start + own
    j = j_start + own
    seen = keys_seen(keep, b, j, S, S, MASKED)
    yj = load_tokens(y + b * y_b + key_head * y_h, j_start, y_t, seen, D, BLOCK_D)
    vj = load_tokens(v + b * v_b + key_head * v_h, j_start, v_t, seen, DV, BLOCK_V)
    key_gradient = tl.zeros((TILE, BLOCK_D), tl.float32)
    norm_gradient = tl.zeros((TILE,), tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        row = (b * H + head) * L
        xi = load_tokens(x + b * x_b + head * x_h, i_start, x_t, i < L, D, BLOCK_D)
        g, last = output_gradient(
            grad + b * g_b + head * g_h, out + row * DV, dlogsum, g_t, row, i_start, i < L,
            DV, BLOCK_V, HAS_DLOGSUM,
        )  # fmt: skip
        sums = tl.load(logsum + row + i, mask=i < L, other=0.0)
        dpairs = multiply(g, tl.trans(vj), HALF) + last[:, None]
        causal = (own[:, None] >= own[None, :]) & (i < L)[:, None]
        query_gradient = tl.zeros((TILE, BLOCK_D), tl.float32)
        for start in range(0, M, BLOCK_M):
            weights, offsets = load_map(
                rows, scale, bias, b, head, rows_b, rows_h, rows_m, scale_b, scale_h,
                bias_b, bias_h, start, M, D, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            a = query_logs(xi, weights, offsets, HALF) - sums[:, None]
            logs = key_logs(yj, seen, weights, offsets, norm_weight, HALF)
            pairs = tl.where(causal[:, :, None], a[:, None, :] + logs[None, :, :], -float("inf"))
            dlogs = tl.exp2(pairs) * dpairs[:, :, None]
            da = tl.sum(dlogs, 1)
            db = tl.sum(dlogs, 0)
            query_gradient += multiply(da, weights, HALF)
            key_gradient += multiply(db, weights, HALF)
            norm_gradient += tl.sum(db, 1)
        store_tokens(dx + row * D, i_start, query_gradient * LN2, i < L, D, BLOCK_D)
    norms = (2 * norm_weight) * norm_gradient
    key_gradient = key_gradient * LN2 - norms[:, None] * yj.to(tl.float32)
    row = (b * (H // GROUP) + key_head) * L
    store_tokens(dy + row * D, i_start, key_gradient, i < L, D, BLOCK_D)


@triton.jit
def query_gradients(
    x, y, v, keep, rows, scale, bias, states, references, grad, out, logsum, dlogsum,
    dx_of_diagonal, dx,
    x_b, x_h, x_t, y_b, y_h, y_t, v_b, v_h, v_t, g_b, g_h, g_t,
    rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h,
    norm_weight, H, L, S, N, M, first,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, HAS_DLOGSUM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a chunk of queries."""
    chunk = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64) // H
    head = tl.program_id(1) % H
    row = tl.program_id(1).to(tl.int64) * L
    own = tl.arange(0, CHUNK)
    i_start = chunk * CHUNK
    i = i_start + own
    y += b * y_b + head // GROUP * y_h
    v += b * v_b + head // GROUP * v_h
    xi = load_tokens(x + b * x_b + head * x_h, i_start, x_t, i < L, D, BLOCK_D)
    g, last = output_gradient(
        grad + b * g_b + head * g_h, out + row * DV, dlogsum, g_t, row, i_start, i < L,
        DV, BLOCK_V, HAS_DLOGSUM,
    )  # fmt: skip
    sums = tl.load(logsum + row + i, mask=i < L, other=0.0)
    slot = (b * (H // SHARED) + head // SHARED) * (N + 1)
    slot += first + chunk if CAUSAL else N
    gradient = tl.zeros((CHUNK, BLOCK_D), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        weights, offsets = load_map(
            rows, scale, bias, b, head, rows_b, rows_h, rows_m, scale_b, scale_h,
            bias_b, bias_h, start, M, D, BLOCK_D, BLOCK_M,
        )  # fmt: skip
        a = query_logs(xi, weights, offsets, HALF) - sums[:, None]
        a = tl.where((i < L)[:, None], a, -float("inf"))
        reference = load_references(references, slot, m, M)
        values, features = load_sums(states, slot, m, M, DV, BLOCK_V)
        dsums = multiply_exactly(g, values, HALF) + last[:, None] * features[None, :]
        dlogs = tl.exp2(a + reference[None, :]) * dsums
        if CAUSAL:
            for tile in range(CHUNK // TILE - 1):
                j_start = S - L + i_start + tile * TILE
                j = j_start + tl.arange(0, TILE)
                seen = keys_seen(keep, b, j, S, S, MASKED)
                yj = load_tokens(y, j_start, y_t, seen, D, BLOCK_D)
                vj = load_tokens(v, j_start, v_t, seen, DV, BLOCK_V)
                logs = key_logs(yj, seen, weights, offsets, norm_weight, HALF)
                reference = tl.maximum(reference, tl.max(logs, 0))
                K = tl.exp2(logs - finite(reference)[None, :])
                later = own // TILE > tile
                Q = tl.exp2(tl.where(later[:, None], a + reference[None, :], -float("inf")))
                dpairs = multiply(g, tl.trans(vj), HALF) + last[:, None]
                dlogs += Q * multiply(dpairs, K, HALF)
        gradient += multiply(dlogs, weights, HALF)
    gradient = gradient * LN2
    if CAUSAL:
        gradient += load_tokens(dx_of_diagonal + row * D, i_start, D, i < L, D, BLOCK_D)
    store_tokens(dx + row * D, i_start, gradient, i < L, D, BLOCK_D)


@triton.jit
def key_gradients(
    x, y, v, keep, rows, scale, bias, references, diagonal, grad, out, logsum, dlogsum, dstates,
    dy_of_diagonal, dy, dv,
    x_b, x_h, x_t, y_b, y_h, y_t, v_b, v_h, v_t, g_b, g_h, g_t,
    rows_b, rows_h, rows_m, scale_b, scale_h, bias_b, bias_h,
    norm_weight, H, L, S, N, M, first, count, before,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, HAS_DLOGSUM: tl.constexpr, HALF: tl.constexpr,
    OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a chunk of keys, or without OF_KEYS of values.

    Both together would not fit the registers. Keys before the first query receive the total of all queries, like all
    keys without CAUSAL.
    """
    n = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64) // (H // GROUP)
    key_head = tl.program_id(1) % (H // GROUP)
    own = tl.arange(0, CHUNK)
    chunk = n - first  # of queries
    i_start = chunk * CHUNK
    j_start = n * CHUNK
    end = before if CAUSAL else S
    slot_of_total = first if CAUSAL else N
    after = slot_of_total
    dslot = count
    if CAUSAL:
        if chunk >= 0:
            j_start = before + i_start
            end = S
            after = n + 1
            dslot = chunk
    j = j_start + own
    seen = keys_seen(keep, b, j, end, S, MASKED)
    yj = load_tokens(y + b * y_b + key_head * y_h, j_start, y_t, seen, D, BLOCK_D)
    vj = load_tokens(v + b * v_b + key_head * v_h, j_start, v_t, seen, DV, BLOCK_V)
    key_gradient = tl.zeros((CHUNK, BLOCK_D), tl.float32)
    norm_gradient = tl.zeros((CHUNK,), tl.float32)
    value_gradient = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        state_head = b * (H // SHARED) + head // SHARED
        row = (b * H + head) * L
        for start in range(0, M, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            weights, offsets = load_map(
                rows, scale, bias, b, head, rows_b, rows_h, rows_m, scale_b, scale_h,
                bias_b, bias_h, start, M, D, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            logs = key_logs(yj, seen, weights, offsets, norm_weight, HALF)
            dlogs = tl.zeros((CHUNK, BLOCK_M), tl.float32)
            if member % SHARED == 0:  # the sums are those of all heads that share a state
                reference = load_references(references, state_head * (N + 1) + after, m, M)
                dslots = (b * H + head) * (count + 1)
                dvalues, dfeatures = load_sums(dstates, dslots + dslot, m, M, DV, BLOCK_V)
                K = tl.exp2(logs - finite(reference)[None, :])
                if OF_KEYS:
                    dlogs += K * (multiply_exactly(vj, dvalues, HALF) + dfeatures[None, :])
                else:
                    value_gradient += multiply_exactly(K, tl.trans(dvalues), HALF)
            if CAUSAL:
                if chunk >= 0:
                    reference = load_references(references, state_head * (N + 1) + n, m, M)
                    for tile in range(1, CHUNK // TILE):
                        tile_start = i_start + tile * TILE
                        i = tile_start + tl.arange(0, TILE)
                        last_tile = (own // TILE == tile - 1)[:, None]
                        largest = tl.max(tl.where(last_tile, logs, -float("inf")), 0)
                        reference = tl.maximum(reference, largest)
                        xi = load_tokens(
                            x + b * x_b + head * x_h, tile_start, x_t, i < L, D, BLOCK_D
                        )
                        g, last = output_gradient(
                            grad + b * g_b + head * g_h, out + row * DV, dlogsum, g_t, row,
                            tile_start, i < L, DV, BLOCK_V, HAS_DLOGSUM,
                        )  # fmt: skip
                        sums = tl.load(logsum + row + i, mask=i < L, other=0.0)
                        a = query_logs(xi, weights, offsets, HALF)
                        a = a + reference[None, :] - sums[:, None]
                        Q = tl.exp2(tl.where((i < L)[:, None], a, -float("inf")))
                        earlier = (own // TILE < tile)[:, None]
                        K = logs - finite(reference)[None, :]
                        K = tl.exp2(tl.where(earlier, K, -float("inf")))
                        if OF_KEYS:
                            dpairs = multiply(vj, tl.trans(g), HALF) + last[None, :]
                            dlogs += K * multiply(dpairs, Q, HALF)
                        else:
                            pairs = multiply(K, tl.trans(Q), HALF)
                            value_gradient += multiply(pairs, g, HALF)
            if OF_KEYS:
                key_gradient += multiply(dlogs, weights, HALF)
                norm_gradient += tl.sum(dlogs, 1)
        if CAUSAL and not OF_KEYS:
            if chunk >= 0:
                i = i_start + own
                pairs = load_diagonal(diagonal, row, i_start, L, CHUNK)
                sums = tl.load(logsum + row + i, mask=i < L, other=0.0)
                pairs = tl.exp2(pairs - sums[:, None])
                g = load_tokens(grad + b * g_b + head * g_h, i_start, g_t, i < L, DV, BLOCK_V)
                value_gradient += multiply(tl.trans(pairs), g, HALF)
    row = (b * (H // GROUP) + key_head) * S
    if OF_KEYS:
        norms = (2 * norm_weight) * norm_gradient
        key_gradient = key_gradient * LN2 - norms[:, None] * yj.to(tl.float32)
        if CAUSAL:
            if chunk >= 0:
                i = i_start + own
                row_of_diagonal = (b * (H // GROUP) + key_head) * L
                key_gradient += load_tokens(
                    dy_of_diagonal + row_of_diagonal * D, i_start, D, i < L, D, BLOCK_D
                )
        store_tokens(dy + row * D, j_start, key_gradient, j < end, D, BLOCK_D)
    else:
        store_tokens(dv + row * DV, j_start, value_gradient, j < end, DV, BLOCK_V)
