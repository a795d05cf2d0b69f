// What row_chunks.hpp declares: compiled once per level, as it is called once per chunk.

#include "quantize/row_chunks.hpp"

namespace EXTENSOR_ISA {
namespace {

template <int Size, class T>
void transform_all(const T* x, int64_t count, const float* signs, float* out) {
    for (int64_t at = 0; at < count; at += Size, x += Size, out += Size) {
        prefetch_stream(x, Size);
        transform_run<Size>([&](int i) { return load(x + i); }, signs, out);
    }
}

template <class T>
TransformAll transform_for(int size) {
    const auto as = []<int Size>() -> TransformAll {
        return [](const void* x, int64_t count, const float* signs, float* out) {
            transform_all<Size>(static_cast<const T*>(x), count, signs, out);
        };
    };
    switch (size) {
        case 16: return as.template operator()<16>();
        case 32: return as.template operator()<32>();
        case 64: return as.template operator()<64>();
        default: return as.template operator()<128>();
    }
}

}  // namespace

ScaleArrays::ScaleArrays(const Call& call, const uint32_t* maxima, int64_t total) {
    const int64_t room = round_up(total, VL) + VL;
    float* arrays = scratch_of<float>(Slot::scales, 4 * room);
    apply = arrays, decode = arrays + room;
    live = reinterpret_cast<uint32_t*>(decode + room), stored = live + room;
    const Grid& grid = call.scaler.grid;
    const bool divide = divides(call.plan), checked = call.job.codes && !divide;
    vu all_plain = splat(checked ? ~0u : 0u), all_bounded = splat(~0u), all_within = all_bounded;
    vu all_moderate = all_bounded;
    numbers = all_bounded;
    for (int64_t i = 0; i < total; i += VL, arrays += VL) {
        const vu amax = bits_of(load_upto(reinterpret_cast<const float*>(maxima) + i, total - i));
        const Scales s = call.scaler.of(amax);
        if (checked) all_plain &= is_plain(s, amax, call.scaler.tensor_scale, grid);
        numbers &= s.live;
        const vf largest = (divide ? float_of(amax) / s.apply : float_of(amax) * s.apply) *
                           call.plan.element_scale;
        all_bounded &= reinterpret_cast<vu>(largest < grid.limit);
        all_within &= reinterpret_cast<vu>(largest <= grid.top);
        all_moderate &= is_moderate(call.plan, amax, s.decode);
        store(arrays, s.apply);
        store(arrays + room, s.decode);
        store(arrays + 2 * room, float_of(s.live));
        store(arrays + 3 * room, float_of(s.stored));
    }
    plain = all_plain, bounded = all_bounded, within = all_within, moderate = all_moderate;
}

void prepare(const Call& call, int64_t row, int64_t start, int64_t count, float* out) {
    const QuantJob& job = call.job;
    const Source source = call.source().from(row * job.length + start);
    const int64_t real = most(0, least(count, job.length - start));
    const int size = call.plan.hadamard;
    int64_t done = 0;  // whole transforms read the array itself
    if (size && real >= size) {
        done = real / size * size;
        transform_for(job.type, size)(source.at, done, call.plan.signs, out);
    }
    for (; done < real; done += VL)
        store_upto(out + done, source.load_upto(done, real - done), real - done);
    if (!size) return;
    const int64_t last = real / size * size;
    if (last == count) return;
    std::memset(out + real, 0, static_cast<size_t>(count - real) * 4);
    for (int64_t at = last; at < count; at += size)
        transform_run(size, [&](int i) { return load(out + at + i); }, call.plan.signs, out + at);
}

TransformAll transform_for(FloatType type, int size) {
    switch (type) {
        case FloatType::float32: return transform_for<float>(size);
        case FloatType::bfloat16: return transform_for<bfloat16>(size);
        default: return transform_for<float16>(size);
    }
}

Values prepared(const Call& call, const RowChunk& p) {
    const QuantJob& job = call.job;
    const int64_t start = p.start * job.tile_length, padded = values_in(job, p);
    if (!call.plan.hadamard && job.type == FloatType::float32)
        return {static_cast<const float*>(job.x) + p.first * job.length + start, job.length,
                padded};
    float* out = scratch_of<float>(Slot::values, p.rows * padded + VL);
    for (int64_t r = 0; r < p.rows; ++r)
        prepare(call, p.first + r, start, padded, out + r * padded);
    return {out, padded, padded};
}

uint32_t run_maximum(const float* x, int64_t count) {
    vu m = {};
    int64_t i = 0;
    for (; i + VL <= count; i += VL) m = larger(m, magnitude_bits(load(x + i)));
    if (i < count) m = larger(m, magnitude_bits(load_part(x + i, static_cast<int>(count - i))));
    return largest_lane(m);
}

void chunk_maxima(const QuantJob& job, Values v, const RowChunk& p, uint32_t* maxima) {
    const int64_t tile = job.tile_length;
    const int64_t batched = (tile == 16 || tile == 32) ? v.padded / tile / VL * VL : 0;
    for (int64_t r = 0; r < p.rows; ++r, v.x += v.stride) {
        for (int64_t t = 0; t < batched; t += VL, maxima += VL)
            store(maxima,
                  tile == 16 ? tile_maxima<16>(v.x + t * 16) : tile_maxima<32>(v.x + t * 32));
        for (int64_t t = batched * tile; t < v.padded; t += tile)
            *maxima++ = run_maximum(v.x + t, least(tile, v.padded - t));
    }
}

vu choose_whole(const Call& call, const float* x, vu amax) {
    const int64_t tile = call.job.tile_length;
    alignas(64) float panel[kSearchedLength * VL];
    for (int64_t k = 0; k < tile; k += VL) {
        vf v[VL];
        for (int l = 0; l < VL; ++l) v[l] = load(x + l * tile + k);
        transpose(v);
        for (int l = 0; l < VL; ++l) store(panel + (k + l) * VL, v[l]);
    }
    choose_statistics(call, panel, tile, VL, 1, splat(static_cast<float>(tile)), &amax);
    return amax;
}

void choose_in_chunk(const Call& call, Values v, const RowChunk& p, uint32_t* maxima) {
    const int64_t tile = call.job.tile_length;
    alignas(64) float panel[kSearchedLength * VL];
    if (p.rows > 1 && v.stride == p.tiles * tile && v.padded == v.stride)  // one long row
        return choose_in_chunk(call, {v.x, p.rows * v.stride, p.rows * v.padded},
                               {p.first, 1, p.start, p.rows * p.tiles}, maxima);
    for (int64_t r = 0; r < p.rows; ++r, v.x += v.stride, maxima += p.tiles) {
        for (int64_t t = 0; t < p.tiles; t += VL) {
            const int64_t lanes = least(VL, p.tiles - t);
            float* to = reinterpret_cast<float*>(maxima + t);
            vu amax = bits_of(load_upto(to, lanes));
            if (tile % VL == 0 && (t + VL) * tile <= v.padded) {
                store(to, float_of(choose_whole(call, v.x + t * tile, amax)));
                continue;
            }
            std::memset(panel, 0, static_cast<size_t>(tile) * VL * 4);
            vf count = splat(1.0f);
            for (int64_t l = 0; l < lanes; ++l) {
                const int64_t real = least(tile, v.padded - (t + l) * tile);
                count[l] = static_cast<float>(real);
                for (int64_t k = 0; k < real; ++k) panel[k * VL + l] = v.x[(t + l) * tile + k];
            }
            choose_statistics(call, panel, tile, VL, 1, count, &amax);
            store_upto(to, float_of(amax), lanes);
        }
    }
}

void row_maxima(const QuantPlan& plan, const RowMaxima& rows, uint32_t* maxima) {
    const int64_t size = most(1, plan.hadamard), whole = rows.length / size * size;
    const TransformAll transform =
        plan.hadamard ? transform_for(FloatType::float32, plan.hadamard) : nullptr;
    float* out = transform ? scratch_of<float>(Slot::values, whole + size + VL) : nullptr;
    const float* x = rows.x;
    for (int64_t r = 0; r < rows.rows; ++r, x += rows.stride) {
        int64_t count = rows.length;
        if (transform) {
            transform(x, whole, plan.signs, out);
            if (whole < rows.length) {
                alignas(64) float last[128] = {};
                std::memcpy(last, x + whole, static_cast<size_t>(rows.length - whole) * 4);
                transform(last, size, plan.signs, out + whole);
                count = whole + size;
            }
        }
        const float* values = transform ? out : x;
        maxima[r] = rows.finite ? finite_run_maximum(values, count) : run_maximum(values, count);
    }
}

uint32_t* random_words(const Call& call, const Philox& philox, const RowChunk& p, int64_t& stride) {
    const QuantJob& job = call.job;
    const int64_t total = p.rows * p.tiles, band = job.tile_rows;
    if (!call.plan.stochastic) {
        stride = 0;
        const int64_t room = job.tile_length + VL;
        uint32_t* words = scratch_of<uint32_t>(Slot::random, room);
        for (int64_t i = 0; i < room; ++i) words[i] = call.constant;
        return words;
    }
    const uint32_t calls = static_cast<uint32_t>(call.calls);
    const int64_t raw = 4 * call.calls, room = total * raw + 8 * VL;
    uint32_t* words = scratch_of<uint32_t>(Slot::random, call.plan.rbits == 8 ? 5 * room : room);
    const int64_t bands = ceil_div(job.rows, band);
    const bool joined = band == 1 && !job.pitch;  // the rows' blocks follow one another
    for (int64_t r = 0; r < p.rows; r += joined ? p.rows : 1) {
        const int64_t row = (p.first + r) % job.rows, image = (p.first + r) / job.rows;
        const int64_t block = call.block(image * bands + row / band, p.start);
        philox_run(philox, words + r * p.tiles * raw, static_cast<uint32_t>(row % band) * calls,
                   calls, static_cast<uint32_t>(block), joined ? total : p.tiles);
    }
    stride = raw;
    if (call.plan.rbits == 32) return words;
    // Each byte becomes a word of its own.
    stride = 4 * raw;
    uint32_t* widened = words + room;
    const auto* bytes = reinterpret_cast<const uint8_t*>(words);
    for (int64_t i = 0; i < total * stride; ++i)
        widened[i] = static_cast<uint32_t>(bytes[i]) << 24 | 1u << 23;
    return widened;
}

}  // namespace EXTENSOR_ISA
