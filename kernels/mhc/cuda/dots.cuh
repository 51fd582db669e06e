// The products of a producer's columns with those of `fn`, on tensor cores.
#pragma once
#include "launch.cuh"

struct Fragment { float of[NTILES][VEC]; };

__device__ __forceinline__ Fragment load_fragment(const Arguments& a, int k, int column, int g) {
    Fragment f;
#pragma unroll
    for (int tile = 0; tile < NTILES; tile++) {
        const int m = tile * 8 + g;
        const bool inside = m < LOGITS && column < HIDDEN;
        unpack(inside ? load<false, FN, VEC>(a.fn + ((i64)m * N + k) * HIDDEN + column) : zeros<FN, VEC>(), f.of[tile]);
    }
    return f;
}

// Brings the first `fn` values of a producer whose warps have one stream each into L2. It reads nothing, so it may be done
// before the inputs are ready.
__device__ __forceinline__ void prefetch_fragment(const Arguments& a, int split) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int column = (split * STEPS * COLUMN_WARPS + warp / N) * 4 * VEC + q * VEC;
    if (warp >= COLUMN_WARPS * N || column >= HIDDEN) return;
#pragma unroll
    for (int tile = 0; tile < NTILES; tile++)
        if (tile * 8 + g < LOGITS) {
            const FN* at = a.fn + ((i64)(tile * 8 + g) * N + warp % N) * HIDDEN + column;
            asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
        }
}

// Tensor cores cut off what does not fit the sum they add to, always towards zero. So the sums there are short ones.
__device__ __forceinline__ void accumulate(float (*dots)[4], const float (*values)[VEC], const Fragment& f) {
    float fresh[NTILES][4] = {};
#pragma unroll
    for (int i = 0; i < VEC; i += 2) {
        const float a[4] = {values[0][i], values[1][i], values[0][i + 1], values[1][i + 1]};
        float top[4], bottom[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            top[j] = EXACT<NEW> ? a[j] : high(a[j]);
            bottom[j] = a[j] - top[j];
        }
#pragma unroll
        for (int tile = 0; tile < NTILES; tile++) {
            const float b[2] = {f.of[tile][i], f.of[tile][i + 1]};
            const float first[2] = {EXACT<FN> ? b[0] : high(b[0]), EXACT<FN> ? b[1] : high(b[1])};
            const float second[2] = {b[0] - first[0], b[1] - first[1]};
            if constexpr (!EXACT<NEW>) multiply_add(fresh[tile], bottom, first);
            if constexpr (!EXACT<FN>) multiply_add(fresh[tile], top, second);
            multiply_add(fresh[tile], top, first);
        }
    }
#pragma unroll
    for (int tile = 0; tile < NTILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) dots[tile][i] += fresh[tile][i];
}
