"""The simulated KV cache shows planted mistakes of a block manager: as other tokens, with the shadow as errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runnerd_sim.kv_cache import KVShadowError
from runnerd_sim.plugin import SIM
from runnerd_spi import (
    Admit,
    BlockGrant,
    ModelRunner,
    Release,
    Row,
    RunnerConfig,
    SamplingParams,
    StepFailed,
    StepPlan,
)

GREEDY = SamplingParams(temperature=0)
PROMPT = tuple(b"the same eight")  # 14 tokens: three full blocks of 4 and a half


class Driver:
    """Sends plans one by one and reads each."""

    def __init__(self, *, kv_shadow: bool) -> None:
        config = RunnerConfig(4, 64, 4, max_model_len=32, max_in_flight=2, options={"kv_shadow": kv_shadow})
        self.runner: ModelRunner = SIM.create(config)
        self.runner.load(lambda stage, done, total: None)
        self.runner.profile()
        self.runner.init_kv_cache(16)
        self.runner.warm_up()
        self.step_id = 0

    def step(
        self,
        *rows: Row,
        admits: tuple[Admit, ...] = (),
        grants: tuple[BlockGrant, ...] = (),
        releases: tuple[Release, ...] = (),
    ) -> list[int | None]:
        plan = StepPlan(self.step_id, releases, admits, grants, rows)
        self.step_id += 1
        return [row.token_id for row in self.runner.execute_model(plan).result(10.0).rows]

    def prefill(
        self, slot: int, epoch: int, blocks: tuple[int, ...], prompt: tuple[int, ...] = PROMPT, cached: int = 0
    ) -> list[int | None]:
        return self.step(
            Row(slot, epoch, len(prompt) - cached, cached, True),
            admits=(Admit(slot, epoch, prompt, len(prompt), GREEDY),),
            grants=(BlockGrant(slot, epoch, blocks),),
        )


@pytest.fixture
def shadow() -> Iterator[Driver]:
    driver = Driver(kv_shadow=True)
    yield driver
    driver.runner.close()


@pytest.fixture
def plain() -> Iterator[Driver]:
    driver = Driver(kv_shadow=False)
    yield driver
    driver.runner.close()


@contextmanager
def expect_error(message: str) -> Iterator[None]:
    with pytest.raises(StepFailed, match=message) as caught:
        yield
    assert caught.value.fatal
    assert isinstance(caught.value.__cause__, KVShadowError)


def test_a_cached_prefix_gives_the_tokens_of_a_computed_one(shadow: Driver) -> None:
    computed = shadow.prefill(0, 1, (0, 1, 2, 3))
    assert shadow.prefill(1, 1, (0, 1, 2, 4), cached=12) == computed
    assert shadow.step(Row(0, 1, 1, 14, True), Row(1, 1, 1, 14, True))[0] is not None


def test_a_prefix_outlives_the_request_that_filled_it(shadow: Driver) -> None:
    computed = shadow.prefill(0, 1, (0, 1, 2, 3))
    shadow.step(releases=(Release(0, 1),))
    assert shadow.prefill(0, 2, (0, 1, 2, 9), cached=12) == computed


def test_computing_a_shared_block_again_with_the_same_tokens_is_harmless(shadow: Driver) -> None:
    computed = shadow.prefill(0, 1, (0, 1, 2, 3))
    assert shadow.prefill(1, 1, (0, 1, 2, 4), cached=8) == computed


def test_the_wrong_prefix_block_is_an_error_that_names_its_writer(shadow: Driver) -> None:
    shadow.prefill(0, 1, (0, 1, 2, 3))
    with expect_error(r"slot 1 epoch 5 reads position 8, token 32, but block 1 offset 0 holds .* slot 0 epoch 1 "):
        shadow.prefill(1, 5, (0, 1, 1, 4), cached=12)


def test_a_wrong_block_early_in_the_prefix_is_found_although_the_last_one_is_right(shadow: Driver) -> None:
    shadow.prefill(0, 1, (0, 1, 2, 3))
    with expect_error(r"reads position 0, .* block 2 offset 0 holds .* position 8"):
        shadow.prefill(1, 1, (2, 1, 2, 4), cached=12)


def test_the_same_tokens_after_another_beginning_are_another_prefix(shadow: Driver) -> None:
    shadow.prefill(0, 1, (0, 1, 2, 3))
    other = (PROMPT[0] + 1, *PROMPT[1:])
    with expect_error(r"reads position 4, "):
        shadow.step(
            Row(1, 1, 4, 0, False),
            Row(2, 1, 6, 8, True),
            admits=(Admit(1, 1, other, 14, GREEDY), Admit(2, 1, other, 14, GREEDY)),
            grants=(BlockGrant(1, 1, (4,)), BlockGrant(2, 1, (4, 1, 5, 6))),
        )


def test_reading_before_writing_is_an_error(shadow: Driver) -> None:
    with expect_error(r"reads position 0, token 116, but block 0 offset 0 was never written"):
        shadow.prefill(0, 1, (0, 1, 2, 3), cached=4)


def test_skipping_a_token_is_an_error(shadow: Driver) -> None:
    shadow.step(
        Row(0, 1, 4, 0, False),
        admits=(Admit(0, 1, PROMPT, 14, GREEDY),),
        grants=(BlockGrant(0, 1, (0, 1, 2, 3)),),
    )
    with expect_error(r"reads position 4, .* was never written"):
        shadow.step(Row(0, 1, 9, 5, True))


def test_writing_into_a_block_that_another_request_reads_is_an_error(shadow: Driver) -> None:
    shadow.prefill(0, 1, (0, 1, 2, 3))
    with expect_error(r"slot 1 epoch 1 writes position 0 into a block that another request holds: block 3 "):
        shadow.prefill(1, 1, (3, 4, 5, 6))


def test_reading_a_block_after_it_was_freed_and_filled_by_another_request_is_an_error(shadow: Driver) -> None:
    shadow.prefill(0, 1, (0, 1, 2, 3))
    shadow.step(releases=(Release(0, 1),))
    shadow.prefill(1, 1, (2, 5, 6, 7), prompt=tuple(b"quite another!"))
    with expect_error(r"reads position 8, .* holds the history that slot 1 epoch 1 wrote at position 0"):
        shadow.prefill(0, 2, (0, 1, 2, 4), cached=12)


def test_one_block_twice_in_a_table_is_an_error(shadow: Driver) -> None:
    with expect_error(r"reads position 0, "):
        shadow.prefill(0, 1, (0, 1, 0, 3))


def test_a_freed_block_may_be_overwritten(shadow: Driver) -> None:
    shadow.prefill(0, 1, (0, 1, 2, 3))
    shadow.step(releases=(Release(0, 1),))
    first = shadow.prefill(0, 2, (3, 2, 1, 0), prompt=tuple(b"quite another!"))
    assert first == shadow.prefill(1, 1, (4, 5, 6, 7), prompt=tuple(b"quite another!"))


def test_without_the_shadow_a_wrong_last_prefix_block_gives_other_tokens(plain: Driver) -> None:
    computed = plain.prefill(0, 1, (0, 1, 2, 3))
    assert plain.prefill(1, 1, (0, 1, 2, 4), cached=12) == computed
    assert plain.prefill(2, 1, (0, 2, 1, 5), cached=12) != computed


def test_without_the_shadow_a_skipped_token_gives_other_tokens(plain: Driver) -> None:
    computed = plain.prefill(0, 1, (0, 1, 2, 3))
    assert plain.prefill(1, 1, (4, 5, 6, 7), cached=1) != computed
