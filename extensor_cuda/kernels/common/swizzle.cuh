// Layout of tiles in shared memory with TMA's 128-byte swizzle: rows of 128 bytes, patterns of 8
// rows.

// The byte offset of a 16-byte unit.
DEVICE u32 swizzled_offset(int row, int unit) {
    return static_cast<u32>(row * 128 + ((unit ^ (row & 7)) << 4));
}

// wgmma's descriptor of a tile. K-major: 8 rows are 1024 bytes, a step of K is 32 bytes. MN-major:
// a row is 64 columns, 8 of K are 1024 bytes, a step of K is 16 rows, and the next 64 columns are
// `leading_bytes` away.
template <bool kMnMajor>
DEVICE u64 smem_descriptor(u32 address, u32 leading_bytes) {
    const u64 leading = kMnMajor ? leading_bytes / 16 : 1;
    return static_cast<u64>((address & 0x3FFFF) >> 4) | leading << 16 | 64ull << 32 | 1ull << 62;
}
