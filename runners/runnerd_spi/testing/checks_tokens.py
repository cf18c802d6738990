"""Checks of what a request gets, and of what else is in the batch: S0 to S4, S7, T1."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from runnerd_spi.plan import RowOutput, SamplingParams
from runnerd_spi.testing.driver import TraceRun
from runnerd_spi.testing.kit import Kit
from runnerd_spi.testing.subject import HISTORY_FEATURES, MAX_NUM_SEQS, Broken
from runnerd_spi.testing.traces import GREEDY, Trace, TraceRequest, random_trace


def tokens_are_reproducible(kit: Kit) -> None:
    """S0: what the first request after warm-up finds, and what errors come up, is the business of other rules."""
    runs: list[list[int | None]] = []
    with suppress(Exception), kit.session(fresh=True) as session:
        request = TraceRequest((1, 0, 1), 8, kit.drawn(5))
        for _ in range(4):
            [outcome] = TraceRun(session, Trace(session.config.max_in_flight, (request,), settle_early=True)).run()
            runs.append(outcome.token_ids)
    _, *again = runs or [[]]
    if any(one != again[0] for one in again):
        raise Broken(f"one request, alone each time, gave {', then '.join(map(str, again))}")


def only_sampling_rows_sample(kit: Kit) -> None:
    """S1: rows without ``sample`` return nothing and change nothing; what the others sample is read by later rows."""
    _sampled_tokens_are_read(kit)
    if not kit.subject.serves("chunked_prefill"):
        return
    sizes = kit.sizes
    prompt = tuple(index % sizes.vocab_size for index in range(9))
    for params in (GREEDY, kit.drawn(11), *_history_params(kit, kit.drawn(12))):
        request = TraceRequest(prompt, 8, params)
        kit.check(Trace(kit.subject.depths[0], (request,), chunk=2))
        # The last position once without and once with ``sample``: the first must leave no trace.
        kit.check(Trace(kit.subject.depths[0], (replace(request, dry_rows=True),)))
        kit.check(Trace(kit.subject.depths[0], (replace(request, dry_rows=True),), chunk=3))


def _sampled_tokens_are_read(kit: Kit) -> None:
    """What a request samples has to count as if it had come with the request."""
    for prompt in ((1,), (0, 1, 1), (3, 2, 1, 0)):
        tokens = [token for token in kit.tokens_alone(prompt, 6, kit.params()) if token is not None]
        for num_given in (1, 3):
            given, rest = tuple(tokens[:num_given]), tokens[num_given:]
            with kit.session() as session:
                request = TraceRequest(prompt, len(rest), kit.params(), given=given)
                trace = Trace(session.config.max_in_flight, (request,), settle_early=True)
                [outcome] = TraceRun(session, trace).run()
            if outcome.token_ids != rest:
                raise Broken(
                    f"prompt {list(prompt)}, greedy, gave {tokens}; admitted behind the first {num_given} of them, it "
                    f"went on with {outcome.token_ids}, expected {rest}: later rows do not read what was sampled, or "
                    "read something else"
                )


def tokens_are_of_the_request(kit: Kit) -> None:
    """S2: what each cause could change, one at a time, in slots that served nobody before."""
    for trace in _by_hand(kit):
        kit.check(trace)
    _restart(kit)


def random_traces_are_equal(kit: Kit) -> None:
    """T1."""
    deadline = time.monotonic() + kit.seconds
    for number in range(kit.num_traces):
        if time.monotonic() > deadline:
            break
        kit.check(random_trace(kit.seed + number, kit.subject, kit.sizes))


def history_is_complete(kit: Kit) -> None:
    """S3: with as many steps unresolved as can be, the history is that of a runner that waits for each."""
    kit.require(*HISTORY_FEATURES)
    prompt = tuple(index % kit.sizes.vocab_size for index in (3, 1, 4, 1, 5))
    for depth in kit.subject.depths:
        for base in (kit.params(), kit.drawn(21)):
            for params in _history_params(kit, base):
                kit.check(Trace(depth, (TraceRequest(prompt, 12, params),)))
        _bans_hold(kit, prompt, depth)


def ids_are_in_the_vocabulary(kit: Kit) -> None:
    """S4."""
    sizes = kit.sizes
    fields: dict[str, object] = {}
    if kit.subject.serves("logprobs"):
        fields["num_logprobs"] = kit.subject.plugin.capabilities.max_logprobs
    if kit.subject.serves("prompt_logprobs"):
        fields["num_prompt_logprobs"] = min(2, kit.subject.plugin.capabilities.max_logprobs)
    for depth in kit.subject.depths:
        requests = tuple(
            TraceRequest((seed % sizes.vocab_size,) * (1 + seed), 10, replace(kit.drawn(seed), **fields))  # type: ignore[arg-type]
            for seed in range(5)
        )
        with kit.session(depth) as session:
            run = TraceRun(session, Trace(depth, requests, chunk=3))
            run.run()
            for launched in run.launched:
                for row, output in zip(launched.plan.rows, launched.take().rows, strict=True):
                    for token in _ids(output):
                        if type(token) is not int or not 0 <= token < sizes.vocab_size:
                            raise Broken(
                                f"step {launched.plan.step_id}, slot {row.slot}: token id {token!r}, expected an "
                                f"int in 0 to {sizes.vocab_size - 1}"
                            )


def launched_work_runs_on(kit: Kit) -> None:
    """S7: cancel at each point, and give slot and blocks to the next request at once."""
    sizes = kit.sizes
    prompt = tuple(index % sizes.vocab_size for index in range(7))
    chunk = 3 if kit.subject.serves("chunked_prefill") else 1 << 30
    for depth in kit.subject.depths:
        for cancel_after in range(7):
            gone = TraceRequest(prompt, 12, kit.drawn_with_history(31), cancel_after=cancel_after)
            # Four slots and eight requests: whoever comes next takes the slot of one that is gone, with rows in flight.
            # Its prompt is the longer one: what is written late must not land in it.
            after = TraceRequest((prompt * 3)[:16], 6, kit.drawn_with_history(32))
            stays = TraceRequest(prompt[2:], 10, kit.drawn(33))
            kit.check(Trace(depth, (stays, gone, gone, gone, after, after, after), chunk=chunk))


def _by_hand(kit: Kit) -> Iterator[Trace]:
    sizes = kit.sizes
    prompt = tuple(index % sizes.vocab_size for index in range(2 * sizes.block_size + 3))
    chunks = (1, 2, 5) if kit.subject.serves("chunked_prefill") else (1 << 30,)
    one = TraceRequest(prompt, 8, kit.drawn(41))
    for depth in kit.subject.depths:
        yield Trace(depth, (one,))
        yield Trace(depth, tuple(TraceRequest(prompt[index:], 8, kit.drawn(42)) for index in range(MAX_NUM_SEQS)))
        for chunk in chunks:
            yield Trace(depth, (one, replace(one, arrival=2)), chunk=chunk)
        if kit.subject.serves("prefix_caching"):
            yield Trace(depth, (one, replace(one, params=kit.drawn(43), arrival=2, shares_with=0)))


def _restart(kit: Kit) -> None:
    """What a runner gave goes on in another one, from its settled tokens."""
    prompt, params = (1, 0, 1, 1), kit.drawn(44)
    whole = kit.alone(TraceRequest(prompt, 8, params))
    if None in whole.token_ids:
        return
    with kit.session(fresh=True) as session:
        given = tuple(token for token in whole.token_ids[:4] if token is not None)
        request = TraceRequest(prompt, 4, params, given=given)
        [rest] = TraceRun(session, Trace(session.config.max_in_flight, (request,))).run()
    if rest.token_ids != whole.token_ids[4:]:
        raise Broken(
            f"a request of {len(prompt)} prompt tokens gave {whole.token_ids}; admitted with 4 of them to a new runner "
            f"it went on with {rest.token_ids}"
        )


def _history_params(kit: Kit, base: SamplingParams) -> list[SamplingParams]:
    vocab_size = kit.sizes.vocab_size
    fields: dict[str, dict[str, object]] = {
        "repetition_penalty": {"repetition_penalty": 1.7},
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 2.0},
        "bad_words": {"bad_words_token_ids": tuple((0, token) for token in range(0, vocab_size, 2))},
        "min_tokens": {"min_tokens": 4, "stop_token_ids": tuple(range(0, vocab_size, 2))},
    }
    return [replace(base, **fields[name]) for name in HISTORY_FEATURES if kit.subject.serves(name)]  # type: ignore[arg-type]


def _bans_hold(kit: Kit, prompt: tuple[int, ...], depth: int) -> None:
    """Ban what the runner would say, and see that it does not."""
    plain = [token for token in kit.tokens_alone(prompt, 12, GREEDY) if token is not None]
    if kit.subject.serves("bad_words"):
        for before, last in pairwise(plain):
            got = _run_one(kit, depth, TraceRequest(prompt, 12, kit.params(bad_words_token_ids=((before, last),))))
            for index, pair in enumerate(pairwise(got)):
                if pair == (before, last):
                    raise Broken(
                        f"with {depth} in flight, outputs {index} and {index + 1} are {pair}, which "
                        f"bad_words_token_ids {((before, last),)} bans; the outputs: {got}"
                    )
    if kit.subject.serves("min_tokens"):
        params = kit.params(min_tokens=5, stop_token_ids=tuple(set(plain[:3])))
        got = _run_one(kit, depth, TraceRequest(prompt, 12, params))
        for index, token in enumerate(got[:5]):
            if token in params.stop_token_ids:
                raise Broken(
                    f"with {depth} in flight, output {index} is the stop token {token}, but min_tokens is 5; the "
                    f"outputs: {got}"
                )


def _run_one(kit: Kit, depth: int, request: TraceRequest) -> list[int | None]:
    with kit.session(depth) as session:
        [outcome] = TraceRun(session, Trace(depth, (request,))).run()
    return outcome.token_ids


def _ids(output: RowOutput) -> Iterator[object]:
    if output.token_id is not None:
        yield output.token_id
    records = output.prompt_logprobs if output.logprobs is None else (output.logprobs, *output.prompt_logprobs)
    for record in records:
        yield record.token_id
        yield from (token for token, _ in record.top)
