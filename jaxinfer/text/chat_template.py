"""Chat templates: a model's Jinja template that renders messages to a prompt, run in a sandbox.

The template is part of the model, and thus code by the model's publisher. It runs in jinja2's
`ImmutableSandboxedEnvironment`, which permits no access to internal attributes and no changes to
the messages. The length of the source (`MAX_SOURCE_CHARS`) and of the output (`MAX_OUTPUT_CHARS`)
are limited, and so is the number of values that all calls of `range` yield in one rendering
(`MAX_RANGE_TOTAL`). Nested loops over the messages, and single expressions that build a huge value,
are not limited: use only templates of models that you trust.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_SOURCE_CHARS = 1_048_576
MAX_OUTPUT_CHARS = 16_777_216
MAX_RANGE_TOTAL = 1_000_000
# The names by which clients send a model's reasoning; the first one present in a message is used.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """A template that does not compile or render, or messages that it cannot render."""


class ChatTemplate:
    """A chat template that is compiled on first use.

    As with Hugging Face, a template can use `messages`, `add_generation_prompt`, `tools`,
    `documents`, the special tokens by name (`bos_token`, ...), `raise_exception`, `strftime_now`, a
    `tojson` that does not escape non-ASCII text, `break` / `continue`, and `{% generation %}`
    blocks.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(
                f"the chat template has {len(self.source):,} characters, more than the limit of "
                f"{MAX_SOURCE_CHARS:,}; pass a prompt instead of messages"
            )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template does not compile: line {error.lineno}: {error.message}; "
                "pass a prompt instead of messages"
            ) from error
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        special_tokens: Mapping[str, str] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for `messages`; the template can read `variables` by their names.

        Raises `ChatTemplateError` for malformed messages, for any error in the template (including
        its own `raise_exception`), and if a limit of this module is exceeded.
        """
        context: dict[str, Any] = {"tools": None, "documents": None, **(special_tokens or {})}
        context |= variables
        context |= {
            "messages": check_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "range": _RangeBudget(),
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._compiled.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise ChatTemplateError(
                        f"the chat template wrote more than {MAX_OUTPUT_CHARS:,} characters"
                    )
        except ChatTemplateError:
            raise
        # A template is arbitrary code, so any exception only means that it failed to render.
        except Exception as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return "".join(pieces)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return copies of `messages` with text parts joined by newlines.

    A message has a string `role` and a `content`: a string or a list of `{"type": "text", "text":
    ...}` parts; `content` may be missing if there are `tool_calls`. Other keys are passed to the
    template unchanged, except that keys with the value `None` are dropped and that reasoning is
    available by every name that templates read. Raises `ChatTemplateError` if a message is
    malformed.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            f"messages is a {type(messages).__name__}; a list of role/content objects is needed"
        )
    if not messages:
        raise ChatTemplateError("messages is empty; at least one message is needed")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} is a {type(message).__name__}; an object is needed")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where} has role {role!r}; a name such as 'user' is needed")
    checked = {key: value for key, value in message.items() if value is not None}
    reasoning = next((checked[key] for key in REASONING_KEYS if key in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    content = checked.get("content")
    if isinstance(content, str) or (content is None and checked.get("tool_calls")):
        return checked
    return {**checked, "content": _join_parts(where, content)}


def _join_parts(where: str, content: Any) -> str:
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(
            f"{where} has content of type {type(content).__name__}; a string or a list of text "
            "parts is needed"
        )
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(
                f'{where}, part {number} is {kind!r}; only {{"type": "text", "text": "..."}} parts '
                "are supported"
            )
        texts.append(part["text"])
    return "\n".join(texts)


class _RangeBudget:
    """`range` for templates; all calls in one rendering share one budget."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_TOTAL

    def __call__(self, *arguments: int) -> range:
        numbers = range(*arguments)
        # len() raises OverflowError for a huge range, which `render` reports as a failure.
        self._left -= len(numbers)
        if self._left < 0:
            raise ChatTemplateError(
                f"the chat template loops over more than {MAX_RANGE_TOTAL:,} numbers"
            )
        return numbers


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks text for training; rendered as text."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to JSON as Hugging Face does; jinja2's own filter escapes HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
