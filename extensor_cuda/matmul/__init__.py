"""GEMMs on CUDA: operands, how they are prepared, their products, and the choice of kernels."""
