// What header-free CUDA C++ without inline assembly needs of a C++ compiler: blocks one after the
// other, their threads in turns (a stack each; a switch is a longjmp, which asks the system for
// nothing), a barrier being a wait for the others' turns.

#include <setjmp.h>
#include <ucontext.h>

#include <cfenv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct Place {
    unsigned x, y, z;
};
static Place threadIdx, blockIdx, gridDim;
struct float2 {
    float x, y;
};
struct double2 {
    double x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};

struct Barrier {
    int expected = 0, here = 0, times = 0;
    void wait();
};

struct Thread {
    ucontext_t start;
    jmp_buf place;
    bool begun, finished;
};
static jmp_buf scheduler;
static std::vector<Thread> turns;
static Barrier warps[32], block;
static unsigned exchanged[1024];

inline void yield() {
    const Place mine = threadIdx;
    if (!_setjmp(turns[mine.x].place)) _longjmp(scheduler, 1);
    threadIdx = mine;
}

inline void Barrier::wait() {
    const int before = times;
    if (++here == expected) here = 0, ++times;
    while (times == before) yield();
}

template <class T>
T exchange(T mine, int other) {
    static_assert(sizeof(T) == 4);
    Barrier& warp = warps[threadIdx.x / 32];
    std::memcpy(exchanged + threadIdx.x, &mine, 4);
    warp.wait();
    T theirs;
    std::memcpy(&theirs, exchanged + other, 4);
    warp.wait();
    return theirs;
}

template <class T>
T __shfl_xor_sync(unsigned, T v, int step) {
    return exchange(v, threadIdx.x ^ step);
}
inline bool __any_sync(unsigned, bool mine) {
    int any = mine;
    for (int step = 1; step < 32; step *= 2) any |= exchange(any, threadIdx.x ^ step);
    return any;
}
inline unsigned __ballot_sync(unsigned, bool mine) {
    unsigned bits = static_cast<unsigned>(mine) << threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) bits |= exchange(bits, threadIdx.x ^ step);
    return bits;
}
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline void __syncthreads() { block.wait(); }
inline void __threadfence_system() {}
static int votes;
inline int __syncthreads_or(int vote) {
    votes |= vote;
    block.wait();
    const int any = votes;
    block.wait();
    votes = 0;
    block.wait();
    return any;
}
template <class T>
T atomicExch(T* to, T value) {
    const T before = *to;
    *to = value;
    return before;
}
inline void atomicOr(unsigned* to, unsigned bits) { *to |= bits; }

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float normcdff(float x) {
    return static_cast<float>(0.5 * std::erfc(-static_cast<double>(x) * 0.70710678118654752));
}
inline unsigned __float_as_uint(float v) {
    unsigned u;
    std::memcpy(&u, &v, 4);
    return u;
}
inline double __longlong_as_double(long long v) {
    double out;
    std::memcpy(&out, &v, 8);
    return out;
}
inline float __uint_as_float(unsigned v) {
    float f;
    std::memcpy(&f, &v, 4);
    return f;
}
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class T>
T __ldg(const T* from) {
    return *from;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned long long>(a) * b >> 32;
}
inline long long min(long long a, long long b) { return a < b ? a : b; }
template <class T>
T __ldcs(const T* from) {
    return *from;
}
template <class T>
void __stcg(T* to, T value) {
    *to = value;
}

struct uint2 {
    unsigned x, y;
};
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = x | static_cast<unsigned long long>(y) << 32;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (both >> (selector >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
    return out;
}
// prmt: as above, or a byte's sign.
inline unsigned permute(unsigned x, unsigned y, unsigned selector) {
    const unsigned bytes = __byte_perm(x, y, selector);
    unsigned out = 0;
    for (int i = 0; i < 32; i += 8) {
        const unsigned byte = bytes >> i & 0xFF;
        out |= (selector >> i / 2 & 8 ? (byte >> 7) * 0xFF : byte) << i;
    }
    return out;
}
template <class T>
T atomicMax(T* to, T value) {
    const T before = *to;
    *to = before < value ? value : before;
    return before;
}
template <class T>
T atomicMin(T* to, T value) {
    const T before = *to;
    *to = value < before ? value : before;
    return before;
}
template <class T>
T atomicAdd(T* to, T value) {
    const T before = *to;
    *to = before + value;
    return before;
}
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline long long max(long long a, long long b) { return a > b ? a : b; }
template <class T>
T __ldcg(const T* from) {
    return *from;
}
inline float add_rounding(int way, float a, float b) {
    std::fesetround(way);
    volatile float x = a, y = b;
    volatile float sum = x + y;
    std::fesetround(FE_TONEAREST);
    return sum;
}
inline float __fadd_ru(float a, float b) { return add_rounding(FE_UPWARD, a, b); }
inline float __fadd_rz(float a, float b) { return add_rounding(FE_TOWARDZERO, a, b); }
inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
inline unsigned __float2uint_ru(float v) {
    return v <= 0 ? 0u : static_cast<unsigned>(std::ceil(static_cast<double>(v)));
}
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) {
    unsigned out = 0;
    for (int h = 0; h < 32; h += 16) {
        const unsigned sum = ((a >> h) + (b >> h)) & 0xFFFF, other = c >> h & 0xFFFF;
        out |= (sum < other ? sum : other) << h;
    }
    return out;
}
inline unsigned __viaddmin_u32(unsigned a, unsigned b, unsigned c) { return a + b < c ? a + b : c; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return shift & 31 ? high << (shift & 31) | low >> (32 - (shift & 31)) : high;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

inline float of_float16(unsigned half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                           : std::ldexp(static_cast<float>(fraction), -24);
    return half >> 15 & 1 ? -magnitude : magnitude;
}
inline float of_bfloat16(unsigned half) { return __uint_as_float(half << 16); }
// Pairs of bfloat16: a b + c, rounded to nearest even once.
inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
    unsigned out = 0;
    for (int h = 0; h < 32; h += 16) {
        const double v =
            static_cast<double>(of_bfloat16(a >> h & 0xFFFF)) * of_bfloat16(b >> h & 0xFFFF) +
            of_bfloat16(c >> h & 0xFFFF);  // exact, as all but far apart terms are
        const unsigned bits = __float_as_uint(static_cast<float>(v));
        const unsigned rounded = v != v ? 0x7FFFu : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        out |= rounded << h;
    }
    return out;
}
inline unsigned and_xor(unsigned a, unsigned b, unsigned c) { return a & b ^ c; }
// The larger ones, NaN if one is, or the smaller ones, the other one if one is NaN.
template <bool kLarger>
unsigned choose_pair(unsigned a, unsigned b) {
    unsigned out = 0;
    for (int h = 0; h < 32; h += 16) {
        const unsigned halves[2] = {a >> h & 0xFFFF, b >> h & 0xFFFF};
        const float x = of_bfloat16(halves[0]), y = of_bfloat16(halves[1]);
        const bool nan = kLarger ? x != x || y != y : x != x && y != y;
        out |= (nan ? 0x7FFFu : halves[kLarger ? x < y : !(x < y || y != y)]) << h;
    }
    return out;
}
inline unsigned pair_at_most(unsigned a, unsigned b) {
    return (of_bfloat16(a & 0xFFFF) <= of_bfloat16(b & 0xFFFF) ? 0xFFFFu : 0) |
           (of_bfloat16(a >> 16) <= of_bfloat16(b >> 16) ? 0xFFFF0000u : 0);
}
// 0xFF for halves that are negative: a's low one and b's, then the high ones.
inline unsigned sign_bytes(unsigned a, unsigned b) {
    return (a >> 15 & 1) * 0xFFu | (b >> 15 & 1) * 0xFF00u | (a >> 31) * 0xFF0000u |
           (b >> 31) * 0xFF000000u;
}
// cp.async, at once.
template <int kBytes>
void cp_async(void* to, const void* from, bool there) {
    if (there)
        std::memcpy(to, from, kBytes);
    else
        std::memset(to, 0, kBytes);
}
inline void cp_async_commit() {}
template <int kNewest>
void cp_async_wait() {}
inline void launch_dependent_grids() {}
inline void wait_on_dependent_grids() {}
// mma.sync m16n8k16 of bfloat16: the fragments of the PTX ISA; the sum is rounded once.
static unsigned fragments[1024][6];
inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
    const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    std::memcpy(fragments[threadIdx.x], mine, sizeof mine);
    warps[threadIdx.x / 32].wait();
    double sums[4] = {d[0], d[1], d[2], d[3]};
    for (int t = 0; t < 4; ++t) {
        const unsigned* const rows = fragments[warp + lane / 4 * 4 + t];
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 2; ++c)
                for (int k = 0; k < 2; ++k)
                    for (int e = 0; e < 32; e += 16)
                        sums[2 * h + c] +=
                            static_cast<double>(of_bfloat16(rows[h + 2 * k] >> e & 0xFFFF)) *
                            of_bfloat16(fragments[warp + (lane % 4 * 2 + c) * 4 + t][4 + k] >> e &
                                        0xFFFF);
    }
    warps[threadIdx.x / 32].wait();
    for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(sums[i]);
}

template <class T>
T __shfl_sync(unsigned, T mine, int lane) {
    return exchange(mine, threadIdx.x / 32 * 32 + lane);
}
template <class T>
T __shfl_sync(unsigned, T mine, int lane, int width) {
    return exchange(mine, threadIdx.x / width * width + lane);
}
inline bool __all_sync(unsigned, bool mine) { return !__any_sync(0, !mine); }
inline unsigned __reduce_max_sync(unsigned, unsigned mine) {
    for (int step = 1; step < 32; step *= 2) mine = max(mine, exchange(mine, threadIdx.x ^ step));
    return mine;
}
inline unsigned __reduce_add_sync(unsigned, unsigned mine) {
    for (int step = 1; step < 32; step *= 2) mine += exchange(mine, threadIdx.x ^ step);
    return mine;
}
inline void __syncwarp() { warps[threadIdx.x / 32].wait(); }
inline float __int_as_float(int v) { return __uint_as_float(static_cast<unsigned>(v)); }
inline float __ll2float_rn(long long v) { return static_cast<float>(v); }
inline float __expf(float v) { return std::exp(v); }

static void (*work)();
static int only =
    -1;  // of a grid whose other blocks run beside this one, in other copies of the program
extern "C" void run_only(int number) { only = number; }

inline void enter(int thread) {
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
    work();
    turns[thread].finished = true;
    _longjmp(scheduler, 1);
}

// Let a thread run until it waits or ends.
inline void resume(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    setcontext(&thread.start);
}

template <class... Types>
void run(void (*kernel)(Types...), void** arguments, int blocks, int threads) {
    static std::tuple<Types...>* values;
    static void (*chosen)(Types...);
    int at = 0;
    std::tuple<Types...> held{*static_cast<Types*>(arguments[at++])...};
    values = &held, chosen = kernel;
    work = [] { std::apply(chosen, *values); };
    constexpr std::size_t kStack = 1 << 16;
    // Of this run alone, and not filled: hundreds of programs would keep 16 MB and more each.
    const std::unique_ptr<char[]> stacks(new char[threads * kStack]);
    gridDim = {static_cast<unsigned>(blocks), 1, 1};
    for (int b = 0; b < blocks; ++b) {
        if (only >= 0 && b != only) continue;
        blockIdx = {static_cast<unsigned>(b), 0, 0};
        for (Barrier& warp : warps) warp = {32};
        block = {threads};
        turns.assign(threads, Thread{});
        for (int t = 0; t < threads; ++t) {
            ucontext_t& start = turns[t].start;
            getcontext(&start);
            start.uc_stack = {stacks.get() + t * kStack, 0, kStack};
            makecontext(&start, reinterpret_cast<void (*)()>(enter), 1, t);
        }
        for (int left = threads; left;)
            for (Thread& thread : turns) {
                if (thread.finished) continue;
                resume(thread);
                left -= thread.finished;
            }
    }
}
