"""Traces of requests, as a collector gets them: OTLP over gRPC, from a real daemon."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass

import grpc
import pytest

from runnerd.v1 import generation_pb2, inference_pb2_grpc
from runnerd_client import Client, InvalidRequestError
from runnerd_service.errors import ConfigurationError
from runnerd_service.telemetry.tracing import NoTracer, is_asked_for, open_tracer

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc", reason="needs runnerd[otel]"
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2  # noqa: E402 - an extra
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status  # noqa: E402

CANARY = "a prompt that nobody may see"
STOP = "a stop string that nobody may see"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}


class Collector(trace_service.TraceServiceServicer):
    """Takes what is exported."""

    def __init__(self) -> None:
        self.spans: queue.Queue[Span] = queue.Queue()
        self.resources: list[dict[str, object]] = []
        self.received = b""

    def Export(self, request, context):  # noqa: N802
        self.received += request.SerializeToString()
        for batch in request.resource_spans:
            self.resources.append(attributes(batch.resource))
            for scope in batch.scope_spans:
                for span in scope.spans:
                    self.spans.put(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self) -> tuple[Span, dict[str, Span]]:
        """Wait for a request's spans; give the call's own and those below it, by name."""
        below: dict[str, Span] = {}
        while True:
            span = self.spans.get(timeout=30)
            if span.kind == Span.SPAN_KIND_SERVER:
                assert all(one.parent_span_id == span.span_id for one in below.values())
                assert all(one.trace_id == span.trace_id for one in below.values())
                return span, below
            below[span.name] = span


def attributes(holder) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@dataclass
class Traced:
    """A daemon and where its traces go."""

    address: str
    collector: Collector


@pytest.fixture(scope="module")
def collecting() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    collector = Collector()
    trace_service.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(0).wait(10)


@pytest.fixture(scope="module")
def traced(module_daemon, collecting) -> Traced:
    collector, endpoint = collecting
    daemon = module_daemon(
        "--otlp-traces-endpoint", endpoint, "--runner-option", "step_seconds=0.005", environment=SOON
    )
    return Traced(daemon.wait_until_ready(), collector)


def test_a_request_is_a_span_with_its_phases_below(traced) -> None:
    before = time.time_ns()
    with Client(traced.address) as client:
        client.generate(
            CANARY, request_id="mine", max_tokens=20, ignore_eos=True, seed=7, temperature=0.5, top_k=9, stop=[STOP]
        )
    after = time.time_ns()
    call, phases = traced.collector.trace()
    assert call.name == "text_completion sim"
    assert not call.parent_span_id
    assert call.status.code == Status.STATUS_CODE_UNSET
    told = attributes(call)
    assert told.pop("gen_ai.request.temperature") == pytest.approx(0.5)
    reasons = told.pop("gen_ai.response.finish_reasons")
    assert [one.string_value for one in reasons.values] == ["length"]
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "runnerd",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.model": "sim",
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": False,
        "gen_ai.request.top_k": 9,
        "gen_ai.response.id": "mine",
        "gen_ai.response.model": "sim",
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.input_tokens": len(CANARY),
        "gen_ai.usage.output_tokens": 20,
        "rpc.method": "Generate",
        "rpc.service": "runnerd.v1.InferenceService",
        "rpc.system": "grpc",
    }
    assert set(phases) == {"queue", "prefill", "decode"}
    order = [phases[name] for name in ("queue", "prefill", "decode")]
    moments = [call.start_time_unix_nano, *(one.end_time_unix_nano for one in order), call.end_time_unix_nano]
    assert moments == sorted(moments)
    assert [one.start_time_unix_nano for one in order] == moments[:3]
    # 19 steps of 5 ms; the front end may see the first token late.
    assert phases["decode"].end_time_unix_nano - phases["decode"].start_time_unix_nano >= 10 * 5_000_000
    second = 1_000_000_000  # the two clocks are read one after the other
    assert before - second < moments[0] < moments[-1] < after + second
    assert traced.collector.resources[-1]["service.name"] == "runnerd"


def test_a_request_belongs_to_the_trace_of_its_caller(traced) -> None:
    request = generation_pb2.GenerateRequest(text="hi")
    request.stopping.max_tokens = 2
    request.stopping.ignore_eos = True
    metadata = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", "vendor=x"))
    with grpc.insecure_channel(traced.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        list(stub.StreamGenerate(request, metadata=metadata, timeout=30))
    call, phases = traced.collector.trace()
    assert (call.trace_id.hex(), call.parent_span_id.hex(), call.trace_state) == (TRACE_ID, PARENT_ID, "vendor=x")
    assert attributes(call)["gen_ai.request.stream"] is True
    assert len(phases) == 3


@pytest.mark.parametrize("header", ["nonsense", "00-" + "0" * 32 + "-" + PARENT_ID + "-01", "00-é"])
def test_a_broken_context_begins_a_trace_of_its_own(traced, header) -> None:
    request = generation_pb2.GenerateRequest(text="hi")
    request.stopping.max_tokens = 1
    with grpc.insecure_channel(traced.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.Generate(request, metadata=(("traceparent", header.encode("ascii", "replace").decode()),), timeout=30)
    call, _ = traced.collector.trace()
    assert not call.parent_span_id


def test_a_caller_that_does_not_sample_is_heeded(traced) -> None:
    request = generation_pb2.GenerateRequest(text="hi")
    request.stopping.max_tokens = 1
    with grpc.insecure_channel(traced.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.Generate(request, metadata=(("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"),), timeout=30)
        stub.Generate(request, timeout=30)
    call, _ = traced.collector.trace()  # the second one's: they are sent in order
    assert call.trace_id.hex() != TRACE_ID


def test_a_refused_request_is_an_error_without_phases(traced) -> None:
    with Client(traced.address) as client, pytest.raises(InvalidRequestError):
        client.generate("hi", top_p=7.0)
    call, phases = traced.collector.trace()
    assert not phases
    assert call.status.code == Status.STATUS_CODE_ERROR
    assert attributes(call)["error.type"] == "invalid_request"


def test_a_cancelled_request_ends_with_its_last_phase(traced) -> None:
    with Client(traced.address) as client:
        stream = client.stream("hi", max_tokens=5000, ignore_eos=True)
        for _, message in zip(range(3), stream, strict=False):
            assert message
        stream.cancel()
        call, phases = traced.collector.trace()
    assert attributes(call)["error.type"] == "cancelled"
    assert "gen_ai.response.finish_reasons" not in {one.key for one in call.attributes if one.value.array_value.values}
    assert set(phases) == {"queue", "prefill", "decode"}


def test_no_prompt_and_no_stop_string_is_sent(traced) -> None:
    assert traced.collector.received
    assert CANARY.encode() not in traced.collector.received
    assert STOP.encode() not in traced.collector.received


def test_a_collector_that_is_gone_holds_up_neither_requests_nor_the_stop(daemon) -> None:
    # Nobody listens on port 1; the environment is as good as the flag.
    environment = {**SOON, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_BSP_MAX_QUEUE_SIZE": "8"}
    environment["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] = "8"
    server = daemon(environment=environment)
    with Client(server.wait_until_ready(), timeout=30) as client:
        for _ in range(30):
            client.generate("hi", max_tokens=1)
    server.terminate()
    assert server.wait() == 0
    assert "the last traces could not be sent in 3 s" in server.log()


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("endpoint", "environment", "asked_for"),
    [
        (None, {}, False),
        ("http://127.0.0.1:1", {}, True),
        (None, ENDPOINT, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        (None, {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ("http://127.0.0.1:1", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_traces_are_off_unless_an_endpoint_is_named(
    endpoint: str | None, environment: dict[str, str], asked_for: bool
) -> None:
    assert is_asked_for(endpoint, environment) is asked_for
    assert asked_for or isinstance(open_tracer(endpoint, environment), NoTracer)


def test_what_cannot_be_sent_is_refused() -> None:
    environment = {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_PROTOCOL: got 'http/json', expected grpc"):
        open_tracer(None, environment)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runnerd_service.telemetry.otlp", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'runnerd\[otel\]', or turn them off"):
        open_tracer("http://127.0.0.1:1", {})
