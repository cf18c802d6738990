"""An output as it grows: what is given in parts is what is given at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_service.engine.messages import FinishKind, Logprobs, RequestOutput, Sampling
from runnerd_service.frontend.output import OutputBuffer
from runnerd_service.frontend.preparation import PreparedRequest
from runnerd_service.frontend.stop import StopStrings
from runnerd_service.frontend.tokenizer import ByteTokenizer
from runnerd_service.frontend.types import Candidate, Finish, OutputChunk

TOKENIZER = ByteTokenizer()
EOS = 256
REQUEST = PreparedRequest(
    prompt_token_ids=(1, 2),
    prompt_text="",
    sampling=Sampling(),
    max_tokens=100,
    eos_token_ids=(EOS,),
    stop_token_ids=(),
    n=1,
    stops=None,
    include_stop=False,
    wants_text=True,
    wants_tokens=True,
    skip_special_tokens=True,
    cumulative=False,
    priority=0,
    cache_salt="",
    time_limit_seconds=None,
)


def logprobs_of(token_ids: Sequence[int]) -> tuple[Logprobs, ...]:
    return tuple(Logprobs(one, -one / 8, one + 1, ((one, -one / 8), (65, -9.0))) for one in token_ids)


def run(
    request: PreparedRequest,
    parts: Sequence[Sequence[int]],
    finish: FinishKind | None = "length",
    *,
    take_after: Sequence[bool] = (True,),
    with_logprobs: bool = False,
) -> tuple[list[OutputChunk], bool]:
    """Push the parts, the last with the finish; give the chunks taken, and whether a stop string was found."""
    buffer = OutputBuffer(0, request, TOKENIZER)
    chunks: list[OutputChunk] = []
    found = False
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        found = buffer.push(
            RequestOutput(
                uid=1,
                token_ids=tuple(part),
                logprobs=logprobs_of(part) if with_logprobs else (),
                finish=finish if is_last else None,
                matched_token_id=part[-1] if is_last and finish in ("eos", "stop_token") else None,
                num_cached_tokens=1,
            )
        )
        if take_after[number % len(take_after)] and (chunk := buffer.take()) is not None:
            chunks.append(chunk)
        if found:
            break
    if (chunk := buffer.take()) is not None:
        chunks.append(chunk)
    assert buffer.take() is None, "nothing is given twice"
    return chunks, found


def joined(chunks: Sequence[OutputChunk]) -> tuple[str, list[int], str, Finish | None]:
    """Give the text, the token ids, the records' texts joined, and the finish."""
    text = "".join(chunk.text for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert all(chunk.finish is None for chunk in chunks[:-1])
    return text, [token.id for token in tokens], "".join(token.text for token in tokens), chunks[-1].finish


PARTS = st.lists(st.lists(st.one_of(st.sampled_from(b"abc"), st.integers(0, 255)), max_size=5), min_size=1, max_size=12)
TAKES = st.lists(st.booleans(), min_size=1, max_size=4)


@settings(deadline=None)
@given(parts=PARTS, takes=TAKES, cumulative=st.booleans())
def test_parts_merged_in_any_way_give_the_whole(parts: list[list[int]], takes: list[bool], cumulative: bool) -> None:
    ids = [one for part in parts for one in part]

    chunks, _ = run(replace(REQUEST, cumulative=cumulative), parts, take_after=takes, with_logprobs=True)

    text, token_ids, record_text, finish = joined(chunks[-1:] if cumulative else chunks)
    assert text == bytes(ids).decode(errors="replace")
    assert token_ids == ids
    assert finish == Finish("length", prompt_tokens=2, completion_tokens=len(ids), cached_tokens=1)
    assert record_text == text


@settings(deadline=None)
@given(
    parts=PARTS,
    takes=TAKES,
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_string_cuts_text_records_and_count(
    parts: list[list[int]], takes: list[bool], stops: list[str], include: bool
) -> None:
    ids = [one for part in parts for one in part]
    whole = bytes(ids).decode(errors="replace")
    request = replace(REQUEST, stops=StopStrings(stops), include_stop=include)

    chunks, found = run(request, parts, take_after=takes)

    text, token_ids, record_text, finish = joined(chunks)
    assert finish is not None
    matches = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    if not matches:
        assert (text, record_text, token_ids, finish.reason) == (whole, whole, ids, "length")
        return
    end, _, stop = min(matches)
    assert text == (whole[:end] if include else whole[: end - len(stop)])
    assert record_text == text
    assert (finish.reason, finish.stop_string) == ("stop", stop)
    # The count ends with the token that completed the stop string; what came after it in the same step is dropped.
    completed = next(n for n in range(len(ids) + 1) if bytes(ids[:n]).decode(errors="replace").startswith(whole[:end]))
    assert len(token_ids) == finish.completion_tokens
    assert found or token_ids == ids
    assert abs(finish.completion_tokens - completed) <= 3, "a broken character may end a token later"


def test_beginning_of_a_stop_string_is_never_shown() -> None:
    request = replace(REQUEST, stops=StopStrings(["STOP"]))

    chunks, found = run(request, [b"a", b"S", b"T", b"O", b"P", b"x"])

    assert found
    assert [chunk.text for chunk in chunks] == ["a", ""]
    assert [token.text for chunk in chunks for token in chunk.tokens] == ["a", "", "", "", ""]
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.completion_tokens == 5


def test_text_that_was_held_back_is_given_when_it_was_no_stop_string() -> None:
    request = replace(REQUEST, stops=StopStrings(["STOP"]))

    chunks, _ = run(request, [b"S", b"T", b"R", b"S"])

    assert [chunk.text for chunk in chunks] == ["STR", "S"]
    assert [[token.text for token in chunk.tokens] for chunk in chunks] == [["S", "T", "R"], ["S"]]


def test_text_alone_is_given_as_soon_as_it_is_safe() -> None:
    request = replace(REQUEST, stops=StopStrings(["\n\n"]), wants_tokens=False)

    chunks, _ = run(request, [b"one\n", b"two\n"])

    assert [chunk.text for chunk in chunks] == ["one", "\ntwo\n"]


def test_eos_is_recorded_and_counted_but_not_shown() -> None:
    chunks, _ = run(REQUEST, [b"hi", (EOS,)], "eos")

    text, token_ids, _, finish = joined(chunks)
    assert (text, token_ids) == ("hi", [*b"hi", EOS])
    assert finish == Finish("stop", prompt_tokens=2, completion_tokens=3, cached_tokens=1, eos_token_id=EOS)


def test_eos_is_shown_with_the_other_special_tokens_when_those_are_asked_for() -> None:
    chunks, _ = run(replace(REQUEST, skip_special_tokens=False), [b"hi", (EOS,)], "eos")

    assert joined(chunks)[0] == "hi<eos>"


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_stop_token_is_shown_only_when_asked_for(include: bool, text: str) -> None:
    chunks, _ = run(replace(REQUEST, include_stop=include), [b"hi!"], "stop_token")

    shown, token_ids, record_text, finish = joined(chunks)
    assert (shown, record_text, token_ids) == (text, text, [*b"hi!"])
    assert finish is not None
    assert finish.stop_token_id == ord("!")


def test_unfinished_character_at_the_end_belongs_to_the_last_token() -> None:
    chunks, _ = run(REQUEST, [b"a", b"\xf0\x9f"])

    assert joined(chunks)[0] == "a\ufffd"
    assert [token.text for token in chunks[-1].tokens] == ["", "\ufffd"]


@pytest.mark.parametrize("stops", [None, StopStrings(["zzz"])])
@pytest.mark.parametrize("ending", ["length", "time_limit", "without a token"])
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("is_merged", [False, True])
def test_records_have_the_text_of_an_output_that_is_cut_anywhere(
    stops: StopStrings | None, ending: str, cumulative: bool, is_merged: bool
) -> None:
    whole = "a😀e\u0301ü".encode()
    for cut in range(1, len(whole) + 1):
        buffer = OutputBuffer(0, replace(REQUEST, stops=stops, cumulative=cumulative), TOKENIZER)
        chunks = []
        for number, token in enumerate(whole[:cut], start=1):
            is_last = ending == "length" and number == cut
            buffer.push(RequestOutput(uid=1, token_ids=(token,), finish="length" if is_last else None))
            if not is_merged and (chunk := buffer.take()) is not None:
                assert chunk.text or chunk.tokens or chunk.finish
                chunks.append(chunk)
        if ending == "time_limit":
            buffer.end_by_time()
        elif ending == "without a token":
            buffer.push(RequestOutput(uid=1, token_ids=(), finish="length"))
        if (chunk := buffer.take()) is not None:
            chunks.append(chunk)
        text, token_ids, record_text, finish = joined(chunks[-1:] if cumulative else chunks)
        assert text == record_text == whole[:cut].decode(errors="replace")
        assert token_ids == [*whole[:cut]]
        assert finish is not None
        assert finish.completion_tokens == cut


def test_replacement_character_that_is_a_stop_string_is_found_at_the_end() -> None:
    chunks, _ = run(replace(REQUEST, stops=StopStrings(["\ufffd"])), [b"a", b"\xf0"])

    text, _, _, finish = joined(chunks)
    assert text == "a"
    assert finish is not None
    assert finish.stop_string == "\ufffd"


def test_records_carry_their_own_log_probabilities() -> None:
    chunks, _ = run(REQUEST, [b"hi", b"!"], take_after=(False,), with_logprobs=True)

    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert [(token.id, token.logprob, token.rank) for token in tokens] == [(one, -one / 8, one + 1) for one in b"hi!"]
    assert tokens[1].candidates == (Candidate(ord("i"), "i", -105 / 8), Candidate(65, "A", -9.0))


def test_prompt_is_shown_first_when_asked_for() -> None:
    chunks, _ = run(replace(REQUEST, prompt_text="Q: "), [b"h", b"i"])

    assert [chunk.text for chunk in chunks] == ["Q: h", "i"]


def test_finish_alone_is_given_when_neither_text_nor_records_are_asked_for() -> None:
    chunks, _ = run(replace(REQUEST, wants_text=False, wants_tokens=False), [b"h", b"i", b"!"])

    assert [(chunk.text, chunk.tokens) for chunk in chunks] == [("", ())]
    assert chunks[0].finish is not None
    assert chunks[0].finish.completion_tokens == 3


def test_stop_string_ends_an_output_whose_text_is_not_asked_for() -> None:
    request = replace(REQUEST, wants_text=False, wants_tokens=False, stops=StopStrings(["b"]))

    chunks, found = run(request, [b"a", b"b", b"c"])

    assert found
    assert [(chunk.text, chunk.tokens) for chunk in chunks] == [("", ())]


@pytest.mark.parametrize(
    ("stop", "output", "text", "reason", "found"),
    [
        ("STOP", b"aST\xc3", "aST\ufffd", "time_limit", None),
        ("\ufffd", b"a\xe2", "a", "stop", "\ufffd"),  # what was held back completes it
    ],
)
def test_time_that_is_over_gives_what_was_held_back(stop, output, text, reason, found) -> None:
    buffer = OutputBuffer(3, replace(REQUEST, stops=StopStrings([stop])), TOKENIZER)
    buffer.push(RequestOutput(uid=1, token_ids=tuple(output)))

    buffer.end_by_time()

    chunk = buffer.take()
    assert chunk is not None
    assert (chunk.index, chunk.text) == (3, text)
    assert chunk.finish == Finish(
        reason, prompt_tokens=2, completion_tokens=len(output), cached_tokens=0, stop_string=found
    )


def test_finish_without_a_token_is_given() -> None:
    chunks, _ = run(REQUEST, [b"a", b""])

    assert chunks[-1].finish is not None
    assert joined(chunks)[0] == "a"
