"""Files that are read again when they change. A file that turns bad changes nothing: what was read last stays."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from runnerd_service.errors import ConfigurationError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LOOK_SECONDS = 1.0
"""A change is seen by the first use that comes so long after the last look."""
_Stamp = tuple[tuple[int, int, int], ...]


class Reloading(Generic[_T]):
    """What some files hold together. Safe to use from several threads.

    Args:
        what: Names them in the log.
        paths: The files; a change of any is a reason to read all. Links are followed.
        load: Reads them; raises ConfigurationError when they cannot be used.
        look_seconds: How often the files are looked at, at most.

    Raises:
        ConfigurationError: The first load failed.
    """

    def __init__(
        self, what: str, paths: Sequence[Path], load: Callable[[], _T], look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._look_seconds = look_seconds
        self._lock = threading.Lock()
        # Before the load: a change in between is then seen.
        self._stamp = self._stamped()
        self._refused: _Stamp | None = None
        """Files as they were when they last could not be used; told once."""
        self._value = load()
        self._next_look = time.monotonic() + look_seconds

    def get(self) -> _T:
        """Give what the files hold, or held when they last could be used."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + self._look_seconds
                self._look()
            return self._value

    def _look(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        try:
            self._value = self._load()
        except ConfigurationError as error:
            # Tried again at each look: half of an exchange may be what was seen.
            if stamp != self._refused:
                logger.error("%s: %s; what was read before stays", self._what, error)  # noqa: TRY400 # it says all
            self._refused = stamp
        else:
            self._stamp, self._refused = stamp, None
            logger.info("%s: read again", self._what)

    def _stamped(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def read_bytes(path: Path, what: str) -> bytes:
    """Give the content of a file.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {what} {path}: {error.strerror or error}") from error
