"""The conformance kit: finds out whether a runner keeps the contract, without its chip."""

from runnerd_spi.testing.conformance import conformance_tests
from runnerd_spi.testing.isolated import IsolatedKit, Job, Unusable
from runnerd_spi.testing.kit import Kit
from runnerd_spi.testing.report import broken_text, result_line, summary
from runnerd_spi.testing.rules import RULES, Rule
from runnerd_spi.testing.running import Result, run_rules
from runnerd_spi.testing.subject import Subject

__all__ = [
    "RULES",
    "IsolatedKit",
    "Job",
    "Kit",
    "Result",
    "Rule",
    "Subject",
    "Unusable",
    "broken_text",
    "conformance_tests",
    "result_line",
    "run_rules",
    "summary",
]
