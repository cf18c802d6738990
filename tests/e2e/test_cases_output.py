"""Faults that streaming inference servers were reported for, shown absent: text, records, counts and seeds.

Each test is one such fault or its whole kind, through a real server and a real client.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import FinishReason, GenerateRequest
from runnerd_client import InvalidRequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIXED = "né 日本語 👍🏽 e\u0301 ก็ — ok"  # one to four bytes a character, and the tokens are bytes


async def outputs(stream) -> list:
    """Give the chunks of output 0."""
    return [message.output async for message in stream if message.HasField("output") and message.output.index == 0]


def record(token) -> tuple:
    return (token.id, token.text, token.logprob, token.rank, tuple((one.id, one.logprob) for one in token.candidates))


# G14, G28
@pytest.mark.parametrize("stop", [["END"], ["ND of", "never"], ["E", "END"], ["xEN", "EN EN END"]])
async def test_no_beginning_of_a_stop_string_over_several_tokens_is_shown(serve, stop: list[str]) -> None:
    script = "some EN EN END of it"
    first = min((script.index(one) + len(one), one) for one in stop if one in script)[1]
    shown = script[: script.index(first)]
    async with serve(options={"script": script, "step_seconds": "0.003"}) as live:
        chunks = await outputs(live.client.stream("x", stop=stop, tokens=True))
        assert len(chunks) > 2
        text = ""
        for chunk in chunks:
            text += chunk.text
            assert shown.startswith(text), "what is cut was shown"
        assert text == shown == "".join(token.text for chunk in chunks for token in chunk.tokens)
        assert chunks[-1].finish.stop_string == first
        kept = await outputs(live.client.stream("x", stop=stop, include_stop=True))
        assert "".join(chunk.text for chunk in kept) == shown + first


# G14
async def test_text_that_begins_like_a_stop_string_and_is_none_comes_whole(serve) -> None:
    script = "EN EN EN"
    async with serve(options={"script": script}) as live:
        for stop in (["END"], ["EN EN END", "N!"], ["EN EN EN EN"]):
            chunks = await outputs(live.client.stream("x", stop=stop))
            assert "".join(chunk.text for chunk in chunks) == script
            assert chunks[-1].finish.HasField("eos_token_id")
            cut = await live.client.generate("x", stop=stop, max_tokens=7)
            assert cut.outputs[0].text == script[:7]  # what was held back comes with the end


# G14
async def test_nothing_but_a_possible_stop_string_is_held_back(serve) -> None:
    """The runner stalls after 'ab E': what cannot belong to 'END' has come before that is decided."""
    async with serve(options={"script": "ab END", "stall_at_step": "4", "stall_seconds": "1"}) as live:
        chunks = await outputs(live.client.stream("x", stop=["END"]))
        assert "".join(chunk.text for chunk in chunks if not chunk.HasField("finish")) == "ab "
        assert (chunks[-1].text, chunks[-1].finish.stop_string) == ("", "END")


# G17, G18
@pytest.mark.parametrize("stop", [[], ["never"], ["ok"]])
async def test_characters_of_several_tokens_come_once_and_whole(serve, stop: list[str]) -> None:
    expected = MIXED.removesuffix("ok") if "ok" in stop else MIXED
    async with serve(options={"script": MIXED, "step_seconds": "0.002"}) as live:
        chunks = await outputs(live.client.stream("x", stop=stop, tokens=True))
        assert "".join(chunk.text for chunk in chunks) == expected
        assert len(chunks) > len(expected)  # a message for each byte, or nearly
        assert not any("\ufffd" in chunk.text for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert "".join(token.text for token in tokens) == expected
        assert bytes(token.id for token in tokens if token.id < 256).decode() == MIXED
        whole = await outputs(live.client.stream("x", stop=stop, stream_mode="cumulative"))
        assert all(later.text.startswith(earlier.text) for earlier, later in pairwise(whole))
        assert whole[-1].text == expected
        assert (await live.client.generate("x", stop=stop)).outputs[0].text == expected


# G17
async def test_a_character_that_the_length_cuts_shows_as_a_replacement_at_the_end_alone(serve) -> None:
    async with serve(options={"script": MIXED}) as live:
        for max_tokens in range(1, 16):
            expected = MIXED.encode()[:max_tokens].decode(errors="replace")
            chunks = await outputs(live.client.stream("x", max_tokens=max_tokens))
            assert "".join(chunk.text for chunk in chunks) == expected
            assert chunks[-1].finish.reason == FinishReason.FINISH_REASON_LENGTH


# G21
@pytest.mark.parametrize("pace", ["fast", "slow"])
async def test_records_of_a_stream_are_those_of_the_whole_however_many_come_at_once(live, pace: str) -> None:
    options = {"max_tokens": 300, "seed": 11, "logprobs": 3, "ignore_eos": True}
    whole = (await live.client.generate("x", **options)).outputs[0]
    chunks = []
    async for message in live.client.stream("x", **options):
        if message.HasField("output"):
            chunks.append(message.output)
            if pace == "slow" and len(chunks) == 1:
                await asyncio.sleep(0.5)
    streamed = [record(token) for chunk in chunks for token in chunk.tokens]
    assert streamed == [record(token) for token in whole.tokens]
    assert len(streamed) == 300
    assert "".join(chunk.text for chunk in chunks) == whole.text
    for chunk in chunks:
        assert "".join(token.text for token in chunk.tokens) == chunk.text
    assert len({one[4] for one in streamed}) > 200, "the candidates are not each token's own"
    for token_id, _, logprob, rank, candidates in streamed:
        assert len(candidates) == 3
        assert list(candidates) == sorted(candidates, key=lambda one: -one[1])
        assert (rank <= 3) == ((token_id, logprob) in candidates)


# G21
async def test_cumulative_records_hold_each_token_once(live) -> None:
    options = {"max_tokens": 40, "seed": 11, "logprobs": 2, "ignore_eos": True, "stream_mode": "cumulative"}
    chunks = await outputs(live.client.stream("x", **options))
    records = [[record(token) for token in chunk.tokens] for chunk in chunks]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(records))
    assert len(records[-1]) == chunks[-1].finish.usage.completion_tokens == 40


# G25
async def test_without_max_tokens_an_output_may_fill_the_context(serve) -> None:
    async with serve(options={"max_model_len": "100"}) as live:
        for prompt in ("x", "x" * 60, "x" * 99):
            output = (await live.client.generate(prompt, ignore_eos=True)).outputs[0]
            assert output.finish.reason == FinishReason.FINISH_REASON_LENGTH
            assert output.finish.usage.completion_tokens == 100 - len(prompt)
        with pytest.raises(InvalidRequestError, match=r"stopping\.max_tokens"):
            await live.client.generate("x", max_tokens=0)
        with pytest.raises(InvalidRequestError, match=r"stopping\.max_tokens.*at most 40 fit"):
            await live.client.generate("x" * 60, max_tokens=41)


# G26
async def test_length_is_the_reason_exactly_when_the_output_was_cut(serve) -> None:
    async with serve(options={"script": "abc"}) as live:
        for max_tokens, text in ((1, "a"), (2, "ab"), (3, "abc")):
            output = (await live.client.generate("x", max_tokens=max_tokens)).outputs[0]
            assert (output.text, output.finish.reason) == (text, FinishReason.FINISH_REASON_LENGTH)
            assert output.finish.WhichOneof("matched") is None
            assert output.finish.usage.completion_tokens == max_tokens
        for max_tokens in (4, 5, None):
            output = (await live.client.generate("x", max_tokens=max_tokens)).outputs[0]
            assert (output.text, output.finish.reason) == ("abc", FinishReason.FINISH_REASON_STOP)
            assert output.finish.eos_token_id == 256
            assert output.finish.usage.completion_tokens == 4
        at_the_limit = (await live.client.generate("x", max_tokens=2, stop=["b"])).outputs[0]
        assert (at_the_limit.text, at_the_limit.finish.stop_string) == ("a", "b")


# G26
async def test_what_comes_with_the_finish_is_part_of_the_text(serve) -> None:
    """However the text is spread over the messages, the one with the finish included, the whole is the same."""
    async with serve(options={"script": "abcdef"}) as live:
        for options in ({}, {"max_tokens": 6}, {"stop": ["fg", "!"]}, {"stop": ["f"], "include_stop": True}):
            chunks = await outputs(live.client.stream("x", **options))
            assert "".join(chunk.text for chunk in chunks) == "abcdef"
            assert [chunk.HasField("finish") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


# G29
async def test_a_seed_gives_the_same_outputs_alone_and_in_company_and_its_outputs_differ(serve, idle) -> None:
    options = {"step_seconds": "0.001", "num_blocks": "40", "kv_shadow": "true"}
    async with serve(
        engine={"max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 8}, options=options
    ) as live:

        async def texts(seed: int, n: int) -> list[str]:
            answer = await live.client.generate("a prompt", seed=seed, n=n, max_tokens=25, ignore_eos=True)
            assert [output.index for output in answer.outputs] == list(range(n))
            assert answer.seed == seed
            return [output.text for output in answer.outputs]

        alone = {seed: await texts(seed, 4) for seed in (0, 1, 2**64 - 1)}
        assert all(len(set(children)) == 4 for children in alone.values())
        assert len({children[0] for children in alone.values()}) == 3
        wanted = [(seed, n) for n in (1, 2, 3, 4) for seed in alone]
        together = await asyncio.gather(*(texts(seed, n) for seed, n in [*wanted, *reversed(wanted)]))
        for (seed, n), found in zip([*wanted, *reversed(wanted)], together, strict=True):
            assert found == alone[seed][:n]
        await idle(live)


# G30
async def test_a_reader_that_stops_reading_loses_nothing_and_costs_no_more_than_its_answer(
    live, idle, eventually
) -> None:
    request = GenerateRequest(text="x")
    request.sampling.seed = 5
    request.stopping.max_tokens = 6000
    request.stopping.ignore_eos = True
    request.output.tokens = True
    before = (await live.client.load()).generation_tokens

    async def computed_to_the_end() -> bool:
        return (await live.client.load()).generation_tokens >= before + 6000

    async with grpc.aio.insecure_channel(live.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stalled = stub.StreamGenerate(request)
        await stalled.read()
        await eventually(computed_to_the_end)
        whole = (await stub.Generate(request)).outputs[0]
        chunks = []
        while (message := await stalled.read()) is not grpc.aio.EOF:
            chunks.append(message.output)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token.id for chunk in chunks for token in chunk.tokens] == [token.id for token in whole.tokens]
    assert chunks[-1].finish.usage.completion_tokens == 6000
    assert len(chunks) < 6000, "nothing was merged while nobody read"
    await idle(live)
