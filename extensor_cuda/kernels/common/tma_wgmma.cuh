// TMA copies between global and shared memory, and what surrounds wgmma. Needs kCluster, TensorMap,
// Sum and SUM.

#include "common/barriers.cuh"

// ---- copies ----

// Tells every block of the cluster that its stage may be overwritten.
DEVICE void release_stage(u32 barrier, int lane) {
    if (lane >= kCluster) return;
    if (kCluster == 1) {
        barrier_arrive(barrier);
    } else {
        asm volatile(
            "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(barrier),
            "r"(lane)
            : "memory");
    }
}

DEVICE void tma_load_2d(u32 to, const TensorMap* map, int byte, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier)
        : "memory");
}

DEVICE void tma_load_multicast(u32 to, const TensorMap* map, int byte, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier), "h"(static_cast<u16>((1 << kCluster) - 1))
        : "memory");
}

// Copies a box of a four-axis tensor to shared memory, and back.
DEVICE void tma_load_4d(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
        : "memory");
}

DEVICE void tma_store_4d(const TensorMap* map, int x, int y, int z, int w, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
            map),
        "r"(x), "r"(y), "r"(z), "r"(w), "r"(from)
        : "memory");
}
// Makes this thread's writes to shared memory visible to TMA stores.
DEVICE void fence_shared_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A counter that other blocks raise after their stores; what it counts is visible.
DEVICE u32 load_acquire(const u32* from) {
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(from) : "memory");
    return count;
}
DEVICE void add_release(u32* to, u32 count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(count) : "memory");
}
// Orders stores to global memory before TMA loads of them.
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

DEVICE u32 to_bf16x2(float high, float low) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- wgmma ----

// Names the accumulators, so that the compiler moves no use of them across.
template <int kSums>
DEVICE void fence_accumulators(Sum (&d)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+" SUM(d[i])::"memory");
}

// Ends a basic block, because the compiler moves a wait for wgmma up within one, before sums that
// could overlap it. The argument, a sum of exponentials, is never negative.
DEVICE void end_basic_block(float never_negative) {
    if (never_negative < 0.0f) asm volatile("nanosleep.u32 20;");  // a trap makes ptxas spill
}

DEVICE void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kInFlight, int kSums>
DEVICE void warpgroup_wait(Sum (&d)[kSums]) {
    fence_accumulators(d);
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
    fence_accumulators(d);
}
