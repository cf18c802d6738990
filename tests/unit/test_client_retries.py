"""Which calls the client makes again, seen by a server that refuses the first ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from runnerd.v1 import inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from runnerd_client import AsyncClient, Client, OverloadedError, UnavailableError
from runnerd_client.retries import MAX_ATTEMPTS, RETRIED_METHODS

SERVICES = (inference_pb2.DESCRIPTOR.services_by_name, server_pb2.DESCRIPTOR.services_by_name)


class Refusing(
    inference_pb2_grpc.InferenceServiceServicer,
    server_pb2_grpc.ModelServiceServicer,
    server_pb2_grpc.ServerServiceServicer,
):
    """Counts calls; refuses those whose method has refusals left."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.code = grpc.StatusCode.UNAVAILABLE

    def count(self, method: str, context: grpc.ServicerContext) -> None:
        self.calls[method] += 1
        if self.calls[method] <= self.refusals[method]:
            context.abort(self.code, "not now")

    def Generate(self, request, context):  # noqa: N802
        self.count("Generate", context)
        return inference_pb2.GenerateResponse()

    def StreamGenerate(self, request, context):  # noqa: N802
        self.count("StreamGenerate", context)
        yield inference_pb2.StreamGenerateResponse(started=inference_pb2.Started())
        if request.text == "breaks":
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def Tokenize(self, request, context):  # noqa: N802
        self.count("Tokenize", context)
        return inference_pb2.TokenizeResponse(ids=[1])

    def CaptureTrace(self, request, context):  # noqa: N802
        self.count("CaptureTrace", context)
        return server_pb2.CaptureTraceResponse()


@pytest.fixture
def served() -> Iterator[tuple[Refusing, str]]:
    servicer = Refusing()
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_question_is_asked_again(served) -> None:
    servicer, address = served
    servicer.refusals["Tokenize"] = MAX_ATTEMPTS - 1
    with Client(address, timeout=30) as client:
        assert client.tokenize("x").ids == [1]
    assert servicer.calls["Tokenize"] == MAX_ATTEMPTS


def test_attempts_end(served) -> None:
    servicer, address = served
    servicer.refusals["Tokenize"] = 100
    with Client(address, timeout=30) as client, pytest.raises(UnavailableError, match="not now"):
        client.tokenize("x")
    assert servicer.calls["Tokenize"] == MAX_ATTEMPTS


def test_a_stream_is_begun_again_until_it_has_started(served) -> None:
    servicer, address = served
    servicer.refusals["StreamGenerate"] = 2
    with Client(address, timeout=30) as client:
        assert [message.WhichOneof("event") for message in client.stream("x")] == ["started"]
        assert servicer.calls["StreamGenerate"] == 3
        with client.stream("breaks") as stream:
            assert next(stream).HasField("started")
            with pytest.raises(UnavailableError, match="gone"):
                next(stream)
    assert servicer.calls["StreamGenerate"] == 4


async def test_the_asynchronous_client_does_the_same(served) -> None:
    servicer, address = served
    servicer.refusals["Tokenize"] = servicer.refusals["StreamGenerate"] = 1
    async with AsyncClient(address, timeout=30) as client:
        assert (await client.tokenize("x")).ids == [1]
        assert [message.WhichOneof("event") async for message in client.stream("x")] == ["started"]
    assert (servicer.calls["Tokenize"], servicer.calls["StreamGenerate"]) == (2, 2)


def test_what_costs_as_much_again_is_left_to_the_caller(served) -> None:
    servicer, address = served
    servicer.refusals["Generate"] = servicer.refusals["CaptureTrace"] = 1
    with Client(address, timeout=30) as client:
        for call in (lambda: client.generate("x"), lambda: client.capture_trace(1)):
            with pytest.raises(UnavailableError):
                call()
    assert servicer.calls == {"Generate": 1, "CaptureTrace": 1}


def test_a_full_server_is_not_asked_again(served) -> None:
    servicer, address = served
    servicer.code = grpc.StatusCode.RESOURCE_EXHAUSTED
    servicer.refusals["Tokenize"] = servicer.refusals["StreamGenerate"] = 1
    with Client(address, timeout=30) as client:
        with pytest.raises(OverloadedError):
            client.tokenize("x")
        with pytest.raises(OverloadedError):
            next(client.stream("x"))
    assert servicer.calls == {"Tokenize": 1, "StreamGenerate": 1}


def test_each_method_that_is_named_exists() -> None:
    existing = {
        (service.full_name, method.name)
        for services in SERVICES
        for service in services.values()
        for method in service.methods
    }
    assert set(RETRIED_METHODS) <= existing
    left = {method for _, method in existing - set(RETRIED_METHODS)}
    assert left == {"Generate", "CaptureTrace", "Drain", "ResetPrefixCache"}
