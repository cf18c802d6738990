"""Renders one chat template that came with a request, in a process of its own with bounded time and memory.

Run as ``python -m``: reads a JSON object on standard input, writes one on standard output. It imports nothing of the
service but the renderer.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from runnerd_service.frontend.chat import ChatTemplate, ChatTemplateError
from runnerd_service.frontend.types import ChatPrompt

_CPU_SECONDS = 2
_WALL_SECONDS = 20.0
_MEMORY_BYTES = 1 << 30
_MAX_OUTPUT_BYTES = 64 << 20


def render_apart(chat: ChatPrompt, source: str, special_tokens: Mapping[str, str]) -> str:
    """Render ``chat`` by the foreign template ``source``; blocks, so call it in a thread.

    Raises:
        ChatTemplateError: The template is wrong, refuses the conversation, or takes too much time or memory.
    """
    work = json.dumps({"source": source, "special_tokens": dict(special_tokens), "chat": asdict(chat)})
    command = [sys.executable, "-P", "-m", "runnerd_service.frontend.template_process"]
    try:
        done = subprocess.run(command, input=work.encode(), capture_output=True, timeout=_WALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _too_much() from error
    if done.returncode != 0:
        raise _too_much()
    answer = json.loads(done.stdout)
    if "text" in answer:
        return str(answer["text"])
    raise ChatTemplateError(answer["field"], answer["message"])


def _too_much() -> ChatTemplateError:
    return ChatTemplateError(
        "chat.chat_template",
        f"rendering took more than {_CPU_SECONDS} seconds or {_MEMORY_BYTES >> 20} MiB; use a simpler template",
    )


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    work = json.load(sys.stdin)
    try:
        text = ChatTemplate(work["source"], work["special_tokens"]).render(ChatPrompt(**work["chat"]))
        answer = {"text": text}
    except ChatTemplateError as error:
        answer = {"field": error.field, "message": str(error)}
    written = json.dumps(answer)
    if len(written) > _MAX_OUTPUT_BYTES:
        sys.exit(1)
    sys.stdout.write(written)


if __name__ == "__main__":
    _main()
