// A consumer that writes `post` and `comb` of a few tokens.
#pragma once
#include "launch.cuh"

// The sums of `count` tokens from `first` on but for the first N of each, to `sums` [TOGETHER, OWN]. A lane a sum, one or
// several warps a token.
template <int OWN>
__device__ __forceinline__ void add_up_rest(const Arguments& a, i64 first, int count, float* sums) {
    constexpr int SHARING = WARPS / TOGETHER;
    constexpr int ROUNDS = (SPLITS + SHARING - 1) / SHARING;
    constexpr int BATCH = ROUNDS < 16 ? ROUNDS : 16;  // loads in flight
    const int warp = threadIdx.x / 32, of = warp / SHARING, party = warp % SHARING;
    float* parts = sums + TOGETHER * OWN;  // [TOGETHER, SHARING, OWN]
    if (of < count)
        for (int m = threadIdx.x % 32; m < OWN; m += 32) {
            const float* at = a.partials + (first + of) * SPLITS * STRIDE + (m + 1 < OWN ? N + m : SQUARES_AGAIN);
            float sum = 0.0f;
#pragma unroll 1
            for (int r = 0; r < ROUNDS; r += BATCH) {
                float loaded[BATCH];
                bool missing;
                do {
                    missing = false;
#pragma unroll
                    for (int i = 0; i < BATCH; i++) {
                        const int split = (r + i) * SHARING + party;
                        loaded[i] = split < SPLITS ? load_sum(at + split * STRIDE) : 0.0f;
                    }
#pragma unroll
                    for (int i = 0; i < BATCH; i++) missing |= SIGNAL && absent(loaded[i]);
                } while (missing);
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const int split = (r + i) * SHARING + party;
                    if (SIGNAL && split < SPLITS) take_away(at + split * STRIDE);
                    sum += loaded[i];
                }
            }
            (SHARING == 1 ? sums + of * OWN : parts + (of * SHARING + party) * OWN)[m] = sum;
        }
    __syncthreads();
    if constexpr (SHARING > 1) {
        for (int i = threadIdx.x; i < count * OWN; i += THREADS) {
            const float* at = parts + i / OWN * SHARING * OWN + i % OWN;
            float sum = at[0];
#pragma unroll
            for (int w = 1; w < SHARING; w++) sum += at[w * OWN];
            sums[i] = sum;
        }
        __syncthreads();
    }
}

// 1 / x of N sums. The unit for reciprocals takes one every eight cycles, so two share one: 1 / a = b / (a * b).
__device__ __forceinline__ void invert(float* x) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        if (DENORMAL || i + 1 == N) {
            x[i] = 1.0f / x[i];
            if (i + 1 < N) x[i + 1] = 1.0f / x[i + 1];
        } else {
            const float both = reciprocal(x[i] * x[i + 1]), first = x[i + 1] * both;
            x[i + 1] = x[i] * both;
            x[i] = first;
        }
    }
}

template <int STEP>  // N: columns (the first index is summed); 1: rows
__device__ __forceinline__ void normalise(float* comb, float eps) {
    float inverse[N];
#pragma unroll
    for (int line = 0; line < N; line++) {
        const float* first = comb + line * (STEP == N ? 1 : N);
        float total = eps;
        if constexpr (N == 4) total = (first[0] + first[STEP]) + (first[2 * STEP] + (first[3 * STEP] + eps));
        else
#pragma unroll
            for (int i = 0; i < N; i++) total += first[i * STEP];
        inverse[line] = total;
    }
    invert(inverse);
#pragma unroll
    for (int line = 0; line < N; line++)
#pragma unroll
        for (int i = 0; i < N; i++) comb[line * (STEP == N ? 1 : N) + i * STEP] *= inverse[line];
}

template <int LENGTH>
__device__ __forceinline__ void write_row(float* to, const float* from) {
    if constexpr (LENGTH % 4 == 0)
#pragma unroll
        for (int i = 0; i < LENGTH; i += 4)
            *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    else
#pragma unroll
        for (int i = 0; i < LENGTH; i++) to[i] = from[i];
}

__device__ void expand(const Arguments& a, i64 first, int count, int* counter, int index, int parties, float* scratch) {
    constexpr int OWN = LOGITS - N + 1;  // sums of a token that are wanted here: of post, of comb, of the squares
    float* parameters = scratch + TOGETHER * OWN + WARPS * OWN;
    if constexpr (COMBINED) __syncthreads();  // `scratch` may still be read for the part before
    if (threadIdx.x < LOGITS - N) parameters[threadIdx.x] = number(a.base + N + threadIdx.x);
    const float post_scale = number(a.scale + 1), comb_scale = number(a.scale + 2);
    wait(counter);
    add_up_rest<OWN>(a, first, count, scratch);
    if (threadIdx.x == THREADS - 1) leave(counter, index, parties);
    if (threadIdx.x >= count) return;
    const i64 token = first + threadIdx.x;
    const float* sums = scratch + threadIdx.x * OWN;
    const float inverse_rms = rsqrtf(sums[OWN - 1] / (N * HIDDEN) + a.rms_eps);
    const float scale = comb_scale * inverse_rms;
    float matrix[N * N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        float* row = matrix + i * N;
#pragma unroll
        for (int j = 0; j < N; j++) row[j] = fmaf(sums[N + i * N + j], scale, parameters[N + i * N + j]);
        float largest = row[0], total = 0.0f;
#pragma unroll
        for (int j = 1; j < N; j++) largest = fmaxf(largest, row[j]);
#pragma unroll
        for (int j = 0; j < N; j++) total += row[j] = exponential(row[j] - largest);
        // NaN where a logit is NaN, as in eager mode: fmaxf passes it over, the exponential does not.
        const float inverse = reciprocal(total);
#pragma unroll
        for (int j = 0; j < N; j++) row[j] = fmaf(row[j], inverse, a.sinkhorn_eps);
    }
    if constexpr (ITERS >= 1) normalise<N>(matrix, a.sinkhorn_eps);
#pragma unroll 1
    for (int i = 1; i < ITERS; i++) {
        normalise<1>(matrix, a.sinkhorn_eps);
        normalise<N>(matrix, a.sinkhorn_eps);
    }
    float post[N];
#pragma unroll
    for (int i = 0; i < N; i++) post[i] = a.post_mult * sigmoid(fmaf(sums[i] * inverse_rms, post_scale, parameters[i]));
    write_row<N>(a.post + token * N, post);
    write_row<N * N>(a.comb + token * N * N, matrix);
}
