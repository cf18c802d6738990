"""Turns a step's results into outputs of requests, and does not trust them: a runner may break its contract.

It knows nothing of what runs next, nor of sockets. A broken row ends its own request only.
"""

from __future__ import annotations

from collections.abc import Iterator

from runnerd_service.engine.messages import FinishKind, Logprobs, RequestOutput
from runnerd_service.engine.request import RequestState, Status
from runnerd_service.engine.scheduler import ScheduledStep, Scheduler
from runnerd_spi import Row, RowOutput, StepOutput, TokenLogprobs

# Looking a member up in its class costs a tenth of a microsecond, for each row of each step.
_RUNNING = Status.RUNNING


class Settler:
    """Settles steps in the order of their launch.

    Args:
        scheduler: Owns the requests and their counts.
        vocab_size: Token ids are below this.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int) -> None:
        self.num_generated_tokens = 0
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._block_size = scheduler.blocks.block_size

    def settle(self, step: ScheduledStep, output: StepOutput) -> list[RequestOutput]:
        """Take over what a step gave; late rows, whose request has ended since, show nothing."""
        plan = step.plan
        if output.step_id != plan.step_id or len(output.rows) != len(plan.rows):
            return self.fail(
                step,
                f"contract violation: the runner answered step {plan.step_id} of {len(plan.rows)} rows "
                f"with step {output.step_id} of {len(output.rows)} rows",
            )
        scheduler, outputs = self._scheduler, []
        for request, row, result in zip(step.requests, plan.rows, output.rows, strict=True):
            if scheduler.settle_row(request, row):
                shown = self._settle_row(request, row, result)
                if shown is not None:
                    outputs.append(shown)
            if request.status is not _RUNNING:
                scheduler.reclaim(request)
        return outputs

    def fail(self, step: ScheduledStep, error: str) -> list[RequestOutput]:
        """End every request of a step that gave no usable result."""
        outputs = []
        for request, row in zip(step.requests, step.plan.rows, strict=True):
            if self._scheduler.settle_row(request, row):
                outputs.append(self._failed(request, error))
            self._scheduler.reclaim(request)
        return outputs

    def _settle_row(self, request: RequestState, row: Row, result: RowOutput) -> RequestOutput | None:
        token_id, logprobs, _, failure = result
        if failure is not None:
            return self._failed(request, failure)
        error = self._token_violation(request, row, result)
        wants_prompt_logprobs = request.sampling_params.num_prompt_logprobs is not None
        if wants_prompt_logprobs and not error:
            error = _prompt_logprobs_violation(request, row, result)
        if error:
            return self._failed(request, f"contract violation: {error}")
        end = row.first_position + row.num_new_tokens
        # A row of one token fills a block only when it ends there; asking each time would cost as much as the rest.
        if row.num_new_tokens > 1 or end % self._block_size == 0:
            self._scheduler.publish(request, end)
        prompt_logprobs: tuple[Logprobs, ...] = ()
        if wants_prompt_logprobs:
            _collect_prompt_logprobs(request, row, result)
            prompt_logprobs = request.take_prompt_logprobs()
        if token_id is None:
            # Told although it may hold nothing: the request does not wait for a place any more.
            return RequestOutput(request.uid, prompt_logprobs=prompt_logprobs, began_ns=_take_began(request))
        request.token_ids.append(token_id)
        self.num_generated_tokens += 1
        finish = finish_of(request)
        if finish is not None:
            self._scheduler.finish(request)
        return RequestOutput(
            request.uid,
            (token_id,),
            () if logprobs is None else (_logprobs(logprobs),),
            prompt_logprobs,
            finish,
            token_id if finish in ("eos", "stop_token") else None,
            request.num_cached_tokens,
            began_ns=_take_began(request) if request.began_ns else 0,
        )

    def _token_violation(self, request: RequestState, row: Row, result: RowOutput) -> str:
        """Say how a row's token breaks the contract; empty when it does not."""
        token_id, logprobs, _, _ = result
        if not row.sample:
            return "" if token_id is None else f"token {token_id} for a row that samples none"
        if token_id is None:
            return "no token for a row that samples one"
        if not 0 <= token_id < self._vocab_size:
            return f"token {token_id}, expected 0 to {self._vocab_size - 1}"
        if logprobs is None and request.sampling_params.num_logprobs is not None:
            return f"no logprobs for token {token_id}, which the request asks for"
        return ""

    def _failed(self, request: RequestState, error: str) -> RequestOutput:
        self._scheduler.finish(request)
        return RequestOutput(request.uid, finish="failed", num_cached_tokens=request.num_cached_tokens, error=error)


def _take_began(request: RequestState) -> int:
    """Give when the request began, if that has not been told."""
    began_ns, request.began_ns = request.began_ns, 0
    return began_ns


def finish_of(request: RequestState) -> FinishKind | None:
    """Say how the last settled token ends the request, if it does."""
    last = request.token_ids[-1]
    if last in request.eos_token_ids:
        return "eos"
    if last in request.stop_token_ids:
        return "stop_token"
    return "length" if len(request.token_ids) >= request.max_num_tokens else None


def _prompt_logprobs_violation(request: RequestState, row: Row, result: RowOutput) -> str:
    end = min(row.first_position + row.num_new_tokens, request.num_prompt_tokens - 1)
    expected = max(0, end - row.first_position)
    if len(result.prompt_logprobs) != expected:
        return f"{len(result.prompt_logprobs)} records of prompt tokens, expected {expected}"
    return ""


def _collect_prompt_logprobs(request: RequestState, row: Row, result: RowOutput) -> None:
    # After a preemption the prompt is computed again from its start; what is there already is skipped.
    skip = len(request.prompt_logprobs) - row.first_position
    request.prompt_logprobs.extend(_records(result, max(skip, 0)))


def _records(result: RowOutput, skip: int) -> Iterator[Logprobs]:
    return (_logprobs(record) for record in result.prompt_logprobs[skip:])


def _logprobs(record: TokenLogprobs) -> Logprobs:
    return Logprobs(record.token_id, record.logprob, record.rank, record.top)
