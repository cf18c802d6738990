"""Measures a stream as its client sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Self

from runnerd_client import StreamGenerateResponse


@dataclass(slots=True)
class StreamStats:
    """Times and token counts of one stream; times are ``time.perf_counter`` values."""

    started: float
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int = 0
    completion_tokens: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls) -> Self:
        """Start the clock."""
        return cls(time.perf_counter())

    def add(self, message: StreamGenerateResponse) -> None:
        """Take the next message, now."""
        if message.HasField("started"):
            self.prompt_tokens = message.started.prompt_tokens
        if message.HasField("output"):
            self.last_token = time.perf_counter()
            self.first_token = self.first_token or self.last_token
            if message.output.HasField("finish"):
                self.completion_tokens.append(message.output.finish.usage.completion_tokens)

    def summary(self) -> str:
        """Give the figures in a line: TTFT, TPOT (time per output token after the first), and the rate of the whole."""
        total = sum(self.completion_tokens)
        if self.first_token is None or self.last_token is None:
            return "no output"
        elapsed, decoding = self.last_token - self.started, self.last_token - self.first_token
        parts = [
            f"{self.prompt_tokens} prompt tokens",
            f"{total} output tokens",
            f"TTFT {(self.first_token - self.started) * 1e3:.1f} ms",
        ]
        if len(self.completion_tokens) == 1 and total > 1 and decoding > 0:
            parts.append(f"TPOT {decoding / (total - 1) * 1e3:.2f} ms")
        parts.append(f"{total / elapsed:.1f} tokens/s")
        return ", ".join(parts)
