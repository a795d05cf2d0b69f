#include "buffers.hpp"

#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace buffers {
namespace {

constexpr size_t kPage = size_t{1} << 21;  // a huge page, where there are some
constexpr size_t kHuge = size_t{1} << 20;  // bytes from which a block is made of them

struct Block {
    void* at;
    size_t bytes;
};

// Freed blocks, the newest `most` bytes of them, oldest first.
struct Shelf {
    size_t most;
    std::vector<Block> blocks = {};
    size_t bytes = 0;

    // The newest of this size, or null.
    void* take(size_t size) {
        for (size_t i = blocks.size(); i-- > 0;) {
            if (blocks[i].bytes != size) continue;
            void* block = blocks[i].at;
            blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
            bytes -= size;
            return block;
        }
        return nullptr;
    }

    // What there is no room for any more goes to `surplus`.
    void put(Block block, std::vector<void*>& surplus) {
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
    Shelf kept{kKept}, lent{kLent};

    Shelf& of(size_t bytes) { return bytes > kKept ? lent : kept; }
};

// Never destroyed: arrays may be freed after this file's statics are gone.
Store& store() {
    static Store* one = new Store;
    return *one;
}

// Lets the system take the block's pages, whose contents then become zeros; false if it cannot.
bool lend([[maybe_unused]] void* block, [[maybe_unused]] size_t bytes) {
#if defined(MADV_FREE)
    return madvise(block, bytes, MADV_FREE) == 0;
#else
    return false;
#endif
}

}  // namespace

void* take(size_t bytes) {
    const size_t unit = bytes < kHuge ? kLeast : kPage;
    const size_t rounded = (bytes + unit - 1) / unit * unit;
    Store& s = store();
    {
        std::lock_guard lock(s.mutex);
        if (void* block = s.of(rounded).take(rounded)) {
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

void give_back(void* block) {
    Store& s = store();
    size_t bytes;
    {
        std::lock_guard lock(s.mutex);
        const auto found = s.sizes.find(block);
        bytes = found->second;
        s.sizes.erase(found);
    }
    std::vector<void*> surplus;
    if (bytes > kKept && !lend(block, bytes)) {
        surplus.push_back(block);
    } else {
        std::lock_guard lock(s.mutex);
        s.of(bytes).put({block, bytes}, surplus);
    }
    for (void* old : surplus) std::free(old);
}

}  // namespace buffers
