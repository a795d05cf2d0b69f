// SwiGLU's gate. Compiled with --fmad=false.

// What is multiplied, and the sigmoid. Without a limit it is infinite, and `shift` is 0.
struct Gated {
    float a, u, s;
};

// The smaller of two, NaN if one is.
DEVICE float smaller(float a, float b) {
#ifdef __CUDA_ARCH__
    float out;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
#else
    return a > b || b != b ? b : a;
#endif
}

DEVICE Gated gated(float gate, float up, float alpha, float limit, float shift) {
    const float a = smaller(gate, limit);
    float u = -smaller(limit, -smaller(up, limit));
    if (shift != 0) u = __fadd_rn(u, shift);
    return {a, u, reciprocal(__fadd_rn(1.0f, expf(__fmul_rn(a, -alpha))))};
}
