// The streams of a producer's columns: loaded, mixed and rounded.
#pragma once
#include "launch.cuh"

// Thread (g, q) of a warp, g = lane / 4, has VEC columns from q * VEC on of tokens g and g + 8: what the tensor-core
// instruction wants of it, if column 2i of these is taken for its position q in the k axis and column 2i + 1 for q + 4.
struct Rows {
    i64 token[2];
    bool live[2];
};

__device__ __forceinline__ Rows rows_of(const Arguments& a, i64 first, int g) {
    Rows rows;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        rows.token[t] = first + g + 8 * t;
        rows.live[t] = rows.token[t] < a.tokens;
    }
    return rows;
}

struct Streams {
    Pack<RESIDUAL, VEC> old[2][N];
    Pack<X, VEC> added[2];
};

__device__ __forceinline__ void load_streams(Streams& s, const Arguments& a, const Rows& rows, int column) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const bool inside = rows.live[t] && column < HIDDEN;
        const i64 row = rows.token[t];
#pragma unroll
        for (int j = 0; j < N; j++)
            s.old[t][j] = inside ? load<false, RESIDUAL, VEC>(a.residual + (row * N + j) * HIDDEN + column) : zeros<RESIDUAL, VEC>();
        if constexpr (HAS_POST) s.added[t] = inside ? load<false, X, VEC>(a.x + row * HIDDEN + column) : zeros<X, VEC>();
    }
}

// Stream k of token t, rounded to NEW.
__device__ __forceinline__ Pack<NEW, VEC> mixed(const Streams& s, int t, int k, const float* weights) {
    Pack<NEW, VEC> result;
    if constexpr (HAS_POST) {
        float sum[VEC], old[VEC];
        unpack(s.added[t], sum);
#pragma unroll
        for (int i = 0; i < VEC; i++) sum[i] *= weights[0];
#pragma unroll
        for (int j = 0; j < N; j++) {
            unpack(s.old[t][j], old);
#pragma unroll
            for (int i = 0; i < VEC; i++) sum[i] = fmaf(weights[1 + j], old[i], sum[i]);
        }
        pack_into(sum, result);
    } else {
        float old[VEC];
        unpack(s.old[t][k], old);
        pack_into(old, result);
    }
    return result;
}

// A producer whose warps have all streams copies those of the next steps to shared memory meanwhile. A thread reads only
// what it has asked for itself, so no barrier is needed.
constexpr int OLD_BYTES = VEC * (sizeof(RESIDUAL) > sizeof(NEW) ? sizeof(RESIDUAL) : sizeof(NEW));
constexpr int ADDED_BYTES = HAS_POST ? VEC * sizeof(X) : 0;
constexpr int STAGE_BYTES = 2 * (N * OLD_BYTES + ADDED_BYTES) * THREADS;

template <int BYTES>
__device__ __forceinline__ void ask(char* to, const void* from, bool inside) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    if constexpr (BYTES == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(address), "l"(from), "r"(inside ? 8 : 0) : "memory");
    else
#pragma unroll
        for (int i = 0; i < BYTES; i += 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         :: "r"(address + i), "l"((const char*)from + i), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ char* staged_streams(int stage, int t, int j) {
    extern __shared__ uint4 dynamic[];
    return (char*)dynamic + stage * STAGE_BYTES + ((t * N + j) * THREADS + threadIdx.x) * OLD_BYTES;
}

__device__ __forceinline__ char* staged_added(int stage, int t) {
    extern __shared__ uint4 dynamic[];
    return (char*)dynamic + stage * STAGE_BYTES + 2 * N * THREADS * OLD_BYTES + (t * THREADS + threadIdx.x) * ADDED_BYTES;
}

// Asks for the streams of two tokens from `column` on, or for nothing; either way one more group of copies.
__device__ __forceinline__ void ask_for_streams(const Arguments& a, const Rows& rows, int column, int stage, bool wanted) {
    if (wanted)
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const bool inside = rows.live[t] && column < HIDDEN;
            const i64 row = inside ? rows.token[t] : 0;
            const int d = inside ? column : 0;
#pragma unroll
            for (int j = 0; j < N; j++)
                ask<VEC * sizeof(RESIDUAL)>(staged_streams(stage, t, j), a.residual + (row * N + j) * HIDDEN + d, inside);
            if constexpr (HAS_POST) ask<ADDED_BYTES>(staged_added(stage, t), a.x + row * HIDDEN + d, inside);
        }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_staged(const char* from) {
    Pack<T, V> pack;
    constexpr int words = sizeof(T) * V / 4;
    if constexpr (words == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        pack.words[0] = v.x; pack.words[1] = v.y;
    } else
#pragma unroll
        for (int i = 0; i < words; i += 4) {
            const uint4 v = reinterpret_cast<const uint4*>(from)[i / 4];
            pack.words[i] = v.x; pack.words[i + 1] = v.y; pack.words[i + 2] = v.z; pack.words[i + 3] = v.w;
        }
    return pack;
}

// The streams of both tokens in a stage after `post`, rounded to NEW: put back into the stage, and written where the
// consumers are to read them. `weights`: those of 16 tokens, [16, N, PAIR].
__device__ __forceinline__ void mix_streams(const Arguments& a, const Rows& rows, int g, int column, const float* weights, int stage) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const bool inside = rows.live[t] && column < HIDDEN;
        float old[N][VEC], added[VEC];
        const float* of = weights + (g + 8 * t) * N * PAIR;
#pragma unroll
        for (int j = 0; j < N; j++) unpack(load_staged<RESIDUAL, VEC>(staged_streams(stage, t, j)), old[j]);
        if constexpr (HAS_POST) unpack(load_staged<X, VEC>(staged_added(stage, t)), added);
#pragma unroll
        for (int k = 0; k < N; k++) {
            Pack<NEW, VEC> rounded;
            if constexpr (HAS_POST) {
                float sum[VEC];
#pragma unroll
                for (int i = 0; i < VEC; i++) sum[i] = of[k * PAIR] * added[i];
#pragma unroll
                for (int j = 0; j < N; j++)
#pragma unroll
                    for (int i = 0; i < VEC; i++) sum[i] = fmaf(of[k * PAIR + 1 + j], old[j][i], sum[i]);
                pack_into(sum, rounded);
                if (!AHEAD && inside) store(a.new_residual + (rows.token[t] * N + k) * HIDDEN + column, rounded);
            } else pack_into(old[k], rounded);
            store(reinterpret_cast<NEW*>(staged_streams(stage, t, k)), rounded);
        }
    }
}
