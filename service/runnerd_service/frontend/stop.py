"""Finds stop strings in an output that arrives in pieces. Knows characters only: no tokens, no requests.

All stop strings are followed at once by one automaton (Aho, Corasick: "Efficient string matching", 1975), so each
character costs the same however many and however long they are. Its depth is the number of characters at the end of
the text that may be the beginning of a stop string: those, and no others, have to be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found at characters ``begin`` to ``end`` of the output's text."""

    stop: str
    begin: int
    end: int


@dataclass(slots=True, eq=False)
class _Node:
    depth: int
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    """Where the longest proper suffix of this node's text leads that is also the beginning of a stop string."""
    stop: str | None = None
    """The longest stop string that ends here."""


class StopStrings:
    """A request's stop strings, prepared; shared by its outputs.

    Args:
        stops: The stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = _Node(0)
        for stop in stops:
            self._insert(stop)
        self._link()
        self.first_characters = frozenset(self.root.children)

    def _insert(self, stop: str) -> None:
        node = self.root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.stop = stop

    def _link(self) -> None:
        queue = deque(self.root.children.values())
        for node in queue:
            node.fallback = self.root
        while queue:
            node = queue.popleft()
            for character, child in node.children.items():
                assert node.fallback is not None
                child.fallback = step(node.fallback, character)
                # A stop string that ends inside a longer one's text is complete before it.
                child.stop = child.stop or child.fallback.stop
                queue.append(child)


def step(node: _Node, character: str) -> _Node:
    """Give the node that ``character`` leads to."""
    while True:
        following = node.children.get(character)
        if following is not None:
            return following
        if node.fallback is None:
            return node
        node = node.fallback


class StopChecker:
    """Follows one output. The match that is complete first wins; of those complete at once, the longest."""

    def __init__(self, stops: StopStrings) -> None:
        self._root = stops.root
        self._first_characters = stops.first_characters
        self._node = stops.root
        self._length = 0

    @property
    def num_safe(self) -> int:
        """Characters from the start of the text that cannot be part of a stop string any more."""
        return self._length - self._node.depth

    def push(self, text: str) -> StopMatch | None:
        """Read on; give the match if there is one. The checker is not to be used after that."""
        node = self._node
        if node is self._root and self._first_characters.isdisjoint(text):
            self._length += len(text)
            return None
        for index, character in enumerate(text, start=self._length + 1):
            node = step(node, character)
            if node.stop is not None:
                return StopMatch(node.stop, index - len(node.stop), index)
        self._node = node
        self._length += len(text)
        return None
