#include "common/levels.hpp"

namespace levels {

int count() {
#ifdef EXTENSOR_X86
    __builtin_cpu_init();
    const auto has = [](auto... held) { return (held && ...); };
    if (!has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"))) return 1;
    const bool avx512 = has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
                            __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl"));
    return avx512 ? 3 : 2;
#else
    return 1;
#endif
}

int current = count() - 1;

}  // namespace levels
