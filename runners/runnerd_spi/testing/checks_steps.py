"""Checks of steps and their handles: E1 to E6 and S9."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from runnerd_spi.errors import PlanError, StepTimeout
from runnerd_spi.plan import Admit, BlockGrant, Release, Row, SamplingParams, StepOutput, StepPlan
from runnerd_spi.runner import StepHandle
from runnerd_spi.testing.driver import TraceRun
from runnerd_spi.testing.kit import Kit
from runnerd_spi.testing.subject import (
    HISTORY_FEATURES,
    MAX_NUM_SEQS,
    WAIT_SECONDS,
    Broken,
    Launched,
    NotChecked,
    Session,
)
from runnerd_spi.testing.traces import FIELD_OF, Trace, TraceRequest

_NUM_STEPS = 24
_NUM_TRIES = 40


def launch_does_not_wait(kit: Kit) -> None:
    """E1: of many large steps, at least one is seen unresolved when its launch returns."""
    if kit.depth < 2:
        raise NotChecked("the capabilities declare one step in flight")
    for feature, params in _device_features(kit):
        for _ in range(_NUM_TRIES):
            with _busy(kit, kit.depth, params) as run:
                launched = [run.launch_only(step) for step in range(3)]
                unresolved = [not one.handle.done() for one in launched[-1:]]
                returned_ns = time.monotonic_ns()
                launched[-1].take()
                late = launched[-1].handle.timeline.ready_ns > returned_ns
            if any(unresolved) or late:
                break
        else:
            what = f"with {feature}, declared as served without a host wait, " if feature else ""
            raise Broken(
                f"{what}not one of {_NUM_TRIES} steps was unresolved when execute_model returned with "
                f"max_in_flight {kit.depth}"
            )


def oldest_is_settled(kit: Kit) -> None:
    """E2."""
    for depth in kit.subject.depths:
        with _busy(kit, depth, kit.drawn(1)) as run:
            launched: list[Launched] = []
            for step in range(_NUM_STEPS):
                launched.append(run.launch_only(step))
                for one in launched[: max(len(launched) - depth + 1, 0)]:
                    if not one.handle.done():
                        raise Broken(
                            f"with max_in_flight {depth}, step {one.plan.step_id} is not done when the launch of step "
                            f"{launched[-1].plan.step_id} has returned"
                        )


def results_are_in_order(kit: Kit) -> None:
    """E3."""
    for depth in kit.subject.depths:
        with _busy(kit, depth, kit.drawn(2)) as run:
            launched: list[Launched] = []
            for step in range(_NUM_STEPS):
                launched.append(run.launch_only(step))
                _done_in_order([one.handle for one in launched[-depth - 1 :]])
            for one in launched:
                output = one.take()
                if not isinstance(output.rows, tuple):
                    raise Broken(f"step {one.plan.step_id} gave {output!r}, expected a tuple of rows")
                if one.handle.step_id != one.plan.step_id:
                    raise Broken(f"the handle of step {one.plan.step_id} calls it step {one.handle.step_id}")
                _same_everywhere(one.handle, output)
            ready = [one.handle.timeline.ready_ns for one in launched]
            for (earlier, later), one in zip(pairwise(ready), launched, strict=False):
                if later < earlier:
                    raise Broken(f"the step after step {one.plan.step_id} was ready before it")


def timelines_are_right(kit: Kit) -> None:
    """E4."""
    names = ("host_begin_ns", "host_end_ns", "device_begin_ns", "device_end_ns", "ready_ns")
    for depth in kit.subject.depths:
        with _busy(kit, depth, kit.drawn(3)) as run:
            ends = [0]
            for step in range(_NUM_STEPS):
                before = time.monotonic_ns()
                launched = run.launch_only(step)
                returned = time.monotonic_ns()
                launched.take()
                timeline = launched.handle.timeline
                after = time.monotonic_ns()
                times = [getattr(timeline, name) for name in names]
                shown = ", ".join(f"{name} {one}" for name, one in zip(names, times, strict=True))
                # A step without a device's part may leave its times equal, but never unknown.
                in_order = times[0] <= times[1] <= times[4] and times[0] <= times[2] <= times[3] <= times[4]
                if not in_order or 0 in times:
                    raise Broken(f"step {launched.plan.step_id} is done, and its times are {shown}")
                if not before <= times[0] <= returned or not times[4] <= after:
                    raise Broken(
                        f"step {launched.plan.step_id}: {shown}; but it was launched at {before} and read at {after} "
                        "by time.monotonic_ns"
                    )
                if times[2] < ends[-1]:
                    raise Broken(f"step {launched.plan.step_id} begins on the device before the one before has ended")
                ends.append(times[3])


def bad_plans_are_refused(kit: Kit) -> None:
    """E5."""
    request = TraceRequest((1, 0, 1), 8, kit.drawn(4))
    expected = kit.alone(request)
    with kit.session(kit.depth, fresh=kit.is_cheap) as session:
        run = TraceRun(session, Trace(kit.depth, (request,)))
        run.launch_only(0)
        row = run.launched[-1].plan.rows[0]
        for what, plan in _bad_plans(session, row):
            try:
                session.runner.execute_model(plan)
            except PlanError:
                continue
            except Exception as error:
                raise Broken(f"a plan with {what} raises {error!r}; expected PlanError") from error
            raise Broken(f"a plan with {what} was accepted; expected PlanError")
        [outcome] = run.run(first_step=1)
    if outcome.token_ids != expected.token_ids:
        raise Broken(
            f"after refused plans the request goes on with {outcome.token_ids}; alone it gives {expected.token_ids}"
        )


def limits_are_served(kit: Kit) -> None:
    """E6."""
    sizes = kit.sizes
    longest = sizes.max_model_len
    params = kit.drawn(6)
    budget = sizes.max_num_batched_tokens

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(index % sizes.vocab_size for index in range(length))

    cases = {
        "a prompt of one token": [TraceRequest(prompt(1), 2, params)],
        "all slots at once": [TraceRequest(prompt(2 + slot), 3, params) for slot in range(MAX_NUM_SEQS)],
        "more requests than slots": [TraceRequest(prompt(3), 2, params) for _ in range(2 * MAX_NUM_SEQS + 1)],
        "a step of max_num_batched_tokens": [TraceRequest(prompt(min(budget, longest - 1)), 1, params)],
        "an output up to max_model_len": [TraceRequest(prompt(longest - 3), 3, params)],
        "a prompt up to max_model_len": [TraceRequest(prompt(longest - 1), 1, params)],
    }
    for what, requests in cases.items():
        with kit.session(kit.depth) as session:
            try:
                outcomes = TraceRun(session, Trace(kit.depth, tuple(requests))).run()
            except Exception as error:
                raise Broken(f"{what}: {type(error).__name__}: {error}") from error
            for request, outcome in zip(requests, outcomes, strict=True):
                if len(outcome.outputs) != request.num_outputs or None in outcome.token_ids:
                    raise Broken(f"{what}: outputs {outcome.outputs}, expected {request.num_outputs} tokens")
    with kit.session(kit.depth) as session:
        if rows := session.launch().take().rows:
            raise Broken(f"a plan without rows gave {len(rows)} rows")


def timeouts_leave_the_handle_valid(kit: Kit) -> None:
    """S9."""
    num_timeouts = 0
    for _ in range(_NUM_TRIES):
        with _busy(kit, kit.depth, kit.drawn(7)) as run:
            for step in range(4):
                handle = run.launch_only(step).handle
                for timeout in (0.0, 1e-4):
                    num_timeouts += _times_out(handle, timeout)
        if num_timeouts >= 4:
            break
    if not num_timeouts:
        raise NotChecked("every step was ready before its result could be asked for")


def _times_out(handle: StepHandle, timeout: float) -> bool:
    try:
        handle.result(timeout)
    except StepTimeout:
        try:
            again = handle.result(WAIT_SECONDS)
        except Exception as error:
            raise Broken(
                f"after a time-out, the result of step {handle.step_id} raises {type(error).__name__}: {error}"
            ) from error
        if again.step_id != handle.step_id:
            raise Broken(f"after a time-out, the result of step {handle.step_id} is {again!r}") from None
        return True
    except Exception as error:
        raise Broken(
            f"result({timeout}) of step {handle.step_id} raises {type(error).__name__}: {error}; expected the output "
            "or StepTimeout"
        ) from error
    return False


@contextmanager
def _busy(kit: Kit, depth: int, params: SamplingParams) -> Iterator[TraceRun]:
    """Give a run of a full batch that goes on for many steps; at idle again afterwards."""
    sizes = kit.sizes
    length = min(sizes.max_num_batched_tokens // MAX_NUM_SEQS, sizes.max_model_len // 2)
    num_outputs = min(_NUM_STEPS + 8, sizes.max_model_len - length - 1)
    requests = tuple(
        TraceRequest(tuple((slot + index) % sizes.vocab_size for index in range(length)), num_outputs, params)
        for slot in range(MAX_NUM_SEQS)
    )
    with kit.session(depth) as session:
        run = TraceRun(session, Trace(depth, requests))
        yield run
        run.abandon()


def _device_features(kit: Kit) -> Iterator[tuple[str, SamplingParams]]:
    yield "", kit.drawn(1)
    for feature in (
        *HISTORY_FEATURES,
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "logit_bias",
        "allowed_token_ids",
        "logprobs",
    ):
        if kit.subject.support(feature) != "device":
            continue
        value: object = {
            "bad_words": ((0, 1),),
            "min_tokens": 20,
            "top_k": 2,
            "logit_bias": {0: 1.0},
            "allowed_token_ids": tuple(range(kit.sizes.vocab_size // 2)),
            "logprobs": 1,
        }.get(feature, 0.5)
        fields = {FIELD_OF.get(feature, feature): value}
        if feature == "min_tokens":
            fields["stop_token_ids"] = (0,)
        yield feature, replace(kit.drawn(1), **fields)  # type: ignore[arg-type]  # the table has the fields' types


def _done_in_order(handles: list[StepHandle]) -> None:
    # The later one is asked first: were it asked last, the earlier one might have become done in between.
    for earlier, later in pairwise(handles):
        if later.done() and not earlier.done():
            raise Broken(f"step {later.step_id} is done before step {earlier.step_id}")


def _same_everywhere(handle: StepHandle, output: StepOutput) -> None:
    others: list[object] = [handle.result(WAIT_SECONDS)]
    threads = [threading.Thread(target=lambda: others.append(handle.result(WAIT_SECONDS))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    if len(others) != 3 or any(other is not output for other in others):
        raise Broken(f"result() of step {handle.step_id} gives another object the next time or in another thread")


def _bad_plans(session: Session, row: Row) -> Iterator[tuple[str, StepPlan]]:
    """Give wrong plans for when one request of three prompt tokens has one sampled token."""
    sizes, step_id, slot, epoch = session.sizes, session.next_step_id, row.slot, row.epoch
    other = (slot + 1) % MAX_NUM_SEQS
    fresh = session.epochs[other] + 100
    params = SamplingParams(temperature=0.0)

    def admit(at: int, number: int, token_ids: tuple[int, ...], num_prompt_tokens: int) -> Admit:
        return Admit(at, number, token_ids, num_prompt_tokens, params)

    def plan(
        releases: tuple[Release, ...] = (),
        admits: tuple[Admit, ...] = (),
        grants: tuple[BlockGrant, ...] = (),
        rows: tuple[Row, ...] = (),
    ) -> StepPlan:
        return StepPlan(step_id=step_id, releases=releases, admits=admits, grants=grants, rows=rows)

    def row_of(at: int, number: int, count: int, first: int, sample: bool) -> Row:
        return Row(slot=at, epoch=number, num_new_tokens=count, first_position=first, sample=sample)

    good = row_of(slot, epoch, 1, 3, True)
    yield "a step id again", replace(plan(rows=(good,)), step_id=step_id - 1)
    yield "a step id left out", replace(plan(rows=(good,)), step_id=step_id + 1)
    yield "a release of an empty slot", plan(releases=(Release(other, fresh),))
    yield "a release of another epoch", plan(releases=(Release(slot, epoch + 1),))
    yield "an admit to a slot in use", plan(admits=(admit(slot, epoch + 1, (1,), 1),))
    yield "an admit with a used epoch", plan(releases=(Release(slot, epoch),), admits=(admit(slot, epoch, (1,), 1),))
    yield "an admit beyond the slots", plan(admits=(admit(MAX_NUM_SEQS, fresh, (1,), 1),))
    yield "an admit without tokens", plan(admits=(admit(other, fresh, (), 0),))
    yield "an admit of the token -1", plan(admits=(admit(other, fresh, (0, -1), 2),))
    yield "an admit of a token outside the vocabulary", plan(admits=(admit(other, fresh, (sizes.vocab_size,), 1),))
    too_long = (0,) * (sizes.max_model_len + 1)
    yield "an admit longer than max_model_len", plan(admits=(admit(other, fresh, too_long, 1),))
    if sizes.grants_blocks:
        yield "a grant to an empty slot", plan(grants=(BlockGrant(other, fresh, (0,)),))
        yield "a grant of a block that does not exist", plan(grants=(BlockGrant(slot, epoch, (sizes.num_blocks,)),))
    else:
        yield "a grant, though kv_memory is 'tokens'", plan(grants=(BlockGrant(slot, epoch, (0,)),))
    yield "a row of an empty slot", plan(rows=(row_of(other, fresh, 1, 0, False),))
    yield "a row of another epoch", plan(rows=(row_of(slot, epoch + 1, 1, 3, True),))
    yield "two rows of one request", plan(rows=(row_of(slot, epoch, 1, 2, False), good))
    yield "a row of no tokens", plan(rows=(row_of(slot, epoch, 0, 3, False),))
    yield "a row past the last token", plan(rows=(row_of(slot, epoch, 1, 4, True),))
    yield "a row that samples before the last token", plan(rows=(row_of(slot, epoch, 1, 2, True),))
    # Slot `other` is free, so this plan is wrong only in its second row: the first must not have been taken over.
    # It has no blocks, or, where none are granted, fewer tokens.
    yield (
        "a right admit and row beside a wrong row",
        plan(
            admits=(admit(other, fresh, (1,), 1),),
            rows=(good, row_of(other, fresh, 1 if sizes.grants_blocks else 2, 0, True)),
        ),
    )
