"""GPT: a decoder that predicts the next token."""
