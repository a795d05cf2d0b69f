"""Writing text with a language model: sampling, caches, tokenizers, chat templates."""

from extensor.generation.chat import ChatError, render_chat
from extensor.generation.generate import generate, next_tokens, pad_left
from extensor.generation.perplexity import Perplexity, token_losses
from extensor.generation.sampling import Sampling, sample, token_probabilities
from extensor.generation.text import stream_text
from extensor.generation.tokenizer import PretrainedTokenizer, Tokenizer, TokenizerError

__all__ = [
    "ChatError",
    "Perplexity",
    "PretrainedTokenizer",
    "Sampling",
    "Tokenizer",
    "TokenizerError",
    "generate",
    "next_tokens",
    "pad_left",
    "render_chat",
    "sample",
    "stream_text",
    "token_losses",
    "token_probabilities",
]
