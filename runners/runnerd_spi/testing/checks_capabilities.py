"""Checks of what a runner declares: C1 to C3."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from runnerd_spi.errors import PlanError, RunnerError
from runnerd_spi.plan import SamplingParams, TokenLogprobs
from runnerd_spi.runner import RunnerConfig
from runnerd_spi.testing.driver import TraceRun
from runnerd_spi.testing.kit import LOGPROB_TOLERANCE, Kit
from runnerd_spi.testing.subject import Broken, no_progress
from runnerd_spi.testing.traces import Trace, TraceRequest

_NUM_PROMPTS = 4
_NUM_OUTPUTS = 12
_HUGE = 100.0

Tokens = list[list[int | None]]


def what_is_declared_has_an_effect(kit: Kit) -> None:
    """C1."""
    greedy, plain = _tokens(kit, kit.params()), _tokens(kit, kit.drawn(1))
    if kit.subject.serves("temperature"):
        _check_draws(kit, greedy)
    for feature, params in _visible(kit, plain):
        if kit.subject.serves(feature) and _tokens(kit, params) == plain:
            raise Broken(
                f"{feature} is declared as served, but {_asked(params)} changed none of {_NUM_PROMPTS} outputs of "
                f"{_NUM_OUTPUTS} tokens"
            )
    _check_bans(kit, greedy)


def what_is_denied_has_none(kit: Kit) -> None:
    """C2."""
    _check_configurations(kit)
    plain = _tokens(kit, kit.drawn(1))
    for feature, params in _visible(kit, plain):
        if kit.subject.serves(feature):
            continue
        try:
            with kit.session(fresh=True) as session:
                requests = [TraceRequest(prompt, _NUM_OUTPUTS, params) for prompt in _prompts(kit)]
                runs = [TraceRun(session, Trace(session.config.max_in_flight, (one,))).run() for one in requests]
        except PlanError:
            continue
        got = [outcome.token_ids for [outcome] in runs]
        failed = all(outcome.outputs[0].failure is not None for [outcome] in runs)
        if not failed and got != plain:
            raise Broken(f"{feature} is declared as `no`, but {_asked(params)} changes the tokens: declare it")


def logprobs_are_right(kit: Kit) -> None:
    """C3."""
    kit.require("logprobs", "prompt_logprobs")
    most = min(3, kit.subject.plugin.capabilities.max_logprobs)
    for count in {0, most}:
        if kit.subject.serves("logprobs"):
            _check_logprobs(kit, count)
        if kit.subject.serves("prompt_logprobs"):
            _check_prompt_logprobs(kit, count)


def _check_draws(kit: Kit, greedy: Tokens) -> None:
    drawn = _tokens(kit, kit.params(temperature=2.0, seed=1))
    if drawn == greedy:
        raise Broken("temperature is declared as served, but 2.0 gives what 0 gives")
    if kit.subject.serves("seed"):
        if _tokens(kit, kit.params(temperature=2.0, seed=2)) == drawn:
            raise Broken("seed is declared as served, but seeds 1 and 2 give the same tokens")
        if _tokens(kit, kit.params(temperature=2.0, seed=1), again=True) != drawn:
            raise Broken("seed is declared as served, but seed 1 gives other tokens the second time")
    narrow: dict[str, object] = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
    for feature, value in narrow.items():
        if not kit.subject.serves(feature):
            continue
        params = kit.params(temperature=2.0, seed=1, **{feature: value})
        # Of most prompts only: where several tokens are the most likely ones, each of them is right.
        same = sum(mine == theirs for mine, theirs in zip(_tokens(kit, params), greedy, strict=True))
        if same <= _NUM_PROMPTS // 2:
            raise Broken(
                f"{feature}={value} leaves only the most likely token, but {_NUM_PROMPTS - same} of {_NUM_PROMPTS} "
                "outputs are of others"
            )
    if kit.subject.serves("typical_p"):
        drawn, others = (_tokens(kit, kit.params(temperature=2.0, seed=seed, typical_p=1e-6)) for seed in (1, 2))
        same = sum(mine == theirs for mine, theirs in zip(drawn, others, strict=True))
        if same <= _NUM_PROMPTS // 2:
            raise Broken(
                f"typical_p=1e-06 leaves one token at each place, but {_NUM_PROMPTS - same} of {_NUM_PROMPTS} outputs "
                "depend on the seed"
            )


def _check_bans(kit: Kit, greedy: Tokens) -> None:
    """What has an exact meaning must have it."""
    prompts = _prompts(kit)
    common = next(token for token in greedy[0] if token is not None)
    other = (common + 1) % kit.sizes.vocab_size
    exact: dict[str, tuple[dict[str, object], set[int], bool]] = {
        # Parameters; token ids; whether all outputs are of them, or none.
        "logit_bias": ({"logit_bias": {other: _HUGE}}, {other}, True),
        "allowed_token_ids": ({"allowed_token_ids": (common, other)}, {common, other}, True),
        "bad_words": ({"bad_words_token_ids": ((common,),)}, {common}, False),
        "min_tokens": ({"min_tokens": _NUM_OUTPUTS, "stop_token_ids": (common,)}, {common}, False),
    }
    for feature, (fields, ids, inside) in exact.items():
        if not kit.subject.serves(feature):
            continue
        for prompt, tokens in zip(prompts, _tokens(kit, kit.params(**fields)), strict=True):
            for index, token in enumerate(tokens):
                if (token in ids) is not inside:
                    raise Broken(
                        f"prompt {list(prompt)}, {_asked(kit.params(**fields))}: output {index} is token {token}, "
                        f"expected {'one' if inside else 'none'} of {sorted(ids)}"
                    )


def _visible(kit: Kit, plain: Tokens) -> Iterator[tuple[str, SamplingParams]]:
    """Give parameters of which each must change a token of some prompt, whose tokens are ``plain`` without them."""
    base = kit.drawn(1)
    said = sorted({token for tokens in plain for token in tokens if token is not None})
    fields: dict[str, dict[str, object]] = {
        "repetition_penalty": {"repetition_penalty": 10.0},
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 2.0},
        "logit_bias": {"logit_bias": dict.fromkeys(said, -_HUGE)},
        "allowed_token_ids": {"allowed_token_ids": ((said[0] + 1) % kit.sizes.vocab_size,)},
        "bad_words": {"bad_words_token_ids": ((said[0],),)},
        "min_tokens": {"min_tokens": _NUM_OUTPUTS, "stop_token_ids": (said[0],)},
    }
    for feature, one in fields.items():
        yield feature, replace(base, **one)  # type: ignore[arg-type]  # the table above has the fields' types


def _check_configurations(kit: Kit) -> None:
    capabilities = kit.subject.plugin.capabilities
    config = kit.subject.config()
    wrong: dict[str, RunnerConfig] = {
        f"max_in_flight {capabilities.max_in_flight + 1}": replace(
            config, max_in_flight=capabilities.max_in_flight + 1
        ),
        f"max_in_flight {capabilities.min_in_flight - 1}": replace(
            config, max_in_flight=capabilities.min_in_flight - 1
        ),
        "block_size 3": replace(config, block_size=3),
        "dtype 'float7'": replace(config, dtype="float7"),
    }
    if 3 in capabilities.block_sizes:
        del wrong["block_size 3"]
    for what, one in wrong.items():
        runner = None
        try:
            runner = kit.subject.plugin.create(one)
            runner.load(no_progress)
        except (RunnerError, ValueError):
            continue
        finally:
            if runner is not None:
                runner.close()
        raise Broken(f"{what} is outside the capabilities, but create and load accepted it")


def _check_logprobs(kit: Kit, count: int) -> None:
    prompts = _prompts(kit)
    plain = [kit.alone(TraceRequest(prompt, 4, kit.params(num_logprobs=count))) for prompt in prompts]
    for outcome in plain:
        for index, output in enumerate(outcome.outputs):
            record = output.logprobs
            if record is None:
                raise Broken(f"output {index} has no log-probabilities, though num_logprobs is {count}")
            _check_record(record, count, f"output {index}")
            if record.token_id != output.token_id:
                raise Broken(f"output {index} is token {output.token_id}, its record is of token {record.token_id}")
            if record.rank != 1:
                raise Broken(f"output {index} was chosen greedily, but its rank is {record.rank}, expected 1")
    for fields in _distortions(kit):
        for prompt, outcome in zip(prompts, plain, strict=True):
            raw = outcome.outputs[0].logprobs
            got = kit.alone(TraceRequest(prompt, 1, kit.params(num_logprobs=count, **fields))).outputs[0].logprobs
            if count and raw is not None and got is not None and not _close(raw.top, got.top):
                raise Broken(f"with {fields} the alternatives are {got.top}, without {raw.top}; expected raw logits")
    silent = kit.alone(TraceRequest(prompts[0], 2, kit.params())).outputs
    if any(output.logprobs is not None for output in silent):
        raise Broken("log-probabilities were returned, though num_logprobs is None")


def _check_prompt_logprobs(kit: Kit, count: int) -> None:
    for prompt in _prompts(kit):
        outcome = kit.alone(TraceRequest(prompt, 1, kit.params(num_prompt_logprobs=count)))
        expected = {position: token for position, token in enumerate(prompt) if position}
        got = {position: record.token_id for position, record in outcome.prompt_logprobs.items()}
        if got != expected:
            raise Broken(f"prompt {list(prompt)}: records by position are of tokens {got}, expected {expected}")
        for position, record in outcome.prompt_logprobs.items():
            _check_record(record, count, f"prompt token {position}")


def _check_record(record: TokenLogprobs, count: int, what: str) -> None:
    values = [value for _, value in record.top]
    if len(values) != count:
        raise Broken(f"{what}: {len(values)} alternatives, expected {count}")
    if any(math.isnan(value) or value > LOGPROB_TOLERANCE for value in (*values, record.logprob)):
        raise Broken(f"{what}: {record}; a natural logarithm of a probability is not above 0")
    if values != sorted(values, reverse=True) or len({token for token, _ in record.top}) != count:
        raise Broken(f"{what}: alternatives {record.top}, expected different tokens, most likely first")
    if sum(map(math.exp, values)) > 1 + LOGPROB_TOLERANCE or record.rank < 1:
        raise Broken(f"{what}: {record}; probabilities add up to 1 at most and ranks begin at 1")
    if record.rank <= count and abs(values[record.rank - 1] - record.logprob) > LOGPROB_TOLERANCE:
        raise Broken(f"{what}: rank {record.rank} has {record.logprob}, but that alternative {values[record.rank - 1]}")


def _distortions(kit: Kit) -> Iterator[dict[str, object]]:
    """Give what changes the choice and must not change a log-probability."""
    if kit.subject.serves("temperature"):
        yield {"temperature": 3.0, "seed": 1}
    if kit.subject.serves("logit_bias"):
        yield {"logit_bias": {0: _HUGE}}
    if kit.subject.serves("repetition_penalty"):
        yield {"repetition_penalty": 5.0}


def _prompts(kit: Kit) -> list[tuple[int, ...]]:
    vocab_size = kit.sizes.vocab_size
    return [
        tuple((7 * number + 3 * index + 1) % vocab_size for index in range(1 + number))
        for number in range(_NUM_PROMPTS)
    ]


def _tokens(kit: Kit, params: SamplingParams, *, again: bool = False) -> Tokens:
    """Give the tokens of each prompt; ``again`` computes what is known once more."""
    if not again:
        return [kit.tokens_alone(prompt, _NUM_OUTPUTS, params) for prompt in _prompts(kit)]
    with kit.session() as session:
        traces = [
            Trace(session.config.max_in_flight, (TraceRequest(prompt, _NUM_OUTPUTS, params),))
            for prompt in _prompts(kit)
        ]
        return [TraceRun(session, trace).run()[0].token_ids for trace in traces]


def _close(one: tuple[tuple[int, float], ...], other: tuple[tuple[int, float], ...]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(abs(mine - theirs) <= LOGPROB_TOLERANCE for (_, mine), (_, theirs) in pairs)


def _asked(params: SamplingParams) -> str:
    neutral = SamplingParams(temperature=0.0)
    return ", ".join(
        f"{name}={getattr(params, name)!r}"
        for name in SamplingParams.__dataclass_fields__
        if getattr(params, name) != getattr(neutral, name)
    )
