// Instruction sets ("levels"): which of them this CPU has, which one is in use, and a table of
// kernels for each.
#pragma once

namespace levels {

// Each contains the one before.
inline constexpr const char* kNames[] = {"scalar", "avx2", "avx512"};

int count();         // the first so many of them are in this build and on this CPU
extern int current;  // index of the one in use

template <class Table, int Count>
const Table& in_use(const Table* const (&tables)[Count]) {
    return *tables[current];
}

}  // namespace levels

// Declares `name` in every level's namespace, and the array of all of them for levels::in_use.
#ifdef EXTENSOR_X86
#define EXTENSOR_KERNELS(Table, name) \
    namespace scalar {                \
    extern const Table name;          \
    }                                 \
    namespace avx2 {                  \
    extern const Table name;          \
    }                                 \
    namespace avx512 {                \
    extern const Table name;          \
    }                                 \
    inline constexpr const Table* name[] = {&scalar::name, &avx2::name, &avx512::name};
#else
#define EXTENSOR_KERNELS(Table, name) \
    namespace scalar {                \
    extern const Table name;          \
    }                                 \
    inline constexpr const Table* name[] = {&scalar::name};
#endif
