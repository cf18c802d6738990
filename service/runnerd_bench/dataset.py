"""The requests of a benchmark: random token ids, or the prompts of a JSONL file. Knows no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runnerd_client import ChatTurn

FIRST_ORDINARY_ID = 100
"""Random prompts have no token id below this in vocabularies that are much larger: the lowest ones steer the model."""


_MAX_LENGTH = 2**31 - 1


class DatasetError(Exception):
    """The requests cannot be made as they were asked for."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark."""

    prompt: str | Sequence[int] | Sequence[ChatTurn]
    """Text, token ids, or a conversation."""
    output_len: int
    """Most output tokens."""


@dataclass(frozen=True, slots=True)
class RandomDataset:
    """Prompts of random token ids.

    Args:
        input_len: Tokens of a prompt.
        output_len: Most output tokens.
        range_ratio: Lengths are drawn evenly from ``length * (1 - range_ratio)`` to ``length * (1 + range_ratio)``.
        prefix_len: Tokens that all prompts begin with, before their ``input_len`` own ones.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise DatasetError(f"--random-range-ratio is {self.range_ratio}; expected 0 or more and less than 1")

    def requests(self, count: int, vocab_size: int, seed: int) -> list[BenchRequest]:
        """Draw ``count`` requests; the same seed gives the same ones."""
        source = np.random.default_rng(seed)
        lowest = FIRST_ORDINARY_ID if vocab_size > 10 * FIRST_ORDINARY_ID else 0
        prefix = source.integers(lowest, vocab_size, self.prefix_len).tolist()
        return [
            BenchRequest(
                [*prefix, *source.integers(lowest, vocab_size, self._length(source, self.input_len)).tolist()],
                self._length(source, self.output_len),
            )
            for _ in range(count)
        ]

    def _length(self, source: np.random.Generator, length: int) -> int:
        spread = int(length * self.range_ratio)
        return max(1, int(source.integers(length - spread, length + spread + 1)))


def read_jsonl(path: Path, default_output_len: int, *, as_chat: bool) -> list[BenchRequest]:
    """Read the prompts of a JSONL file.

    Each line is an object with ``prompt`` (text) or ``messages`` (a conversation), and, if it likes, ``output_len``.

    Args:
        path: The file.
        default_output_len: Most output tokens where a line has no ``output_len``.
        as_chat: Make a ``prompt`` the user's message of a conversation.

    Raises:
        DatasetError: The file cannot be read, or a line is something else; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    requests = [
        _read_line(line, f"{path}:{number}", default_output_len, as_chat)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise DatasetError(f"{path} has no prompts")
    return requests


def pick(requests: Sequence[BenchRequest], count: int, seed: int, *, shuffle: bool) -> list[BenchRequest]:
    """Give ``count`` of ``requests``, each once before any comes again."""
    order = np.random.default_rng(seed).permutation(len(requests)) if shuffle else np.arange(len(requests))
    return [requests[order[index % len(order)]] for index in range(count)]


def _read_line(line: str, where: str, default_output_len: int, as_chat: bool) -> BenchRequest:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"{where}: expected a JSON object: {error}") from error
    if not isinstance(record, dict):
        raise DatasetError(f"{where}: expected a JSON object, got {type(record).__name__}")
    if unknown := record.keys() - {"prompt", "messages", "output_len"}:
        raise DatasetError(f"{where}: unknown key {min(unknown)!r}; known: prompt, messages, output_len")
    output_len = record.get("output_len", default_output_len)
    if isinstance(output_len, bool) or not isinstance(output_len, int) or not 1 <= output_len <= _MAX_LENGTH:
        raise DatasetError(f"{where}: output_len is {output_len!r}; expected a whole number from 1 to {_MAX_LENGTH}")
    return BenchRequest(_prompt(record, where, as_chat), output_len)


def _prompt(record: dict[str, Any], where: str, as_chat: bool) -> str | list[ChatTurn]:
    prompt, messages = record.get("prompt"), record.get("messages")
    if (prompt is None) == (messages is None):
        raise DatasetError(f"{where}: expected either prompt or messages")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise DatasetError(f"{where}: prompt: expected a text that is not empty")
        _check_text(prompt, f"{where}: prompt")
        return [{"role": "user", "content": prompt}] if as_chat else prompt
    if not isinstance(messages, list) or not messages or not all(map(_is_turn, messages)):
        raise DatasetError(f'{where}: messages: expected a list of {{"role": TEXT, "content": TEXT}}')
    for index, one in enumerate(messages):
        for key, value in one.items():
            _check_text(value, f"{where}: messages[{index}].{key}")
    return [ChatTurn(role=one["role"], content=one["content"]) for one in messages]


def _check_text(text: str, where: str) -> None:
    """Refuse what JSON can write and no message can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = text[error.start : error.end]
        raise DatasetError(f"{where}: {lone!r} is half a character (a lone surrogate); write the whole one") from error


def _is_turn(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )
