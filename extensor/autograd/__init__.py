"""The gradient engine: primitives, the tape, ExTensor. It knows no operation."""
