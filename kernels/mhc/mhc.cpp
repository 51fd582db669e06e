// mHC on the CPU: one call does `post`, `pre` or both. The formulas and symbols are those of reference.py.
//
// Compiled once for each number of streams: the caller puts `#define STREAMS n` in front of this text. Plain C++17 with
// the vector extensions of GCC and Clang; no header of PyTorch, so it compiles in about a second.
//
// Three loops, each of which divides among the threads:
//   1. `mix`      a block of tokens times a slice of the hidden axis: the new residual, written out, and from the rows
//                 just made (still in cache) the partial dot products with `fn` and the partial sum of squares;
//   2. `weigh`    one token to a vector lane: sums of the partials, sigmoids and Sinkhorn, all in registers;
//   3. `collapse` one token: weighted sum of its streams and RMSNorm.
// Slices depend on the hidden size alone and are summed in order, so a row's result depends neither on the other rows
// nor on the number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

constexpr int n = STREAMS;
constexpr int M = (2 + n) * n;

// Lanes of one vector, and the tile of dot products that fills the register file: TOKENS * ROWS accumulators.
#if defined(__AVX512F__)
constexpr int LANES = 16, TOKENS = 4, ROWS = 6;
#else
constexpr int LANES = 8, TOKENS = 2, ROWS = 4;
#endif

// Width of a slice. `fn`'s part of it (196 KB at four streams) stays in L2 while the token groups pass by.
constexpr int SLICE = 512;

// Tokens that share a pass over `fn`. Their rows (2 MB at hidden 4096, in and out) are visited slice by slice, so they
// must stay within reach of the caches and of the TLB: all tokens of a long batch at once took twice as long.
constexpr int BLOCK = 16;

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef float quad __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

// Filled by cpp.py with struct.pack, eight bytes a field, in this order. Null `x`: no `post`; null `fn`: no `pre`.
struct Call {
    const void* x;
    const void* residual;
    const float* post;
    const float* comb;
    const float* fn;
    const float* scale;
    const float* base;
    const float* norm_weight;
    void* new_residual;
    void* layer_input;
    float* post_out;
    float* comb_out;
    int64_t x_dtype, residual_dtype, new_residual_dtype, layer_input_dtype;
    int64_t mixing_dtype;  // that `post` and `comb` are rounded to before they are multiplied
    int64_t tokens, hidden, iters, threads;
    double rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps;

    int64_t slices() const { return (hidden + SLICE - 1) / SLICE; }
    int64_t padded_tokens() const { return (tokens + LANES - 1) / LANES * LANES; }
    const void* streams() const { return x ? new_residual : residual; }
    int64_t streams_dtype() const { return x ? new_residual_dtype : residual_dtype; }
};

inline floats splat(float value) { return value - floats{}; }

inline floats widen(halves bits) {
    words wide = __builtin_convertvector(bits, words) << 16;
    floats result;
    std::memcpy(&result, &wide, sizeof(result));
    return result;
}

// To the nearest bfloat16, ties to even; a NaN stays a NaN.
inline halves narrow(floats value) {
    words bits;
    std::memcpy(&bits, &value, sizeof(bits));
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector(value == value ? rounded : quiet, halves);
}

// Between a pointer and a register: LANES elements, or the first `count` when those are fewer. The constant size
// makes the common case one instruction.
template <typename Vector>
inline Vector read_lanes(const void* from, int64_t count) {
    constexpr int64_t size = sizeof(Vector) / LANES;
    Vector result = {};
    if (count >= LANES) std::memcpy(&result, from, sizeof(Vector));
    else std::memcpy(&result, from, count * size);
    return result;
}

template <typename Vector>
inline void write_lanes(void* to, int64_t count, Vector value) {
    constexpr int64_t size = sizeof(Vector) / LANES;
    if (count >= LANES) std::memcpy(to, &value, sizeof(Vector));
    else std::memcpy(to, &value, count * size);
}

// Elements from `offset` on, in float32; the lanes behind `count` are zero.
inline floats read(const void* source, int64_t dtype, int64_t offset, int64_t count) {
    if (dtype == BFLOAT16) return widen(read_lanes<halves>(static_cast<const uint16_t*>(source) + offset, count));
    return read_lanes<floats>(static_cast<const float*>(source) + offset, count);
}

// Writes `value` in `dtype` and returns it as rounded to that dtype.
inline floats write(void* target, int64_t dtype, int64_t offset, int64_t count, floats value) {
    if (dtype == BFLOAT16) {
        halves bits = narrow(value);
        write_lanes(static_cast<uint16_t*>(target) + offset, count, bits);
        return widen(bits);
    }
    write_lanes(static_cast<float*>(target) + offset, count, value);
    return value;
}

// `count` weights of `post`, as they are multiplied: rounded to `dtype`.
inline void read_weights(const float* source, int64_t dtype, int64_t count, float* weights) {
    for (int64_t i = 0; i < count; i += LANES) {
        const floats value = read_lanes<floats>(source + i, count - i);
        write_lanes(weights + i, count - i, dtype == BFLOAT16 ? widen(narrow(value)) : value);
    }
}

inline float sum(floats value) {
    quad parts[LANES / 4];
    std::memcpy(parts, &value, sizeof(value));
    quad total = parts[0];
    for (int part = 1; part < LANES / 4; part++) total += parts[part];
    return (total[0] + total[2]) + (total[1] + total[3]);
}

// e^x to about one unit in the last place (the polynomial is that of Cephes' expf); results stay finite.
inline floats exponential(floats x) {
    const floats highest = splat(88.3f), lowest = splat(-87.3f);
    x = x > highest ? highest : x;
    x = x < lowest ? lowest : x;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    floats shifted = x * 1.44269504088896341f + to_integer;
    floats power = shifted - to_integer;
    floats r = x - power * 0.693359375f + power * 2.12194440e-4f;
    floats p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
                1.6666665459e-1f) * r + 5.0000001201e-1f;
    ints exponent;
    std::memcpy(&exponent, &shifted, sizeof(exponent));
    exponent = (exponent + 127) << 23;
    floats scale;
    std::memcpy(&scale, &exponent, sizeof(scale));
    return (r * r * p + r + 1.0f) * scale;
}

inline floats sigmoid(floats x) { return 1.0f / (1.0f + exponential(-x)); }

inline floats inverse_root(floats x) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = 1.0f / std::sqrt(x[lane]);
    return x;
}

// ---------------------------------------------------------------------------------------------------- 1. mix

typedef float Rows[n][SLICE];  // the streams of one token in one slice, padded with zeros to whole vectors

// The streams of one token between `begin` and `begin + width`, after `post` where there is one; into `rows` as well
// unless that is null. Returns the sum of squares.
float mix_streams(const Call& call, int64_t token, int64_t begin, int64_t width, Rows* rows) {
    const int64_t first = token * n * call.hidden + begin;
    float post[n], comb[n * n];
    if (call.x) {
        read_weights(call.post + token * n, call.mixing_dtype, n, post);
        read_weights(call.comb + token * n * n, call.mixing_dtype, n * n, comb);
    }
    floats squares = {};
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t count = width - d;
        floats old[n];
        for (int j = 0; j < n; j++)
            old[j] = read(call.residual, call.residual_dtype, first + j * call.hidden + d, count);
        if (call.x) {
            const floats x = read(call.x, call.x_dtype, token * call.hidden + begin + d, count);
            for (int k = 0; k < n; k++) {
                floats mixed = post[k] * x;
                for (int j = 0; j < n; j++) mixed += comb[j * n + k] * old[j];
                mixed = write(call.new_residual, call.new_residual_dtype, first + k * call.hidden + d, count, mixed);
                squares += mixed * mixed;
                if (rows) write_lanes((*rows)[k] + d, LANES, mixed);
            }
        } else {
            for (int k = 0; k < n; k++) {
                squares += old[k] * old[k];
                write_lanes((*rows)[k] + d, LANES, old[k]);
            }
        }
    }
    return sum(squares);
}

// One slice of `fn`: element (m, k, d) is at data[(m * n + k) * stride + d].
struct Weights {
    const float* data;
    int64_t stride, width;
};

// Dot products of T tokens with R rows of `fn`, starting at row `m`, within one slice.
template <int T, int R>
void dots(const Weights& fn, const Rows* rows, int m, float* partials, int64_t stride) {
    floats total[T][R] = {};
    for (int k = 0; k < n; k++) {
        const float* from = fn.data + (m * n + k) * fn.stride;
        for (int64_t d = 0; d < fn.width; d += LANES) {
            floats weight[R];
            for (int r = 0; r < R; r++) weight[r] = read_lanes<floats>(from + r * n * fn.stride + d, fn.width - d);
            for (int t = 0; t < T; t++) {
                const floats value = read_lanes<floats>(rows[t][k] + d, LANES);
                for (int r = 0; r < R; r++) total[t][r] += value * weight[r];
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) partials[(m + r) * stride + t] = sum(total[t][r]);
}

template <int T>
void mix(const Call& call, int64_t token, int64_t slice, const Weights& fn, float* partials) {
    const int64_t stride = call.padded_tokens();
    alignas(64) Rows rows[T];
    float squares[T];
    for (int t = 0; t < T; t++) squares[t] = mix_streams(call, token + t, slice * SLICE, fn.width, &rows[t]);

    float* target = partials + slice * (M + 1) * stride + token;
    int m = 0;
    for (; m + ROWS <= M; m += ROWS) dots<T, ROWS>(fn, rows, m, target, stride);
    if constexpr (M % ROWS != 0)
        for (; m < M; m++) dots<T, 1>(fn, rows, m, target, stride);
    for (int t = 0; t < T; t++) target[M * stride + t] = squares[t];
}

template <int T = TOKENS>
void mix_group(const Call& call, int64_t token, int64_t slice, const Weights& fn, float* partials) {
    if constexpr (T > 1)
        if (call.tokens - token < T) return mix_group<T - 1>(call, token, slice, fn, partials);
    mix<T>(call, token, slice, fn, partials);
}

void mix_block(const Call& call, int64_t first, int64_t slice, float* partials) {
    const int64_t end = call.tokens - first < BLOCK ? call.tokens : first + BLOCK;
    const int64_t begin = slice * SLICE;
    const Weights fn = {call.fn + begin, call.hidden, call.hidden - begin < SLICE ? call.hidden - begin : SLICE};
    for (int64_t token = first; token < end; token += TOKENS) mix_group(call, token, slice, fn, partials);
}

// -------------------------------------------------------------------------------------------------- 2. weigh

template <int Step>  // Step n: columns (the first index is summed); step 1: rows
inline void normalise(floats* comb, float eps) {
    for (int line = 0; line < n; line++) {
        floats* first = comb + line * (Step == n ? 1 : n);
        floats total = first[0];
        for (int i = 1; i < n; i++) total += first[i * Step];
        const floats inverse = 1.0f / (total + eps);
        for (int i = 0; i < n; i++) first[i * Step] *= inverse;
    }
}

inline void sinkhorn(floats* comb, int64_t iters, float eps) {
    for (int i = 0; i < n; i++) {
        floats* row = comb + i * n;
        floats largest = row[0], total = {};
        for (int j = 1; j < n; j++) largest = row[j] > largest ? row[j] : largest;
        for (int j = 0; j < n; j++) total += row[j] = exponential(row[j] - largest);
        for (int j = 0; j < n; j++) row[j] = row[j] / total + eps;
    }
    if (iters >= 1) normalise<n>(comb, eps);
    for (int64_t i = 1; i < iters; i++) {
        normalise<1>(comb, eps);
        normalise<n>(comb, eps);
    }
}

// LANES tokens from `token` on: writes `post` and `comb`, and `pre` as [tokens, n].
void weigh(const Call& call, int64_t token, const float* partials, float* pre) {
    const int64_t count = call.tokens - token < LANES ? call.tokens - token : LANES;
    const int64_t stride = call.padded_tokens();
    floats mixes[M + 1] = {};
    for (int64_t slice = 0; slice < call.slices(); slice++)
        for (int m = 0; m <= M; m++)
            mixes[m] += read_lanes<floats>(partials + (slice * (M + 1) + m) * stride + token, count);

    const floats inverse_rms = inverse_root(mixes[M] / float(n * call.hidden) + float(call.rms_eps));
    for (int m = 0; m < M; m++)
        mixes[m] = mixes[m] * inverse_rms * call.scale[m < n ? 0 : m < 2 * n ? 1 : 2] + call.base[m];
    for (int m = 0; m < n; m++) {
        mixes[m] = sigmoid(mixes[m]) + float(call.pre_eps);
        mixes[n + m] = float(call.post_mult) * sigmoid(mixes[n + m]);
    }
    sinkhorn(mixes + 2 * n, call.iters, float(call.sinkhorn_eps));

    for (int64_t t = 0; t < count; t++) {
        for (int i = 0; i < n; i++) pre[(token + t) * n + i] = mixes[i][t];
        for (int i = 0; i < n; i++) call.post_out[(token + t) * n + i] = mixes[n + i][t];
        for (int i = 0; i < n * n; i++) call.comb_out[(token + t) * n * n + i] = mixes[2 * n + i][t];
    }
}

// ----------------------------------------------------------------------------------------------- 3. collapse

void collapse(const Call& call, int64_t token, const float* pre, float* row) {
    const int64_t first = token * n * call.hidden;
    floats squares = {};
    for (int64_t d = 0; d < call.hidden; d += LANES) {
        floats total = {};
        for (int i = 0; i < n; i++)
            total += pre[token * n + i] *
                     read(call.streams(), call.streams_dtype(), first + i * call.hidden + d, call.hidden - d);
        squares += total * total;
        write_lanes(row + d, LANES, total);
    }
    float factor = 1;
    if (call.norm_weight) factor = 1.0f / std::sqrt(sum(squares) / float(call.hidden) + float(call.norm_eps));
    for (int64_t d = 0; d < call.hidden; d += LANES) {
        floats value = read_lanes<floats>(row + d, LANES);
        if (call.norm_weight) value = value * factor * read(call.norm_weight, FLOAT32, d, call.hidden - d);
        write(call.layer_input, call.layer_input_dtype, token * call.hidden + d, call.hidden - d, value);
    }
}

}  // namespace

extern "C" void mhc(const char* bytes) {
    Call call;
    std::memcpy(&call, bytes, sizeof(call));
    if (!call.fn) {
#pragma omp parallel for num_threads(call.threads) if (call.threads > 1) schedule(static)
        for (int64_t token = 0; token < call.tokens; token++) mix_streams(call, token, 0, call.hidden, nullptr);
        return;
    }
    const int64_t slices = call.slices();
    std::unique_ptr<float[]> partials(new float[slices * (M + 1) * call.padded_tokens()]);
    std::unique_ptr<float[]> pre(new float[call.tokens * n]);
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
    {
#pragma omp for collapse(2) schedule(static)
        for (int64_t first = 0; first < call.tokens; first += BLOCK)
            for (int64_t slice = 0; slice < slices; slice++) mix_block(call, first, slice, partials.get());
#pragma omp for schedule(static)
        for (int64_t token = 0; token < call.tokens; token += LANES) weigh(call, token, partials.get(), pre.get());
        std::unique_ptr<float[]> row(new float[call.hidden + LANES]);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < call.tokens; token++) collapse(call, token, pre.get(), row.get());
    }
}
