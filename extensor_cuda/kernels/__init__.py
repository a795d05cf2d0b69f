"""CUDA kernels: sources (``*.cu``) and the Python that places their arguments."""
