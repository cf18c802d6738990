"""Metrics of a daemon, and traces of it: what an operator sees of overlapped execution."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runnerd_client import Client, InvalidRequestError, OverloadedError, RequestCancelledError, UnavailableError
from runnerd_service.cli.main import main

STEP = ("--runner-option", "step_seconds=0.005")
PHASES = {"idle", "inbox", "schedule", "prepare", "wait", "update", "send"}


def scrape(daemon) -> dict[tuple[str, str], float]:
    """Give the values by name and value of the label, if any, besides those that all of vLLM's names have."""
    url = daemon.wait_for_log(r"metrics on (http://\S+)")[1]
    samples: dict[tuple[str, str], float] = {}
    with urllib.request.urlopen(url, timeout=20) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                if sample.name.startswith("vllm:"):
                    assert (labels.pop("model_name"), labels.pop("engine")) == ("sim", "0")
                samples[sample.name, "".join(labels.values())] = sample.value
    return samples


def labelled(samples: dict[tuple[str, str], float], name: str) -> dict[str, float]:
    return {label: value for (family, label), value in samples.items() if family == name}


def test_a_synchronous_daemon_shows_its_bubbles_and_its_mode(daemon) -> None:
    server = daemon("--metrics-port", "0", "--async-execution", "off", *STEP)
    with Client(server.wait_until_ready()) as client:
        before = scrape(server)
        client.generate("hello", max_tokens=20, ignore_eos=True)
        after = scrape(server)
        info = client.server_info()
    assert (info.async_effective, info.max_in_flight) == (False, 1)
    assert (after["runnerd_async_effective", ""], after["runnerd_max_in_flight", ""]) == (0, 1)
    assert "synchronous" in server.lines[-1]
    assert before["runnerd_steps_total", ""] == 0
    assert after["runnerd_steps_total", ""] == after["vllm:generation_tokens_total", ""] == 20
    assert after["vllm:prompt_tokens_total", ""] == 5
    assert after["runnerd_requests_total", "finished"] == after["vllm:request_success_total", "length"] == 1
    assert after["vllm:request_generation_tokens_sum", ""] == 20
    assert after["vllm:inter_token_latency_seconds_count", ""] == 19
    queue, prefill, decode, inference, first, whole = (
        after[f"vllm:{name}_seconds_sum", ""]
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "time_to_first_token",
            "e2e_request_latency",
        )
    )
    assert queue + prefill == pytest.approx(first)
    assert prefill + decode == pytest.approx(inference)
    assert min(queue, prefill) > 0
    assert decode >= 10 * 0.005  # 19 steps of 5 ms; the front end may see the first token late
    assert 20 * 0.005 <= first + decode <= whole
    assert after["runnerd_device_busy_seconds_total", ""] >= 20 * 0.005
    bubble = labelled(after, "runnerd_step_bubble_seconds_total")
    assert min(bubble["schedule"], bubble["prepare"], bubble["update"], bubble["send"]) > 0
    assert 0 < after["runnerd_device_busy_ratio", ""] < 1
    assert min(labelled(after, "runnerd_host_step_seconds_total").values()) > 0


def test_an_overlapped_daemon_shows_its_mode(daemon) -> None:
    server = daemon("--metrics-port", "0")
    with Client(server.wait_until_ready()) as client:
        info = client.server_info()
    samples = scrape(server)
    assert (info.async_effective, info.max_in_flight) == (True, 2)
    assert (samples["runnerd_async_effective", ""], samples["runnerd_max_in_flight", ""]) == (1, 2)


def test_metrics_are_served_while_the_model_loads_and_gone_after_the_stop(daemon) -> None:
    server = daemon("--metrics-port", "0", "--runner-option", "load_seconds=30")
    assert ("runnerd_async_effective", "") not in scrape(server)
    server.terminate()
    assert server.wait() == 0
    with pytest.raises(OSError, match="refused"):
        scrape(server)


def test_a_metrics_port_in_use_has_exit_code_2(runnerd) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        ended = runnerd("serve", "--runner", "sim", "--port", "0", "--metrics-port", port)
    assert ended.returncode == 2
    assert f"cannot serve metrics on 127.0.0.1 port {port}" in ended.stderr


@pytest.fixture(scope="module")
def address(module_daemon) -> str:
    return module_daemon(*STEP, "--runner-option", "copy_seconds=0.002").wait_until_ready()


@contextmanager
def streaming(address: str) -> Iterator[None]:
    """Keep the server busy with two streams meanwhile."""
    with Client(address) as client:
        streams = [client.stream("x", max_tokens=5000, ignore_eos=True, temperature=0) for _ in range(2)]
        readers = [threading.Thread(target=lambda one=one: _read(one)) for one in streams]
        for stream, reader in zip(streams, readers, strict=True):
            next(stream)
            reader.start()
        try:
            yield
        finally:
            for stream, reader in zip(streams, readers, strict=True):
                stream.cancel()
                reader.join()


def _read(stream) -> None:
    with suppress(RequestCancelledError):
        for _ in stream:
            pass


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_trace_writes_the_steps_of_a_busy_server(address, capsys, tmp_path) -> None:
    file = tmp_path / "trace.json"
    with streaming(address):
        code, out, err = run(capsys, "trace", "--seconds", "0.5", "-o", str(file), "--address", address)
    assert (code, out) == (0, "")
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["dur"] >= 0 <= span["ts"] for span in spans)
    by_track: dict[str, list] = {name: [] for name in tracks.values()}
    for span in spans:
        by_track[tracks[span["tid"]]].append(span)
    for track, ones in by_track.items():
        for before, after in pairwise(sorted(ones, key=lambda one: one["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002, (track, before, after)
    device = by_track["device steps"]
    step_ids = [span["args"]["step_id"] for span in device]
    assert step_ids == list(range(step_ids[0], step_ids[0] + len(device)))
    assert f"{len(device)} steps: device busy" in err
    assert len(device) > 5
    assert {(span["args"]["rows"], span["args"]["tokens"]) for span in device[2:-2]} == {(2, 2)}
    assert by_track["copies"]
    host = by_track["host phases"]
    assert {span["name"] for span in host} <= PHASES
    assert {"schedule", "prepare", "wait", "update"} <= {span["name"] for span in host}
    prepared = [span["args"]["step_id"] for span in host if span["name"] == "prepare"]
    assert len(prepared) == len(set(prepared))


def test_trace_of_an_idle_server_says_that_no_step_ran(address, capsys) -> None:
    with Client(address) as client:
        before = client.load()
        # what others have left is ended, with the steps that were under way
        while (load := client.load()).num_running or load.num_steps != before.num_steps:
            before = load
            time.sleep(0.1)
        recorded = client.capture_trace(0.05)
    assert (recorded.num_steps, recorded.num_dropped_steps) == (0, 0)
    assert json.loads(recorded.trace_json)["traceEvents"]


def test_trace_to_stdout_is_json_alone(address, runnerd) -> None:
    ended = runnerd("trace", "--seconds", "0.05", "-o", "-", "--address", address)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["displayTimeUnit"] == "ms"
    assert "no step ran" in ended.stderr


def test_trace_refuses_what_it_cannot_do(address, capsys, tmp_path) -> None:
    target = str(tmp_path / "t.json")
    for seconds in ("0", "-1", "61"):
        code, _, err = run(capsys, "trace", "--seconds", seconds, "-o", target, "--address", address)
        assert code == 4
        assert "expected above 0 and at most 60 s" in err
    assert run(capsys, "trace", "--seconds", "nan", "-o", target, "--address", address)[0] == 2
    code, _, err = run(capsys, "trace", "-o", str(tmp_path / "no" / "t.json"), "--address", address)
    assert code == 2
    assert "is not a folder" in err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_one_trace_is_recorded_at_a_time_and_a_cancelled_one_makes_room(live, eventually) -> None:
    refusals: list[OverloadedError] = []

    async def is_busy() -> bool:
        try:
            await live.client.capture_trace(0.01)
        except OverloadedError as error:
            refusals.append(error)
            return True
        return False

    async def first_is_recorded() -> bool:
        nonlocal first
        if first.done():  # the question whether it is busy came first, and kept it out
            first = asyncio.create_task(live.client.capture_trace(50))
            await asyncio.sleep(0.05)
        return await is_busy() and not first.done()

    first = asyncio.create_task(asyncio.sleep(0))
    await eventually(first_is_recorded)
    assert 0 < refusals[-1].retry_after <= 50
    first.cancel()

    async def has_room() -> bool:
        return not await is_busy()

    await eventually(has_room)


async def test_a_trace_is_refused_while_the_model_loads(serve) -> None:
    async with serve(load=False) as live:
        with pytest.raises(UnavailableError, match="loading"):
            await live.client.capture_trace(1)


async def test_a_trace_ends_when_the_engine_fails(serve) -> None:
    async with serve(options={"fail_at_step": "20", "step_seconds": "0.01"}, max_engine_restarts=0) as live:
        trace = asyncio.create_task(live.client.capture_trace(60))
        with pytest.raises(UnavailableError):
            await live.client.generate("x", max_tokens=500, ignore_eos=True)
        async with asyncio.timeout(20):
            with pytest.raises(UnavailableError):
                await trace


@pytest.mark.asyncio(loop_scope="module")
async def test_a_duration_that_is_missing_is_named(live) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await live.client.capture_trace(0)
    assert [one.field for one in caught.value.violations] == ["duration"]
