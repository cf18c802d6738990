"""The simulated runner's own options: declared as data, read into one validated object.

Standard library and SPI only: the plug-in's entry point imports this module, and that must stay cheap.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from runnerd_spi import InvalidOption, OptionValue, RunnerOption

_MAX_COUNT = 10_000_000
"""Tables of so many entries can be held."""

OPTIONS = (
    RunnerOption("step_seconds", float, 0.0, "device time of a step that has rows"),
    RunnerOption("seconds_per_row", float, 0.0, "device time added for each row of a step"),
    RunnerOption("seconds_per_token", float, 0.0, "device time added for each token of a step"),
    RunnerOption("copy_seconds", float, 0.0, "time from the end of a step on the device until the host can read it"),
    RunnerOption("load_seconds", float, 0.0, "how long loading takes"),
    RunnerOption("num_blocks", int, 4096, "KV blocks the device has room for"),
    RunnerOption("max_model_len", int, 8192, "most tokens of a request that the simulated model allows"),
    RunnerOption("eos_bias", float, 0.0, "logit of EOS; 0 ends an output after about 300 tokens, 3 after about 15"),
    RunnerOption("script", str, None, "text every request answers, then EOS, over again; unset: hash of the history"),
    RunnerOption("kv_shadow", bool, False, "check the whole history of every row in its KV blocks; slower"),
    RunnerOption("fail_at_step", int, None, "step id that fails fatally"),
    RunnerOption("fail_row_token", str, None, "text; a request whose tokens contain it fails alone"),
    RunnerOption("crash_row_token", str, None, "text; a request whose tokens contain it ends the process with code 70"),
    RunnerOption("crash_at_step", int, None, "step id at whose end the process exits at once with code 70"),
    RunnerOption("stall_at_step", int, None, "step id that takes stall_seconds longer"),
    RunnerOption("stall_seconds", float, 60.0, "how much longer the step stall_at_step takes"),
)


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How the simulated device behaves. ``OPTIONS`` says what each field means."""

    step_seconds: float
    seconds_per_row: float
    seconds_per_token: float
    copy_seconds: float
    load_seconds: float
    num_blocks: int
    max_model_len: int
    eos_bias: float
    script: str | None
    kv_shadow: bool
    fail_at_step: int | None
    fail_row_token: str | None
    crash_row_token: str | None
    crash_at_step: int | None
    stall_at_step: int | None
    stall_seconds: float

    @classmethod
    def from_mapping(cls, values: Mapping[str, OptionValue]) -> SimOptions:
        """Read converted option values; absent ones hold their defaults.

        Raises:
            InvalidOption: An unknown name, a value of another type than declared, or one out of range.
        """
        declared = {option.name: option for option in OPTIONS}
        unknown = sorted(set(values) - set(declared))
        if unknown:
            known = ", ".join(sorted(declared))
            raise InvalidOption(f"runner 'sim' has no option {unknown[0]!r}; it has: {known}")
        read = _Reader({option.name: values.get(option.name, option.default) for option in OPTIONS})
        return cls(
            step_seconds=read.seconds("step_seconds"),
            seconds_per_row=read.seconds("seconds_per_row"),
            seconds_per_token=read.seconds("seconds_per_token"),
            copy_seconds=read.seconds("copy_seconds"),
            load_seconds=read.seconds("load_seconds"),
            num_blocks=read.count("num_blocks"),
            max_model_len=read.count("max_model_len"),
            eos_bias=read.number("eos_bias"),
            script=read.text("script"),
            kv_shadow=read.flag("kv_shadow"),
            fail_at_step=read.step("fail_at_step"),
            fail_row_token=read.text("fail_row_token"),
            crash_row_token=read.text("crash_row_token"),
            crash_at_step=read.step("crash_at_step"),
            stall_at_step=read.step("stall_at_step"),
            stall_seconds=read.seconds("stall_seconds"),
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Narrows option values to the types and ranges of the fields."""

    values: Mapping[str, OptionValue | None]

    def number(self, name: str) -> float:
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._invalid(name, "a finite number")
        return float(value)

    def seconds(self, name: str) -> float:
        value = self.number(name)
        if value < 0:
            raise self._invalid(name, "seconds, 0 or more")
        return value

    def step(self, name: str) -> int | None:
        return None if self.values[name] is None else self._integer(name, 0, "a step id, 0 or more")

    def count(self, name: str) -> int:
        return self._integer(name, 1, f"an integer from 1 to {_MAX_COUNT}", _MAX_COUNT)

    def text(self, name: str) -> str | None:
        value = self.values[name]
        if value is not None and (not isinstance(value, str) or not value):
            raise self._invalid(name, "a text that is not empty")
        return value

    def flag(self, name: str) -> bool:
        value = self.values[name]
        if not isinstance(value, bool):
            raise self._invalid(name, "true or false")
        return value

    def _integer(self, name: str, least: int, expected: str, most: int = sys.maxsize) -> int:
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._invalid(name, expected)
        return value

    def _invalid(self, name: str, expected: str) -> InvalidOption:
        return InvalidOption(f"runner 'sim': option {name} takes {expected}, got {self.values[name]!r}")
