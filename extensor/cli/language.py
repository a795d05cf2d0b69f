"""``extensor generate`` and ``chat``: what a language model writes.

Peak memory counts here, so that what only other commands need is not imported. tyro checks
`X | None` and `tuple[X, ...]` by typeguard, which takes 9 MB; `Optional[X]` and `tuple` it knows.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import numpy as np
from tyro.conf import Positional, arg

from extensor.cli.sheet import CommandError
from extensor.generation import (
    PretrainedTokenizer,
    Sampling,
    Tokenizer,
    next_tokens,
    stream_text,
)
from extensor.nn.kv_cache import KVCache, new_cache
from extensor.nn.module import Module

__all__ = ["LanguageModel", "chat", "generate", "load_language_model"]

NO_CACHE = "none"
ModelPath = Annotated[Positional[Path], arg(metavar="MODEL")]


@dataclass(frozen=True, kw_only=True)
class WritingFlags:
    """How tokens are chosen, and when the text ends."""

    tokens: int = 500
    """How many tokens to write at most."""
    temperature: float = 0.8
    """What scores are divided by before the draw; 0 always takes the likeliest token."""
    top_k: int = 200
    """Draw among the likeliest tokens only; 0 draws among all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens whose probabilities sum to this; 1 draws among all."""
    min_p: float = 0.0
    """Draw among tokens of at least this times the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the text already has become less likely."""
    seed: int = 0
    """Seed of the draws: the same seed gives the same text."""
    stop: tuple = ()  # type: ignore[type-arg]  # of str; see the top
    """Texts before which the text ends."""
    cache: str = "float32"
    """How keys and values are kept: float32, bfloat16, a format of `extensor formats`, or none: all
    tokens then pass through the model again for each new one."""

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "seed"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                got = getattr(self, name)
                raise CommandError(f"--{flag}: expected a whole number, 0 or more, got {got}")
        if not 0.0 <= self.temperature < math.inf:
            raise CommandError(
                f"--temperature: expected a number, 0 or more, got {self.temperature!r}"
            )
        if not all(self.stop):
            raise CommandError("--stop: expected texts of one character or more, got an empty one")
        try:
            self.sampling()
        except ValueError as error:
            raise CommandError(f"--{str(error).replace('_', '-', 1)}") from None

    def sampling(self) -> Sampling:
        """The flags as a record of the library."""
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.seed,
        )


@dataclass(frozen=True)
class LanguageModel:
    """A model with what turns text into its tokens.

    Attributes:
        model: tokens (B, T) to logits.
        tokenizer: its tokenizer.
        context: the most tokens that the model sees; None, as many as memory holds.
    """

    model: Module
    tokenizer: Tokenizer
    context: int | None = None

    @property
    def caches(self) -> bool:
        """Whether the model can keep keys and values."""
        return "cache" in inspect.signature(self.model.forward).parameters

    @property
    def end_tokens(self) -> Sequence[int]:
        """The tokens after which a text ends."""
        return getattr(self.tokenizer, "end_tokens", ())

    def cache(self, name: str) -> KVCache | None:
        """An empty cache; None where none is wanted or possible."""
        if name == NO_CACHE or not self.caches:
            return None
        try:
            return new_cache(self.model, name)
        except ValueError as error:
            raise CommandError(f"--cache: {error}") from None


def load_language_model(path: Path) -> LanguageModel:
    """The model of a pretrained folder or file, or of a run of `extensor train gpt`.

    Raises:
        CommandError: if there is none, or it cannot be used.
    """
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        models: Any = importlib.import_module("extensor.models")
        decoder: Any = importlib.import_module("extensor.models.decoder")
        problem = None
        try:
            tokenizer = PretrainedTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            problem = error  # what is wrong with the model comes first
        _give_back_memory()  # making a tokenizer takes three times what it keeps
        try:
            model = models.from_pretrained(path)
            if not isinstance(model, decoder.Decoder):
                raise CommandError(
                    f"{path}: a {type(model).__name__} model gives a vector for each token, not "
                    "the next token; extensor.models.from_pretrained runs it in Python"
                )
            if problem is not None:
                raise problem
            _give_back_memory()
        except (OSError, ValueError) as error:
            raise CommandError(str(error)) from error
        if tokenizer.size > model.config.vocab:
            raise CommandError(
                f"{path}: its tokenizer has {tokenizer.size:,} tokens, the model's embedding "
                f"{model.config.vocab:,} rows; the way out: the tokenizer that the model was "
                "trained with"
            )
        return LanguageModel(model, tokenizer, getattr(model.config, "context", None))
    runs: Any = importlib.import_module("extensor.training.language_model")
    try:
        return LanguageModel(*runs.load_language_model(path))
    except (runs.UsageError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error


def _give_back_memory() -> None:
    """Return freed memory to the system; glibc keeps much of it for later."""
    if sys.platform == "linux" and hasattr(trim := ctypes.CDLL(None), "malloc_trim"):
        trim.malloc_trim(0)


def generate(
    model: ModelPath,
    text: Annotated[Positional[Optional[str]], arg(metavar="TEXT")] = None,  # noqa: UP045
    prompt: Optional[str] = None,  # noqa: UP045
    flags: Annotated[WritingFlags, arg(name="")] = WritingFlags(),
) -> None:
    """Write on from a text with a pretrained language model, or one that `train` trained.

    The same command gives the same text.

    example: extensor generate SmolLM2-135M-Instruct.gguf "The capital of France is" --temperature 0

    example: extensor generate runs/gpt --prompt 'ROMEO: ' --tokens 300

    Args:
        model: A folder with config.json, a .gguf file, or a run of `extensor train gpt`: its
            folder, or a checkpoint of it.
        text: The text to go on from; a line break where none is given.
        prompt: The same, as a flag.
        flags: How tokens are chosen.
    """
    if text is not None and prompt is not None:
        raise CommandError("expected a text or --prompt, got both")
    text = prompt if text is None else text
    if text == "":
        raise CommandError("--prompt: expected at least one letter, got an empty text")
    text = "\n" if text is None else text
    loaded = load_language_model(model)
    try:
        tokens = loaded.tokenizer.encode(text)
    except ValueError as error:
        raise CommandError(f"--prompt: {error}") from error
    cache = loaded.cache(flags.cache)
    print(text, end="", flush=True)
    for piece in write(loaded, tokens, flags, cache):
        print(piece, end="", flush=True)
    print()


def write(
    loaded: LanguageModel, tokens: Any, flags: WritingFlags, cache: KVCache | None
) -> Iterator[str]:
    """The text that follows tokens, piece by piece.

    Raises:
        CommandError: if the model's scores are not finite, or its context is full.
    """
    count, context = flags.tokens, loaded.context
    if count and loaded.caches and context is not None:
        count = min(count, context - len(tokens))
        if count < 1:
            raise CommandError(
                f"the text has {len(tokens)} tokens and the model's context holds {context}; the "
                "way out: a shorter text"
            )
    steps = next_tokens(loaded.model, [tokens], cache=cache, how=flags.sampling(), context=context)
    written = 0

    def new() -> Iterator[int]:
        nonlocal written
        for step in steps:
            written += 1
            yield int(step[0])

    try:
        yield from stream_text(
            new(), loaded.tokenizer, count, flags.stop, loaded.end_tokens, tokens
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    if written == count < flags.tokens:
        print(f"\nthe model's context of {context} tokens is full", file=sys.stderr)


def chat(
    model: ModelPath,
    system: str = "",
    flags: Annotated[WritingFlags, arg(name="")] = WritingFlags(),
) -> None:
    """Talk with a model that was tuned on conversations; an empty line or Ctrl-D ends it.

    example: extensor chat SmolLM2-135M-Instruct.gguf --top-p 0.9

    Args:
        model: A folder with config.json, or a .gguf file.
        system: What the model is told before the conversation.
        flags: How tokens are chosen.
    """
    loaded = load_language_model(model)
    tokenizer = loaded.tokenizer
    if not isinstance(tokenizer, PretrainedTokenizer) or tokenizer.chat_template is None:
        raise CommandError(
            f"{model}: has no chat template, so it was not trained to chat; `extensor generate` "
            "writes on from a text"
        )
    messages = [{"role": "system", "content": system}] if system else []
    cache, cached = loaded.cache(flags.cache), np.empty(0, np.int64)
    while line := _asked():
        messages.append({"role": "user", "content": line})
        try:
            tokens = tokenizer.encode_chat(messages)
        except ValueError as error:
            raise CommandError(str(error)) from error
        if cache is not None and not _keep_start(cache, cached, tokens):
            cache = loaded.cache(flags.cache)
        answer = ""
        for piece in write(loaded, tokens, flags, cache):
            answer += piece
            print(piece, end="", flush=True)
        print()
        # The answer's own tokens may differ from those of its text; only the question is sure.
        cached = tokens
        messages.append({"role": "assistant", "content": answer})


def _asked() -> str:
    """The next line of standard input; empty at its end."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().rstrip("\n")


def _keep_start(cache: KVCache, cached: Any, tokens: Any) -> bool:
    """Crop a cache to the tokens that two conversations begin with; False if it cannot be."""
    both = min(len(cached), len(tokens) - 1)
    different = np.flatnonzero(cached[:both] != tokens[:both])
    try:
        cache.crop(min(cache.length, int(different[0]) if different.size else both))
    except ValueError:
        return False
    return True
