"""One output as it grows: tokens in, text and records out, stop strings found on the way.

Decoding happens when tokens arrive, not when the reader takes them. It costs the same either way (well under a
microsecond a token), and a stop string then ends the engine's work at once, however slow the reader is. What only the
reader needs, the records, is built when taken. This module knows no engine, no event loop and no other outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from runnerd_service.engine.messages import Logprobs, RequestOutput
from runnerd_service.frontend.preparation import PreparedRequest
from runnerd_service.frontend.stop import StopChecker, StopMatch
from runnerd_service.frontend.tokenizer import Tokenizer
from runnerd_service.frontend.types import Candidate, Finish, OutputChunk, TokenRecord


@dataclass(slots=True)
class _HeldToken:
    token_id: int
    text: str
    logprobs: Logprobs | None
    end: int
    """Where its text ends in the output's text."""


class OutputBuffer:
    """What one output has that was not taken yet. Each token counts and each text appears once, whatever is merged.

    The records' texts joined are the output's text: what a stop string cuts from the one is cut from the other, and the
    last token's record is kept while its character is unfinished: it gets U+FFFD if nothing more comes.

    Args:
        index: The output's.
        request: What was asked for.
        tokenizer: The model's.
    """

    __slots__ = (
        "_checker",
        "_cumulative",
        "_decodes",
        "_detokenizer",
        "_held_text",
        "_held_tokens",
        "_is_plain",
        "_num_cached",
        "_num_released",
        "_num_tokens",
        "_request",
        "_taken_texts",
        "_taken_tokens",
        "_texts",
        "_tokenizer",
        "_tokens",
        "_wants_text",
        "_wants_tokens",
        "finish",
        "has_news",
        "index",
        "is_noted",
    )

    def __init__(self, index: int, request: PreparedRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.is_noted = False
        """For whoever keeps a list of those with news: whether it is there."""
        self._request = request
        self._tokenizer = tokenizer
        self._wants_text, self._wants_tokens = request.wants_text, request.wants_tokens
        self._is_plain = request.wants_text and not request.wants_tokens and request.stops is None
        """Whether tokens need nothing but to be decoded."""
        self._cumulative = request.cumulative
        self._decodes = request.wants_text or request.wants_tokens or request.stops is not None
        self._detokenizer = tokenizer.stream(
            skip_special_tokens=request.skip_special_tokens, prompt_token_ids=request.prompt_token_ids
        )
        self._checker = None if request.stops is None else StopChecker(request.stops)
        self._texts: list[str] = [request.prompt_text] if request.prompt_text else []
        self._tokens: list[tuple[int, str, Logprobs | None]] = []
        self._held_text = ""
        self._held_tokens: deque[_HeldToken] = deque()
        self._num_released = 0
        self._num_tokens = 0
        self._num_cached = 0
        self.finish: Finish | None = None
        """How it ended; nothing is pushed after that."""
        self.has_news = False
        """Whether there is something to take."""
        self._taken_texts: list[str] = []
        self._taken_tokens: list[TokenRecord] = []

    def push(self, output: RequestOutput) -> bool:
        """Take what a step gave; give whether a stop string ended the output, so that the engine can be told."""
        if self._is_plain and self._num_tokens and output.finish is None:  # nearly all of what nearly all steps give
            self._num_tokens += len(output.token_ids)
            for text in self._detokenizer.push(output.token_ids):
                if text:
                    self._texts.append(text)
                    self.has_news = True
            return False
        if not self._num_tokens:  # later figures are those of another engine, which goes on with what came so far
            self._num_cached = max(self._num_cached, output.num_cached_tokens)
        token_ids = output.token_ids
        texts = self._decode(output) if self._decodes else [""] * len(token_ids)
        if self._checker is None:
            self._num_tokens += len(token_ids)
            self._release(token_ids, texts, output.logprobs)
        else:
            for token_id, text, record in zip(token_ids, texts, output.logprobs or repeat(None), strict=False):
                self._num_tokens += 1
                if self._hold(self._checker, token_id, text, record):
                    return True
            self._release_held(self._checker.num_safe, keeps_last=self._detokenizer.inside_character)
        if output.finish is not None:
            self._end(output)
        return False

    def end_by_time(self) -> None:
        """End the output as it is: its time is over."""
        if not self._flush():
            self._finish_as("time_limit")

    def take(self) -> OutputChunk | None:
        """Give what is new, or all so far when that was asked for; None if nothing is."""
        if not self.has_news:
            return None
        self.has_news = False
        text = "".join(self._texts)
        self._texts.clear()
        tokens: tuple[TokenRecord, ...] = ()
        if self._tokens:
            is_last_kept = self.finish is None and self._checker is None and self._detokenizer.inside_character
            kept = [self._tokens.pop()] if is_last_kept else []
            tokens = tuple(self._record(*token) for token in self._tokens)
            self._tokens = kept
            if not (text or tokens):
                return None
        if self._cumulative:
            self._taken_texts.append(text)
            self._taken_tokens.extend(tokens)
            text, tokens = "".join(self._taken_texts), tuple(self._taken_tokens)
        return OutputChunk(self.index, text, tokens, self.finish)

    def _decode(self, output: RequestOutput) -> list[str]:
        """Give each token's text. The token that ended the output has none, unless it was asked for."""
        if output.finish is None:
            return self._detokenizer.push(output.token_ids)
        hidden = (output.finish == "eos" and self._request.skip_special_tokens) or (
            output.finish == "stop_token" and not self._request.include_stop
        )
        if hidden and output.token_ids:
            return [*self._detokenizer.push(output.token_ids[:-1]), ""]
        return self._detokenizer.push(output.token_ids)

    def _release(self, token_ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[Logprobs | None]) -> None:
        if self._wants_text:
            text = texts[0] if len(texts) == 1 else "".join(texts)
            if text:
                self._texts.append(text)
                self.has_news = True
        if self._wants_tokens and token_ids:
            self._tokens.extend(zip(token_ids, texts, logprobs or repeat(None), strict=False))
            self.has_news = True

    def _hold(self, checker: StopChecker, token_id: int, text: str, logprobs: Logprobs | None) -> bool:
        self._held_text += text
        end = self._num_released + len(self._held_text)
        self._held_tokens.append(_HeldToken(token_id, text, logprobs, end))
        match = checker.push(text)
        if match is None:
            return False
        self._end_by_stop(match)
        return True

    def _end_by_stop(self, match: StopMatch) -> None:
        cut = match.end if self._request.include_stop else match.begin
        self._held_text = self._held_text[: cut - self._num_released]
        for token in self._held_tokens:
            begin = token.end - len(token.text)
            token.text = token.text[: max(0, cut - begin)]
            token.end = min(token.end, cut)
        self._release_held(cut)
        self._finish_as("stop", stop_string=match.stop)

    def _release_held(self, up_to: int, *, keeps_last: bool = False) -> None:
        """Release text up to a position of the output's text, and the tokens whose text ends there or before."""
        settled: list[_HeldToken] = []
        num_kept = 1 if keeps_last else 0
        while len(self._held_tokens) > num_kept and self._held_tokens[0].end <= up_to:
            settled.append(self._held_tokens.popleft())
        length = up_to - self._num_released
        text, self._held_text = self._held_text[:length], self._held_text[length:]
        self._num_released = up_to
        if self._wants_text and text:
            self._texts.append(text)
            self.has_news = True
        if self._wants_tokens and settled:
            self._tokens.extend((token.token_id, token.text, token.logprobs) for token in settled)
            self.has_news = True

    def _end(self, output: RequestOutput) -> None:
        if self._flush():
            return
        if output.finish == "length":
            self._finish_as("length")
        elif output.finish == "guide":
            self._finish_as("guide")
        elif output.finish == "eos":
            self._finish_as("stop", eos_token_id=output.matched_token_id)
        else:
            self._finish_as("stop", stop_token_id=output.matched_token_id)

    def _flush(self) -> bool:
        """Release all that is held, an unfinished character included; give whether that completed a stop string."""
        tail = self._detokenizer.flush() if self._decodes else ""
        if self._checker is not None:
            self._held_text += tail
            if tail and self._held_tokens:
                self._held_tokens[-1].text += tail
                self._held_tokens[-1].end += len(tail)
            match = self._checker.push(tail)
            if match is not None:
                self._end_by_stop(match)
                return True
            self._release_held(self._num_released + len(self._held_text))
        elif tail:
            if self._tokens:
                token_id, text, logprobs = self._tokens[-1]
                self._tokens[-1] = (token_id, text + tail, logprobs)
            self._release((), (tail,), ())
        return False

    def _finish_as(
        self,
        reason: Literal["stop", "length", "time_limit", "guide"],
        *,
        eos_token_id: int | None = None,
        stop_token_id: int | None = None,
        stop_string: str | None = None,
    ) -> None:
        self.has_news = True
        self.finish = Finish(
            reason,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=self._num_cached,
            eos_token_id=eos_token_id,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
        )

    def _record(self, token_id: int, text: str, logprobs: Logprobs | None) -> TokenRecord:
        return TokenRecord(token_id, text) if logprobs is None else make_record(logprobs, text, self._tokenizer)


def make_record(logprobs: Logprobs, text: str, tokenizer: Tokenizer) -> TokenRecord:
    """Give the record of a token whose text is ``text``."""
    candidates = tuple(
        Candidate(token_id, tokenizer.token_text(token_id), logprob) for token_id, logprob in logprobs.top
    )
    return TokenRecord(logprobs.token_id, text, logprobs.logprob, logprobs.rank, candidates)
