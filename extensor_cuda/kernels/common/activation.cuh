// ReLU and GELU, x Phi(x) with the normal distribution function Phi, in float32.
// COMMON_FULL_PRECISION: accurate to float32, otherwise to bfloat16.

// Phi(-t) = e s P(s) for t >= 0, with e = exp(-t^2 / 2), s = 1 / (1 + c t) and P a minimax fit of
// sqrt(pi / 2) erfcx. Degree 9 errs by 8 units of 2^-24 as evaluated, degree 5 by 2^-16.8.
#if COMMON_FULL_PRECISION
constexpr float kC = 0.4399999976158142f;
__device__ const float kP[] = {0.1755484640598297f, 0.17516793310642242f, 0.14555662870407104f,
    0.05019409582018852f, 0.06932248920202255f, -0.20567955076694489f, 0.02549086883664131f,
    0.15493308007717133f, -0.11826606839895248f, 0.027732083573937416f};
DEVICE float bell(float x) { return expf(__fmul_rn(__fmul_rn(x, x), -0.5f)); }
#else
constexpr float kC = 0.46000000834465027f;
__device__ const float kP[] = {0.18334633111953735f, 0.1870667189359665f, 0.11610667407512665f,
    0.17780117690563202f, -0.2365446835756302f, 0.07222805917263031f};
DEVICE float bell(float x) { return __expf(__fmul_rn(__fmul_rn(x, x), -0.5f)); }
#endif
constexpr int kDegree = sizeof(kP) / sizeof(float) - 1;

DEVICE float normal_below(float x, float e) {
    const float s = reciprocal(__fmaf_rn(fabsf(x), kC, 1.0f));
    float p = kP[kDegree];
#pragma unroll
    for (int i = kDegree - 1; i >= 0; --i) p = __fmaf_rn(p, s, kP[i]);
    const float tail = __fmul_rn(__fmul_rn(p, s), e);
    return x > 0 ? __fsub_rn(1.0f, tail) : tail;
}

struct Gelu {
    DEVICE float operator()(float x, float) const { return __fmul_rn(x, normal_below(x, bell(x))); }
};
struct Relu {
    DEVICE float operator()(float x, float) const { return x <= 0 ? 0.0f : x; }
};
