// Many tokens: clusters of blocks that stay, each block with 256 columns of all streams of a tile of 16 tokens.
//
// A tile's streams are read once, into shared memory, mixed there, written from there, and collapsed from there; what a
// row's sums need of other columns goes through the shared memory of the cluster's blocks. `fn` stays in shared memory.
// Three tiles are under way, so nobody waits for a neighbour: in turn `t` a block
//   1. mixes tile t and computes its part of the dot products; asks the copy engine to write the new streams;
//   2. normalises and writes the rows of tile t - 2;
//   3. sends the sums of tile t to the other blocks;
//   4. collapses tile t - 1, whose sums are there; sends the squares of the rows; asks for the streams of tile t + 2.
// A further warp computes `post` and `comb` of the tokens that this block owns.
#pragma once
#include "dots.cuh"
#include "expand.cuh"

constexpr int CLUSTER = HIDDEN / 256;  // blocks; a multiple of 256 up to 4096
constexpr int COLS = 256, TOKENS_OF_TILE = 16;
constexpr int MIXERS = 16, MIXING = MIXERS * 32;  // warps with 16 columns each, and their threads
constexpr int SLOTS = 3;                          // tiles whose streams are in shared memory

constexpr int ROW_BYTES = COLS * sizeof(NEW);
constexpr int TOKEN_BYTES = N * ROW_BYTES + 32;  // so that the tokens of a quarter of a warp are in different banks
constexpr int SLOT_BYTES = TOKENS_OF_TILE * TOKEN_BYTES;
constexpr int PRE = N + 1;                                 // sums of a token that every block needs
constexpr int REST = HEAD ? 0 : LOGITS - N + 1;            // those that its owner needs
constexpr int PRE_SENT = TOKENS_OF_TILE * PRE, REST_SENT = (REST + 3) / 4 * 4;
constexpr int OWNED = (TOKENS_OF_TILE + CLUSTER - 1) / CLUSTER;  // tokens of a tile at most, of a block
constexpr int GATHERED = 8 / OWNED > 0 ? 8 / OWNED : 1;            // turns whose `post` and `comb` are computed together

// Of two parities each, where turns may overlap.
struct Shared {
    float fn[LOGITS * N][COLS];
    char slots[SLOTS][SLOT_BYTES];
    float dots[MIXERS / 2][NTILES * 4][32], squares[MIXERS / 2][TOKENS_OF_TILE];
    float pre[PRE_SENT], rest[TOKENS_OF_TILE][REST_SENT + (HEAD ? 4 : 0)];
    float pre_of[2][CLUSTER][PRE_SENT];
    float rest_of[2][OWNED][CLUSTER][REST_SENT + (HEAD ? 4 : 0)];
    float squares_of[2][CLUSTER][TOKENS_OF_TILE];
    float weights[2][TOKENS_OF_TILE][PAIR][N];  // of `post` mixing: post, then comb
    float own[GATHERED * OWNED][REST_SENT + (HEAD ? 4 : 0)];
    float parameters[LOGITS], scale;  // `base`, and the first of `scale`
    unsigned long long loaded[SLOTS], pre_here[2], rest_here[2], squares_here[2], rest_taken[2];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "plans.py: cluster_bytes");

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void make_barrier(const void* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(const void* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Until the barrier's use number `use`, counted from 0, is complete. What is waited for lies in shared memory: an acquire
// at the scope of the cluster would empty L1 besides.
__device__ __forceinline__ void await(const void* barrier, int use) {
    u32 done;
    do asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(use & 1) : "memory");
    while (!done);
}

// The address in block `rank` of the cluster of what is at `at` in this one.
__device__ __forceinline__ u32 address_in(int rank, const void* at) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(rank));
    return address;
}

__device__ __forceinline__ void mixers_meet() { asm volatile("bar.sync 1, %0;" :: "n"(MIXING) : "memory"); }

__device__ __forceinline__ void cluster_meets() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void read_row(const float* from, float* to) {
    if constexpr (N % 4 == 0)
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 v = *reinterpret_cast<const float4*>(from + i);
            to[i] = v.x; to[i + 1] = v.y; to[i + 2] = v.z; to[i + 3] = v.w;
        }
    else
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = from[i];
}

// 16 lanes have a part each, the other 16 lanes those of another sum.
__device__ __forceinline__ float half_sum(float x) {
#pragma unroll
    for (int lane = 8; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// Where lane `lane` leaves its dot product number i, so that those of a token are in different banks.
__device__ __forceinline__ int place_of(int i, int lane) { return lane ^ (i / 4 * 2 + i % 2) * 4; }

// Tokens of a tile whose `post` and `comb` block `rank` computes.
__device__ __forceinline__ int owned_by(int rank) { return (TOKENS_OF_TILE - rank + CLUSTER - 1) / CLUSTER; }

struct Turn {
    i64 first;  // token
    int live;   // tokens
};

struct Block {
    const Arguments& a;
    Shared& s;
    int rank, cluster, clusters, turns;

    __device__ __forceinline__ Turn turn(int t) const {
        Turn of;
        of.first = (i64)(t * clusters + cluster) * TOKENS_OF_TILE;
        const i64 left = a.tokens - of.first;
        of.live = t >= turns || left <= 0 ? 0 : left < TOKENS_OF_TILE ? (int)left : TOKENS_OF_TILE;
        return of;
    }

    // A warp asks for the streams of one token of turn t.
    __device__ __forceinline__ void ask_for(int t) const {
        const Turn of = turn(t);
        const int token = threadIdx.x / 32, k = threadIdx.x % 32;
        if (token >= of.live || k >= N) return;
        const u32 barrier = shared_address(&s.loaded[t % SLOTS]);
        if (threadIdx.x == 0) expect(&s.loaded[t % SLOTS], of.live * N * ROW_BYTES);
        const RESIDUAL* from = a.residual + ((of.first + token) * N + k) * HIDDEN + rank * COLS;
        const u32 to = shared_address(s.slots[t % SLOTS] + token * TOKEN_BYTES + k * ROW_BYTES);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(to), "l"(from), "n"(ROW_BYTES), "r"(barrier) : "memory");
    }

    // Behind a barrier of the mixers, a warp has the mixed streams of one token of turn t written.
    __device__ __forceinline__ void write_streams(int t) const {
        const Turn of = turn(t);
        const int token = threadIdx.x / 32, k = threadIdx.x % 32;
        if (token < of.live && k < N) {
            NEW* to = a.new_residual + ((of.first + token) * N + k) * HIDDEN + rank * COLS;
            const u32 from = shared_address(s.slots[t % SLOTS] + token * TOKEN_BYTES + k * ROW_BYTES);
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(from), "n"(ROW_BYTES) : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    __device__ __forceinline__ float weight_of(int t) const {
        const Turn of = turn(t);
        const int i = threadIdx.x / (PAIR * N), p = threadIdx.x / N % PAIR, k = threadIdx.x % N;
        if (i >= of.live) return 0.0f;
        const i64 token = of.first + i;
        return p == 0 ? a.old_post[token * N + k] : a.old_comb[(token * N + p - 1) * N + k];
    }

    __device__ __forceinline__ void keep_weight(int t, float weight) const {
        if (threadIdx.x < TOKENS_OF_TILE * PAIR * N) (&s.weights[t & 1][0][0][0])[threadIdx.x] = weight;
    }

    __device__ __forceinline__ void load_added(int t, Pack<X, 4>* added) const {
        const Turn of = turn(t);
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = g + 8 * h;
            added[h] = i < of.live ? load<false, X, 4>(a.x + (of.first + i) * HIDDEN + rank * COLS + warp * 16 + q * 4) : zeros<X, 4>();
        }
    }

    // Step 1. Leaves the sums of the block's columns in `pre` and `rest`.
    __device__ __forceinline__ void mix(int t, const Pack<X, 4>* added) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        char* slot = s.slots[t % SLOTS] + (warp * 16 + q * 4) * sizeof(NEW);
        await(&s.loaded[t % SLOTS], t / SLOTS);
        Pack<NEW, 4> rounded[2][N];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            char* streams = slot + (g + 8 * h) * TOKEN_BYTES;
            if constexpr (HAS_POST) {
                float sums[N][4], weights[N], old[4];
                unpack(added[h], old);
                read_row(s.weights[t & 1][g + 8 * h][0], weights);
#pragma unroll
                for (int k = 0; k < N; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[k][i] = weights[k] * old[i];
#pragma unroll
                for (int j = 0; j < N; j++) {
                    unpack(load<false, RESIDUAL, 4>(reinterpret_cast<const RESIDUAL*>(streams + j * ROW_BYTES)), old);
                    read_row(s.weights[t & 1][g + 8 * h][1 + j], weights);
#pragma unroll
                    for (int k = 0; k < N; k++)
#pragma unroll
                        for (int i = 0; i < 4; i++) sums[k][i] = fmaf(weights[k], old[i], sums[k][i]);
                }
#pragma unroll
                for (int k = 0; k < N; k++) {
                    pack_into(sums[k], rounded[h][k]);
                    store(reinterpret_cast<NEW*>(streams + k * ROW_BYTES), rounded[h][k]);
                }
            } else
#pragma unroll
                for (int k = 0; k < N; k++) rounded[h][k] = load<false, NEW, 4>(reinterpret_cast<const NEW*>(streams + k * ROW_BYTES));
        }
        float dots[NTILES][4] = {}, fresh[NTILES][4] = {}, squares[2] = {};
#pragma unroll
        for (int k = 0; k < N; k++) {
            float values[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unpack(rounded[h][k], values[h]);
#pragma unroll
                for (int i = 0; i < 4; i++) squares[h] = fmaf(values[h][i], values[h][i], squares[h]);
            }
            Fragment f;
#pragma unroll
            for (int tile = 0; tile < NTILES; tile++) {
                const int m = tile * 8 + g;
                const float4 v = m < LOGITS ? reinterpret_cast<const float4*>(s.fn[m * N + k])[(warp * 4 + q) ^ ((m & 1) << 2)]
                                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                f.of[tile][0] = v.x; f.of[tile][1] = v.y; f.of[tile][2] = v.z; f.of[tile][3] = v.w;
            }
            add_products(fresh, values, f);
            if (k % 2 == 1 || k == N - 1) {
                add_fresh(dots, fresh);
#pragma unroll
                for (int tile = 0; tile < NTILES; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) fresh[tile][i] = 0.0f;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            squares[h] += __shfl_xor_sync(0xffffffffu, squares[h], 1);
            squares[h] += __shfl_xor_sync(0xffffffffu, squares[h], 2);
        }
        if constexpr (HAS_POST) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        // Half of the warps leave their sums, the others add theirs, then all add up the eight.
        const int half = warp % (MIXERS / 2);
        if (warp >= MIXERS / 2) {
#pragma unroll
            for (int i = 0; i < NTILES * 4; i++) s.dots[half][i][place_of(i, lane)] = dots[i / 4][i % 4];
            if (q < 2) s.squares[half][g + 8 * q] = q == 0 ? squares[0] : squares[1];
        }
        mixers_meet();
        if constexpr (HAS_POST) write_streams(t);
        if (warp < MIXERS / 2) {
#pragma unroll
            for (int i = 0; i < NTILES * 4; i++) s.dots[half][i][place_of(i, lane)] += dots[i / 4][i % 4];
            if (q < 2) s.squares[half][g + 8 * q] += q == 0 ? squares[0] : squares[1];
        }
        mixers_meet();
        const int token = warp, m = lane, i = m / 8 * 4 + token / 8 * 2 + m % 2;
        if (m > LOGITS) return;
        const float* from = m == LOGITS ? &s.squares[0][token] : &s.dots[0][i][place_of(i, token % 8 * 4 + m % 8 / 2)];
        const int stride = m == LOGITS ? TOKENS_OF_TILE : NTILES * 4 * 32;
        float sum = from[0];
#pragma unroll
        for (int w = 1; w < MIXERS / 2; w++) sum += from[w * stride];
        if (m < N) s.pre[token * PRE + m] = sum;
        if (m == LOGITS) s.pre[token * PRE + N] = sum;
        if (!HEAD && m >= N) s.rest[token][m - N] = sum;
    }

    // Step 3, behind a barrier: warp r sends to block r what all need, and token r's other sums to the token's owner.
    __device__ __forceinline__ void send_sums(int t) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const bool pre = lane < PRE_SENT / 4;
        const int chunk = pre ? lane : lane - PRE_SENT / 4;
        if (pre ? warp >= CLUSTER : chunk >= REST_SENT / 4) return;
        const int to = pre ? warp : warp % CLUSTER;
        const float* from = pre ? s.pre + chunk * 4 : s.rest[warp] + chunk * 4;
        const void* at = pre ? &s.pre_of[t & 1][rank][chunk * 4] : &s.rest_of[t & 1][warp / CLUSTER][rank][chunk * 4];
        const void* barrier = pre ? &s.pre_here[t & 1] : &s.rest_here[t & 1];
        const float4 v = *reinterpret_cast<const float4*>(from);
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     :: "r"(address_in(to, at)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(address_in(to, barrier)) : "memory");
    }

    // Step 4 for one token, a warp: the collapsed row, and its squares sent to all blocks.
    __device__ __forceinline__ void collapse_token(int t, float* row) const {
        constexpr int OF_HALF = (N + 1) / 2;
        const int token = threadIdx.x / 32, lane = threadIdx.x % 32, from = lane % 16, first = lane / 16 * OF_HALF;
        await(&s.pre_here[t & 1], t >> 1);
        const float* sums = &s.pre_of[t & 1][from][token * PRE];
        const float total = half_sum(from < CLUSTER ? sums[N] : 0.0f);
        const float inverse = rsqrtf(total / (N * HIDDEN) + a.rms_eps) * s.scale;
        float pre[2 * OF_HALF];
#pragma unroll
        for (int k = 0; k < OF_HALF; k++) {
            const int mine = first + k;
            const float sum = half_sum(from < CLUSTER && mine < N ? sums[mine] : 0.0f);
            const float here = sigmoid(fmaf(sum, inverse, mine < N ? s.parameters[mine] : 0.0f)) + a.pre_eps;
            const float there = __shfl_xor_sync(0xffffffffu, here, 16);
            pre[k] = first == 0 ? here : there;
            pre[OF_HALF + k] = first == 0 ? there : here;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) row[i] = 0.0f;
        const char* streams = s.slots[t % SLOTS] + token * TOKEN_BYTES + lane * 16;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float values[8];
            unpack(load<false, NEW, 8>(reinterpret_cast<const NEW*>(streams + k * ROW_BYTES)), values);
#pragma unroll
            for (int i = 0; i < 8; i++) row[i] = fmaf(pre[k], values[i], row[i]);
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(row[i], row[i], squares);
        squares = warp_sum(squares);
        if constexpr (!HEAD) await(&s.rest_taken[t & 1], t >> 1);
        if (lane < CLUSTER)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                         :: "r"(address_in(lane, &s.squares_of[t & 1][rank][token])), "f"(squares),
                            "r"(address_in(lane, &s.squares_here[t & 1])) : "memory");
    }

    // Step 2 for one token, a warp. `norm`: the norm's weights of the lane's columns.
    __device__ __forceinline__ void write_row_of(int t, const float* row, const Pack<NORM, 8>& norm) const {
        const int token = threadIdx.x / 32, lane = threadIdx.x % 32, from = lane % 16;
        const Turn of = turn(t);
        await(&s.squares_here[t & 1], t >> 1);
        const float squares = half_sum(from < CLUSTER ? s.squares_of[t & 1][from][token] : 0.0f);
        if (token >= of.live) return;
        float out[8];
        if constexpr (HAS_NORM) {
            const float factor = rsqrtf(squares / HIDDEN + a.norm_eps);
            unpack(norm, out);
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] *= row[i] * factor;
        } else
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = row[i];
        Pack<OUT, 8> result;
        pack_into(out, result);
        store(a.layer_input + (of.first + token) * HIDDEN + rank * COLS + lane * 8, result);
    }

    // The further warp: `post` and `comb` of the block's own tokens, those of a few turns at a time.
    __device__ __forceinline__ void expand_owned() const {
        const int lane = threadIdx.x % 32, owned = owned_by(rank);
        const float post_scale = number(a.scale + 1), comb_scale = number(a.scale + 2);
        for (int t = 0; t < turns; t++) {
            await(&s.rest_here[t & 1], t >> 1);
            const int gathered = t % GATHERED;
            for (int i = lane; i < owned * REST; i += 32) {
                const float* from = &s.rest_of[t & 1][i / REST][0][i % REST];
                float sum = from[0];
#pragma unroll
                for (int r = 1; r < CLUSTER; r++) sum += from[r * REST_SENT];
                s.own[gathered * OWNED + i / REST][i % REST] = sum;
            }
            __syncwarp();
            if (lane == 0) {
                expect(&s.rest_here[t & 1], owned * CLUSTER * REST_SENT * 4);
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&s.rest_taken[t & 1])) : "memory");
            }
            if (gathered < GATHERED - 1 && t < turns - 1) continue;
            const Turn of = turn(t - gathered + lane / OWNED);
            const int token = rank + lane % OWNED * CLUSTER;
            if (lane / OWNED <= gathered && token < of.live)
                expand_token(a, of.first + token, s.own[lane], s.parameters + N, post_scale, comb_scale);
            __syncwarp();
        }
    }
};

// A block of a cluster; `clusters` of them share the tiles in turn.
extern "C" __global__ void __launch_bounds__(MIXING + (HEAD ? 0 : 32), 1) mhc_clusters(const Arguments a) {
    extern __shared__ __align__(128) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const i64 tiles = (a.tokens + TOKENS_OF_TILE - 1) / TOKENS_OF_TILE;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const Block block{a, s, (int)(blockIdx.x % CLUSTER), cluster, clusters, (int)((tiles - cluster + clusters - 1) / clusters)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) make_barrier(&s.loaded[i]);
        for (int i = 0; i < 2; i++) {
            make_barrier(&s.pre_here[i]); make_barrier(&s.rest_here[i]); make_barrier(&s.squares_here[i]); make_barrier(&s.rest_taken[i]);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < 2; i++) {
            expect(&s.pre_here[i], CLUSTER * PRE_SENT * 4);
            expect(&s.squares_here[i], CLUSTER * TOKENS_OF_TILE * 4);
            if (!HEAD) expect(&s.rest_here[i], owned_by(block.rank) * CLUSTER * REST_SENT * 4);
        }
    }
    for (int i = threadIdx.x; i < LOGITS * N * (COLS / 32); i += blockDim.x)
        asm volatile("prefetch.global.L2 [%0];" :: "l"(a.fn + (i64)(i / (COLS / 32)) * HIDDEN + block.rank * COLS + i % (COLS / 32) * 32));
    wait_for_inputs();
    __syncthreads();
    const bool mixer = threadIdx.x < MIXING;
    if (mixer)
        for (int t = 0; t < SLOTS; t++) block.ask_for(t);
    if (threadIdx.x == 0) s.scale = number(a.scale);
    for (int i = threadIdx.x; i < LOGITS; i += blockDim.x) s.parameters[i] = number(a.base + i);
    for (int i = threadIdx.x; i < LOGITS * N * (COLS / 4); i += blockDim.x) {
        const int line = i / (COLS / 4), chunk = i % (COLS / 4);
        float v[4];
        unpack(load<false, FN, 4>(a.fn + (i64)line * HIDDEN + block.rank * COLS + chunk * 4), v);
        reinterpret_cast<float4*>(s.fn[line])[chunk ^ ((line / N & 1) << 2)] = make_float4(v[0], v[1], v[2], v[3]);
    }
    Pack<X, 4> added[2] = {};
    if (HAS_POST && mixer) {
        block.keep_weight(0, block.weight_of(0));
        block.load_added(0, added);
    }
    cluster_meets();  // every block's barriers are there
    if (mixer) {
        Pack<NORM, 8> norm = {};
        if constexpr (HAS_NORM) norm = load<false, NORM, 8>(a.norm_weight + block.rank * COLS + threadIdx.x % 32 * 8);
        float row[8];
        for (int t = 0; t < block.turns + 2; t++) {
            float weight = 0.0f;
            if (t < block.turns) {
                if constexpr (HAS_POST) weight = block.weight_of(t + 1);
                block.mix(t, added);
                if constexpr (HAS_POST) block.load_added(t + 1, added);
            }
            if (t >= 2) {
                block.write_row_of(t - 2, row, norm);
                if (threadIdx.x == 0) expect(&s.squares_here[t & 1], CLUSTER * TOKENS_OF_TILE * 4);
            }
            mixers_meet();  // the sums are in `pre` and `rest`; the squares of t - 2 have been read
            if (t < block.turns) block.send_sums(t);
            if (t >= 1 && t <= block.turns) block.collapse_token(t - 1, row);
            if constexpr (HAS_POST) block.keep_weight(t + 1, weight);
            // One group of writes may be under way: that of this turn. The slot of the turn before is read by nobody then.
            if constexpr (HAS_POST) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            mixers_meet();
            if (t >= 1 && t <= block.turns && threadIdx.x == 0) expect(&s.pre_here[(t - 1) & 1], CLUSTER * PRE_SENT * 4);
            if (t >= 1) block.ask_for(t + 2);
        }
        if constexpr (HAS_POST) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    } else if constexpr (!HEAD) block.expand_owned();
    cluster_meets();  // nobody sends to a block that has left
}
