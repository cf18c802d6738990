"""What one request of a benchmark gave, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds after the benchmark's start."""

    start: float = 0.0
    """When the call was begun."""
    message_times: list[float] = field(default_factory=list)
    """When each message with output came."""
    end: float = 0.0
    """When the call ended, well or not."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counted them, at the output's end."""
    text: str = ""
    error: str = ""
    """Why it failed; empty: it did not."""

    @property
    def completed(self) -> bool:
        """Whether it ended with all its output."""
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds from the call to the first message with output."""
        return self.message_times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds from the call to the last message with output."""
        return self.message_times[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with one token alone."""
        return None if self.output_tokens < 2 else (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between messages with output. Under load a message may hold several tokens."""
        return [later - earlier for earlier, later in pairwise(self.message_times)]
