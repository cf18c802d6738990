"""Failure cases of overlapped execution on the simulated runner: aborts, slots, blocks, buffers and failures.

The cases are those of docs/async-cases.md; each test names its own. The simulated KV cache checks the history of every
row (``kv_shadow``), so a block that is given away too early is an error of the step that reads it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine, EngineDead, EngineLimits
from runnerd_service.engine.messages import AddRequest, RequestOutput, Sampling
from runnerd_service.engine.setup import resolve
from runnerd_sim.plugin import SIM
from runnerd_spi import ModelRunner, Row, RunnerConfig, StepHandle, StepOutput, StepPlan, StepTimeline

EOS = 256
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])
LATE_COPY = {"copy_seconds": 0.003}

Watch = Callable[[str, int], None]
"""Called with "launch" or "result" and a step id."""


class WatchedHandle:
    """A handle that tells when its result is asked for, and is not seen done before if it is ``late``."""

    def __init__(self, handle: StepHandle, watch: Watch, late: bool) -> None:
        self._handle, self._watch, self._late = handle, watch, late

    @property
    def step_id(self) -> int:
        return self._handle.step_id

    @property
    def timeline(self) -> StepTimeline:
        return self._handle.timeline

    def done(self) -> bool:
        return not self._late and self._handle.done()

    def result(self, timeout: float | None = None) -> StepOutput:
        self._watch("result", self._handle.step_id)
        return self._handle.result(timeout)


class WatchedRunner:
    """A runner that keeps the plans it hands on and tells of launches."""

    def __init__(self, runner: ModelRunner, watch: Watch, late: bool) -> None:
        self.load, self.profile, self.init_kv_cache = runner.load, runner.profile, runner.init_kv_cache
        self.warm_up, self.close = runner.warm_up, runner.close
        self.plans: list[StepPlan] = []
        self._runner, self._watch, self._late = runner, watch, late

    def execute_model(self, plan: StepPlan) -> StepHandle:
        self._watch("launch", plan.step_id)
        handle = self._runner.execute_model(plan)
        self.plans.append(plan)
        return WatchedHandle(handle, self._watch, self._late)

    def rows(self) -> list[Row]:
        return [row for plan in self.plans for row in plan.rows]


@dataclass
class Bench:
    """An engine, what its runner was told, and what came out."""

    engine: Engine
    runner: WatchedRunner
    outputs: dict[int, list[RequestOutput]] = field(default_factory=dict)

    def add(self, uid: int, prompt: str = "hello", max_tokens: int = 8, **sampling: object) -> None:
        params = {"temperature": 0.0, **sampling}
        self.engine.add(
            AddRequest(uid, tuple(prompt.encode()), Sampling(**params), max_tokens, eos_token_ids=(EOS,))  # type: ignore[arg-type]
        )

    def step(self, count: int = 1, host_seconds: float = 0.0) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.outputs.setdefault(output.uid, []).append(output)
            self.engine.check_integrity()
            time.sleep(host_seconds)

    def drain(self, host_seconds: float = 0.0) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.step(1, host_seconds)
        load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_unresolved_steps) == (0, 0, 0, 0)

    def tokens(self, uid: int) -> list[int]:
        return [token_id for output in self.outputs.get(uid, []) for token_id in output.token_ids]


@contextmanager
def bench(
    depth: int,
    *,
    max_num_seqs: int = 4,
    num_blocks: int = 64,
    watch: Watch = lambda event, step_id: None,
    late: bool = True,
    **options: str | float | int,
) -> Iterator[Bench]:
    config = RunnerConfig(
        max_num_seqs,
        16,
        4,
        max_model_len=64,
        max_in_flight=depth,
        options={"kv_shadow": True, "num_blocks": num_blocks, "eos_bias": -50.0, **options},
    )
    runner = WatchedRunner(SIM.create(config), watch, late)
    info = runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(num_blocks)
    runner.warm_up()
    limits = EngineLimits(
        vocab_size=info.vocab_size,
        max_model_len=64,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_in_flight=depth,
    )
    try:
        yield Bench(Engine(runner, limits), runner)
    finally:
        runner.close()


def alone(prompt: str, max_tokens: int, **sampling: object) -> list[int]:
    with bench(1) as one:
        one.add(0, prompt, max_tokens, **sampling)
        one.drain()
        return one.tokens(0)


# Aborts and ids


@DEPTHS
@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_around_the_steps_of_an_eos_frees_everything_once(depth: int, num_steps: int) -> None:
    """A22, A25: before the step that gives EOS is launched, while it is in flight, and after."""
    with bench(depth, script="abc", **LATE_COPY) as one:
        one.add(1, max_tokens=20)
        one.add(2, "other", 20)
        one.step(num_steps)
        one.engine.abort([1])
        one.engine.abort([1])
        num_shown = len(one.outputs.get(1, []))
        one.drain()
        assert one.tokens(2) == [*b"abc", EOS]
        assert len(one.outputs.get(1, [])) == num_shown
        one.add(3, "all of the cache is free again", 34)
        one.drain()
        assert len(one.tokens(3)) == 4


@DEPTHS
def test_a_uid_that_is_used_again_gets_nothing_of_its_former_request(depth: int) -> None:
    """A23, A24: the old request's frames are in flight when the new one of the same name is admitted to its slot."""
    expected = alone("new", 6, temperature=1.0, seed=9)
    with bench(depth, max_num_seqs=1, **LATE_COPY) as one:
        for _ in range(5):
            one.outputs.clear()
            one.add(1, "an old prompt of another length", 30, temperature=1.0, seed=1)
            one.step(4)
            one.engine.abort([1])
            one.outputs.clear()
            one.add(1, "new", 6, temperature=1.0, seed=9)
            one.drain()
            assert one.tokens(1) == expected


@DEPTHS
def test_the_slot_of_an_aborted_request_is_free_within_depth_plus_one_steps(depth: int) -> None:
    """A26: and its blocks, as soon as what was launched for it has resolved."""
    with bench(depth, max_num_seqs=2, **LATE_COPY) as one:
        one.add(1, "goes away", 40)
        one.add(2, "stays", 40)
        one.step(6)
        one.engine.abort([1])
        assert one.engine.load().num_running == 1
        one.step(depth + 1)
        released = {release.epoch for plan in one.runner.plans for release in plan.releases}
        assert released == {0}
        # 5 prompt tokens and what was generated; the other's blocks are not among them.
        assert one.engine.load().num_used_blocks <= (5 + 8 + depth) // 4 + 1
        one.drain()
        assert one.tokens(2) == alone("stays", 40)


@DEPTHS
def test_a_request_runs_after_twice_as_many_aborts_as_there_are_slots(depth: int) -> None:
    """A27: running ones and waiting ones, with their steps in flight."""
    with bench(depth, max_num_seqs=3, **LATE_COPY) as one:
        for uid in range(6):
            one.add(uid, f"prompt {uid}", 20)
            one.step(uid % 3)
        one.engine.abort(range(6))
        one.outputs.clear()
        one.add(7, "the last", 5)
        one.drain()
        assert list(one.outputs) == [7]
        assert one.tokens(7) == alone("the last", 5)


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("aborted", [0, 1])
def test_room_that_an_abort_makes_for_a_preempted_request_is_taken_after_its_rows_have_resolved(
    depth: int, aborted: int
) -> None:
    """A15, A22: there is room for the request at once, but tokens of it are still in flight."""
    how: dict[str, object] = {"temperature": 1.0, "frequency_penalty": 1.0}
    expected = {uid: alone(f"prompt number {uid}", 24, seed=uid, **how) for uid in range(3)}
    with bench(depth, num_blocks=17, step_seconds=0.001, **LATE_COPY) as one:
        for uid in range(3):
            one.add(uid, f"prompt number {uid}", 24, seed=uid, **how)
        while not one.engine.load().num_preemptions:
            one.step()
        one.engine.abort([aborted])
        one.drain()
        for uid in {0, 1, 2} - {aborted}:
            assert one.tokens(uid) == expected[uid]
        assert one.engine.load().generation_tokens == sum(len(one.tokens(uid)) for uid in range(3))


# Buffers and streams


@DEPTHS
@pytest.mark.parametrize("slow", [{"copy_seconds": 0.005}, {"step_seconds": 0.003}, {}])
def test_parameters_that_change_with_every_step_apply_to_their_own_rows(depth: int, slow: dict[str, float]) -> None:
    """A28, A31: requests enter and leave the two slots all the time, each with parameters of its own."""
    asked: dict[int, tuple[str, int, dict[str, object]]] = {
        uid: (
            f"prompt {uid}",
            1 + uid % 4,
            {
                "temperature": (0.0, 0.7, 1.5)[uid % 3],
                "seed": uid,
                "top_k": (0, 3)[uid % 2],
                "frequency_penalty": (0.0, 1.0, -1.0)[uid % 3],
                "allowed_token_ids": (None, tuple(range(97, 123)), (65, 66))[uid % 3],
                "num_logprobs": (None, 2)[uid % 2],
            },
        )
        for uid in range(16)
    }
    expected = {uid: alone(prompt, most, **how) for uid, (prompt, most, how) in asked.items()}
    with bench(depth, max_num_seqs=2, **slow) as one:
        for uid, (prompt, most, how) in asked.items():
            one.add(uid, prompt, most, **how)
            one.step()
        one.drain()
        assert {uid: one.tokens(uid) for uid in asked} == expected


@DEPTHS
def test_steps_without_rows_between_others_disturb_nothing(depth: int) -> None:
    """A29: a step that only gives slots back, between real ones, back to back."""
    with bench(depth, max_num_seqs=1, **LATE_COPY) as one:
        for uid in range(6):
            one.add(uid, f"prompt {uid}", 2, temperature=1.0, seed=uid)
            one.drain()
        assert [bool(plan.rows) for plan in one.runner.plans] == [True, True, False] * 6
        for uid in range(6):
            assert one.tokens(uid) == alone(f"prompt {uid}", 2, temperature=1.0, seed=uid)


@DEPTHS
def test_a_row_that_takes_the_slot_of_one_that_left_has_nothing_of_it(depth: int) -> None:
    """A31: one slot, requests of other lengths and parameters one after the other, each one's last row in flight."""
    with bench(depth, max_num_seqs=1, script="abcdef", **LATE_COPY) as one:
        for uid in range(8):
            one.add(uid, "x" * (1 + 5 * (uid % 3)), 3 + uid % 4, num_logprobs=uid % 2)
        one.drain()
        for uid in range(8):
            assert bytes(one.tokens(uid)) == b"abcdef"[: 3 + uid % 4]
            assert {len(output.logprobs[0].top) for output in one.outputs[uid]} == {uid % 2}


@DEPTHS
def test_a_fast_host_and_a_stalled_device_come_to_an_end(depth: int) -> None:
    """A32: the host is ahead by all the steps it may be, one of which takes long."""
    with bench(depth, late=False, step_seconds=0.001, stall_at_step=4, stall_seconds=0.3, script="abcdefghij") as one:
        one.add(1, max_tokens=10)
        one.drain()
        assert bytes(one.tokens(1)) == b"abcdefghij"


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_the_host_never_waits_for_a_step_before_the_next_one_is_launched(depth: int) -> None:
    """A33: while there is something to launch, so many steps are on the device when a result is asked for."""
    events: list[tuple[str, int]] = []
    logprobs = {"num_logprobs": 2, "num_prompt_logprobs": 1, "frequency_penalty": 1.0}
    with bench(depth, watch=lambda event, step_id: events.append((event, step_id))) as one:
        for uid in range(4):
            one.add(uid, f"prompt {uid}", 20, temperature=1.0, **logprobs)
        one.drain()
        last = max(plan.step_id for plan in one.runner.plans if plan.rows)
    launched = -1
    num_waits = 0
    for event, step_id in events:
        if event == "launch":
            launched = step_id
        elif launched < last:
            assert launched >= step_id + depth - 1
            num_waits += 1
    assert num_waits >= 18


# KV memory


@DEPTHS
def test_blocks_come_back_only_when_the_last_step_that_writes_to_them_has_resolved(depth: int) -> None:
    """A36: EOS is known while later rows of the request are in flight; what they write must hit no new request."""
    with bench(depth, num_blocks=17, script="ab", **LATE_COPY) as one:
        one.add(0, "a prompt of some blocks", 20)
        while not (one.outputs.get(0) and one.outputs[0][-1].finish):
            one.step()
        for num_late in range(depth - 1, 0, -1):
            assert one.engine.load().num_unresolved_steps == num_late
            assert one.engine.load().num_used_blocks >= 7
            one.step()
        assert one.engine.load().num_used_blocks == 0
        # And with others that wait for these blocks.
        for uid in range(1, 12):
            one.add(uid, f"a prompt of some blocks {uid}", 20)
        one.drain()
        assert all(one.tokens(uid) == [*b"ab", EOS] for uid in range(12))


@DEPTHS
def test_a_prefix_of_a_request_with_late_rows_is_shared_right(depth: int) -> None:
    """A36, A42: what late rows wrote is never taken for a settled prefix."""
    text = "0123456789ab"
    with bench(depth, script="wxyz", **LATE_COPY) as one:
        one.add(1, text, 20)
        one.drain()
        # Whoever goes on with the first one's outputs finds its settled blocks, and none that a late row wrote.
        one.add(2, text + "wxyz" + "0123", 3)
        one.add(3, text + "wxyw" + "0123", 3)
        one.drain()
        cached = {uid: max(output.num_cached_tokens for output in one.outputs[uid]) for uid in (2, 3)}
        assert cached == {2: 16, 3: 12}
        assert bytes(one.tokens(2)) == bytes(one.tokens(3)) == b"wxy"


@pytest.mark.parametrize("depth", [2, 4])
def test_after_a_thousand_requests_of_all_ends_every_pool_is_full_again(depth: int) -> None:
    """A40: by length, by EOS, by abort, by failure, with and without preemption."""
    with bench(depth, num_blocks=17, fail_row_token="#") as one:
        for uid in range(1000):
            prompt = "row # fails" if uid % 10 == 3 else f"{uid % 7} prompt"
            how: dict[str, object] = {"logit_bias": {EOS: 200.0}, "min_tokens": uid % 3} if uid % 5 == 1 else {}
            one.add(uid, prompt, 1 + uid % 31, temperature=1.0, seed=uid, **how)
            one.step()
            if uid % 4 == 0:
                one.engine.abort([uid - uid % 8])
        one.drain()
        load = one.engine.load()
        assert load.num_preemptions > 0
        assert {outputs[-1].finish for outputs in one.outputs.values()} >= {"length", "eos", "failed"}
        admitted = sorted((admit.slot, admit.epoch) for plan in one.runner.plans for admit in plan.admits)
        released = sorted((release.slot, release.epoch) for plan in one.runner.plans for release in plan.releases)
        assert admitted == released
        # The whole cache serves one request.
        one.add(1000, "x" * 30, 34)
        one.drain()
        assert len(one.tokens(1000)) == 34


# Control and errors


class SubmitFault(Exception):
    """Raised by a runner's ``execute_model``."""


class ResolveFault(Exception):
    """Raised by a handle's ``result``."""


@DEPTHS
@pytest.mark.parametrize("where", ["submit", "device", "resolve"])
def test_a_failure_ends_the_engine_at_once_with_its_root_cause_each_time(depth: int, where: str) -> None:
    """A51."""

    def watch(event: str, step_id: int) -> None:
        if where == "submit" and event == "launch" and step_id >= 2:
            raise SubmitFault("no memory for the launch")
        if where == "resolve" and event == "result" and step_id >= 2:
            raise ResolveFault("the copy was lost")

    cause = {
        "submit": "no memory for the launch",
        "device": "simulated device fault at step 2",
        "resolve": "the copy was lost",
    }[where]
    # Whatever else is on the device then is not waited for.
    fault: dict[str, int] = {"fail_at_step": 2, "stall_at_step": 4, "stall_seconds": 3600} if where == "device" else {}
    with bench(depth, watch=watch, **fault) as one:
        one.add(1, max_tokens=20)
        one.add(2, "other", 20)
        for _ in range(2):
            with pytest.raises(EngineDead, match=cause):
                one.drain()
        assert all(len(one.tokens(uid)) <= 2 for uid in (1, 2))


@pytest.mark.parametrize(("asked", "depth"), [("auto", 2), ("required", 2), ("off", 1)])
def test_the_mode_that_was_asked_for_is_the_mode_that_runs(asked: str, depth: int) -> None:
    """A52: asked for, resolved, and seen in what the host does."""
    config = EngineConfig(runner="sim", async_execution=asked)  # type: ignore[arg-type]
    resolved = resolve(config, SIM)
    assert resolved.async_effective == (depth > 1)
    most = 0
    with bench(resolved.runner_config.max_in_flight) as one:
        one.add(1, max_tokens=10)
        while one.engine.has_work:
            one.step()
            most = max(most, one.engine.load().num_unresolved_steps)
    # Between two steps one place is free for the next launch.
    assert most == depth - 1
