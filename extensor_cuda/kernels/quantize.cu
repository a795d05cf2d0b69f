// Fused block quantizer: values -> packed codes and scales, byte for byte as extensor/quant does it.
//
// A thread owns a chunk, 16 neighbouring positions of one block: one Philox call at 8 random bits,
// whole 32-bit words of codes at 4, 6 and 8 bits. `quantize_rows` blocks along the last axis
// (contiguous), `quantize_tiles` there in tiles of several rows, `quantize_columns` along an axis
// before it, `quantize_both` a matrix both ways. All read the values once.
//
// No headers. Everything about the format, the scale rule and the rounding comes as macros (see
// quantize.py), so that each cubin holds one straight path. Compiled with --fmad=false: every float
// operation here decides bits.

#include "input.cuh"
#include "hadamard.cuh"
#include "scale.cuh"
#include "search.cuh"
#include "encode.cuh"
#include "pairs.cuh"
#include "chunk.cuh"
#include "totals.cuh"
#include "octets.cuh"

#if BOTH
#include "both.cuh"
#elif DOWN
#include "columns.cuh"
#elif ROWS == 1
#include "rows.cuh"
#else
#include "tiles.cuh"
#endif
