# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton's language has no unpacking)
"""The Triton kernels of mHC; `triton.py` launches them and says how they divide the work.

Capitals are constants of the compiler. `N` streams, `HIDDEN` columns, `LOGITS = (2 + N) * N` mixing logits. All
arithmetic is float32; formulas: `reference.py`.
"""

import triton
import triton.language as tl

__all__ = ["finish_kernel", "mix_kernel"]

LOG2_E = tl.constexpr(1.4426950216293335)  # log2(e) rounded to float32, and what the rounding left over
LOG2_E_REST = tl.constexpr(1.9259629911266175e-8)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exponential(x):
    """e^x to about two units in the last place; `tl.exp` alone loses |x| units, which Sinkhorn would pass on."""
    product = x * LOG2_E
    lost = tl.fma(x, LOG2_E, -product) + x * LOG2_E_REST
    return tl.exp2(product) * (1.0 + lost * LN_2)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exponential(-x))


@triton.jit(do_not_specialize=["tokens"])
def mix_kernel(
    x,  # [tokens, HIDDEN]
    residual,  # [tokens, N, HIDDEN]
    post,  # [tokens, N]
    comb,  # [tokens, N, N]
    fn,  # [LOGITS, N * HIDDEN]
    new_residual,  # [tokens, N, HIDDEN], out
    partials,  # [splits, tokens, LOGITS + 1], out: dot products, then the sum of squares
    tokens,
    HIDDEN: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,  # LOGITS + 1 or more, a power of two
    STEPS: tl.constexpr,  # times WIDTH columns in a slice
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_POST: tl.constexpr,
    HAS_PRE: tl.constexpr,
    MIXING: tl.constexpr,  # dtype that post and comb are rounded to before they are multiplied
):
    """Program (i, s): tokens i * GROUP.. of slice s."""
    LOGITS: tl.constexpr = (2 + N) * N
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    live = row < tokens
    row = row.to(tl.int64)
    column = tl.arange(0, COLUMNS)

    weights = ()
    if HAS_POST:
        for k in tl.static_range(N):
            weights = weights + (tl.load(post + row * N + k, mask=live, other=0.0).to(MIXING).to(tl.float32),)
            for j in tl.static_range(N):
                entry = comb + row * (N * N) + j * N + k
                weights = weights + (tl.load(entry, mask=live, other=0.0).to(MIXING).to(tl.float32),)

    dots = tl.zeros((GROUP, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    for step in range(STEPS):
        d = (tl.program_id(1) * STEPS + step) * WIDTH + tl.arange(0, WIDTH)
        inside = d < HIDDEN
        mask = live[:, None] & inside[None, :]
        place = row[:, None] * (N * HIDDEN) + d[None, :]
        streams = ()
        for j in tl.static_range(N):
            streams = streams + (tl.load(residual + place + j * HIDDEN, mask=mask, other=0.0),)
        if HAS_POST:
            added = tl.load(x + row[:, None] * HIDDEN + d[None, :], mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(N):
            if HAS_POST:
                mixed = weights[k * (N + 1)][:, None] * added
                for j in tl.static_range(N):
                    mixed += weights[k * (N + 1) + 1 + j][:, None] * streams[j].to(tl.float32)
                rounded = mixed.to(new_residual.dtype.element_ty)
                tl.store(new_residual + place + k * HIDDEN, rounded, mask=mask)
                value = rounded.to(tl.float32)
            else:
                value = streams[k].to(tl.float32)
            if HAS_PRE:
                squares += value * value
                at = fn + column[:, None] * (N * HIDDEN) + k * HIDDEN + d[None, :]
                matrix = tl.load(at, mask=(column < LOGITS)[:, None] & inside[None, :], other=0.0).to(tl.float32)
                dots = tl.dot(value, tl.trans(matrix), acc=dots, input_precision="tf32x3")
    if HAS_PRE:
        part = tl.where(column[None, :] == LOGITS, tl.sum(squares, axis=1)[:, None], dots)
        at = partials + (tl.program_id(1) * tokens.to(tl.int64) + row[:, None]) * (LOGITS + 1) + column[None, :]
        tl.store(at, part, mask=live[:, None] & (column < LOGITS + 1)[None, :])


@triton.jit
def mixing_logits(
    partials,
    row,
    tokens,
    rms_eps,
    HIDDEN: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add up the parts of the tokens `row` [GROUP]: the logits before scale and base, `[GROUP, COLUMNS]`."""
    LOGITS: tl.constexpr = (2 + N) * N
    column = tl.arange(0, COLUMNS)
    cells = tl.zeros((GROUP, CHUNK, COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, SPLITS, CHUNK):
        split = start + tl.arange(0, CHUNK)
        cell = (split.to(tl.int64)[None, :, None] * tokens + row[:, None, None]) * (LOGITS + 1) + column[None, None, :]
        mask = (row < tokens)[:, None, None] & (split < SPLITS)[None, :, None] & (column < LOGITS + 1)[None, None, :]
        cells += tl.load(partials + cell, mask=mask, other=0.0)
    sums = tl.sum(cells, axis=1)
    squares = tl.sum(tl.where(column[None, :] == LOGITS, sums, 0.0), axis=1)
    return sums * tl.rsqrt(squares / (N * HIDDEN) + rms_eps)[:, None]


@triton.jit
def pick(logits, scale, base, part: tl.constexpr, m: tl.constexpr, COLUMNS: tl.constexpr):
    """Logit `m` of each token, scaled by entry `part` of `scale` and shifted: `[GROUP]`."""
    chosen = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == m, logits, 0.0), axis=1)
    return chosen * tl.load(scale + part).to(tl.float32) + tl.load(base + m).to(tl.float32)


@triton.jit
def normalise_rows(comb, eps, N: tl.constexpr):
    """Divide each row of the tuple `comb` (N * N entries) by its sum plus `eps`."""
    result = ()
    for i in tl.static_range(N):
        total = comb[i * N]
        for j in tl.static_range(1, N):
            total += comb[i * N + j]
        inverse = 1.0 / (total + eps)
        for j in tl.static_range(N):
            result = result + (comb[i * N + j] * inverse,)
    return result


@triton.jit
def normalise_columns(comb, eps, N: tl.constexpr):
    """Divide each column of the tuple `comb` (N * N entries) by its sum plus `eps`."""
    inverses = ()
    for j in tl.static_range(N):
        total = comb[j]
        for i in tl.static_range(1, N):
            total += comb[i * N + j]
        inverses = inverses + (1.0 / (total + eps),)
    result = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            result = result + (comb[i * N + j] * inverses[j],)
    return result


@triton.jit
def softmax_rows(logits, eps, N: tl.constexpr):
    """Softmax of each row of the tuple `logits` (N * N entries), plus `eps`."""
    result = ()
    for i in tl.static_range(N):
        largest = logits[i * N]
        for j in tl.static_range(1, N):
            largest = tl.maximum(largest, logits[i * N + j])
        powers = ()
        total = tl.zeros_like(largest)
        for j in tl.static_range(N):
            powers = powers + (exponential(logits[i * N + j] - largest),)
            total += powers[j]
        for j in tl.static_range(N):
            result = result + (powers[j] / total + eps,)
    return result


@triton.jit
def expand_weights(
    logits, row, tokens, scale, base, post, comb, sinkhorn_eps, post_mult,
    ITERS: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write `post` and `comb` of the tokens `row` [GROUP]."""
    live = row < tokens
    matrix = ()
    for m in tl.static_range(N * N):
        matrix = matrix + (pick(logits, scale, base, 2, 2 * N + m, COLUMNS),)
    matrix = softmax_rows(matrix, sinkhorn_eps, N)
    if ITERS >= 1:
        matrix = normalise_columns(matrix, sinkhorn_eps, N)
    for _ in range(ITERS - 1):
        matrix = normalise_columns(normalise_rows(matrix, sinkhorn_eps, N), sinkhorn_eps, N)
    for m in tl.static_range(N * N):
        tl.store(comb + row * (N * N) + m, matrix[m], mask=live)
    for m in tl.static_range(N):
        weight = post_mult * sigmoid(pick(logits, scale, base, 1, N + m, COLUMNS))
        tl.store(post + row * N + m, weight, mask=live)


@triton.jit
def expand_weights_wide(
    logits, partials, row, tokens, scale, base, post, comb, rms_eps, sinkhorn_eps, post_mult,
    ITERS: tl.constexpr, HIDDEN: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The same for the one token `row` [1], on a `[SIDE, SIDE]` matrix across the lanes: for many streams, whose
    N * N registers and their unrolled code would be too many. SIDE is N or more, a power of two."""
    LOGITS: tl.constexpr = (2 + N) * N
    i = tl.arange(0, SIDE * SIDE) // SIDE
    j = tl.arange(0, SIDE * SIDE) % SIDE
    column = 2 * N + i * N + j
    valid = (i < N) & (j < N)
    cells = tl.zeros((CHUNK, SIDE * SIDE), dtype=tl.float32)
    squares = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in tl.static_range(0, SPLITS, CHUNK):
        split = start + tl.arange(0, CHUNK)
        cell = (split.to(tl.int64) * tokens + row) * (LOGITS + 1)
        mask = (split < SPLITS)[:, None] & valid[None, :]
        cells += tl.load(partials + cell[:, None] + column[None, :], mask=mask, other=0.0)
        squares += tl.load(partials + cell + LOGITS, mask=split < SPLITS, other=0.0)
    sums = tl.sum(cells, axis=0) * tl.rsqrt(tl.sum(squares, axis=0) / (N * HIDDEN) + rms_eps)
    sums = sums * tl.load(scale + 2).to(tl.float32) + tl.load(base + column, mask=valid, other=0.0).to(tl.float32)

    inside = tl.reshape(valid, (SIDE, SIDE))
    matrix = tl.reshape(tl.where(valid, sums, -float("inf")), (SIDE, SIDE))
    largest = tl.where(tl.arange(0, SIDE) < N, tl.max(matrix, axis=1), 0.0)
    powers = tl.where(inside, exponential(tl.where(inside, matrix - largest[:, None], 0.0)), 0.0)
    total = tl.where(tl.arange(0, SIDE) < N, tl.sum(powers, axis=1), 1.0)
    matrix = tl.where(inside, powers / total[:, None] + sinkhorn_eps, 0.0)
    # The zeros outside stay zeros, but their own sums must not be divided by: sinkhorn_eps may be 0.
    rest = tl.where(tl.arange(0, SIDE) < N, sinkhorn_eps, 1.0)
    if ITERS >= 1:
        matrix = matrix * (1.0 / (tl.sum(matrix, axis=0) + rest))[None, :]
    for _ in range(ITERS - 1):
        matrix = matrix * (1.0 / (tl.sum(matrix, axis=1) + rest))[:, None]
        matrix = matrix * (1.0 / (tl.sum(matrix, axis=0) + rest))[None, :]
    tl.store(comb + row * (N * N) + i * N + j, tl.reshape(matrix, (SIDE * SIDE,)), mask=valid)
    for m in tl.static_range(N):
        weight = post_mult * sigmoid(pick(logits, scale, base, 1, N + m, COLUMNS))
        tl.store(post + row * N + m, weight)


@triton.jit
def collapse(
    logits, row, streams, scale, base, norm_weight, layer_input, pre_eps, norm_eps,
    HIDDEN: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write the row of `layer_input` of the one token `row` [1]."""
    d = tl.arange(0, ROW)
    inside = d < HIDDEN
    collapsed = tl.zeros((ROW,), dtype=tl.float32)
    for i in tl.static_range(N):
        stream = tl.load(streams + (row * N + i) * HIDDEN + d, mask=inside, other=0.0).to(tl.float32)
        collapsed += (sigmoid(pick(logits, scale, base, 0, i, COLUMNS)) + pre_eps) * stream
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(collapsed * collapsed, axis=0) / HIDDEN + norm_eps)
        collapsed = collapsed * factor * tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(layer_input + row * HIDDEN + d, collapsed.to(layer_input.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "rms_eps", "pre_eps", "sinkhorn_eps", "post_mult", "norm_eps"])
def finish_kernel(
    streams,  # [tokens, N, HIDDEN]
    partials,  # [SPLITS, tokens, LOGITS + 1]
    scale,  # [3]
    base,  # [LOGITS]
    norm_weight,  # [HIDDEN] or None
    layer_input,  # [tokens, HIDDEN], out
    post,  # [tokens, N], out
    comb,  # [tokens, N, N], out
    tokens,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    norm_eps,
    ITERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,  # HIDDEN or more, a power of two
    SIDE: tl.constexpr,  # 0, or for a wide matrix (then GROUP is 1) N or more, a power of two
):
    """The first cdiv(tokens, GROUP) programs write `post` and `comb`, the others a row of `layer_input` each."""
    groups = tl.cdiv(tokens, GROUP)
    program = tl.program_id(0)
    if program < groups:
        several = program.to(tl.int64) * GROUP + tl.arange(0, GROUP)
        of_several = mixing_logits(partials, several, tokens, rms_eps, HIDDEN, N, COLUMNS, SPLITS, CHUNK, GROUP)
        if SIDE == 0:
            expand_weights(
                of_several, several, tokens, scale, base, post, comb, sinkhorn_eps, post_mult, ITERS, N, COLUMNS
            )
        else:
            expand_weights_wide(
                of_several, partials, several, tokens, scale, base, post, comb, rms_eps, sinkhorn_eps, post_mult,
                ITERS, HIDDEN, N, COLUMNS, SPLITS, CHUNK, SIDE,
            )  # fmt: skip
    else:
        one = (program - groups).to(tl.int64) + tl.arange(0, 1)
        of_one = mixing_logits(partials, one, tokens, rms_eps, HIDDEN, N, COLUMNS, SPLITS, CHUNK, 1)
        collapse(
            of_one, one, streams, scale, base, norm_weight, layer_input, pre_eps, norm_eps, HIDDEN, N, COLUMNS, ROW
        )
