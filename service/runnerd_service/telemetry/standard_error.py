"""Standard error of a process whose log is JSON: what others write there becomes lines of the log."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import warnings
from types import TracebackType
from typing import TextIO

logger = logging.getLogger(__name__)

_STANDARD_ERROR = 2
_LAST_LINES_SECONDS = 2.0


def take_standard_error() -> TextIO:
    """Take this process's standard error over, until the process ends; give where log lines go.

    What Python, a library (one in C, too) or a child writes there goes into a pipe and is logged line by line as a
    warning; exceptions that nobody catches, and Python's own warnings, as one record each. Only the stacks of a process
    that a signal kills go out as they are: nobody is left to log them. To be called once, by the owner of the process.
    """
    sys.stderr.flush()
    real = os.dup(_STANDARD_ERROR)
    reader, writer = os.pipe()
    os.dup2(writer, _STANDARD_ERROR)
    os.close(writer)
    forwarder = threading.Thread(target=_forward, args=(reader,), name="standard-error", daemon=True)
    forwarder.start()
    logging.captureWarnings(True)
    warnings.formatwarning = _one_line
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_of_thread
    sys.unraisablehook = _log_unraisable

    def give_back() -> None:
        """Let the last lines out; children may hold the pipe for longer."""
        sys.stderr.flush()
        os.dup2(real, _STANDARD_ERROR)
        forwarder.join(_LAST_LINES_SECONDS)

    atexit.register(give_back)
    lines = os.fdopen(os.dup(real), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    faulthandler.enable(lines)
    return lines


def _forward(reader: int) -> None:
    with os.fdopen(reader, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            if text := line.rstrip():
                logger.warning("%s", text)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{filename}:{lineno}: {category.__name__}: {message}"


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logger.critical("%s", kind.__name__, exc_info=(kind, error, traceback))


def _log_uncaught_of_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is None or isinstance(told.exc_value, SystemExit):
        return
    name = "" if told.thread is None else told.thread.name
    logger.error("the thread %s ended", name, exc_info=(told.exc_type, told.exc_value, told.exc_traceback))


def _log_unraisable(told: sys.UnraisableHookArgs) -> None:
    error = told.exc_value
    logger.error(
        "%s %r",
        told.err_msg or "ignored, in",
        told.object,
        exc_info=None if error is None else (type(error), error, told.exc_traceback),
    )
