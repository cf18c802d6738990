"""``runnerd check-runner``: does an installed runner keep the contract? For authors of plug-ins."""

from __future__ import annotations

import argparse
from typing import Any

from runnerd_service.cli import exit_codes
from runnerd_service.cli.settings import split_options
from runnerd_service.cli.values import argument, count, positive_seconds
from runnerd_service.errors import ConfigurationError
from runnerd_spi.testing import RULES, IsolatedKit, Job, Unusable, broken_text, result_line, summary

_EPILOG = """\
The runner is brought up in a process of its own, with a small configuration, once and again. It needs a small model.
Each rule has a number; what a broken one means and what to do is in the report, with the smallest trace that shows it.

examples:
  runnerd check-runner sim
  runnerd check-runner cpu --model ./tiny-random-llama --option num_threads=1
  runnerd check-runner acme.plugin:ACME --rule S3 --seed 17 --traces 1

exit codes:
  0    every rule that could be checked holds
  1    a rule is broken
  2    the runner cannot be checked: not installed, not usable here, or it does not come up"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    default = Job("")
    parser = commands.add_parser(
        "check-runner",
        help="check whether a runner keeps the contract",
        description="Check a runner against the rules of the SPI: its life, its steps, its tokens, what it declares.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="an installed runner, or module:attribute of a RunnerPlugin")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the runner's own; may be repeated",
    )
    parser.add_argument("--model", metavar="PATH", help="model directory or file, for a runner that needs one")
    parser.add_argument("--dtype", default=default.dtype, metavar="DTYPE", help="data type, or auto (default: auto)")
    parser.add_argument(
        "--rule",
        action="append",
        choices=[rule.id for rule in RULES],
        metavar="ID",
        help="check this rule only; may be repeated (--list-rules shows them)",
    )
    parser.add_argument("--list-rules", action="store_true", help="show the rules and check nothing")
    parser.add_argument(
        "--seed", type=argument(count(0)), default=default.seed, metavar="N", help="seed of the first random trace"
    )
    parser.add_argument(
        "--traces",
        type=argument(count(0)),
        default=default.num_traces,
        metavar="N",
        help=f"random traces of rule T1 (default: {default.num_traces})",
    )
    parser.add_argument(
        "--timeout",
        type=argument(positive_seconds),
        default=default.limit,
        metavar="SECONDS",
        help=f"what one rule may take before the runner is taken to hang (default: {default.limit:g})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the runner, print what was found, and give the exit code.

    Raises:
        ConfigurationError: The runner cannot be checked.
    """
    if arguments.list_rules:
        print("\n".join(f"{rule.id}  {rule.title}" for rule in RULES))
        return exit_codes.OK
    job = Job(
        target=arguments.name,
        options=split_options(arguments.option, "--option"),
        model=arguments.model,
        dtype=arguments.dtype,
        seed=arguments.seed,
        num_traces=arguments.traces,
        seconds=arguments.timeout / 4,
        limit=arguments.timeout,
    )
    rules = [rule for rule in RULES if arguments.rule is None or rule.id in arguments.rule]
    results = []
    try:
        with IsolatedKit(job) as kit:
            for result in kit.run(rules):
                results.append(result)
                print(result_line(result), flush=True)
    except Unusable as error:
        raise ConfigurationError(f"runner {job.target!r} cannot be checked: {error}") from error
    broken = [result for result in results if result.status == "broken"]
    for result in broken:
        print(f"\n{broken_text(result, job.command)}")
    print(f"\n{summary(results)}")
    return exit_codes.FAILURE if broken else exit_codes.OK
