"""Renders one chat template that came with a request, in a process of its own with bounded time and memory.

Run as ``python -m``: reads a JSON object on standard input, writes one on standard output. It imports nothing of the
service but the renderer.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from runnerd_service.frontend.chat import ChatTemplate, ChatTemplateError
from runnerd_service.frontend.types import ChatPrompt

_CPU_SECONDS = 2
_WALL_SECONDS = 20.0
_MEMORY_BYTES = 1 << 30
_MAX_OUTPUT_BYTES = 64 << 20
_EXIT_CODE_MEMORY = 3
_EXIT_CODE_OUTPUT = 4


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
        raise _too_much(f"took more than {_WALL_SECONDS:g} seconds on a busy server") from error
    if done.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        raise _too_much(f"took more than {_CPU_SECONDS} seconds")
    if done.returncode == _EXIT_CODE_MEMORY:
        raise _too_much(f"needed more than {_MEMORY_BYTES >> 20} MiB")
    if done.returncode == _EXIT_CODE_OUTPUT:
        raise _too_much(f"gave more than {_MAX_OUTPUT_BYTES >> 20} MiB of text")
    if done.returncode != 0:
        raise _too_much(f"ended its process with exit code {done.returncode}")
    answer = json.loads(done.stdout)
    if "text" in answer:
        return str(answer["text"])
    raise ChatTemplateError(answer["field"], answer["message"])


def _too_much(what: str) -> ChatTemplateError:
    return ChatTemplateError("chat.chat_template", f"rendering {what}; use a simpler template")


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        written = json.dumps(_answer(json.load(sys.stdin)))
    except MemoryError:
        sys.exit(_EXIT_CODE_MEMORY)
    if len(written) > _MAX_OUTPUT_BYTES:
        sys.exit(_EXIT_CODE_OUTPUT)
    sys.stdout.write(written)


def _answer(work: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": ChatTemplate(work["source"], work["special_tokens"]).render(ChatPrompt(**work["chat"]))}
    except ChatTemplateError as error:
        return {"field": error.field, "message": str(error)}


if __name__ == "__main__":
    _main()
