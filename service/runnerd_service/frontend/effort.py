"""Tells how much work a request is before it is done, so that it is done where it holds up nobody. Knows sizes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runnerd_service.frontend.types import ChatPrompt, Generation

_MANY = 4_000
"""Characters or items that take about a millisecond."""

Effort = Literal["small", "large", "foreign", "guided"]
"""``small``: a few milliseconds at most. ``large``: too much for the event loop. ``foreign``: a client's template.
``guided``: a guide, whose check may wait for that of others."""


def effort_of_prompt(prompt: str | Sequence[int] | ChatPrompt) -> Effort:
    """Give what it takes to make tokens of ``prompt``, or text of token ids."""
    if not isinstance(prompt, ChatPrompt):
        return "large" if len(prompt) > _MANY else "small"
    if prompt.chat_template is not None:
        return "foreign"
    if prompt.tools or prompt.template_kwargs or len(prompt.messages) > _MANY:  # these have any depth
        return "large"
    num_characters = sum(len(str(message.get("content"))) for message in prompt.messages)
    return "large" if num_characters > _MANY else "small"


def effort_of(g: Generation) -> Effort:
    """Give what it takes to prepare ``g``."""
    if g.guide is not None:
        return "guided"
    effort = effort_of_prompt(g.prompt)
    if effort == "small":
        num_items = len(g.logit_bias) + len(g.allowed_token_ids) + len(g.stop_token_ids)
        if num_items + sum(map(len, g.bad_words)) + sum(map(len, g.stop)) > _MANY:
            return "large"
    return effort
