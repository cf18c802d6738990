"""The kit's findings as text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from runnerd_spi.testing.rules import BY_ID
from runnerd_spi.testing.running import Result

_MARKS = {"holds": "ok", "broken": "BROKEN", "not checked": "-"}


def result_line(result: Result) -> str:
    """Give one line: the rule and what was found."""
    rule = BY_ID[result.rule_id]
    why = f" (not checked: {result.message})" if result.status == "not checked" else ""
    return f"{_MARKS[result.status]:6}  {rule.id}  {rule.title}{why}"


def broken_text(result: Result, command: str) -> str:
    """Give what there is to know about a broken rule.

    Args:
        result: What was found.
        command: The command that checks the runner, without a choice of rules and seed.
    """
    rule = BY_ID[result.rule_id]
    seed = "" if result.seed is None else f" --seed {result.seed} --traces 1"
    parts = [
        f"{rule.id} is broken: {rule.title}",
        _labelled("seen", result.message),
        _labelled("trace", result.trace) if result.trace else "",
        _labelled("to do", rule.remedy),
        _labelled("again", f"{command} --rule {rule.id}{seed}"),
    ]
    return "\n".join(filter(None, parts))


def summary(results: Collection[Result]) -> str:
    """Give the last line."""
    counts = {status: sum(one.status == status for one in results) for status in _MARKS}
    seconds = sum(one.seconds for one in results)
    return (
        f"{counts['holds']} rules hold, {counts['broken']} broken, {counts['not checked']} not checked, in "
        f"{seconds:.0f} seconds"
    )


def _labelled(label: str, text: str) -> str:
    return textwrap.indent(text, " " * 9).replace(" " * 9, f"  {label:7}", 1)
