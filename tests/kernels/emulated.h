// The instructions of kernels/linear/skinny/instructions.cuh on a CPU, after the PTX manual, not after the kernel.
//
// Each thread of a block, and of all blocks of a cluster, is a fiber that runs until it has to meet others. Where shared
// memory has not been written it is NaN. Asynchronous copies arrive at once, or as late as the waits allow (`late`).
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
using std::min;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;

struct Copy { u32 to; const void* from; int bytes; };

// Where threads meet.
struct Meeting {
    int expected = 0, here = 0;
    long round = 0;
};

struct Block {
    std::vector<char> memory;
    Meeting all;
    std::vector<Meeting> warps, parts;
    bool ended = false;
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::vector<char> stack;
    bool begun = false, done = false;
    int block, rank, thread;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

struct Machine {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Block> blocks;
    Meeting cluster;
    Fiber* now = nullptr;
    jmp_buf scheduler;
    bool late = false;
    const char* fault = nullptr;
    long steps = 0;  // towards an end: somebody came to a meeting, or ended
    // What the lanes of a warp show each other, by thread number over all blocks.
    std::vector<u32> shown[6];
};
static Machine machine;

static void fail(const char* what) { if (machine.fault == nullptr) machine.fault = what; }

static void pass_on() {
    if (_setjmp(machine.now->at) == 0) _longjmp(machine.scheduler, 1);
}

static void meet(Meeting& at) {
    machine.steps++;
    const long round = at.round;
    if (++at.here == at.expected) {
        at.here = 0;
        at.round++;
    } else {
        while (at.round == round) pass_on();
    }
}

static Block& own_block() { return machine.blocks[machine.now->rank]; }
static int lane_number() { return machine.now->thread % 32; }
// The first lane of the warp among all fibers.
static int warp_start() { return (int)(machine.now->rank * (machine.fibers.size() / machine.blocks.size())) + machine.now->thread / 32 * 32; }
static void meet_in_warp() { meet(own_block().warps[machine.now->thread / 32]); }
static void show(int slot, u32 value) { machine.shown[slot][warp_start() + lane_number()] = value; }
static u32 seen(int slot, int lane) { return machine.shown[slot][warp_start() + lane]; }

inline void __syncthreads() { meet(own_block().all); }
template <int THREADS_OF_PART> inline void meet_in_part(int part) {
    // `bar.sync` has sixteen barriers, of which the block as a whole has one, and counts threads, whoever they are.
    if (THREADS_OF_PART == 32) return meet_in_warp();
    if (part < 0 || part > 14) return fail("a barrier that there is not");
    Meeting& at = own_block().parts[part];
    at.expected = THREADS_OF_PART;
    meet(at);
}
inline char* shared_memory() { return own_block().memory.data(); }
inline u32 address_of(const void* at) { return (u32)((const char*)at - shared_memory()); }

static char* within(u32 at, int bytes) {
    if (at % bytes != 0) fail("a misaligned access of shared memory");
    if (at + bytes > own_block().memory.size()) { fail("an access beyond shared memory"); return shared_memory(); }
    return shared_memory() + at;
}

static void arrive(const Copy& one) {
    char* to = within(one.to, 16);
    std::memset(to, 0, 16);
    std::memcpy(to, one.from, one.bytes);
}
inline void copy(u32 to, const void* from, int bytes) {
    if ((uintptr_t)from % 16 != 0) fail("a misaligned access of global memory");
    if (bytes != 0 && bytes != 16) fail("a copy of part of sixteen bytes");
    if (machine.late) machine.now->open.push_back({to, from, bytes});
    else arrive({to, from, bytes});
}
inline void commit() {
    machine.now->groups.push_back(machine.now->open);
    machine.now->open.clear();
}
template <int PENDING> inline void wait_for_copies() {
    auto& groups = machine.now->groups;
    while ((int)groups.size() > PENDING) {
        for (const Copy& one : groups.front()) arrive(one);
        groups.erase(groups.begin());
    }
}

// Matrix m has its rows at the addresses that lanes 8m to 8m+7 name; lane l gets elements 2(l % 4) and the next of row l / 4.
static void load_matrices(u32 from, u32* to, int count) {
    show(0, from);
    meet_in_warp();
    for (int m = 0; m < count; m++) {
        const u32 row = seen(0, 8 * m + lane_number() / 4);
        within(row, 16);
        std::memcpy(&to[m], shared_memory() + row + lane_number() % 4 * 4, 4);
    }
    meet_in_warp();
}
inline void load_four(u32 from, u32* to) { load_matrices(from, to, 4); }
inline void load_two(u32 from, u32* to) { load_matrices(from, to, 2); }

inline float number(bf16 value) {
    const u32 bits = (u32)value.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
inline float number(f16 value) {
    const int exponent = value.bits >> 10 & 31, mantissa = value.bits & 1023;
    float wide = exponent == 31 ? (mantissa ? NAN : INFINITY)
                 : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                : std::ldexp((float)mantissa, -24);
    return value.bits >> 15 ? -wide : wide;
}
inline void round_into(float value, bf16* to) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    to->bits = value != value ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void round_into(float value, f16* to) {
    // By search among the numbers there are: slow, and without the tricks of a conversion.
    const u16 sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs((double)value);
    if (value != value) { to->bits = 0x7fff; return; }
    u16 low = 0, high = 0x7c00;  // zero and infinity
    while (high - low > 1) {
        const u16 middle = (low + high) / 2;
        (number(f16{middle}) <= size ? low : high) = middle;
    }
    const double under = number(f16{low}), over = high == 0x7c00 ? 65536.0 : number(f16{high});
    const bool up = size - under > over - size || (size - under == over - size && low % 2);
    to->bits = sign | (up ? high : low);
}

// A float8 number e4m3: four bits of exponent, three of mantissa, no infinity, NaN where all of them are set.
static float number_of_byte(u32 bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float wide = (bits & 127) == 127 ? NAN
                 : exponent          ? std::ldexp(8.0f + mantissa, exponent - 10)
                                     : std::ldexp((float)mantissa, -9);
    return bits >> 7 & 1 ? -wide : wide;
}
inline void widen(u32 four, u32& low, u32& high) {
    f16 wide[4];
    for (int i = 0; i < 4; i++) round_into(number_of_byte(four >> 8 * i & 255), &wide[i]);
    low = wide[0].bits | (u32)wide[1].bits << 16, high = wide[2].bits | (u32)wide[3].bits << 16;
}

// A(row, k) is in lane row % 8 * 4 + k % 8 / 2, register row / 8 + k / 8 * 2, half k % 2; B(k, n) in lane n * 4 + k % 8 / 2,
// register k / 8, half k % 2; C(row, n) in lane row % 8 * 4 + n / 2, register row / 8 * 2 + n % 2.
template <class T> inline void multiply_add(float* c, const u32* a, const u32* b, T) {
    for (int i = 0; i < 4; i++) show(i, a[i]);
    for (int i = 0; i < 2; i++) show(4 + i, b[i]);
    meet_in_warp();
    for (int i = 0; i < 4; i++) {
        const int row = lane_number() / 4 + i / 2 * 8, n = lane_number() % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const u32 left = seen(row / 8 + k / 8 * 2, row % 8 * 4 + k % 8 / 2) >> k % 2 * 16;
            const u32 right = seen(4 + k / 8, n * 4 + k % 8 / 2) >> k % 2 * 16;
            sum += (double)number(T{(u16)left}) * number(T{(u16)right});
        }
        c[i] = (float)sum;
    }
    meet_in_warp();
}

inline void bring_line(const void* at) {
    volatile char sink = *(const char*)at;
    (void)sink;
}
inline void wait_for_inputs() {}
inline void meet_in_cluster() { meet(machine.cluster); }
inline float load_from_block(const float* at, int rank) {
    float value;
    within(address_of(at), 4);
    if (machine.blocks[rank].ended) fail("shared memory of a block of which a thread has ended");
    std::memcpy(&value, machine.blocks[rank].memory.data() + address_of(at), 4);
    return value;
}
inline bool is_last(u32* counter, u32 parties) {
    const u32 before = *counter;
    *counter = before >= parties - 1 ? 0 : before + 1;
    return before == parties - 1;
}
inline float load_written(const float* at) { return *at; }

// Whether a warp lags behind in this round: half of them do, for a while, so that they drift apart.
static bool rests(u32 round, u32 warp) {
    u32 mixed = (round / 16 * 64 + warp) * 2654435761u;
    mixed = (mixed ^ mixed >> 15) * 2246822519u;
    return mixed >> 31;
}

// Runs `kernel` in `blocks` blocks, `together` of which are a cluster, each of `threads` threads with `bytes` of shared
// memory; the last cluster first if `backwards`. Returns what went wrong, or null.
template <class Arguments>
const char* launch(void (*kernel)(const Arguments&), const Arguments& a, int blocks, int together, int threads, int bytes, bool late, bool backwards) {
    machine.fault = nullptr;
    machine.late = late;
    static void (*run)(const Arguments&);
    static const Arguments* arguments;
    run = kernel, arguments = &a;
    gridDim.x = blocks;
    for (int cluster = 0; cluster < blocks / together; cluster++) {
        const int first = (backwards ? blocks / together - 1 - cluster : cluster) * together;
        machine.blocks.assign(together, Block());
        machine.cluster = Meeting{together * threads};
        for (Block& block : machine.blocks) {
            block.memory.assign(bytes, (char)0xff);
            block.all.expected = threads;
            block.warps.assign(threads / 32, Meeting{32});
            block.parts.assign(15, Meeting());
        }
        for (auto& slot : machine.shown) slot.assign(together * threads, 0);
        machine.fibers.resize(together * threads);
        for (int i = 0; i < together * threads; i++) {
            if (!machine.fibers[i]) machine.fibers[i] = std::make_unique<Fiber>();
            Fiber& fiber = *machine.fibers[i];
            fiber.begun = fiber.done = false;
            fiber.rank = i / threads, fiber.thread = i % threads, fiber.block = first + fiber.rank;
            fiber.groups.clear(), fiber.open.clear(), fiber.stack.resize(1 << 16);
        }
        size_t alive = machine.fibers.size();
        long last_step = 0;
        for (u32 round = 0; alive; round++) {
            const long steps = machine.steps;
            for (auto& fiber : machine.fibers) {
                if (fiber->done || rests(round, fiber->rank * threads / 32 + fiber->thread / 32)) continue;
                machine.now = fiber.get();
                threadIdx.x = fiber->thread, blockIdx.x = fiber->block;
                if (_setjmp(machine.scheduler) == 0) {
                    if (fiber->begun) _longjmp(fiber->at, 1);
                    fiber->begun = true;
                    getcontext(&fiber->start);
                    fiber->start.uc_stack.ss_sp = fiber->stack.data();
                    fiber->start.uc_stack.ss_size = fiber->stack.size();
                    fiber->start.uc_link = nullptr;
                    makecontext(&fiber->start, +[]() {
                        run(*arguments);
                        for (const auto& group : machine.now->groups)
                            if (!group.empty()) fail("a thread that ended before its copies had arrived");
                        machine.now->done = own_block().ended = true;
                        machine.steps++;
                        _longjmp(machine.scheduler, 1);
                    }, 0);
                    setcontext(&fiber->start);
                }
                if (fiber->done) alive--;
            }
            if (machine.steps != steps) last_step = round;
            if (round - last_step > 1000) return "threads that wait for each other for ever";
        }
        if (machine.fault) return machine.fault;
    }
    return nullptr;
}
