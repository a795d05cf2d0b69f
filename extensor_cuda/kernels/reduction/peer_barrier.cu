// A barrier of ranks whose GPUs reach each other's memory: what all ranks' streams wrote before is
// there for all of them behind it. A word of `flags` says how often its writer was here.

#include "common/types.cuh"

constexpr int kMost = 32;        // ranks: a thread each
constexpr u32 kPolls = 1 << 12;  // between looks at the host's word

// flags[r] is rank r's memory: kMost words that the others write, then those that it wrote to them.
extern "C" __global__ void __launch_bounds__(kMost)
    peer_barrier(u32* const* flags, const volatile u32* stop, int rank, int size) {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer >= size) return;
    u32* written = flags[rank] + kMost + peer;
    const u32 times = *written + 1;
    *written = times;
    __threadfence_system();
    *static_cast<volatile u32*>(flags[peer] + rank) = times;
    const volatile u32* read = flags[rank] + peer;
    // A peer may be here again already: then its word is one ahead.
    for (u32 polls = 1; static_cast<int>(*read - times) < 0; ++polls)
        if (polls % kPolls == 0 && *stop) break;
    __threadfence_system();
}
