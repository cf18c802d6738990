"""What the soak asks for, and whether an answer is the one of an undisturbed server."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from runnerd.v1 import generation_pb2, inference_pb2
from runnerd_client import AsyncClient

Options = dict[str, object]


class Mismatch(Exception):
    """A stream gave something that the undisturbed one did not give at this place."""


@dataclass(frozen=True, slots=True)
class OutputReference:
    """One output of the undisturbed stream."""

    text: str
    tokens: tuple[bytes, ...]
    """Serialized records."""
    finish: bytes


@dataclass(frozen=True, slots=True)
class Reference:
    """A request and what an undisturbed server answers."""

    prompt: str
    options: Options
    prompt_tokens: tuple[bytes, ...]
    outputs: tuple[OutputReference, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(output.tokens) for output in self.outputs)


@dataclass(slots=True)
class _Progress:
    text: list[str] = field(default_factory=list)
    length: int = 0
    num_tokens: int = 0
    finished: bool = False


class Comparison:
    """Follows a stream message by message and compares it with its reference.

    Args:
        reference: What is right.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._outputs = [_Progress() for _ in reference.outputs]
        self._num_prompt_tokens = 0
        self.num_started = 0
        self.num_tokens = 0

    def add(self, message: inference_pb2.StreamGenerateResponse) -> None:
        """Take the next message.

        Raises:
            Mismatch: It is not the right one.
        """
        kind = message.WhichOneof("event")
        if kind == "started":
            self.num_started += 1
        elif kind == "prompt":
            self._num_prompt_tokens = len(message.prompt.tokens)
            if tuple(map(_packed, message.prompt.tokens)) != self._reference.prompt_tokens:
                raise Mismatch("the prompt's records differ")
        elif kind == "output":
            self._add_output(message.output)
        if self.num_started != 1:
            raise Mismatch(f"{self.num_started} Started messages at a message of kind {kind}")

    def _add_output(self, chunk: inference_pb2.OutputChunk) -> None:
        progress, right = self._outputs[chunk.index], self._reference.outputs[chunk.index]
        if progress.finished:
            raise Mismatch(f"output {chunk.index}: something followed its finish")
        begin, end = progress.num_tokens, progress.num_tokens + len(chunk.tokens)
        if tuple(map(_packed, chunk.tokens)) != right.tokens[begin:end]:
            raise Mismatch(f"output {chunk.index}: tokens {begin} to {end} differ")
        progress.num_tokens = end
        self.num_tokens += len(chunk.tokens)
        if chunk.text != right.text[progress.length : progress.length + len(chunk.text)]:
            raise Mismatch(f"output {chunk.index}: the text differs at character {progress.length}")
        progress.length += len(chunk.text)
        if chunk.HasField("finish"):
            progress.finished = True
            if _packed_finish(chunk.finish) != right.finish:
                raise Mismatch(f"output {chunk.index}: the finish differs: {chunk.finish}")

    def check_whole(self) -> None:
        """Check that nothing is missing.

        Raises:
            Mismatch: Something is.
        """
        if self._num_prompt_tokens != len(self._reference.prompt_tokens):
            raise Mismatch("the prompt's records are missing")
        for index, (progress, right) in enumerate(zip(self._outputs, self._reference.outputs, strict=True)):
            found = (progress.finished, progress.num_tokens, progress.length)
            if found != (True, len(right.tokens), len(right.text)):
                raise Mismatch(f"output {index} ended OK with finish, tokens, characters {found}")


def check_unary(reference: Reference, answer: inference_pb2.GenerateResponse) -> None:
    """Check the answer of the unary call.

    Raises:
        Mismatch: It differs.
    """
    if _reference(reference.prompt, reference.options, answer) != reference:
        raise Mismatch("the unary answer differs")


def draw_requests(source: random.Random, count: int, max_tokens: int) -> Iterator[tuple[str, Options]]:
    """Draw requests of many kinds: lengths, seeds, penalties, several outputs, records, stop strings."""
    words = ["alpha", "beta", "gamma", "délta", "日本語", "👍", "42", "the", "of", "\n"]
    for number in range(count):
        prompt = " ".join(source.choices(words, k=source.choice((1, 5, 20, 100)))) + f" {number}"
        options: Options = {"seed": number, "max_tokens": source.randint(max(2, max_tokens // 10), max_tokens)}
        options["ignore_eos"] = source.random() < 0.8
        kinds: Sequence[Options] = (
            {},
            {"temperature": 0.0},
            {"temperature": 1.3, "top_k": 40},
            {"top_p": 0.9, "presence_penalty": 0.5},
            {"frequency_penalty": 0.3, "repetition_penalty": 1.2},
            {"n": 2},
            {"n": 3, "min_p": 0.05},
            {"stop": ["a", "zz"], "min_tokens": 5},
            {"logit_bias": {65: 2.0, 66: -5.0}},
        )
        options |= source.choice(kinds)
        if source.random() < 0.15:
            options["logprobs"] = 3
        if source.random() < 0.05:
            options["prompt_logprobs"] = 1
        yield prompt, options | {"tokens": True}


async def undisturbed(client: AsyncClient, prompt: str, options: Options) -> Reference:
    """Ask a server that nobody disturbs."""
    return _reference(prompt, options, await client.generate(prompt, **options))  # type: ignore[arg-type]


def _reference(prompt: str, options: Options, answer: inference_pb2.GenerateResponse) -> Reference:
    outputs = tuple(
        OutputReference(output.text, tuple(map(_packed, output.tokens)), _packed_finish(output.finish))
        for output in answer.outputs
    )
    return Reference(prompt, options, tuple(map(_packed, answer.prompt_tokens)), outputs)


def _packed(token: generation_pb2.Token) -> bytes:
    return token.SerializeToString(deterministic=True)


def _packed_finish(finish: generation_pb2.Finish) -> bytes:
    copy = generation_pb2.Finish()
    copy.CopyFrom(finish)
    copy.usage.cached_tokens = 0  # how much of a prompt is in the cache depends on who came before
    return copy.SerializeToString(deterministic=True)
