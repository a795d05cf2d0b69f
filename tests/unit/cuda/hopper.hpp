// Stands for tma_wgmma.cuh and the wgmma function: barriers, bulk copies and wgmma on the CPU, a
// block to a copy of the program, no clusters. Shared memory is one array, addressed from its
// beginning; a tensor map of two axes holds pointer, rows, columns, pitch, rows of its box, bytes
// of an element and of a box's row, one of four axes of bfloat16 pointer, sizes, strides in bytes
// (but of the first) and rows of its box.

alignas(1024) static u8 shared_bytes[232448];

inline u32 shared_address(const void* p) {
    return static_cast<u32>(static_cast<const u8*>(p) - shared_bytes);
}

struct Arrivals {
    int count, pending, bytes;
    u32 phase;
};
static Arrivals arrivals[sizeof(shared_bytes) / 8];

inline Arrivals& arrivals_at(u32 barrier) { return arrivals[barrier / 8]; }
inline void settle(Arrivals& a) {
    if (a.pending == 0 && a.bytes == 0) a.pending = a.count, a.phase ^= 1;
}
inline void barrier_init(u32 barrier, u32 count) {
    arrivals_at(barrier) = {static_cast<int>(count), static_cast<int>(count), 0, 0};
}
inline void barrier_arrive(u32 barrier, int bytes) {
    Arrivals& a = arrivals_at(barrier);
    --a.pending, a.bytes += bytes;
    settle(a);
}
inline void barrier_arrive(u32 barrier) { barrier_arrive(barrier, 0); }
inline void barrier_expect_bytes(u32 barrier, u32 bytes) {
    barrier_arrive(barrier, static_cast<int>(bytes));
}
inline void brought(u32 barrier, int bytes) {
    Arrivals& a = arrivals_at(barrier);
    a.bytes -= bytes;
    settle(a);
}
inline bool barrier_test(u32 barrier, u32 parity) { return arrivals_at(barrier).phase != parity; }
inline void barrier_wait(u32 barrier, u32 parity) {
    for (int spins = 0; arrivals_at(barrier).phase == parity; ++spins) {
        if (spins > 1000000) std::fprintf(stderr, "a barrier is never reached\n"), std::exit(3);
        yield();
    }
}
inline void release_stage(u32 barrier, int lane) {
    if (lane == 0) barrier_arrive(barrier, 0);
}
inline void store_relaxed(u64* to, u64 v) { *to = v; }
inline u64 load_relaxed(const u64* from) {
    yield();
    return *from;
}
inline u32 rank_in_cluster() { return 0; }
inline void cluster_sync() {}

inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// Each row of a box, swizzled if it is 128 or 64 bytes wide; zeros outside.
inline void tma_load_2d(u32 to, const TensorMap* map, int byte, int row, u32 barrier) {
    const u8* from = reinterpret_cast<const u8*>(map->words[0]);
    const i64 rows = map->words[1], columns = map->words[2], pitch = map->words[3],
              box = map->words[4];
    const i64 wide = map->words[6];
    for (i64 r = 0; r < box; ++r)
        for (int b = 0; b < wide; ++b) {
            const u32 at = static_cast<u32>(to + r * wide + b);
            shared_bytes[wide == 128  ? swizzled(at)
                         : wide == 64 ? at ^ (at >> 7 & 3) << 4
                                      : at] =
                row + r < rows && byte + b < columns ? from[(row + r) * pitch + byte + b] : 0;
        }
    brought(barrier, static_cast<int>(box * wide));
}
inline void tma_load_multicast(u32, const TensorMap*, int, int, u32) {}
inline void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
    if (to % 16 || bytes % 16 || reinterpret_cast<u64>(from) % 16)
        std::fprintf(stderr, "odd line\n"), std::exit(3);
    std::memcpy(shared_bytes + to, from, bytes);
    brought(barrier, bytes);
}
// 16 rows of 128 bytes, swizzled, to where they lie inside.
inline void tma_store_2d(const TensorMap* map, int column, int row, const u8* patch) {
    u8* to = reinterpret_cast<u8*>(map->words[0]);
    const i64 rows = map->words[1], columns = map->words[2], pitch = map->words[3],
              item = map->words[5];
    for (i64 r = 0; r < 16; ++r)
        for (i64 b = 0; b < 128; ++b)
            if (row + r < rows && column + b / item < columns)
                to[(row + r) * pitch + column * item + b] =
                    shared_bytes[swizzled(shared_address(patch) + r * 128 + b)];
}
// Halves of pairs of columns from `column` on, of a row of each of two groups of eight, at columns'
// places.
template <class Place>
void put_transposed(u8* patch, int column, int group, const u32 (&pairs)[2], int lane,
                    Place place) {
    for (int c = 0; c < 2; ++c)
        for (int h = 0; h < 2; ++h) {
            const u16 half = static_cast<u16>(pairs[h] >> 16 * c);
            std::memcpy(patch + place(column + lane % 4 * 2 + c, group + h) + lane / 4 * 2, &half,
                        2);
        }
}

// 64 elements of each row of a box of an array of four axes; zeros outside, where nothing is
// written.
template <class Move>
void for_box(const TensorMap* map, int x, int y, int z, int w, u32 at, Move move) {
    u8* base = reinterpret_cast<u8*>(map->words[0]);
    const u64* m = map->words;
    for (int r = 0; r < static_cast<int>(m[8]); ++r)
        for (int b = 0; b < 128; ++b) {
            const bool inside = static_cast<u64>(x + b / 2) < m[1] && static_cast<u64>(y) < m[2] &&
                                static_cast<u64>(z + r) < m[3] && static_cast<u64>(w) < m[4];
            u8* place = base + 2 * x + b + y * m[5] + (z + r) * m[6] + w * m[7];
            move(shared_bytes[swizzled(at + r * 128 + b)], inside ? place : nullptr);
        }
}
inline void tma_load_4d(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 barrier) {
    for_box(map, x, y, z, w, to, [](u8& mine, u8* theirs) { mine = theirs ? *theirs : 0; });
    brought(barrier, static_cast<int>(map->words[8] * 128));
}
inline void tma_store_4d(const TensorMap* map, int x, int y, int z, int w, u32 from) {
    for_box(map, x, y, z, w, from, [](u8& mine, u8* theirs) {
        if (theirs) *theirs = mine;
    });
}
inline void fence_shared_async() {}
inline void tma_store_commit() {}
inline void tma_store_wait_read() {}
inline void tma_store_wait() {}

inline u32 load_acquire(const u32* from) {
    yield();
    return *from;
}
inline void add_release(u32* to, u32 count) { *to += count; }
inline void fence_async() {}

inline void keep(const u8*&) {}
inline void keep(int&) {}
inline void keep(i64&) {}
inline int opaque(int number) { return number; }

static Barrier named[16];
inline void named_barrier(int number, int threads) {
    named[number].expected = threads;
    named[number].wait();
}

inline u32 to_bf16x2(float high, float low) {
    u32 out = 0;
    for (float v : {high, low}) {
        const u32 bits = __float_as_uint(v);
        out = out << 16 | (v != v ? 0x7FC0u : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
    return out;
}

// ---- wgmma ----

inline void end_basic_block(float) {}
inline void keep(float&) {}
inline void keep(u32&) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit() {}
template <int n>
void fence_accumulators(Sum (&)[n]) {}
template <int, int n>
void warpgroup_wait(Sum (&)[n]) {
    __syncwarp();
}  // a warp is as far as its slowest thread

inline double small_float(u32 code, int mantissa, int bias) {
    const u32 field = code >> mantissa & ((1u << (7 - mantissa)) - 1),
              part = code & ((1u << mantissa) - 1);
    const double v = field ? std::ldexp(1.0 + part / double(1 << mantissa), int(field) - bias)
                           : std::ldexp(double(part), 1 - bias - mantissa);
    const bool special = mantissa == 2 ? field == 31 : (code & 0x7F) == 0x7F;
    return special ? NAN : code & 0x80 ? -v : v;
}
template <int kKind>  // 0: e4m3, 1: e5m2, 2: s8
double value_of(u32 code) {
    static double values[256];
    static bool made = false;
    if (!made) {
        for (u32 c = 0; c < 256; ++c)
            values[c] = kKind == 2 ? double(static_cast<signed char>(c))
                                   : small_float(c, kKind ? 2 : 3, kKind ? 15 : 7);
        made = true;
    }
    return values[code];
}
// Where element k of row i of an operand lies, swizzled by 128 bytes: wgmma's canonical layouts
// (PTX ISA). K contiguous: 8 rows are a pattern of 1024 bytes, the stride leads to the next 8. The
// other way: 64 rows by 8 of K are one; the stride leads to the next 8 of K, the leading offset to
// 64 rows.
template <bool kMnMajor>
u32 address_of(u64 descriptor, int i, int k) {
    constexpr int kItem = GEMM_KIND == 1 ? 2 : 1;
    const u32 address = static_cast<u32>(descriptor << 4) & 0x3FFFF;
    const u32 leading = static_cast<u32>(descriptor >> 16 & 0x3FFF) << 4;
    const u32 stride = static_cast<u32>(descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1) std::fprintf(stderr, "not swizzled by 128 bytes\n"), std::exit(3);
    return swizzled(address +
                    (kMnMajor ? i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * kItem
                              : i / 8 * stride + i % 8 * 128 + k * kItem));
}
template <bool kMnMajor, int kKind>
double element(u64 descriptor, int i, int k) {
    const u8* at = shared_bytes + address_of<kMnMajor>(descriptor, i, k);
    return GEMM_KIND == 1 ? of_bfloat16(at[0] | at[1] << 8) : value_of<kKind>(at[0]);
}

// A thread's accumulators of 64 x N: rows lane / 4 and 8 below, pairs of columns 8 apart.
template <int n>
void wgmma(Sum (&d)[n], u64 a, u64 b, int more) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    constexpr int kSteps = GEMM_KIND == 1 ? 16 : 32;
    double rows[2][kSteps];
    for (int h = 0; h < 2; ++h)
        for (int k = 0; k < kSteps; ++k)
            rows[h][k] = element<GEMM_A_MN_MAJOR, A_KIND>(a, warp * 16 + lane / 4 + 8 * h, k);
    for (int j = 0; j < n / 4; ++j)
        for (int c = 0; c < 2; ++c) {
            double sums[2] = {0, 0};
            for (int k = 0; k < kSteps; ++k) {
                const double v = element<GEMM_B_MN_MAJOR, B_KIND>(b, 8 * j + lane % 4 * 2 + c, k);
                sums[0] += rows[0][k] * v, sums[1] += rows[1][k] * v;
            }
            for (int h = 0; h < 2; ++h) {
                Sum& to = d[4 * j + 2 * h + c];
                to = static_cast<Sum>((more ? static_cast<double>(to) : 0.0) + sums[h]);
            }
        }
}

// The same with a's rows in registers: four of a thread, rows 0 and 8 of K 0 to 7, then of K 8
// to 15.
inline void gather(double (&rows)[2][16], const u32 (&a)[4]) {
    const int row = threadIdx.x / 4 * 4;
    for (int k = 0; k < 16; ++k)
        for (int h = 0; h < 2; ++h)
            rows[h][k] =
                of_bfloat16(exchange(a[k / 8 * 2 + h], row + k % 8 / 2) >> k % 2 * 16 & 0xFFFF);
}
template <bool kMnMajor, int n>
void multiply(Sum (&d)[n], const u32 (&a)[4], u64 b, int more) {
    double rows[2][16];
    gather(rows, a);
    for (int i = 0; i < n; ++i) {
        double sum = more ? d[i] : 0.0;
        for (int k = 0; k < 16; ++k)
            sum += rows[i / 2 % 2][k] *
                   element<kMnMajor, 0>(b, i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, k);
        d[i] = static_cast<Sum>(sum);
    }
}
template <int n>
void wgmma(Sum (&d)[n], const u32 (&a)[4], u64 b, int more) {
    multiply<false>(d, a, b, more);
}
template <int n>
void wgmma_mn_major(Sum (&d)[n], const u32 (&a)[4], u64 b, int more) {
    multiply<true>(d, a, b, more);
}
