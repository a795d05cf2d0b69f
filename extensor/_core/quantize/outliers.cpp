// The outlier codec of extensor/quant/outlier.py, apart from quantizing the rest: splits rows into
// their mean, their largest values and the rest, and joins them again.

#include "quantize/row_chunks.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int kTogether = 8;  // rows whose sums, each an addition after another, run side by side

// Sums in float64 from 0.0 by ascending index.
template <int Rows>
void sums(const float* x, int64_t n, double* totals) {
    double t[Rows] = {};
    for (int64_t i = 0; i < n; ++i)
        for (int r = 0; r < Rows; ++r) t[r] += static_cast<double>(x[r * n + i]);
    for (int r = 0; r < Rows; ++r) totals[r] = t[r];
}

// The k-th largest magnitude of x, 1 <= k <= n, as bits: found bit by bit from the highest.
uint32_t kth_largest(const float* x, int64_t n, int64_t k) {
    uint32_t found = 0;
    for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
        const vi candidate = reinterpret_cast<vi>(splat(found | bit));
        vi count = {};
        for (int64_t i = 0; i < n; i += VL) {
            const vu m = magnitude_bits(load_upto(x + i, n - i));
            count -= reinterpret_cast<vi>(m) >= candidate;  // zeros past the end are below
        }
        int64_t total = 0;
        for (int i = 0; i < VL; ++i) total += count[i];
        if (total >= k) found |= bit;
    }
    return found;
}

void split_row(const OutlierJob& job, int64_t row, bool finite, double total) {
    const int64_t n = job.length, k = job.kept;
    const float* x = job.x + row * n;
    float* rest = job.rest + row * n;
    const float mean = finite ? static_cast<float>(total / static_cast<double>(n)) : 0.0f;
    job.means[row] = mean;
    for (int64_t i = 0; i < n; i += VL) {
        const vf v = finite ? load_upto(x + i, n - i) - mean : vf{};
        store_upto(rest + i, v, n - i);
    }
    int32_t* index = job.index + row * k;
    float* values = job.values + row * k;
    const uint32_t threshold = k ? kth_largest(rest, n, k) : 0;
    // All above the threshold, and of those at it as many as there is room for, the first ones.
    int64_t above = 0;
    for (int64_t i = 0; k && i < n; ++i)
        above += (bits_of(splat(rest[i]))[0] & kMagnitude) > threshold;
    int64_t room = k - above;
    for (int64_t i = 0, at = 0; at < k; ++i) {
        const uint32_t bits = bits_of(splat(rest[i]))[0] & kMagnitude;
        if (bits < threshold || (bits == threshold && room-- <= 0)) continue;
        index[at] = static_cast<int32_t>(i);
        values[at++] = x[i];
        rest[i] = 0;
    }
    if (!finite)
        for (int64_t i = 0; i < n; ++i) rest[i] = as_float(kNaN);
}

}  // namespace

void split_outliers(const OutlierJob& job) {
    const int64_t n = job.length;
    threads::run(ceil_div(job.rows, kTogether), 40 * job.rows * n, [&](int64_t task) {
        const int64_t first = task * kTogether, count = least(kTogether, job.rows - first);
        double totals[kTogether];
        if (count == kTogether)
            sums<kTogether>(job.x + first * n, n, totals);
        else
            for (int64_t r = 0; r < count; ++r) sums<1>(job.x + (first + r) * n, n, totals + r);
        for (int64_t r = 0; r < count; ++r) {
            const bool finite = run_maximum(job.x + (first + r) * n, n) < kExponentMask;
            split_row(job, first + r, finite, totals[r]);
        }
    });
}

int64_t join_outliers(const OutlierJob& job, const float* scales) {
    const int64_t n = job.length, k = job.kept;
    const int64_t tasks = ceil_div(job.rows, kTogether);
    int64_t* flushed = scratch_of<int64_t>(Slot::partial, tasks);
    threads::run(tasks, 8 * job.rows * n, [&](int64_t task) {
        flushed[task] = 0;
        const int64_t last = least((task + 1) * kTogether, job.rows);
        for (int64_t row = task * kTogether; row < last; ++row) {
            float* rest = job.rest + row * n;
            for (int64_t i = 0; i < n; i += VL)
                store_upto(rest + i, load_upto(rest + i, n - i) + job.means[row], n - i);
            const bool broken = scales[row] != scales[row];
            for (int64_t i = row * k; i < (row + 1) * k; ++i)
                rest[job.index[i]] = broken ? as_float(kNaN) : job.values[i];
            if (!job.x) continue;
            const float* x = job.x + row * n;
            for (int64_t i = 0; i < n; ++i) flushed[task] += x[i] != 0 && rest[i] == 0;
        }
    });
    int64_t total = 0;
    for (int64_t task = 0; task < tasks; ++task) total += flushed[task];
    return total;
}

}  // namespace EXTENSOR_ISA
