"""Text: predict the next token.

An epoch is ``epoch_steps`` steps on random windows of the training part. Tests use fixed windows of
the other part, evenly spaced and side by side, so every run of a corpus is judged on the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from extensor.random import Stream
from training.batch import Batch
from training.data import load_dataset
from training.data.corpora import Corpus
from training.data.draws import DATA_TENSOR, stream_words
from training.metrics import TokenScores
from training.tasks.base import Metric, Scores, Task
from training.text.augment import replace_tokens
from training.text.tokenizers import TOKENIZERS
from training.text.windows import even_starts, flat_tokens, random_starts, window

if TYPE_CHECKING:
    from training.config import RunConfig, Settings

__all__ = ["Causal"]

NOISE_SLOT = 3
NOISE = 0.02
"""The share of input tokens that `--augment noise` replaces."""


class Causal(Task):
    """Predict each token from those before it.

    Args:
        config: the run.
        corpus: the text; None loads what the config names.

    Raises:
        ValueError: if the text is too short for the context.
        DataError: if the corpus is missing or damaged.
    """

    metric = Metric(
        key="loss",
        title="test loss, nats per token",
        scale=1.0,
        digits=4,
        higher_is_better=False,
        gap="%",
        far=0.5,
        baselines=("bf16", "fp32"),
    )
    unit, inputs, kind = "tokens", "windows", "text"
    augmentations = ("none", "noise")
    own = ("epoch_steps", "context", "tokenizer", "vocab_size")
    eval_batch = 64

    def __init__(self, config: RunConfig, corpus: Corpus | None = None) -> None:
        self.config, self.batches = config, config.epoch_steps
        corpus = load_dataset(config.dataset) if corpus is None else corpus
        self.corpus = corpus.limited(config.train_limit or None)
        kind = TOKENIZERS[config.tokenizer]
        # letters of the test part count too, or it could not be read
        known = corpus.train + corpus.test if config.tokenizer == "char" else self.corpus.train
        self.tokenizer = kind.train(known, config.vocab_size)
        self.train_tokens, self.test_tokens = (
            flat_tokens(self.tokenizer.encode(text), config.context)
            for text in (self.corpus.train, self.corpus.test)
        )
        self.held_tokens: np.ndarray | None = None
        self.validates = config.val_share > 0
        if self.validates:
            cut = len(self.train_tokens) - round(config.val_share * len(self.train_tokens))
            self.train_tokens, self.held_tokens = (
                flat_tokens(part, config.context)
                for part in (self.train_tokens[:cut], self.train_tokens[cut:])
            )

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Refuse what windows of text cannot be made with.

        Raises:
            ValueError: on those.
        """
        for field in ("epoch_steps", "context"):
            value = getattr(settings, field)
            if value < 1:
                flag = field.replace("_", "-")
                raise ValueError(f"--{flag}: wanted a whole number, 1 or more, got {value}")
        if settings.tokenizer not in TOKENIZERS:
            raise ValueError(
                f"--tokenizer: wanted one of {', '.join(TOKENIZERS)}, got {settings.tokenizer!r}"
            )
        if (settings.tokenizer == "bpe") != (settings.vocab_size > 0):
            raise ValueError(
                "--vocab-size: wanted with --tokenizer bpe and not without, got "
                f"{settings.vocab_size} with {settings.tokenizer}"
            )

    def shapes(self) -> dict[str, Any]:
        """Vocabulary and context."""
        return {"vocab": self.tokenizer.size, "context": self.config.context}

    def training(self, epoch: int, start: int) -> Iterator[Batch]:
        """Random windows, where the seed and the epoch decide."""
        config, context = self.config, self.config.context
        tokens, size = self.train_tokens, config.batch_size
        count = config.epoch_steps * size
        starts = random_starts(len(tokens), context, config.seed, epoch, count)
        for index in range(start, config.epoch_steps):
            inputs, labels = window(tokens, starts[index * size : (index + 1) * size], context)
            if config.augment == "noise":
                words = self._words(epoch, index, inputs.shape)
                inputs = replace_tokens(inputs, words, NOISE, self.tokenizer.size)
            yield Batch(index, inputs, labels)

    def test(self, batch_size: int) -> Iterator[Batch]:
        """The fixed windows in order."""
        return self._fixed(self.test_tokens, batch_size)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Fixed windows of the end of the training part, which no training window reaches into."""
        if self.held_tokens is None:
            return iter(())
        return self._fixed(self.held_tokens, batch_size)

    def _fixed(self, tokens: np.ndarray, batch_size: int) -> Iterator[Batch]:
        context = self.config.context
        starts = even_starts(len(tokens), context, self.config.test_limit or None)
        for index, begin in enumerate(range(0, len(starts), batch_size)):
            inputs, labels = window(tokens, starts[begin : begin + batch_size], context)
            yield Batch(index, inputs, labels)

    def _words(self, epoch: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
        """Random uint32 words for one batch."""
        stream = Stream(self.config.seed, epoch, DATA_TENSOR, NOISE_SLOT)
        return stream_words(stream, int(np.prod(shape)), index).reshape(shape)

    def scores(self) -> Scores:
        """Loss, perplexity and how often the right token was among the best."""
        return TokenScores(self.tokenizer.size)

    def stuck(self, scores: Scores) -> str | None:
        """No better than knowing how frequent each token is."""
        counts = np.bincount(self.test_tokens)
        shares = counts[counts > 0] / counts.sum()
        entropy = float(-(shares * np.log(shares)).sum())
        if scores.loss < entropy:
            return None
        return (
            f"stuck at chance: loss {scores.loss:.4f}, the frequencies of the tokens alone give "
            f"{entropy:.4f}"
        )

    def state(self) -> dict[str, Any]:
        """The tokenizer."""
        return {"tokenizer": self.tokenizer.state()}
