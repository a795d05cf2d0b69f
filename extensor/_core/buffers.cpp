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

struct Store {
    std::mutex mutex;
    std::unordered_map<void*, size_t> sizes;  // of the blocks in use
    std::vector<Block> free;                  // oldest first
    size_t kept = 0;
};

// Never destroyed: arrays may be freed after this file's statics are gone.
Store& store() {
    static Store* one = new Store;
    return *one;
}

}  // namespace

void* take(size_t bytes) {
    const size_t unit = bytes < kHuge ? kLeast : kPage;
    const size_t rounded = (bytes + unit - 1) / unit * unit;
    Store& s = store();
    {
        std::lock_guard lock(s.mutex);
        for (size_t i = s.free.size(); i-- > 0;) {
            if (s.free[i].bytes != rounded) continue;
            void* block = s.free[i].at;
            s.free.erase(s.free.begin() + static_cast<std::ptrdiff_t>(i));
            s.kept -= rounded;
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
    std::vector<void*> surplus;
    {
        std::lock_guard lock(s.mutex);
        const auto found = s.sizes.find(block);
        s.free.push_back({block, found->second});
        s.kept += found->second;
        s.sizes.erase(found);
        while (s.kept > kKept) {
            surplus.push_back(s.free.front().at);
            s.kept -= s.free.front().bytes;
            s.free.erase(s.free.begin());
        }
    }
    for (void* old : surplus) std::free(old);
}

}  // namespace buffers
