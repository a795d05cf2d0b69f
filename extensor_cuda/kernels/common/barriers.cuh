// Hopper's barriers in shared memory (mbarrier), bulk copies that complete on them, and clusters.

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
        : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
#if COMMON_GUARD
    for (u32 spins = 0;; ++spins) {
        if (spins > (1u << 22)) asm volatile("trap;");
#else
    for (;;) {
#endif
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

// Tests whether a phase is complete, without waiting.
DEVICE bool barrier_test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// Copies contiguous bytes: a multiple of 16, from a 16-byte aligned address.
DEVICE void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// 8 bytes shared between blocks, without ordering of other memory.
DEVICE void store_relaxed(u64* to, u64 v) {
    asm volatile("st.relaxed.gpu.b64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
DEVICE u64 load_relaxed(const u64* from) {
    u64 v;
    asm volatile("ld.relaxed.gpu.b64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

DEVICE u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

DEVICE void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Computes a value here, not where it is used, and keeps it in a register until here.
DEVICE void keep(float& v) { asm volatile("" : "+f"(v)); }
DEVICE void keep(u32& v) { asm volatile("" : "+r"(v)); }
DEVICE void keep(int& v) { asm volatile("" : "+r"(v)); }
DEVICE void keep(i64& v) { asm volatile("" : "+l"(v)); }
DEVICE void keep(const u8*& v) { asm volatile("" : "+l"(v)); }
