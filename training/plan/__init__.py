"""Estimates of a step on many GPUs that are not there: memory, bytes and time."""
