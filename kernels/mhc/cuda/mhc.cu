// mHC on NVIDIA GPUs in one launch. Formulas: reference.py; how a launch is divided and why: __init__.py.
//
// The host compiles this file once per plan with these macros:
//   N          residual streams, 2 to 8            HIDDEN    columns of a stream, a multiple of 8
//   LOGITS     (2 + N) * N, or N for the head      ITERS     Sinkhorn iterations
//   RESIDUAL, NEW, X, FN, PARAMETER, NORM, OUT     types: float, bf16 or f16
//   WEIGHT                                         the type that post and comb are rounded to before they are multiplied
//   HAS_POST, HAS_NORM                             0 or 1
//   AHEAD      1: a collapsing block mixes its token's streams itself, before it waits
//   GROUPS     groups of 16 tokens in a tile       ALL       1: a warp of a producer has all streams, 0: one of them
//   VEC        columns a thread has at a time      STEPS     times that in a slice
//   STRIDE     of a slice's sums in the workspace: whole sectors
//   SIGNAL     1: sums themselves say that they are there; with AHEAD
//   SPLITS     slices of the hidden axis           TOGETHER  tokens whose post and comb one block computes
//   LAG        tiles between the producers and the consumers that start together
//   STAGES     steps whose streams a producer has in shared memory; with ALL
//   POST_ALONE 1: the kernel mhc_post and not mhc
//   STREAMING  1: rows are read for the last time, and `layer_input` is written, as what leaves the caches first
//   TOKENS     tokens of a collapsing block         COMBINED  1: every block produces, then consumes; LAG is 1 or more
//   BLOCKS     that are to fit on a multiprocessor   DENORMAL  1: sums of Sinkhorn may be denormal, so divide

#include "collapse.cuh"
#include "expand.cuh"
#include "produce.cuh"

#if POST_ALONE

// Block i: THREADS chunks of a token, eight columns a thread.
extern "C" __global__ void __launch_bounds__(THREADS) mhc_post(const Arguments a) {
    wait_for_inputs();
    Pack<NEW, 8> streams[N];
    mix_chunk(a, blockIdx.x / CHUNKS, (blockIdx.x % CHUNKS * THREADS + threadIdx.x) * 8, true, streams);
}

#else

__device__ __forceinline__ int parts_of(int whole, int part) { return (whole + part - 1) / part; }

struct Tile {
    i64 first;         // token
    int live;          // tokens
    int rows, groups;  // parts of the consumers' work: rows of `layer_input`; `post` and `comb`
    int* counter;
};

__device__ __forceinline__ Tile tile_of(const Arguments& a, int tile) {
    Tile of;
    of.first = (i64)tile * TILE;
    of.live = a.tokens - of.first < TILE ? (int)(a.tokens - of.first) : TILE;
    of.rows = parts_of(of.live, TOKENS);
    of.groups = HEAD ? 0 : parts_of(of.live, TOGETHER);
    of.counter = a.counters + tile;
    return of;
}

__device__ __forceinline__ void collapse_part(const Arguments& a, const Tile& of, int i, float* scratch) {
    const int left = of.live - i * TOKENS;
    collapse(a, of.first + i * TOKENS, left < TOKENS ? left : TOKENS, of.counter, i, of.rows + of.groups, scratch);
}

__device__ __forceinline__ void expand_part(const Arguments& a, const Tile& of, int i, float* scratch) {
    const int left = of.live - i * TOGETHER;
    expand(a, of.first + i * TOGETHER, left < TOGETHER ? left : TOGETHER, of.counter, of.rows + i, of.rows + of.groups, scratch);
}

// Blocks in the order in which they start: for each tile its producers, then the consumers of LAG tiles before.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mhc(const Arguments a) {
    constexpr int WEIGHTS = ALL && HAS_POST ? TILE * N * PAIR : 0;
    constexpr int PRODUCER = SUMS > WEIGHTS ? SUMS : WEIGHTS;
    constexpr int REST = (TOGETHER + WARPS) * (LOGITS - N + 1) + LOGITS, COLLAPSE = TOKENS * WARPS * (N + 2);
    constexpr int CONSUMER = REST > COLLAPSE ? REST : COLLAPSE;
    __shared__ float scratch[PRODUCER > CONSUMER ? PRODUCER : CONSUMER];

    if constexpr (COMBINED) {
        // Every block is a producer, then a consumer of its share of a tile that blocks before it have produced.
        wait_for_inputs();
        const int step = blockIdx.x / SPLITS, role = blockIdx.x % SPLITS;
        if ((i64)step * TILE < a.tokens) produce(a, step, role, scratch);
        const int tile = step - LAG;
        if (tile < 0 || (i64)tile * TILE >= a.tokens) return;
        const Tile of = tile_of(a, tile);
        for (int i = role; i < of.rows; i += SPLITS) collapse_part(a, of, i, scratch);
        if constexpr (!HEAD)
            for (int i = SPLITS - 1 - role; i < of.groups; i += SPLITS) expand_part(a, of, i, scratch);
        return;
    }
    const int full = a.tokens < TILE ? (int)a.tokens : TILE;  // tokens of a full tile
    const int rows = parts_of(full, TOKENS), blocks = SPLITS + rows + (HEAD ? 0 : parts_of(full, TOGETHER));
    const int step = blockIdx.x / blocks, role = blockIdx.x % blocks;
    if (role < SPLITS) {
        if ((i64)step * TILE >= a.tokens) return;
        if constexpr (!ALL) prefetch_fragment(a, role);
        wait_for_inputs();
        produce(a, step, role, scratch);
        return;
    }
    wait_for_inputs();
    const int tile = step - LAG;
    if (tile < 0 || (i64)tile * TILE >= a.tokens) return;
    const Tile of = tile_of(a, tile);
    const int i = role - SPLITS;
    if (i < rows) {
        if (i < of.rows) collapse_part(a, of, i, scratch);
    } else if constexpr (!HEAD) {
        if (i - rows < of.groups) expand_part(a, of, i - rows, scratch);
    }
}

#endif
