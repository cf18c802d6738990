"""Turns a request into what the engine needs: checked, rendered, tokenized. Pure: it may run in any thread.

It knows the tokenizer and the limits, but no live requests and no engine process.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from runnerd_service.engine.messages import AddRequest, GuideGrammar, Sampling
from runnerd_service.errors import FieldViolation, InvalidRequest, ModelNotFound
from runnerd_service.frontend.chat_rendering import ChatRenderer
from runnerd_service.frontend.stop import StopStrings
from runnerd_service.frontend.tokenizer import Tokenizer
from runnerd_service.frontend.types import ChatPrompt, Generation, Tokenized
from runnerd_service.frontend.validation import (
    ServedModel,
    Violations,
    check_choice,
    check_conversation,
    check_options,
    check_token_ids,
)
from runnerd_service.guided.checker import GuideChecker
from runnerd_service.guided.guide import Guide, GuideError

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be given to the engine, and what its outputs are made by."""

    prompt_token_ids: tuple[int, ...]
    prompt_text: str
    """What each output begins with; empty unless asked for."""
    sampling: Sampling
    """``seed`` is that of output 0."""
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    n: int
    stops: StopStrings | None
    include_stop: bool
    wants_text: bool
    wants_tokens: bool
    skip_special_tokens: bool
    cumulative: bool
    priority: int
    cache_salt: str
    time_limit_seconds: float | None
    guide: GuideGrammar | None = None

    @property
    def seed(self) -> int:
        """The request's seed."""
        return self.sampling.seed

    def add_request(self, uid: int, index: int, arrival_ns: int = 0) -> AddRequest:
        """Give the engine's request for output ``index``, which came at ``arrival_ns`` of ``time.monotonic_ns``."""
        sampling = self.sampling
        if index:
            # The prompt's records are the same for all outputs: only the first brings them.
            seed = output_seed(self.seed, index)
            sampling = msgspec.structs.replace(sampling, seed=seed, num_prompt_logprobs=None)
        return AddRequest(
            uid=uid,
            prompt_token_ids=self.prompt_token_ids,
            sampling=sampling,
            max_tokens=self.max_tokens,
            eos_token_ids=self.eos_token_ids,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            arrival_ns=arrival_ns,
            cache_salt=self.cache_salt,
            guide=self.guide,
        )


def output_seed(seed: int, index: int) -> int:
    """Give the seed of output ``index``: the request's own for 0, else mixed from both by SplitMix64's finalizer."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class Preparer:
    """Prepares requests for one model.

    Args:
        served: What requests are checked against.
        tokenizer: The model's.
        renderer: Renders conversations.
        guides: Checks guides; None: there are none for this model or this configuration.
    """

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        renderer: ChatRenderer,
        guides: GuideChecker | None = None,
    ) -> None:
        self._served = served
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._guides = guides

    def prepare(self, generation: Generation) -> PreparedRequest:
        """Check ``generation`` and give what the engine needs.

        Raises:
            ModelNotFound: It names another model.
            InvalidRequest: With all violations.
        """
        if generation.model is not None and generation.model != self._served.name:
            raise ModelNotFound(f"got model {generation.model!r}, this server serves {self._served.name!r}")
        violations = Violations()
        check_options(generation, self._served, violations)
        add_special_tokens = generation.add_special_tokens is not False
        most_tokens = None if generation.truncation in ("left", "right") else self._most_prompt_tokens(generation)
        token_ids = self._token_ids(generation.prompt, add_special_tokens, violations, most_tokens)
        if token_ids:
            token_ids = self._fit(generation, token_ids, violations)
            self._check_room(generation, len(token_ids), violations)
        if violations.found:
            raise InvalidRequest(*violations.found)
        request = self._request(generation, tuple(token_ids))
        ending_ids = (*request.eos_token_ids, *request.stop_token_ids)
        check_choice(request.sampling, ending_ids, self._served.vocab_size, violations)
        if violations.found:
            raise InvalidRequest(*violations.found)
        if generation.guide is None:
            return request
        return replace(request, guide=self._checked(generation.guide))

    def _checked(self, guide: Guide) -> GuideGrammar:
        """Compile a guide that the configuration serves.

        Raises:
            InvalidRequest: It is wrong or too large, or this model's vocabulary has no bytes to follow it in.
        """
        if self._guides is None:
            text = "this model's tokens have no bytes of their own, so no guide can be followed in them"
            raise InvalidRequest(FieldViolation(guide.field, text))
        try:
            return GuideGrammar(self._guides.check(guide), guide.field)
        except GuideError as error:
            raise InvalidRequest(FieldViolation(guide.field + error.place, str(error))) from error

    def tokenize(self, prompt: str | ChatPrompt, *, add_special_tokens: bool) -> Tokenized:
        """Give the token ids that :meth:`prepare` would give the engine.

        Raises:
            InvalidRequest: With all violations.
        """
        violations = Violations()
        token_ids = self._token_ids(prompt, add_special_tokens, violations)
        if violations.found:
            raise InvalidRequest(*violations.found)
        return Tokenized(tuple(token_ids), tuple(map(self._tokenizer.piece, token_ids)), self._served.max_model_len)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Give the text of token ids.

        Raises:
            InvalidRequest: Some are outside the vocabulary.
        """
        violations = Violations()
        check_token_ids("ids", token_ids, self._served.vocab_size, violations)
        if violations.found:
            raise InvalidRequest(*violations.found)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _token_ids(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        add_special_tokens: bool,
        violations: Violations,
        most_tokens: int | None = None,
    ) -> Sequence[int]:
        """Give the prompt's token ids; none when it is wrong, which is then among the violations.

        Args:
            prompt: What is asked for.
            add_special_tokens: Whether a text gets them; a conversation's template writes them out.
            violations: Takes what is wrong.
            most_tokens: A text that must have more is refused without making them; None: all are made.
        """
        if isinstance(prompt, str):
            return self._encode("text", prompt, add_special_tokens, violations, most_tokens)
        if isinstance(prompt, ChatPrompt):
            return self._encode_chat(prompt, violations, most_tokens)
        if not prompt:
            violations.add("token_ids.ids", "got no token id, expected at least one")
        check_token_ids("token_ids.ids", prompt, self._served.vocab_size, violations)
        return prompt

    def _encode_chat(self, chat: ChatPrompt, violations: Violations, most_tokens: int | None) -> Sequence[int]:
        num_before = len(violations.found)
        check_conversation(chat, self._served, violations)
        if len(violations.found) > num_before:
            return ()
        text = self._renderer.render(chat, violations)
        # Templates write the special tokens out themselves.
        return () if text is None else self._encode("chat", text, False, violations, most_tokens)

    def _encode(
        self, field: str, text: str, add_special_tokens: bool, violations: Violations, most_tokens: int | None
    ) -> Sequence[int]:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            violations.add(field, f"got a lone surrogate at character {error.start}, expected Unicode text")
            return ()
        if most_tokens is not None:
            least = self._tokenizer.least_tokens(raw)
            if least > most_tokens:
                self._refuse_length(f"at least {least} tokens ({len(raw)} bytes of text)", most_tokens, violations)
                return ()
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            violations.add(field, f"got {len(text)} characters that make no token, expected at least one token")
        elif max(token_ids) >= self._served.vocab_size:
            violations.add(
                field, f"has the token {max(token_ids)}, but the model's token ids end at {self._served.vocab_size - 1}"
            )
        return token_ids

    def _fit(self, generation: Generation, token_ids: Sequence[int], violations: Violations) -> Sequence[int]:
        most = self._most_prompt_tokens(generation)
        if most is None:
            violations.add(
                "prompt_options.max_prompt_tokens", f"got {generation.max_prompt_tokens}, expected at least 1"
            )
            return token_ids
        if len(token_ids) <= most:
            return token_ids
        if generation.truncation == "left":
            return token_ids[-most:]
        if generation.truncation == "right":
            return token_ids[:most]
        self._refuse_length(f"{len(token_ids)} tokens", most, violations)
        return token_ids

    def _most_prompt_tokens(self, generation: Generation) -> int | None:
        """Give how many tokens the prompt may have; None if the request's own limit is wrong."""
        most = self._served.max_model_len - 1
        if generation.max_prompt_tokens is None:
            return most
        return min(most, generation.max_prompt_tokens) if generation.max_prompt_tokens >= 1 else None

    def _refuse_length(self, got: str, most: int, violations: Violations) -> None:
        violations.add(
            "prompt",
            f"got {got}, at most {most} fit (max_model_len is {self._served.max_model_len} and "
            "leaves one output token); shorten it or set prompt_options.truncation",
        )

    def _check_room(self, generation: Generation, num_prompt_tokens: int, violations: Violations) -> None:
        room = self._served.max_model_len - num_prompt_tokens
        if room < 1:
            return  # said of the prompt already
        fits = f"{room} fit after a prompt of {num_prompt_tokens} (max_model_len is {self._served.max_model_len})"
        if generation.max_tokens is not None and generation.max_tokens > room:
            violations.add("stopping.max_tokens", f"got {generation.max_tokens}, at most {fits}")
        elif generation.max_tokens is None and (generation.min_tokens or 0) > room:
            violations.add("stopping.min_tokens", f"got {generation.min_tokens}, at most {fits}")

    def _request(self, g: Generation, token_ids: tuple[int, ...]) -> PreparedRequest:
        skip_special_tokens = g.skip_special_tokens is not False
        wants_tokens = g.logprobs is not None if g.tokens is None else g.tokens
        return PreparedRequest(
            prompt_token_ids=token_ids,
            prompt_text=self._prompt_text(g, token_ids, skip_special_tokens) if g.include_prompt else "",
            sampling=self._sampling(g),
            max_tokens=g.max_tokens or self._served.max_model_len - len(token_ids),
            eos_token_ids=() if g.ignore_eos else self._served.eos_token_ids,
            stop_token_ids=tuple(dict.fromkeys(g.stop_token_ids)),
            n=1 if g.n is None else g.n,
            stops=StopStrings(g.stop) if g.stop else None,
            include_stop=bool(g.include_stop),
            wants_text=g.text is not False,
            wants_tokens=wants_tokens,
            skip_special_tokens=skip_special_tokens,
            cumulative=g.cumulative,
            priority=g.priority or 0,
            cache_salt=g.cache_salt or "",
            time_limit_seconds=g.time_limit_seconds,
        )

    def _sampling(self, g: Generation) -> Sampling:
        neutral = Sampling()
        return Sampling(
            temperature=neutral.temperature if g.temperature is None else g.temperature,
            top_k=g.top_k or 0,
            top_p=neutral.top_p if g.top_p is None else g.top_p,
            min_p=g.min_p or 0.0,
            typical_p=neutral.typical_p if g.typical_p is None else g.typical_p,
            # 63 bits, so that a client of any language can send it back as a signed integer.
            seed=secrets.randbits(63) if g.seed is None else g.seed,
            repetition_penalty=neutral.repetition_penalty if g.repetition_penalty is None else g.repetition_penalty,
            presence_penalty=g.presence_penalty or 0.0,
            frequency_penalty=g.frequency_penalty or 0.0,
            logit_bias=dict(g.logit_bias),
            allowed_token_ids=tuple(dict.fromkeys(g.allowed_token_ids)) or None,
            bad_words_token_ids=self._bad_words(g.bad_words),
            min_tokens=g.min_tokens or 0,
            num_logprobs=g.logprobs,
            num_prompt_logprobs=g.prompt_logprobs,
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for variant in (bare, f" {bare}") if bare else (word,):
                found[tuple(self._tokenizer.encode(variant, add_special_tokens=False))] = None
        return tuple(ids for ids in found if ids)

    def _prompt_text(self, g: Generation, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        # A text prompt is given back as it came, unless a part of it was cut off.
        untouched = isinstance(g.prompt, str) and g.truncation not in ("left", "right")
        if untouched and isinstance(g.prompt, str):
            return g.prompt
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
