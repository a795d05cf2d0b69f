// Where rows of 128 bytes hold a 16-byte unit: TMA's swizzle of 128 bytes.
__device__ __forceinline__ u32 place(int row, int unit) {
    return static_cast<u32>(row * 128 + ((unit ^ (row & 7)) << 4));
}
