"""Text: corpora, tokenizers, windows, augmentation."""
