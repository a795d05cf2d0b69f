"""Rows of tokens on their way through experts."""
