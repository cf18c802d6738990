"""Failure cases of overlapped execution on a torch runner, with a device that makes each fault as bad as it can be.

The cases are those of docs/async-cases.md. ``LateCopyDevice`` copies results to the host on a stream of its own, while
the next step already computes, spoils what it will overwrite until then, and spoils every step's inputs right after the
step. So whatever reads a result too early, or another step's inputs, or a result tensor that is written to again, gets
garbage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from runnerd_service.engine.engine import Engine, EngineDead, EngineLimits
from runnerd_service.engine.messages import AddRequest, Load, RequestOutput, Sampling
from runnerd_spi import RunnerConfig
from runnerd_torch.attention import AttentionMetadata, PagedAttention, build_attention
from runnerd_torch.devices.base import Array, Device, Launch, T
from runnerd_torch.devices.cpu import CpuDevice
from runnerd_torch.linear import build_linear
from runnerd_torch.runner import TorchModelRunner

VOCAB_SIZE = 160
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
SPOILED = 1 << 24
"""Outside of every vocabulary, table and cache of these tests."""


class LateLaunch:
    """Done when its copies are."""

    def __init__(self, launch: Launch[T], copied: Future[int]) -> None:
        self._launch, self._copied = launch, copied

    @property
    def begin_ns(self) -> int:
        return self._launch.begin_ns

    @property
    def compute_end_ns(self) -> int:
        return self._launch.end_ns

    @property
    def end_ns(self) -> int:
        return self._copied.result() if self._copied.done() else 0

    def done(self) -> bool:
        return self._copied.done()

    def wait(self, timeout: float | None = None) -> bool:
        return bool(wait([self._copied], timeout).done)

    def value(self) -> T:
        return self._launch.value()


class LateCopyDevice:
    """The CPU with a copy engine: see the module's text."""

    def __init__(self, step_seconds: float, copy_seconds: float) -> None:
        self._cpu = CpuDevice(1)
        self.preferred_dtype, self.memory, self.zeros = self._cpu.preferred_dtype, self._cpu.memory, self._cpu.zeros
        self.synchronize, self.peak_bytes = self._cpu.synchronize, self._cpu.peak_bytes
        self._step_seconds, self._copy_seconds = step_seconds, copy_seconds
        self._copy_stream = ThreadPoolExecutor(1)
        # Of the step that runs.
        self._inputs: list[Array] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def torch_device(self) -> torch.device:
        return self._cpu.torch_device

    @property
    def description(self) -> str:
        return "cpu with a late copy engine"

    def submit(self, work: Callable[[], T]) -> LateLaunch:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def step() -> T:
            time.sleep(self._step_seconds)
            self._inputs, self._copies = [], copies
            value = work()
            for array in self._inputs:
                array[...] = SPOILED if array.itemsize > 1 else 127  # packed bytes: large numbers of any kind
            return value

        launch = self._cpu.submit(step)
        return LateLaunch(launch, self._copy_stream.submit(self._copy, launch, copies))

    def to_device(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        self._inputs.extend(arrays)
        return self._cpu.to_device(arrays)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(tensor, -SPOILED)
        self._copies.append((tensor, host))
        return host

    def close(self, timeout: float) -> bool:
        ended = self._cpu.close(timeout)
        self._copy_stream.shutdown()
        return ended

    def _copy(self, launch: Launch[T], copies: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        launch.wait()
        time.sleep(self._copy_seconds)
        with torch.inference_mode():
            for source, host in copies:
                host.copy_(source)
        return time.monotonic_ns()


@dataclass(frozen=True)
class Setup:
    depth: int = 1
    num_blocks: int = 128
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    host_seconds: float = 0.0


BuildAttention = Callable[[], PagedAttention]
PLAIN_ATTENTION: BuildAttention = partial(build_attention, "torch")


@contextmanager
def engine_on(
    device: Device, model: Path, setup: Setup, attention: BuildAttention = PLAIN_ATTENTION
) -> Iterator[Engine]:
    config = RunnerConfig(
        setup.max_num_seqs,
        setup.max_num_batched_tokens,
        BLOCK_SIZE,
        model=str(model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=setup.depth,
    )
    runner = TorchModelRunner(config, device, attention, partial(build_linear, "torch"), max_logprobs=5)
    try:
        info = runner.load(lambda stage, done, total: None)
        runner.profile()
        runner.init_kv_cache(setup.num_blocks)
        runner.warm_up()
        limits = EngineLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_blocks=setup.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_in_flight=setup.depth,
        )
        yield Engine(runner, limits)
    finally:
        runner.close()


@dataclass
class Stream:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, ...]] = field(default_factory=list)
    finish: str | None = None
    matched: int | None = None
    error: str = ""

    def take(self, output: RequestOutput) -> None:
        assert self.finish is None, f"an output after the finish: {output}"
        self.token_ids += output.token_ids
        for records, mine in ((output.logprobs, self.logprobs), (output.prompt_logprobs, self.prompt_logprobs)):
            mine += [(one.logprob, *(logprob for _, logprob in one.top)) for one in records]
        self.finish, self.matched, self.error = output.finish, output.matched_token_id, output.error


def assert_equal(streams: dict[int, Stream], expected: dict[int, Stream]) -> None:
    """Tokens and ends exactly; log-probabilities to what another batch's order of additions may change."""
    assert streams.keys() == expected.keys()
    for uid, stream in streams.items():
        other = expected[uid]
        assert stream.token_ids == other.token_ids
        assert (stream.finish, stream.matched, stream.error) == (other.finish, other.matched, other.error)
        for mine, theirs in ((stream.logprobs, other.logprobs), (stream.prompt_logprobs, other.prompt_logprobs)):
            assert len(mine) == len(theirs)
            for one, two in zip(mine, theirs, strict=True):
                assert one == pytest.approx(two, abs=1e-4)


def run_on(engine: Engine, requests: Sequence[AddRequest], host_seconds: float = 0.0) -> dict[int, Stream]:
    streams = {request.uid: Stream() for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(3000):
        if not engine.has_work:
            break
        for output in engine.step():
            streams[output.uid].take(output)
        engine.check_integrity()
        time.sleep(host_seconds)
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)
    return streams


@pytest.fixture(scope="module")
def model(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


@pytest.fixture(scope="module")
def synchronous(model: Path) -> Iterator[Engine]:
    """One step in flight on a plain CPU, with room for all."""
    with engine_on(CpuDevice(1), model, Setup()) as engine:
        yield engine


FAULTS = {
    "late copy": (Setup(2), 0.0, 0.005),
    "slow device and late copy": (Setup(4), 0.002, 0.006),
    "slow host": (Setup(3, host_seconds=0.003), 0.0, 0.001),
}


@pytest.fixture(params=FAULTS.values(), ids=FAULTS.keys())
def fault(request: pytest.FixtureRequest) -> tuple[Setup, float, float]:
    return request.param


def run_with(
    fault: tuple[Setup, float, float], model: Path, requests: Sequence[AddRequest], **sizes: int
) -> tuple[dict[int, Stream], Load]:
    setup, step_seconds, copy_seconds = fault
    setup = Setup(setup.depth, host_seconds=setup.host_seconds, **sizes)
    with engine_on(LateCopyDevice(step_seconds, copy_seconds), model, setup) as engine:
        return run_on(engine, requests, setup.host_seconds), engine.load()


def request(
    uid: int, prompt: Sequence[int], max_tokens: int, eos_token_ids: tuple[int, ...] = (), **sampling: object
) -> AddRequest:
    return AddRequest(uid, tuple(prompt), Sampling(**sampling), max_tokens, eos_token_ids=eos_token_ids)  # type: ignore[arg-type]


def prompt_of(uid: int, length: int) -> list[int]:
    return [3 + (7 * uid + 11 * place) % 150 for place in range(length)]


WAYS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 1.0, "repetition_penalty": 1.5, "num_logprobs": 2},
    {"temperature": 0.8, "top_k": 5, "bad_words_token_ids": ((5,), (8, 9), (17, 17))},
    {"temperature": 1.5, "top_p": 0.8, "allowed_token_ids": tuple(range(0, 160, 3)), "num_prompt_logprobs": 1},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {7: 3.0}, "presence_penalty": 1.0, "num_logprobs": 0},
    {"temperature": 0.0},
)


def test_parameters_of_every_kind_hold_for_their_own_rows_while_requests_come_and_go(fault, model, synchronous) -> None:
    """A1, A3, A28, A31, A45: each kind beside all others, in slots that are used again and again."""
    requests = [
        request(uid, prompt_of(uid, 2 + uid % 9), 3 + uid % 7, seed=uid, **WAYS[uid % len(WAYS)]) for uid in range(14)
    ]
    streams, _ = run_with(fault, model, requests, max_num_seqs=3, max_num_batched_tokens=11)
    assert_equal(streams, run_on(synchronous, requests))


def test_a_penalty_sees_the_token_that_is_still_in_flight(fault, model) -> None:
    """A1: one token is wanted far more than others, until it has come."""
    choice: dict[str, object] = {"temperature": 0.0, "logit_bias": {9: 60.0}}
    requests = [
        request(1, [3, 4], 6, **choice),
        request(2, [3, 4], 6, **choice, bad_words_token_ids=((9, 9),)),
    ]
    streams, _ = run_with(fault, model, requests)
    assert streams[1].token_ids == [9] * 6
    assert streams[2].token_ids[::2] == [9] * 3
    assert 9 not in streams[2].token_ids[1::2]


def test_nothing_follows_eos_though_later_rows_are_in_flight(fault, model, synchronous) -> None:
    """A8, A10, A11: and a request of n tokens has n outputs, the finish with the last."""
    free = run_on(synchronous, [request(0, [5, 6, 7], 12, temperature=0.0)])[0].token_ids
    place = next(place for place in range(2, 12) if free[place] not in free[:place])
    requests = [
        request(0, [5, 6, 7], 12, (free[place],), temperature=0.0),
        request(1, [5, 6, 7], 4, temperature=0.0),
        request(2, [5, 6, 7], 1, temperature=0.0),
    ]
    streams, _ = run_with(fault, model, requests)
    assert [streams[uid].token_ids for uid in range(3)] == [free[: place + 1], free[:4], free[:1]]
    assert [streams[uid].finish for uid in range(3)] == ["eos", "length", "length"]


def test_a_preempted_request_goes_on_with_the_same_tokens(fault, model, synchronous) -> None:
    """A15, A20, A36, A44: room for less than all, prompts in chunks, a seed each."""
    requests = [
        request(uid, prompt_of(uid, 9), 20, seed=7, temperature=1.0, frequency_penalty=0.5, num_logprobs=1)
        for uid in range(4)
    ]
    streams, load = run_with(fault, model, requests, num_blocks=18, max_num_batched_tokens=6)
    assert load.num_preemptions > 0
    assert_equal(streams, run_on(synchronous, requests))
    assert load.generation_tokens == 4 * 20


def test_a_uid_that_is_used_again_gets_nothing_of_its_former_request(fault, model, synchronous) -> None:
    """A22, A23, A25: aborts after each number of steps, and a new request of the same name in the same slot."""
    setup, step_seconds, copy_seconds = fault
    new = request(1, [9, 8, 7], 5, temperature=0.0)
    expected = run_on(synchronous, [new])
    device = LateCopyDevice(step_seconds, copy_seconds)
    with engine_on(device, model, Setup(setup.depth, max_num_seqs=1)) as engine:
        for num_steps in range(6):
            engine.add(request(1, prompt_of(1, 12), 30, seed=num_steps))
            for _ in range(num_steps):
                engine.step()
            engine.abort([1])
            assert_equal(run_on(engine, [new]), expected)


class FailingAttention:
    """Plain attention that fails at one of its calls."""

    def __init__(self, fails_at: int) -> None:
        self._inner = build_attention("torch")
        self.write = self._inner.write
        self._calls_left = fails_at

    @property
    def name(self) -> str:
        return self._inner.name

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        self._calls_left -= 1
        if self._calls_left == 0:
            raise ArithmeticError("the kernel was lost")
        return self._inner.forward(query, key_cache, value_cache, metadata, scale, sliding_window, softcap)


def test_a_failure_on_the_device_ends_the_engine_with_its_root_cause_each_time(fault, model) -> None:
    """A51."""
    setup, step_seconds, copy_seconds = fault
    # Three layers: two steps of the warm-up and three of the request pass, then it fails amid the next.
    attention = partial(FailingAttention, 3 * 5 + 2)
    with engine_on(LateCopyDevice(step_seconds, copy_seconds), model, Setup(setup.depth), attention) as engine:
        tokens: list[int] = []
        engine.add(request(1, [3, 4, 5], 20))
        for _ in range(2):
            with pytest.raises(EngineDead, match="the kernel was lost"):
                take_all(engine, tokens)
        # What had resolved before may be shown, or not, if the failure is met at a launch.
        assert len(tokens) <= 3


def take_all(engine: Engine, tokens: list[int]) -> None:
    while engine.has_work:
        tokens += (token_id for output in engine.step() for token_id in output.token_ids)


def test_the_spoiling_device_would_be_noticed() -> None:
    """The faults are real: results are garbage before they are copied, inputs after they were used."""
    device = LateCopyDevice(0.0, 0.2)
    array = np.arange(3)
    launch = device.submit(lambda: device.to_host(device.to_device([array])[0] + 1))
    device.synchronize()
    assert array.tolist() == [SPOILED] * 3
    assert not launch.done()
    assert launch.value().tolist() == [-SPOILED] * 3
    assert launch.wait(10)
    assert launch.value().tolist() == [1, 2, 3]
    assert device.close(10)
