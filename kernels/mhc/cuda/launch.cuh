// What one launch is given, how it is divided, and how its blocks wait for each other.
#pragma once
#include "numbers.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr bool HEAD = LOGITS == N;
constexpr int TILE = 16 * GROUPS;
constexpr int ROWS = LOGITS + 1;            // sums of a token: the dot products, then the sum of squares
constexpr int STRIDE = (ROWS + 7) / 8 * 8;  // of a slice's sums in the workspace: whole sectors
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
    float* partials;           // [tokens, SPLITS, STRIDE], workspace
    int* counters;             // [tiles], zero before and after
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

// By one thread of a producer, after a barrier behind the block's last write.
__device__ __forceinline__ void arrive(int* counter, int index, int parties) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(share_of(index, parties)) : "memory");
}

// By a consumer: until every producer of the tile has arrived. Producers never wait and start first, so this ends.
__device__ __forceinline__ void wait(const int* counter) {
    if (threadIdx.x == 0) {
        int value;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        while (value >= 0);
    }
    __syncthreads();
}

// By one thread of a consumer that has waited; it has written nothing that another block reads.
__device__ __forceinline__ void leave(int* counter, int index, int parties) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(share_of(index, parties)) : "memory");
}
