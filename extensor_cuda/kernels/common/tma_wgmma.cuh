// Hopper's TMA copies between global and shared memory, and what surrounds wgmma products.

#include "common/barriers.cuh"

// ---- copies ----

// Says to every block of the cluster that a stage of theirs may be overwritten.
__device__ __forceinline__ void release(u32 barrier, int lane) {
    if (lane >= kCluster) return;
    if (kCluster == 1) {
        arrive(barrier);
    } else {
        asm volatile(
            "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(barrier),
            "r"(lane)
            : "memory");
    }
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int byte, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void load_for_all(u32 to, const TensorMap* map, int byte, int row,
                                             u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier), "h"(static_cast<u16>((1 << kCluster) - 1))
        : "memory");
}

// A box of an array of four axes, and back from shared memory.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int x, int y, int z, int w,
                                         u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, int x, int y, int z, int w,
                                          u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
            map),
        "r"(x), "r"(y), "r"(z), "r"(w), "r"(from)
        : "memory");
}
// What this thread has written to shared memory is there for the stores of any.
__device__ __forceinline__ void show_stores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void end_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void await_stores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// A count that other blocks add to after stores of theirs: what it counts is there.
__device__ __forceinline__ u32 acquired(const u32* from) {
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(from) : "memory");
    return count;
}
__device__ __forceinline__ void add_released(u32* to, u32 count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(count) : "memory");
}
// Between stores to global memory and bulk copies of what was stored.
__device__ __forceinline__ void show_to_copies() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ u32 rounded_pair(float high, float low) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- wgmma ----

// Names the accumulators, so that the compiler moves no use of them across.
template <int kSums>
__device__ __forceinline__ void hold(Sum (&d)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+" SUM(d[i])::"memory");
}

// Made here, not where it is used, and in its register until here.
__device__ __forceinline__ void keep(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void keep(u32& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void keep(int& v) { asm volatile("" : "+r"(v)); }

// Ends the block of instructions within which the compiler moves a wait for products up, before
// sums that could go beside them. No sum of exponentials is negative.
__device__ __forceinline__ void end_block(float never_negative) {
    if (never_negative < 0.0f) asm volatile("nanosleep.u32 20;");  // of a trap ptxas makes spills
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kInFlight, int kSums>
__device__ __forceinline__ void finish(Sum (&d)[kSums]) {
    hold(d);
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
    hold(d);
}
