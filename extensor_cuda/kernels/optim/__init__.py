"""Optimizer steps on many parameters, and the state of a captured step."""
