"""Checks of guided rows: C4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runnerd_spi.plan import Admit, BlockGrant, Release, Row, RowOutput, SamplingParams, TokenMask
from runnerd_spi.testing.driver import Outcome
from runnerd_spi.testing.kit import Kit, difference_of
from runnerd_spi.testing.subject import Broken, NotChecked, Session
from runnerd_spi.testing.traces import TraceRequest

_NUM_OUTPUTS = 8

Allowed = Callable[[int], tuple[int, ...]]
"""Output index to the tokens that a mask allows there."""


def masks_hold(kit: Kit) -> None:
    """C4."""
    kit.require("guided_decoding")
    if kit.subject.depths[0] != 1:
        raise NotChecked("it never runs with one step in flight, and masks come only there")
    vocab_size = kit.sizes.vocab_size

    def some(index: int) -> tuple[int, ...]:
        return tuple(range(index % 2, vocab_size, 2))

    def one(index: int) -> tuple[int, ...]:
        return ((5 * index + 1) % vocab_size,)

    every, third = tuple(range(vocab_size)), tuple(range(1, vocab_size, 3))
    prompt = tuple(index % vocab_size for index in (2, 7, 1))
    for params in _params(kit):
        request = TraceRequest(prompt, _NUM_OUTPUTS, params)
        guided, beside = _run(kit, request, some)
        _check_inside(guided, some)
        _check_same(request, beside, kit.alone(request), "a request beside a guided one")
        _check_inside(_run(kit, request, one)[0], one)
        _check_same(
            request,
            _run(kit, request, lambda _: every)[0],
            kit.alone(request),
            "with masks that allow all",
        )
        if kit.subject.serves("allowed_token_ids"):
            listed = kit.alone(replace(request, params=replace(params, allowed_token_ids=third)))
            _check_same(request, _run(kit, request, lambda _: third)[0], listed, "a mask instead of allowed_token_ids")
    nothing = _run(kit, TraceRequest(prompt, 1, kit.params()), lambda _: ())
    if nothing[0].outputs[0].failure is None or nothing[1].outputs[0].failure is not None:
        raise Broken("a mask that allows no token has to fail its row, and no other")


def _params(kit: Kit) -> list[SamplingParams]:
    found = [kit.params(), kit.drawn(51)]
    if kit.subject.serves("logit_bias"):
        found.append(kit.params(logit_bias={0: 100.0, 1: 100.0}))
    if kit.subject.serves("logprobs"):
        found.append(kit.params(num_logprobs=min(2, kit.subject.plugin.capabilities.max_logprobs)))
    return found


def _run(kit: Kit, request: TraceRequest, allowed: Allowed) -> tuple[Outcome, Outcome]:
    """Run a request twice side by side, the first one guided."""
    with kit.session(1) as session:
        slots = (session.free_slots[1], session.free_slots[0])
        epochs = tuple(map(session.take_epoch, slots))
        admits = tuple(
            Admit(slot, epoch, request.prompt, len(request.prompt), request.params)
            for slot, epoch in zip(slots, epochs, strict=True)
        )
        num_blocks = -(-(len(request.prompt) + request.num_outputs) // session.sizes.block_size)
        grants = tuple(
            BlockGrant(slot, epoch, tuple(session.free_blocks[place * num_blocks : (place + 1) * num_blocks]))
            for place, (slot, epoch) in enumerate(zip(slots, epochs, strict=True))
        )
        outcomes = (Outcome(), Outcome())
        count, first = len(request.prompt), 0
        for index in range(request.num_outputs):
            rows = tuple(Row(slot, epoch, count, first, True) for slot, epoch in zip(slots, epochs, strict=True))
            mask = TokenMask(slots[0], epochs[0], _packed(allowed(index), session))
            output = session.launch(admits=admits, grants=grants, rows=rows, masks=(mask,)).take()
            for outcome, row in zip(outcomes, output.rows, strict=True):
                outcome.outputs.append(row)
            admits, grants = (), ()
            first, count = first + count, 1
        session.launch(releases=tuple(Release(*one) for one in zip(slots, epochs, strict=True))).take()
    return outcomes


def _packed(token_ids: tuple[int, ...], session: Session) -> bytes:
    allowed = bytearray(-(-session.sizes.vocab_size // 8))
    for token_id in token_ids:
        allowed[token_id // 8] |= 1 << token_id % 8
    return bytes(allowed)


def _check_inside(outcome: Outcome, allowed: Allowed) -> None:
    for index, output in enumerate(outcome.outputs):
        if output.token_id not in allowed(index):
            raise Broken(
                f"output {index} is {_shown(output)}, which its mask does not allow: it allows {allowed(index)}"
            )


def _check_same(request: TraceRequest, got: Outcome, expected: Outcome, what: str) -> None:
    if difference := difference_of(request, got, expected):
        raise Broken(f"{what}: {difference}")


def _shown(output: RowOutput) -> str:
    return f"a failure ({output.failure})" if output.failure is not None else f"token {output.token_id}"
