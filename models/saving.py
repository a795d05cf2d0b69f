"""The base of models that are written as checkpoints: ``model.save_pretrained(path)``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from extensor import nn
from extensor.errors import unknown_name
from extensor.generation.exchange import convert_tokenizer
from extensor.io import open_archive
from extensor.io.stored import TARGETS, Conversion, WriteOptions, metadata_of, write_checkpoint

from .architectures import ARCHITECTURES, Architecture, architecture_of
from .sources import LoadedFrom, Stored, by_name, floats

__all__ = ["Pretrained"]


class Pretrained(nn.Module):
    """A model that `extensor.models.from_pretrained` reads and `save_pretrained` writes.

    Attributes:
        loaded_from: where the weights came from; None for a model that was built.
    """

    loaded_from: LoadedFrom | None = None

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        layout: str | None = None,
        *,
        only_lossless: bool = False,
        dense_dtype: str | None = None,
        model_type: str | None = None,
    ) -> Conversion:
        """Write the model as a checkpoint that other programs read, with a certificate.

        Args:
            path: a folder; for GGUF layouts a .gguf file. An older one is replaced at the end.
            layout: a name from ``extensor formats --layouts``; None, as the weights are:
                ``"extensor"`` with blocked ones, ``"float32"`` without.
            only_lossless: refuse unless every value stays equal.
            dense_dtype: of what a layout with blocks keeps out of them, such as the embedding:
                ``"bfloat16"``, ``"float16"`` or ``"float32"``; `extensor.io.stored.convert` says
                what None does.
            model_type: of config.json, for a model that was built; None, the first that can say it.

        Returns:
            What was written: `extensor.io.stored.Conversion`.

        Raises:
            LossyConversionError: with ``only_lossless``, if a value would change.
            ValueError: for an unknown layout, or a configuration that no architecture can say.

        >>> import models, tempfile
        >>> import numpy as np
        >>> model = models.build("llama", models.config("llama", "nano"), np.random.default_rng(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = model.save_pretrained(f"{folder}/m", layout="float32")
        ...     same = models.from_pretrained(f"{folder}/m")
        >>> bool((same.lm_head.weight == model.lm_head.weight).all())
        True
        """
        loaded = self.loaded_from
        row, config = _described(self, loaded, model_type)
        if layout is None:
            blocked = any(tensor.is_blocked for tensor in _tensors(self).values())
            layout = "extensor" if blocked else "float32"
        if layout not in TARGETS:
            raise ValueError(unknown_name("layout", layout, TARGETS))
        beside, options, gguf = None, WriteOptions(only_lossless, dense_dtype=dense_dtype), {}
        if loaded is not None and loaded.path.exists():
            opened = open_archive(loaded.path)
            beside = None if opened.kind == "gguf" else _folder(loaded.path)
            files, vocabulary, notes = convert_tokenizer(
                loaded.path, TARGETS[layout].container == "gguf"
            )
            options = replace(options, files=files, notes=tuple(notes))
            gguf = metadata_of(opened) | vocabulary
        weights = _stored_weights(self, row)
        return write_checkpoint(
            Path(path), layout, weights, config=config, gguf=gguf, beside=beside, options=options
        )


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _described(
    model: Any, loaded: LoadedFrom | None, model_type: str | None
) -> tuple[Architecture, dict[str, Any]]:
    """The architecture's row, and config.json's contents."""
    if loaded is not None and model_type in (None, loaded.config.get("model_type")):
        return architecture_of(loaded.config), dict(loaded.config)
    if model_type is not None:
        row = architecture_of({"model_type": model_type})
        return row, row.config_to_hf(model.config)
    for row in ARCHITECTURES.values():
        try:
            values = row.config_to_hf(model.config)
            if row.config_from_hf(values) == model.config:
                return row, values
        except (AttributeError, TypeError, ValueError):
            continue  # of another family
    raise ValueError(
        f"save_pretrained: no architecture says {model.config}; known: {', '.join(ARCHITECTURES)}"
    )


def _tensors(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _stored_weights(model: Any, row: Architecture) -> Iterator[tuple[str, Stored]]:
    """The model's tensors as files hold them; parts of one are put together."""
    tensors = _tensors(model)
    for name, members in by_name(row.sources(model)).items():
        values = [tensors[at].to("cpu").data for at, _ in members]
        whole = members[0][1]
        if len(members) == 1 and not whole.part and not whole.transposed:
            yield name, values[0]
            continue
        out = np.empty(whole.shape, np.float32)
        for (_, source), value in zip(members, values, strict=True):
            source.write(out, floats(value))
        yield name, out
