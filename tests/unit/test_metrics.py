"""What a scrape tells, and where it cannot be served."""

import socket
import urllib.request
from contextlib import closing
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runnerd_service.engine.messages import BubbleSeconds, EngineReady, HostSeconds, Load, StepTimes
from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.sight import metrics_snapshot
from runnerd_service.metrics import MetricsServer, MetricsSnapshot

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
    """Give the values by name and value of the label, if any."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(one.name, "".join(one.labels.values())): one.value for family in families for one in family.samples}


def snapshot_of(load: Load, ready: EngineReady | None) -> MetricsSnapshot:
    return metrics_snapshot(load, ready, engine_restarts={"hang": 2, "signal": 0}, num_poisonous=1, tenants={})


def scraped(snapshot: MetricsSnapshot) -> Samples:
    with closing(MetricsServer("127.0.0.1", 0, lambda: snapshot)) as server:
        return scrape(server.url)


def test_a_scrape_tells_every_counter_of_the_engine() -> None:
    samples = scraped(snapshot_of(LOAD, READY))
    assert samples == {
        ("vllm:num_requests_running", ""): 3,
        ("vllm:num_requests_waiting", ""): 2,
        ("vllm:kv_cache_usage_perc", ""): 0.25,
        ("vllm:prompt_tokens_total", ""): 110,
        ("vllm:generation_tokens_total", ""): 60,
        ("runnerd_preemptions_total", ""): 1,
        ("runnerd_prefix_cache_queries_total", ""): 100,
        ("runnerd_prefix_cache_hits_total", ""): 40,
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
    assert samples["vllm:kv_cache_usage_perc", ""] == 0
    assert samples["runnerd_device_busy_ratio", ""] == 0


def test_synchronous_execution_is_told() -> None:
    snapshot = replace(snapshot_of(Load(), READY), max_in_flight=1)
    assert scraped(snapshot)["runnerd_async_effective", ""] == 0


def test_each_scrape_reads_the_present_figures() -> None:
    loads = [Load(num_steps=1), Load(num_steps=2)]
    with closing(MetricsServer("127.0.0.1", 0, lambda: snapshot_of(loads.pop(0), READY))) as server:
        assert scrape(server.url)["runnerd_steps_total", ""] == 1
        assert scrape(server.url)["runnerd_steps_total", ""] == 2


def test_a_port_in_use_is_a_configuration_error() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"metrics on 127.0.0.1 port {port}: .*in use.*--metrics-port 0"):
            MetricsServer("127.0.0.1", port, lambda: snapshot_of(Load(), None))


def test_a_host_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot serve metrics on no-such-host"):
        MetricsServer("no-such-host.invalid", 0, lambda: snapshot_of(Load(), None))


def test_a_closed_server_is_gone() -> None:
    server = MetricsServer("127.0.0.1", 0, lambda: snapshot_of(Load(), None))
    server.close()
    with pytest.raises(OSError, match="refused"):
        scrape(server.url)
