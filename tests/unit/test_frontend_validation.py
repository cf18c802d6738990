"""Which requests are refused, and what the refusal says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerd_service.errors import FieldViolation, InvalidRequest, ModelNotFound
from runnerd_service.frontend.chat_rendering import ChatRenderer
from runnerd_service.frontend.preparation import PreparedRequest, Preparer, output_seed
from runnerd_service.frontend.tokenizer import ByteTokenizer
from runnerd_service.frontend.types import ChatPrompt, Generation
from runnerd_service.frontend.validation import ServedModel, capability_map
from runnerd_service.guided.guide import Guide
from runnerd_spi import RunnerCapabilities, load_runner

EVERYTHING = load_runner("sim").capabilities
NOTHING = RunnerCapabilities(
    max_in_flight=1,
    dtypes=("float32",),
    block_sizes=(16,),
    temperature="no",
    top_k="no",
    top_p="no",
    min_p="no",
    seed="no",
)
SERVED = ServedModel(
    name="a-model",
    runner="sim",
    capabilities=EVERYTHING,
    vocab_size=257,
    max_model_len=64,
    eos_token_ids=(256,),
    max_n=8,
    max_logprobs=5,
    max_stop_strings=3,
    max_in_flight=2,
    max_guide_bytes=100,
)
TOKENIZER = ByteTokenizer()


def prepare(generation: Generation, served: ServedModel = SERVED) -> PreparedRequest:
    renderer = ChatRenderer(TOKENIZER.chat_templates, TOKENIZER.special_tokens)
    return Preparer(served, TOKENIZER, renderer).prepare(generation)


def violations(generation: Generation, served: ServedModel = SERVED) -> tuple[FieldViolation, ...]:
    with pytest.raises(InvalidRequest) as refusal:
        prepare(generation, served)
    return refusal.value.violations


def fields(generation: Generation, served: ServedModel = SERVED) -> list[str]:
    return [one.field for one in violations(generation, served)]


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        *(("temperature", value, "sampling.temperature") for value in (-0.1, 100.5, math.nan, math.inf, -math.inf)),
        *(("top_k", value, "sampling.top_k") for value in (-1, 258)),
        *(("top_p", value, "sampling.top_p") for value in (0.0, -0.5, 1.01, math.nan)),
        *(("min_p", value, "sampling.min_p") for value in (-0.1, 1.1, math.nan)),
        *(("typical_p", value, "sampling.typical_p") for value in (1.5, 0.0, math.nan)),
        *(("seed", value, "sampling.seed") for value in (-1, 2**64)),
        *(("repetition_penalty", value, "sampling.repetition_penalty") for value in (0.0, -1.0, math.inf, math.nan)),
        *(("repetition_penalty", value, "sampling.repetition_penalty") for value in (1e-40, 9e-7, 1.1e6)),
        *(("presence_penalty", value, "sampling.presence_penalty") for value in (-2.1, 2.1, math.nan)),
        *(("frequency_penalty", value, "sampling.frequency_penalty") for value in (-2.1, 2.1, math.inf)),
        *(("beam_width", value, "sampling.beam_width") for value in (0, 2)),
        *(("logit_bias", {5: value}, "sampling.logit_bias[5]") for value in (101.0, -101.0, math.nan, math.inf)),
        ("logit_bias", {257: 1.0}, "sampling.logit_bias[257]"),
        ("allowed_token_ids", (0, 257), "sampling.allowed_token_ids[1]"),
        ("bad_words", ("x", ""), "sampling.bad_words[1]"),
        ("max_tokens", 0, "stopping.max_tokens"),
        ("max_tokens", 63, "stopping.max_tokens"),
        ("min_tokens", 63, "stopping.min_tokens"),
        ("stop", ("a", ""), "stopping.stop[1]"),
        ("stop", ("a" * 1025,), "stopping.stop[0]"),
        ("stop", ("a", "b", "c", "d"), "stopping.stop"),
        ("stop_token_ids", (256, 999), "stopping.stop_token_ids[1]"),
        *(("time_limit_seconds", value, "stopping.time_limit") for value in (0.0, -1.0, math.nan, math.inf)),
        *(("n", value, "output.n") for value in (0, 9)),
        ("logprobs", 6, "output.logprobs"),
        ("prompt_logprobs", 6, "output.prompt_logprobs"),
        ("guide", Guide("json_schema", ("{}",)), "guided_decoding.json_schema"),
        ("guide", Guide("regex", ("a",)), "guided_decoding.regex"),
        ("adapter", "a-lora", "adapter"),
        ("request_id", "", "request_id"),
        ("request_id", "x" * 129, "request_id"),
        ("cache_salt", "x" * 129, "cache_salt"),
        ("priority", 2**31, "priority"),
        ("max_prompt_tokens", 0, "prompt_options.max_prompt_tokens"),
        ("bad_words", ("x" * 1025,), "sampling.bad_words[0]"),
        # Of a list that is too long only that is told, however many of its items are wrong.
        ("bad_words", ("",) * 1025, "sampling.bad_words"),
        ("stop", ("",) * 1_000_000, "stopping.stop"),
        ("allowed_token_ids", (999,) * 258, "sampling.allowed_token_ids"),
        ("stop_token_ids", (999,) * 258, "stopping.stop_token_ids"),
        ("logit_bias", dict.fromkeys(range(258), math.nan), "sampling.logit_bias"),
    ],
)
def test_wrong_value_is_refused_by_the_name_of_its_field(name: str, value: Any, field: str) -> None:
    assert fields(replace(Generation("hi"), **{name: value})) == [field]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_k", 257),
        ("top_p", 1.0),
        ("min_p", 1.0),
        ("typical_p", 1.0),
        ("seed", 2**64 - 1),
        ("repetition_penalty", float(np.float32(1e-6))),
        ("repetition_penalty", 1e6),
        ("beam_width", 1),
        ("logit_bias", {0: -100.0, 256: 100.0}),
        ("max_tokens", 62),
        ("min_tokens", 62),
        ("stop", ("a", "b" * 1024, "c")),
        ("bad_words", ("b" * 1024,) * 1024),
        ("allowed_token_ids", tuple(range(257))),
        ("stop_token_ids", tuple(range(257))),
        ("logit_bias", dict.fromkeys(range(257), 1.0)),
        ("n", 8),
        ("logprobs", 5),
        ("logprobs", 0),
        ("request_id", "x" * 128),
        ("priority", -(2**31)),
        ("model", "a-model"),
        ("time_limit_seconds", 0.001),
    ],
)
def test_value_at_the_edge_of_its_range_is_taken(name: str, value: Any) -> None:
    assert prepare(replace(Generation("hi"), **{name: value})).prompt_token_ids == (104, 105)


@pytest.mark.parametrize(
    ("name", "value", "capability", "field"),
    [
        ("top_k", 5, "top_k", "sampling.top_k"),
        ("top_p", 0.5, "top_p", "sampling.top_p"),
        ("min_p", 0.5, "min_p", "sampling.min_p"),
        ("typical_p", 0.5, "typical_p", "sampling.typical_p"),
        ("seed", 1, "seed", "sampling.seed"),
        ("repetition_penalty", 1.5, "repetition_penalty", "sampling.repetition_penalty"),
        ("presence_penalty", 1.0, "presence_penalty", "sampling.presence_penalty"),
        ("frequency_penalty", -1.0, "frequency_penalty", "sampling.frequency_penalty"),
        ("logit_bias", {1: 1.0}, "logit_bias", "sampling.logit_bias"),
        ("allowed_token_ids", (1,), "allowed_token_ids", "sampling.allowed_token_ids"),
        ("bad_words", ("x",), "bad_words", "sampling.bad_words"),
        ("min_tokens", 1, "min_tokens", "stopping.min_tokens"),
        ("logprobs", 0, "logprobs", "output.logprobs"),
        ("prompt_logprobs", 0, "prompt_logprobs", "output.prompt_logprobs"),
        ("temperature", 1.0, "temperature", "sampling.temperature"),
        ("temperature", None, "temperature", "sampling.temperature"),
    ],
)
def test_what_the_runner_does_not_serve_is_refused_by_name(name: str, value: Any, capability: str, field: str) -> None:
    served = replace(SERVED, runner="plain", capabilities=NOTHING, max_logprobs=0)

    (found,) = violations(replace(Generation("hi", temperature=0.0), **{name: value}), served)

    assert found.field == field
    assert "'plain'" in found.description
    assert capability in found.description
    assert "sim" in found.description, "the message names a runner that serves it"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 0),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("min_tokens", 0),
    ],
)
def test_value_that_asks_for_nothing_is_taken_by_any_runner(name: str, value: Any) -> None:
    served = replace(SERVED, capabilities=NOTHING)

    prepare(replace(Generation("hi", temperature=0.0), **{name: value}), served)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"capabilities": NOTHING}, "runner 'sim' does not serve guided_decoding"),
        ({"max_in_flight": 3}, "3 may be in flight; ask the operator for a server with --async-execution off"),
        ({"max_in_flight": 1}, "got 101 bytes, this server takes at most 100"),
    ],
)
def test_a_guide_is_refused_with_what_would_serve_it(change: dict[str, Any], said: str) -> None:
    guide = Guide("choice", ("é" * 50, "x"))
    with pytest.raises(InvalidRequest) as caught:
        prepare(Generation("hi", temperature=0.0, guide=guide), replace(SERVED, **change))
    [violation] = caught.value.violations
    assert violation.field == "guided_decoding.choice"
    assert said in violation.description


def test_all_violations_are_told_at_once() -> None:
    generation = Generation("", temperature=-1.0, max_tokens=0, stop=("",), n=0, guide=Guide("choice"), adapter="a")

    assert fields(generation) == [
        "sampling.temperature",
        "stopping.max_tokens",
        "stopping.stop[0]",
        "output.n",
        "guided_decoding.choice",
        "adapter",
        "text",
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"allowed_token_ids": (65,), "bad_words": ("B", "A")}, "sampling.allowed_token_ids"),
        ({"allowed_token_ids": (256,), "min_tokens": 1}, "sampling.allowed_token_ids"),
        ({"allowed_token_ids": (65, 66), "stop_token_ids": (66, 65), "min_tokens": 3}, "sampling.allowed_token_ids"),
        ({"stop_token_ids": tuple(range(256)), "min_tokens": 1}, "sampling.bad_words"),
    ],
)
def test_options_that_leave_no_token_to_choose_are_refused(options: dict[str, Any], field: str) -> None:
    (found,) = violations(Generation("hi", **options))

    assert found.field == field
    assert "stopping.min_tokens" in found.description


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (65, 67), "bad_words": ("A",)},
        {"allowed_token_ids": (65,), "bad_words": ("AA",)},  # it is banned after another only
        {"allowed_token_ids": (256,)},
        {"allowed_token_ids": (256,), "min_tokens": 1, "ignore_eos": True},
        {"stop_token_ids": tuple(range(257))},
    ],
)
def test_options_that_leave_a_token_to_choose_are_taken(options: dict[str, Any]) -> None:
    assert prepare(Generation("hi", **options)).prompt_token_ids


def test_no_more_violations_are_kept_than_anybody_reads() -> None:
    parts = [{"type": "image", "url": "u"}] * 10_000

    assert len(violations(Generation(ChatPrompt(({"role": "user", "content": parts},))))) == 256


def test_minimum_above_the_maximum_is_refused() -> None:
    assert fields(Generation("hi", max_tokens=3, min_tokens=4)) == ["stopping.min_tokens"]


def test_records_that_are_both_needed_and_refused_are_told() -> None:
    assert fields(Generation("hi", logprobs=1, tokens=False)) == ["output.tokens"]
    assert fields(Generation("hi", include_prompt=True, text=False)) == ["output.include_prompt"]


def test_tokens_that_do_not_fit_are_refused_with_the_number_that_does() -> None:
    (found,) = violations(Generation("x" * 60, max_tokens=5))

    assert found.field == "stopping.max_tokens"
    assert "at most 4 fit" in found.description


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("", "text"), ((), "token_ids.ids"), ([1, 2, 257, 3], "token_ids.ids[2]"), ([-1], "token_ids.ids[0]")],
)
def test_wrong_prompt_is_refused(prompt: Any, field: str) -> None:
    assert fields(Generation(prompt)) == [field]


def test_text_that_is_not_unicode_is_refused() -> None:
    (found,) = violations(Generation("ab\ud800"))

    assert found.field == "text"
    assert "character 2" in found.description


def test_many_wrong_items_are_counted_not_listed() -> None:
    found = [one for one in violations(Generation([999] * 1000)) if one.field.startswith("token_ids.ids")]

    assert len(found) == 17
    assert "984 further" in found[-1].description


def test_prompt_that_leaves_no_room_is_refused_and_the_remedy_named() -> None:
    (found,) = violations(Generation("x" * 64))

    assert found.field == "prompt"
    assert "64 tokens" in found.description
    assert "at most 63" in found.description
    assert "truncation" in found.description


def test_text_that_cannot_fit_is_refused_by_its_bytes_where_none_can_be_lost() -> None:
    (found,) = violations(Generation("é" * 40))

    assert (found.field, found.description.split(",")[0]) == ("prompt", "got at least 80 tokens (80 bytes of text)")
    assert len(prepare(Generation("é" * 40, truncation="left")).prompt_token_ids) == 63
    assert fields(Generation("x" * 11, max_prompt_tokens=10)) == ["prompt"]
    assert len(prepare(Generation("x" * 10, max_prompt_tokens=10)).prompt_token_ids) == 10


def test_truncation_cuts_the_end_that_was_asked_for() -> None:
    text = "0123456789"

    assert bytes(prepare(Generation(text, truncation="left", max_prompt_tokens=3)).prompt_token_ids) == b"789"
    assert bytes(prepare(Generation(text, truncation="right", max_prompt_tokens=3)).prompt_token_ids) == b"012"
    assert len(prepare(Generation("x" * 99, truncation="left")).prompt_token_ids) == 63
    assert fields(Generation(text, truncation="none", max_prompt_tokens=3)) == ["prompt"]


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match=r"'other'.*'a-model'"):
        prepare(Generation("hi", model="other"))


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (ChatPrompt(()), "chat.messages"),
        (ChatPrompt(({"role": "", "content": "x"},)), "chat.messages[0].role"),
        (ChatPrompt(({"role": "", "content": "x"},) * 65), "chat.messages"),  # the model takes 64 tokens
        (
            ChatPrompt(({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "url": "u"}]},)),
            "chat.messages[0].parts[1]",
        ),
        (
            ChatPrompt(({"role": "user", "content": "x"},), add_generation_prompt=True, continue_final_message=True),
            "chat.add_generation_prompt",
        ),
        (ChatPrompt(({"role": "user", "content": "x"},), chat_template="{{ open"), "chat.chat_template"),
        *(
            (
                ChatPrompt(({"role": "user", "content": "x"},), template_kwargs={name: "y", "documents": []}),
                f"chat.chat_template_kwargs[{name}]",
            )
            for name in ("messages", "tools", "add_generation_prompt")
        ),
    ],
)
def test_wrong_conversation_is_refused(chat: ChatPrompt, field: str) -> None:
    assert fields(Generation(chat)) == [field]


def test_unset_options_mean_the_contracts_defaults() -> None:
    request = prepare(Generation("hi"))

    assert request.sampling.temperature == 1.0
    assert request.sampling.top_k == 0
    assert request.sampling.top_p == 1.0
    assert request.max_tokens == 62
    assert request.n == 1
    assert request.eos_token_ids == (256,)
    assert request.wants_text
    assert not request.wants_tokens
    assert request.skip_special_tokens


def test_records_come_with_log_probabilities_unless_said_otherwise() -> None:
    assert prepare(Generation("hi", logprobs=0)).wants_tokens
    assert prepare(Generation("hi", tokens=True)).wants_tokens


def test_eos_is_no_end_when_it_is_to_be_ignored() -> None:
    assert prepare(Generation("hi", ignore_eos=True)).eos_token_ids == ()


def test_bad_words_are_banned_with_and_without_a_space_before() -> None:
    sampling = prepare(Generation("hi", bad_words=("no", " no", " "))).sampling

    assert set(sampling.bad_words_token_ids) == {tuple(b"no"), tuple(b" no"), tuple(b" ")}


def test_seed_is_drawn_when_none_is_given_and_fits_a_signed_number() -> None:
    seeds = {prepare(Generation("hi")).seed for _ in range(20)}

    assert len(seeds) == 20
    assert max(seeds) < 2**63
    assert prepare(Generation("hi", seed=0)).seed == 0


@given(seed=st.integers(0, 2**64 - 1))
def test_outputs_of_a_request_have_seeds_of_their_own(seed: int) -> None:
    seeds = [output_seed(seed, index) for index in range(64)]

    assert seeds[0] == seed
    assert len(set(seeds)) == 64
    assert all(0 <= one < 2**64 for one in seeds)


def test_first_output_alone_asks_for_the_prompts_records() -> None:
    request = prepare(Generation("hi", n=3, prompt_logprobs=1, seed=7))

    adds = [request.add_request(uid=index + 10, index=index) for index in range(3)]

    assert [one.sampling.num_prompt_logprobs for one in adds] == [1, None, None]
    assert [one.sampling.seed for one in adds] == [output_seed(7, index) for index in range(3)]


def test_every_feature_of_a_runner_is_told() -> None:
    told = capability_map(EVERYTHING)

    assert told["seed"] == "device"
    assert told["guided_decoding"] == "host_sync"
    assert "tokenizer" not in told
    assert "max_logprobs" not in told
