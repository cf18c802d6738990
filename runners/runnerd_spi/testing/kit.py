"""What the checks share: sessions at each depth, what a request gives alone, traces that are compared with that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from runnerd_spi.plan import RowOutput, SamplingParams, TokenLogprobs
from runnerd_spi.runner import OptionValue
from runnerd_spi.testing.driver import Outcome, TraceRun
from runnerd_spi.testing.subject import Broken, NotChecked, Session, Sizes, Subject
from runnerd_spi.testing.traces import Trace, TraceRequest, simpler

LOGPROB_TOLERANCE = 2e-3
"""A matrix product over another number of rows may add in another order."""

_CHEAP_SECONDS = 0.05
_SHRINK_SECONDS = 15.0
_SHRINK_RUNS = 400

Request = tuple[tuple[int, ...], int, str]


@dataclass
class Kit:
    """A runner under test and how thoroughly it is tested."""

    subject: Subject
    seed: int = 0
    """Seed of the first random trace; the others follow."""
    num_traces: int = 60
    seconds: float = 25.0
    """What the random traces may take; of what does not fit, the report tells."""
    _sessions: dict[int, Session] = field(default_factory=dict)
    _alone: dict[Request, Outcome] = field(default_factory=dict)
    _bring_up_seconds: float = float("inf")

    @property
    def is_cheap(self) -> bool:
        """Whether bringing a runner up takes so little that each trace may have one of its own."""
        return self._bring_up_seconds < _CHEAP_SECONDS

    @property
    def sizes(self) -> Sizes:
        """The sizes of the configuration, the model's vocabulary among them."""
        with self.session() as session:
            return session.sizes

    @property
    def depth(self) -> int:
        """The greatest number of steps in flight."""
        return self.subject.depths[-1]

    @contextmanager
    def session(self, depth: int | None = None, *, fresh: bool = False) -> Iterator[Session]:
        """Give a runner at idle. One that an error passed through is not used again.

        Args:
            depth: Steps in flight; the least by default.
            fresh: One that has run nothing.
        """
        depth = self.subject.depths[0] if depth is None else depth
        session = None if fresh else self._sessions.pop(depth, None)
        if session is None:
            begin = time.monotonic()
            session = self.subject.open(depth, **self.shadow)
            self._bring_up_seconds = time.monotonic() - begin
        try:
            yield session
        except BaseException:
            session.close()
            raise
        if fresh or depth in self._sessions:
            session.close()
        else:
            self._sessions[depth] = session

    @property
    def shadow(self) -> dict[str, OptionValue]:
        """The runner's own check of its KV cache, where it offers one."""
        declared = {option.name: option for option in self.subject.plugin.options}
        offers = "kv_shadow" in declared and declared["kv_shadow"].type is bool
        return {"kv_shadow": True} if offers else {}

    def close(self) -> None:
        """End the runners that are still there."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def params(self, **fields: object) -> SamplingParams:
        """Give greedy parameters with these fields."""
        return replace(SamplingParams(temperature=0.0), **fields)  # type: ignore[arg-type]

    def drawn(self, seed: int) -> SamplingParams:
        """Give parameters that draw at random, or greedy ones where the runner serves no temperature."""
        return self.params(temperature=1.0, seed=seed) if self.subject.serves("temperature") else self.params()

    def drawn_with_history(self, seed: int) -> SamplingParams:
        """Give parameters that draw at random and depend on what was said, as far as the runner serves that."""
        wanted = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.0}
        served = {name: value for name, value in wanted.items() if self.subject.serves(name)}
        return replace(self.drawn(seed), **served)  # type: ignore[arg-type]  # these are floats

    def require(self, *features: str) -> None:
        """Go on only where one of these features is served.

        Raises:
            NotChecked: None is.
        """
        if not any(map(self.subject.serves, features)):
            raise NotChecked(f"the capabilities declare {' and '.join(features)} as `no`")

    def alone(self, request: TraceRequest) -> Outcome:
        """Give what a request gets alone, one step at a time, its prompt in as few steps as there can be."""
        bare = TraceRequest(request.prompt, request.num_outputs, request.params)
        key = (bare.prompt, bare.num_outputs, repr(bare.params))
        if key not in self._alone:
            trace = Trace(self.subject.depths[0], (bare,), settle_early=True)
            with self.session(fresh=self.is_cheap) as session:
                [self._alone[key]] = TraceRun(session, trace).run()
        return self._alone[key]

    def tokens_alone(self, prompt: tuple[int, ...], num_outputs: int, params: SamplingParams) -> list[int | None]:
        """Give the tokens a request gets alone."""
        return self.alone(TraceRequest(prompt, num_outputs, params)).token_ids

    def check(self, trace: Trace) -> None:
        """Run a trace and compare each request with what it gets alone.

        Raises:
            Broken: They differ, or the runner answered wrongly; with the smallest trace that shows it.
        """
        found = self._run(trace)
        if found is None:
            return
        smallest, found = self._shrink(trace, found)
        raise Broken(found.difference, describe(smallest, found), smallest.seed)

    def _run(self, trace: Trace) -> _Found | None:
        steps: list[str] = []
        try:
            expected = [self.alone(request) for request in trace.requests]
            with self.session(trace.depth, fresh=self.is_cheap) as session:
                run = TraceRun(session, trace)
                steps = run.steps
                outcomes = run.run()
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001 - a runner may raise anything
            return _Found(_said(error), steps)
        for index, (request, got, alone) in enumerate(zip(trace.requests, outcomes, expected, strict=True)):
            difference = difference_of(request, got, alone)
            if difference:
                return _Found(f"request {index}, {difference}", steps)
        return None

    def _shrink(self, trace: Trace, found: _Found) -> tuple[Trace, _Found]:
        """Take away from the trace while it still fails, by a bounded number of runs."""
        deadline = time.monotonic() + _SHRINK_SECONDS
        runs = _SHRINK_RUNS
        again = True
        while again:
            again = False
            for candidate in simpler(trace):
                if not runs or time.monotonic() > deadline:
                    return trace, found
                if candidate.depth not in self.subject.depths:
                    continue
                runs -= 1
                failed = self._run(candidate)
                if failed is not None:
                    trace, found, again = candidate, failed, True
                    break
        return trace, found


@dataclass(frozen=True, slots=True)
class _Found:
    difference: str
    steps: list[str]


def difference_of(request: TraceRequest, got: Outcome, alone: Outcome) -> str:
    """Say where a request's outcome differs from the one it has alone; empty when it does not."""
    for index, output in enumerate(got.outputs):
        other = alone.outputs[index] if index < len(alone.outputs) else RowOutput()
        if (output.failure is None) != (other.failure is None):
            return f"output {index}: {_shown(output)}, but alone it is {_shown(other)}"
        if output.failure is not None:
            return ""
        if output.token_id != other.token_id:
            return f"output {index}: token {output.token_id}, but alone it is token {other.token_id}"
        if not _same_record(output.logprobs, other.logprobs):
            return f"output {index}: log-probabilities {output.logprobs}, but alone they are {other.logprobs}"
    if request.cancel_after is None and len(got.outputs) < len(alone.outputs):
        return f"{len(got.outputs)} outputs, but alone there are {len(alone.outputs)}"
    for position, record in got.prompt_logprobs.items():
        if not _same_record(record, alone.prompt_logprobs.get(position)):
            return f"prompt token {position}: {record}, but alone it is {alone.prompt_logprobs.get(position)}"
    if request.cancel_after is None and request.shares_with is None:
        missing = set(alone.prompt_logprobs) - set(got.prompt_logprobs)
        if missing:
            return f"prompt token {min(missing)} has no log-probability, but alone it has"
    return ""


def describe(trace: Trace, found: _Found) -> str:
    """Give a trace and its steps as text."""
    lines = [f"{trace.depth} in flight" + (f", rows of at most {trace.chunk} tokens" if trace.chunk < 1 << 30 else "")]
    for index, one in enumerate(trace.requests):
        params = ", ".join(
            f"{name}={getattr(one.params, name)!r}"
            for name in SamplingParams.__dataclass_fields__
            if getattr(one.params, name) != getattr(SamplingParams(temperature=0.0), name)
        )
        lines.append(f"request {index}: prompt {list(one.prompt)}, {one.num_outputs} outputs, {params or 'greedy'}")
    return "\n".join(lines + found.steps)


def _shown(output: RowOutput) -> str:
    return f"failed ({output.failure})" if output.failure is not None else f"token {output.token_id}"


def _same_record(one: TokenLogprobs | None, other: TokenLogprobs | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.token_id != other.token_id or len(one.top) != len(other.top):
        return False
    pairs = [(one.logprob, other.logprob)]
    pairs += [(mine, theirs) for (_, mine), (_, theirs) in zip(one.top, other.top, strict=True)]
    return all(abs(mine - theirs) <= LOGPROB_TOLERANCE or mine == theirs for mine, theirs in pairs)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"


Check = Callable[[Kit], None]
