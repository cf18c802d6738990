"""Prometheus metrics over HTTP, on a port and a thread of their own. They are read when somebody asks.

The collector asks for a snapshot at each scrape and keeps nothing itself; totals are since the server's start. This
module knows neither engine nor gRPC: whoever starts it says where the figures come from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runnerd_service.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What a tenant has and had. Totals are since the server's start."""

    num_running: int = 0
    """Outputs that have begun."""
    num_waiting: int = 0
    """Outputs that gave nothing yet."""
    num_requests: int = 0
    """Requests that were accepted and have ended."""
    num_refused: int = 0
    """Requests for which there was no room."""
    prompt_tokens: int = 0
    """Of the requests that have ended."""
    generation_tokens: int = 0
    """Of the requests that have ended."""


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """What is told at a scrape. Counts and seconds are totals since the server's start."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """0 to 1."""
    num_steps: int
    num_graph_steps: int
    num_graph_misses: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    device_busy_seconds: float
    device_idle_seconds: float
    bubble_seconds: Mapping[str, float]
    """By cause."""
    host_seconds: Mapping[str, float]
    """By phase of the engine's loop."""
    max_in_flight: int | None
    """None until the engine has started."""
    depth: int
    """Steps that may be in flight now; 0 before the first step."""
    engine_restarts: Mapping[str, int]
    """By cause."""
    num_poisonous: int
    """Requests that were failed because engines died of them."""
    tenants: Mapping[str, TenantFigures]
    """By tenant; a bounded number of names."""

    @property
    def device_busy_ratio(self) -> float:
        """Share of the time with work in which the device computed; 0 before the first step."""
        with_work = self.device_busy_seconds + sum(self.bubble_seconds.values())
        return self.device_busy_seconds / with_work if with_work else 0.0


class SnapshotCollector(Collector):
    """Turns a snapshot into metrics at each scrape.

    Args:
        read: Gives the present snapshot; called from the threads of the HTTP server.
    """

    def __init__(self, read: Callable[[], MetricsSnapshot]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Give the metrics as they are now."""
        now = self._read()
        for name, text, gauge in (
            ("vllm:num_requests_running", "Requests whose tokens are being computed.", now.num_running),
            ("vllm:num_requests_waiting", "Requests that wait for a place.", now.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use by live requests, 0 to 1.", now.kv_cache_usage),
            (
                "runnerd_device_busy_ratio",
                "Share of the time with work in which the device computed, 0 to 1.",
                now.device_busy_ratio,
            ),
        ):
            yield GaugeMetricFamily(name, text, gauge)
        if now.max_in_flight is not None:
            effective = now.max_in_flight > 1
            yield GaugeMetricFamily("runnerd_async_effective", "1 when steps overlap, 0 when not.", effective)
            text = "Steps that may be unresolved at once."
            yield GaugeMetricFamily("runnerd_max_in_flight", text, now.max_in_flight)
            text = "Steps that may be unresolved now: 1 while --adaptive-depth finds nothing to gain by more."
            yield GaugeMetricFamily("runnerd_depth", text, now.depth or now.max_in_flight)
        for name, text, total in (
            ("vllm:prompt_tokens", "Prompt tokens computed or found in the prefix cache.", now.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", now.generation_tokens),
            ("runnerd_preemptions", "Requests that lost their place to another.", now.num_preemptions),
            (
                "runnerd_prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                now.prefix_cache_queries,
            ),
            ("runnerd_prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.prefix_cache_hits),
            ("runnerd_steps", "Steps of the model.", now.num_steps),
            ("runnerd_graph_steps", "Steps that ran as captured graphs.", now.num_graph_steps),
            (
                "runnerd_graph_misses",
                "Steps that could have run as a captured graph, had one of their size been captured.",
                now.num_graph_misses,
            ),
            (
                "runnerd_poisonous_requests",
                "Requests that were failed because the engine died of them.",
                now.num_poisonous,
            ),
            ("runnerd_device_busy_seconds", "Time in which the device computed steps.", now.device_busy_seconds),
            (
                "runnerd_device_idle_seconds",
                "Time between steps in which no request could have run.",
                now.device_idle_seconds,
            ),
        ):
            yield CounterMetricFamily(name, text, total)
        yield _labelled(
            "runnerd_step_bubble_seconds",
            "Time in which the device was idle although a request could have run, by what held it up.",
            "cause",
            now.bubble_seconds,
        )
        yield _labelled(
            "runnerd_engine_restarts",
            "Restarts of the engine, by what made them necessary.",
            "cause",
            now.engine_restarts,
        )
        yield from _tenant_metrics(now.tenants)
        yield _labelled("runnerd_host_step_seconds", "Time of the engine's loop by phase.", "phase", now.host_seconds)


class MetricsServer:
    """Serves the metrics at ``/metrics``. Close it when done.

    Args:
        host: Address to listen on.
        port: TCP port; 0 takes a free one.
        read: Gives the present snapshot; called from other threads.

    Raises:
        ConfigurationError: It cannot listen there.
    """

    def __init__(self, host: str, port: int, read: Callable[[], MetricsSnapshot]) -> None:
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(read))
        self._server, self._thread = _start(host.strip("[]"), port, registry)
        self._host = host.strip("[]")

    @property
    def port(self) -> int:
        """The TCP port; the chosen one when 0 was asked for."""
        return self._server.server_port

    @property
    def url(self) -> str:
        """What a scraper is given."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening. Harmless when closed."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _start(host: str, port: int, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread]:
    try:
        return start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics on {host} port {port}: {error.strerror or error}; give another --metrics-port, or "
            "--metrics-port 0 for a free one"
        ) from error


_TENANT_METRICS = (
    (GaugeMetricFamily, "runnerd_tenant_outputs_running", "num_running", "Outputs of the tenant that have begun."),
    (
        GaugeMetricFamily,
        "runnerd_tenant_outputs_waiting",
        "num_waiting",
        "Outputs of the tenant that gave nothing yet.",
    ),
    (CounterMetricFamily, "runnerd_tenant_requests", "num_requests", "Accepted requests of the tenant that ended."),
    (CounterMetricFamily, "runnerd_tenant_requests_refused", "num_refused", "Requests refused for want of room."),
    (CounterMetricFamily, "runnerd_tenant_prompt_tokens", "prompt_tokens", "Prompt tokens of requests that ended."),
    (CounterMetricFamily, "runnerd_tenant_generation_tokens", "generation_tokens", "Tokens given to those."),
)


def _tenant_metrics(tenants: Mapping[str, TenantFigures]) -> Iterator[Metric]:
    for kind, name, attribute, text in _TENANT_METRICS:
        family = kind(name, text, labels=["tenant"])
        for tenant, figures in tenants.items():
            family.add_metric([tenant], getattr(figures, attribute))
        yield family


def _labelled(name: str, text: str, label: str, values: Mapping[str, Any]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
