"""The guided requests of an engine: compiled on a thread of their own, masked in each plan, advanced by each token.

A matcher's state is a function of the outputs, so a request that comes with some, from an engine that is gone, goes on
where it was. Only for engines with one step in flight: a mask is known when the token before it is.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from runnerd_service.engine.guided_output import GuidedOutput
from runnerd_service.engine.messages import GuideGrammar
from runnerd_service.engine.request import RequestState, Status
from runnerd_service.engine.scheduler import ScheduledStep
from runnerd_service.guided.guide import GuideError, Vocabulary
from runnerd_service.guided.matcher import GuideCompiler, MatcherThreads
from runnerd_spi import TokenMask

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.01
"""How long an engine with nothing else to do waits before it looks into its inbox again."""


@dataclass(frozen=True, slots=True)
class GuideEnd:
    """A guided request for which there is no next token."""

    request: RequestState
    field: str
    """Its guide's, in the client's request."""
    error: str
    """Empty: the guide is complete."""


@dataclass(frozen=True, slots=True)
class _Compiling:
    request: RequestState
    guide: GuideGrammar
    future: Future[GuidedOutput]


class GuidedRequests:
    """Not thread-safe; its threads are its own.

    Args:
        vocabulary: The model's; its ids are those of the plans.
        cache_size: How many compiled guides to keep.
    """

    def __init__(self, vocabulary: Vocabulary, cache_size: int) -> None:
        self._vocabulary = vocabulary
        self._cache_size = cache_size
        self._compiler: GuideCompiler | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._matchers = MatcherThreads()
        self._compiling: dict[int, _Compiling] = {}
        self._outputs: dict[int, GuidedOutput] = {}

    @property
    def num_compiling(self) -> int:
        """Requests whose guides are being compiled."""
        return len(self._compiling)

    def start(self, request: RequestState, guide: GuideGrammar) -> None:
        """Compile the guide of a request; :meth:`take_compiled` gives the request back."""
        self._compiling[request.uid] = _Compiling(request, guide, self._thread.submit(self._compile, request, guide))

    def forget(self, uid: int) -> bool:
        """Let go of a request that ends; give whether its guide was still being compiled. Others are passed over."""
        self._outputs.pop(uid, None)
        return self._compiling.pop(uid, None) is not None

    def wait(self) -> None:
        """Wait a little for a guide to be compiled."""
        wait([one.future for one in self._compiling.values()], _WAIT_SECONDS, FIRST_COMPLETED)

    def take_compiled(self) -> tuple[list[RequestState], list[GuideEnd]]:
        """Give the requests that can be scheduled now, and the ends of those that cannot."""
        ready: list[RequestState] = []
        ends: list[GuideEnd] = []
        for uid, one in tuple(self._compiling.items()):
            if not one.future.done():
                continue
            del self._compiling[uid]
            output, error = _outcome(one)
            if output is None:
                ends.append(GuideEnd(one.request, one.guide.field, error))
            elif (end := _end(one.request, output)) is not None:
                ends.append(end)
            else:
                self._outputs[uid] = output
                ready.append(one.request)
        return ready, ends

    def masked(self, step: ScheduledStep) -> ScheduledStep:
        """Give the step with the masks of its guided rows."""
        masks = tuple(
            TokenMask(row.slot, row.epoch, self._outputs[request.uid].mask)
            for request, row in zip(step.requests, step.plan.rows, strict=True)
            if row.sample and request.uid in self._outputs
        )
        return replace(step, plan=replace(step.plan, masks=masks)) if masks else step

    def advance(self, step: ScheduledStep) -> list[GuideEnd]:
        """Advance the guided requests of a settled step that go on; give the ends of those that then cannot."""
        went_on = [
            (request, self._outputs[request.uid])
            for request, row in zip(step.requests, step.plan.rows, strict=True)
            if row.sample and request.status is not Status.FINISHED and request.uid in self._outputs
        ]
        if not went_on:
            return []
        matchers = [output.matcher for _, output in went_on]
        self._matchers.advance(matchers, [request.token_ids[-1] for request, _ in went_on])
        for request, output in went_on:
            output.update(len(request.token_ids) - request.num_prompt_tokens)
        return [end for request, output in went_on if (end := _end(request, output)) is not None]

    def _compile(self, request: RequestState, guide: GuideGrammar) -> GuidedOutput:
        if self._compiler is None:
            self._compiler = GuideCompiler(self._vocabulary, self._cache_size)
        outputs = request.token_ids[request.num_prompt_tokens :]
        vocab_size = len(self._vocabulary.tokens)
        matcher = self._compiler.compile(guide.grammar)
        matcher.advance(outputs)
        output = GuidedOutput(matcher, request.sampling_params, request.eos_token_ids, guide.field, vocab_size)
        output.update(len(outputs))
        return output


def _outcome(one: _Compiling) -> tuple[GuidedOutput | None, str]:
    try:
        return one.future.result(), ""
    except GuideError as error:
        return None, str(error)
    except Exception:
        logger.exception("a guide cannot be compiled")
        return None, "it cannot be compiled; the server's log has the details"


def _end(request: RequestState, output: GuidedOutput) -> GuideEnd | None:
    return GuideEnd(request, output.field, output.error) if output.error or output.is_complete else None
