"""Generation through a real server and engine process: order of messages, equality, limits."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from runnerd_client import FinishReason, chat

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def collect(stream):
    return [message async for message in stream]


async def test_a_stream_is_started_then_chunks_then_one_finish_per_output(live) -> None:
    messages = await collect(live.client.stream("hello", max_tokens=12, n=3, seed=1, ignore_eos=True))
    assert messages[0].WhichOneof("event") == "started"
    assert messages[0].started.seed == 1
    assert messages[0].started.prompt_tokens == 5
    assert len(messages[0].started.request_id) > 8
    assert {message.WhichOneof("event") for message in messages[1:]} == {"output"}
    for index in range(3):
        chunks = [message.output for message in messages[1:] if message.output.index == index]
        assert [chunk.HasField("finish") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        finish = chunks[-1].finish
        assert finish.reason == FinishReason.FINISH_REASON_LENGTH
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (5, 12)


async def test_streamed_deltas_join_to_the_unary_answer(live) -> None:
    options = {"max_tokens": 40, "n": 2, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    whole = await live.client.generate("a prompt", **options)
    messages = await collect(live.client.stream("a prompt", **options))
    outputs = [message.output for message in messages if message.HasField("output")]
    prompts = [message.prompt for message in messages if message.HasField("prompt")]
    assert len(prompts) == 1
    assert list(prompts[0].tokens) == list(whole.prompt_tokens)
    assert len(whole.prompt_tokens) == len("a prompt") - 1
    assert [output.index for output in whole.outputs] == [0, 1]
    assert whole.outputs[0].text != whole.outputs[1].text
    for output in whole.outputs:
        chunks = [chunk for chunk in outputs if chunk.index == output.index]
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [token for chunk in chunks for token in chunk.tokens] == list(output.tokens)
        assert chunks[-1].finish.reason == output.finish.reason
        assert len(output.tokens) == output.finish.usage.completion_tokens
        assert all(token.HasField("logprob") and len(token.candidates) == 2 for token in output.tokens)


async def test_a_cumulative_stream_ends_with_the_whole_text(live) -> None:
    whole = await live.client.generate("x", max_tokens=20, seed=5, stream_mode="cumulative")
    messages = await collect(live.client.stream("x", max_tokens=20, seed=5, stream_mode="cumulative"))
    texts = [message.output.text for message in messages if message.HasField("output")]
    assert texts[-1] == whole.outputs[0].text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


async def test_the_returned_seed_gives_the_same_answer_again(live) -> None:
    first = await live.client.generate("x", max_tokens=20)
    again = await live.client.generate("x", max_tokens=20, seed=first.seed)
    assert again.outputs[0].text == first.outputs[0].text
    assert again.request_id != first.request_id


async def test_a_stop_string_ends_the_output_and_is_named(serve) -> None:
    async with serve(options={"script": "one two three"}) as live:
        answer = await live.client.generate("x", stop=["two", "zzz"])
        assert answer.outputs[0].text == "one "
        assert answer.outputs[0].finish.stop_string == "two"
        kept = await live.client.generate("x", stop="two", include_stop=True)
        assert kept.outputs[0].text == "one two"
        to_the_end = await live.client.generate("x")
        assert to_the_end.outputs[0].text == "one two three"
        assert to_the_end.outputs[0].finish.reason == FinishReason.FINISH_REASON_STOP
        assert to_the_end.outputs[0].finish.HasField("eos_token_id")


async def test_a_time_limit_ends_all_outputs_as_such(slow) -> None:
    answer = await slow.client.generate("x", time_limit=0.2, n=2, ignore_eos=True)
    assert [output.finish.reason for output in answer.outputs] == [FinishReason.FINISH_REASON_TIME_LIMIT] * 2


async def test_token_ids_and_text_give_the_same_answer(live) -> None:
    tokenized = await live.client.tokenize("hi there")
    assert len(tokenized.ids) == len(tokenized.tokens) == 8
    assert tokenized.max_model_len == (await live.client.model_info()).max_model_len
    by_text = await live.client.generate("hi there", max_tokens=10, seed=1)
    by_ids = await live.client.generate(list(tokenized.ids), max_tokens=10, seed=1)
    assert by_text.outputs[0].text == by_ids.outputs[0].text
    assert await live.client.detokenize(tokenized.ids) == "hi there"


async def test_a_request_template_renders_a_conversation(live) -> None:
    prompt = chat({"role": "user", "content": "hi"})
    prompt.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenized = await live.client.tokenize(prompt)
    assert await live.client.detokenize(tokenized.ids) == "<user>hi"


async def test_many_streams_at_once_are_the_ones_alone(live, idle) -> None:
    async def one(number: int) -> str:
        return "".join([text async for text in live.client.stream(f"p{number}", max_tokens=30, seed=number).texts()])

    alone = [await one(number) for number in range(8)]
    assert await asyncio.gather(*(one(number) for number in range(8))) == alone
    await idle(live)


@pytest.mark.parametrize("text", ["", "x" * 3])
async def test_text_can_be_left_out(live, text: str) -> None:
    answer = await live.client.generate("x" + text, max_tokens=3, text=False, tokens=True, ignore_eos=True)
    assert answer.outputs[0].text == ""
    assert len(answer.outputs[0].tokens) == 3
