"""The kit as pytest tests, for the tests of a plug-in's own project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from runnerd_spi.testing.isolated import IsolatedKit, Job
from runnerd_spi.testing.report import broken_text
from runnerd_spi.testing.rules import RULES, Rule
from runnerd_spi.testing.running import in_order


def conformance_tests(
    target: str,
    *,
    options: Mapping[str, object] | None = None,
    model: str | None = None,
    dtype: str = "auto",
    num_traces: int = 60,
    limit: float = 90.0,
) -> type:
    """Give a test class with one test for each rule.

    Assign it to a name that pytest collects::

        TestConformance = conformance_tests("acme", model="path/of/a/small/model")

    The runner is checked in a process of its own. A rule that does not apply is skipped, with the reason.

    Args:
        target: Name the runner is installed under, or ``module:attribute`` of its RunnerPlugin.
        options: The runner's own options.
        model: Path of a model, for a runner that needs one.
        dtype: Data type, or auto.
        num_traces: Random traces for rule T1.
        limit: Seconds that one rule may take before the runner is taken to hang.
    """
    import pytest  # only whoever writes tests needs it

    job = Job(
        target=target,
        options={name: str(value) for name, value in (options or {}).items()},
        model=model,
        dtype=dtype,
        num_traces=num_traces,
        limit=limit,
    )

    class Conformance:
        kit: ClassVar[IsolatedKit]

        @classmethod
        def setup_class(cls) -> None:
            cls.kit = IsolatedKit(job)

        @classmethod
        def teardown_class(cls) -> None:
            cls.kit.close()

        @pytest.mark.timeout(job.load_limit + job.limit + 60)
        @pytest.mark.parametrize("rule", in_order(RULES), ids=lambda rule: rule.id)
        def test_rule(self, rule: Rule) -> None:
            result = self.kit.check(rule)
            if result.status == "not checked":
                pytest.skip(result.message)
            if result.status == "broken":
                pytest.fail(broken_text(result, job.command), pytrace=False)

    return Conformance
