#include "common/buffers.hpp"

#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace buffers {
namespace {

constexpr size_t kPage = size_t{1} << 21;      // a huge page, where there are some
constexpr size_t kHugeFrom = size_t{1} << 20;  // blocks of so many bytes consist of huge pages

struct Block {
    void* at;
    size_t bytes;
};

// Freed blocks, oldest first: the newest `most` bytes of them.
struct FreeList {
    size_t most;
    std::vector<Block> blocks = {};
    size_t bytes = 0;

    // The newest of this size, or null.
    void* allocate(size_t size) {
        for (size_t i = blocks.size(); i-- > 0;) {
            if (blocks[i].bytes != size) continue;
            void* block = blocks[i].at;
            blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
            bytes -= size;
            return block;
        }
        return nullptr;
    }

    // Blocks beyond `most` bytes go to `surplus`.
    void add(Block block, std::vector<void*>& surplus) {
        blocks.push_back(block);
        bytes += block.bytes;
        while (bytes > most) {
            surplus.push_back(blocks.front().at);
            bytes -= blocks.front().bytes;
            blocks.erase(blocks.begin());
        }
    }
};

struct Store {
    std::mutex mutex;
    std::unordered_map<void*, size_t> sizes;  // of the blocks in use
    FreeList kept{kKept}, reclaimable{kReclaimable};

    FreeList& of(size_t bytes) { return bytes > kKept ? reclaimable : kept; }
};

// Never destroyed: arrays may be freed after this file's statics are gone.
Store& store() {
    static Store* one = new Store;
    return *one;
}

// Lets the system take the block's pages, whose contents then become zeros; false if it cannot.
bool mark_reclaimable([[maybe_unused]] void* block, [[maybe_unused]] size_t bytes) {
#if defined(MADV_FREE)
    return madvise(block, bytes, MADV_FREE) == 0;
#else
    return false;
#endif
}

}  // namespace

void* allocate(size_t bytes) {
    const size_t unit = bytes < kHugeFrom ? kMinBytes : kPage;
    const size_t rounded = (bytes + unit - 1) / unit * unit;
    Store& s = store();
    {
        std::lock_guard lock(s.mutex);
        if (void* block = s.of(rounded).allocate(rounded)) {
            s.sizes.emplace(block, rounded);
            return block;
        }
    }
    void* block = std::aligned_alloc(unit == kPage ? kPage : 64, rounded);
    if (!block) throw std::bad_alloc();
#if defined(__linux__)
    if (unit == kPage) madvise(block, rounded, MADV_HUGEPAGE);  // advice: nothing depends on it
#endif
    std::lock_guard lock(s.mutex);
    s.sizes.emplace(block, rounded);
    return block;
}

void release(void* block) {
    Store& s = store();
    size_t bytes;
    {
        std::lock_guard lock(s.mutex);
        const auto found = s.sizes.find(block);
        bytes = found->second;
        s.sizes.erase(found);
    }
    std::vector<void*> surplus;
    if (bytes > kKept && !mark_reclaimable(block, bytes)) {
        surplus.push_back(block);
    } else {
        std::lock_guard lock(s.mutex);
        s.of(bytes).add({block, bytes}, surplus);
    }
    for (void* old : surplus) std::free(old);
}

}  // namespace buffers
