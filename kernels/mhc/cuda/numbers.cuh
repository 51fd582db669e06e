// Numbers as they lie in memory and in registers, and the arithmetic that all parts of the kernel share.
#pragma once

typedef unsigned int u32;
typedef long long i64;

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

__device__ __forceinline__ float as_float(u32 bits) { return __int_as_float((int)bits); }
__device__ __forceinline__ u32 as_bits(float value) { return (u32)__float_as_int(value); }

// V numbers of type T as they lie in memory.
template <class T, int V>
struct Pack { u32 words[sizeof(T) * V / 4]; };

template <class T, int V>
__device__ __forceinline__ Pack<T, V> zeros() {
    Pack<T, V> pack;
#pragma unroll
    for (u32& word : pack.words) word = 0;
    return pack;
}

// `SHARED` data is written by other blocks of this launch and read past L1, which may hold an older line.
template <bool SHARED, class T, int V>
__device__ __forceinline__ Pack<T, V> load(const T* from) {
    Pack<T, V> pack;
    constexpr int words = sizeof(T) * V / 4;
    if constexpr (words == 2) {
        uint2 v;
        if constexpr (SHARED) asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
        else v = *reinterpret_cast<const uint2*>(from);
        pack.words[0] = v.x; pack.words[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < words; i += 4) {
            uint4 v;
            const u32* at = reinterpret_cast<const u32*>(from) + i;
            if constexpr (SHARED)
                asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
            else v = *reinterpret_cast<const uint4*>(at);
            pack.words[i] = v.x; pack.words[i + 1] = v.y; pack.words[i + 2] = v.z; pack.words[i + 3] = v.w;
        }
    }
    return pack;
}

// For what is used for the last time: it leaves the caches first.
template <class T, int V>
__device__ __forceinline__ Pack<T, V> load_last(const T* from) {
    Pack<T, V> pack;
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * V / 4; i += 4)
        asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(pack.words[i]), "=r"(pack.words[i + 1]), "=r"(pack.words[i + 2]), "=r"(pack.words[i + 3])
                     : "l"(reinterpret_cast<const u32*>(from) + i) : "memory");
    return pack;
}

template <class T, int V>
__device__ __forceinline__ void store_last(T* to, const Pack<T, V>& pack) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * V / 4; i += 4)
        asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};"
                     :: "l"(reinterpret_cast<u32*>(to) + i), "r"(pack.words[i]), "r"(pack.words[i + 1]),
                        "r"(pack.words[i + 2]), "r"(pack.words[i + 3]) : "memory");
}

template <class T, int V>
__device__ __forceinline__ void store(T* to, const Pack<T, V>& pack) {
    constexpr int words = sizeof(T) * V / 4;
    if constexpr (words == 2) *reinterpret_cast<uint2*>(to) = make_uint2(pack.words[0], pack.words[1]);
    else
#pragma unroll
        for (int i = 0; i < words; i += 4)
            reinterpret_cast<uint4*>(to)[i / 4] =
                make_uint4(pack.words[i], pack.words[i + 1], pack.words[i + 2], pack.words[i + 3]);
}

template <int V>
__device__ __forceinline__ void unpack(const Pack<float, V>& pack, float* to) {
#pragma unroll
    for (int i = 0; i < V; i++) to[i] = as_float(pack.words[i]);
}
template <int V>
__device__ __forceinline__ void unpack(const Pack<bf16, V>& pack, float* to) {
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        to[2 * i] = as_float(pack.words[i] << 16);
        to[2 * i + 1] = as_float(pack.words[i] & 0xffff0000u);
    }
}
template <int V>
__device__ __forceinline__ void unpack(const Pack<f16, V>& pack, float* to) {
#pragma unroll
    for (int i = 0; i < V / 2; i++)
        asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
            : "=f"(to[2 * i]), "=f"(to[2 * i + 1]) : "r"(pack.words[i]));
}

template <int V>
__device__ __forceinline__ void pack_into(const float* from, Pack<float, V>& pack) {
#pragma unroll
    for (int i = 0; i < V; i++) pack.words[i] = as_bits(from[i]);
}
template <int V>
__device__ __forceinline__ void pack_into(const float* from, Pack<bf16, V>& pack) {
#pragma unroll
    for (int i = 0; i < V / 2; i++)
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pack.words[i]) : "f"(from[2 * i]), "f"(from[2 * i + 1]));
}
template <int V>
__device__ __forceinline__ void pack_into(const float* from, Pack<f16, V>& pack) {
#pragma unroll
    for (int i = 0; i < V / 2; i++)
        asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pack.words[i]) : "f"(from[2 * i]), "f"(from[2 * i + 1]));
}

__device__ __forceinline__ float number(const float* at) { return *at; }
__device__ __forceinline__ float number(const bf16* at) { return as_float((u32)at->bits << 16); }
__device__ __forceinline__ float number(const f16* at) {
    float value;
    asm("{.reg .f16 a; mov.b16 a, %1; cvt.f32.f16 %0, a;}" : "=f"(value) : "h"(at->bits));
    return value;
}

// `value`, rounded to the nearest number of type T.
template <class T>
__device__ __forceinline__ float rounded(float value) {
    float pair[2] = {value, value};
    Pack<T, 2> pack;
    pack_into(pair, pack);
    unpack(pack, pair);
    return pair[0];
}

// To one unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// e^x to about two units in the last place; ex2 alone would lose |x| units, which Sinkhorn passes on.
__device__ __forceinline__ float exponential(float x) {
    const float log2_e = 1.4426950216293335f, rest = 1.9259629911266175e-8f, ln_2 = 0.6931471805599453f;
    const float product = x * log2_e;
    const float lost = fmaf(x, log2_e, -product) + x * rest;
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(product));
    // Far out there is nothing to add, and with an infinite x what is lost would not be a number.
    return fabsf(product) > 256.0f ? power : power * (1.0f + lost * ln_2);
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

// c[16, 8] += a[16, 8] * b[8, 8], operands cut to tf32 by the hardware.
__device__ __forceinline__ void multiply_add(float* c, const float* a, const float* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(as_bits(a[0])), "r"(as_bits(a[1])), "r"(as_bits(a[2])), "r"(as_bits(a[3])),
          "r"(as_bits(b[0])), "r"(as_bits(b[1])));
}

__device__ __forceinline__ float high(float x) { return as_float(as_bits(x) & 0xffffe000u); }

template <class T> constexpr bool EXACT = sizeof(T) == 2;  // a tf32 number holds every bfloat16 and float16 one

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__device__ __forceinline__ float load_written(const float* at) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}
