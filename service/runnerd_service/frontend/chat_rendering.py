"""Chooses the chat template for a conversation and renders it. Knows no tokens and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.chat import ChatTemplate, ChatTemplateError
from runnerd_service.frontend.template_process import render_apart
from runnerd_service.frontend.types import ChatPrompt
from runnerd_service.frontend.validation import Violations


class ChatRenderer:
    """Renders conversations for one model.

    Args:
        templates: The model's templates by name.
        special_tokens: By the names that templates use.
        operator_template: Path of a template to use instead of the model's.

    Raises:
        ConfigurationError: The operator's template cannot be read or is not a template.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], operator_template: str | None = None
    ) -> None:
        self._special_tokens = special_tokens
        self._problem = "this model has no chat template; give chat.chat_template, or a prompt as text"
        self._templates: dict[str, ChatTemplate] = {}
        if operator_template is not None:
            templates = {"default": _read(operator_template)}
        try:
            self._templates = {name: ChatTemplate(source, special_tokens) for name, source in templates.items()}
        except ChatTemplateError as error:
            if operator_template is not None:
                raise ConfigurationError(f"--chat-template {operator_template}: {error}") from error
            # Text prompts can be served all the same.
            self._problem = f"this model's chat template cannot be used ({error}); give chat.chat_template"

    @property
    def has_template(self) -> bool:
        """Whether a conversation can be rendered without a template of its own."""
        return bool(self._templates)

    def render(self, chat: ChatPrompt, violations: Violations) -> str | None:
        """Give the conversation as the model reads it; None if that fails, which is then among the violations."""
        try:
            if chat.chat_template is not None:
                return render_apart(chat, chat.chat_template, self._special_tokens)
            return self._choose(chat).render(chat)
        except ChatTemplateError as error:
            violations.add(error.field, str(error))
            return None

    def _choose(self, chat: ChatPrompt) -> ChatTemplate:
        template = self._templates.get("tool_use") if chat.tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()), None)
        if template is None:
            raise ChatTemplateError("chat", self._problem)
        return template


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {path} cannot be read: {error}") from error
