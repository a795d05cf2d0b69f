// A position in a ring of kStages stages, and the parity of its barriers' phase there.

template <int kStages>
struct RingPosition {
    int stage;
    u32 parity;
    DEVICE void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
    DEVICE void advance(int by) {
        stage += by;
        if (stage >= kStages) stage -= kStages, parity ^= 1;
    }
};
