"""What it takes to go on with a request on another engine: what was asked for, and what came of it so far.

It also keeps what speaks against a request when engines die. It knows no engine process, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from runnerd_service.engine.messages import AddRequest, RequestOutput
from runnerd_service.errors import RunnerdError

MARGIN_TOKENS = 8
"""How much further than at a crash an output has to get, to show that the crash does not come of it. An engine may have
been ahead of what was heard of it by the steps in flight and by messages under way."""


@dataclass(slots=True, eq=False)
class OngoingRequest:
    """A client's request with all its outputs: they stand and fall together."""

    fail: Callable[[RunnerdError], object]
    """Called when it cannot go on; its outputs are to be aborted then."""
    name: str = ""
    """Its id, as the log can hold it."""
    num_crashes: int = 0
    """Engines that died while they worked on it, since it last got further than at a crash."""
    solo_evidence: int = 0
    """How strongly the engines that died while they worked on nothing else speak against it."""
    outputs: dict[int, OngoingOutput] = field(default_factory=dict)
    """Those that have not ended, by uid."""


@dataclass(slots=True, eq=False)
class OngoingOutput:
    """One output of a request: an engine's request that has not ended."""

    owner: OngoingRequest
    request: AddRequest
    """As it was first given to an engine; its uid names the output on whatever engine it is."""
    sink: Callable[[RequestOutput], None]
    engine_uid: int | None = None
    """Its name on the present engine; None while it is not there. New at each admission: what the engine still sends of
    an earlier one cannot be mistaken for the new one's."""
    has_run: bool = False
    """Whether the present engine gave something of it."""
    mark: int | None = MARGIN_TOKENS
    """Number of outputs from which on it has got further than at the last crash; None once it has."""
    _token_ids: list[int] = field(default_factory=list)
    _has_prompt_logprobs: bool = False

    def admitted(self, engine_uid: int) -> AddRequest:
        """Give the request that lets an engine go on after what came so far."""
        self.engine_uid = engine_uid
        self.has_run = False
        sampling = self.request.sampling
        if self._has_prompt_logprobs or self._token_ids:
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request, uid=engine_uid, sampling=sampling, output_token_ids=tuple(self._token_ids)
        )

    def take(self, output: RequestOutput) -> bool:
        """Note what an engine gave; give whether it has just got further than at the last crash."""
        self.has_run = True
        self._token_ids += output.token_ids
        if output.prompt_logprobs:
            self._has_prompt_logprobs = True
        if self.mark is None or (len(self._token_ids) < self.mark and output.finish is None):
            return False
        self.mark = None
        return True

    def set_mark(self) -> None:
        """Remember how far it is: an engine died."""
        self.mark = len(self._token_ids) + MARGIN_TOKENS
