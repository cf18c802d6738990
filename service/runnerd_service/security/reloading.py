"""Files that are read again when they change. A file that turns bad changes nothing: what was read last stays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from runnerd_service.errors import ConfigurationError
from runnerd_service.metrics import ReloadFigures

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LOOK_SECONDS = 1.0
"""How often files are looked at."""
_Stamp = tuple[tuple[int, int, int], ...]


class Reloading(Generic[_T]):
    """What some files hold together. Safe to use from several threads.

    Args:
        what: Names them in the log.
        paths: The files; a change of any is a reason to read all. Links are followed.
        load: Reads them; raises ConfigurationError, which names the file, when they cannot be used.

    Raises:
        ConfigurationError: The first load failed.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], _T]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        # Before the load: a change in between is then seen.
        self._stamp = self._stamped()
        self._refused: _Stamp | None = None
        """Files as they are, when they cannot be used; told and counted once."""
        self._num_ok = 0
        self._num_failed = 0
        self._value = load()

    def get(self) -> _T:
        """Give what the files hold, or held when they last could be used, as of the last look. Waits for nothing."""
        return self._value

    def look(self) -> None:
        """Read the files if they have changed since they were read."""
        with self._lock:
            stamp = self._stamped()
            if stamp == self._stamp:
                self._put_back()
                return
            try:
                self._value = self._load()
            except ConfigurationError as error:
                # Tried again at each look: half of an exchange may be what was seen.
                if stamp != self._refused:
                    self._num_failed += 1
                    logger.error("%s; what was read before stays", error)  # noqa: TRY400 # it says all
                self._refused = stamp
            else:
                self._stamp, self._refused = stamp, None
                self._num_ok += 1
                logger.info("%s: read again", self._what)

    def figures(self) -> ReloadFigures:
        """Give how reading again went."""
        return ReloadFigures(self._num_ok, self._num_failed, in_use=self._refused is None)

    def _put_back(self) -> None:
        if self._refused is not None:
            self._refused = None
            logger.info("%s: as they were when they were read last", self._what)

    def _stamped(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def read_bytes(path: Path, what: str, flag: str) -> bytes:
    """Give the content of a file.

    Args:
        path: Of the file.
        what: Names its content in the error.
        flag: The flag that names the file.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {what} {path}: {error.strerror or error}; give {flag} the path of a file that this process "
            "may read"
        ) from error
