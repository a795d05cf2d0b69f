"""Text: tokenizers, windows, augmentation, masking."""
