"""Products of float activations with packed weights."""
