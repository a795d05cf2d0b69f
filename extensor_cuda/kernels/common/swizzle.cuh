// How tiles lie in shared memory that TMA swizzled: rows of 128 bytes, patterns of 8 rows.

// Where they hold a 16-byte unit.
__device__ __forceinline__ u32 place(int row, int unit) {
    return static_cast<u32>(row * 128 + ((unit ^ (row & 7)) << 4));
}

// What a wgmma reads of a tile, in units of 16 bytes. K contiguous: groups of 8 rows are 1024 bytes
// apart, 32 bytes to the next step along K. The other way (PTX ISA, wgmma's canonical layouts): a
// row is 64 columns, 8 of K are 1024 bytes apart, the next 64 columns `apart` bytes, and a step of
// K is 16 rows.
template <bool kDown>
__device__ __forceinline__ u64 descriptor(u32 address, u32 apart) {
    const u64 leading = kDown ? apart / 16 : 1;
    return static_cast<u64>((address & 0x3FFFF) >> 4) | leading << 16 | 64ull << 32 | 1ull << 62;
}
