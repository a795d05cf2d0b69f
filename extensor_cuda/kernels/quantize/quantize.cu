// Fused block quantizer: values -> packed codes and scales, byte for byte as extensor/quant does
// it.
//
// A thread owns a chunk, 16 neighbouring positions of one block: one Philox call at 8 random bits,
// whole 32-bit words of codes at 4, 6 and 8 bits. `quantize_rows` blocks along the last axis
// (contiguous), `quantize_tiles` there in tiles of several rows, `quantize_columns` along an axis
// before it, `quantize_both` a matrix both ways. All read the values once.
//
// No headers. Everything about the format, the scale rule and the rounding comes as macros (see
// quantize.py), so that each cubin holds one straight path. Compiled with --fmad=false: every float
// operation here decides bits.

#include "codec/input.cuh"
#include "quantize/hadamard.cuh"
#include "codec/block_scale.cuh"
#include "codec/searched_scale.cuh"
#include "codec/encode.cuh"
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
