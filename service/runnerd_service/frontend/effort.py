"""Tells how much work a request is before it is done, so that it is done where it holds up nobody. Knows sizes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runnerd_service.frontend.types import ChatPrompt, Generation

_MANY = 4_000
"""Characters or items that take about a millisecond."""

_HUGE = 1_000_000
"""Characters that take a hundred bytes of memory each while they become tokens."""

Effort = Literal["small", "large", "huge", "foreign", "guided"]
"""``small``: a few milliseconds at most. ``large``: too much for the event loop. ``huge``: a text of which there is
memory for one at a time, not for as many as there are threads. ``foreign``: a client's template.
``guided``: a guide, whose check may wait for that of others."""


def effort_of_prompt(prompt: str | Sequence[int] | ChatPrompt) -> Effort:
    """Give what it takes to make tokens of ``prompt``, or text of token ids."""
    if isinstance(prompt, str):
        return _effort_of_characters(len(prompt))
    if not isinstance(prompt, ChatPrompt):
        return "large" if len(prompt) > _MANY else "small"
    if prompt.chat_template is not None:
        return "foreign"
    effort = _effort_of_characters(sum(len(str(message.get("content"))) for message in prompt.messages))
    if effort == "small" and (prompt.tools or prompt.template_kwargs or len(prompt.messages) > _MANY):
        return "large"  # these have any depth
    return effort


def _effort_of_characters(num_characters: int) -> Effort:
    if num_characters > _HUGE:
        return "huge"
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
