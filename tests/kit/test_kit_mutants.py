"""The kit finds each deliberately wrong runner, by the rule it breaks; this is what shows that the kit can find one."""

from __future__ import annotations

import pytest
from mutants import MUTANTS
from reference import REFERENCE, TOKEN_MEMORY

from runnerd_spi import RunnerPlugin
from runnerd_spi.testing import RULES, Kit, Result, Subject, run_rules
from runnerd_spi.testing.rules import BY_ID

CASES = [
    pytest.param(rule_id, plugin, id=f"{rule_id}-{number}-{getattr(plugin.create, '__name__', '')}")
    for rule_id, plugins in MUTANTS.items()
    for number, plugin in enumerate(plugins)
]


def broken(results: list[Result]) -> list[str]:
    return [result.rule_id for result in results if result.status == "broken"]


@pytest.mark.parametrize("plugin", [REFERENCE, TOKEN_MEMORY], ids=["blocks", "tokens"])
def test_the_reference_runner_keeps_every_rule(plugin: RunnerPlugin) -> None:
    results = run_rules(Kit(Subject(plugin), num_traces=20), RULES)
    assert [result for result in results if result.status != "holds"] == []


def test_each_rule_has_a_mutant() -> None:
    assert set(MUTANTS) == {rule.id for rule in RULES}


@pytest.mark.parametrize(("rule_id", "plugin"), CASES)
def test_a_mutant_breaks_its_rule(rule_id: str, plugin: RunnerPlugin) -> None:
    results = run_rules(Kit(Subject(plugin)), [BY_ID[rule_id]])
    assert broken(results) == [rule_id], results


@pytest.mark.slow
@pytest.mark.parametrize(("rule_id", "plugin"), CASES)
def test_a_mutant_breaks_its_rule_and_no_other(rule_id: str, plugin: RunnerPlugin) -> None:
    assert broken(run_rules(Kit(Subject(plugin)), RULES)) == [rule_id]
