"""CUDA backend of extensor: imported only when device "cuda" is asked for."""
