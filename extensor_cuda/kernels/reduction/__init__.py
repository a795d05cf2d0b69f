"""Gradients as integers, whose sums have no order."""
