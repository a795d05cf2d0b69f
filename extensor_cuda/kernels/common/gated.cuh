// SwiGLU's gate. Compiled with --fmad=false.

// What is multiplied, and the sigmoid. Without a limit it is infinite, and `shift` is 0.
struct Gated {
    float a, u, s;
};

DEVICE Gated gated(float gate, float up, float alpha, float limit, float shift) {
    const float a = gate > limit ? limit : gate;
    float u = up > limit ? limit : up < -limit ? -limit : up;
    if (shift != 0) u = __fadd_rn(u, shift);
    return {a, u, __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(__fmul_rn(a, -alpha))))};
}
