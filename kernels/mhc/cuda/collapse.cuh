// A consumer that writes rows of `layer_input`: the collapsed streams, normalised.
#pragma once
#include "launch.cuh"

// The first N sums of a slice and that of the squares, or zeros.
__device__ __forceinline__ void load_sums(const float* at, bool inside, float* sums) {
#pragma unroll
    for (int k = 0; k <= N; k++) sums[k] = 0.0f;
    if (!inside) return;
    if constexpr (SIGNAL && N % 4 == 0)
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            const float4 four = look_at_four(at + k);
            sums[k] = four.x; sums[k + 1] = four.y; sums[k + 2] = four.z; sums[k + 3] = four.w;
        }
    else if constexpr (N % 4 == 0)
#pragma unroll
        for (int k = 0; k < N; k += 4) unpack(load<true, float, 4>(at + k), sums + k);
    else
#pragma unroll
        for (int k = 0; k < N; k++) sums[k] = load_sum(at + k);
    sums[N] = load_sum(at + LOGITS);
}

// The sums of `count` tokens that `pre` needs, to `sums`: the first N of a token, then that of the squares. A thread a
// slice; the warps' sums go through `of_warp` [TOKENS, BUSY, N + 1].
__device__ __forceinline__ void add_up_pre(const Arguments& a, i64 first, int count, float* of_warp, float (*sums)[N + 1]) {
    constexpr int ROUNDS = (SPLITS + THREADS - 1) / THREADS;
    constexpr int BUSY = SPLITS < THREADS ? (SPLITS + 31) / 32 : WARPS;
    const int warp = threadIdx.x / 32;
    if (warp < BUSY) {
        float parts[TOKENS][ROUNDS][N + 1];
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
#pragma unroll
                for (int r = 0; r < ROUNDS; r++) {
                    const int split = r * THREADS + threadIdx.x;
                    load_sums(a.partials + ((first + t) * SPLITS + split) * STRIDE, split < SPLITS && t < count, parts[t][r]);
                }
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
#pragma unroll
                for (int r = 0; r < ROUNDS; r++)
#pragma unroll
                    for (int k = 0; k <= N; k++) missing |= SIGNAL && absent(parts[t][r][k]);
        } while (missing);
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int split = r * THREADS + threadIdx.x;
#pragma unroll
                for (int k = 0; k <= N; k++)
                    if (SIGNAL && split < SPLITS && t < count)
                        take_away(a.partials + ((first + t) * SPLITS + split) * STRIDE + (k < N ? k : LOGITS));
            }
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int k = 0; k <= N; k++) {
                float sum = parts[t][0][k];
#pragma unroll
                for (int r = 1; r < ROUNDS; r++) sum += parts[t][r][k];
                sum = warp_sum(sum);
                if (threadIdx.x % 32 == 0) of_warp[(t * BUSY + warp) * (N + 1) + k] = sum;
            }
    }
    __syncthreads();
    // Every thread needs them all, so every thread adds.
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int k = 0; k <= N; k++) {
            float sum = of_warp[t * BUSY * (N + 1) + k];
#pragma unroll
            for (int w = 1; w < BUSY; w++) sum += of_warp[(t * BUSY + w) * (N + 1) + k];
            sums[t][k] = sum;
        }
}

__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += scratch[w];
    return sum;
}

// The first columns of row `row` of a stream, or none: a chunk of a thread of a collapsing block.
template <bool SHARED, class T>
__device__ __forceinline__ Pack<T, 8> chunk_of(const T* rows, i64 row, int column, bool inside) {
    return inside && column < HIDDEN ? load<SHARED, T, 8>(rows + row * HIDDEN + column) : zeros<T, 8>();
}

// A chunk of all streams of `token` after `post`, written and kept.
__device__ __forceinline__ void mix_chunk(const Arguments& a, i64 token, int column, bool inside, Pack<NEW, 8>* streams) {
    Pack<RESIDUAL, 8> old[N];
#pragma unroll
    for (int j = 0; j < N; j++) old[j] = chunk_of<false>(a.residual, token * N + j, column, inside);
    float added[8];
    unpack(chunk_of<false>(a.x, token, column, inside), added);
#pragma unroll
    for (int k = 0; k < N; k++) {
        float sum[8], values[8];
        const float weight = inside ? mixing_weight(a.old_post[token * N + k]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = weight * added[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float of = inside ? mixing_weight(a.old_comb[(token * N + j) * N + k]) : 0.0f;
            unpack(old[j], values);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] = fmaf(of, values[i], sum[i]);
        }
        pack_into(sum, streams[k]);
        if (inside && column < HIDDEN) store(a.new_residual + (token * N + k) * HIDDEN + column, streams[k]);
    }
}

// Rows of `layer_input` of `count` tokens, TOKENS at most.
__device__ void collapse(const Arguments& a, i64 first, int count, int* counter, int index, int parties, float* scratch) {
    Pack<NEW, 8> streams[TOKENS][CHUNKS][N];
    Pack<NORM, 8> norm[CHUNKS];
    const NEW* source = HAS_POST ? a.new_residual : reinterpret_cast<const NEW*>(a.residual);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = (c * THREADS + threadIdx.x) * 8;
        if constexpr (HAS_NORM) norm[c] = chunk_of<false>(a.norm_weight, 0, column, true);
        if constexpr (AHEAD)
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if constexpr (HAS_POST) mix_chunk(a, first + t, column, t < count, streams[t][c]);
                else
#pragma unroll
                    for (int k = 0; k < N; k++) streams[t][c][k] = chunk_of<false>(source, (first + t) * N + k, column, t < count);
    }
    float base[N];
#pragma unroll
    for (int k = 0; k < N; k++) base[k] = number(a.base + k);
    const float scale = number(a.scale);
    wait(counter);

    if constexpr (!AHEAD)
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int k = 0; k < N; k++) {
                    const int column = (c * THREADS + threadIdx.x) * 8;
                    const i64 row = (first + t) * N + k;
                    if constexpr (STREAMING)
                        streams[t][c][k] = t < count && column < HIDDEN ? load_last<NEW, 8>(source + row * HIDDEN + column) : zeros<NEW, 8>();
                    else streams[t][c][k] = chunk_of<true>(source, row, column, t < count);
                }
    float sums[TOKENS][N + 1];
    add_up_pre(a, first, count, scratch, sums);
    if (threadIdx.x == THREADS - 1) leave(counter, index, parties);
    float row[CHUNKS][8];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= count) break;
        const float inverse = rsqrtf(sums[t][N] / (N * HIDDEN) + a.rms_eps);
        float pre[N];
#pragma unroll
        for (int k = 0; k < N; k++) pre[k] = sigmoid(fmaf(sums[t][k] * inverse, scale, base[k])) + a.pre_eps;
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float values[8];
#pragma unroll
            for (int i = 0; i < 8; i++) row[c][i] = 0.0f;
#pragma unroll
            for (int k = 0; k < N; k++) {
                unpack(streams[t][c][k], values);
#pragma unroll
                for (int i = 0; i < 8; i++) row[c][i] = fmaf(pre[k], values[i], row[c][i]);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) squares = fmaf(row[c][i], row[c][i], squares);
        }
        float factor = 1.0f;
        if constexpr (HAS_NORM) factor = rsqrtf(block_sum(squares, scratch + TOKENS * WARPS * (N + 1) + t * WARPS) / HIDDEN + a.norm_eps);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * THREADS + threadIdx.x) * 8;
            if constexpr (HAS_NORM) {
                float weight[8];
                unpack(norm[c], weight);
#pragma unroll
                for (int i = 0; i < 8; i++) row[c][i] = row[c][i] * factor * weight[i];
            }
            Pack<OUT, 8> result;
            pack_into(row[c], result);
            if (column < HIDDEN) {
                OUT* to = a.layer_input + (first + t) * HIDDEN + column;
                if constexpr (STREAMING) store_last(to, result);
                else store(to, result);
            }
        }
    }
}
