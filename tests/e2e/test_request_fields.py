"""No field of a request is ignored: each one changes what comes back, or is refused by its name.

The fields are walked by the message's descriptor, so one that is added later fails here until it has an entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd.v1.inference_pb2 import GenerateResponse
from runnerd.v1.inference_pb2_grpc import InferenceServiceStub
from runnerd_client import InvalidRequestError, NotFoundError
from runnerd_client.errors import from_rpc_error
from runnerd_service.frontend.chat_rendering import ChatRenderer
from runnerd_service.frontend.preparation import Preparer
from runnerd_service.frontend.tokenizer import load_tokenizer
from runnerd_service.frontend.validation import ServedModel
from runnerd_service.rpc.convert import to_generation
from runnerd_spi import load_runner

pytestmark = pytest.mark.asyncio(loop_scope="module")

WHOLE_VALUES = {"google.protobuf.Duration", "google.protobuf.Struct"}
"""Messages whose fields are no options of their own."""


def leaf_fields(message: Descriptor, prefix: str = "") -> Iterator[str]:
    for one in message.fields:
        path = prefix + one.name
        inner = one.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        if inner is None or is_map or inner.full_name in WHOLE_VALUES:
            yield path
        else:
            yield from leaf_fields(inner, path + ".")


FIELDS = tuple(leaf_fields(GenerateRequest.DESCRIPTOR))

PLAIN: Mapping[str, Any] = {
    "text": "hello there",
    "sampling": {"seed": 7, "temperature": 1.0},
    "stopping": {"max_tokens": 40, "ignore_eos": True},
    "output": {"tokens": True},
}
GREEDY = {"sampling": {"temperature": 0.0}}
EOS_AT_ONCE = {"sampling": {"logit_bias": {"256": 100.0}}, "stopping": {"ignore_eos": False}}


@dataclass(frozen=True)
class Effect:
    """The answer to ``PLAIN`` with ``base`` differs from the answer with ``change`` on top."""

    change: Mapping[str, Any]
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """The violation names ``field``; None: the field's own path."""

    change: Mapping[str, Any]
    field: str | None = None


def conversation(template: str = "", **message: Any) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"} | message]}
    return {"chat": chat | ({"chat_template": template} if template else {})}


SHOWS_ALL = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.name }}{{ m.tool_calls }}{{ m.tool_call_id }}{% endfor %}"
)
SHOWS_TOOLS = "{{ tools }}{{ mood }}"

ENTRIES: Mapping[str, Effect | Refused] = {
    "text": Effect({"text": "hello"}),
    "token_ids.ids": Effect({"token_ids": {"ids": [1, 2, 4]}}, {"token_ids": {"ids": [1, 2, 3]}}),
    "chat.messages.role": Effect(conversation(role="system"), conversation()),
    "chat.messages.content": Effect(conversation(content="ho"), conversation()),
    "chat.messages.parts.text": Effect(
        conversation(content="", parts=[{"text": "ho"}]), conversation(content="", parts=[{"text": "hi"}])
    ),
    "chat.messages.parts.image_url": Refused(
        conversation(content="", parts=[{"image_url": "data:,"}]), "chat.messages[0].parts[0]"
    ),
    "chat.messages.name": Effect(conversation(SHOWS_ALL, name="Ada"), conversation(SHOWS_ALL)),
    "chat.messages.tool_calls": Effect(conversation(SHOWS_ALL, tool_calls=[{"f": 1}]), conversation(SHOWS_ALL)),
    "chat.messages.tool_call_id": Effect(conversation(SHOWS_ALL, tool_call_id="c1"), conversation(SHOWS_ALL)),
    "chat.add_generation_prompt": Effect({"chat": {"add_generation_prompt": False}}, conversation()),
    "chat.continue_final_message": Effect({"chat": {"continue_final_message": True}}, conversation()),
    "chat.tools": Effect({"chat": {"tools": [{"name": "f"}]}}, conversation(SHOWS_TOOLS)),
    "chat.chat_template": Effect({"chat": {"chat_template": "{{ messages[0].content }}"}}, conversation()),
    "chat.chat_template_kwargs": Effect({"chat": {"chat_template_kwargs": {"mood": "x"}}}, conversation(SHOWS_TOOLS)),
    "prompt_options.truncation": Effect(
        {"prompt_options": {"truncation": "TRUNCATION_SIDE_RIGHT"}},
        {"prompt_options": {"truncation": "TRUNCATION_SIDE_LEFT", "max_prompt_tokens": 4}},
    ),
    "prompt_options.max_prompt_tokens": Effect(
        {"prompt_options": {"max_prompt_tokens": 3}},
        {"prompt_options": {"truncation": "TRUNCATION_SIDE_LEFT", "max_prompt_tokens": 4}},
    ),
    "sampling.temperature": Effect(GREEDY),
    "sampling.top_k": Effect({"sampling": {"top_k": 1}}),
    "sampling.top_p": Effect({"sampling": {"top_p": 0.1}}),
    "sampling.min_p": Effect({"sampling": {"min_p": 0.9}}),
    "sampling.typical_p": Effect({"sampling": {"typical_p": 0.1}}),
    "sampling.seed": Effect({"sampling": {"seed": 8}}),
    "sampling.repetition_penalty": Effect({"sampling": {"repetition_penalty": 3.0}}, GREEDY),
    "sampling.presence_penalty": Effect({"sampling": {"presence_penalty": 2.0}}, GREEDY),
    "sampling.frequency_penalty": Effect({"sampling": {"frequency_penalty": 2.0}}, GREEDY),
    "sampling.logit_bias": Effect({"sampling": {"logit_bias": {"97": 100.0}}}),
    "sampling.allowed_token_ids": Effect({"sampling": {"allowed_token_ids": [97, 98]}}),
    "sampling.bad_words": Effect({"sampling": {"bad_words": [" "]}}, GREEDY),
    "sampling.beam_width": Refused({"sampling": {"beam_width": 2}}),
    "stopping.max_tokens": Effect({"stopping": {"max_tokens": 39}}),
    "stopping.min_tokens": Effect({"stopping": {"min_tokens": 5}}, EOS_AT_ONCE),
    "stopping.stop": Effect({"stopping": {"stop": [" "]}}),
    "stopping.stop_token_ids": Effect({"stopping": {"stop_token_ids": [32]}}),
    "stopping.include_stop": Effect({"stopping": {"include_stop": True}}, {"stopping": {"stop": [" "]}}),
    "stopping.ignore_eos": Effect({"stopping": {"ignore_eos": True}}, EOS_AT_ONCE),
    "output.n": Effect({"output": {"n": 2}}),
    "output.text": Effect({"output": {"text": False}}),
    "output.tokens": Effect({"output": {"tokens": False}}),
    "output.logprobs": Effect({"output": {"logprobs": 2}}),
    "output.prompt_logprobs": Effect({"output": {"prompt_logprobs": 1}}),
    "output.include_prompt": Effect({"output": {"include_prompt": True}}),
    "output.skip_special_tokens": Effect({"output": {"skip_special_tokens": False}}, EOS_AT_ONCE),
    "output.pooling": Refused({"output": {"pooling": "POOLING_MEAN"}}),
    "guided_decoding.json_schema": Refused({"guided_decoding": {"json_schema": "{}"}}),
    "guided_decoding.json_object": Refused({"guided_decoding": {"json_object": True}}),
    "guided_decoding.regex": Refused({"guided_decoding": {"regex": "a+"}}),
    "guided_decoding.grammar": Refused({"guided_decoding": {"grammar": 'start: "a"'}}),
    "guided_decoding.choice.texts": Refused(
        {"guided_decoding": {"choice": {"texts": ["yes", "no"]}}}, "guided_decoding.choice"
    ),
    "guided_decoding.structural_tag": Refused({"guided_decoding": {"structural_tag": "{}"}}),
    "adapter": Refused({"adapter": "lora"}),
}


def request(*changes: Mapping[str, Any]) -> GenerateRequest:
    """Give ``PLAIN`` with changes."""
    whole: dict[str, Any] = dict(PLAIN)
    for change in changes:
        if "chat" in change or "token_ids" in change:
            whole.pop("text", None)
        whole = merged(whole, change)
    return json_format.ParseDict(whole, GenerateRequest())


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in change.items():
        inner = result.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[name] = merged(inner, value) if both else value
    return result


def names(message: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Give the paths that a change sets, items of lists without their index."""
    found = set()
    for name, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            found |= {prefix + name} | (names(one, f"{prefix}{name}.") if isinstance(one, Mapping) else set())
    return found


Call = Callable[[GenerateRequest], Awaitable[GenerateResponse]]


@pytest.fixture
def generate(live) -> Call:
    """Sends a request as it is; what the client could leave out or rename is not in the way."""

    async def call(message: GenerateRequest) -> GenerateResponse:
        async with grpc.aio.insecure_channel(live.address) as channel:
            try:
                return await InferenceServiceStub(channel).Generate(message, timeout=30)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

    return call


async def answer(generate: Call, message: GenerateRequest) -> list[str]:
    """Give all that is the same each time: what depends on nothing but the request."""
    response = await generate(message)
    response.ClearField("request_id")
    for output in response.outputs:
        output.finish.usage.ClearField("cached_tokens")
    return [str(response)]


# G37
@pytest.mark.parametrize("path", FIELDS)
async def test_a_field_changes_the_answer_or_is_refused_by_its_name(generate, path: str) -> None:
    if path in TESTED_ALONE:
        assert TESTED_ALONE[path].__name__ in globals()
        return
    assert path in ENTRIES, f"{path} has no entry: say what it changes, or that it is refused"
    entry = ENTRIES[path]
    assert path in names(entry.change), "the entry changes another field"
    if isinstance(entry, Refused):
        with pytest.raises(InvalidRequestError) as caught:
            await generate(request(entry.change))
        assert [one.field for one in caught.value.violations] == [entry.field or path]
        return
    plain = await answer(generate, request(entry.base))
    assert plain == await answer(generate, request(entry.base)), "the answer is not the same each time"
    assert plain != await answer(generate, request(entry.base, entry.change))


async def test_every_entry_is_a_field() -> None:
    assert set(ENTRIES) | set(TESTED_ALONE) == set(FIELDS)
    assert not set(ENTRIES) & set(TESTED_ALONE)


async def test_a_request_id_names_the_request(generate) -> None:
    assert (await generate(request({"request_id": "mine"}))).request_id == "mine"


async def test_a_model_by_another_name_is_not_found(generate, live) -> None:
    name = (await live.client.model_info()).name
    assert (await generate(request({"model": name}))).outputs
    with pytest.raises(NotFoundError):
        await generate(request({"model": name + "x"}))


async def test_a_cache_salt_keeps_prefixes_apart(generate) -> None:
    async def cached(salt: str) -> int:
        answer = await generate(request({"text": "a prefix of some blocks " * 8, "cache_salt": salt}))
        return answer.outputs[0].finish.usage.cached_tokens

    assert await cached("one") == 0
    assert await cached("one") > 0
    assert await cached("two") == 0


async def test_a_lower_priority_value_runs_first(serve) -> None:
    async with serve(engine={"max_num_seqs": 1}, options={"step_seconds": "0.01"}) as live:
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            num_tokens = 200 if name == "running" else 20  # the others have to come before it ends
            stream = live.client.stream(name, max_tokens=num_tokens, ignore_eos=True, priority=priority)
            await anext(stream)
            accepted.set()
            async for message in stream:
                if message.output.HasField("finish"):
                    order.append(name)

        tasks = []
        for name, priority in (("running", 0), ("later", 5), ("sooner", -5)):
            accepted = asyncio.Event()
            tasks.append(asyncio.create_task(run(name, priority)))
            await accepted.wait()
        await asyncio.gather(*tasks)
        assert order == ["running", "sooner", "later"]


async def test_a_time_limit_ends_the_output(slow) -> None:
    answer = await slow.client.generate("x", max_tokens=5000, ignore_eos=True, time_limit=0.1)
    assert answer.outputs[0].finish.usage.completion_tokens < 5000


async def test_a_cumulative_stream_repeats_what_was_sent(slow) -> None:
    async def texts(mode: str) -> list[str]:
        stream = slow.client.stream("x", max_tokens=8, ignore_eos=True, seed=1, stream_mode=mode)
        return [message.output.text async for message in stream if message.HasField("output")]

    deltas, all_so_far = await texts("delta"), await texts("cumulative")
    assert "".join(deltas) == all_so_far[-1]
    assert len("".join(all_so_far)) > len(all_so_far[-1])


async def test_special_tokens_are_added_unless_refused(tmp_path) -> None:
    # The simulated vocabulary has none to add: this is the way from the wire to the engine with one that has.
    words = Tokenizer(models.WordLevel({"<bos>": 0, "hello": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    words.save(str(tmp_path / "tokenizer.json"))
    capabilities = load_runner("sim").capabilities
    served = ServedModel("tiny", "sim", capabilities, 3, 64, (), max_n=1, max_logprobs=0, max_stop_strings=1)
    preparer = Preparer(served, load_tokenizer(str(tmp_path)), ChatRenderer({}, {}))

    def token_ids(**options: bool) -> tuple[int, ...]:
        message = GenerateRequest(text="hello")
        for name, value in options.items():
            setattr(message.prompt_options, name, value)
        return preparer.prepare(to_generation(message)).prompt_token_ids

    assert token_ids() == token_ids(add_special_tokens=True) == (0, 1)
    assert token_ids(add_special_tokens=False) == (1,)


GUIDES = [path for path in FIELDS if path.startswith("guided_decoding.")]


async def test_no_kind_of_guide_is_scheduled(generate, live, idle) -> None:
    await idle(live)
    before = await live.client.load()
    assert len(GUIDES) == 6
    for path in GUIDES:
        with pytest.raises(InvalidRequestError) as caught:
            await generate(request(ENTRIES[path].change))
        assert path.startswith(caught.value.violations[0].field)
        assert "guided_decoding" in caught.value.violations[0].description
        assert "'sim'" in caught.value.violations[0].description
    after = await live.client.load()
    assert (after.num_steps, after.prompt_tokens) == (before.num_steps, before.prompt_tokens)


TESTED_ALONE: Mapping[str, Callable[..., Awaitable[None]]] = {
    "request_id": test_a_request_id_names_the_request,
    "prompt_options.add_special_tokens": test_special_tokens_are_added_unless_refused,
    "stopping.time_limit": test_a_time_limit_ends_the_output,
    "output.stream_mode": test_a_cumulative_stream_repeats_what_was_sent,
    "priority": test_a_lower_priority_value_runs_first,
    "model": test_a_model_by_another_name_is_not_found,
    "cache_salt": test_a_cache_salt_keeps_prefixes_apart,
}
