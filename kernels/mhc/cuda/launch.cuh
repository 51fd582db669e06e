// What one launch is given, how it is divided, and how its blocks wait for each other.
#pragma once
#include "numbers.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr bool HEAD = LOGITS == N;
constexpr int TILE = 16 * GROUPS;
constexpr int ROWS = LOGITS + 1;            // sums of a token: the dot products, then the sum of squares
constexpr int PAIR = N + 1;                 // weights of one new stream: post, then its column of comb
constexpr int NTILES = (LOGITS + 7) / 8;    // of eight logits, the columns of a tensor-core instruction
constexpr int COLUMN_WARPS = ALL ? WARPS / GROUPS : (WARPS / N > 0 ? WARPS / N : 1);
constexpr int CHUNKS = (HIDDEN / 8 + THREADS - 1) / THREADS;  // of eight columns, of a thread of a collapsing block

struct Arguments {
    const X* x;                // [tokens, HIDDEN]
    const RESIDUAL* residual;  // [tokens, N, HIDDEN]
    const float* old_post;     // [tokens, N]
    const float* old_comb;     // [tokens, N, N]
    const FN* fn;              // [LOGITS, N * HIDDEN]
    const PARAMETER* scale;    // [3], or [1] for the head
    const PARAMETER* base;     // [LOGITS]
    const NORM* norm_weight;   // [HIDDEN]
    NEW* new_residual;         // [tokens, N, HIDDEN], out
    OUT* layer_input;          // [tokens, HIDDEN], out
    float* post;               // [tokens, N], out
    float* comb;               // [tokens, N, N], out
    float* partials;           // [tokens, SPLITS, STRIDE], workspace; with SIGNAL absent before and after
    int* counters;             // [tiles], zero before and after; without SIGNAL
    i64 tokens;
    float rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps;
};

// An entry of `old_post` or `old_comb`, as it is multiplied.
__device__ __forceinline__ float mixing_weight(float entry) { return rounded<WEIGHT>(entry); }

// Blocks start before the launch before has ended (launch.py). What it wrote may be read from here on.
// The next launch may start as well from here on: it waits for the end of this one in the same way.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Party `index` of `parties` adds its share: together they add half of the counter's range. The producers' half turns
// the counter from 0 to the most negative number, the consumers' half back to 0, ready for the next launch: nobody has
// to reset it, and nobody has to wait to know that it is the last.
__device__ __forceinline__ u32 share_of(int index, int parties) {
    const u32 share = 0x80000000u / parties;
    return index == 0 ? 0x80000000u - (parties - 1) * share : share;
}

// With SIGNAL there are no counters. A sum in the workspace is ABSENT, a NaN that no arithmetic makes, until a producer
// writes it. Its one reader looks until it is there and makes it absent again. Each sum says that for itself, so nothing
// needs to be ordered: what would be three trips to L2 one after the other (publish, poll, read) is one. The sum of squares
// has two readers, so it is written twice.
constexpr u32 ABSENT = 0xffffdead;
constexpr int SQUARES_AGAIN = SIGNAL && !HEAD ? LOGITS + 1 : LOGITS;

__device__ __forceinline__ void signal(float* to, float sum) {
    const u32 bits = as_bits(sum) == ABSENT ? 0x7fffffffu : as_bits(sum);
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(bits) : "memory");
}

// Relaxed: a weak load could be taken for one that gives the same value in each round.
__device__ __forceinline__ float look(const float* at) {
    u32 bits;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
    return as_float(bits);
}

__device__ __forceinline__ float4 look_at_four(const float* at) {
    float4 four;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(at) : "memory");
    return four;
}

// A sum in the workspace: with SIGNAL as it is now, else after `wait`.
__device__ __forceinline__ float load_sum(const float* at) {
    if constexpr (SIGNAL) return look(at);
    else return load_written(at);
}

__device__ __forceinline__ bool absent(float sum) { return as_bits(sum) == ABSENT; }

__device__ __forceinline__ void take_away(const float* at) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(at), "r"(ABSENT) : "memory");
}

// By one thread of a producer, after a barrier behind the block's last write.
__device__ __forceinline__ void arrive(int* counter, int index, int parties) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(share_of(index, parties)) : "memory");
}

// By a consumer: until every producer of the tile has arrived. Producers never wait and start first, so this ends.
__device__ __forceinline__ void wait(const int* counter) {
    if constexpr (SIGNAL) return;
    if (threadIdx.x == 0) {
        int value;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        while (value >= 0);
    }
    __syncthreads();
}

// By one thread of a consumer that has waited; it has written nothing that another block reads.
__device__ __forceinline__ void leave(int* counter, int index, int parties) {
    if constexpr (SIGNAL) return;
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(share_of(index, parties)) : "memory");
}
