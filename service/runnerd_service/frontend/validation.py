"""Checks a request's options against the contract, the server's limits and what the runner serves.

All violations are collected, each with the path of its field in the request message. What a runner does not serve is
refused by name unless the value asks for nothing (a penalty of 0, a top_p of 1). The prompt is checked where it
becomes tokens (:mod:`runnerd_service.frontend.preparation`). This module knows no gRPC and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TypeVar

from runnerd_service.engine.messages import Sampling
from runnerd_service.errors import FieldViolation
from runnerd_service.frontend.types import ChatPrompt, Generation
from runnerd_service.guided.guide import Guide
from runnerd_spi import RunnerCapabilities, RunnerError, list_runners, load_runner

MAX_NAME_CHARACTERS = 128
MAX_TEXT_CHARACTERS = 1024
"""Of a stop string or bad word."""
_MAX_ITEMS_SHOWN = 16
"""Violations reported of one list; the rest is counted."""
_MAX_VIOLATIONS = 256
_REPETITION_PENALTIES = (9.999999e-7, 1e6)
"""A logit times or divided by one of these is a number in float32; 1e-6 is a little less in the message's float."""
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
"""Variables of a chat template that have a field of their own."""
_INT32 = range(-(2**31), 2**31)
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    runner: str
    capabilities: RunnerCapabilities
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_n: int
    max_logprobs: int
    """The smaller of the server's and the runner's limit."""
    max_stop_strings: int
    max_bad_words: int = 1024
    request_templates: bool = True
    max_logit_bias: int | None = None
    """None: as many as there are token ids."""
    max_in_flight: int = 1
    """Steps that may be in flight."""
    max_guide_bytes: int = 256 * 1024


class Violations:
    """Collects what is wrong with a request."""

    def __init__(self) -> None:
        self.found: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        """Note a violation of ``field``; many are enough to refuse a request, further ones are not kept."""
        if len(self.found) < _MAX_VIOLATIONS:
            self.found.append(FieldViolation(field, description))

    def add_items(self, field: str, wrong: Sequence[_Key], describe: Callable[[_Key], str]) -> None:
        """Note violations of items of a list or map, by index or key."""
        for key in wrong[:_MAX_ITEMS_SHOWN]:
            self.add(f"{field}[{key}]", describe(key))
        if len(wrong) > _MAX_ITEMS_SHOWN:
            self.add(field, f"{len(wrong) - _MAX_ITEMS_SHOWN} further items are wrong")


def check_options(generation: Generation, served: ServedModel, violations: Violations) -> None:
    """Note all that is wrong with the options of ``generation``."""
    check = _Checker(served, violations)
    check.names(generation)
    check.sampling(generation)
    check.token_choices(generation)
    check.stopping(generation)
    check.output(generation)
    check.unserved(generation)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, violations: Violations) -> None:
    """Note the ids that are outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = [index for index, one in enumerate(token_ids) if not 0 <= one < vocab_size]
        violations.add_items(field, wrong, lambda index: f"got {token_ids[index]}, expected 0 to {vocab_size - 1}")


def check_choice(sampling: Sampling, ending_ids: Collection[int], vocab_size: int, violations: Violations) -> None:
    """Note that no token could be chosen for the first output position, which no runner can compute.

    Args:
        sampling: What was asked for, bad words as token ids.
        ending_ids: EOS and stop tokens, which ``min_tokens`` bans.
        vocab_size: Token ids are below this.
        violations: Takes what is found.
    """
    banned = {ids[0] for ids in sampling.bad_words_token_ids if len(ids) == 1}
    if sampling.min_tokens:
        banned.update(ending_ids)
    why = "is banned by sampling.bad_words, or would end the output before stopping.min_tokens; leave one of these out"
    if sampling.allowed_token_ids is None:
        if len(banned) >= vocab_size:
            violations.add("sampling.bad_words", f"each token of the vocabulary {why}")
    elif banned.issuperset(sampling.allowed_token_ids):
        violations.add("sampling.allowed_token_ids", f"each of them {why}")


class _Checker:
    def __init__(self, served: ServedModel, violations: Violations) -> None:
        self._served = served
        self._violations = violations

    def names(self, generation: Generation) -> None:
        if generation.request_id is not None and not 1 <= len(generation.request_id) <= MAX_NAME_CHARACTERS:
            length = len(generation.request_id)
            self._violations.add("request_id", f"got {length} characters, expected 1 to {MAX_NAME_CHARACTERS}")
        if generation.cache_salt is not None and len(generation.cache_salt) > MAX_NAME_CHARACTERS:
            length = len(generation.cache_salt)
            self._violations.add("cache_salt", f"got {length} characters, expected at most {MAX_NAME_CHARACTERS}")
        if generation.priority is not None and generation.priority not in _INT32:
            self._violations.add("priority", f"got {generation.priority}, expected a 32-bit integer")

    def sampling(self, generation: Generation) -> None:
        served, g = self._served, generation
        self._number("sampling.temperature", g.temperature, "0 to 100", lambda v: 0 <= v <= 100)
        self._number("sampling.top_k", g.top_k, f"0 to {served.vocab_size}", lambda v: 0 <= v <= served.vocab_size)
        self._number("sampling.top_p", g.top_p, "above 0, up to 1", lambda v: 0 < v <= 1)
        self._number("sampling.min_p", g.min_p, "0 to 1", lambda v: 0 <= v <= 1)
        self._number("sampling.typical_p", g.typical_p, "above 0, up to 1", lambda v: 0 < v <= 1)
        self._number("sampling.seed", g.seed, "0 to 2**64 - 1", lambda v: 0 <= v < 2**64)
        least, most = _REPETITION_PENALTIES
        self._number("sampling.repetition_penalty", g.repetition_penalty, "1e-6 to 1e6", lambda v: least <= v <= most)
        self._number("sampling.presence_penalty", g.presence_penalty, "-2 to 2", lambda v: -2 <= v <= 2)
        self._number("sampling.frequency_penalty", g.frequency_penalty, "-2 to 2", lambda v: -2 <= v <= 2)
        self._number("sampling.beam_width", g.beam_width, "at least 1", lambda v: v >= 1)

    def token_choices(self, generation: Generation) -> None:
        vocab_size, bias = self._served.vocab_size, generation.logit_bias
        most = vocab_size if self._served.max_logit_bias is None else min(self._served.max_logit_bias, vocab_size)
        if self._at_most("sampling.logit_bias", len(bias), most, "tokens"):
            unbounded = [one for one, value in bias.items() if not -100 <= value <= 100]
            self._violations.add_items(
                "sampling.logit_bias", unbounded, lambda one: f"got the value {bias[one]}, expected -100 to 100"
            )
            unknown = [one for one in bias if not 0 <= one < vocab_size]
            self._violations.add_items(
                "sampling.logit_bias", unknown, lambda _: f"not a token id, expected 0 to {vocab_size - 1}"
            )
        for field, token_ids in (
            ("sampling.allowed_token_ids", generation.allowed_token_ids),
            ("stopping.stop_token_ids", generation.stop_token_ids),
        ):
            if self._at_most(field, len(token_ids), vocab_size, "token ids"):
                check_token_ids(field, token_ids, vocab_size, self._violations)
        self._texts("sampling.bad_words", generation.bad_words, self._served.max_bad_words)

    def stopping(self, generation: Generation) -> None:
        g = generation
        self._number("stopping.max_tokens", g.max_tokens, "at least 1", lambda v: v >= 1)
        self._number("stopping.min_tokens", g.min_tokens, "0 or more", lambda v: v >= 0)
        self._number("stopping.time_limit", g.time_limit_seconds, "above 0", lambda v: v > 0)
        if g.max_tokens is not None and g.min_tokens is not None and g.min_tokens > g.max_tokens:
            self._violations.add(
                "stopping.min_tokens", f"got {g.min_tokens}, expected at most max_tokens, which is {g.max_tokens}"
            )
        self._texts("stopping.stop", g.stop, self._served.max_stop_strings)

    def output(self, generation: Generation) -> None:
        g, most = generation, self._served.max_logprobs
        self._number("output.n", g.n, f"1 to {self._served.max_n}", lambda v: 1 <= v <= self._served.max_n)
        # Where log-probabilities are not served at all, that is said instead.
        if self._served.capabilities.logprobs != "no":
            self._number("output.logprobs", g.logprobs, f"0 to {most}", lambda v: 0 <= v <= most)
        if self._served.capabilities.prompt_logprobs != "no":
            self._number("output.prompt_logprobs", g.prompt_logprobs, f"0 to {most}", lambda v: 0 <= v <= most)
        if g.logprobs is not None and g.tokens is False:
            self._violations.add("output.tokens", "got false, but output.logprobs needs the tokens' records")
        if g.include_prompt and g.text is False:
            self._violations.add("output.include_prompt", "got true, but output.text is false")

    def unserved(self, generation: Generation) -> None:
        g = generation
        asked: tuple[tuple[str, str, bool], ...] = (
            ("sampling.temperature", "temperature", g.temperature != 0),
            ("sampling.top_k", "top_k", bool(g.top_k)),
            ("sampling.top_p", "top_p", g.top_p not in (None, 1)),
            ("sampling.min_p", "min_p", bool(g.min_p)),
            ("sampling.typical_p", "typical_p", g.typical_p not in (None, 1)),
            ("sampling.seed", "seed", g.seed is not None),
            ("sampling.repetition_penalty", "repetition_penalty", g.repetition_penalty not in (None, 1)),
            ("sampling.presence_penalty", "presence_penalty", bool(g.presence_penalty)),
            ("sampling.frequency_penalty", "frequency_penalty", bool(g.frequency_penalty)),
            ("sampling.logit_bias", "logit_bias", bool(g.logit_bias)),
            ("sampling.allowed_token_ids", "allowed_token_ids", bool(g.allowed_token_ids)),
            ("sampling.bad_words", "bad_words", bool(g.bad_words)),
            ("stopping.min_tokens", "min_tokens", bool(g.min_tokens)),
            ("output.logprobs", "logprobs", g.logprobs is not None),
            ("output.prompt_logprobs", "prompt_logprobs", g.prompt_logprobs is not None),
        )
        support = capability_map(self._served.capabilities)
        for field, capability, is_asked in asked:
            if is_asked and support[capability] == "no":
                self._unserved(field, not_served(self._served.runner, capability))
        if g.beam_width not in (None, 1):
            self._unserved("sampling.beam_width", "beam search is served by no runner; use output.n and logprobs")
        if g.pooling is not None:
            self._violations.add("output.pooling", not_served(self._served.runner, "embeddings"))
        if g.guide is not None:
            self._guide(g.guide)
        if g.adapter is not None:
            self._violations.add("adapter", not_served(self._served.runner, "lora"))

    def _guide(self, guide: Guide) -> None:
        served, size = self._served, guide.num_bytes
        if served.capabilities.guided_decoding == "no":
            self._violations.add(guide.field, not_served(served.runner, "guided_decoding"))
        elif served.max_in_flight > 1:
            self._violations.add(
                guide.field,
                f"the runner {served.runner!r} serves guided_decoding only while steps do not overlap, and here "
                f"{served.max_in_flight} may be in flight; ask the operator for a server with --async-execution off",
            )
        elif size > served.max_guide_bytes:
            self._violations.add(
                guide.field,
                f"got {size} bytes, this server takes at most {served.max_guide_bytes}; use a smaller guide",
            )

    def _unserved(self, field: str, description: str) -> None:
        # A value that is out of range is told as that alone.
        if all(one.field != field for one in self._violations.found):
            self._violations.add(field, description)

    def _texts(self, field: str, texts: Sequence[str], most: int) -> None:
        if self._at_most(field, len(texts), most, "texts"):
            wrong = [index for index, one in enumerate(texts) if not 1 <= len(one) <= MAX_TEXT_CHARACTERS]
            expected = f"expected 1 to {MAX_TEXT_CHARACTERS}"
            self._violations.add_items(
                field, wrong, lambda index: f"got a text of {len(texts[index])} characters, {expected}"
            )

    def _at_most(self, field: str, got: int, most: int, what: str) -> bool:
        """Note a list that is too long, and only that: its items may be millions."""
        if got > most:
            self._violations.add(field, f"got {got} {what}, this server takes at most {most}")
        return got <= most

    def _number(self, field: str, value: float | None, expected: str, holds: Callable[[float], bool]) -> None:
        if value is not None and not (math.isfinite(value) and holds(value)):
            self._violations.add(field, f"got {value}, expected {expected}")


def check_conversation(chat: ChatPrompt, served: ServedModel, violations: Violations) -> None:
    """Note what is wrong with a conversation before it is rendered."""
    if not chat.messages:
        violations.add("chat.messages", "got none, expected at least one message")
    if len(chat.messages) > served.max_model_len:
        most = f"the model takes at most {served.max_model_len} tokens; leave old messages out"
        violations.add("chat.messages", f"got {len(chat.messages)} messages, {most}")
        return
    if chat.chat_template is not None and not served.request_templates:
        violations.add("chat.chat_template", "this server takes no templates from requests; leave it out")
    for name in _OWN_VARIABLES:
        if name in chat.template_kwargs:
            violations.add(f"chat.chat_template_kwargs[{name}]", f"would be hidden by chat.{name}; set that instead")
    for index, message in enumerate(chat.messages):
        if not message.get("role"):
            violations.add(f"chat.messages[{index}].role", "is empty, expected such as user, assistant or system")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            for number, part in enumerate(content):
                if part.get("type") != "text":
                    violations.add(f"chat.messages[{index}].parts[{number}]", not_served(served.runner, "multimodal"))
    if chat.continue_final_message and chat.add_generation_prompt:
        violations.add("chat.add_generation_prompt", "got true, but continue_final_message leaves the last turn open")


def not_served(runner: str, capability: str) -> str:
    """Say that ``runner`` lacks ``capability``, and which installed runners have it."""
    others = [name for name in _runners_that_serve(capability) if name != runner]
    remedy = (
        f"runners here that do: {', '.join(others)}" if others else "nor does another runner that is installed here"
    )
    return f"the runner {runner!r} does not serve {capability}; {remedy}"


def capability_map(capabilities: RunnerCapabilities) -> dict[str, str]:
    """Give what is served by name: "device", "host_sync" or "no"."""
    values = asdict(capabilities)
    return {field.name: values[field.name] for field in fields(capabilities) if field.type == "Support"}


@cache  # looks through all installed distributions; those of a process do not change
def _runners_that_serve(capability: str) -> tuple[str, ...]:
    return tuple(name for name in sorted({listing.name for listing in list_runners()}) if _serves(name, capability))


def _serves(runner: str, capability: str) -> bool:
    try:
        return capability_map(load_runner(runner).capabilities)[capability] != "no"
    except RunnerError:
        return False
