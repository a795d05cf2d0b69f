"""Llama and its relatives: decoders with RMSNorm, rotary positions and gated layers."""
