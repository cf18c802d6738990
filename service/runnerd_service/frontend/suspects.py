"""Finds the requests that engines die of, so that they fail alone. It decides who is tried and who is to blame.

Who was at work in an engine that died is under suspicion, until it has got further than it was then. Whoever was there
twice is tried alone. If the engine dies of that, it is set aside and the others go on together; the first of them that
gets further shows that engine and device are sound, so it was the request. If none does, the engine is at fault, and
nobody is blamed. A process that is killed from outside says little: it takes more of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runnerd_service.frontend.ongoing import OngoingOutput, OngoingRequest

_MANY_CRASHES = 2
_ENOUGH_EVIDENCE = 3
_OF_CRASH = 3
_OF_OUTSIDE_KILL = 1


class Suspects:
    """What is known of the requests by the crashes so far."""

    def __init__(self) -> None:
        self._tries_the_others = False

    def note_crash(self, at_work: Sequence[OngoingOutput], *, from_outside: bool) -> None:
        """Note that an engine died.

        Args:
            at_work: The outputs that it may have worked on.
            from_outside: It was killed by somebody, who may have had other reasons.
        """
        owners = _owners(at_work)
        for output in at_work:
            output.set_mark()
        for owner in owners:
            owner.num_crashes += 1
        self._tries_the_others = False
        if len(owners) == 1:
            owners[0].solo_evidence += _OF_OUTSIDE_KILL if from_outside else _OF_CRASH
            self._tries_the_others = is_accused(owners[0])

    def to_try_alone(self, ongoing: Iterable[OngoingOutput]) -> OngoingRequest | None:
        """Give the newest request that is to be tried alone; None if all that are not accused may run together."""
        if self._tries_the_others:
            return None
        owners = _owners(ongoing)
        suspects = [one for one in owners if one.num_crashes >= _MANY_CRASHES and not is_accused(one)]
        return suspects[-1] if suspects else None

    def note_progress(self, owner: OngoingRequest) -> None:
        """Note that an output of this request got further than at the last crash."""
        if all(output.mark is None for output in owner.outputs.values() if output.engine_uid is not None):
            _clear(owner)

    def to_blame(self, ongoing: Iterable[OngoingOutput], *, engine_is_sound: bool) -> list[OngoingRequest]:
        """Give the requests that the crashes come of; all others are cleared then.

        Args:
            ongoing: All outputs.
            engine_is_sound: One that is not accused has got further meanwhile.
        """
        owners = _owners(ongoing)
        accused = [one for one in owners if is_accused(one)]
        if not accused or not (engine_is_sound or len(accused) == len(owners)):
            return []
        for one in owners:
            _clear(one)
        return accused


def is_accused(owner: OngoingRequest) -> bool:
    """Whether an engine died of this request alone, after others had died of it among others."""
    return owner.num_crashes >= _MANY_CRASHES and owner.solo_evidence >= _ENOUGH_EVIDENCE


def at_work(ongoing: Iterable[OngoingOutput], max_num_seqs: int) -> list[OngoingOutput]:
    """Give the outputs that an engine may have worked on: those it gave something of, and the next in its queue.

    Args:
        ongoing: Outputs in the order of their arrival.
        max_num_seqs: How many it runs at once.
    """
    there = [output for output in ongoing if output.engine_uid is not None]
    queue = sorted((output for output in there if not output.has_run), key=lambda output: output.request.priority)
    next_ones = {output.request.uid for output in queue[:max_num_seqs]}
    return [output for output in there if output.has_run or output.request.uid in next_ones]


def _owners(outputs: Iterable[OngoingOutput]) -> list[OngoingRequest]:
    return list(dict.fromkeys(output.owner for output in outputs))


def _clear(owner: OngoingRequest) -> None:
    owner.num_crashes = owner.solo_evidence = 0
