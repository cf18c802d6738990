"""Finds the requests that engines die of, so that they fail alone. It decides who is tried and who is to blame.

Who was at work in an engine that died is under suspicion, until it has got further than it was then. Those who were
there twice are tried, the newest alone, then twice as many of the next newest each time: with hundreds of them one by
one would take minutes. After a kill from outside, of which most likely none of them is the cause, two halves are tried.
A group that an engine dies of is halved, and its halves are tried when the other groups were: those get further
meanwhile, so the restarts do not count as in vain. If an engine dies of one request alone, it is set aside and the
others go on together; the first of them that gets further shows that engine and device are sound, so it was the
request. If none does, the engine is at fault, and nobody is blamed. A process that is killed from outside says little:
it takes more of that.
"""

from __future__ import annotations

from collections import deque
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
        self._groups: deque[list[OngoingRequest]] = deque()
        """Suspects to be tried group by group, each newest first."""
        self._tried: list[OngoingRequest] = []
        """The group that is tried now."""
        self._from_outside = False
        """Whether the latest engine was killed by somebody."""

    def note_crash(self, at_work: Sequence[OngoingOutput], *, from_outside: bool) -> None:
        """Note that an engine died.

        Args:
            at_work: The outputs that it may have worked on.
            from_outside: It was killed by somebody, who may have had other reasons.
        """
        owners = _owners(at_work)
        self._split_tried()
        for output in at_work:
            output.set_mark()
        for owner in owners:
            owner.num_crashes += 1
        self._from_outside = from_outside
        self._tries_the_others = False
        if len(owners) == 1:
            owners[0].solo_evidence += _OF_OUTSIDE_KILL if from_outside else _OF_CRASH
            self._tries_the_others = is_accused(owners[0])

    def to_try(self, ongoing: Iterable[OngoingOutput]) -> Sequence[OngoingRequest]:
        """Give the requests that are to be tried without the others; none if all that are not accused may run."""
        self._tried = []
        if self._tries_the_others:
            return ()
        owners = _owners(ongoing)
        suspects = [one for one in reversed(owners) if one.num_crashes >= _MANY_CRASHES and not is_accused(one)]
        present = set(suspects)
        self._groups = deque(filter(None, ([one for one in group if one in present] for group in self._groups)))
        known = {one for group in self._groups for one in group}
        new = [one for one in suspects if one not in known]
        # Most likely none of them is to blame for a kill from outside: the fewer trials, the sooner all go on.
        self._groups.extend(_halves(new) if self._from_outside else _doubling(new))
        if self._groups:
            self._tried = self._groups[0]
        return tuple(self._tried)

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

    def _split_tried(self) -> None:
        """Halve the group of which an engine died; those of it that got further are not in it any more."""
        if not self._tried:
            return
        self._groups.popleft()
        self._groups.extend(_halves([one for one in self._tried if one.num_crashes >= _MANY_CRASHES]))
        self._tried = []


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


def _halves(suspects: Sequence[OngoingRequest]) -> list[list[OngoingRequest]]:
    half = len(suspects) // 2
    return [list(part) for part in (suspects[:half], suspects[half:]) if part]


def _doubling(suspects: Sequence[OngoingRequest]) -> list[list[OngoingRequest]]:
    """Cut into groups of 1, 2, 4, ... members."""
    groups, begin = [], 0
    while begin < len(suspects):
        groups.append(list(suspects[begin : 2 * begin + 1]))
        begin = 2 * begin + 1
    return groups


def _clear(owner: OngoingRequest) -> None:
    owner.num_crashes = owner.solo_evidence = 0
