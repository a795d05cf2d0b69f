"""Tokenizers: letters, or byte-pair encoding by the `tokenizers` package.

Both turn text into whole numbers and back, know how many there are, and can be written into a
checkpoint and made again from it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from extensor.errors import unknown_name

__all__ = ["TOKENIZERS", "BytePairs", "Characters", "Tokenizer", "TokenizerError", "from_state"]


class TokenizerError(ValueError):
    """Text or tokens that a tokenizer does not know."""


class Tokenizer(Protocol):
    """What a tokenizer can do."""

    @property
    def size(self) -> int:
        """How many tokens there are; they are numbered from 0."""

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, int64 (T,).

        Raises:
            TokenizerError: for letters it does not know.
        """

    def decode(self, tokens: Any) -> str:
        """The text of tokens.

        Raises:
            TokenizerError: for numbers that are no tokens.
        """

    def state(self) -> dict[str, Any]:
        """Plain JSON that `from_state` makes the same tokenizer of."""


def _checked(tokens: Any, size: int) -> list[int]:
    numbers = np.asarray(tokens)
    if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
        raise TokenizerError(
            f"decode: expected tokens in a row, whole numbers (T,), got shape {numbers.shape} of "
            f"{numbers.dtype}"
        )
    bad = numbers[(numbers < 0) | (numbers >= size)]
    if bad.size:
        raise TokenizerError(f"decode: expected tokens in 0..{size - 1}, got {int(bad[0])}")
    return [int(number) for number in numbers]


class Characters:
    """One token per letter.

    Args:
        letters: the vocabulary, each letter once.
    """

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

    @property
    def size(self) -> int:
        """How many letters."""
        return len(self.letters)

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, int64 (T,).

        Raises:
            TokenizerError: for letters it does not know.
        """
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = codes < len(self._table)
        tokens = np.where(known, self._table[np.where(known, codes, 0)], -1)
        bad = np.flatnonzero(tokens < 0)
        if bad.size:
            letter = text[bad[0]]
            raise TokenizerError(
                f"encode: expected the {self.size} letters of the training text, got {letter!r} at "
                f"position {bad[0]}; known are {self.letters!r}"
            )
        return tokens

    def decode(self, tokens: Any) -> str:
        """The text of tokens.

        Raises:
            TokenizerError: for numbers that are no tokens.
        """
        return "".join(self.letters[number] for number in _checked(tokens, self.size))

    def state(self) -> dict[str, Any]:
        """The letters."""
        return {"kind": "char", "letters": self.letters}


class BytePairs:
    """Byte-pair encoding (Sennrich et al., arXiv 1508.07909) of bytes, as in GPT-2.

    Every text has an encoding, since every byte is a token.

    Args:
        library: a `tokenizers.Tokenizer`.
    """

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
        got = library.get_vocab_size()
        if got != vocab_size:
            raise TokenizerError(
                f"--vocab-size: the text gives no more than {got} tokens, expected {vocab_size}; "
                "ask for fewer"
            )
        return cls(library)

    @property
    def size(self) -> int:
        """How many tokens."""
        return int(self._library.get_vocab_size())

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, int64 (T,)."""
        return np.array(self._library.encode(text).ids, np.int64)

    def decode(self, tokens: Any) -> str:
        """The text of tokens; bytes that are no UTF-8 become replacement characters.

        Raises:
            TokenizerError: for numbers that are no tokens.
        """
        return str(self._library.decode(_checked(tokens, self.size)))

    def state(self) -> dict[str, Any]:
        """The package's own JSON."""
        return {"kind": "bpe", "json": self._library.to_str()}


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            "--tokenizer bpe needs the package tokenizers, which is not installed; the way out: "
            "pip install -e .[text], or --tokenizer char"
        ) from error
    return tokenizers


TOKENIZERS: dict[str, type[Characters] | type[BytePairs]] = {"char": Characters, "bpe": BytePairs}
"""By the name that ``--tokenizer`` takes."""

PARTS = {"char": "letters", "bpe": "json"}
"""What the state of each holds beside its kind."""


def from_state(state: Any) -> Tokenizer:
    """The tokenizer that `Tokenizer.state` was asked of.

    Raises:
        TokenizerError: for a state of no known kind, or a damaged one.
    """
    kind = state.get("kind") if isinstance(state, dict) else None
    if kind not in PARTS:
        raise TokenizerError(unknown_name("tokenizer", str(kind), TOKENIZERS))
    text = state.get(PARTS[kind])
    if not isinstance(text, str):
        raise TokenizerError(
            f"tokenizer {kind!r}: expected text under {PARTS[kind]!r}, got {text!r:.80}; the "
            "state is cut off or of another kind"
        )
    if kind == "char":
        return Characters(text)
    library = _package().Tokenizer
    try:
        return BytePairs(library.from_str(text))
    except Exception as error:  # the package raises nothing narrower
        raise TokenizerError(
            f"tokenizer 'bpe': expected the JSON of the package tokenizers, got {text!r:.80} "
            f"({error}); the state is cut off, or written by a newer version of the package"
        ) from error
