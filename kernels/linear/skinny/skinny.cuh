// y[N, R] = x[N, K] @ W[R, K]^T for few tokens and several weights. How a launch is cut up, and why: __init__.py.
//
// Macros, one set for each compiled kernel (plans.py):
//   TYPE       bf16 or f16: of x, weights and biases
//   TOKENS     8, 16, 32 or 64: as many, or fewer, are in x
//   ROW_WARPS, COLUMN_WARPS   warps of a block along the rows of the weights, and along their columns
//   TILES      of 16 rows, of a warp          COLUMNS    of a stage, a multiple of 64 and of 16 * COLUMN_WARPS
//   STAGES     in shared memory               BLOCKS     that are to fit on a multiprocessor
//   APART      1: warps copy the columns that they multiply, and wait for those that have the same; 0: all copy all
//   SPLITS     blocks that share the columns  CLUSTER    1: they are a cluster, 0: the last of them adds up
//   LOW        1: some of the weights are float8 (e4m3), each with a float8 input and scales; not defined: none
//
// A float8 matrix is one of pairs: [R, K] has K / 2 columns of two bytes, which are copied like all others. A group of
// rows has one input, so it has pairs or numbers. Two halves of a register become two pairs of float16, which are exact.
//
// The names of instructions (`copy`, `load_four`, ...) are those of instructions.cuh, or of an emulation of it.
#pragma once

#ifndef LOW
#define LOW 0
#endif

constexpr int MOST_LINEARS = 8;
constexpr int BLOCK_TILES = ROW_WARPS * TILES, ROWS = 16 * BLOCK_TILES, THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int CHUNKS = COLUMNS / 8;               // of 16 bytes, of a row of a stage
constexpr int ROW_BYTES = 2 * COLUMNS, STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;    // that are copied, 16 bytes a thread
constexpr int WEIGHT_COPIES = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int TOKEN_COPIES = (TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int STEPS = COLUMNS / 16 / COLUMN_WARPS;  // of 16 columns, of a warp in a stage
constexpr int PART = 32 * ROW_WARPS;              // threads of the warps that have the same columns
constexpr int PITCH = ROWS + 4;                   // so that the lanes of a fragment hit different banks
static_assert(COLUMNS % 64 == 0 && STEPS * 16 * COLUMN_WARPS == COLUMNS, "a warp has whole steps of a stage");
static_assert(THREADS % CHUNKS == 0 && ROWS_AT_ONCE % 4 == 0, "a thread's rows are alike modulo 4");
static_assert(THREADS == 256 && WEIGHT_COPIES <= 32 && STAGES >= 2, "");

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
    int stride;          // group number `i * stride`, modulo their count, is the one of block, or cluster, `i`
};

// Of a linear with float8 numbers, what it has besides.
struct Low {
    const TYPE* x;          // [tokens, K / 2], pairs; null where the linear is of TYPE and reads the common input
    i64 x_stride;           // pairs from a token to the next
    const float* of_token;  // scale of the input
    const float* of_row;    // scale of the weight
    int token_stride;       // 1: one for each token, 0: one for all
    int row_stride;         // 1: one for each row of the weight, 0: one for all
};

struct MixedArguments : Arguments {
    Low lows[MOST_LINEARS];  // where the input is another than in the linear before, `first_tile` begins a group
};

#if LOW
using Given = MixedArguments;
#else
using Given = Arguments;
#endif

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

// What a group of rows is multiplied by, and how many columns of two bytes that has.
#if LOW
struct Input {
    const TYPE* x;
    i64 x_stride;
    int columns;
    bool of_pairs;
};

__device__ __forceinline__ Input input_of(const Given& a, int group) {
    const Low& low = a.lows[linear_of(a, group * BLOCK_TILES)];
    if (low.x != nullptr) return {low.x, low.x_stride, a.columns / 2, true};
    return {a.x, a.x_stride, a.columns, false};
}
__device__ __forceinline__ bool has_pairs(const Input& in) { return in.of_pairs; }
#else
using Input = Arguments;  // read where it is: copies would take registers
__device__ __forceinline__ const Input& input_of(const Given& a, int) { return a; }
__device__ __forceinline__ bool has_pairs(const Input&) { return false; }
#endif

// Brings the weights of the first stage into L2.
__device__ __forceinline__ void bring_ahead(const Arguments& a, const Input& in, int group, int first) {
    constexpr int LINES = ROW_BYTES / 128;
    for (int i = threadIdx.x; i < ROWS * LINES; i += THREADS) {
        const int column = first * COLUMNS + i % LINES * 64;
        const Row row = row_of(a, group, i / LINES);
        if (row.exists && column < in.columns) bring_line(row.at + column);
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

__device__ __forceinline__ Copies copies_of(const Arguments& a, const Input& in, int group) {
    constexpr int SHARED = APART ? 2 * STEPS : CHUNKS;  // chunks of a row that some threads have together
    const int thread = APART ? threadIdx.x % PART : threadIdx.x;
    Copies c;
    c.row = thread / SHARED, c.chunk = thread % SHARED + (APART ? threadIdx.x / PART * SHARED : 0);
    c.live = 0;
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++) {
        const Row row = row_of(a, group, c.row + i * ROWS_AT_ONCE);
        c.weight[i] = row.at;
        c.live |= (u32)row.exists << i;
    }
    c.token = in.x + c.row * in.x_stride;
    c.to = address_of(shared_memory()) + c.row * ROW_BYTES + (c.chunk ^ c.row % 8) * 16;
    return c;
}

// Where copy `i` of a thread goes if the first one goes to `to`: row r has its chunk c at place c ^ r % 8.
__device__ __forceinline__ u32 place(u32 to, int i) {
    return (ROWS_AT_ONCE % 8 == 4 && i % 2 == 1 ? to ^ 64 : to) + i * ROWS_AT_ONCE * ROW_BYTES;
}

// Starts the copies of one stage into `slot`.
__device__ __forceinline__ void bring(const Arguments& a, const Input& in, const Copies& c, int stage, int slot) {
    const int column = stage * COLUMNS + c.chunk * 8;
    const bool inside = column < in.columns;
    const int from = inside ? column : 0;  // nothing is read where it is not inside, and the address is one that exists
    const u32 to = c.to + slot * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++) {
        if (ROWS % ROWS_AT_ONCE == 0 || c.row + i * ROWS_AT_ONCE < ROWS)
            copy(place(to, i), c.weight[i] + from, inside && (c.live >> i & 1) ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < TOKEN_COPIES; i++) {
        const int token = c.row + i * ROWS_AT_ONCE;
        const bool exists = token < a.tokens;
        const TYPE* at = exists ? c.token + i * ROWS_AT_ONCE * in.x_stride : in.x;
        if (TOKENS % ROWS_AT_ONCE == 0 || token < TOKENS)
            copy(place(to + ROWS * ROW_BYTES, i), at + from, inside && exists ? 16 : 0);
    }
}

// Two chunks of all tokens; `from` is what this lane reads of the first 8 or 16.
__device__ __forceinline__ void load_tokens(u32 from, u32 (*b)[2]) {
    if constexpr (TOKENS == 8) {
        load_two(from, b[0]);
    } else {
#pragma unroll
        for (int i = 0; i < TOKENS / 16; i++) {
            u32 both[4];
            load_four(from + i * 16 * ROW_BYTES, both);
            b[2 * i][0] = both[0], b[2 * i][1] = both[1], b[2 * i + 1][0] = both[2], b[2 * i + 1][1] = both[3];
        }
    }
}

// What a warp multiplies in a step: 16 columns of two bytes of the tokens and of its tiles.
struct Fragments {
    u32 tokens[TOKENS / 8][2];
    u32 weights[TILES][4];
};

// Row r of a stage has its chunk c at place c ^ r % 8.
__device__ __forceinline__ void load_step(u32 stage, int step, int row_warp, int column_warp, Fragments& to) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8, chunk = 2 * (column_warp * STEPS + step);
    const u32 weights = stage + (row_warp * TILES * 16 + matrix % 2 * 8 + row) * ROW_BYTES;
    const u32 tokens = stage + (ROWS + (TOKENS == 8 ? 0 : matrix / 2 * 8) + row) * ROW_BYTES;
    load_tokens(tokens + ((chunk + matrix % 2) ^ row) * 16, to.tokens);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        load_four(weights + tile * 16 * ROW_BYTES + ((chunk + matrix / 2) ^ row) * 16, to.weights[tile]);
}

// Adds the products of one step to the sums of a warp.
__device__ __forceinline__ void multiply_numbers(const Fragments& of, float (*sums)[TOKENS / 8][4]) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) multiply_add(sums[tile][i], of.weights[tile], of.tokens[i], TYPE());
}

#if LOW
// The same for pairs. A lane has four float8 numbers in a register, columns 4q to 4q + 3 of a chunk of 16. The first two
// serve as columns 2q and 2q + 1 of a product, the others as 2q + 8 and 2q + 9: the same change of order on both sides.
__device__ __forceinline__ void multiply_pairs(const Fragments& of, float (*sums)[TOKENS / 8][4]) {
    u32 b[TOKENS / 8][2][2];  // [.][chunk][.]
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
        widen(of.tokens[i][0], b[i][0][0], b[i][0][1]);
        widen(of.tokens[i][1], b[i][1][0], b[i][1][1]);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        u32 first[4], second[4];  // rows and rows + 8 of the first chunk, of the second
        widen(of.weights[tile][0], first[0], first[2]);
        widen(of.weights[tile][1], first[1], first[3]);
        widen(of.weights[tile][2], second[0], second[2]);
        widen(of.weights[tile][3], second[1], second[3]);
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) {
            multiply_add(sums[tile][i], first, b[i][0], f16());
            multiply_add(sums[tile][i], second, b[i][1], f16());
        }
    }
}
#endif

// Adds the products of one stage to the sums of a warp; what a step reads is on its way during the step before.
template <bool OF_PAIRS>
__device__ __forceinline__ void multiply_stage(u32 stage, int row_warp, int column_warp, float (*sums)[TOKENS / 8][4]) {
    Fragments fragments[2];
    load_step(stage, 0, row_warp, column_warp, fragments[0]);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) load_step(stage, step + 1, row_warp, column_warp, fragments[(step + 1) % 2]);
#if LOW
        if constexpr (OF_PAIRS) multiply_pairs(fragments[step % 2], sums);
#endif
        if constexpr (!OF_PAIRS) multiply_numbers(fragments[step % 2], sums);
    }
}

#if LOW
// Brings near what `scaled` will read.
__device__ __forceinline__ void bring_scales(const Given& a, int group) {
    const int tile = group * BLOCK_TILES + threadIdx.x;
    if (threadIdx.x < BLOCK_TILES && tile < a.tiles) {
        const int linear = linear_of(a, tile), before = (tile - a.linears[linear].first_tile) * 16;
        if (before < a.linears[linear].rows) bring_line(a.lows[linear].of_row + before * a.lows[linear].row_stride);
    }
    const Low& low = a.lows[linear_of(a, group * BLOCK_TILES)];
    if (32 * threadIdx.x < a.tokens) bring_line(low.of_token + 32 * threadIdx.x * low.token_stride);
}
#endif

// The sum of a token and a row of linear `linear` times its scales.
__device__ __forceinline__ float scaled(const Given& a, int linear, int token, int row, float sum) {
#if LOW
    const Low& low = a.lows[linear];
    if (low.x != nullptr) return sum * low.of_token[token * low.token_stride] * low.of_row[row * low.row_stride];
#endif
    return sum;
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

// Writes part `part` of `PARTS` of what the group computes: a thread has one row of a tile, and every sixteenth token.
template <int PARTS, class Sums>
__device__ __forceinline__ void write(const Given& a, int group, int part, const Sums& sums) {
    constexpr int AT_ONCE = TOKENS < 16 ? 16 / TOKENS : 1, EACH = TOKENS < 16 ? 1 : TOKENS / 16;
    const int row = threadIdx.x % 16, first_token = threadIdx.x / 16 % TOKENS;
    for (int i = part * AT_ONCE; i < BLOCK_TILES; i += PARTS * AT_ONCE) {
        const int in_group = i + threadIdx.x / 16 / TOKENS, tile = group * BLOCK_TILES + in_group;
        if (in_group >= BLOCK_TILES || tile >= a.tiles) return;
        const int linear = linear_of(a, tile);
        const Linear& of = a.linears[linear];
        const int in_linear = (tile - of.first_tile) * 16 + row;
        if (in_linear >= of.rows) continue;
        const float bias = of.bias == nullptr ? 0.0f : number(of.bias[in_linear]);
        float results[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {  // all loads first: behind a store they would wait for it
            const int token = first_token + j * 16;
            if (token < a.tokens) results[j] = scaled(a, linear, token, in_linear, sums(token, in_group * 16 + row));
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int token = first_token + j * 16;
            const i64 at = token * of.out_stride + in_linear;
            if (token >= a.tokens) continue;
            if (of.bias != nullptr) results[j] += bias;
            if (of.wide) static_cast<float*>(of.out)[at] = results[j];
            else round_into(results[j], static_cast<TYPE*>(of.out) + at);
        }
    }
}

// Adds up what the blocks of a group have, always in the same order, and writes it.
__device__ __forceinline__ void finish(const Given& a, int group, int split, float* shared) {
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

// Block, or cluster, i has the rows of group i * stride modulo their count; of the columns block b has part b % SPLITS.
__device__ __forceinline__ void run(const Given& a) {
    const int group = blockIdx.x / SPLITS * a.stride % (gridDim.x / SPLITS), split = blockIdx.x % SPLITS;
    const int warp = threadIdx.x / 32, row_warp = warp % ROW_WARPS, column_warp = warp / ROW_WARPS;
    const Input& in = input_of(a, group);
    const int stages = (in.columns + COLUMNS - 1) / COLUMNS;
    const int first = stages * split / SPLITS, end = stages * (split + 1) / SPLITS;
    bring_ahead(a, in, group, first);
    const Copies c = copies_of(a, in, group);
    wait_for_inputs();

    // Stages that are under way at once. Rows of pairs have half of the bytes: with half of them under way, memory
    // serves all blocks in about the same time.
    constexpr int MANY = STAGES - 1, FEW = LOW ? (MANY + 1) / 2 : MANY;
    const bool few = FEW < MANY && has_pairs(in);
    const int ahead = few ? FEW : MANY;
#pragma unroll
    for (int i = 0; i < MANY; i++) {
        if (i >= ahead) break;
        if (first + i < end) bring(a, in, c, first + i, i);
        commit();
    }
#if LOW
    if (in.of_pairs) bring_scales(a, group);
#endif
    float sums[TILES][TOKENS / 8][4] = {};
    const u32 memory = address_of(shared_memory());
    for (int stage = first, slot = 0; stage < end; stage++) {
        if (few) wait_for_copies<FEW - 1>();
        else wait_for_copies<MANY - 1>();
        // This stage is there for all who read it, and all of them are done with the one before.
        if constexpr (APART) meet_in_part<PART>(column_warp);
        else __syncthreads();
        const int next = slot + ahead;
        if (stage + ahead < end) bring(a, in, c, stage + ahead, next < STAGES ? next : next - STAGES);
        commit();
#if LOW
        if (in.of_pairs) multiply_stage<true>(memory + slot * STAGE_BYTES, row_warp, column_warp, sums);
        else
#endif
            multiply_stage<false>(memory + slot * STAGE_BYTES, row_warp, column_warp, sums);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    wait_for_copies<0>();
    __syncthreads();  // nobody reads or writes stages any more
    float* shared = reinterpret_cast<float*>(shared_memory());
    lay_down(shared, row_warp, column_warp, sums);
    __syncthreads();
    finish(a, group, split, shared);
}
