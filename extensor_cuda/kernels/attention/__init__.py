"""Attention on Hopper, forward and backward."""
