// y[N, R] = x[N, K] @ W[R, K]^T for few tokens and several weights. How a launch is cut up, and why: __init__.py.
//
// Macros, one set for each compiled kernel (plans.py):
//   TYPE       bf16 or f16: of x, weights and biases
//   TOKENS     8, 16, 32 or 64: as many, or fewer, are in x
//   ROW_WARPS, COLUMN_WARPS   warps of a block along the rows of the weights, and along their columns
//   TILES      of 16 rows, of a warp          COLUMNS    of a stage, a multiple of 64 and of 16 * COLUMN_WARPS
//   STAGES     in shared memory               BLOCKS     that are to fit on a multiprocessor
//   SPLITS     blocks that share the columns  CLUSTER    1: they are a cluster, 0: the last of them adds up
//   AHEAD      stages whose weights are brought into L2 before the launch before has ended
//
// The names of instructions (`copy`, `load_four`, ...) are those of instructions.cuh, or of an emulation of it.
#pragma once

constexpr int MOST_LINEARS = 8;
constexpr int BLOCK_TILES = ROW_WARPS * TILES, ROWS = 16 * BLOCK_TILES, THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int CHUNKS = COLUMNS / 8;               // of 16 bytes, of a row of a stage
constexpr int ROW_BYTES = 2 * COLUMNS, STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;    // that the block copies, 16 bytes a thread
constexpr int WEIGHT_COPIES = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int TOKEN_COPIES = (TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int STEPS = COLUMNS / 16 / COLUMN_WARPS;  // of 16 columns, of a warp in a stage
constexpr int PITCH = ROWS + 4;                   // so that the lanes of a fragment hit different banks
static_assert(COLUMNS % 64 == 0 && STEPS * 16 * COLUMN_WARPS == COLUMNS, "a warp has whole steps of a stage");
static_assert(THREADS % CHUNKS == 0 && ROWS_AT_ONCE % 8 == 0, "a thread's rows are alike modulo 8");
static_assert(WEIGHT_COPIES <= 32 && STAGES >= 2, "");

struct Linear {
    const TYPE* weight;  // [rows, K]
    const TYPE* bias;    // [rows], or null
    void* out;           // [tokens, rows], of TYPE or float
    i64 weight_stride;   // elements from a row to the next
    i64 out_stride;      // elements from a token to the next
    int rows;
    int first_tile;      // tiles of 16 rows of all linears before; beyond all tiles where there is no linear
    int wide;            // `out` is float
    int padding;
};

struct Arguments {
    Linear linears[MOST_LINEARS];
    const TYPE* x;       // [tokens, K]
    i64 x_stride;        // elements from a token to the next
    float* partials;     // [groups, SPLITS, TOKENS, ROWS], without CLUSTER
    u32* counters;       // [groups], zero before and after, without CLUSTER
    int tokens;          // 1 to TOKENS
    int columns;         // K, a multiple of 8
    int tiles;           // of 16 rows, of all linears
    int padding;
};

// The linear that tile `tile` belongs to.
__device__ __forceinline__ int linear_of(const Arguments& a, int tile) {
    int found = 0;
#pragma unroll
    for (int i = 1; i < MOST_LINEARS; i++) found += tile >= a.linears[i].first_tile;
    return found;
}

// A row of a group: where it is in memory (or where some row is, if it does not exist).
struct Row {
    const TYPE* at;
    bool exists;
};

__device__ __forceinline__ Row row_of(const Arguments& a, int group, int row) {
    const int tile = group * BLOCK_TILES + row / 16;
    const Linear& of = a.linears[linear_of(a, tile)];
    const int in_linear = (tile - of.first_tile) * 16 + row % 16;
    const bool exists = row < ROWS && tile < a.tiles && in_linear < of.rows;
    return {of.weight + (exists ? in_linear * of.weight_stride : 0), exists};
}

// Brings the first weights of a block into L2, the first stage first.
__device__ __forceinline__ void bring_ahead(const Arguments& a, int group, int first, int end) {
    const int stages = min(AHEAD, end - first);
    for (int i = threadIdx.x; i < stages * ROWS; i += THREADS) {
        const int column = (first + i / ROWS) * COLUMNS;
        const Row row = row_of(a, group, i % ROWS);
        if (row.exists) bring_near(row.at + column, 2 * min(COLUMNS, a.columns - column));
    }
}

// What a thread copies: 16 bytes of each of some rows of a stage, `chunk` of each.
struct Copies {
    const TYPE* weight[WEIGHT_COPIES];
    u32 live;  // bit i: weight[i] is a row that exists
    const TYPE* token;
    int row, chunk;
    u32 to;
};

__device__ __forceinline__ Copies copies_of(const Arguments& a, int group) {
    Copies c;
    c.row = threadIdx.x / CHUNKS, c.chunk = threadIdx.x % CHUNKS;
    c.live = 0;
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++) {
        const Row row = row_of(a, group, c.row + i * ROWS_AT_ONCE);
        c.weight[i] = row.at;
        c.live |= (u32)row.exists << i;
    }
    c.token = a.x + c.row * a.x_stride;
    c.to = address_of(shared_memory()) + c.row * ROW_BYTES + (c.chunk ^ c.row % 8) * 16;
    return c;
}

// Starts the copies of one stage into `slot`.
__device__ __forceinline__ void bring(const Arguments& a, const Copies& c, int stage, int slot) {
    const int column = stage * COLUMNS + c.chunk * 8;
    const bool inside = column < a.columns;
    const int from = inside ? column : 0;  // nothing is read where it is not inside, and the address is one that exists
    const u32 to = c.to + slot * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++) {
        if (ROWS % ROWS_AT_ONCE == 0 || c.row + i * ROWS_AT_ONCE < ROWS)
            copy(to + i * ROWS_AT_ONCE * ROW_BYTES, c.weight[i] + from, inside && (c.live >> i & 1) ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < TOKEN_COPIES; i++) {
        const int token = c.row + i * ROWS_AT_ONCE;
        const bool exists = token < a.tokens;
        const TYPE* at = exists ? c.token + i * ROWS_AT_ONCE * a.x_stride : a.x;
        if (TOKENS % ROWS_AT_ONCE == 0 || token < TOKENS)
            copy(to + (ROWS + i * ROWS_AT_ONCE) * ROW_BYTES, at + from, inside && exists ? 16 : 0);
    }
}

// Adds the products of one stage to the sums of a warp. Row r of a stage has its chunk c at place c ^ r % 8.
__device__ __forceinline__ void multiply_stage(u32 stage, int row_warp, int column_warp, float (*sums)[TOKENS / 8][4]) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const u32 weights = stage + (row_warp * TILES * 16 + matrix % 2 * 8 + row) * ROW_BYTES;
    const u32 tokens = stage + (ROWS + (TOKENS == 8 ? 0 : matrix / 2 * 8) + row) * ROW_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int chunk = 2 * (column_warp * STEPS + step);
        const u32 token_chunk = ((chunk + matrix % 2) ^ row) * 16, weight_chunk = ((chunk + matrix / 2) ^ row) * 16;
        u32 b[TOKENS / 8][2];
        if constexpr (TOKENS == 8) {
            load_two(tokens + token_chunk, b[0]);
        } else {
#pragma unroll
            for (int i = 0; i < TOKENS / 16; i++) {
                u32 both[4];
                load_four(tokens + i * 16 * ROW_BYTES + token_chunk, both);
                b[2 * i][0] = both[0], b[2 * i][1] = both[1], b[2 * i + 1][0] = both[2], b[2 * i + 1][1] = both[3];
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32 of_weight[4];
            load_four(weights + tile * 16 * ROW_BYTES + weight_chunk, of_weight);
#pragma unroll
            for (int i = 0; i < TOKENS / 8; i++) multiply_add(sums[tile][i], of_weight, b[i], TYPE());
        }
    }
}

// The sums of a warp to shared memory, [COLUMN_WARPS, TOKENS, PITCH].
__device__ __forceinline__ void lay_down(float* shared, int row_warp, int column_warp, const float (*sums)[TOKENS / 8][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* to = shared + (column_warp * TOKENS + 2 * q) * PITCH + row_warp * TILES * 16 + g;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) to[(i * 8 + j % 2) * PITCH + tile * 16 + j / 2 * 8] = sums[tile][i][j];
}

// What the warps of this block have summed for one token and row; `at` is of the first of them.
__device__ __forceinline__ float sum_of_warps(const float* at) {
    float sum = at[0];
#pragma unroll
    for (int warp = 1; warp < COLUMN_WARPS; warp++) sum += at[warp * TOKENS * PITCH];
    return sum;
}

// Where the sum of one token and row of the group comes from.
struct OfWarps {
    const float* shared;
    __device__ __forceinline__ float operator()(int token, int row) const {
        return sum_of_warps(shared + token * PITCH + row);
    }
};
struct OfCluster {
    const float* shared;
    __device__ __forceinline__ float operator()(int token, int row) const {
        float sum = 0.0f;
#pragma unroll
        for (int block = 0; block < SPLITS; block++) sum += load_from_block(shared + token * PITCH + row, block);
        return sum;
    }
};
struct OfPartials {
    const float* group;
    __device__ __forceinline__ float operator()(int token, int row) const {
        float sum = 0.0f;
#pragma unroll
        for (int block = 0; block < SPLITS; block++) sum += load_written(group + (block * TOKENS + token) * ROWS + row);
        return sum;
    }
};

// Writes part `part` of `PARTS` of what the group computes.
template <int PARTS, class Sums>
__device__ __forceinline__ void write(const Arguments& a, int group, int part, const Sums& sums) {
    constexpr bool BY_TILE = BLOCK_TILES % PARTS == 0;
    constexpr int TILE_STEP = BY_TILE ? PARTS : 1, THREAD_STEP = BY_TILE ? THREADS : PARTS * THREADS;
    for (int i = BY_TILE ? part : 0; i < BLOCK_TILES; i += TILE_STEP) {
        const int tile = group * BLOCK_TILES + i;
        if (tile >= a.tiles) return;
        const Linear& of = a.linears[linear_of(a, tile)];
        const int before = (tile - of.first_tile) * 16, rows = min(16, of.rows - before);
        for (int j = (BY_TILE ? 0 : part * THREADS) + threadIdx.x; j < a.tokens * 16; j += THREAD_STEP) {
            const int token = j / 16, row = j % 16;
            if (row >= rows) continue;
            float sum = sums(token, i * 16 + row);
            if (of.bias != nullptr) sum += number(of.bias[before + row]);
            const i64 at = token * of.out_stride + before + row;
            if (of.wide) static_cast<float*>(of.out)[at] = sum;
            else round_into(sum, static_cast<TYPE*>(of.out) + at);
        }
    }
}

// Adds up what the blocks of a group have, always in the same order, and writes it.
__device__ __forceinline__ void finish(const Arguments& a, int group, int split, float* shared) {
    const int count = a.tokens * ROWS;
    if constexpr (SPLITS == 1) {
        write<1>(a, group, 0, OfWarps{shared});
    } else if constexpr (CLUSTER) {
        for (int i = threadIdx.x; i < count; i += THREADS) {
            float* at = shared + i / ROWS * PITCH + i % ROWS;
            *at = sum_of_warps(at);
        }
        meet_in_cluster();
        write<SPLITS>(a, group, split, OfCluster{shared});
        meet_in_cluster();  // a block that has ended has no shared memory
    } else {
        float* of_group = a.partials + (i64)group * SPLITS * TOKENS * ROWS;
        for (int i = threadIdx.x; i < count; i += THREADS)
            of_group[split * TOKENS * ROWS + i] = sum_of_warps(shared + i / ROWS * PITCH + i % ROWS);
        __syncthreads();
        int* last = reinterpret_cast<int*>(shared);
        if (threadIdx.x == 0) *last = is_last(a.counters + group, SPLITS);
        __syncthreads();
        if (*last) write<1>(a, group, 0, OfPartials{of_group});
    }
}

// Block b has rows of group b / SPLITS, and of the columns the part b % SPLITS.
__device__ __forceinline__ void run(const Arguments& a) {
    const int group = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
    const int warp = threadIdx.x / 32, row_warp = warp % ROW_WARPS, column_warp = warp / ROW_WARPS;
    const int stages = (a.columns + COLUMNS - 1) / COLUMNS;
    const int first = stages * split / SPLITS, end = stages * (split + 1) / SPLITS;
    bring_ahead(a, group, first, end);
    const Copies c = copies_of(a, group);
    wait_for_inputs();

#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (first + i < end) bring(a, c, first + i, i);
        commit();
    }
    float sums[TILES][TOKENS / 8][4] = {};
    const u32 memory = address_of(shared_memory());
    for (int stage = first, slot = 0; stage < end; stage++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all, and all are done with the one before
        const int next = stage + STAGES - 1, free = slot == 0 ? STAGES - 1 : slot - 1;
        if (next < end) bring(a, c, next, free);
        commit();
        multiply_stage(memory + slot * STAGE_BYTES, row_warp, column_warp, sums);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    wait_for_copies<0>();
    __syncthreads();  // nobody reads or writes stages any more
    float* shared = reinterpret_cast<float*>(shared_memory());
    lay_down(shared, row_warp, column_warp, sums);
    __syncthreads();
    finish(a, group, split, shared);
}
