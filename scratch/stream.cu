// out = x w^T for few rows of x, E2M1 under E8M0 or E4M3 scales; see decode.cu. Warps on their own.
// Macros: UE4M3, BLOCK, WARPS, CHUNK, STAGES, TILES, PARTS, IN, OUT, COPY (0 cp.async, 1 bulk), PREFETCH (units ahead to L2), PDL,
// LOADS, DECODES, ACCS
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int kThreads = 32 * WARPS, kTokens = 8 * TILES, kSegment = 128;
constexpr int kBytes = CHUNK / 2, kScales = CHUNK / BLOCK;      // of a row in a stage
constexpr int kTall = 16 * R, kCodes = kTall * (kBytes + 32), kStage = kCodes + kTall * kScales;
constexpr int kRing = WARPS * STAGES * kStage;

#ifdef __CUDA_ARCH__
__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
template <int kSize>
__device__ __forceinline__ void copy_ahead(void* shared, const void* from, bool there) {
    const u32 to = shared_address(shared);
    const int bytes = there ? kSize : 0;
    if (kSize == 16)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(kSize) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory"); }
__device__ __forceinline__ void prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    for (;;) {
        u32 done;
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (done) return;
    }
}
__device__ __forceinline__ void load_line(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif
__device__ __forceinline__ u32 twice(u32 half) { return half | half << 16; }

__device__ __forceinline__ u32 scale_pair(u32 byte, bool folded) {
#if UE4M3
    const u32 scale = fma_pair(fma_pair(byte * 0x00100010u, 0x7B807B80u, 0u), 0x7A807A80u, 0u);
    return byte < 0x7Fu ? scale : twice(0x7FC0u);
#else
    if (folded) return byte * 0x00800080u + 118u * 0x00800080u;
    return twice(byte == 255u ? 0x7FC0u : byte > 8u ? (byte - 8u) << 7 : byte > 1u ? 1u << (byte - 2u) : 0u);
#endif
}
__device__ __forceinline__ void decode(u32 word, u32 scale, bool folded, u32 (&pairs)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const u32 two = p < 2 ? word : word >> 8;
        const u32 bits = (p % 2 ? (two & 0x00F000F0u) * 0x104u : (two & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
        pairs[p] = fma_pair(folded ? bits : fma_pair(bits, 0x7E807E80u, 0u), scale, 0u);
    }
}

#if IN == 0
typedef float Raw;
#else
typedef u16 Raw;
#endif
__device__ __forceinline__ u32 part_of(Raw raw, int part) {
#if IN == 1
    return raw;
#else
    const float first = raw - __uint_as_float(__float_as_uint(raw) & 0xFFFF0000u);
    const float second = first - __uint_as_float(__float_as_uint(first) & 0xFFFF0000u);
    const u32 bits = __float_as_uint(part == 0 ? raw : part == 1 ? first : second);
    const u32 magnitude = __float_as_uint(raw) & 0x7FFFFFFFu;
    return magnitude < 0x7F800000u ? bits >> 16 : part ? 0u : magnitude > 0x7F800000u ? 0x7FC0u : bits >> 16;
#endif
}

// u / n of small numbers, given 1 / n.
__device__ __forceinline__ int quotient(int u, float inverse) { return static_cast<int>((static_cast<float>(u) + 0.5f) * inverse); }

__device__ __forceinline__ int place(int row) { return row * kBytes + (row + 1) / 2 * 64; }

template <class Then>
__device__ __forceinline__ void load_x(u8* to, int pitch, const Raw* x, int begin, int stretch, int rows, int columns, Then then) {
    constexpr int kBatch = BATCH;
    const int of_token = stretch / 8, count = rows * PARTS * of_token;
    const float inverse = 1.0f / of_token;
    for (int first = threadIdx.x; first < count; first += kBatch * kThreads) {
        uint4 got[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int u = first + n * kThreads, token = quotient(u, inverse), k = begin + (u - token * of_token) * 8;
            got[n] = uint4{0, 0, 0, 0};
            if (u < count && k < columns) {
#if IN == 1
                got[n] = *reinterpret_cast<const uint4*>(x + static_cast<i64>(token) * columns + k);
#else
                const int part = quotient(token, 1.0f / rows);
                const Raw* from = x + static_cast<i64>(token - part * rows) * columns + k;
                u32 v[8];
                for (int e = 0; e < 8; ++e) v[e] = part_of(from[e], part);
                got[n] = uint4{v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16};
#endif
            }
        }
        if (first == threadIdx.x) then();
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int u = first + n * kThreads, token = quotient(u, inverse), i = u - token * of_token;
            if (u >= count) continue;
            const uint4 w = got[n];
            const int at = i / 16 * 16 + i % 4 * 4 + i / 4 % 4;  // of a segment: eights of a lane apart
            *reinterpret_cast<uint4*>(to + token * pitch + at * 16) =
                uint4{__byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632),
                      __byte_perm(w.y, w.w, 0x5410), __byte_perm(w.y, w.w, 0x7632)};
        }
    }
}

__device__ __forceinline__ void finish(void* out, float total, i64 at, const float* tensor_scale) {
    total *= 256.0f;  // the scales were times 2^-8
    if (tensor_scale) total *= *tensor_scale;
#if OUT == 0
    static_cast<float*>(out)[at] = total;
#else
    const u32 bits = __float_as_uint(total);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    static_cast<u16*>(out)[at] = nan ? 0x7FC0 : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
decode_product(const Raw* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
               const signed char* __restrict__ zeros, const float* __restrict__ tensor_scale,
               float* __restrict__ partial, u32* __restrict__ done, void* __restrict__ out, int rows,
               int lines, int columns, int octets, int blocks, int points, int slices, int stretch, int log_parts) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u32 last;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    const u32 groups = slices == 1 ? gridDim.x : gridDim.x / slices, group = slices == 1 ? blockIdx.x : blockIdx.x / slices;
    const int slice = blockIdx.x - group * slices, parts = 1 << log_parts;
    const int tiles = (lines + kTall - 1) / kTall, low = static_cast<u32>(tiles * group) / groups, high = static_cast<u32>(tiles * (group + 1)) / groups;
    // A block's part of K and this warp's, which begins at a multiple of CHUNK.
    const int first = slice * stretch, count = rows * PARTS, part = warp & (parts - 1);
    const int of_part = (stretch / CHUNK + parts - 1 >> log_parts) * CHUNK, begin = first + part * of_part;
    const int end = min(min(columns, first + stretch), begin + of_part), step = WARPS >> log_parts;
    const int from = low * kTall, of_mine = min(high * kTall, lines) - from;
    u8* const ring = memory + warp * STAGES * kStage;
    u8* const tokens = memory + kRing;
    const int pitch = stretch * 2 + 64;
    // Sums of parts of K, by token: in shared memory, or of slices in global memory.
    const i64 pitch_of_sums = ((slices > 1 ? lines : of_mine) + 3) / 4 * 4;
    float* sums = slices > 1 ? partial + static_cast<i64>(slice) * count * pitch_of_sums
                                      : reinterpret_cast<float*>(tokens + count * pitch) - from;
#if PDL
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // The last tile's rows are the last ones.
    constexpr int kGrains = kBytes / 16, kStep = 32 / kGrains, kOfRow = kScales / GRAIN, kOfWarp = 32 / kOfRow;
    static_assert(kGrains <= 32 && kOfRow <= 32);
    int ahead_tile = low + (warp >> log_parts), ahead = begin;
    const i64 lane_code = static_cast<i64>(lane / kGrains) * octets + lane % kGrains * 16;
    const i64 lane_scale = static_cast<i64>(lane / kOfRow) * blocks + lane % kOfRow * GRAIN;
    u8* const lane_to = ring + place(lane / kGrains) + lane % kGrains * 16;
    const auto send = [&](int slot) {
        if (ahead_tile < high && begin < end) {
            const i64 line = min(ahead_tile * kTall, lines - kTall);
            const u8* from = codes + line * octets + ahead / 2 + lane_code;
            const bool there = ahead / 2 + lane % kGrains * 16 < octets;
#pragma unroll
            for (int r = 0; r < kTall; r += kStep, from += kStep * octets)
                copy_ahead<16>(lane_to + slot * kStage + place(r), from, there);
            const u8* from_scales = scales + line * blocks + ahead / BLOCK + lane_scale;
            const bool scale_there = ahead / BLOCK + lane % kOfRow * GRAIN < blocks;
#pragma unroll
            for (int r = 0; r < kTall; r += kOfWarp, from_scales += kOfWarp * blocks)
                if (r + lane / kOfRow < kTall)
                    copy_ahead<GRAIN>(ring + slot * kStage + kCodes + r * kScales + lane * GRAIN, from_scales, scale_there);
        }
        end_copies();
        ahead += CHUNK;
        if (ahead >= end) ahead = begin, ahead_tile += step;
    };
#pragma unroll 1
    for (int d = 0; d < EARLY; ++d) send(d);
    load_x(tokens, pitch, x, first, stretch, rows, columns, [&] {
#pragma unroll 1
        for (int d = EARLY; d < STAGES; ++d) send(d);
    });
    __syncthreads();
    const u8* of_x[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) of_x[t] = tokens + min(t * 8 + row, count - 1) * pitch + (begin - first) * 2 + quarter * 16;
    int slot = 0;
#pragma unroll 1
    for (int tile = low + (warp >> log_parts); tile < high; tile += step) {
        float sum[ACCS][R][TILES][4];
#pragma unroll
        for (int a = 0; a < ACCS * R * TILES * 4; ++a) (&sum[0][0][0][0])[a] = 0.0f;
#pragma unroll 1
        for (int k = 0; k < end - begin; k += CHUNK) {
            arrived();
            __syncwarp();
            const u8* const stage = ring + slot * kStage;
            const u8* const of_scales = stage + kCodes + row * kScales;
            const auto multiply = [&](bool folded) {
#pragma unroll
                for (int s = 0; s < CHUNK / kSegment; ++s) {
                    u32 words[2 * R][4], pairs[2][4];
#pragma unroll
                    for (int h = 0; h < 2 * R; ++h) {
                        const int r = row + 8 * h;
                        const uint4 four = *reinterpret_cast<const uint4*>(stage + r * kBytes + (r + 1) / 2 * 64 + s * 64 + quarter * 16);
                        words[h][0] = four.x, words[h][1] = four.y, words[h][2] = four.z, words[h][3] = four.w;
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        uint4 b[TILES];
#pragma unroll
                        for (int t = 0; t < TILES; ++t) b[t] = *reinterpret_cast<const uint4*>(of_x[t] + k * 2 + s * 256 + j * 64);
#pragma unroll
                        for (int g = 0; g < R; ++g) {
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                const u32 scale = scale_pair(of_scales[(g * 2 + h) * 8 * kScales + (s * 128 + quarter * 32 + j * 8) / BLOCK], folded);
                                decode(words[2 * g + h][j], scale, folded, pairs[h]);
                            }
                            const u32 even[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
                            const u32 odd[4] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
#pragma unroll
                            for (int t = 0; t < TILES; ++t) {
                                mma(sum[0][g][t], even, b[t].x, b[t].y);
                                mma(sum[ACCS - 1][g][t], odd, b[t].z, b[t].w);
                            }
                        }
                    }
                }
            };
#if LOADS
            sum[0][0][0][0] += stage[lane * 4];
#elif UE4M3
            multiply(true);
#else
            u32 large = 0;
#pragma unroll
            for (int i = lane; i < kTall / 4 * kScales; i += 32) {
                const u32 four = reinterpret_cast<const u32*>(stage + kCodes)[i];
                large |= (four & 0x7F7F7F7Fu) + 0x77777777u & four & 0x80808080u;
            }
            if (__any_sync(0xFFFFFFFFu, large != 0))
                multiply(false);
            else
                multiply(true);
#endif
            __syncwarp();
#if !DECODES
            send(slot);
#else
            end_copies();
#endif
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
#pragma unroll
        for (int g = 0; g < R; ++g)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int line = min(tile * kTall, lines - kTall) + g * 16 + row + c / 2 * 8, token = t * 8 + quarter * 2 + c % 2;
                const float total = ACCS == 2 ? sum[0][g][t][c] + sum[ACCS - 1][g][t][c] : sum[0][g][t][c];
                if (line >= from && line < lines && token < count) sums[(part * count + token) * pitch_of_sums + line] = total;
            }
    }
    if (NOSUM) return;
    if (slices > 1) __threadfence();
    __syncthreads();
    if (slices > 1) {
        if (threadIdx.x == 0) last = atomicAdd(done + group, 1u) + 1 == static_cast<u32>(slices);
        __syncthreads();
        if (!last) return;
        __threadfence();
        if (threadIdx.x == 0) done[group] = 0;
    }
    const int cuts = slices * parts, quads = (of_mine + 3) / 4;
    const float inverse = 1.0f / quads;
    sums -= static_cast<i64>(slice) * count * pitch_of_sums;
    constexpr int kAt = 4;  // sums of four lines at a time
    for (int start = threadIdx.x; start < rows * quads; start += kAt * kThreads) {
        float total[kAt][4];
        int m[kAt], line[kAt];
#pragma unroll
        for (int n = 0; n < kAt; ++n) {
            const int i = start + n * kThreads;
            m[n] = quotient(i, inverse), line[n] = from + (i - m[n] * quads) * 4;
            if (m[n] >= rows) m[n] = 0, line[n] = lines;
#pragma unroll
            for (int c = 0; c < 4; ++c) total[n][c] = 0.0f;
        }
        for (int p = PARTS - 1; p >= 0; --p) {  // the smallest first
            float of_x[kAt][4] = {};
#pragma unroll 4
            for (int s = 0; s < cuts; ++s) {
#pragma unroll
                for (int n = 0; n < kAt; ++n) {
                    if (line[n] >= lines) continue;
                    const float4* const at = reinterpret_cast<const float4*>(const_cast<const float*>(sums) + (static_cast<i64>(s) * count + p * rows + m[n]) * pitch_of_sums + line[n]);
                    const float4 v = slices > 1 ? __ldcg(at) : *at;
                    of_x[n][0] += v.x, of_x[n][1] += v.y, of_x[n][2] += v.z, of_x[n][3] += v.w;
                }
            }
#pragma unroll
            for (int n = 0; n < kAt; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) total[n][c] += of_x[n][c];
        }
#pragma unroll
        for (int n = 0; n < kAt; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (line[n] + c < lines) finish(out, total[n][c], static_cast<i64>(m[n]) * lines + line[n] + c, tensor_scale);
    }
}
