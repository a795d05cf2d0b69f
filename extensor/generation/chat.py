"""Chat templates: a conversation as the text that a model was trained on.

Templates are programs that come with a model, so jinja2 runs them in its sandbox. What a template
may call beside jinja2's own functions is what transformers offers: ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, loop controls and the mark ``generation``.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from extensor.extras import missing

__all__ = ["ChatError", "render_chat"]

Message = Mapping[str, Any]


class ChatError(ValueError):
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
    import jinja2

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
    except (jinja2.TemplateError, TypeError) as error:
        raise ChatError(f"chat template: {error}") from error


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    import jinja2
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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
