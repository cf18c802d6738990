"""The engine process as its parent sees it: started, logged, waited for, ended. It knows not what is computed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from runnerd_service.engine.launch import Launch
from runnerd_service.engine.output import read_lines

_NUM_TAIL_LINES = 50
_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}

logger = logging.getLogger("runnerd_service.engine.process")


class EngineChild:
    """A running engine process. Its standard input stays open for as long as this object wants it to live.

    Args:
        launch: Its configuration.
        on_exit: Called with the exit code (negative: the signal), once, in a thread of its own.
    """

    def __init__(self, launch: Launch, on_exit: Callable[[int], None]) -> None:
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runnerd_service.engine.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("RUNNERD_")},
        )
        assert self._process.stdin is not None
        self._reader = threading.Thread(target=self._forward_lines, name="engine-log", daemon=True)
        self._reader.start()
        self._waiter = threading.Thread(target=self._wait, name="engine-wait", daemon=True)
        self._waiter.start()
        try:
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.debug("the engine process ended before it read its configuration")  # on_exit tells the rest

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def tail(self) -> str:
        """Give the last lines that it wrote."""
        return "\n".join(self._tail)

    def dump_stacks(self) -> None:
        """Ask it to write what its threads are doing; harmless when it has ended."""
        self._process.send_signal(signal.SIGUSR1)

    def terminate(self) -> None:
        """Ask it to end; harmless when it has."""
        self._process.terminate()

    def kill(self) -> None:
        """End it; harmless when it has ended."""
        self._process.kill()

    def close(self) -> None:
        """Let go of the pipes of an ended process."""
        self._waiter.join()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            logger.debug("the engine process ended before it read its configuration")

    def _forward_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in read_lines(stream):
                self._tail.append(line)
                # What has no level comes from a library or is a traceback.
                level, _, rest = line.partition(" ")
                if level in _LEVELS:
                    logger.log(_LEVELS[level], "%s", rest)
                else:
                    logger.warning("%s", line)

    def _wait(self) -> None:
        code = self._process.wait()
        # A process that it started may hold the pipe for longer; the last lines are there by then.
        self._reader.join(timeout=1.0)
        self._on_exit(code)


def describe_exit(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
