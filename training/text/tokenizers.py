"""Tokenizers: letters, or byte-pair encoding by the `tokenizers` package.

Both turn text into whole numbers and back, know how many there are, and can be written into a
checkpoint and made again from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from extensor.errors import unknown_name
from extensor.extras import missing
from extensor.generation.tokenizer import parsed
from extensor.schema import FileError

__all__ = ["TOKENIZERS", "BytePairs", "Characters", "Tokenizer", "TokenizerError", "from_state"]


class TokenizerError(FileError, ValueError):
    """Text or tokens that a tokenizer does not know."""


class Tokenizer(ABC):
    """What a tokenizer can do; its ``size`` tokens are numbered from 0."""

    kind: ClassVar[str]
    """Its name, as ``--tokenizer`` takes it."""
    part: ClassVar[str]
    """What its state holds beside its kind."""

    @classmethod
    @abstractmethod
    def train(cls, text: str, vocab_size: int) -> Tokenizer:
        """The tokenizer of a text."""

    @classmethod
    @abstractmethod
    def restore(cls, text: str) -> Tokenizer:
        """The tokenizer whose state holds this text."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many tokens there are."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, int64 (T,).

        Raises:
            TokenizerError: for letters that it does not know.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Plain JSON that `from_state` makes the same tokenizer of."""

    def decode(self, tokens: Any) -> str:
        """The text of tokens.

        Raises:
            TokenizerError: for numbers that are no tokens.
        """
        numbers = np.asarray(tokens)
        if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
            raise TokenizerError(
                "decode: expected tokens in a row, whole numbers (T,), got shape "
                f"{numbers.shape} of {numbers.dtype}"
            )
        bad = numbers[(numbers < 0) | (numbers >= self.size)]
        if bad.size:
            raise TokenizerError(f"decode: expected tokens in 0..{self.size - 1}, got {bad[0]}")
        return self._decode(numbers.tolist())

    @abstractmethod
    def _decode(self, numbers: list[int]) -> str: ...


class Characters(Tokenizer):
    """One token per letter; ``letters`` holds each letter once."""

    kind, part = "char", "letters"

    def __init__(self, letters: str) -> None:
        if not letters or len(set(letters)) < len(letters):
            raise TokenizerError(f"Characters: expected each letter once, got {letters!r:.80}")
        self.letters = letters
        codes = [ord(letter) for letter in letters]
        self._table = np.full(max(codes) + 1, -1, np.int64)
        self._table[codes] = np.arange(len(codes))

    @classmethod
    def train(cls, text: str, vocab_size: int) -> Characters:
        """The letters of a text, in order of their code points; they alone decide how many."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def restore(cls, text: str) -> Characters:
        return cls(text)

    @property
    def size(self) -> int:
        return len(self.letters)

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = codes < len(self._table)
        tokens = np.where(known, self._table[np.where(known, codes, 0)], -1)
        bad = np.flatnonzero(tokens < 0)
        if bad.size:
            raise TokenizerError(
                f"encode: expected the {self.size} letters of the training text, got "
                f"{text[bad[0]]!r} at position {bad[0]}; known are {self.letters!r}"
            )
        return tokens

    def _decode(self, numbers: list[int]) -> str:
        return "".join(self.letters[number] for number in numbers)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, self.part: self.letters}


class BytePairs(Tokenizer):
    """Byte-pair encoding (Sennrich et al., arXiv 1508.07909) of bytes, as in GPT-2.

    Every text has an encoding, since every byte is a token. Decoded bytes that are no UTF-8 become
    replacement characters. ``library`` is a `tokenizers.Tokenizer`.
    """

    kind, part = "bpe", "json"

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BytePairs:
        """Merge the commonest pairs of a text until there are ``vocab_size`` tokens.

        Raises:
            TokenizerError: for fewer than 256 tokens, more than the text gives, or without the
                package.
        """
        tokenizers = _package()
        if vocab_size < 256:
            raise TokenizerError(
                f"--vocab-size: expected 256 or more (every byte is a token), got {vocab_size}"
            )
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(text.splitlines(keepends=True), trainer)
        made = cls(library)
        if made.size != vocab_size:
            raise TokenizerError(
                f"--vocab-size: the text gives no more than {made.size} tokens, expected "
                f"{vocab_size}; ask for fewer"
            )
        return made

    @classmethod
    def restore(cls, text: str) -> BytePairs:
        library = _package().Tokenizer
        try:
            return cls(parsed(library.from_str, text))
        except ValueError as error:
            raise TokenizerError(
                f"tokenizer 'bpe': expected the JSON of the package tokenizers, got {text!r:.80} "
                f"({error}); the state is cut off, or written by a newer version of the package"
            ) from error

    @property
    def size(self) -> int:
        return int(self._library.get_vocab_size())

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._library.encode(text).ids, np.int64)

    def _decode(self, numbers: list[int]) -> str:
        return str(self._library.decode(numbers))

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, self.part: self._library.to_str()}


def _package() -> Any:
    if (message := missing("--tokenizer bpe", "tokenizers")) is not None:
        raise TokenizerError(f"{message}, or --tokenizer char")
    import tokenizers

    return tokenizers


TOKENIZERS: dict[str, type[Tokenizer]] = {cls.kind: cls for cls in (Characters, BytePairs)}
"""By the name that ``--tokenizer`` takes."""


def from_state(state: Any) -> Tokenizer:
    """Make the tokenizer that `Tokenizer.state` describes.

    Raises:
        TokenizerError: for a state of no known kind, or a damaged one.
    """
    kind = state.get("kind") if isinstance(state, dict) else None
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise TokenizerError(unknown_name("tokenizer", str(kind), TOKENIZERS))
    cls = TOKENIZERS[kind]
    text = state.get(cls.part)
    if not isinstance(text, str):
        raise TokenizerError(
            f"tokenizer {kind!r}: expected text under {cls.part!r}, got {text!r:.80}; the state is "
            "cut off or of another kind"
        )
    return cls.restore(text)
