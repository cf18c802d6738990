"""The HTTP side of a daemon: probes, the page's data, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from runnerd_client import Client, RequestCancelledError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 30_000


def get(url: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def url_of(daemon) -> str:
    return daemon.wait_for_log(r"metrics on (http://\S+)/metrics")[1]


@pytest.fixture(scope="module")
def server(module_daemon):
    daemon = module_daemon("--metrics-port", "0", "--runner-option", "step_seconds=0.01", "--max-num-seqs", "2")
    daemon.wait_until_ready()
    return daemon


@pytest.fixture
def busy(server):
    """Three streams that do not end by themselves; two of them have a place."""
    with Client(server.listening_address) as client:
        streams = [client.stream("x", max_tokens=3000, ignore_eos=True) for _ in range(3)]
        readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        yield
        for stream, reader in zip(streams, readers, strict=True):
            stream.cancel()
            reader.join(30)


def read(stream) -> None:
    with suppress(RequestCancelledError):
        for _ in stream:
            pass


def test_probes_follow_the_state_and_the_page_can_be_left_out(daemon) -> None:
    server = daemon(
        *("--metrics-port", "0", "--metrics-host", "127.0.0.2", "--no-status-page"),
        *("--runner-option", "load_seconds=30"),
    )
    url = url_of(server)
    assert url.startswith("http://127.0.0.2:")
    assert get(f"{url}/livez")[:2] == (200, "the event loop turns\n")
    assert get(f"{url}/readyz")[:2] == (503, "loading\n")
    assert [get(url + path)[0] for path in ("/", "/status.json")] == [404, 404]


def test_a_serving_daemon_is_ready(server) -> None:
    assert get(f"{url_of(server)}/readyz")[:2] == (200, "serving\n")


def test_what_is_not_served_is_refused(server) -> None:
    url = url_of(server)
    status, text, _ = get(f"{url}/nothing")
    assert (status, text) == (404, "there is /, /livez, /metrics, /readyz, /status.json\n")
    status, _, headers = get(f"{url}/status.json", "POST")
    assert (status, headers["Allow"]) == (405, "GET")


def test_the_page_needs_nothing_from_elsewhere(server) -> None:
    status, page, headers = get(f"{url_of(server)}/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}


def test_the_data_holds_the_last_steps_and_no_text(server, busy) -> None:
    url = url_of(server)
    for _ in range(200):
        told = json.loads(get(f"{url}/status.json")[1])
        if told["steps"] and len(told["steps"]["steps"]) == 64 and told["server"]["num_waiting"]:
            break
        threading.Event().wait(0.1)
    assert (told["server"]["num_running"], told["server"]["num_waiting"]) == (2, 1)
    assert {len(step) for step in told["steps"]["steps"]} == {7}
    assert {"schedule", "wait"} <= {phase[0] for phase in told["steps"]["host"]}


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as playwright:
        # Containers forbid the namespaces of the browser's own sandbox; it sees one page of ours.
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=2 * WAIT_MS)
        yield launched
        launched.close()


def test_the_page_shows_a_busy_server_and_when_it_is_gone(daemon, browser, tmp_path: Path) -> None:
    server = daemon("--metrics-port", "0", "--runner-option", "step_seconds=0.01", "--max-num-seqs", "2")
    url = url_of(server)
    page = browser.new_page(viewport={"width": 1200, "height": 850})
    page.set_default_timeout(WAIT_MS)
    faults: list[str] = []
    requested: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    with Client(server.wait_until_ready()) as client:
        page.goto(url)
        page.wait_for_selector("#state[data-state=serving]")
        assert page.inner_text("#model") == "sim"
        assert page.inner_text("#running") == "0"
        assert page.inner_text("#ttft-note") == "no token yet"
        streams = [client.stream("x", max_tokens=3000, ignore_eos=True) for _ in range(3)]
        readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        page.wait_for_function(
            "() => document.getElementById('running').textContent === '2'"
            " && document.getElementById('waiting').textContent === '1 waiting'"
            " && parseFloat(document.getElementById('rate').textContent) > 0"
            " && document.querySelectorAll('#timeline rect').length > 20"
            " && document.querySelectorAll('#chart-rate polyline').length === 1"
        )
        assert re.fullmatch(r"[\d.]+ (ms|s)", page.inner_text("#ttft"))
        assert re.fullmatch(r"[\d.]+ (ms|s)", page.inner_text("#itl"))
        assert re.fullmatch(r"[\d.]+ %", page.inner_text("#bubble"))
        assert page.evaluate("() => document.getElementById('kv-bar').getBoundingClientRect().width") > 0
        assert page.locator("#causes tr").count() == 7
        for width in (1200, 480):
            page.set_viewport_size({"width": width, "height": 850})
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        shot = page.screenshot(path=str(tmp_path / "status.png"), full_page=True)
        assert shot.startswith(b"\x89PNG")
        for stream, reader in zip(streams, readers, strict=True):
            stream.cancel()
            reader.join(30)
        page.wait_for_function("() => document.getElementById('running').textContent === '0'")
    server.terminate()
    page.wait_for_selector("#state[data-state=unreachable]")
    page.close()
    assert not faults
    assert {one.removeprefix(url) for one in requested} == {"/", "/status.json"}
