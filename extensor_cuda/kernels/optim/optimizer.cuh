// Shared by the optimizer steps: the table of parameters and the update rules, operation by
// operation as in extensor/backends/generic/optim.py, so that bits agree. No macros.

#include "common/types.cuh"

constexpr int kThreads = 256, kPart = 16384;  // elements of a block

// A parameter: its arrays, length, first block and factors.
struct Tensor {
    void* weight;
    const void* grad;
    void *first, *second;                              // moments; SGD: the momentum buffer, or null
    u8 *first_scales, *second_scales, *weight_scales;  // of blocks
    const int* slots;  // not null: the gradient is rows; which of them is a row's, or -1
    i64 count, start;
    double shrink;  // the learning rate's multiple that decoupled weight decay subtracts
    float take1, keep2, take2, eps, decay, momentum;
    u32 nesterov, pace, number;  // number: selects the random bits of what is rounded
    u32 narrow;  // 0: weight and gradient are float32; 1: bfloat16; 2: MX blocks and bfloat16
    u32 width;   // of rows, a multiple of 4
};

struct Row {
    double correct, widen, step;  // 1 - beta1^t, 1 / sqrt(1 - beta2^t), and t
};

// What changes between steps. Tensors with different numbers of updates have different paces. A
// pace has `length` rows, and `made` (null: 0) selects one. `apart`: distance of the paces'
// learning rates, 0 if shared. *bad or *stop skips the step.
struct Pace {
    const double* lr;
    const Row* rows;
    const u32 *made, *bad, *stop;
    int length, apart;
    __device__ double rate(const Tensor& t) const { return lr[t.pace * apart]; }
    __device__ Row row(const Tensor& t) const {
        return rows[static_cast<i64>(t.pace) * length + (made ? *made : 0)];
    }
};

DEVICE const Tensor& tensor_of(const Tensor* tensors, int number) {
    int low = 0, high = number - 1;  // finds the last tensor that starts at or before this block
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (tensors[middle].start <= static_cast<i64>(blockIdx.x)) low = middle;
        else high = middle - 1;
    }
    return tensors[low];
}

// An update rule moves one value and returns the root of its second moment.
struct Adam {
    static constexpr bool kSquare = true;
    float take1, keep2, take2, widen, eps, rate, keep, decay;
    __device__ Adam(const Tensor& t, const Pace& pace)
        : take1(t.take1), keep2(t.keep2), take2(t.take2), eps(t.eps), decay(t.decay) {
        // In double and rounded once, like on the host.
        const double lr = pace.rate(t);
        const Row row = pace.row(t);
        rate = static_cast<float>(__ddiv_rn(lr, row.correct));
        widen = static_cast<float>(row.widen);
        keep = static_cast<float>(__dsub_rn(1.0, __dmul_rn(lr, t.shrink)));
    }
    __device__ float operator()(float& weight, float grad, float& mean, float& square) const {
        if (decay != 0) grad = __fadd_rn(__fmul_rn(weight, decay), grad);
        mean = __fadd_rn(mean, __fmul_rn(__fsub_rn(grad, mean), take1));
        square = __fadd_rn(__fmul_rn(square, keep2), __fmul_rn(__fmul_rn(grad, grad), take2));
        const float root = __fsqrt_rn(square), below = __fadd_rn(__fmul_rn(root, widen), eps);
        weight = __fsub_rn(__fmul_rn(weight, keep), __fmul_rn(__fdiv_rn(mean, below), rate));
        return root;
    }
};

struct Lion {
    static constexpr bool kSquare = false;
    float rate, keep, keep1, take1, keep2, take2;
    __device__ Lion(const Tensor& t, const Pace& pace)
        : keep1(t.momentum), take1(t.take1), keep2(t.keep2), take2(t.take2) {
        const double lr = pace.rate(t);
        rate = static_cast<float>(lr);
        keep = static_cast<float>(__dsub_rn(1.0, __dmul_rn(lr, t.shrink)));
    }
    __device__ float operator()(float& weight, float grad, float& mean, float&) const {
        const float ahead = __fadd_rn(__fmul_rn(mean, keep1), __fmul_rn(grad, take1));
        const float sign = ahead > 0 ? 1.0f : ahead < 0 ? -1.0f : ahead == 0 ? 0.0f : ahead;
        weight = __fsub_rn(__fmul_rn(weight, keep), __fmul_rn(sign, rate));
        mean = __fadd_rn(__fmul_rn(mean, keep2), __fmul_rn(grad, take2));
        return 0;
    }
};

struct Descent {
    static constexpr bool kSquare = false;
    float rate, decay, momentum;
    bool nesterov, keeps;
    __device__ Descent(const Tensor& t, const Pace& pace)
        : rate(static_cast<float>(pace.rate(t))),
          decay(t.decay),
          momentum(t.momentum),
          nesterov(t.nesterov),
          keeps(t.first) {}
    __device__ float operator()(float& weight, float grad, float& buffer, float&) const {
        if (decay != 0) grad = __fadd_rn(__fmul_rn(weight, decay), grad);
        if (keeps) {
            buffer = __fadd_rn(__fmul_rn(buffer, momentum), grad);
            grad = nesterov ? __fadd_rn(__fmul_rn(buffer, momentum), grad) : buffer;
        }
        weight = __fsub_rn(weight, __fmul_rn(grad, rate));
        return 0;
    }
};

DEVICE bool aligned(const void* p, int bytes = 16) {
    return reinterpret_cast<u64>(p) % bytes == 0;  // null too
}

#define OPTIMIZER_SPAN_PARAMETERS                                                        \
    const double *lr, const Row *rows, const u32 *made, const u32 *bad, const u32 *stop, \
        int length, int apart
