"""Reads options of the torch runners that are one of a few names. Imports no framework."""

from __future__ import annotations

from typing import TypeVar

from runnerd_spi import InvalidOption, RunnerConfig

T = TypeVar("T")


def chosen(runner: str, config: RunnerConfig, name: str, choices: tuple[T, ...], default: str = "auto") -> T:
    """Give the value of option ``name``, ``default`` where it was not given.

    Raises:
        InvalidOption: It is none of ``choices``.
    """
    asked = config.options.get(name, default)
    for choice in choices:
        if choice == asked:
            return choice
    raise InvalidOption(f"runner {runner!r}: option {name} is {asked!r}, expected {', '.join(map(str, choices))}")
