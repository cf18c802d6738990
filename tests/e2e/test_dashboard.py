"""What dashboard and alerts ask for is what a daemon tells: every metric, and every label of it."""

from __future__ import annotations

import importlib.util
import json
import re
import urllib.request
from pathlib import Path

import grpc
import pytest
import trustme
import yaml
from prometheus_client.parser import text_string_to_metric_families

from runnerd.v1 import generation_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "runnerd.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"

SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
GROUPING = re.compile(r"\b(?:by|ignoring|on|without)\s*\(([^)]*)\)")
WORDS = {"sum", "avg", "min", "max", "rate", "increase", "histogram_quantile", "time"}
WORDS |= {"by", "ignoring", "group_left", "and", "or"}
FROM_PROMETHEUS = {"instance", "job"}
"""Labels that the scraper adds."""


def told_by(daemon) -> dict[str, dict[str, set[str]]]:
    """Give the values of each label of each metric."""
    url = daemon.wait_for_log(r"metrics on (http://\S+)")[1]
    with urllib.request.urlopen(url, timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    told: dict[str, dict[str, set[str]]] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = told.setdefault(sample.name, {})
        for label, value in sample.labels.items():
            labels.setdefault(label, set()).add(value)
    return told


@pytest.fixture(scope="module")
def told(module_daemon, tmp_path_factory) -> dict[str, dict[str, set[str]]]:
    authority, folder = trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path_factory.mktemp("tls")
    pem = folder / "server.pem"
    authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA).private_key_and_cert_chain_pem.write_to_path(pem)
    tls = ("--tls-cert", str(pem), "--tls-key", str(pem))
    daemon = module_daemon("--metrics-port", "0", "--tenant-metadata", "x-tenant", *tls)
    request = generation_pb2.GenerateRequest(text="hi")
    request.stopping.max_tokens = 3
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with grpc.secure_channel(daemon.wait_until_ready(), credentials) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.Generate(request, metadata=(("x-tenant", "someone"),), timeout=30)
    return told_by(daemon)


def selectors(expression: str) -> list[tuple[str, str]]:
    """Give each metric of an expression, and what stands in its braces."""
    bare = re.sub(r"\[[^\]]*\]", "", GROUPING.sub("", expression))
    return [(name, braces) for name, braces in SELECTOR.findall(bare) if name not in WORDS]


def check(expression: str, told: dict[str, dict[str, set[str]]], legend: str = "") -> None:
    found = selectors(expression)
    assert found, expression
    labels: set[str] = set()
    for name, braces in found:
        assert name in told, f"no metric {name} in a scrape: {expression}"
        labels |= set(told[name])
        for label in MATCHER.findall(braces):
            assert label in {*told[name], *FROM_PROMETHEUS}, f"{name} has no label {label}"
    grouped = {one.strip() for group in GROUPING.findall(expression) for one in group.split(",")}
    for label in {*grouped, *re.findall(r"\{\{\s*(\w+)\s*\}\}", legend)}:
        assert label in {*labels, *FROM_PROMETHEUS}, f"no label {label}: {expression}"


def test_the_dashboard_asks_for_what_there_is(told) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(targets) > 30
    for target in targets:
        check(target["expr"], told, target["legendFormat"])
    for variable in dashboard["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()
        assert label in {*told[metric], *FROM_PROMETHEUS}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for place in (panel["gridPos"] for panel in panels):
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken
        assert max(columns) < 24
        taken |= cells


def test_the_dashboard_is_what_its_tool_writes() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "tools" / "dashboard.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert json.loads(DASHBOARD.read_text()) == tool.dashboard(), "run python tools/dashboard.py"


def test_alerts_ask_for_what_there_is(told) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        check(rule["expr"], told)
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert labels <= {one.strip() for one in GROUPING.findall(rule["expr"])[0].split(",")}
        for name, braces in selectors(rule["expr"]):
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', braces):
                assert set(values.split("|")) <= told[name][label], rule["alert"]


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(runnerd_nothing_total[5m])", "no metric runnerd_nothing_total"),
        ('sum (runnerd_steps_total{color="red"})', "no label color"),
        ("sum by (color) (rate(runnerd_steps_total[5m]))", "no label color"),
    ],
)
def test_the_check_sees_what_is_not_there(told, expression: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check(expression, told)


def test_names_of_vllm_have_the_labels_that_its_dashboards_select_by(told) -> None:
    names = {name for name in told if name.startswith("vllm:")}
    assert len(names) > 40
    assert all({"model_name", "engine"} <= set(told[name]) for name in names)


def test_the_page_of_metrics_names_each_one(told) -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in told}
    assert not [name for name in sorted(families) if f"`{name}" not in page]
