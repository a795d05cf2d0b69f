"""Quantizers and dequantizers of stored arrays."""
