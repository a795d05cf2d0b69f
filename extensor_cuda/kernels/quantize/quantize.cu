// The fused block quantizer: values to packed codes and scales, byte for byte as extensor/quant.
// Macros give the format, scale rule and rounding (quantize.py), so that each cubin holds one
// straight path. Compiled with --fmad=false: every float operation decides bits.
//
// A thread owns a chunk, 16 neighbours of one block: one Philox call at 8 random bits, and whole
// words of codes at 4, 6 and 8 bits. `quantize_rows` has blocks along the contiguous axis,
// `quantize_tiles` in tiles of several rows, `quantize_columns` along an earlier axis, and
// `quantize_both` both ways. All read values once.

#include "codec/input.cuh"
#include "quantize/hadamard.cuh"
#include "codec/block_scale.cuh"
#include "codec/searched_scale.cuh"
#include "codec/encode.cuh"
#include "codec/searched_e8m0.cuh"
#include "codec/eden_scale.cuh"
#include "codec/clip_bits.cuh"
#include "codec/e2m1_bf16x2.cuh"
#include "codec/encode_chunk.cuh"
#include "codec/counters.cuh"
#include "quantize/column_bytes.cuh"

#if QUANT_ROWWISE_COLUMNWISE
#include "quantize/rowwise_columnwise.cuh"
#elif QUANT_COLUMNWISE
#include "quantize/columnwise.cuh"
#elif QUANT_TILE_ROWS == 1
#include "quantize/rowwise.cuh"
#else
#include "quantize/tiles.cuh"
#endif
