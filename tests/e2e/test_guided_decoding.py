"""Guided decoding on a synchronous server: each kind, beside every other option, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runnerd_client import FinishReason, GuidedDecoding, InvalidRequestError, guides

sys.path.insert(0, str(Path(__file__).parent))

from guided_cases import CASES, CHOICES, is_valid

SYNCHRONOUS = {"async_execution": "off"}
STOP, LENGTH, GUIDE = (
    FinishReason.FINISH_REASON_STOP,
    FinishReason.FINISH_REASON_LENGTH,
    FinishReason.FINISH_REASON_GUIDE,
)
WORD = GuidedDecoding(regex="[a-z]{12}")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guided(serve) -> AsyncIterator[Any]:
    """A server that runs its steps one after the other."""
    async with serve(engine=SYNCHRONOUS, options={"kv_shadow": "true"}, guide_timeout_seconds=120.0) as live:
        yield live


async def outputs(live, prompt: str = "p", **options: Any) -> list[Any]:
    return list((await live.client.generate(prompt, **options)).outputs)


async def output(live, prompt: str = "p", **options: Any) -> Any:
    [one] = await outputs(live, prompt, **options)
    return one


@pytest.mark.parametrize("name", CASES)
async def test_each_kind_gives_texts_of_its_form(guided, name: str) -> None:
    case = CASES[name]
    options = {"guided_decoding": case.guide, "max_tokens": 1500} | case.options
    drawn = [outputs(guided, f"p{seed}", n=3, seed=seed, temperature=1.0 + 0.4 * seed, **options) for seed in range(3)]
    answers = [one for group in await asyncio.gather(*drawn) for one in group]
    answers.append(await output(guided, temperature=0.0, repetition_penalty=1.3, **options))
    assert [one.finish.reason for one in answers] == [STOP] * len(answers)
    for one in answers:
        assert case.holds(one.text), one.text
    assert len({one.text for one in answers}) > 1, "the guide leaves a choice, and none was made"


async def test_what_ends_by_length_is_a_beginning(guided) -> None:
    for most in range(1, 6):
        one = await output(guided, guided_decoding=WORD, max_tokens=most, seed=most)
        assert one.finish.reason == LENGTH
        assert re.fullmatch(f"[a-z]{{{most}}}", one.text)
    choice = GuidedDecoding(choice={"texts": CHOICES})
    one = await output(guided, guided_decoding=choice, max_tokens=2, seed=1)
    assert any(text.startswith(one.text) for text in CHOICES)


@pytest.mark.parametrize(
    "options",
    [{"ignore_eos": True}, {"min_tokens": 20}, {"bad_words": ["\x00"], "ignore_eos": True}],
    ids=lambda one: "+".join(one),
)
async def test_a_guide_that_goes_on_by_nothing_ends_the_output(guided, options: dict[str, Any]) -> None:
    one = await output(guided, guided_decoding=WORD, max_tokens=50, **options)
    assert (one.finish.reason, one.finish.usage.completion_tokens) == (GUIDE, 12)
    assert re.fullmatch("[a-z]{12}", one.text)
    assert one.finish.WhichOneof("matched") is None


async def test_min_tokens_lets_a_guide_go_on_that_can(guided) -> None:
    options = {"guided_decoding": GuidedDecoding(regex="[a-z]*"), "logit_bias": {256: 50.0}}
    assert (await output(guided, **options)).text == ""
    one = await output(guided, min_tokens=7, **options)
    assert (one.finish.reason, len(one.text)) == (STOP, 7)


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [ord("A")]},
        {"bad_words": list("abcdefghijklmnopqrstuvwxyz")},
        {"allowed_token_ids": list(range(ord("a"), ord("f"))), "bad_words": list("abcde")},
    ],
    ids=lambda one: "+".join(one),
)
async def test_options_that_leave_the_guide_no_token_end_with_an_error(guided, idle, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await output(guided, guided_decoding=WORD, max_tokens=20, **options)
    [violation] = caught.value.violations
    assert violation.field in ("guided_decoding.regex", "sampling.allowed_token_ids")
    assert "sampling.bad_words" in violation.description
    await idle(guided)


async def test_stop_strings_cut_a_guided_text(guided) -> None:
    one = await output(guided, guided_decoding=GuidedDecoding(regex="[ab]{40}"), stop=["bab"], seed=3)
    assert one.finish.stop_string == "bab"
    assert re.fullmatch("[ab]*", one.text)
    assert "bab" not in one.text


async def test_logprobs_are_those_before_the_guide(guided) -> None:
    plain = await output(guided, max_tokens=1, logprobs=5, temperature=0.0, ignore_eos=True)
    one = await output(guided, max_tokens=1, logprobs=5, temperature=0.0, guided_decoding=GuidedDecoding(regex="[!-,]"))
    assert one.tokens[0].candidates == plain.tokens[0].candidates
    assert one.tokens[0].rank > plain.tokens[0].rank == 1
    assert one.tokens[0].text in set("!\"#$%&'()*+,")


async def test_outputs_are_the_same_alone_in_a_batch_and_after_a_preemption(guided, serve) -> None:
    guides = [*(case.guide for case in CASES.values()), *([GuidedDecoding(regex="[a-z]{30}( |-)[a-z]{29}")] * 7)]
    options = [*(case.options for case in CASES.values()), *([{}] * 7)]

    async def run(live, index: int) -> Any:
        asked = {"guided_decoding": guides[index], "seed": index, "max_tokens": 70, "logprobs": 1} | options[index]
        one = await output(live, f"prompt {index % 4}", presence_penalty=0.5, **asked)
        one.finish.usage.ClearField("cached_tokens")
        return one

    alone = [await run(guided, index) for index in range(len(guides))]
    plain = [guided.client.generate(f"x{number}", max_tokens=30, ignore_eos=True) for number in range(6)]
    together, _ = await asyncio.gather(
        asyncio.gather(*(run(guided, index) for index in range(len(guides)))), asyncio.gather(*plain)
    )
    assert together == alone
    # The largest request fits with little more, so that the others come and go.
    small = {"max_num_seqs": 8, "block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 96}
    async with serve(engine=SYNCHRONOUS | small, options={"num_blocks": "30", "kv_shadow": "true"}) as live:
        preempted = await asyncio.gather(*(run(live, index) for index in range(len(guides))))
        assert (await live.client.load()).num_preemptions > 0
    assert preempted == alone


async def test_a_guided_stream_goes_on_after_its_engine_was_killed(guided, serve) -> None:
    requests = [{"guided_decoding": case.guide, "seed": 5, "max_tokens": 40, **case.options} for case in CASES.values()]
    requests.append({"guided_decoding": GuidedDecoding(regex="[a-z]{300}"), "seed": 5, "ignore_eos": True})
    whole = [(await output(guided, **one)).text for one in requests]
    async with serve(engine=SYNCHRONOUS, options={"step_seconds": "0.01"}) as live:
        streams = [live.client.stream("p", **one) for one in requests]
        texts = [""] * len(streams)

        async def read(index: int, least: int) -> None:
            async for message in streams[index]:
                texts[index] += message.output.text
                if least and len(texts[index]) >= least:
                    return

        started = await asyncio.gather(*(anext(stream) for stream in streams))
        assert all(message.HasField("started") for message in started)
        await read(len(streams) - 1, 2)  # the long one
        pid = live.frontend.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*(read(index, 0) for index in range(len(streams))))
        assert live.frontend.num_engine_restarts == 1
    assert texts == whole


HOSTILE = {
    "deep JSON": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "deep regex": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "deep Lark": ("grammar", "start: " + "(" * 50000 + '"a"' + ")" * 50000),
    "deep GBNF": ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "a regex of many states": ("regex", "(.*" + ".*".join("abcdefghij") + ".*){50}x(?=y)"),
    "a schema of many patterns": (
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f"^.*{one}.*$"} for one in "abcdefghijklmnop"]}),
    ),
    "a schema that multiplies": (
        "json_schema",
        json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"const": j}}} for j in range(4)]} for i in range(12)]}
        ),
    ),
    "a schema of itself": ("json_schema", '{"$ref": "#"}'),
    "rules of each other": ("grammar", "start: other\nother: start"),
    "no such rule": ("grammar", "start: other"),
    "no start": ("grammar", 'other: "a"'),
    "a reference to nothing": ("json_schema", '{"$ref": "#/$defs/none"}'),
    "a reference to elsewhere": ("json_schema", '{"$ref": "http://example.org/schema"}'),
    "false": ("json_schema", "false"),
    "no choice of an enum": ("json_schema", '{"enum": []}'),
    "an unknown type": ("json_schema", '{"type": "text"}'),
    "a keyword that is not served": ("json_schema", '{"type": "array", "uniqueItems": true}'),
    "not JSON": ("json_schema", "{'type': 'object'}"),
    "infinity": ("json_schema", '{"minimum": 1e999}'),
    "a lone surrogate": ("json_schema", '{"const": "\\ud800"}'),
    "an empty range": ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'),
    "an open group": ("regex", "(a"),
    "look-ahead": ("regex", "(?=a)b"),
    "nothing matches": ("regex", "[^\\s\\S]"),
    "an empty regex": ("regex", ""),
    "an empty grammar": ("grammar", ""),
    "an unknown special token": ("grammar", "start: <nothing>"),
    "no triggers": ("structural_tag", '{"structures": [], "triggers": []}'),
    "another begin": (
        "structural_tag",
        '{"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}',
    ),
    "another format": ("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}'),
    "too large": ("regex", "a" * 300_000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_bad_guide_is_refused_by_its_field_and_nothing_is_scheduled(guided, idle, name: str) -> None:
    await idle(guided)
    before = await guided.client.load()
    kind, text = HOSTILE[name]
    with pytest.raises(InvalidRequestError) as caught:
        await output(guided, guided_decoding=GuidedDecoding(**{kind: text}))
    [violation] = caught.value.violations
    assert violation.field == f"guided_decoding.{kind}"
    assert 0 < len(violation.description) < 600
    after = await guided.client.load()
    assert (after.num_steps, guided.frontend.num_engine_restarts) == (before.num_steps, 0)


@pytest.mark.parametrize(("texts", "place"), [([], "texts"), (["a", ""], "texts[1]")])
async def test_a_choice_without_a_text_is_refused(guided, texts: list[str], place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await output(guided, guided_decoding=GuidedDecoding(choice={"texts": texts}))
    assert [one.field for one in caught.value.violations] == [f"guided_decoding.choice.{place}"]


@pytest.mark.parametrize(
    "guide",
    [
        GuidedDecoding(choice={"texts": [f"choice {number}" for number in range(10_000)]}),
        GuidedDecoding(regex="(a|aa)*" * 20 + "b"),
        GuidedDecoding(regex="((a{1,100}){1,100}){1,100}"),
        GuidedDecoding(grammar='start: start start | "a" | ""'),
        GuidedDecoding(grammar='start: start "a" | "b"'),
    ],
    ids=["10,000 choices", "ambiguous", "repeated", "ambiguous and empty", "left-recursive"],
)
async def test_a_strange_guide_is_followed(guided, guide: GuidedDecoding) -> None:
    one = await output(guided, guided_decoding=guide, max_tokens=40, seed=1)
    if guide.HasField("choice"):
        assert one.text in guide.choice.texts
    else:
        assert re.fullmatch("[ab]*", one.text)


async def test_a_guide_that_grows_too_complex_ends_with_an_error(guided, idle) -> None:
    properties = {f"k{number}": {"type": "string", "pattern": f"[a-z]{{{number}}}x"} for number in range(1500)}
    guide = GuidedDecoding(json_schema=json.dumps({"type": "object", "properties": properties}))
    with pytest.raises(InvalidRequestError) as caught:
        await output(guided, guided_decoding=guide, max_tokens=3)
    assert caught.value.violations[0].field == "guided_decoding.json_schema"
    await idle(guided)
    assert (await output(guided, guided_decoding=WORD)).text


async def test_the_clients_helpers_say_what_is_meant(guided) -> None:
    schema = {"type": "object", "properties": {"é": {"enum": [1]}}, "required": ["é"], "additionalProperties": False}
    tag = guides.structural_tag([{"begin": "<a>", "schema": {"enum": [7]}, "end": "<"}], ["<a>"])
    asked = [
        (guides.json_schema(schema), lambda text: json.loads(text) == {"é": 1}),
        (guides.json_schema(json.dumps(schema)), lambda text: json.loads(text) == {"é": 1}),
        (guides.json_object(), lambda text: isinstance(json.loads(text), dict)),
        (guides.regex("a{3}"), lambda text: text == "aaa"),
        (guides.grammar('root ::= "b" "c"'), lambda text: text == "bc"),
        (guides.choice("x", "y"), lambda text: text in ("x", "y")),
        (tag, lambda text: not re.search(r"<a>(?!\s*7\s*<)", text)),
    ]
    for guide, holds in asked:
        one = await output(guided, guided_decoding=guide, seed=2, max_tokens=500)
        assert one.finish.reason == STOP
        assert holds(one.text), one.text
    with pytest.raises(ValueError, match="not JSON compliant"):
        guides.json_schema({"minimum": float("nan")})


async def test_a_guide_that_takes_too_long_is_refused(serve) -> None:
    async with serve(engine=SYNCHRONOUS, guide_timeout_seconds=0.001) as live:
        guide = GuidedDecoding(choice={"texts": [f"choice {number}" for number in range(9_000)]})
        for _ in range(2):
            with pytest.raises(InvalidRequestError) as caught:
                await output(live, guided_decoding=guide)
            assert "took more than 0.001 seconds" in caught.value.violations[0].description
        assert (await live.client.generate("x", max_tokens=1)).outputs


NAMES = st.sampled_from(["a", "b", "c d", 'q"', "é"])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-99, 99),
        st.integers(0, 50),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.integers(-5, 5), NAMES, st.none()), min_size=1, max_size=4),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "minItems": most // 2, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": sorted(set(properties) & required),
                "additionalProperties": False,
            },
            st.dictionaries(NAMES, inner, max_size=3),
            st.sets(NAMES),
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
async def test_texts_of_random_schemas_are_valid(guided, schema: dict[str, Any], seed: int) -> None:
    spaces = dict.fromkeys(map(ord, " \n\t\r"), -8.0)
    guide = GuidedDecoding(json_schema=json.dumps(schema))
    one = await output(guided, guided_decoding=guide, seed=seed, max_tokens=2000, logit_bias=spaces)
    assert one.finish.reason == STOP
    assert is_valid(schema)(one.text)
