"""Devices: an array module and the few kernels worth writing for it."""
