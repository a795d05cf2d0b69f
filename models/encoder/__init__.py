"""Encoder: a transformer that looks both ways and fills in hidden tokens."""
