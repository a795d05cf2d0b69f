// Converts 4-bit codes to E5M2 with a table of a block's eight magnitudes. E2M1 times 2^-15 to 2^13
// is exact.

DEVICE u32 e5m2_pair(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// The magnitudes 0 to 6 times `unit`, in two words.
DEVICE uint2 e5m2_table(float unit) {
    return uint2{e5m2_pair(0.0f, 0.5f * unit) | e5m2_pair(unit, 1.5f * unit) << 16,
        e5m2_pair(2.0f * unit, 3.0f * unit) | e5m2_pair(4.0f * unit, 6.0f * unit) << 16};
}

// Four 4-bit codes -> four bytes.
DEVICE u32 select_codes(u32 codes, const uint2& table) {
    const u32 sign = (codes & 0x8u) << 4 | (codes & 0x80u) << 8 | (codes & 0x800u) << 12 |
                     (codes & 0x8000u) << 16;
    return __byte_perm(table.x, table.y, codes & 0x7777u) | sign;
}
