"""Adds up the counters of engines that followed each other. It knows no engine."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from runnerd_service.engine.messages import Load

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def with_totals(load: Load, before: Load) -> Load:
    """Give ``load`` with the totals of ``before`` added: steps, tokens, times; what is there now is not a total."""
    added = _sum(load, before)
    return msgspec.structs.replace(
        added,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_used_blocks=load.num_used_blocks,
        num_blocks=load.num_blocks,
        num_unresolved_steps=load.num_unresolved_steps,
        depth=load.depth,
    )


def at_rest(load: Load, num_waiting: int = 0) -> Load:
    """Give ``load`` as it is without an engine: nothing runs, the totals stay."""
    return msgspec.structs.replace(
        load, num_running=0, num_waiting=num_waiting, num_used_blocks=0, num_unresolved_steps=0
    )


def _sum(one: _Struct, other: _Struct) -> _Struct:
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return type(one)(*(_sum(a, b) if isinstance(a, msgspec.Struct) else a + b for a, b in pairs))
