"""Checks of what is used again and what is let go of: S5 and S8."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace

from runnerd_spi.plan import Admit, Row, StepOutput
from runnerd_spi.testing.driver import TraceRun
from runnerd_spi.testing.kit import Kit, difference_of
from runnerd_spi.testing.subject import MAX_NUM_SEQS, Broken, Session
from runnerd_spi.testing.traces import GREEDY, Trace, TraceRequest

_LET_GO_SECONDS = 3.0


def slots_are_reused_clean(kit: Kit) -> None:
    """S5: slots and blocks serve one request after the other; plans are let go of; results stay as they are."""
    _clean_slots(kit)
    for depth in kit.subject.depths:
        _plans_are_let_go(kit, depth)
        _results_stay(kit, depth)


def admits_are_let_go(kit: Kit) -> None:
    """S8."""
    admits: list[Admit] = []
    outputs: list[StepOutput] = []
    for depth in kit.subject.depths:
        with kit.session(depth) as session:
            requests = tuple(TraceRequest((slot, 0, 1), 5, kit.drawn(slot)) for slot in range(6))
            run = TraceRun(session, Trace(depth, requests))
            run.run()
            admits += [admit for launched in run.launched for admit in launched.plan.admits]
            outputs += [launched.take() for launched in run.launched]
            del run
            # Later steps, so that what a runner keeps of its latest ones is theirs.
            for _ in range(depth + 1):
                session.launch().take()
    while admits:
        admit = admits.pop()
        _let_go(admit, 2, f"the admit of slot {admit.slot}, epoch {admit.epoch}, released long ago,")
    while outputs:
        output = outputs.pop()
        _let_go(output, 2, f"the output of step {output.step_id}")
    _objects_do_not_grow(kit)


def _clean_slots(kit: Kit) -> None:
    """One request after the other, each alone, through the same slots and blocks, with nothing in flight between."""
    vocab_size = kit.sizes.vocab_size
    with kit.session(kit.depth) as session:
        for number in range(12):
            params = (GREEDY, kit.drawn_with_history(number), kit.drawn(number))[number % 3]
            prompt = tuple((number + index) % vocab_size for index in range(1 + 5 * (number % 3)))
            request = TraceRequest(prompt, 3 + number % 5, params)
            trace = Trace(kit.depth, tuple(replace(request) for _ in range(MAX_NUM_SEQS)))
            for outcome in TraceRun(session, trace).run():
                if difference := difference_of(request, outcome, kit.alone(request)):
                    raise Broken(f"request {number} through the same slots and blocks, {difference}")


def _plans_are_let_go(kit: Kit, depth: int) -> None:
    """After its step a plan is overwritten: nothing that comes later may depend on it, or hold it."""
    requests = tuple(TraceRequest((slot, 1, 0), 10, kit.drawn(slot)) for slot in range(2))
    expected = [kit.alone(request) for request in requests]
    with kit.session(depth) as session:
        run = TraceRun(session, Trace(depth, requests))
        for step in range(8):
            run.launch_only(step)
            if step >= depth:
                run.launched[step - depth].take()
                _overwrite(run.launched[step - depth].plan)
        outcomes = run.run(first_step=8)
        held = [one.plan for one in run.launched]
        run.launched.clear()
        run = TraceRun(session, Trace(depth, ()))
        run.run()
    for request, outcome, alone in zip(requests, outcomes, expected, strict=True):
        if difference := difference_of(request, outcome, alone):
            raise Broken(f"after consumed plans were overwritten, {difference}")
    while held:
        # What holds a plan here: the name `plan`, and the argument of getrefcount.
        plan = held.pop()
        _let_go(plan, 2, f"the plan of step {plan.step_id}")


def _overwrite(plan: object) -> None:
    poison = (Row(slot=MAX_NUM_SEQS + 1, epoch=-1, num_new_tokens=-1, first_position=-1, sample=True),)
    for name, value in (("rows", poison), ("admits", poison), ("grants", poison), ("releases", poison)):
        object.__setattr__(plan, name, value)


def _let_go(held: object, own: int, what: str) -> None:
    # One more for the parameter.
    deadline = time.monotonic() + _LET_GO_SECONDS
    while sys.getrefcount(held) > own + 1:
        if time.monotonic() > deadline:
            raise Broken(f"{what} is still referenced by the runner after its step and all later ones are done")
        time.sleep(0.005)


def _results_stay(kit: Kit, depth: int) -> None:
    with kit.session(depth) as session:
        requests = tuple(TraceRequest((slot, 1, 1), 8, kit.drawn(slot)) for slot in range(3))
        run = TraceRun(session, Trace(depth, requests))
        seen: list[tuple[StepOutput, str]] = []
        for step in range(6):
            run.launch_only(step)
            if step >= depth - 1:
                output = run.launched[step - depth + 1].take()
                seen.append((output, repr(output)))
        run.abandon()
        TraceRun(session, Trace(depth, requests)).run()
    for output, text in seen:
        if repr(output) != text:
            raise Broken(f"the result of a step was {text}, and is {output!r} after later steps")


def _objects_do_not_grow(kit: Kit) -> None:
    """The same requests over and over leave as many objects behind as before."""
    num_requests = 60

    def serve(session: Session, count: int) -> int:
        for _ in range(count // 3):
            requests = tuple(TraceRequest((slot, 1), 3, kit.drawn(slot)) for slot in range(3))
            TraceRun(session, Trace(kit.depth, requests)).run()
        gc.collect()
        return len(gc.get_objects())

    with kit.session(kit.depth) as session:
        serve(session, 30)
        before = serve(session, 30)
        grown = serve(session, num_requests) - before
    if grown >= num_requests:
        raise Broken(f"{num_requests} requests came and went, and {grown} objects more than before are alive at idle")
