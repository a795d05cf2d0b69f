"""Layers: norms, softmax, losses, dropout, activations, sums, pooling."""
