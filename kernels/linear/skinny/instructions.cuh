// What `skinny.cuh` asks of the hardware. `tests/kernels/emulated.h` has the same names for a CPU.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

// Shared memory as the instructions below name it.
__device__ __forceinline__ u32 address_of(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Sixteen bytes from global to shared memory, of which the first `bytes` (0 or 16) are read and the rest is zero.
__device__ __forceinline__ void copy(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last `PENDING` groups of this thread have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// Four matrices of 8 rows of 16 bytes, the address of a row from each lane, and two of them.
__device__ __forceinline__ void load_four(u32 from, u32* to) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_two(u32 from, u32* to) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}

// c[16, 8] += a[16, 16] * b[16, 8]
__device__ __forceinline__ void multiply_add(float* c, const u32* a, const u32* b, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add(float* c, const u32* a, const u32* b, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#if LOW
// Four float8 numbers (e4m3) as float16, which has them all: the first two, and the other two.
__device__ __forceinline__ void widen(u32 four, u32& low, u32& high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high) : "r"(four));
}
#endif

__device__ __forceinline__ float number(bf16 value) { return __int_as_float((int)value.bits << 16); }
__device__ __forceinline__ float number(f16 value) {
    float wide;
    asm("{.reg .f16 a; mov.b16 a, %1; cvt.f32.f16 %0, a;}" : "=f"(wide) : "h"(value.bits));
    return wide;
}

// The nearest number, even among equals.
__device__ __forceinline__ void round_into(float value, bf16* to) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(value));
}
__device__ __forceinline__ void round_into(float value, f16* to) {
    asm("{.reg .f16 a; cvt.rn.f16.f32 a, %1; mov.b16 %0, a;}" : "=h"(to->bits) : "f"(value));
}

// Brings the line of memory that `at` is in into L2, from where it is read as it is by then.
__device__ __forceinline__ void bring_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }

// Blocks start before the launch before has ended. What it wrote may be read from here on. The next launch may start
// as well: it waits for the end of this one in the same way.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// All `THREADS_OF_PART` threads of a part of the block, the warps with number `part` along the columns, come here.
template <int THREADS_OF_PART>
__device__ __forceinline__ void meet_in_part(int part) {
    if constexpr (THREADS_OF_PART == 32) __syncwarp();
    else asm volatile("bar.sync %0, %1;" :: "r"(1 + part), "n"(THREADS_OF_PART) : "memory");
}

// Every thread of the cluster comes here before one of them goes on; what each has written is seen by all.
__device__ __forceinline__ void meet_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The number that lies at `at` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float load_from_block(const float* at, int rank) {
    float value = 0.0f;
#if __CUDA_ARCH__ >= 900
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(at)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
#endif
    return value;
}

// By one thread after a barrier behind the block's last write: whether all other `parties` were here before. What they
// wrote is seen then. The counter is zero before the first and after the last of them; nobody waits.
__device__ __forceinline__ bool is_last(u32* counter, u32 parties) {
    u32 before;
    __threadfence();
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(parties - 1) : "memory");
    __threadfence();
    return before == parties - 1;
}

// A number that another block of this launch wrote.
__device__ __forceinline__ float load_written(const float* at) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}
