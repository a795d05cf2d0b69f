// The optimizers' kernels, as a table.
#pragma once

#include <cstdint>

#include "common/levels.hpp"
#include "quantize/kernels.hpp"

struct Sgd {
    float lr, momentum, decay;
    bool nesterov;
};

struct OptimKernels {
    // `buffer`, written with the momentum, may be null.
    void (*sgd)(const Sgd&, int64_t n, float* weight, const float* grad, float* buffer);
    // `factors` are kAdamFactors numbers; see optimizers.cpp.
    void (*adam)(int64_t n, float* weight, const float* grad, float* mean, float* square,
                 const float* factors);
    // `factors` are kLionFactors numbers; see optimizers.cpp.
    void (*lion)(int64_t n, float* weight, const float* grad, float* mean, const float* factors);
    bool (*all_finite)(int64_t n, const float* x);
    // float32 -> the bits of bfloat16.
    void (*stochastic_bfloat16)(const QuantStream&, int64_t n, const float* x, uint16_t* out);
};

constexpr int kAdamFactors = 7, kLionFactors = 6;

EXTENSOR_KERNELS(OptimKernels, optim_kernels)
