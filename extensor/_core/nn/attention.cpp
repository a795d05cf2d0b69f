// Attention, softmax(scale q k^T) v, and its gradient, a head at a time (arXiv 1706.03762, section
// 3.2.1).
//
// No array of all scores is kept. Forward saves each row's largest score and the inverse of the sum
// of its exponentials; the gradient computes the probabilities again from these (arXiv 2205.14135,
// appendix B). A task owns whole heads of everything it writes, so results do not depend on
// threads. Causal: query t sees the keys up to t + keys - queries; with a window, only the last of
// these. A query that sees nothing gets zeros.

#include "common/sgemm.hpp"
#include "common/threads.hpp"
#include "nn/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kRows = 32;  // queries at a time

// A task's scratch memory, handed out in blocks that begin on a vector's boundary.
struct Arena {
    float* next;
    INLINE float* allocate(int64_t floats) {
        float* block = next;
        next += round_up(floats, VL);
        return block;
    }
};

INLINE float* matrix_of(const Heads& x, int64_t outer, int64_t head) {
    return x.at + outer * x.outer + head * x.head;
}

// A right operand of k x n: read in place where rows end with a vector, else packed.
Right in_place(const float* b, int64_t ld, int64_t n, int64_t k, float* memory) {
    return n % VL ? pack_right(b, ld, false, n, k, memory) : Right{b, ld, kPanel};
}

INLINE Left row_major(const float* at, int64_t ld) { return {at, ld, 0, true}; }
INLINE Left column_major(const float* at, int64_t ld) { return {at, ld, 0, false}; }

INLINE int64_t seen_by(const Attention& s, int64_t query) {
    return s.causal ? query + 1 + s.keys - s.queries : s.keys;
}

// The first key that a query sees.
INLINE int64_t first_seen(const Attention& s, int64_t query) {
    return s.window ? most(0, query + 1 + s.keys - s.queries - s.window) : 0;
}

// Scores of keys that the window or the mask hides become -infinity.
void hide(const Attention& s, int64_t outer, int64_t head, int64_t query, float* row) {
    const int64_t begin = first_seen(s, query), seen = seen_by(s, query);
    for (int64_t j = 0; j < begin; ++j) row[j] = -__builtin_inff();
    if (!s.mask.at) return;
    const uint8_t* mask =
        s.mask.at + outer * s.mask.outer + head * s.mask.head + query * s.mask.row;
    for (int64_t j = begin; j < seen; ++j)
        if (!mask[j]) row[j] = -__builtin_inff();
}

// Scores to exp(score - the largest) for the first `seen` keys, to zero for those up to `visible`.
// `sink`: another score, or null. `limited`: a row may see nothing.
void exponentials(float* row, int64_t seen, int64_t visible, const float* sink, bool limited,
                  float* stats) {
    vf best = splat(row[0]);
    int64_t j = 0;
    for (; j + VL <= seen; j += VL) best = larger(best, load(row + j));
    for (; j < seen; ++j) best = larger(best, splat(row[j]));
    if (sink) best = larger(best, splat(*sink));
    const vf top = largest_lane(best);
    if (limited && top[0] == -__builtin_inff()) {
        std::memset(row, 0, static_cast<size_t>(visible) * 4);
        stats[0] = stats[1] = 0;
        return;
    }
    vf total = {};
    for (j = 0; j + VL <= seen; j += VL) {
        const vf e = exp_score(load(row + j) - top);
        store(row + j, e);
        total += e;
    }
    if (j < seen) {
        store_at(row, exp_score(load_at(row, j, seen) - top), j, seen);
        total += load_at(row, j, seen);  // without the lanes beyond
    }
    for (j = seen; j < visible; ++j) row[j] = 0;
    const float all = sum(total) + (sink ? exp_score(splat(*sink) - top)[0] : 0.0f);
    stats[0] = top[0];
    stats[1] = 1.0f / all;
}

// Transposed keys times the scale, so that products with queries are scores.
Right scaled_keys(const Attention& s, const float* k, float* memory) {
    const Right keys = pack_right(k, s.k.row, true, s.keys, s.width, memory);
    const vf scale = splat(s.scale);
    for (int64_t i = 0; i < packed_right(s.keys, s.width); i += VL)
        store(memory + i, load(memory + i) * scale);
    return keys;
}

// Of R heads that share keys, by R rows of `p`, `ld` apart: the sum over keys of p times their
// values, elements first .. first + V * VL.
template <int R, int V>
INLINE void add_values(const Attention& s, const float* p, int64_t ld, const float* v,
                       int64_t first, const float* stats, float* out) {
    const int64_t n = s.value_width;
    vf total[R][V] = {};
    for (int64_t j = 0; j < s.keys; ++j) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const vf value = load_at(v + j * s.v.row, first + i * VL, n);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                total[r][i] = multiply_add(splat(p[r * ld + j]), value, total[r][i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < V; ++i)
            store_at(out + r * s.out.head, total[r][i] * splat(stats[2 * r + 1]), first + i * VL,
                     n);
}

// The R heads from `head` on, which share keys: each key and value is read once, where it is.
template <int R>
void heads_of_one_query(const Attention& s, int64_t outer, int64_t head, Arena memory) {
    const int64_t width = round_up(s.width, VL), ld = round_up(s.keys, VL);
    const int64_t shared = head / (s.heads / s.groups);
    const bool limited = s.window || s.mask.at;
    float *query = memory.allocate(R * width), *scores = memory.allocate(R * ld);
    const float* k = matrix_of(s.k, outer, shared);
    for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < width; i += VL)
            store(query + r * width + i,
                  load_at(matrix_of(s.q, outer, head + r), i, s.width) * splat(s.scale));
    for (int64_t j = 0; j < s.keys; ++j) {
        vf total[R] = {};
        for (int64_t i = 0; i < s.width; i += VL) {
            const vf key = load_at(k + j * s.k.row, i, s.width);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                total[r] = multiply_add(load(query + r * width + i), key, total[r]);
        }
        for (int r = 0; r < R; ++r) scores[r * ld + j] = sum(total[r]);
    }
    float* stats = s.stats + (outer * s.heads + head) * 2;
    for (int r = 0; r < R; ++r) {
        hide(s, outer, head + r, 0, scores + r * ld);
        exponentials(scores + r * ld, s.keys, s.keys, s.sinks ? s.sinks + head + r : nullptr,
                     limited, stats + 2 * r);
    }
    const float* v = matrix_of(s.v, outer, shared);
    float* out = matrix_of(s.out, outer, head);
    int64_t first = 0;
    for (; first + 3 * VL < s.value_width; first += 4 * VL)
        add_values<R, 4>(s, scores, ld, v, first, stats, out);
    for (; first < s.value_width; first += VL)
        add_values<R, 1>(s, scores, ld, v, first, stats, out);
}

constexpr int64_t kSharing = 4;  // heads at a time

// One query a head, as decoding text has: keys and values are read where they are.
void one_query(const Attention& s) {
    const int64_t each = s.heads / s.groups, parts = ceil_div(each, kSharing);
    const int64_t bytes = 4 * kSharing * (round_up(s.width, VL) + round_up(s.keys, VL));
    const int64_t work = 2 * s.outer * s.heads * s.keys * (s.width + s.value_width);
    threads::run(s.outer * s.groups * parts, work, [=](int64_t task) {
        const int64_t group = task / parts % s.groups, first = task % parts * kSharing;
        const int64_t outer = task / (s.groups * parts), head = group * each + first;
        const Arena memory = {
            static_cast<float*>(threads::scratch(threads::Slot::packed_a, bytes))};
        switch (least(kSharing, each - first)) {
            case 1: return heads_of_one_query<1>(s, outer, head, memory);
            case 2: return heads_of_one_query<2>(s, outer, head, memory);
            case 3: return heads_of_one_query<3>(s, outer, head, memory);
            default: return heads_of_one_query<4>(s, outer, head, memory);
        }
    });
}

void forward(const Attention& s) {
    if (s.queries == 1) return one_query(s);
    const int64_t ld = round_up(s.keys, VL);
    const int64_t bytes = 4 * (packed_right(s.keys, s.width) + kRows * ld +
                               packed_right(s.value_width, s.keys) + 3 * VL);
    const int64_t work = s.outer * s.heads * s.queries * s.keys * s.width;
    const bool limited = s.window || s.mask.at;
    threads::run(s.outer * s.heads, work, [=](int64_t task) {
        const int64_t outer = task / s.heads, head = task % s.heads;
        const int64_t shared = head / (s.heads / s.groups);
        Arena memory = {static_cast<float*>(threads::scratch(threads::Slot::packed_a, bytes))};
        const float *q = matrix_of(s.q, outer, head), *k = matrix_of(s.k, outer, shared);
        const Right keys = scaled_keys(s, k, memory.allocate(packed_right(s.keys, s.width)));
        const Right values = in_place(matrix_of(s.v, outer, shared), s.v.row, s.value_width, s.keys,
                                      memory.allocate(packed_right(s.value_width, s.keys)));
        float* scores = memory.allocate(kRows * ld);
        float* stats = s.stats + task * s.queries * 2;
        for (int64_t first = 0; first < s.queries; first += kRows) {
            const int64_t rows = least(kRows, s.queries - first);
            const int64_t visible = seen_by(s, first + rows - 1);
            multiply(rows, visible, s.width, row_major(q + first * s.q.row, s.q.row), keys,
                     {scores, ld});
            for (int64_t i = 0; i < rows; ++i) {
                hide(s, outer, head, first + i, scores + i * ld);
                const float* sink = s.sinks ? s.sinks + head : nullptr;
                exponentials(scores + i * ld, seen_by(s, first + i), visible, sink, limited,
                             stats + 2 * (first + i));
            }
            float* out = matrix_of(s.out, outer, head) + first * s.out.row;
            multiply(rows, s.value_width, visible, row_major(scores, ld), values, {out, s.out.row});
            for (int64_t i = 0; i < rows; ++i) {
                const vf inverse = splat(stats[2 * (first + i) + 1]);
                for (int64_t j = 0; j < s.value_width; j += VL)
                    store_at(out + i * s.out.row,
                             load_at(out + i * s.out.row, j, s.value_width) * inverse, j,
                             s.value_width);
            }
        }
    });
}

// With p the probabilities, d = g v^T and t = sum over a row of g out = sum of p d:
// gv = p^T g;  ds = scale p (d - t);  gq = ds k;  gk = ds^T q.
void gradient(const Attention& s) {
    const int64_t ld = round_up(s.keys, VL), wide = s.width, values = s.value_width;
    const int64_t bytes = 4 * (packed_right(s.keys, wide) + packed_right(s.keys, values) +
                               packed_right(wide, s.keys) + packed_right(wide, kRows) +
                               packed_right(values, kRows) + 2 * kRows * ld + 7 * VL);
    const int64_t work = 2 * s.outer * s.heads * s.queries * s.keys * s.width;
    threads::run(s.outer * s.groups, work, [=](int64_t task) {
        const int64_t outer = task / s.groups, shared = task % s.groups;
        const int64_t each = s.heads / s.groups;
        Arena memory = {static_cast<float*>(threads::scratch(threads::Slot::packed_a, bytes))};
        const float *k = matrix_of(s.k, outer, shared), *v = matrix_of(s.v, outer, shared);
        const Right keys_transposed =
            scaled_keys(s, k, memory.allocate(packed_right(s.keys, wide)));
        const Right values_transposed = pack_right(v, s.v.row, true, s.keys, values,
                                                   memory.allocate(packed_right(s.keys, values)));
        const Right keys =
            in_place(k, s.k.row, wide, s.keys, memory.allocate(packed_right(wide, s.keys)));
        float* q_memory = memory.allocate(packed_right(wide, kRows));
        float* g_memory = memory.allocate(packed_right(values, kRows));
        float *p = memory.allocate(kRows * ld), *d = memory.allocate(kRows * ld);
        float *gk = matrix_of(s.gk, outer, shared), *gv = matrix_of(s.gv, outer, shared);
        for (int64_t i = 0; i < s.keys; ++i) {
            std::memset(gk + i * s.gk.row, 0, static_cast<size_t>(wide) * 4);
            std::memset(gv + i * s.gv.row, 0, static_cast<size_t>(values) * 4);
        }
        for (int64_t head = shared * each; head < (shared + 1) * each; ++head) {
            const float* stats = s.stats + (outer * s.heads + head) * s.queries * 2;
            for (int64_t first = 0; first < s.queries; first += kRows) {
                const int64_t rows = least(kRows, s.queries - first);
                const int64_t visible = seen_by(s, first + rows - 1);
                const float* q = matrix_of(s.q, outer, head) + first * s.q.row;
                const float* g = matrix_of(s.g, outer, head) + first * s.g.row;
                const float* out = matrix_of(s.out, outer, head) + first * s.out.row;
                multiply(rows, visible, wide, row_major(q, s.q.row), keys_transposed, {p, ld});
                multiply(rows, visible, values, row_major(g, s.g.row), values_transposed, {d, ld});
                for (int64_t i = 0; i < rows; ++i) {
                    float *pi = p + i * ld, *di = d + i * ld;
                    const int64_t seen = seen_by(s, first + i);
                    hide(s, outer, head, first + i, pi);
                    vf total = {};
                    for (int64_t j = 0; j < values; j += VL)
                        total = multiply_add(load_at(g + i * s.g.row, j, values),
                                             load_at(out + i * s.out.row, j, values), total);
                    const vf mean = splat(sum(total)), scale = splat(s.scale);
                    const vf top = splat(stats[2 * (first + i)]);
                    const vf inverse = splat(stats[2 * (first + i) + 1]);
                    for (int64_t j = 0; j < seen; j += VL) {
                        const vf e = exp_score(load_at(pi, j, seen) - top) * inverse;
                        store_at(pi, e, j, seen);
                        store_at(di, e * (load_at(di, j, seen) - mean) * scale, j, seen);
                    }
                    for (int64_t j = seen; j < visible; ++j) pi[j] = di[j] = 0;
                }
                multiply(visible, values, rows, column_major(p, ld),
                         in_place(g, s.g.row, values, rows, g_memory),
                         {gv, s.gv.row, nullptr, true});
                multiply(visible, wide, rows, column_major(d, ld),
                         in_place(q, s.q.row, wide, rows, q_memory), {gk, s.gk.row, nullptr, true});
                multiply(rows, wide, visible, row_major(d, ld), keys,
                         {matrix_of(s.gq, outer, head) + first * s.gq.row, s.gq.row});
            }
        }
    });
}

}  // namespace

extern const AttentionKernels attention_kernels = {forward, gradient};

}  // namespace EXTENSOR_ISA
