"""``runnerd serve`` in a process of its own, on a tiny model with a tokenizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import tokenizers

from driving import VOCAB_SIZE, make_checkpoint

WAIT_SECONDS = 100


def make_served_model(folder: Path) -> Path:
    """Write a random model whose words are its token ids."""
    path = make_checkpoint(folder, "LlamaConfig")
    vocabulary = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path


@dataclass
class Daemon:
    """A server that is ready."""

    process: subprocess.Popen[str]
    address: str
    log: list[str] = field(default_factory=list)

    def engine(self) -> psutil.Process:
        """Give its engine process."""
        (engine,) = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "runnerd_service.engine.process" in child.cmdline()
        ]
        return engine


def command(*arguments: str) -> list[str]:
    """Give the command of a server."""
    return [sys.executable, "-m", "runnerd_service", "serve", "--port", "0", *arguments]


def ended(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a server that does not start to its end."""
    variables = os.environ | (environment or {})
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=WAIT_SECONDS, env=variables, check=False
    )


@contextmanager
def serving(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Daemon]:
    """Start a server and end it."""
    variables = os.environ | (environment or {})
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    stream = process.stderr
    reader = threading.Thread(target=lambda: log.extend(stream), daemon=True)
    reader.start()
    try:
        found = re.search(r"serving \S+ on (\S+)", process.stdout.readline())
        assert found, "".join(log)
        yield Daemon(process, found[1], log)
    finally:
        process.terminate()
        try:
            process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        process.stdout.close()
        process.stderr.close()
