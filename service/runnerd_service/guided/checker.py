"""Checks guides before they are scheduled: each is compiled in a process that is killed when it takes too long.

What is refused here never reaches an engine; what passes was compiled within the limits, and is again by each engine.
Verdicts are kept, the latest ones. Calls block: they belong on a thread.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from collections import OrderedDict

import msgspec

from runnerd_service.guided.guide import Guide, GuideError, Vocabulary
from runnerd_service.guided.process import MEMORY_BYTES, Answer, Question, read_frame, write_frame

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
"""So that one slow guide does not hold up all others."""
_START_SECONDS = 120.0


class GuideChecker:
    """Checks guides for one vocabulary. Safe to use from several threads.

    Args:
        vocabulary: The model's.
        timeout: Seconds that a guide may take; 0: any time.
        cache_size: How many verdicts to keep.
    """

    def __init__(self, vocabulary: Vocabulary, timeout: float, cache_size: int) -> None:
        self._vocabulary = vocabulary
        self._timeout = timeout
        self._cache_size = cache_size
        self._verdicts: OrderedDict[Guide, Answer] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        # None stands for a process that is to be started when it is needed.
        self._processes: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._processes.put(None)

    def check(self, guide: Guide) -> str:
        """Give the guide as a grammar that was compiled.

        Raises:
            GuideError: It is wrong, too large, or took too long.
        """
        with self._lock:
            verdict = self._verdicts.get(guide)
        if verdict is None:
            verdict = self._try_out(guide)
        if verdict is None:  # not kept: another time the machine may have less to do
            bounds = f"{self._timeout:g} seconds or {MEMORY_BYTES >> 30} GiB"
            raise GuideError(f"compiling it took more than {bounds}; use a simpler guide")
        self._keep(guide, verdict)
        if verdict.error:
            raise GuideError(verdict.error, verdict.place)
        return verdict.grammar

    def close(self) -> None:
        """End the processes; a check that runs ends with its time."""
        with self._lock:
            self._closed = True
        while not self._processes.empty():
            process = self._processes.get()
            if process is not None:
                process.kill()

    def _keep(self, guide: Guide, verdict: Answer) -> None:
        with self._lock:
            self._verdicts[guide] = verdict
            self._verdicts.move_to_end(guide)
            while len(self._verdicts) > self._cache_size:
                self._verdicts.popitem(last=False)

    def _try_out(self, guide: Guide) -> Answer | None:
        process = self._processes.get()
        try:
            if process is not None and not process.is_alive:
                process.kill()  # gives its pipes back
                process = None
            if process is None:
                process = _Process(self._vocabulary)
            verdict = process.ask(Question(guide.kind, guide.texts), self._timeout)
            if verdict is None:
                logger.warning("a guide of %d bytes was given up", guide.num_bytes)
                process = None
            return verdict
        finally:
            with self._lock:
                if self._closed and process is not None:
                    process.kill()
                    process = None
            self._processes.put(process)


class _Process:
    """One that compiles; dead after an answer of None."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        command = [sys.executable, "-P", "-m", "runnerd_service.guided.process"]
        # Threads would reserve address space, which is bounded, for themselves.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNNERD_")}
        environment |= {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        if self._exchange(vocabulary, _START_SECONDS) is None:
            raise RuntimeError("the process that compiles guides did not start; its error is in the log")

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; one that somebody killed is replaced."""
        return self._process.poll() is None

    def ask(self, question: Question, timeout: float) -> Answer | None:
        """Give the answer; None if there was none in time."""
        return self._exchange(question, timeout)

    def kill(self) -> None:
        """End it and give its pipes back. Harmless when it has ended."""
        self._process.kill()
        self._process.communicate()

    def _exchange(self, message: msgspec.Struct, timeout: float) -> Answer | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(timeout, self._process.kill)
        timer.daemon = True
        if timeout:
            timer.start()
        try:
            write_frame(self._process.stdin, message)  # type: ignore[arg-type]  # a binary stream, which typeshed calls IO
            data = read_frame(self._process.stdout)  # type: ignore[arg-type]
        except BrokenPipeError:
            data = b""
        finally:
            timer.cancel()
        if not data:
            self.kill()
            return None
        return msgspec.msgpack.decode(data, type=Answer)
