"""The meeting point of a request's engine outputs and its reader: everything new is merged until the reader takes it.

The engine's side calls in, never waits and calls the reader up at most once for what it has not taken; the reader takes
one event at a time. What waits is bounded by what the request may generate. This module knows no engine process and no
registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runnerd_service.engine.messages import Logprobs, RequestOutput
from runnerd_service.errors import RunnerdError
from runnerd_service.frontend.output import OutputBuffer, make_record
from runnerd_service.frontend.preparation import PreparedRequest
from runnerd_service.frontend.tokenizer import Tokenizer
from runnerd_service.frontend.turns import Turns
from runnerd_service.frontend.types import Event, PromptRecords, Started


class RequestStream:
    """The events of one request. All methods run in the event loop.

    Args:
        request_id: The request's name.
        request: What was asked for.
        tokenizer: The model's.
        turns: Says when the reader may go on.
        end_early: Called with the index of an output that ends before the engine knows.
    """

    __slots__ = (  # with some hundred streams each is touched once a step, and all of it comes from far memory
        "_awaits_prompt",
        "_changed",
        "_end_early",
        "_error",
        "_num_open",
        "_owes_prompt",
        "_prompt_logprobs",
        "_request",
        "_started",
        "_tokenizer",
        "_turns",
        "_waiter",
        "outputs",
    )

    def __init__(
        self,
        request_id: str,
        request: PreparedRequest,
        tokenizer: Tokenizer,
        turns: Turns,
        end_early: Callable[[int], None],
    ) -> None:
        self._started: Started | None = Started(request_id, request.seed, len(request.prompt_token_ids))
        self._request = request
        self._tokenizer = tokenizer
        self._end_early = end_early
        self.outputs = tuple(OutputBuffer(index, request, tokenizer) for index in range(request.n))
        """What each output has; they are filled by :meth:`receive`."""
        self._num_open = request.n
        self._changed: list[OutputBuffer] = []
        """Outputs that may have news, oldest first."""
        self._error: RunnerdError | None = None
        self._turns = turns
        self._waiter: asyncio.Future[None] | None = None
        """What the reader waits for that was not called up yet."""
        self._prompt_logprobs: tuple[Logprobs, ...] = ()
        self._awaits_prompt = request.sampling.num_prompt_logprobs is not None and len(request.prompt_token_ids) > 1
        self._owes_prompt = request.sampling.num_prompt_logprobs is not None

    @property
    def ended(self) -> bool:
        """Whether each output has its finish."""
        return self._num_open == 0

    def receive(self, buffer: OutputBuffer, output: RequestOutput) -> None:
        """Take what a step gave one of :attr:`outputs`; failures come by :meth:`fail`."""
        if self._error is not None or buffer.finish is not None:
            return
        if output.prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
            self._awaits_prompt = False
        if buffer.push(output):
            self._end_early(buffer.index)
        if buffer.has_news or self._owes_prompt:
            self._note(buffer)

    def end_by_time(self) -> None:
        """End the outputs that are still open: the request's time is over."""
        if self._error is not None:
            return
        self._awaits_prompt = False
        for buffer in self.outputs:
            if buffer.finish is None:
                self._end_early(buffer.index)
                buffer.end_by_time()
                self._note(buffer)

    def fail(self, error: RunnerdError) -> bool:
        """Let the reader get ``error`` after what there is; give whether the request had neither ended nor failed."""
        if self.ended or self._error is not None:
            return False
        self._error = error
        self._call_up()
        return True

    def let_go(self) -> None:
        """Forget the error that the reader got; its traceback refers to this stream."""
        self._error = None

    async def next_event(self) -> Event | None:
        """Wait for news and give it; None when all outputs have ended and were taken.

        Raises:
            RunnerdError: What :meth:`fail` was given.
        """
        if self._started is not None:
            started, self._started = self._started, None
            return started
        may_go_on = not self._turns.crowded
        while True:
            if may_go_on:
                event = self._take()
                if event is not None:
                    return event
                if self._error is not None:
                    raise self._error
                if self._num_open == 0:
                    return None
            waiter = self._turns.new_waiter()
            if may_go_on or not (self._changed or self._error or self._num_open == 0):
                self._waiter = waiter
            else:  # it has something to do, like those who wait
                self._turns.call_up(waiter)
            await waiter
            may_go_on = True

    def _note(self, buffer: OutputBuffer) -> None:
        if buffer.finish is not None:
            self._num_open -= 1
        if not buffer.is_noted:
            buffer.is_noted = True
            self._changed.append(buffer)
        if self._waiter is not None:
            self._call_up()

    def _call_up(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._turns.call_up(waiter)

    def _take(self) -> Event | None:
        if self._awaits_prompt:
            return None
        if self._owes_prompt and self._changed:
            self._owes_prompt = False
            return self._prompt_records()
        while self._changed:
            buffer = self._changed.pop(0)
            buffer.is_noted = False
            chunk = buffer.take()
            if chunk is not None:
                return chunk
        return None

    def _prompt_records(self) -> PromptRecords:
        texts = self._tokenizer.stream(skip_special_tokens=False).push(self._request.prompt_token_ids)[1:]
        records = zip(self._prompt_logprobs, texts, strict=False)
        return PromptRecords(tuple(make_record(logprobs, text, self._tokenizer) for logprobs, text in records))
