"""Renders conversations by chat templates: Jinja in a sandbox, with the functions that published templates expect.

A template that comes with a request is foreign code: the sandbox keeps it from Python's internals, but not from using
up time or memory, so those are rendered in a process of their own (:mod:`runnerd_service.frontend.template_process`).
This module knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runnerd_service.frontend.types import ChatPrompt

_OPEN_END = "\ue0ffOPEN\ue0ff "
"""Marks where the final message's text ends in the rendered conversation; private-use characters, not in real text."""


class ChatTemplateError(Exception):
    """The conversation cannot be rendered; ``field`` of the prompt is at fault. The message is fit for clients."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: ``bos_token`` and its kind, which templates write out.

    Raises:
        ChatTemplateError: The source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # jinja2 computes constants here, and Python compiles what it made of the rest
            raise ChatTemplateError("chat.chat_template", f"not a chat template: {_told(error)}") from error

    def render(self, chat: ChatPrompt) -> str:
        """Give the conversation as the model reads it.

        Raises:
            ChatTemplateError: The template refuses the conversation or fails on it.
        """
        messages = [_plain_message(message) for message in chat.messages]
        opens_turn = chat.add_generation_prompt
        if opens_turn is None:
            opens_turn = not chat.continue_final_message
        if chat.continue_final_message:
            messages[-1]["content"] = str(messages[-1].get("content") or "") + _OPEN_END
        variables = {
            **self._special_tokens,
            **chat.template_kwargs,
            "messages": messages,
            "tools": list(chat.tools) or None,
            "documents": chat.template_kwargs.get("documents"),
            "add_generation_prompt": opens_turn,
        }
        try:
            text = self._template.render(variables)
        except TemplateError as error:
            raise ChatTemplateError("chat", f"the chat template refused the conversation: {_told(error)}") from error
        except MemoryError:
            raise
        except Exception as error:  # whatever the functions raise that a template may call
            raise ChatTemplateError("chat", f"the chat template failed on the conversation: {_told(error)}") from error
        return _cut_open_end(text) if chat.continue_final_message else text


def _told(error: Exception) -> str:
    """Give what the error says, or its kind where it says nothing."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or calls itself without end"
    return str(error) or type(error).__name__


def _cut_open_end(text: str) -> str:
    begin = text.rfind(_OPEN_END.rstrip())
    if begin < 0:
        raise ChatTemplateError(
            "chat.continue_final_message",
            "the chat template leaves out the final message's text; it cannot be continued",
        )
    # The mark ends with a space: if that is gone, the template trims messages, and would have trimmed this one's end.
    return text[:begin] if text.startswith(_OPEN_END, begin) else text[:begin].rstrip()


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message, its parts joined into one text: templates of text models expect a string."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain["content"] = "".join(part["text"] for part in content)
    return plain


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """``{% generation %}``: marks the assistant's text for training; here it is only what it holds."""

    tags = {"generation"}  # noqa: RUF012 # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Give the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Give JSON as published templates expect it: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
