"""Text: fill in hidden tokens.

Windows are cut as for `Causal`, and 15% of each are asked for (`training.text.masking`): anew in
every epoch for training, always the same ones for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from extensor.random import Stream
from training.batch import Batch
from training.data.draws import DATA_TENSOR, MASK_SLOT, stream_words
from training.tasks.language import Causal
from training.text.masking import hide_tokens

__all__ = ["Masked"]

TEST_SEED = 0
"""Of the tokens that tests ask for, whatever the run's seed, so that all answer the same ones."""


class Masked(Causal):
    """Say what hidden tokens were, from those on both sides. Arguments and errors as `Causal`."""

    metric = replace(Causal.metric, title="test loss, nats per hidden token")

    def training(self, epoch: int, start: int) -> Iterator[Batch]:
        """Random windows with tokens hidden, where the seed and the epoch decide."""
        for batch in super().training(epoch, start):
            yield self._hidden(batch, self.config.seed, epoch)

    def _fixed(self, tokens: np.ndarray, batch_size: int) -> Iterator[Batch]:
        for batch in super()._fixed(tokens, batch_size):
            yield self._hidden(batch, TEST_SEED, 0)

    def _hidden(self, batch: Batch, seed: int, epoch: int) -> Batch:
        tokens = batch.inputs
        stream = Stream(seed, epoch, DATA_TENSOR, MASK_SLOT)
        which, other = (
            stream_words(stream, tokens.size, 2 * batch.index + part).reshape(tokens.shape)
            for part in (0, 1)
        )
        return Batch(batch.index, *hide_tokens(tokens, which, other, self.tokenizer.size))
