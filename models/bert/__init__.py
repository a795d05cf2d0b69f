"""BERT and MiniLM: encoders whose every token sees all others."""
