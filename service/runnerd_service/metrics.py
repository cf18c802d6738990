"""The figures of the server, and how Prometheus is told them. They are read when somebody asks.

The collector asks for a snapshot at each scrape and keeps nothing itself; totals are since the server's start. A figure
that vLLM has, too, goes by vLLM's name and labels, so that dashboards and gateways find it; all others are called
``runnerd_``. This module knows neither engine nor gRPC: whoever makes the collector says where the figures come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runnerd_service.telemetry.histogram import HistogramSnapshot
from runnerd_service.telemetry.requests import LATENCIES, SIZES
from runnerd_service.telemetry.web import Answer, Route


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
class ReloadFigures:
    """How files were read again. Counts are since the server's start, and of changes: not of each try."""

    num_ok: int
    num_failed: int
    in_use: bool
    """Whether what the files hold now is in use; False: it cannot be used, and what was read before stays."""


@dataclass(frozen=True, slots=True)
class CredentialFigures:
    """What the server knows callers by, and they it."""

    certificate_expiry_seconds: float | None = None
    """Unix time at which the certificate in use ends; None: no TLS, or it cannot be told."""
    reloads: Mapping[str, ReloadFigures] = field(default_factory=dict)
    """By file: "tls" and "tokens", as far as there are any."""


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
    model_name: str | None
    """As requests name it; None until it is known."""
    num_blocks: int
    """KV blocks in all; 0 until the engine has started."""
    block_size: int
    """Tokens in a KV block; 0 until the engine has started."""
    outcomes: Mapping[str, int]
    """Requests that have ended, by how."""
    refused_calls: Mapping[str, int]
    """Calls whose callers might not make them, by why."""
    finish_reasons: Mapping[str, int]
    """Outputs that have finished, by why."""
    latencies: Mapping[str, HistogramSnapshot]
    """Seconds, by the names of :data:`~runnerd_service.telemetry.requests.LATENCIES`."""
    sizes: Mapping[str, HistogramSnapshot]
    """Counts, by the names of :data:`~runnerd_service.telemetry.requests.SIZES`."""
    credentials: CredentialFigures = CredentialFigures()

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
        if now.model_name is not None:
            yield from _vllm_metrics(now, now.model_name)
        yield from _own_gauges(now)
        yield from _own_counters(now)
        yield from _tenant_metrics(now.tenants)
        yield from _credential_metrics(now.credentials)


def metrics_route(read: Callable[[], MetricsSnapshot]) -> Route:
    """Give what answers scrapes.

    It answers in the classic text format, whatever is asked for: all scrapers read it, and in the other one the library
    turns the colon of a name into an underscore.

    Args:
        read: Gives the present snapshot; called from other threads.
    """
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(read))
    return lambda: Answer(generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8")


def _vllm_metrics(now: MetricsSnapshot, model_name: str) -> Iterator[Metric]:
    """Give what vLLM has, too: its names, its labels; there is one engine, the first."""
    labels = {"model_name": model_name, "engine": "0"}
    for name, text, gauge in (
        ("num_requests_running", "Requests whose tokens are being computed.", now.num_running),
        ("num_requests_waiting", "Requests that wait for a place.", now.num_waiting),
        ("kv_cache_usage_perc", "Share of the KV blocks in use by live requests, 0 to 1.", now.kv_cache_usage),
    ):
        yield _with_labels(GaugeMetricFamily, name, text, labels, gauge)
    for name, text, total in (
        ("prompt_tokens", "Prompt tokens computed or found in the prefix cache.", now.prompt_tokens),
        ("generation_tokens", "Tokens generated.", now.generation_tokens),
        ("num_preemptions", "Requests that lost their place to another.", now.num_preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prefix_cache_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.prefix_cache_hits),
    ):
        yield _with_labels(CounterMetricFamily, name, text, labels, total)
    finished = CounterMetricFamily(
        "vllm:request_success", "Outputs that have finished, by why.", labels=[*labels, "finished_reason"]
    )
    for reason, count in now.finish_reasons.items():
        finished.add_metric([*labels.values(), reason], count)
    yield finished
    for name, text in LATENCIES.items():
        yield _histogram(name, text, labels, now.latencies[name])
    for name, text in SIZES.items():
        yield _histogram(name, text, labels, now.sizes[name])
    if now.num_blocks:
        cache = {"num_gpu_blocks": str(now.num_blocks), "block_size": str(now.block_size)}
        yield _with_labels(GaugeMetricFamily, "cache_config_info", "The KV cache's size.", labels | cache, 1)


def _own_gauges(now: MetricsSnapshot) -> Iterator[Metric]:
    text = "Share of the time with work in which the device computed, 0 to 1."
    yield GaugeMetricFamily("runnerd_device_busy_ratio", text, now.device_busy_ratio)
    if now.max_in_flight is not None:
        effective = now.max_in_flight > 1
        yield GaugeMetricFamily("runnerd_async_effective", "1 when steps overlap, 0 when not.", effective)
        text = "Steps that may be unresolved at once."
        yield GaugeMetricFamily("runnerd_max_in_flight", text, now.max_in_flight)
        text = "Steps that may be unresolved now: 1 while --adaptive-depth finds nothing to gain by more."
        yield GaugeMetricFamily("runnerd_depth", text, now.depth or now.max_in_flight)


def _own_counters(now: MetricsSnapshot) -> Iterator[Metric]:
    missed = "Steps that could have run as a captured graph, had one of their size been captured."
    poisonous = "Requests that were failed because the engine died of them."
    idle = "Time between steps in which no request could have run."
    for name, text, total in (
        ("runnerd_steps", "Steps of the model.", now.num_steps),
        ("runnerd_graph_steps", "Steps that ran as captured graphs.", now.num_graph_steps),
        ("runnerd_graph_misses", missed, now.num_graph_misses),
        ("runnerd_poisonous_requests", poisonous, now.num_poisonous),
        ("runnerd_device_busy_seconds", "Time in which the device computed steps.", now.device_busy_seconds),
        ("runnerd_device_idle_seconds", idle, now.device_idle_seconds),
    ):
        yield CounterMetricFamily(name, text, total)
    bubble = "Time in which the device was idle although a request could have run, by what held it up."
    restarts = "Restarts of the engine, by what made them necessary."
    for name, text, label, totals in (
        ("runnerd_step_bubble_seconds", bubble, "cause", now.bubble_seconds),
        ("runnerd_engine_restarts", restarts, "cause", now.engine_restarts),
        ("runnerd_host_step_seconds", "Time of the engine's loop by phase.", "phase", now.host_seconds),
        ("runnerd_requests", "Generations that have ended, by how.", "outcome", now.outcomes),
        ("runnerd_refused_calls", "Calls whose callers might not make them, by why.", "reason", now.refused_calls),
    ):
        yield _by_label(name, text, label, totals)


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


def _credential_metrics(credentials: CredentialFigures) -> Iterator[Metric]:
    if credentials.certificate_expiry_seconds is not None:
        text = "End of the validity of the certificate in use, Unix time."
        name = "runnerd_tls_certificate_expiry_timestamp_seconds"
        yield GaugeMetricFamily(name, text, credentials.certificate_expiry_seconds)
    if not credentials.reloads:
        return
    text = "Changes of files that were read again, by how that went."
    reloads = CounterMetricFamily("runnerd_credentials_reloads", text, labels=["file", "result"])
    text = "1 when what the file holds now is in use, 0 when it cannot be used."
    successful = GaugeMetricFamily("runnerd_credentials_last_reload_successful", text, labels=["file"])
    for file, figures in credentials.reloads.items():
        reloads.add_metric([file, "ok"], figures.num_ok)
        reloads.add_metric([file, "failed"], figures.num_failed)
        successful.add_metric([file], figures.in_use)
    yield reloads
    yield successful


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _with_labels(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, labels: Mapping[str, str], value: float
) -> Metric:
    family = kind(f"vllm:{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _histogram(name: str, text: str, labels: Mapping[str, str], histogram: HistogramSnapshot) -> Metric:
    family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(labels))
    bounds = (*map(str, histogram.bounds), "+Inf")
    family.add_metric(list(labels.values()), list(zip(bounds, histogram.counts, strict=True)), histogram.total)
    return family
