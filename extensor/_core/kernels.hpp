// The kernels that exist once per instruction set, as a table of function pointers per level.
#pragma once

#include <cstdint>

// A convolution or pooling: (n, c, h, w) with a kernel of (kh, kw) -> (n, o, ho, wo).
struct Conv {
    int64_t n, c, h, w, o, groups, kh, kw, sh, sw, ph, pw, dh, dw, ho, wo;
};

struct WindowKernels {
    void (*conv)(const Conv&, const float* x, const float* w, float* y);
    void (*conv_grad_x)(const Conv&, const float* g, const float* w, float* gx);
    void (*conv_grad_w)(const Conv&, const float* g, const float* x, float* gw);
    void (*max_pool)(const Conv&, const float* x, float* y, int32_t* index);
    void (*max_pool_grad)(const Conv&, const float* g, const int32_t* index, float* gx);
    void (*im2col)(const Conv&, const float* x, float* columns);
    void (*col2im)(const Conv&, const float* columns, float* x);
};

#define EXTENSOR_DECLARE_LEVEL(level) \
    namespace level {                 \
    extern const WindowKernels window_kernels; \
    }

EXTENSOR_DECLARE_LEVEL(scalar)
#ifdef EXTENSOR_X86
EXTENSOR_DECLARE_LEVEL(avx2)
EXTENSOR_DECLARE_LEVEL(avx512)
#endif
