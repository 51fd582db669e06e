// A producer: one slice of a tile's streams, its part of the dot products and of the sums of squares.
#pragma once
#include "dots.cuh"
#include "streams.cuh"

__device__ void produce(const Arguments& a, int tile, int split, float* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int group = ALL ? warp / COLUMN_WARPS : 0;
    const int column_warp = ALL ? warp % COLUMN_WARPS : warp / N;
    const i64 first = (i64)tile * TILE;
    const i64 token[2] = {first + group * 16 + g, first + group * 16 + g + 8};
    const bool live[2] = {token[0] < a.tokens, token[1] < a.tokens};

    float dots[NTILES][4] = {};
    float squares[2] = {};
    constexpr int BLOCK = COLUMN_WARPS * 4 * VEC;

    if constexpr (ALL) {
        const int begin = split * STEPS * BLOCK + column_warp * 4 * VEC + q * VEC;
        Fragment next = load_fragment(a, 0, begin, g);
#pragma unroll
        for (int step = 0; step < STAGES - 1; step++) ask_for_streams(a, token, live, begin, step);
        // Weights of the tile's tokens: [TILE, N, PAIR].
        if constexpr (HAS_POST) {
            for (int i = threadIdx.x; i < TILE * N * PAIR; i += THREADS) {
                const int of = i / (N * PAIR), k = i / PAIR % N, j = i % PAIR;
                const i64 t = first + of;
                scratch[i] = mixing_weight(t >= a.tokens ? 0.0f : j == 0 ? a.old_post[t * N + k] : a.old_comb[(t * N + j - 1) * N + k]);
            }
            __syncthreads();
        }
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            const int column = begin + step * BLOCK;
            ask_for_streams(a, token, live, begin, step + STAGES - 1);
            asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
            const int stage = step % STAGES;
#pragma unroll
            for (int t = 0; t < 2; t++)
                mix_streams(a, token[t], column, live[t] && column < HIDDEN, scratch + (group * 16 + g + 8 * t) * N * PAIR, stage, t);
#pragma unroll 1
            for (int k = 0; k < N; k++) {
                const Fragment f = next;
                if (k + 1 < N) next = load_fragment(a, k + 1, column, g);
                else if (step + 1 < STEPS) next = load_fragment(a, 0, column + BLOCK, g);
                float values[2][VEC];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    unpack(load_staged<NEW, VEC>(staged_streams(stage, t, k)), values[t]);
#pragma unroll
                    for (int i = 0; i < VEC; i++) squares[t] = fmaf(values[t][i], values[t][i], squares[t]);
                }
                accumulate(dots, values, f);
            }
        }
        __syncthreads();  // the weights in `scratch` are done with
    } else if (warp < COLUMN_WARPS * N) {
        const int k = warp % N;
        float weights[2][PAIR] = {};
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            const int column = (split * STEPS + step) * BLOCK + column_warp * 4 * VEC + q * VEC;
            const Fragment f = load_fragment(a, k, column, g);
            Streams s;
            load_streams(s, a, token, live, column);
            if (HAS_POST && step == 0)
#pragma unroll
                for (int t = 0; t < 2; t++)
                    if (live[t]) {
                        weights[t][0] = mixing_weight(a.old_post[token[t] * N + k]);
#pragma unroll
                        for (int j = 0; j < N; j++) weights[t][1 + j] = mixing_weight(a.old_comb[(token[t] * N + j) * N + k]);
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
                if (HAS_POST && !AHEAD && live[t] && column < HIDDEN)
                    store(a.new_residual + (token[t] * N + k) * HIDDEN + column, rounded);
                unpack(rounded, values[t]);
#pragma unroll
                for (int i = 0; i < VEC; i++) squares[t] = fmaf(values[t][i], values[t][i], squares[t]);
            }
            accumulate(dots, values, f);
        }
    }

    // The warps' sums, [WARPS, 16, ROWS], then those of the warps of a group added up.
#pragma unroll
    for (int t = 0; t < 2; t++) {
        squares[t] += __shfl_xor_sync(0xffffffffu, squares[t], 1);
        squares[t] += __shfl_xor_sync(0xffffffffu, squares[t], 2);
        float* row = scratch + (warp * 16 + g + 8 * t) * ROWS;
        if (q == 0) row[LOGITS] = squares[t];
#pragma unroll
        for (int n = 0; n < NTILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (n * 8 + 2 * q + i < LOGITS) row[n * 8 + 2 * q + i] = dots[n][2 * t + i];
    }
    __syncthreads();
    constexpr int SHARING = ALL ? COLUMN_WARPS : WARPS;
    for (int i = threadIdx.x; i < TILE * ROWS; i += THREADS) {
        const int of = i / ROWS, m = i % ROWS;
        if (first + of >= a.tokens) break;
        const float* at = scratch + ((of / 16 * SHARING) * 16 + of % 16) * ROWS + m;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < SHARING; w++) sum += at[w * 16 * ROWS];
        a.partials[((first + of) * SPLITS + split) * STRIDE + m] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) arrive(a.counters + tile, split, SPLITS);
}
