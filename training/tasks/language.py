"""Text: predict the next token, or fill in masked ones.

An epoch is ``epoch_steps`` steps on random windows of the training part. Tests use fixed windows of
the other part, evenly spaced and side by side, so every run of a corpus is judged on the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from extensor.random import Stream

from ..batch import Batch, Rows, Whole
from ..config import RunConfig
from ..data.corpora import Corpus
from ..data.draws import DATA_TENSOR, MASK_SLOT, NOISE_SLOT, stream_words
from ..metrics import Scores, TokenScores
from ..text.augment import replace_tokens
from ..text.encoded import TokenFile, encode_corpus, encode_dataset
from ..text.masking import mask_tokens
from ..text.windows import even_starts, flat_tokens, random_starts, window
from .base import Metric, Task

__all__ = ["Causal", "Masked"]

NOISE = 0.02
"""The share of input tokens that `--augment noise` replaces."""
TEST_SEED = 0
"""Seed of the tokens that tests mask: not the run's, so that all runs answer the same ones."""


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
    unit, inputs = "tokens", "windows"
    eval_batch = 64

    def __init__(self, config: RunConfig, corpus: Corpus | None = None) -> None:
        self.config, self.batches = config, config.epoch_steps
        how = config.tokenizer, config.vocab_size
        if corpus is None:
            found = encode_dataset(TokenFile(config.dataset, *how, config.train_limit))
        else:
            found = encode_corpus(corpus.limited(config.train_limit or None), *how)
        self.tokenizer = found.tokenizer
        tokens, self.test_tokens = (
            flat_tokens(t, config.context) for t in (found.train, found.test)
        )
        self.validates = config.val_share > 0
        held = round(config.val_share * len(tokens))
        self.train_tokens, self.held_tokens = tokens, tokens[:0]
        if self.validates:
            cut = len(tokens) - held
            self.train_tokens = flat_tokens(tokens[:cut], config.context)
            self.held_tokens = flat_tokens(tokens[cut:], config.context)

    def arrays(self) -> Iterator[np.ndarray]:
        """Tokens: for training, for tests, held out."""
        yield from (self.train_tokens, self.test_tokens, self.held_tokens)

    def shapes(self) -> dict[str, Any]:
        """Vocabulary and context."""
        return {"vocab": self.tokenizer.size, "context": self.config.context}

    def training(self, epoch: int, start: int, mine: Rows | None = None) -> Iterator[Batch]:
        """Random windows, where the seed and the epoch decide."""
        config, context, size = self.config, self.config.context, self.config.batch_size
        count = config.epoch_steps * size
        starts = random_starts(len(self.train_tokens), context, config.seed, epoch, count)
        for batch in self._cut(self.train_tokens, starts, size, start, mine):
            if config.augment == "noise":
                stream = Stream(config.seed, epoch, DATA_TENSOR, NOISE_SLOT)
                words = stream_words(stream, size * context, batch.index).reshape(size, context)
                words = words if mine is None else words[mine(size)]
                noisy = replace_tokens(batch.inputs, words, NOISE, self.tokenizer.size)
                batch = replace(batch, inputs=noisy)
            yield batch

    def test(self, batch_size: int) -> Iterator[Batch]:
        """The fixed windows in order."""
        return self._fixed(self.test_tokens, batch_size)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Fixed windows of the end of the training part, which no training window reaches into."""
        return self._fixed(self.held_tokens, batch_size) if self.validates else iter(())

    def _fixed(self, tokens: np.ndarray, batch_size: int) -> Iterator[Batch]:
        starts = even_starts(len(tokens), self.config.context, self.config.test_limit or None)
        return self._cut(tokens, starts, batch_size, 0)

    def _cut(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        size: int,
        first: int,
        mine: Rows | None = None,
    ) -> Iterator[Batch]:
        """Batches of ``size`` windows, or some rows of them, from batch number ``first`` on."""
        for index in range(first, -(-len(starts) // size)):
            chosen = starts[index * size : (index + 1) * size]
            whole = None
            if mine is not None:
                rows, count = mine(len(chosen)), len(chosen)
                chosen, whole = chosen[rows], Whole(rows.start, count, count * self.config.context)
            yield Batch(index, *window(tokens, chosen, self.config.context), whole)

    def scores(self) -> Scores:
        """Loss, perplexity and how often the right token was among the best."""
        return TokenScores(self.tokenizer.size)

    def stuck(self, scores: Scores) -> str | None:
        """A loss no better than that of the tokens' frequencies alone."""
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


class Masked(Causal):
    """Fill in masked tokens from those on both sides. Arguments and errors as `Causal`.

    15% of each window are selected (`training.text.masking`): others in every epoch of training,
    the same ones in every test.
    """

    metric = replace(Causal.metric, title="test loss, nats per masked token")

    def training(self, epoch: int, start: int, mine: Rows | None = None) -> Iterator[Batch]:
        """Random windows with masked tokens, where the seed and the epoch decide."""
        for batch in super().training(epoch, start):
            masked = self._masked(batch, self.config.seed, epoch)  # the batch counts its labels
            yield masked if mine is None else masked.only(mine(len(masked.inputs)))

    def _fixed(self, tokens: np.ndarray, batch_size: int) -> Iterator[Batch]:
        for batch in super()._fixed(tokens, batch_size):
            yield self._masked(batch, TEST_SEED, 0)

    def _masked(self, batch: Batch, seed: int, epoch: int) -> Batch:
        tokens = batch.inputs
        stream = Stream(seed, epoch, DATA_TENSOR, MASK_SLOT)
        which, other = (
            stream_words(stream, tokens.size, 2 * batch.index + part).reshape(tokens.shape)
            for part in (0, 1)
        )
        return Batch(batch.index, *mask_tokens(tokens, which, other, self.tokenizer.size))
