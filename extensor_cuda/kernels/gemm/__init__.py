"""The Hopper GEMM: its program, its launch, its scales, its quantized results."""
