"""``runnerd serve --runner NAME --help``: the command's help, and below it the options that the runner declares."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from runnerd_spi import RunnerError, load_runner


class RunnerHelp(argparse.Action):
    """Prints the help; with a runner named before it on the command line, that runner's options as well."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs=0,
            help="show this help; after --runner NAME with the options of that runner",
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Print and exit."""
        parser.print_help()
        if namespace.runner is not None:
            print(f"\n{runner_options_text(namespace.runner)}")
        parser.exit()


def runner_options_text(name: str) -> str:
    """Give the options of a runner as text, or why they cannot be told."""
    try:
        plugin = load_runner(name)
    except RunnerError as error:
        return str(error)
    if not plugin.options:
        return f"runner {name} has no options"
    lines = [f"options of runner {name} (--runner-option NAME=VALUE):"]
    for option in plugin.options:
        default = "" if option.default is None else f" (default: {option.default})"
        lines.append(f"  {f'{option.name}={option.type.__name__}':30}{option.help}{default}")
    return "\n".join(lines)
