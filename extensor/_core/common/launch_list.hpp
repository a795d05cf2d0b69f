// Launches of CUDA kernels that are made again by one call, on other memory.
//
// Parameters are laid out once. A run copies them, writes the addresses of its arrays into the copy
// and launches. The driver's functions are given by address, so that a build needs no CUDA.
#pragma once

#include <cstring>
#include <stdexcept>

#include "common/bind.hpp"

class LaunchList {
public:
    // Where an address stands: in a parameter, so many bytes behind an array's first.
    struct Pointer {
        size_t parameter, offset, array;
        uint64_t behind;
        bool tensor_map;
    };

    // ``launch``: cuLaunchKernelEx; ``replace``: cuTensorMapReplaceAddress.
    LaunchList(uintptr_t launch, uintptr_t replace)
        : launch_(reinterpret_cast<Launching>(launch)),
          replace_(reinterpret_cast<Replacing>(replace)) {}

    // ``sizes``: blocks, threads of a block, its bytes of shared memory. ``cooperative``: all
    // blocks run at a time.
    void add(uintptr_t function, std::array<unsigned, 3> sizes, bool cooperative,
             const std::vector<std::string>& parameters, const std::vector<Pointer>& pointers) {
        const size_t first = offsets_.size();
        for (const std::string& bytes : parameters) {
            const size_t at = memory_.size();
            memory_.resize(at + (bytes.size() + sizeof(Chunk) - 1) / sizeof(Chunk));
            std::memcpy(&memory_[at], bytes.data(), bytes.size());
            offsets_.push_back(at);
        }
        for (const Pointer& p : pointers) {
            require(p.parameter < parameters.size(), "add: a pointer's parameter is not there");
            const size_t size = p.tensor_map ? 0 : sizeof(uint64_t);
            require(p.offset + size <= parameters[p.parameter].size(), "add: a pointer outside");
            arrays_ = std::max(arrays_, p.array + 1);
            pointers_.push_back(p);
            pointers_.back().parameter += first;
        }
        launches_.push_back({function, sizes, cooperative, first});
    }

    // Launch all on a stream, with these addresses of the arrays; does not wait.
    void run(uintptr_t stream, const std::vector<uint64_t>& addresses) const {
        require(addresses.size() >= arrays_, "run: fewer addresses than arrays");
        size_t failed = 0;
        int error = 0;
        without_gil([&] { error = launch_all(stream, addresses, failed); });
        if (error)
            throw std::runtime_error("cuLaunchKernelEx of launch " + std::to_string(failed) +
                                     " of a list failed with error " + std::to_string(error));
    }

    size_t size() const { return launches_.size(); }

private:
    struct alignas(64) Chunk {  // a tensor map's alignment
        unsigned char bytes[64];
    };
    struct Launch {
        uintptr_t function;
        std::array<unsigned, 3> sizes;
        bool cooperative;
        size_t first;  // of its parameters
    };
    struct Attribute {  // CUlaunchAttribute: that all blocks run at a time
        unsigned id = 2, gap = 0;
        alignas(8) unsigned char value[64] = {1};
    };
    struct Config {  // CUlaunchConfig
        unsigned grid[3], block[3], shared;
        uintptr_t stream;
        Attribute* attributes;
        unsigned count;
    };
    using Launching = int (*)(const Config*, uintptr_t, void**, void**);
    using Replacing = int (*)(void*, void*);

    int launch_all(uintptr_t stream, const std::vector<uint64_t>& addresses, size_t& at) const {
        std::vector<Chunk> copy(memory_);
        for (const Pointer& p : pointers_) {
            unsigned char* parameter = copy[offsets_[p.parameter]].bytes;
            const uint64_t address = addresses[p.array] + p.behind;
            if (!p.tensor_map)
                std::memcpy(parameter + p.offset, &address, sizeof address);
            else if (const int error = replace_(parameter, reinterpret_cast<void*>(address)))
                return error;
        }
        std::vector<void*> parameters;
        for (size_t offset : offsets_) parameters.push_back(&copy[offset]);
        for (at = 0; at < launches_.size(); ++at) {
            const Launch& one = launches_[at];
            const auto [blocks, threads, shared] = one.sizes;
            Attribute attribute;
            const Config config{{blocks, 1, 1}, {threads, 1, 1}, shared,
                                stream,         &attribute,      one.cooperative};
            void** given = parameters.data() + one.first;
            if (const int error = launch_(&config, one.function, given, nullptr)) return error;
        }
        return 0;
    }

    Launching launch_;
    Replacing replace_;
    std::vector<Chunk> memory_;
    std::vector<size_t> offsets_;  // of each parameter in it
    std::vector<Pointer> pointers_;
    std::vector<Launch> launches_;
    size_t arrays_ = 0;
};
