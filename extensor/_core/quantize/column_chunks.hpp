// The part of columnwise blocks that lies in one column tile, for columnwise.cpp and
// rowwise_columnwise.cpp.
#pragma once

#include "quantize/column_tiles.hpp"

namespace EXTENSOR_ISA {

// Rows [offset, offset + rows) of tile `tile`, of which `real` lie in the array; columns
// [j, j + lanes) of image `image`.
struct ColumnChunk {
    ColumnTile column_tile;
    int64_t image, tile, offset, rows, real, j, lanes;

    int64_t vectors() const { return ceil_div(lanes, VL); }
};

// Codes or values of a chunk whose blocks have the magnitudes `amax`, and the blocks' scales.
using EncodeColumns = void (*)(const Call&, const ColumnChunk&, const vu (&amax)[4],
                               const Prefetch&, LaneCounts&);
EncodeColumns column_encoder(const Call& call);  // column_chunks.cpp

}  // namespace EXTENSOR_ISA
