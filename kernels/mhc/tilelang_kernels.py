# mypy: ignore-errors
"""The TileLang kernels of mHC; `tilelang.py` launches them and says how they divide the work.

A function here returns the program for one variant; the token count is a symbol of the program. `n` streams, `hidden`
columns, `logits` mixing logits: `(2 + n) * n`, or `n` for the head. All sums are float32; formulas: `reference.py`.
"""

from dataclasses import dataclass

import tilelang.language as T

__all__ = ["Finish", "Mix", "finish_kernel", "mix_kernel", "power_of_two"]

FLOAT = T.float32
PART = T.bfloat16
# Numbers of 8 significant bits that add up to one of the type.
PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}
# Products of parts whose indices add up to more are below 2^-24 of the whole.
LAST_ORDER = 2
# Columns of the dot products come in multiples of what four warps side by side compute.
COLUMN_STEP = 32
# Bytes of registers in which a thread of `finish_kernel` holds its share of the streams.
HELD_BYTES = 448


@dataclass(frozen=True)
class Mix:
    """A program of `mix_kernel`: tiles of `group` tokens, `width` columns at a time."""

    n: int
    hidden: int
    logits: int  # 0: no dot products
    group: int
    width: int
    threads: int
    residual: str  # the types, as TileLang calls them
    new: str
    x: str
    fn: str
    weights: str  # of post and comb as they are multiplied
    has_post: bool

    @property
    def chunks(self) -> int:
        """Steps that all slices of the hidden axis take together."""
        return -(-self.hidden // self.width)


@dataclass(frozen=True)
class Finish:
    """A program of `finish_kernel`: up to `parts` slices, `together` tokens in a block that writes `comb`."""

    n: int
    hidden: int
    logits: int
    parts: int  # a power of two
    together: int
    threads: int
    streams: str  # the types
    scale: str
    base: str
    norm: str  # "": no RMSNorm
    out: str

    @property
    def head(self) -> bool:
        """Nothing expands the row again: there is no `post` and no `comb`."""
        return self.logits == self.n


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def mix_kernel(v: Mix):
    """`post`, and the parts of the dot products and of the sum of squares of its result.

    Arguments: how many times `width` columns are a slice; then those that the variant has of x `[tokens, hidden]`,
    residual `[tokens, n, hidden]`, post `[tokens, n]`, comb `[tokens, n, n]`, new_residual (out)
    `[tokens, n, hidden]`, fn `[logits, n, hidden]`, dots (out) `[splits, tokens, logits]` and squares (out)
    `[splits, tokens]`.
    """
    n, hidden, logits, group, width = v.n, v.hidden, v.logits, v.group, v.width
    tokens, splits = T.dynamic("tokens"), T.dynamic("splits")
    every = tuple(range(n))
    columns = -(-max(logits, 1) // COLUMN_STEP) * COLUMN_STEP
    left_parts, right_parts = PARTS[v.new], PARTS[v.fn]
    # The smallest products first.
    terms = sorted(((i, j) for i in range(left_parts) for j in range(right_parts) if i + j <= LAST_ORDER), key=sum)
    terms.reverse()
    # Each warp has 16 rows or more, and as few columns as are left to it.
    policy = T.GemmWarpPolicy.FullCol if group == 16 else T.GemmWarpPolicy.Square

    def mixed(i, k, d, old, row, post_of, comb_of):
        if not v.has_post:
            return old[i, k, d]
        streams = sum(comb_of[i, j, k] * T.cast(old[i, j, d], FLOAT) for j in every)
        return post_of[i, k] * T.cast(row[i, d], FLOAT) + streams

    @T.macro
    def dots_of(left, right, total, part):
        for index, (i, j) in enumerate(terms):
            T.gemm(left[i], right[j], part, transpose_B=True, policy=policy, clear_accum=index == 0)
        # Tensor cores round a sum less well than an addition does: a short chain in them, the long one here.
        for i, c in T.Parallel(group, columns):
            total[i, c] += part[i, c]

    @T.macro
    def fetch(first, column, x, residual, fn, old, row, matrix):
        # One stream at a time: a tile of two dimensions has a layout whatever `n` is.
        for j in T.serial(n):
            T.async_copy(residual[first : first + group, j, column : column + width], old[:, j, :])
            if logits > 0:
                T.async_copy(fn[0:columns, j, column : column + width], matrix[:, j, :])
        if v.has_post:
            T.async_copy(x[first : first + group, column : column + width], row)

    @T.macro
    def tile(first, which, steps, x, residual, post, comb, new_residual, fn, dots, squares):
        if v.threads > 128:
            T.annotate_min_blocks_per_sm(2)
        old = T.alloc_shared((group, n, width), v.residual)
        row = T.alloc_shared((group, width), v.x) if v.has_post else None
        matrix = T.alloc_shared((columns, n, width), v.fn) if logits > 0 else None
        values = [T.alloc_fragment((group, width), FLOAT) for _ in every]
        post_of = T.alloc_shared((group, n), FLOAT) if v.has_post else None
        comb_of = T.alloc_shared((group, n, n), FLOAT) if v.has_post else None
        if v.has_post:
            T.copy(post[first, 0], post_of)
            T.copy(comb[first, 0, 0], comb_of)
            if v.weights != "float32":
                for i, k in T.Parallel(group, n):
                    post_of[i, k] = T.cast(T.cast(post_of[i, k], v.weights), FLOAT)
                for i, j, k in T.Parallel(group, n, n):
                    comb_of[i, j, k] = T.cast(T.cast(comb_of[i, j, k], v.weights), FLOAT)
        if logits > 0:
            left = [T.alloc_shared((group, n * width), PART) for _ in range(left_parts)]
            right = [T.alloc_shared((columns, n * width), PART) for _ in range(right_parts)]
            rest = T.alloc_fragment((columns, width), FLOAT)
            part = T.alloc_fragment((group, columns), FLOAT)
            total = T.alloc_fragment((group, columns), FLOAT)
            square = T.alloc_fragment((group, width), FLOAT)
            power = T.alloc_fragment((group,), FLOAT)
            T.clear(total)
            T.clear(square)
        fetch(first, which * steps * width, x, residual, fn, old, row, matrix)
        for step in T.serial(steps):
            column = (which * steps + step) * width
            T.ptx_wait_group(0)
            T.sync_threads()
            for i, d in T.Parallel(group, width):
                for k in every:
                    values[k][i, d] = T.cast(T.cast(mixed(i, k, d, old, row, post_of, comb_of), v.new), FLOAT)
            if logits > 0:
                for k in T.serial(n):
                    T.copy(matrix[:, k, :], rest)
                    for p in tuple(range(right_parts)):
                        for c, d in T.Parallel(columns, width):
                            right[p][c, k * width + d] = T.cast(rest[c, d], PART)
                        if p + 1 < right_parts:
                            for c, d in T.Parallel(columns, width):
                                rest[c, d] -= T.cast(T.cast(rest[c, d], PART), FLOAT)
            T.sync_threads()
            if step + 1 < steps:
                fetch(first, column + width, x, residual, fn, old, row, matrix)
            for k in every:
                if v.has_post:
                    T.copy(values[k], new_residual[first : first + group, k, column : column + width])
                if logits > 0:
                    for i, d in T.Parallel(group, width):
                        left[0][i, k * width + d] = T.cast(values[k][i, d], PART)
            if logits > 0:
                for i, d in T.Parallel(group, width):
                    square[i, d] += sum(values[k][i, d] * values[k][i, d] for k in every)
                for p in tuple(range(1, left_parts)):
                    for k in every:
                        for i, d in T.Parallel(group, width):
                            values[k][i, d] -= T.cast(T.cast(values[k][i, d], PART), FLOAT)
                        for i, d in T.Parallel(group, width):
                            left[p][i, k * width + d] = T.cast(values[k][i, d], PART)
                dots_of(left, right, total, part)
        if logits > 0:
            T.reduce_sum(square, power, dim=1)
            for i in T.Parallel(group):
                if first + i < tokens:
                    squares[which, first + i] = power[i]
            for i, c in T.Parallel(group, columns):
                if first + i < tokens and c < logits:
                    dots[which, first + i, c] = total[i, c]

    streams_shape = (tokens, n, hidden)
    if v.has_post and logits:

        @T.prim_func
        def mhc_mix_post_pre(
            steps: T.int32,
            x: T.Tensor((tokens, hidden), v.x),
            residual: T.Tensor(streams_shape, v.residual),
            post: T.Tensor((tokens, n), FLOAT),
            comb: T.Tensor((tokens, n, n), FLOAT),
            new_residual: T.Tensor(streams_shape, v.new),
            fn: T.Tensor((logits, n, hidden), v.fn),
            dots: T.Tensor((splits, tokens, logits), FLOAT),
            squares: T.Tensor((splits, tokens), FLOAT),
        ):
            with T.Kernel(T.ceildiv(tokens, group), T.ceildiv(v.chunks, steps), threads=v.threads) as (block, which):
                tile(block * group, which, steps, x, residual, post, comb, new_residual, fn, dots, squares)

        return mhc_mix_post_pre

    if v.has_post:

        @T.prim_func
        def mhc_mix_post(
            steps: T.int32,
            x: T.Tensor((tokens, hidden), v.x),
            residual: T.Tensor(streams_shape, v.residual),
            post: T.Tensor((tokens, n), FLOAT),
            comb: T.Tensor((tokens, n, n), FLOAT),
            new_residual: T.Tensor(streams_shape, v.new),
        ):
            with T.Kernel(T.ceildiv(tokens, group), T.ceildiv(v.chunks, steps), threads=v.threads) as (block, which):
                tile(block * group, which, steps, x, residual, post, comb, new_residual, None, None, None)

        return mhc_mix_post

    @T.prim_func
    def mhc_mix_pre(
        steps: T.int32,
        residual: T.Tensor(streams_shape, v.residual),
        fn: T.Tensor((logits, n, hidden), v.fn),
        dots: T.Tensor((splits, tokens, logits), FLOAT),
        squares: T.Tensor((splits, tokens), FLOAT),
    ):
        with T.Kernel(T.ceildiv(tokens, group), T.ceildiv(v.chunks, steps), threads=v.threads) as (block, which):
            tile(block * group, which, steps, None, residual, None, None, None, fn, dots, squares)

    return mhc_mix_pre


def _sigmoid(x):
    return 1.0 / (1.0 + T.exp(-x))


def finish_kernel(v: Finish):
    """What follows from the sums: `post` and `comb` in the first blocks, a row of `layer_input` in each other one.

    Arguments: streams `[tokens, n, hidden]`, dots `[splits, tokens, logits]`, squares `[splits, tokens]`, scale `[3]`
    (`[1]` for the head), base `[logits]`, norm_weight `[hidden]` (base again if there is none), layer_input (out)
    `[tokens, hidden]`, and unless it is the head post (out) `[tokens, n]` and comb (out) `[tokens, n, n]`; then the
    constants iters, rms_eps, pre_eps, sinkhorn_eps, post_mult and norm_eps, for the head rms_eps, pre_eps and norm_eps.
    """
    n, hidden, logits, parts, together = v.n, v.hidden, v.logits, v.parts, v.together
    tokens, splits = T.dynamic("tokens"), T.dynamic("splits")
    every = tuple(range(n))
    columns = power_of_two(logits)
    gates = power_of_two(n)
    row_size = -(-hidden // (8 * v.threads)) * 8 * v.threads
    hold = row_size // v.threads * n * (4 if v.streams == "float32" else 2) <= HELD_BYTES

    @T.macro
    def normalise(matrix, rows, eps):
        """Divide each row, or each column, of the `n` times `n` numbers by its sum plus `eps`."""
        for a in every:
            line = tuple(a * n + b if rows else b * n + a for b in every)
            inverse = 1.0 / (sum(matrix[at] for at in line) + eps)
            for at in line:
                matrix[at] = matrix[at] * inverse

    @T.macro
    def sinkhorn(logit_of, i, token, comb, iters, eps):
        matrix = T.alloc_local((n * n,), FLOAT)
        for a in every:
            largest = T.alloc_var(FLOAT)
            total = T.alloc_var(FLOAT)
            largest = logit_of[i, 2 * n + a * n]
            for b in every[1:]:
                largest = T.max(largest, logit_of[i, 2 * n + a * n + b])
            total = 0.0
            for b in every:
                matrix[a * n + b] = T.exp(logit_of[i, 2 * n + a * n + b] - largest)
                total = total + matrix[a * n + b]
            for b in every:
                matrix[a * n + b] = matrix[a * n + b] / total + eps
        if iters >= 1:
            normalise(matrix, False, eps)
        for _ in T.serial(T.max(iters - 1, 0)):
            normalise(matrix, True, eps)
            normalise(matrix, False, eps)
        for a in every:
            for b in every:
                comb[token, a, b] = matrix[a * n + b]

    @T.macro
    def expand(first, dots, squares, scale, base, post, comb, iters, rms_eps, sinkhorn_eps, post_mult):
        cells = T.alloc_fragment((together, parts, columns), FLOAT)
        sums = T.alloc_fragment((together, columns), FLOAT)
        powers = T.alloc_fragment((together, parts), FLOAT)
        power = T.alloc_fragment((together,), FLOAT)
        inverse = T.alloc_shared((together,), FLOAT)
        logit_of = T.alloc_shared((together, columns), FLOAT)
        for i, s, c in T.Parallel(together, parts, columns):
            inside = first + i < tokens and s < splits and c < logits
            cells[i, s, c] = T.if_then_else(inside, dots[s, first + i, c], 0.0)
        for i, s in T.Parallel(together, parts):
            powers[i, s] = T.if_then_else(first + i < tokens and s < splits, squares[s, first + i], 0.0)
        T.reduce_sum(cells, sums, dim=1)
        T.reduce_sum(powers, power, dim=1)
        for i in T.Parallel(together):
            inverse[i] = T.rsqrt(power[i] / (n * hidden) + rms_eps)
        for i, c in T.Parallel(together, columns):
            if c < logits:
                gate = T.if_then_else(c < n, 0, T.if_then_else(c < 2 * n, 1, 2))
                logit_of[i, c] = sums[i, c] * inverse[i] * T.cast(scale[gate], FLOAT) + T.cast(base[c], FLOAT)
        for i, k in T.Parallel(together, n):
            if first + i < tokens:
                post[first + i, k] = post_mult * _sigmoid(logit_of[i, n + k])
        for i in T.Parallel(together):
            if first + i < tokens:
                sinkhorn(logit_of, i, first + i, comb, iters, sinkhorn_eps)

    @T.macro
    def collapse(token, streams, dots, squares, scale, base, norm_weight, layer_input, rms_eps, pre_eps, norm_eps):
        cells = T.alloc_fragment((parts, gates), FLOAT)
        sums = T.alloc_fragment((gates,), FLOAT)
        powers = T.alloc_fragment((parts,), FLOAT)
        power = T.alloc_fragment((1,), FLOAT)
        pre = T.alloc_shared((gates,), FLOAT)
        row = T.alloc_fragment((row_size,), FLOAT)
        if hold:
            held = [T.alloc_fragment((row_size,), v.streams) for _ in every]
            for k in every:
                T.copy(streams[token, k, 0:row_size], held[k])
        for s, c in T.Parallel(parts, gates):
            cells[s, c] = T.if_then_else(s < splits and c < n, dots[s, token, c], 0.0)
        for s in T.Parallel(parts):
            powers[s] = T.if_then_else(s < splits, squares[s, token], 0.0)
        T.reduce_sum(cells, sums, dim=0)
        T.reduce_sum(powers, power, dim=0)
        for c in T.Parallel(gates):
            if c < n:
                mix = sums[c] * T.rsqrt(power[0] / (n * hidden) + rms_eps)
                pre[c] = _sigmoid(mix * T.cast(scale[0], FLOAT) + T.cast(base[c], FLOAT)) + pre_eps
        if hold:
            for d in T.Parallel(row_size):
                row[d] = sum(pre[k] * T.cast(held[k][d], FLOAT) for k in every)
        else:
            for d in T.Parallel(row_size):
                row[d] = T.if_then_else(
                    d < hidden, sum(pre[k] * T.cast(streams[token, k, d], FLOAT) for k in every), 0.0
                )
        if v.norm != "":
            square = T.alloc_fragment((row_size,), FLOAT)
            whole = T.alloc_fragment((1,), FLOAT)
            for d in T.Parallel(row_size):
                square[d] = row[d] * row[d]
            T.reduce_sum(square, whole, dim=0)
            for d in T.Parallel(row_size):
                if d < hidden:
                    factor = T.rsqrt(whole[0] / hidden + norm_eps)
                    layer_input[token, d] = T.cast(row[d] * factor * T.cast(norm_weight[d], FLOAT), v.out)
        else:
            T.copy(row, layer_input[token, 0:row_size])

    streams_type = T.Tensor((tokens, n, hidden), v.streams)
    dots_type = T.Tensor((splits, tokens, logits), FLOAT)
    squares_type = T.Tensor((splits, tokens), FLOAT)
    scale_type = T.Tensor((1 if v.head else 3,), v.scale)
    base_type = T.Tensor((logits,), v.base)
    norm_type = T.Tensor((hidden,), v.norm) if v.norm != "" else T.Tensor((logits,), v.base)
    row_type = T.Tensor((tokens, hidden), v.out)

    if v.head:

        @T.prim_func
        def mhc_finish_head(
            streams: streams_type,
            dots: dots_type,
            squares: squares_type,
            scale: scale_type,
            base: base_type,
            norm_weight: norm_type,
            layer_input: row_type,
            rms_eps: FLOAT,
            pre_eps: FLOAT,
            norm_eps: FLOAT,
        ):
            with T.Kernel(tokens, threads=v.threads) as block:
                collapse(
                    block, streams, dots, squares, scale, base, norm_weight, layer_input, rms_eps, pre_eps, norm_eps
                )

        return mhc_finish_head

    @T.prim_func
    def mhc_finish(
        streams: streams_type,
        dots: dots_type,
        squares: squares_type,
        scale: scale_type,
        base: base_type,
        norm_weight: norm_type,
        layer_input: row_type,
        post: T.Tensor((tokens, n), FLOAT),
        comb: T.Tensor((tokens, n, n), FLOAT),
        iters: T.int32,
        rms_eps: FLOAT,
        pre_eps: FLOAT,
        sinkhorn_eps: FLOAT,
        post_mult: FLOAT,
        norm_eps: FLOAT,
    ):
        with T.Kernel(T.ceildiv(tokens, together) + tokens, threads=v.threads) as block:
            groups = T.ceildiv(tokens, together)
            if block < groups:
                expand(
                    block * together, dots, squares, scale, base, post, comb, iters, rms_eps, sinkhorn_eps, post_mult
                )
            else:
                collapse(
                    block - groups, streams, dots, squares, scale, base, norm_weight, layer_input,
                    rms_eps, pre_eps, norm_eps,
                )  # fmt: skip

    return mhc_finish
