"""Tries a guide out in a process of its own, which may take too long, or all the memory, or die.

Run as ``python -m``: reads the vocabulary, then guides, on standard input; answers each on standard output. It ends
with its input.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec

from runnerd_service.guided.guide import Guide, GuideError, GuideKind, Vocabulary
from runnerd_service.guided.matcher import GuideCompiler
from runnerd_service.guided.notation import to_grammar

MEMORY_BYTES = 4 << 30
"""Most address space of the process."""
_LENGTH_BYTES = 4


class Question(msgspec.Struct, frozen=True):
    """A guide to try out."""

    kind: GuideKind
    texts: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True):
    """What became of it: a grammar, or an error."""

    grammar: str = ""
    error: str = ""
    place: str = ""
    """See :class:`~runnerd_service.guided.guide.GuideError`."""


def write_frame(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Send a message."""
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes:
    """Give the next message; empty at the end."""
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    data = stream.read(length)
    return data if len(data) == length else b""


def answer(question: Question, compiler: GuideCompiler, special_tokens: frozenset[str]) -> Answer:
    """Write a guide as a grammar, compile it, and see that a text can begin."""
    try:
        grammar = to_grammar(Guide(question.kind, question.texts), special_tokens)
        matcher = compiler.compile(grammar)
        matcher.advance(())
    except GuideError as error:
        return Answer(error=str(error), place=error.place)
    return Answer(error=matcher.error) if matcher.error else Answer(grammar)


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=Vocabulary)
    compiler = GuideCompiler(vocabulary, cache_size=0)
    special_tokens = frozenset(vocabulary.tokens[one].decode(errors="replace") for one in vocabulary.special_ids)
    write_frame(sys.stdout.buffer, Answer())
    while data := read_frame(sys.stdin.buffer):
        question = msgspec.msgpack.decode(data, type=Question)
        write_frame(sys.stdout.buffer, answer(question, compiler, special_tokens))


if __name__ == "__main__":
    main()
