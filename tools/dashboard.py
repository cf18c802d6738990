"""Writes the Grafana dashboard: ``python tools/dashboard.py``; ``--check`` fails when the file is another."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "deploy" / "grafana" / "runnerd.json"

_VLLM = 'instance=~"$instance",model_name=~"$model_name"'
_OWN = 'instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3

Query = tuple[str, str]
"""Expression and legend."""


def _rate(name: str, labels: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{labels}}}[$__rate_interval]))"


def _quantiles(name: str) -> list[Query]:
    buckets = _rate(f"vllm:{name}_bucket", _VLLM, "le")
    return [(f"histogram_quantile({share}, {buckets})", f"p{round(share * 100)}") for share in (0.5, 0.95, 0.99)]


def _mean(name: str, legend: str) -> Query:
    return f"{_rate(f'vllm:{name}_sum', _VLLM)} / {_rate(f'vllm:{name}_count', _VLLM)}", legend


_BUSY = _rate("runnerd_device_busy_seconds_total", _OWN)
_BUBBLE = _rate("runnerd_step_bubble_seconds_total", _OWN)

ROWS: list[tuple[str, list[tuple[str, str, str, list[Query]]]]] = [
    (
        "Requests",
        [
            (
                "Running and waiting",
                "short",
                "Outputs with and without a place.",
                [
                    (f"sum (vllm:num_requests_running{{{_VLLM}}})", "running"),
                    (f"sum (vllm:num_requests_waiting{{{_VLLM}}})", "waiting"),
                ],
            ),
            (
                "Requests per second by outcome",
                "reqps",
                "All but finished and cancelled are errors that the caller got.",
                [(_rate("runnerd_requests_total", _OWN, "outcome"), "{{outcome}}")],
            ),
            (
                "Tokens per second",
                "short",
                "Generated, and prompt tokens computed or found in the prefix cache.",
                [
                    (_rate("vllm:generation_tokens_total", _VLLM), "generated"),
                    (_rate("vllm:prompt_tokens_total", _VLLM), "prompt"),
                ],
            ),
        ],
    ),
    (
        "Latency",
        [
            ("Time to first token", "s", "From arrival.", _quantiles("time_to_first_token_seconds")),
            ("Time between tokens", "s", "Of one output.", _quantiles("inter_token_latency_seconds")),
            ("Whole request", "s", "From arrival to end.", _quantiles("e2e_request_latency_seconds")),
            (
                "Where a request's time goes",
                "s",
                "Mean of those that have ended.",
                [
                    _mean("request_queue_time_seconds", "queue"),
                    _mean("request_prefill_time_seconds", "prefill"),
                    _mean("request_decode_time_seconds", "decode"),
                ],
            ),
            (
                "Tokens of a request",
                "short",
                "Mean of those that have ended.",
                [_mean("request_prompt_tokens", "prompt"), _mean("request_generation_tokens", "generated")],
            ),
            (
                "Outputs per second by end",
                "reqps",
                "Why outputs finished.",
                [(_rate("vllm:request_success_total", _VLLM, "finished_reason"), "{{finished_reason}}")],
            ),
        ],
    ),
    (
        "Overlapped execution",
        [
            (
                "Share of the time with work that the device lost",
                "percentunit",
                "The bubble: idle although a request could have run.",
                [(f"{_BUBBLE} / ({_BUBBLE} + {_BUSY})", "bubble")],
            ),
            (
                "Bubble by cause",
                "percentunit",
                "Of the time with work.",
                [
                    (
                        f"{_rate('runnerd_step_bubble_seconds_total', _OWN, 'cause')} / ignoring (cause) group_left () "
                        f"({_BUBBLE} + {_BUSY})",
                        "{{cause}}",
                    )
                ],
            ),
            (
                "Host time per step by phase",
                "s",
                "The less of wait, the closer the host is to being the bottleneck.",
                [
                    (
                        f"{_rate('runnerd_host_step_seconds_total', _OWN, 'phase')} / ignoring (phase) group_left () "
                        f"{_rate('runnerd_steps_total', _OWN)}",
                        "{{phase}}",
                    )
                ],
            ),
            (
                "Steps per second",
                "short",
                "All; those of captured graphs; those of a size that is not captured.",
                [
                    (_rate("runnerd_steps_total", _OWN), "steps"),
                    (_rate("runnerd_graph_steps_total", _OWN), "captured"),
                    (_rate("runnerd_graph_misses_total", _OWN), "missed"),
                ],
            ),
            (
                "Steps in flight",
                "short",
                "At most, and at most now.",
                [
                    (f"max (runnerd_max_in_flight{{{_OWN}}})", "limit"),
                    (f"max (runnerd_depth{{{_OWN}}})", "now"),
                ],
            ),
            (
                "Device busy",
                "percentunit",
                "Of all time.",
                [(f"avg (rate(runnerd_device_busy_seconds_total{{{_OWN}}}[$__rate_interval]))", "busy")],
            ),
        ],
    ),
    (
        "Memory and faults",
        [
            (
                "KV blocks in use",
                "percentunit",
                "By instance.",
                [(f"max by (instance) (vllm:kv_cache_usage_perc{{{_VLLM}}})", "{{instance}}")],
            ),
            (
                "Prompt tokens found in the prefix cache",
                "percentunit",
                "Of those looked up.",
                [
                    (
                        f"{_rate('vllm:prefix_cache_hits_total', _VLLM)} / "
                        f"{_rate('vllm:prefix_cache_queries_total', _VLLM)}",
                        "found",
                    )
                ],
            ),
            (
                "Preemptions, restarts, poisonous requests",
                "short",
                "In the interval shown by a point.",
                [
                    (f"sum (increase(vllm:num_preemptions_total{{{_VLLM}}}[$__rate_interval]))", "preemptions"),
                    (
                        f"sum by (cause) (increase(runnerd_engine_restarts_total{{{_OWN}}}[$__rate_interval]))",
                        "restart: {{cause}}",
                    ),
                    (f"sum (increase(runnerd_poisonous_requests_total{{{_OWN}}}[$__rate_interval]))", "poisonous"),
                ],
            ),
        ],
    ),
    (
        "Tenants",
        [
            (
                "Outputs running",
                "short",
                "By tenant.",
                [(f"sum by (tenant) (runnerd_tenant_outputs_running{{{_OWN}}})", "{{tenant}}")],
            ),
            (
                "Outputs waiting",
                "short",
                "By tenant.",
                [(f"sum by (tenant) (runnerd_tenant_outputs_waiting{{{_OWN}}})", "{{tenant}}")],
            ),
            (
                "Tokens generated per second",
                "short",
                "Of requests that have ended, by tenant.",
                [(_rate("runnerd_tenant_generation_tokens_total", _OWN, "tenant"), "{{tenant}}")],
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """Give the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []})
        panels[-1]["gridPos"] = {"x": 0, "y": y, "w": 24, "h": 1}
        y += 1
        for index, chart in enumerate(charts):
            place = {"x": index % _PER_ROW * _WIDTH, "y": y + index // _PER_ROW * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(len(panels) + 1, place, *chart))
        y += -(-len(charts) // _PER_ROW) * _HEIGHT
    return {
        "uid": "runnerd",
        "title": "runnerd",
        "description": "Requests, latency, overlapped execution and faults of runnerd.",
        "tags": ["runnerd", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _variable("instance"), _variable("model_name")]},
        "panels": panels,
    }


def _panel(
    number: int, place: dict[str, int], title: str, unit: str, text: str, queries: list[Query]
) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(label: str) -> dict[str, Any]:
    query = f"label_values(vllm:num_requests_running, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is another")
    text = json.dumps(dashboard(), indent=2) + "\n"
    if not parser.parse_args().check:
        FILE.write_text(text)
        return 0
    if FILE.exists() and FILE.read_text() == text:
        return 0
    print(f"{FILE} is stale: run python tools/dashboard.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
