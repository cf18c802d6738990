"""Guided requests in the engine: compiled beside the others, masked, ended, aborted, and gone on with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runnerd_service.config import EngineConfig
from runnerd_service.engine.engine import Engine
from runnerd_service.engine.messages import AddRequest, GuideGrammar, RequestOutput, Sampling
from runnerd_service.engine.setup import resolve, start_engine
from runnerd_service.guided.guide import Guide, Vocabulary
from runnerd_service.guided.notation import to_grammar
from runnerd_spi import PlanChecker, PlanError, Row, StepPlan, TokenMask, load_runner
from runnerd_spi.plan import Admit, BlockGrant, SamplingParams

EOS = 256
BYTES = Vocabulary((*(bytes((one,)) for one in range(EOS)), b"<eos>"), (EOS,))
REGEX = "[a-z]{3}(-[0-9]{2}){1,4}"
MAX_STEPS = 100_000


@contextmanager
def started(depth: int = 1, vocabulary: Vocabulary | None = BYTES, num_blocks: int = 64) -> Iterator[Engine]:
    plugin = load_runner("sim")
    options = {"kv_shadow": "true", "num_blocks": str(num_blocks), "max_model_len": "64"}
    config = EngineConfig(
        runner="sim",
        max_in_flight=depth,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
        runner_options=options,
    )
    one = start_engine(resolve(config, plugin), plugin, lambda *_: None)
    try:
        if vocabulary is not None:
            one.engine.use_vocabulary(vocabulary)
        yield one.engine
        one.engine.check_integrity()
    finally:
        one.runner.close()


def guided(uid: int, guide: Guide | str = REGEX, *, outputs: tuple[int, ...] = (), **sampling: object) -> AddRequest:
    guide = Guide("regex", (guide,)) if isinstance(guide, str) else guide
    return AddRequest(
        uid=uid,
        prompt_token_ids=(104, 105),
        sampling=Sampling(**{"seed": uid} | sampling),
        max_tokens=40,
        eos_token_ids=(EOS,),
        guide=GuideGrammar(to_grammar(guide, ()), guide.field),
        output_token_ids=outputs,
    )


def run(engine: Engine) -> dict[int, tuple[list[int], RequestOutput]]:
    """Step to the end; give each request's tokens and its last output."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, RequestOutput] = {}
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return {uid: (tokens[uid], ends[uid]) for uid in ends}
        for output in engine.step():
            assert output.uid not in ends, "something followed a finish"
            tokens.setdefault(output.uid, []).extend(output.token_ids)
            if output.finish is not None:
                ends[output.uid] = output
    raise AssertionError("the engine comes to no end")


def test_guided_requests_among_others_give_their_form_and_leave_the_others_alone() -> None:
    plain = [AddRequest(uid, (5, uid), Sampling(seed=uid), 12) for uid in (1, 2)]
    with started() as engine:
        for one in plain:
            engine.add(one)
        alone = run(engine)
        for one in (guided(10), plain[0], guided(11, temperature=0.0), plain[1], guided(12)):
            engine.add(one)
        found = run(engine)
    for uid in (10, 11, 12):
        tokens, end = found[uid]
        assert (end.finish, end.matched_token_id) == ("eos", EOS)
        assert re.fullmatch(REGEX, bytes(tokens[:-1]).decode())
    assert [found[uid][0] for uid in (1, 2)] == [alone[uid][0] for uid in (1, 2)]


def test_a_request_goes_on_exactly_from_any_of_its_outputs() -> None:
    with started() as engine:
        engine.add(guided(7))
        whole = run(engine)[7][0]
    for cut in range(len(whole) + 1):
        with started() as engine:
            engine.add(guided(7, outputs=tuple(whole[:cut])))
            rest, end = run(engine).get(7, ([], None))
            assert whole[:cut] + rest == whole
            assert end is not None
            assert end.finish == "eos"


def test_a_request_that_comes_with_a_complete_text_ends_at_once() -> None:
    outputs = tuple(b"abc")
    with started() as engine:
        message = guided(7, "abc", outputs=outputs, min_tokens=9)
        engine.add(message)
        tokens, end = run(engine)[7]
    assert (tokens, end.finish, end.error) == ([], "guide", "")


def test_requests_are_aborted_before_and_after_their_guides_are_compiled() -> None:
    large = Guide("choice", tuple(f"number {number}" for number in range(3000)))
    with started() as engine:
        for uid in range(6):
            engine.add(guided(uid, large))
        engine.add(guided(9))
        assert engine.load().num_waiting == 7
        engine.abort([0, 2, 5])
        found: set[int] = set()
        for _ in range(MAX_STEPS):
            if not engine.has_work:
                break
            found |= {output.uid for output in engine.step()}
            if 9 in found:
                engine.abort([9])
        assert not engine.has_work
        load = engine.load()
    assert {1, 3, 4} <= found <= {1, 3, 4, 9}
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize(("depth", "vocabulary"), [(2, BYTES), (1, None)])
def test_an_engine_that_cannot_follow_a_guide_refuses_it(depth: int, vocabulary: Vocabulary | None) -> None:
    with started(depth, vocabulary) as engine:
        engine.add(guided(1))
        tokens, end = run(engine)[1]
    assert (tokens, end.finish) == ([], "failed")
    assert "guide" in end.error


def test_a_wrong_grammar_fails_its_request_alone() -> None:
    with started() as engine:
        engine.add(guided(1))
        wrong = AddRequest(2, (5,), Sampling(), 4, guide=GuideGrammar("start: nothing", "guided_decoding.grammar"))
        engine.add(wrong)
        found = run(engine)
    assert found[1][1].finish == "eos"
    assert (found[2][1].finish, found[2][1].field) == ("failed", "guided_decoding.grammar")
    assert "nothing" in found[2][1].error


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ((TokenMask(0, 1, bytes(3)),), "no row that samples"),
        ((TokenMask(1, 0, bytes(3)),), "no row that samples"),
        ((TokenMask(0, 0, bytes(3)), TokenMask(0, 0, bytes(3))), "two masks"),
        ((TokenMask(0, 0, bytes(2)),), "2 bytes, expected 3"),
        ((TokenMask(0, 0, bytes((0, 0, 16))),), "beyond 19"),
    ],
)
def test_a_mask_that_fits_no_row_breaks_the_plan(masks: tuple[TokenMask, ...], said: str) -> None:
    checker = PlanChecker(
        max_num_seqs=2, max_num_batched_tokens=8, max_model_len=8, block_size=4, num_blocks=4, vocab_size=20
    )
    admits = tuple(Admit(slot, 0, (1, 2), 2, SamplingParams()) for slot in range(2))
    grants = tuple(BlockGrant(slot, 0, (slot,)) for slot in range(2))
    rows = (Row(0, 0, 2, 0, True), Row(1, 0, 1, 0, False))
    with pytest.raises(PlanError, match=said):
        checker.apply(StepPlan(0, (), admits, grants, rows, masks))
    checker.apply(StepPlan(0, (), admits, grants, rows, (TokenMask(0, 0, bytes((255, 255, 15))),)))
