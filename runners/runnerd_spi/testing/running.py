"""Runs the checks of the rules, each at most once, and keeps what they found."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from runnerd_spi.testing import (
    checks_capabilities,
    checks_failures,
    checks_lifecycle,
    checks_masks,
    checks_reuse,
    checks_steps,
    checks_tokens,
)
from runnerd_spi.testing.kit import Kit
from runnerd_spi.testing.rules import Rule, all_needs
from runnerd_spi.testing.subject import Broken, NotChecked

Status = Literal["holds", "broken", "not checked"]

CHECKS: Mapping[str, Callable[[Kit], None]] = {
    "P1": checks_lifecycle.plugin_is_data,
    "L1": checks_lifecycle.calls_come_in_order,
    "L2": checks_lifecycle.close_ends_everything,
    "L3": checks_lifecycle.load_tells_what_it_found,
    "L4": checks_lifecycle.memory_is_budgeted,
    "L5": checks_lifecycle.warm_up_leaves_no_trace,
    "E1": checks_steps.launch_does_not_wait,
    "E2": checks_steps.oldest_is_settled,
    "E3": checks_steps.results_are_in_order,
    "E4": checks_steps.timelines_are_right,
    "E5": checks_steps.bad_plans_are_refused,
    "E6": checks_steps.limits_are_served,
    "S0": checks_tokens.tokens_are_reproducible,
    "S1": checks_tokens.only_sampling_rows_sample,
    "S2": checks_tokens.tokens_are_of_the_request,
    "S3": checks_tokens.history_is_complete,
    "S4": checks_tokens.ids_are_in_the_vocabulary,
    "S5": checks_reuse.slots_are_reused_clean,
    "S6": checks_failures.failures_stay_where_they_are,
    "S7": checks_tokens.launched_work_runs_on,
    "S8": checks_reuse.admits_are_let_go,
    "S9": checks_steps.timeouts_leave_the_handle_valid,
    "C1": checks_capabilities.what_is_declared_has_an_effect,
    "C2": checks_capabilities.what_is_denied_has_none,
    "C3": checks_capabilities.logprobs_are_right,
    "C4": checks_masks.masks_hold,
    "T1": checks_tokens.random_traces_are_equal,
}


@dataclass(frozen=True, slots=True)
class Result:
    """What was found of one rule."""

    rule_id: str
    status: Status
    message: str = ""
    trace: str = ""
    seed: int | None = None
    seconds: float = 0.0


def in_order(rules: Collection[Rule]) -> list[Rule]:
    """Give the rules so that each comes after those it needs, otherwise as they stand."""
    ordered: list[Rule] = []
    names = {rule.id for rule in rules}
    waiting = list(rules)
    while waiting:
        done = {rule.id for rule in ordered}
        ready = next(rule for rule in waiting if set(rule.needs) & names <= done)
        ordered.append(ready)
        waiting.remove(ready)
    return ordered


def run_rule(kit: Kit, rule: Rule, broken: Collection[str] = ()) -> Result:
    """Check one rule.

    Args:
        kit: The runner under test.
        rule: What to check.
        broken: Rules known to be broken; a rule that needs one of them is not judged.
    """
    blocked = sorted(all_needs(rule) & set(broken))
    if blocked:
        return Result(rule.id, "not checked", f"judged when {', '.join(blocked)} hold{'s' * (len(blocked) == 1)}")
    begin = time.monotonic()
    try:
        CHECKS[rule.id](kit)
    except NotChecked as error:
        return Result(rule.id, "not checked", str(error), seconds=time.monotonic() - begin)
    except Broken as error:
        return Result(rule.id, "broken", str(error), error.trace, error.seed, time.monotonic() - begin)
    except Exception as error:  # noqa: BLE001 - a runner may raise anything, and that is what is reported
        message = f"{type(error).__name__}: {error}" + (f" (raised at {where})" if (where := _place(error)) else "")
        return Result(rule.id, "broken", message, seconds=time.monotonic() - begin)
    return Result(rule.id, "holds", seconds=time.monotonic() - begin)


def run_rules(kit: Kit, rules: Collection[Rule]) -> list[Result]:
    """Check rules in this process. A runner that hangs hangs the caller; see ``isolated`` for one that cannot."""
    results: list[Result] = []
    try:
        for rule in in_order(rules):
            results.append(run_rule(kit, rule, [one.rule_id for one in results if one.status == "broken"]))
    finally:
        kit.close()
    return results


def _place(error: BaseException) -> str:
    """Where in the runner's own code an error came up."""
    place, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "runnerd_spi" not in name:
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
