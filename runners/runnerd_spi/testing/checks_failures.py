"""Checks of what fails: S6."""

from __future__ import annotations

from runnerd_spi.errors import StepFailed
from runnerd_spi.plan import StepPlan
from runnerd_spi.testing.driver import TraceRun
from runnerd_spi.testing.kit import Kit, difference_of
from runnerd_spi.testing.subject import WAIT_SECONDS, Broken, NotChecked, Subject
from runnerd_spi.testing.traces import Trace, TraceRequest

FAIL_AT_STEP = "fail_at_step"
"""Option (int) by which a runner lets a step fail fatally, so that this rule can be checked."""


def failures_stay_where_they_are(kit: Kit) -> None:
    """S6."""
    checked = False
    if kit.subject.serves("allowed_token_ids") and kit.subject.serves("bad_words"):
        _row_failure(kit)
        checked = True
    if kit.subject.has_option(FAIL_AT_STEP):
        for depth in kit.subject.depths:
            for fail_at in (0, 1, 3):
                _step_failure(kit.subject, depth, fail_at)
        checked = True
    if not checked:
        raise NotChecked(
            f"the runner offers no way to make it fail: declare an option {FAIL_AT_STEP!r} (int, the step that fails)"
        )


def _row_failure(kit: Kit) -> None:
    """A request that may say nothing but what is banned fails; the ones beside it do not notice."""
    impossible = kit.params(allowed_token_ids=(1,), bad_words_token_ids=((1,),))
    bad = TraceRequest((0, 1), 4, impossible)
    good = TraceRequest((1, 0, 1), 6, kit.drawn(51))
    expected = kit.alone(good)
    for depth in kit.subject.depths:
        with kit.session(depth) as session:
            try:
                outcomes = TraceRun(session, Trace(depth, (good, bad, good))).run()
            except StepFailed as error:
                raise Broken(f"a row with nothing left to choose failed the whole step: {error}") from error
        if not outcomes[1].outputs or outcomes[1].outputs[0].failure is None:
            raise Broken(
                f"a row with nothing left to choose gave {outcomes[1].outputs[:1]}, expected RowOutput.failure"
            )
        for outcome in (outcomes[0], outcomes[2]):
            if difference := difference_of(good, outcome, expected):
                raise Broken(f"beside a row that failed, {difference}")


def _step_failure(subject: Subject, depth: int, fail_at: int) -> None:
    session = subject.open(depth, **{FAIL_AT_STEP: fail_at})
    try:
        run = TraceRun(session, Trace(depth, (TraceRequest((1, 0), 20),)))
        try:
            for step in range(fail_at + depth + 3):
                run.launch_only(step)
        except StepFailed as error:
            at_launch: StepFailed | None = error
        else:
            at_launch = None
        _later_steps_fail(run, fail_at, at_launch)
        if at_launch is None:
            # By now the failed step has been settled by the launches after it.
            try:
                session.runner.execute_model(StepPlan(step_id=session.next_step_id)).result(WAIT_SECONDS)
            except StepFailed as error:
                _same_cause(run, fail_at, error)
            else:
                raise Broken(f"step {fail_at} failed fatally, and step {session.next_step_id} was computed")
    finally:
        session.close()


def _later_steps_fail(run: TraceRun, fail_at: int, at_launch: StepFailed | None) -> None:
    for launched in run.launched:
        number = launched.plan.step_id
        try:
            launched.handle.result(WAIT_SECONDS)
        except StepFailed as error:
            if number < fail_at:
                raise Broken(f"step {fail_at} fails, but the result of step {number} raises: {error}") from error
            if not error.fatal:
                raise Broken(f"step {number} failed at or after a fatal failure, but its error is not fatal") from error
            _same_cause(run, fail_at, error)
        except Exception as error:
            raise Broken(f"step {number} raises {type(error).__name__}: {error}; expected StepFailed") from error
        else:
            if number >= fail_at:
                raise Broken(f"step {fail_at} failed fatally, but step {number} has a result")
    if at_launch is not None:
        _same_cause(run, fail_at, at_launch)


def _same_cause(run: TraceRun, fail_at: int, error: StepFailed) -> None:
    try:
        run.launched[fail_at].handle.result(WAIT_SECONDS)
    except StepFailed as first:
        if error.__cause__ is None or error.__cause__ is not first.__cause__:
            raise Broken(
                f"the failure of step {fail_at} has the cause {first.__cause__!r}, a later one {error.__cause__!r}"
            ) from error
