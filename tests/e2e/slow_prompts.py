"""Prompts that take the front end long."""

from __future__ import annotations

from runnerd.v1.generation_pb2 import ChatPrompt
from runnerd_client import chat


def slow_to_prepare(text: str) -> ChatPrompt:
    """Give a prompt whose template takes a good part of a second, in a process of its own."""
    prompt = chat({"role": "user", "content": text})
    inner = "{% for i in range(50000) %}{% if (i ~ j) == 'x' %}y{% endif %}{% endfor %}"
    prompt.chat_template = f"{{% for j in range(20) %}}{inner}{{% endfor %}}{{{{ messages[0].content }}}}"
    return prompt
