"""Gives the live requests to whatever engine there is, and goes on with them on the next one.

A token depends on what came before it and on nothing else, so another engine, given prompt and outputs, goes on with
the very token that the first one would have given. Requests that engines may die of are tried alone. This module knows
not how engines come and go; it is told. It knows no text and no gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from runnerd_service.engine.client import EngineClient
from runnerd_service.engine.messages import AddRequest, RequestOutput
from runnerd_service.errors import FieldViolation, InvalidRequest, PoisonousRequest, RowFailed, RunnerdError
from runnerd_service.frontend.ongoing import OngoingOutput, OngoingRequest
from runnerd_service.frontend.suspects import Suspects, at_work, is_accused
from runnerd_service.telemetry.logs import with_fields

logger = logging.getLogger(__name__)


class Dispatcher:
    """The live requests and what the present engine has of them. All methods are called in one event loop.

    Args:
        max_num_seqs: How many outputs an engine runs at once.
        on_progress: Called when an output gets further than at the last failure.
        on_open: Called when all requests may run together on an engine that was attached.
    """

    def __init__(self, max_num_seqs: int, on_progress: Callable[[], None], on_open: Callable[[], None]) -> None:
        self.num_poisonous = 0
        """Requests that were found to kill engines."""
        self._max_num_seqs = max_num_seqs
        self._on_progress = on_progress
        self._on_open = on_open
        self._client: EngineClient | None = None
        self._outputs: dict[int, OngoingOutput] = {}
        """Outputs that have not ended, by uid: in the order of their arrival."""
        self._engine_uids = itertools.count(1)
        self._suspects = Suspects()
        self._tried: Sequence[OngoingRequest] = ()
        """Requests that the engine has without the others."""
        self._on_trial = False
        """Whether requests may have to be tried, or one is accused."""
        self._engine_is_sound = False
        """Whether an output got further since the last failure."""
        self._advances = False

    def __len__(self) -> int:
        """Outputs that have not ended."""
        return len(self._outputs)

    def attach(self, client: EngineClient) -> None:
        """Give the requests to an engine that has just become ready."""
        self._client = client
        self._advance()

    def detach(self) -> None:
        """Take no more from the present engine: it is closed."""
        self._client, self._tried = None, ()
        for output in self._outputs.values():
            output.engine_uid = None

    def note_failure(self, *, from_outside: bool) -> None:
        """Take no more from the present engine, and remember what it worked on: it has failed.

        Args:
            from_outside: Somebody ended it, who may have had other reasons.
        """
        there = at_work(self._outputs.values(), self._max_num_seqs)
        self._suspects.note_crash(there, from_outside=from_outside)
        self._on_trial, self._engine_is_sound = True, False
        self.detach()

    def add(
        self,
        owner: OngoingRequest,
        request: AddRequest,
        sink: Callable[[RequestOutput], None],
        *,
        waits: bool = False,
    ) -> None:
        """Give an output to the engine, and to those after it.

        Args:
            owner: The client's request that it belongs to.
            request: Its uid was never used before.
            sink: Called with what engines give, each token once, up to a finish that is not "failed": what becomes of
                a request that fails is told to its owner.
            waits: Give it to the engine when all requests may run together again, and not before.
        """
        output = self._outputs[request.uid] = owner.outputs[request.uid] = OngoingOutput(owner, request, sink)
        if self._client is not None and not waits:
            self._admit(self._client, [output])

    def abort(self, uids: Iterable[int]) -> None:
        """Forget outputs; their sinks are not called any more. Those that have ended are passed over."""
        gone = [self._outputs[uid] for uid in uids if uid in self._outputs]
        for output in gone:
            self._forget(output)
        self._withdraw(gone)

    def fail_all(self, error: RunnerdError) -> None:
        """End all requests."""
        for owner in {output.owner: None for output in self._outputs.values()}:
            self._fail(owner, error)

    def _admit(self, client: EngineClient, outputs: Iterable[OngoingOutput]) -> None:
        for output in outputs:
            client.add(output.admitted(next(self._engine_uids)), partial(self._receive, client, output))

    def _withdraw(self, outputs: Iterable[OngoingOutput]) -> None:
        engine_uids = [output.engine_uid for output in outputs if output.engine_uid is not None]
        for output in outputs:
            output.engine_uid = None
        if engine_uids and self._client is not None:
            self._client.abort(engine_uids)

    def _forget(self, output: OngoingOutput) -> None:
        self._outputs.pop(output.request.uid, None)
        output.owner.outputs.pop(output.request.uid, None)
        if self._on_trial:
            self._advance_soon()

    def _fail(self, owner: OngoingRequest, error: RunnerdError) -> None:
        owner.fail(error)
        self.abort(tuple(owner.outputs))

    def _receive(self, client: EngineClient, output: OngoingOutput, message: RequestOutput) -> None:
        if client is not self._client:
            return  # it fails its requests; here they go on
        if message.finish == "failed":
            at_fault = FieldViolation(message.field, message.error)
            self._fail(output.owner, InvalidRequest(at_fault) if message.field else RowFailed(message.error))
            return
        if output.take(message):
            self._note_progress(output)
        if message.finish is not None:
            self._forget(output)
        try:
            output.sink(message)
        except Exception:
            name = output.owner.name
            logger.exception(
                "request %s is failed: what came of it cannot be used", name, extra=with_fields(request_id=name)
            )
            self._fail(output.owner, RunnerdError("internal error; the server's log has the details"))

    def _note_progress(self, output: OngoingOutput) -> None:
        self._on_progress()
        self._suspects.note_progress(output.owner)
        if self._on_trial:
            self._engine_is_sound = True
            self._advance_soon()

    def _advance_soon(self) -> None:
        """Advance when the caller has ended: what it works on may change."""
        if not self._advances:
            self._advances = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Give the engine what it is to work on now."""
        self._advances = False
        client = self._client
        if client is None:
            return
        for owner in self._suspects.to_blame(self._outputs.values(), engine_is_sound=self._engine_is_sound):
            self._blame(owner)
        if any(one.num_crashes and _is_at_work(one) for one in self._tried):
            return  # they have not all got further yet
        for one in self._tried:
            self._withdraw(tuple(one.outputs.values()))
        self._tried = self._suspects.to_try(self._outputs.values())
        if self._tried:
            logger.warning("%d requests that were there when engines died are tried alone", len(self._tried))
            outputs = [output for one in self._tried for output in one.outputs.values()]
            self._admit(client, outputs[: self._max_num_seqs])
            return
        waiting = [output for output in self._outputs.values() if output.engine_uid is None]
        self._admit(client, (output for output in waiting if not is_accused(output.owner)))
        self._on_trial = any(output.owner.num_crashes for output in self._outputs.values())
        self._on_open()

    def _blame(self, owner: OngoingRequest) -> None:
        self.num_poisonous += 1
        logger.error("request %s is failed: engines die of it", owner.name, extra=with_fields(request_id=owner.name))
        text = "the engine died of this request each time that it was tried, at last alone; it is not tried again"
        self._fail(owner, PoisonousRequest(text))


def _is_at_work(owner: OngoingRequest) -> bool:
    return any(output.engine_uid is not None for output in owner.outputs.values())
