"""The base of models that are written as checkpoints: ``model.save_pretrained(path)``."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from extensor import nn

__all__ = ["Pretrained"]


class Pretrained(nn.Module):
    """A model that `extensor.models.from_pretrained` reads and `save_pretrained` writes.

    Attributes:
        loaded_from: where the weights came from; None for a model that was built.
    """

    loaded_from: Any = None

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        layout: str | None = None,
        *,
        only_lossless: bool = False,
        model_type: str | None = None,
    ) -> Any:
        """Write the model as a checkpoint that other programs read, with a certificate.

        Args:
            path: a folder; for GGUF layouts a .gguf file. An older one is replaced at the end.
            layout: a name from ``extensor formats --layouts``; None, as the weights are:
                ``"extensor"`` with blocked ones, ``"float32"`` without.
            only_lossless: refuse unless every value stays equal.
            model_type: of config.json, for a model that was built; None, the first that can say it.

        Returns:
            What was written: `extensor.io.stored.Conversion`.

        Raises:
            LossyConversionError: with ``only_lossless``, if a value would change.
            ValueError: for an unknown layout, or what it cannot say.

        >>> import models, tempfile
        >>> import numpy as np
        >>> model = models.build("llama", models.config("llama", "nano"), np.random.default_rng(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = model.save_pretrained(f"{folder}/m", layout="float32")
        ...     same = models.from_pretrained(f"{folder}/m")
        >>> bool((same.lm_head.weight == model.lm_head.weight).all())
        True
        """
        save = import_module(".pretrained", __package__).save_pretrained
        return save(self, path, layout, only_lossless=only_lossless, model_type=model_type)
