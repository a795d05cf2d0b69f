"""Chat templates: a conversation as the text that a model was trained on.

Templates are programs that come with a model, so jinja2 runs them in its sandbox. What a template
may call beside jinja2's own functions is what transformers offers: ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, loop controls and the mark ``generation``.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from extensor.extras import missing
from extensor.schema import FileError

__all__ = ["ChatError", "render_chat"]

Message = Mapping[str, Any]

_MAX_RESULT = 10_000_000
_PADDING = frozenset(["center", "expandtabs", "ljust", "rjust", "zfill"])
"""Methods and filters of text that make it as long as a number says."""


class ChatError(FileError, ValueError):
    """A conversation that a template refuses, or a template that cannot be used.

    >>> from extensor.generation import ChatError, render_chat
    >>> try:
    ...     render_chat("{{ raise_exception('roles must alternate') }}", [])
    ... except ChatError as error:
    ...     print(error)
    chat template: roles must alternate
    """


def render_chat(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """A conversation as text, by a model's chat template.

    Args:
        template: jinja2, as in tokenizer_config.json, chat_template.jinja or a GGUF file.
        messages: mappings with ``role`` ("system", "user", "assistant") and ``content``.
        add_generation_prompt: whether the text ends where the model's answer begins.
        variables: further names that the template may use, such as ``bos_token`` and ``tools``.

    Returns:
        The text; its special tokens are written out.

    Raises:
        ChatError: if the template is broken, refuses the conversation, or tries what the sandbox
            forbids; if jinja2 is not installed.

    >>> from extensor.generation import render_chat
    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    >>> render_chat(template, [{"role": "user", "content": "Hi"}])
    '<user>Hi'
    """
    if (message := missing("a chat template", "jinja2")) is not None:
        raise ChatError(message)
    for number, entry in enumerate(messages):
        if not isinstance(entry, Mapping) or "role" not in entry:
            raise ChatError(
                f"message {number}: expected a mapping with a role and content, got {entry!r:.80}"
            )
    try:
        return _compiled(template).render(
            messages=[dict(entry) for entry in messages],
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except Exception as error:  # a template is a program, and may raise anything
        raise ChatError(f"chat template: {error or type(error).__name__}") from error


def _result_size(operator: str, left: Any, right: Any) -> int:
    """About how many characters, entries or bits the result of an operator has."""
    sizes = [len(v) if hasattr(v, "__len__") else 0 for v in (left, right)]
    whole = [abs(v) if isinstance(v, int) else 0 for v in (left, right)]
    if operator == "+":
        return sum(sizes)
    if operator == "**":
        return whole[0].bit_length() * whole[1]
    if operator == "%":  # of a text, with widths such as %9d
        widths = re.findall(r"\d+", left) if isinstance(left, str) else ()
        return sum(sizes) + sum(int(width[:12]) for width in widths)
    bits = whole[0].bit_length() + whole[1].bit_length()
    return max(sizes[0] * whole[1], sizes[1] * whole[0], bits)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training; here it is plain text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own form

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    class Sandbox(ImmutableSandboxedEnvironment):
        """jinja2's, without what makes gigabytes of a short template in one step."""

        intercepted_binops = frozenset(["+", "*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _result_size(operator, left, right) > _MAX_RESULT:
                raise SecurityError(f"the result of {operator} is too long")
            return super().call_binop(context, operator, left, right)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return attr not in _PADDING and super().is_safe_attribute(obj, attr, value)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    for name in _PADDING & environment.filters.keys():
        del environment.filters[name]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
