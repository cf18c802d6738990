"""Checks a runner in a process of its own: one that crashes or hangs is reported, not waited for."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from runnerd_spi.testing.rules import Rule
from runnerd_spi.testing.running import Result, in_order

_GRACE_SECONDS = 5.0
_TAIL_BYTES = 4000
_TAIL_LINES = 30


class Unusable(Exception):
    """The runner cannot be checked: it is not installed, not usable here, or does not come up."""


@dataclass(frozen=True, slots=True)
class Job:
    """Which runner to check, and how thoroughly."""

    target: str
    """Name it is installed under, or ``module:attribute`` of its RunnerPlugin."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Its own options, as texts."""
    model: str | None = None
    dtype: str = "auto"
    seed: int = 0
    num_traces: int = 60
    seconds: float = 25.0
    """What the random traces may take."""
    limit: float = 90.0
    """Seconds that one rule may take before the runner is taken to hang."""
    load_limit: float = 600.0
    """Seconds that bringing the runner up may take."""

    @property
    def command(self) -> str:
        """The command that does this job."""
        parts = ["runnerd check-runner", self.target]
        parts += [f"--option {name}={value}" for name, value in self.options.items()]
        if self.model is not None:
            parts.append(f"--model {self.model}")
        if self.dtype != "auto":
            parts.append(f"--dtype {self.dtype}")
        return " ".join(parts)


class IsolatedKit:
    """Checks rules in a process that is started when it is needed, and again when the runner has ended it.

    Args:
        job: Which runner.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._broken: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: int | None = None
        self._pending = b""
        self._log: IO[bytes] | None = None

    def __enter__(self) -> IsolatedKit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, rules: Collection[Rule]) -> Iterator[Result]:
        """Check rules one after the other.

        Raises:
            Unusable: The runner cannot be checked.
        """
        for rule in in_order(rules):
            yield self.check(rule)

    def check(self, rule: Rule) -> Result:
        """Check one rule; those found broken before are taken into account.

        Raises:
            Unusable: The runner cannot be checked.
        """
        begin = time.monotonic()
        process = self._start()
        order = {"rule": rule.id, "broken": sorted(self._broken)}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            answer = self._read(self._job.limit + _GRACE_SECONDS)
        except BrokenPipeError:
            answer = None
        result = self._ended(rule, begin) if answer is None else Result(**answer)
        if result.status == "broken":
            self._broken.add(rule.id)
        return result

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            process.stdin.close()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._answers is not None:
            os.close(self._answers)
        if self._log is not None:
            self._log.close()
        self._answers = self._log = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        reading, writing = os.pipe()
        self._answers, self._pending = reading, b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths(self._job.target))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runnerd_spi.testing.worker", str(writing)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            env=environment,
        )
        os.close(writing)
        assert self._process.stdin is not None
        job = self._job
        first = {name: getattr(job, name) for name in ("target", "model", "dtype", "seed", "num_traces", "seconds")}
        first |= {"options": dict(job.options), "limit": job.limit}
        with suppress(BrokenPipeError):  # what it died of is told below
            self._process.stdin.write(json.dumps(first).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._read(job.load_limit)
        if answer is None:
            message = f"it does not come up: {self._how(job.load_limit)}\n{self._tail()}"
            self._kill()
            raise Unusable(message)
        if "unusable" in answer:
            self.close()
            raise Unusable(str(answer["unusable"]))
        return self._process

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """Give the next answer; None when the process has ended or the time is over."""
        assert self._answers is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                return None
            part = os.read(self._answers, 1 << 16)
            if not part:
                return None
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self, rule: Rule, begin: float) -> Result:
        how = self._how(self._job.limit)
        self._kill()
        tail = self._tail()
        if self._log is not None:
            self._log.close()
            self._log = None
        message = f"{how}" + (f"; its last lines:\n{tail}" if tail else "")
        return Result(rule.id, "broken", message, seconds=time.monotonic() - begin)

    def _how(self, seconds: float) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"the runner hangs: no end after {seconds:.0f} seconds"
        if code < 0:
            return f"the runner's process was killed by {signal.Signals(-code).name}"
        return f"the runner's process ended with exit code {code}"

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # nobody reads it any more
                    process.stdin.close()
        if self._answers is not None:
            os.close(self._answers)
            self._answers = None

    def _tail(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - _TAIL_BYTES, 0))
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _paths(target: str) -> list[str]:
    """Give where the process looks for modules: where this one does, which may be a test that is not installed.

    A module that is named, not installed, may also lie in the working directory; but there only if nowhere else.
    """
    here = os.getcwd()
    paths = [path or here for path in sys.path]
    return [*paths, here] if ":" in target and here not in paths else paths
