"""The messages of a stream are what protobuf makes of the same fields, whichever way they are put together."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from runnerd.v1 import generation_pb2, inference_pb2
from runnerd_service.frontend.types import Candidate, Finish, OutputChunk, PromptRecords, Started, TokenRecord
from runnerd_service.rpc.stream_messages import serialized

INDEXES = st.one_of(st.integers(0, 300), st.sampled_from([16383, 16384, 2**32 - 1]))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@settings(deadline=None)
@given(index=INDEXES, text=TEXTS, tokens=st.lists(st.tuples(INDEXES, TEXTS), max_size=3))
@example(index=0, text="", tokens=[])
@example(index=128, text="x" * 16384, tokens=[(0, "")])
def test_text_and_tokens_are_written_as_protobuf_writes_them(
    index: int, text: str, tokens: list[tuple[int, str]]
) -> None:
    messages = [generation_pb2.Token(id=token_id, text=one) for token_id, one in tokens]
    output = inference_pb2.OutputChunk(index=index, text=text, tokens=messages)
    expected = inference_pb2.StreamGenerateResponse(output=output)
    data = serialized(OutputChunk(index, text, tuple(TokenRecord(*one) for one in tokens)))
    assert data == expected.SerializeToString()
    assert inference_pb2.StreamGenerateResponse.FromString(data).WhichOneof("event") == "output"


def test_records_and_finish_are_in_the_message() -> None:
    record = TokenRecord(7, "a", -0.5, 2, (Candidate(9, "b", -0.25),))
    finish = Finish("stop", prompt_tokens=3, completion_tokens=2, cached_tokens=1, stop_string="b")
    output = inference_pb2.StreamGenerateResponse.FromString(serialized(OutputChunk(1, "a", (record,), finish))).output
    assert (output.index, output.text) == (1, "a")
    (token,) = output.tokens
    assert (token.id, token.text, token.logprob, token.rank) == (7, "a", -0.5, 2)
    assert [(one.id, one.text, one.logprob) for one in token.candidates] == [(9, "b", -0.25)]
    assert output.finish.reason == generation_pb2.FINISH_REASON_STOP
    assert output.finish.stop_string == "b"
    assert output.finish.usage == generation_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)


def test_other_events_are_messages_of_their_own() -> None:
    started = inference_pb2.StreamGenerateResponse.FromString(serialized(Started("a", 2**64 - 1, 5))).started
    assert (started.request_id, started.seed, started.prompt_tokens) == ("a", 2**64 - 1, 5)
    prompt = inference_pb2.StreamGenerateResponse.FromString(serialized(PromptRecords((TokenRecord(1, "x"),)))).prompt
    assert [(one.id, one.text) for one in prompt.tokens] == [(1, "x")]
