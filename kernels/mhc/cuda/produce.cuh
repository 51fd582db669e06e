// A producer: one slice of a tile's streams, its part of the dot products and of the sums of squares.
#pragma once
#include "dots.cuh"
#include "streams.cuh"

constexpr int SUMS = WARPS * 16 * ROWS;  // of the warps of a block
constexpr int BLOCK = COLUMN_WARPS * 4 * VEC;  // columns of a step

// Weights of the tile's tokens, [TILE, N, PAIR], to shared memory.
__device__ __forceinline__ void load_weights_of_tile(const Arguments& a, i64 first, float* weights) {
    for (int i = threadIdx.x; i < TILE * N * PAIR; i += THREADS) {
        const int of = i / (N * PAIR), k = i / PAIR % N, j = i % PAIR;
        const i64 t = first + of;
        weights[i] = mixing_weight(t >= a.tokens ? 0.0f : j == 0 ? a.old_post[t * N + k] : a.old_comb[(t * N + j - 1) * N + k]);
    }
    __syncthreads();
}

// The dot products and sums of squares of a thread.
struct Sums {
    float dots[NTILES][4];
    float squares[2];
};

// Adds the products of stream k in a stage.
__device__ __forceinline__ void add_products(Sums& sums, int stage, int k, const Fragment& f) {
    float values[2][VEC];
#pragma unroll
    for (int t = 0; t < 2; t++) {
        unpack(load_staged<NEW, VEC>(staged_streams(stage, t, k)), values[t]);
#pragma unroll
        for (int i = 0; i < VEC; i++) sums.squares[t] = fmaf(values[t][i], values[t][i], sums.squares[t]);
    }
    accumulate(sums.dots, values, f);
}

// The warps' sums of 16 * groups tokens to `scratch` [WARPS, 16, ROWS], those of the warps of a group added up, and that
// to the workspace.
__device__ __forceinline__ void publish(const Arguments& a, i64 first, int split, Sums& sums, float* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        sums.squares[t] += __shfl_xor_sync(0xffffffffu, sums.squares[t], 1);
        sums.squares[t] += __shfl_xor_sync(0xffffffffu, sums.squares[t], 2);
        float* row = scratch + (warp * 16 + g + 8 * t) * ROWS;
        if (q == 0) row[LOGITS] = sums.squares[t];
#pragma unroll
        for (int n = 0; n < NTILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (n * 8 + 2 * q + i < LOGITS) row[n * 8 + 2 * q + i] = sums.dots[n][2 * t + i];
    }
    __syncthreads();
    constexpr int SHARING = ALL ? COLUMN_WARPS : WARPS;
    for (int i = threadIdx.x; i < 16 * GROUPS * ROWS; i += THREADS) {
        const int of = i / ROWS, m = i % ROWS;
        if (first + of >= a.tokens) break;
        const float* at = scratch + ((of / 16 * SHARING) * 16 + of % 16) * ROWS + m;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < SHARING; w++) sum += at[w * 16 * ROWS];
        float* to = a.partials + ((first + of) * SPLITS + split) * STRIDE + m;
        if constexpr (!SIGNAL) *to = sum;
        else {
            signal(to, sum);
            if (!HEAD && m == LOGITS) signal(to + SQUARES_AGAIN - LOGITS, sum);
        }
    }
}

// A warp has all streams of its columns.
__device__ __forceinline__ void produce_whole(const Arguments& a, i64 first, int split, float* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int group = warp / COLUMN_WARPS, begin = split * STEPS * BLOCK + warp % COLUMN_WARPS * 4 * VEC + q * VEC;
    const Rows rows = rows_of(a, first + group * 16, g);
    Sums sums = {};
    Fragment next = load_fragment(a, 0, begin, g);
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) ask_for_streams(a, rows, begin + step * BLOCK, step, step < STEPS);
    if constexpr (HAS_POST) load_weights_of_tile(a, first, scratch);
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        const int column = begin + step * BLOCK, ahead = step + STAGES - 1, stage = step % STAGES;
        ask_for_streams(a, rows, begin + ahead * BLOCK, ahead % STAGES, ahead < STEPS);
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
        mix_streams(a, rows, g, column, scratch + group * 16 * N * PAIR, stage);
#pragma unroll 1
        for (int k = 0; k < N; k++) {
            const Fragment f = next;
            if (k + 1 < N) next = load_fragment(a, k + 1, column, g);
            else if (step + 1 < STEPS) next = load_fragment(a, 0, column + BLOCK, g);
            add_products(sums, stage, k, f);
        }
    }
    __syncthreads();  // the weights in `scratch` are done with
    publish(a, first, split, sums, scratch);
}

// A warp has one stream of its columns.
__device__ __forceinline__ void produce_one_stream(const Arguments& a, i64 first, int split, float* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int k = warp % N;
    const Rows rows = rows_of(a, first, g);
    Sums sums = {};
    if (warp < COLUMN_WARPS * N) {
        float weights[2][PAIR] = {};
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            const int column = (split * STEPS + step) * BLOCK + warp / N * 4 * VEC + q * VEC;
            const Fragment f = load_fragment(a, k, column, g);
            Streams s;
            load_streams(s, a, rows, column);
            if (HAS_POST && step == 0)
#pragma unroll
                for (int t = 0; t < 2; t++)
                    if (rows.live[t]) {
                        const i64 token = rows.token[t];
                        weights[t][0] = mixing_weight(a.old_post[token * N + k]);
#pragma unroll
                        for (int j = 0; j < N; j++) weights[t][1 + j] = mixing_weight(a.old_comb[(token * N + j) * N + k]);
                    }
            float values[2][VEC];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                Pack<NEW, VEC> rounded;
                if constexpr (HAS_POST) rounded = mixed(s, t, 0, weights[t]);
                else {
                    float old[VEC];
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (j == k) unpack(s.old[t][j], old);
                    pack_into(old, rounded);
                }
                if (HAS_POST && !AHEAD && rows.live[t] && column < HIDDEN)
                    store(a.new_residual + (rows.token[t] * N + k) * HIDDEN + column, rounded);
                unpack(rounded, values[t]);
#pragma unroll
                for (int i = 0; i < VEC; i++) sums.squares[t] = fmaf(values[t][i], values[t][i], sums.squares[t]);
            }
            accumulate(sums.dots, values, f);
        }
    }
    publish(a, first, split, sums, scratch);
}

__device__ void produce(const Arguments& a, int tile, int split, float* scratch) {
    const i64 first = (i64)tile * TILE;
    if constexpr (ALL) produce_whole(a, first, split, scratch);
    else produce_one_stream(a, first, split, scratch);
    if constexpr (SIGNAL) return;
    __syncthreads();
    if (threadIdx.x == 0) arrive(a.counters + tile, split, SPLITS);
}
