"""Tokenizers of pretrained models: text to tokens and back, by the package `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np

from extensor.extras import missing
from extensor.generation.chat import ChatError, Message, render_chat
from extensor.generation.gguf_vocab import gguf_tokenizer
from extensor.io import open_archive
from extensor.schema import FileError, SchemaError, check, read_json

__all__ = ["PretrainedTokenizer", "Tokenizer", "TokenizerError"]

Array = np.ndarray[Any, Any]


class TokenizerError(FileError, ValueError):
    """A tokenizer that is missing or damaged, or text and tokens that it does not know.

    >>> from extensor.generation import PretrainedTokenizer, TokenizerError
    >>> try:
    ...     PretrainedTokenizer.from_gguf({})
    ... except TokenizerError as error:
    ...     print(str(error)[:13])
    GGUF metadata
    """


class _Template(TypedDict):
    name: str
    template: str


class Tokenizer(Protocol):
    """What writing text needs of a tokenizer; its ``size`` tokens are numbered from 0.

    Args:
        args: a protocol is not made.
        kwargs: likewise.

    >>> from extensor.generation import PretrainedTokenizer, Tokenizer
    >>> hasattr(PretrainedTokenizer, "decode")
    True
    """

    @property
    def size(self) -> int:
        """How many tokens there are."""
        ...

    def encode(self, text: str) -> Array:
        """The tokens of a text.

        Args:
            text: any text.

        Returns:
            int64 (T,).

        >>> from extensor.generation import PretrainedTokenizer
        >>> PretrainedTokenizer.encode.__name__
        'encode'
        """
        ...

    def decode(self, tokens: Any) -> str:
        """The text of tokens.

        Args:
            tokens: whole numbers (T,).

        Returns:
            The text.

        >>> from extensor.generation import PretrainedTokenizer
        >>> PretrainedTokenizer.decode.__name__
        'decode'
        """
        ...


def parsed(read: Callable[[Any], Any], content: Any) -> Any:
    """What a reader of the package `tokenizers` makes of a content; its faults as ValueError."""
    try:
        return read(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        raise ValueError(f"no {error}" if isinstance(error, KeyError) else str(error)) from error


class PretrainedTokenizer:
    """A tokenizer as a model was trained with it.

    Args:
        library: a `tokenizers.Tokenizer`.
        end_tokens: the tokens after which a text ends.
        chat_template: jinja2 that writes a conversation as text; None, there is none.
        variables: names that the template may use, such as ``bos_token``.

    >>> tokenizers = __import__("tokenizers")
    >>> from extensor.generation import PretrainedTokenizer
    >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0, "no": 1}))
    >>> PretrainedTokenizer(words).encode("no")
    array([1])
    """

    def __init__(
        self,
        library: Any,
        end_tokens: Sequence[int] = (),
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.library = library
        self.end_tokens = tuple(end_tokens)
        self.chat_template = chat_template
        self.variables = dict(variables or {})

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> PretrainedTokenizer:
        """The tokenizer of a Hugging Face folder, or of a GGUF file.

        Args:
            path: a .gguf file; or a folder that holds tokenizer.json. The folder's
                tokenizer_config.json, chat_template.jinja, generation_config.json and config.json
                are read where they are there.

        Returns:
            The tokenizer.

        Raises:
            TokenizerError: if there is no tokenizer, or a damaged one, or `tokenizers` is not
                installed.
            FileNotFoundError, CheckpointError: for a GGUF file that is not there, or damaged.

        >>> from extensor.generation import PretrainedTokenizer
        >>> PretrainedTokenizer.from_pretrained("nowhere")
        Traceback (most recent call last):
        extensor.generation.tokenizer.TokenizerError: nowhere: expected a folder with tokenizer.json
        """
        folder = Path(path)
        _need_package()
        if folder.suffix == ".gguf":
            return cls.from_gguf(open_archive(folder).metadata)
        from tokenizers import Tokenizer as Library

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{folder}: expected a folder with tokenizer.json")
        try:
            library = parsed(Library.from_file, str(file))
        except ValueError as error:
            raise TokenizerError(f"{file}: cannot be read: {error}") from error
        library.no_padding()  # a sentence encoder's file may pad and cut every text
        library.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        special = {
            name: text
            for name, value in settings.items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        ends = [library.token_to_id(special["eos_token"])] if "eos_token" in special else []
        for name in ("generation_config.json", "config.json"):
            place = folder / name
            found = _read_json(place).get("eos_token_id")
            ends += _checked(found, int | list[int] | None, f"{place}: eos_token_id")
        known = sorted({end for end in ends if end is not None})
        where = f"{folder / 'tokenizer_config.json'}: chat_template"
        template = settings.get("chat_template")
        for entry in _checked(template, str | list[_Template] | None, where):
            if isinstance(entry, dict) and entry["name"] == "default":  # several, by name
                template = entry["template"]
        beside = folder / "chat_template.jinja"
        if beside.is_file():
            try:
                template = beside.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{beside}: expected UTF-8, got: {error}") from None
        return cls(library, known, template if isinstance(template, str) else None, special)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> PretrainedTokenizer:
        """The tokenizer that the metadata of a GGUF file describes.

        Args:
            metadata: values by key, such as ``tokenizer.ggml.tokens``.

        Returns:
            The tokenizer; the same tokens as the model's own tokenizer.json.

        Raises:
            TokenizerError: for metadata without a tokenizer, or with one of an unknown kind; if
                `tokenizers` is not installed.

        >>> from extensor.generation import PretrainedTokenizer
        >>> made = PretrainedTokenizer.from_gguf(
        ...     {
        ...         "tokenizer.ggml.model": "gpt2",
        ...         "tokenizer.ggml.pre": "gpt-2",
        ...         "tokenizer.ggml.tokens": ["a", "b", "ab"],
        ...         "tokenizer.ggml.merges": ["a b"],
        ...     }
        ... )
        >>> made.encode("abba")
        array([2, 1, 0])
        """
        _need_package()
        try:
            library = parsed(gguf_tokenizer, metadata)
        except ValueError as error:
            raise TokenizerError(f"GGUF metadata: {error}") from error
        tokens, special = metadata["tokenizer.ggml.tokens"], {}
        for name in ("bos", "eos", "unknown", "padding"):
            if (number := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
                special[f"{ {'unknown': 'unk', 'padding': 'pad'}.get(name, name) }_token"] = str(
                    tokens[int(number)]
                )
        ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        known = sorted({int(number) for number in ends if number is not None})
        return cls(library, known, metadata.get("tokenizer.chat_template"), special)

    @property
    def size(self) -> int:
        """How many tokens there are, the special ones included."""
        return int(self.library.get_vocab_size())

    def encode(self, text: str, special: bool = True) -> Array:
        """The tokens of a text.

        Args:
            text: any text; special tokens that are written out in it count as such.
            special: whether the tokens that open or close every text are added.

        Returns:
            int64 (T,).

        Raises:
            TokenizerError: for text that it has no tokens for; byte-level ones take every text.

        >>> tokenizers = __import__("tokenizers")
        >>> from extensor.generation import PretrainedTokenizer
        >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0, "no": 1}))
        >>> PretrainedTokenizer(words).encode("yes")
        array([0])
        """
        try:
            numbers = self.library.encode(text, add_special_tokens=special).ids
        except Exception as error:  # the package raises nothing narrower
            raise TokenizerError(f"encode: {error}") from error
        return np.array(numbers, np.int64)

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """The text of tokens.

        Args:
            tokens: whole numbers (T,).
            skip_special: whether special tokens are left out.

        Returns:
            The text; bytes that are no UTF-8 become the replacement character.

        Raises:
            TokenizerError: for numbers that are no tokens.

        >>> tokenizers = __import__("tokenizers")
        >>> from extensor.generation import PretrainedTokenizer
        >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0, "no": 1}))
        >>> PretrainedTokenizer(words).decode([1])
        'no'
        """
        numbers = np.asarray(tokens, np.int64)
        bad = numbers[(numbers < 0) | (numbers >= self.size)]
        if bad.size:
            raise TokenizerError(f"decode: expected tokens in 0..{self.size - 1}, got {bad[0]}")
        return str(self.library.decode(numbers.tolist(), skip_special_tokens=skip_special))

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> Array:
        """The tokens of a conversation, up to where the model's answer begins.

        Args:
            messages: see `render_chat`.
            variables: see `render_chat`; the model's special tokens are set.

        Returns:
            int64 (T,).

        Raises:
            ChatError: if the model has no chat template, and as `render_chat`.

        >>> tokenizers = __import__("tokenizers")
        >>> from extensor.generation import PretrainedTokenizer
        >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0, "no": 1}))
        >>> made = PretrainedTokenizer(words, chat_template="{{ messages[0].content }}")
        >>> made.encode_chat([{"role": "user", "content": "no"}])
        array([1])
        """
        if self.chat_template is None:
            raise ChatError(
                "the model has no chat template, so it was not trained to chat; write on from a "
                "text with `extensor generate`, or use a model that was tuned on instructions"
            )
        text = render_chat(self.chat_template, messages, **{**self.variables, **variables})
        return self.encode(text, special=False)


def _need_package() -> None:
    if (message := missing("a pretrained tokenizer", "tokenizers")) is not None:
        raise TokenizerError(message)


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not file.is_file():
        return {}
    found: dict[str, Any] = read_json(file, dict[str, Any], TokenizerError)
    return found


def _checked(value: Any, expected: Any, where: str) -> list[Any]:
    """A value, or a list of them, as a list."""
    try:
        check(value, expected)
    except SchemaError as error:
        raise TokenizerError(f"{where}: {error}") from None
    return value if isinstance(value, list) else [value]


def _token_text(value: object) -> str | None:
    """A special token's text, which tokenizer_config.json gives plain or in an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
