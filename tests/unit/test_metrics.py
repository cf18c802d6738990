"""What a scrape tells, and where it cannot be served."""

import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from runnerd_service.engine.messages import BubbleSeconds, EngineReady, HostSeconds, Load, StepTimes
from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.sight import metrics_snapshot
from runnerd_service.metrics import MetricsSnapshot, metrics_route
from runnerd_service.telemetry.histogram import Histogram, decades
from runnerd_service.telemetry.requests import LATENCIES, SIZES, RequestStats, RequestTimes
from runnerd_service.telemetry.web import WebServer

LOAD = Load(
    num_running=3,
    num_waiting=2,
    num_used_blocks=5,
    num_blocks=20,
    num_steps=7,
    num_graph_steps=4,
    num_graph_misses=2,
    depth=1,
    num_preemptions=1,
    prefix_cache_queries=100,
    prefix_cache_hits=40,
    prompt_tokens=110,
    generation_tokens=60,
    times=StepTimes(
        device_busy=6.0,
        device_idle=1.5,
        bubble=BubbleSeconds(inbox=0.1, schedule=0.2, prepare=0.3, update=0.4, send=0.5, copy=0.25, other=0.25),
        host=HostSeconds(inbox=1, schedule=2, prepare=3, update=4, send=5, wait=6),
    ),
)
READY = EngineReady("m", "a", 10, 10, (), "float32", 0, 0, "cpu", 20, 16, max_in_flight=2)

Samples = dict[tuple[str, str], float]


def scrape(url: str) -> Samples:
    """Give the values by name and value of the label, if any, besides those that all of vLLM's names have."""
    samples: Samples = {}
    with urllib.request.urlopen(url, timeout=10) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                if sample.name.startswith("vllm:"):
                    assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
                samples[sample.name, "".join(labels.values())] = sample.value
    return samples


def snapshot_of(load: Load, ready: EngineReady | None, requests: RequestStats | None = None) -> MetricsSnapshot:
    return metrics_snapshot(
        load,
        ready,
        engine_restarts={"hang": 2, "signal": 0},
        num_poisonous=1,
        tenants={},
        model_name=None if ready is None else "m",
        requests=requests or RequestStats(),
    )


def serving(read: Callable[[], MetricsSnapshot], port: int = 0, host: str = "127.0.0.1") -> WebServer:
    return WebServer(host, port, {"/metrics": metrics_route(read)})


def scraped(snapshot: MetricsSnapshot) -> Samples:
    with closing(serving(lambda: snapshot)) as server:
        return scrape(f"{server.url}/metrics")


def test_a_scrape_tells_every_counter_of_the_engine() -> None:
    samples = scraped(snapshot_of(LOAD, READY))
    histograms = tuple(f"vllm:{name}_" for name in (*LATENCIES, *SIZES))
    assert {sample: value for sample, value in samples.items() if not sample[0].startswith(histograms)} == {
        ("vllm:num_requests_running", ""): 3,
        ("vllm:num_requests_waiting", ""): 2,
        ("vllm:kv_cache_usage_perc", ""): 0.25,
        ("vllm:prompt_tokens_total", ""): 110,
        ("vllm:generation_tokens_total", ""): 60,
        ("vllm:cache_config_info", "1620"): 1,
        ("vllm:num_preemptions_total", ""): 1,
        ("vllm:prefix_cache_queries_total", ""): 100,
        ("vllm:prefix_cache_hits_total", ""): 40,
        ("runnerd_steps_total", ""): 7,
        ("runnerd_graph_steps_total", ""): 4,
        ("runnerd_graph_misses_total", ""): 2,
        ("runnerd_poisonous_requests_total", ""): 1,
        ("runnerd_engine_restarts_total", "hang"): 2,
        ("runnerd_engine_restarts_total", "signal"): 0,
        ("runnerd_device_busy_seconds_total", ""): 6,
        ("runnerd_device_idle_seconds_total", ""): 1.5,
        ("runnerd_device_busy_ratio", ""): 0.75,
        ("runnerd_async_effective", ""): 1,
        ("runnerd_max_in_flight", ""): 2,
        ("runnerd_depth", ""): 1,
        ("runnerd_step_bubble_seconds_total", "inbox"): 0.1,
        ("runnerd_step_bubble_seconds_total", "schedule"): 0.2,
        ("runnerd_step_bubble_seconds_total", "prepare"): 0.3,
        ("runnerd_step_bubble_seconds_total", "update"): 0.4,
        ("runnerd_step_bubble_seconds_total", "send"): 0.5,
        ("runnerd_step_bubble_seconds_total", "copy"): 0.25,
        ("runnerd_step_bubble_seconds_total", "other"): 0.25,
        ("runnerd_host_step_seconds_total", "inbox"): 1,
        ("runnerd_host_step_seconds_total", "schedule"): 2,
        ("runnerd_host_step_seconds_total", "prepare"): 3,
        ("runnerd_host_step_seconds_total", "update"): 4,
        ("runnerd_host_step_seconds_total", "send"): 5,
        ("runnerd_host_step_seconds_total", "wait"): 6,
    }


def test_before_the_engine_is_ready_its_mode_is_not_told() -> None:
    samples = scraped(snapshot_of(Load(), None))
    assert ("runnerd_async_effective", "") not in samples
    assert ("runnerd_max_in_flight", "") not in samples
    assert not any(name.startswith("vllm:") for name, _ in samples)
    assert samples["runnerd_device_busy_ratio", ""] == 0


def test_synchronous_execution_is_told() -> None:
    snapshot = replace(snapshot_of(Load(), READY), max_in_flight=1)
    assert scraped(snapshot)["runnerd_async_effective", ""] == 0


def test_each_scrape_reads_the_present_figures() -> None:
    loads = [Load(num_steps=1), Load(num_steps=2)]
    with closing(serving(lambda: snapshot_of(loads.pop(0), READY))) as server:
        assert scrape(f"{server.url}/metrics")["runnerd_steps_total", ""] == 1
        assert scrape(f"{server.url}/metrics")["runnerd_steps_total", ""] == 2


@pytest.mark.parametrize(
    "accepted",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
        "text/plain",
    ],
)
def test_names_keep_their_colon_whatever_format_a_scraper_prefers(accepted: str) -> None:
    with closing(serving(lambda: snapshot_of(LOAD, READY))) as server:
        request = urllib.request.Request(f"{server.url}/metrics", headers={"Accept": accepted})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            text = answer.read().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in text.splitlines()


def test_a_port_in_use_is_a_configuration_error() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"metrics on 127.0.0.1 port {port}: .*in use.*--metrics-port 0"):
            serving(lambda: snapshot_of(Load(), None), port)


def test_a_host_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot serve metrics on no-such-host"):
        serving(lambda: snapshot_of(Load(), None), host="no-such-host.invalid")


def test_a_closed_server_is_gone() -> None:
    server = serving(lambda: snapshot_of(Load(), None))
    server.close()
    with pytest.raises(OSError, match="refused"):
        scrape(f"{server.url}/metrics")


def test_a_request_that_ended_is_in_every_histogram() -> None:
    stats, ms = RequestStats(), 1_000_000
    times = RequestTimes(arrival_ns=time.monotonic_ns() - 10_000 * ms, num_outputs=2, max_tokens=30)
    times.num_prompt_tokens, times.num_output_tokens = 7, 22
    times.began_ns = times.arrival_ns + 40 * ms
    times.first_token_ns = times.began_ns + 90 * ms
    times.last_token_ns = times.first_token_ns + 800 * ms
    times.finish_reasons = ["stop", "length"]
    stats.ended(times, "finished")
    samples = scraped(snapshot_of(LOAD, READY, stats))
    assert samples["runnerd_requests_total", "finished"] == 1
    assert samples["vllm:request_success_total", "stop"] == samples["vllm:request_success_total", "length"] == 1
    sums = {name: samples[f"vllm:{name}_sum", ""] for name in (*LATENCIES, *SIZES)}
    assert sums.pop("e2e_request_latency_seconds") == pytest.approx((times.end_ns - times.arrival_ns) / 1e9)
    assert sums == pytest.approx(
        {
            "time_to_first_token_seconds": 0,  # these two are counted as tokens come
            "inter_token_latency_seconds": 0,
            "request_time_per_output_token_seconds": 0.08,  # 11 tokens each, so 10 times 80 ms
            "request_queue_time_seconds": 0.04,
            "request_prefill_time_seconds": 0.09,
            "request_decode_time_seconds": 0.8,
            "request_inference_time_seconds": 0.89,
            "request_prompt_tokens": 7,
            "request_generation_tokens": 22,
            "request_params_n": 2,
            "request_params_max_tokens": 30,
        }
    )
    assert times.end_ns >= times.last_token_ns


def test_a_refused_request_counts_by_its_outcome_alone() -> None:
    stats = RequestStats()
    stats.ended(RequestTimes(), "overloaded")
    samples = scraped(snapshot_of(LOAD, READY, stats))
    assert samples["runnerd_requests_total", "overloaded"] == 1
    assert not any(value for (name, _), value in samples.items() if name.endswith("_count"))


def test_the_time_between_tokens_is_counted_for_each_output_apart() -> None:
    stats = RequestStats()
    times = RequestTimes(num_outputs=2)
    first, second = stats.meter(times), stats.meter(times)
    first.note(0, 5, 0)
    first.note(1, 0, 16)
    second.note(1, 7, 32)
    second.note(3, 0, 0)
    first.note(1, 0, 0)
    assert (times.began_ns, times.num_cached_tokens, times.num_output_tokens) == (5, 32, 6)
    assert 0 < times.first_token_ns <= times.last_token_ns
    latencies = stats.latencies()
    assert latencies["inter_token_latency_seconds"].counts[-1] == 2
    assert latencies["time_to_first_token_seconds"].counts[-1] == 1
    assert latencies["time_to_first_token_seconds"].total == (times.first_token_ns - times.arrival_ns) * 1e-9


@given(st.lists(st.one_of(st.sampled_from([0.0, 1, 1.5, 2, 30, 100]), st.floats(0, 200)), max_size=40))
def test_a_bucket_counts_the_values_up_to_its_bound(values: list[float]) -> None:
    bounds = decades(0, 2, (1, 1.5, 2, 3, 5, 7.5))
    assert bounds[:3] == (1, 1.5, 2)
    assert bounds[-1] == 100
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (*(sum(value <= bound for value in values) for bound in bounds), len(values))
    assert snapshot.total == pytest.approx(sum(values))
