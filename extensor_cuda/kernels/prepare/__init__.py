"""Kernels that make GEMM operands: from floats at once, or from packed storage."""
