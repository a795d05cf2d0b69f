// Which tiles of C a block multiplies, one after the other.

struct Tile {
    int row, column;
};

// Neighbouring clusters work on a square patch of C, whose operands then stay in the cache.
__device__ __forceinline__ Tile tile_of(int index, int tall, int wide) {
    const int group = index / (kGroup * wide), within = index % (kGroup * wide);
    const int first = group * kGroup, height = min(kGroup, tall - first);
    return {first + within % height, within / height};
}

#if GEMM_GROUPED
// The groups one after the other; `index` must not fall from call to call.
struct Schedule {
    int wide, group, before, start, end_of_rows;
    static __device__ __forceinline__ Schedule of(const Epilogue& e) {
        return {(e.columns + kTileN - 1) / kTileN, 0, 0, 0, 0};
    }
    __device__ __forceinline__ int tall() const {
        return (end_of_rows - start + kTileM * kCluster - 1) / (kTileM * kCluster);
    }
    __device__ __forceinline__ bool has(int index, const Epilogue& e) {
        for (; group < e.groups; ++group) {
            start = e.offsets[group], end_of_rows = e.offsets[group + 1];
            if (index < before + tall() * wide) return true;
            before += tall() * wide;
        }
        return false;
    }
    __device__ __forceinline__ Tile tile(int index) const {
        return tile_of(index - before, tall(), wide);
    }
#else
struct Schedule {
    int tall, wide, tiles, all_tiles, end_of_rows;  // all_tiles: of all parts of K
    static constexpr int start = 0, group = 0;
    static __device__ __forceinline__ Schedule of(const Epilogue& e) {
        const int tall = (e.rows + kTileM * kCluster - 1) / (kTileM * kCluster);
        const int wide = (e.columns + kTileN - 1) / kTileN;
        const int tiles = tall * wide, parts = GEMM_SPLIT_K ? e.parts : 1;
        const bool apart = GEMM_SPLIT_K && !GEMM_C_TRANSPOSED;
        return {tall, wide, tiles, tiles * parts,
                apart ? tall * kCluster * kTileM * e.parts : e.rows};
    }
    __device__ __forceinline__ bool has(int index, const Epilogue&) const {
        return index < all_tiles;
    }
    __device__ __forceinline__ Tile tile(int index) const {
        return tile_of(GEMM_SPLIT_K ? index % tiles : index, tall, wide);
    }
#endif
    // Stages along K. GEMM_SPLIT_K: of the tile's part of K.
    __device__ __forceinline__ int first_stage(int index, const Epilogue& e) const {
#if GEMM_SPLIT_K
        return index / tiles * e.stages_of_part;
#else
        return 0;
#endif
    }
    __device__ __forceinline__ int end_stage(int index, const Epilogue& e) const {
#if GEMM_SPLIT_K
        return min((index / tiles + 1) * e.stages_of_part, e.stages_of_k);
#else
        return e.stages_of_k;
#endif
    }
    // GEMM_SPLIT_K: rows and columns of C that the parts before take.
    __device__ __forceinline__ int rows_before(int index) const {
#if GEMM_SPLIT_K && !GEMM_C_TRANSPOSED
        return index / tiles * tall * kCluster * kTileM;
#else
        return 0;
#endif
    }
    __device__ __forceinline__ int columns_before(int index) const {
#if GEMM_SPLIT_K && GEMM_C_TRANSPOSED
        return index / tiles * wide * kTileN;
#else
        return 0;
#endif
    }
};
