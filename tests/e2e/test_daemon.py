"""``runnerd serve`` as an operator runs it: a process, signals, exit codes, sockets, settings."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from runnerd_client import Client, UnavailableError
from runnerd_client.client import GenerationStream

SLOW = ("--runner-option", "step_seconds=0.02")


def started(client: Client, max_tokens: int) -> GenerationStream:
    stream = client.stream("x", max_tokens=max_tokens, ignore_eos=True)
    assert next(stream).HasField("started")
    return stream


def wait_until_draining(client: Client) -> UnavailableError:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            client.generate("x", max_tokens=1)
        except UnavailableError as error:
            return error
    raise AssertionError("the server did not begin to drain")


def test_the_ready_line_says_what_is_served_and_where(daemon) -> None:
    server = daemon("--served-model-name", "toy")
    address = server.wait_until_ready()
    assert re.fullmatch(
        r"runnerd \d+\.\d+\.\d+ serving toy on 127\.0\.0\.1:\d+ \(sim, .*2 steps in flight\)\n", server.lines[-1]
    )
    with Client(address) as client:
        assert client.model_info().name == "toy"
        assert client.generate("x", max_tokens=3, ignore_eos=True).outputs[0].text


def test_sigterm_lets_live_streams_finish_and_exits_with_0(daemon) -> None:
    server = daemon(*SLOW)
    with Client(server.wait_until_ready()) as client:
        stream = started(client, 60)
        server.terminate()
        refusal = wait_until_draining(client)
        assert "shutting down" in str(refusal)
        assert refusal.retry_after is None  # no time brings this server back
        messages = list(stream)
        assert messages[-1].output.finish.usage.completion_tokens == 60
        assert server.wait() == 0
    assert "drained" in server.log()


def test_requests_that_wait_for_a_place_are_served_before_a_drained_server_stops(daemon) -> None:
    server = daemon("--max-num-seqs", "1", "--runner-option", "step_seconds=0.01")
    with Client(server.wait_until_ready()) as client:
        streams = [started(client, 20) for _ in range(4)]
        server.terminate()
        finishes = [list(stream)[-1].output.finish for stream in streams]
        assert [finish.usage.completion_tokens for finish in finishes] == [20] * 4
        assert server.wait() == 0


def test_a_drain_that_takes_too_long_ends_the_streams_with_a_status(daemon) -> None:
    server = daemon(*SLOW, "--drain-seconds", "0.3")
    with Client(server.wait_until_ready()) as client:
        stream = started(client, 5000)
        server.terminate()
        with pytest.raises(UnavailableError) as caught:
            list(stream)
        assert caught.value.reason == "NOT_READY"
        assert server.wait() == 0


def test_a_second_signal_stops_at_once(daemon) -> None:
    server = daemon(*SLOW)
    with Client(server.wait_until_ready()) as client:
        stream = started(client, 5000)
        with ThreadPoolExecutor(1) as threads:
            drained = threads.submit(client.drain, 60)
            wait_until_draining(client)
            server.terminate()
            server.wait_for_log("a second signal stops at once")
            server.terminate()
            assert server.wait() == 130
            assert not drained.result()
        with pytest.raises(UnavailableError, match="shutting down"):
            list(stream)
    assert " not_ready: " in server.log()
    assert " cancelled: " not in server.log()


def test_a_signal_while_loading_stops_in_order(daemon) -> None:
    server = daemon("--runner-option", "load_seconds=60")
    with Client(server.listening_address) as client:
        assert client.server_info().runner == "sim"
    server.terminate()
    assert server.wait() == 0


def test_a_port_in_use_is_refused_in_a_line(runnerd) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        result = runnerd("serve", "--runner", "sim", "--port", str(port))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"127.0.0.1 port {port}" in result.stderr
    assert "--port 0" in result.stderr


def test_two_servers_do_not_share_a_port(daemon, runnerd) -> None:
    address = daemon().wait_until_ready()
    result = runnerd("serve", "--runner", "sim", "--port", address.rpartition(":")[2])
    assert (result.returncode, result.stdout) == (2, "")


def test_a_unix_socket_is_private_replaces_a_stale_one_and_is_removed(daemon, runnerd, tmp_path) -> None:
    path = tmp_path / "runnerd.sock"
    with closing(socket.socket(socket.AF_UNIX)) as stale:
        stale.bind(str(path))
    server = daemon("--unix-socket", str(path))
    server.wait_until_ready()
    assert f"unix:{path}" in server.lines[-1]
    mode = path.lstat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    with Client(f"unix:{path}") as client:
        assert client.generate("x", max_tokens=1).outputs
    second = runnerd("serve", "--runner", "sim", "--port", "0", "--unix-socket", str(path))
    assert second.returncode == 2
    assert "another process" in second.stderr
    server.terminate()
    assert server.wait() == 0
    assert not path.exists()


def test_a_unix_socket_is_where_it_was_asked_for_whatever_its_name(daemon, tmp_path) -> None:
    path = tmp_path / "50%20 off?#ü.sock"
    server = daemon("--unix-socket", str(path))
    server.wait_until_ready()
    assert stat.S_ISSOCK(path.lstat().st_mode)
    address = server.lines[-1].partition(" and ")[2].partition(" (sim")[0]
    with Client(address) as client:
        assert client.generate("x", max_tokens=1).outputs


def test_a_file_that_is_no_socket_is_left_alone(runnerd, tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    result = runnerd("serve", "--runner", "sim", "--port", "0", "--unix-socket", str(path))
    assert result.returncode == 2
    assert "no socket" in result.stderr
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--runner", "nope"), "no runner called 'nope'"),
        (("--runner", "sim", "--runner-option", "nope=1"), "no option 'nope'"),
        (("--runner", "sim", "--port", "70000"), "--port: expected a whole number from 0 to 65535, got '70000'"),
        (("--runner", "sim", "--speculative-model", "x"), "speculative"),
        (("--runner", "cpu", "/no/such/model"), "/no/such/model"),
        (("--runner", "sim", "--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--runner", "sim", "--unix-socket", "/proc/runnerd.sock"), "/proc/runnerd.sock: "),
        (("--runner", "sim", "--unix-socket", f"/tmp/{'x' * 150}"), "path too long; give another path"),
        (("--runner", "sim", "--unix-socket", f"/tmp/{'x' * 300}"), "name too long; give another path"),
        (("--runner", "sim", "--unix-socket", "/no/such/folder/x.sock"), "/no/such/folder is not a folder"),
        (("--runner", "sim", "--max-message-bytes", "2GiB"), "up to 1GiB"),
        (("--runner", "sim", "--metrics-port", "0", "--metrics-host", "192.0.2.1"), "give another --metrics-host"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_served_is_refused_in_a_line_with_exit_code_2(runnerd, arguments, part) -> None:
    result = runnerd("serve", "--port", "0", "--log-level", "error", *arguments)
    assert result.returncode == 2
    assert part in result.stderr
    assert result.stderr.startswith("runnerd: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_the_load_has_the_number_of_blocks_before_the_first_step(daemon) -> None:
    with Client(daemon("--runner-option", "num_blocks=77").wait_until_ready()) as client:
        assert client.load().num_blocks == client.server_info().num_blocks == 77


def test_what_the_runner_does_not_allow_is_refused_before_anybody_can_connect(runnerd) -> None:
    result = runnerd("serve", "--port", "0", "--runner", "sim", "--block-size", "7")
    assert result.returncode == 2
    assert "--block-size is 7" in result.stderr
    assert "listening" not in result.stderr


def test_a_model_that_is_not_there_is_refused_before_anybody_can_connect(runnerd) -> None:
    result = runnerd("serve", "/no/such/model", "--port", "0", "--runner", "cpu")
    assert result.returncode == 2
    assert result.stderr.startswith("runnerd: model '/no/such/model' does not exist; give the path of ")
    assert result.stderr.count("\n") == 1


def test_the_largest_message_size_that_is_taken_can_be_served(daemon) -> None:
    with Client(daemon("--max-message-bytes", "1GiB").wait_until_ready()) as client:
        assert client.server_info().max_message_bytes == 2**30
        assert client.generate("x", max_tokens=1).outputs


def test_the_largest_settings_that_are_taken_can_be_told(daemon) -> None:
    sizes = ("--max-n", "65536", "--max-logprobs", "2147483647", "--max-num-batched-tokens", "2147483647")
    times = ("--priority-ageing", "1e9", "--queue-timeout", "1e9", "--stall-timeout", "1e9", "--step-timeout", "1e9")
    with Client(
        daemon(*sizes, *times, "--guide-timeout", "1e9", "--drain-seconds", "1e9").wait_until_ready()
    ) as client:
        assert client.server_info().max_num_batched_tokens == 2**31 - 1
        assert client.model_info().max_n == 65536
        assert client.generate("x", max_tokens=1).outputs


def test_flags_environment_and_file_work_together(daemon, tmp_path) -> None:
    file = tmp_path / "runnerd.toml"
    file.write_text("max-num-seqs = 3\nserved-model-name = 'from-file'\n[runner-option]\nmax_model_len = 100\n")
    server = daemon(
        "--config",
        str(file),
        "--max-num-batched-tokens",
        "77",
        environment={
            "RUNNERD_SERVED_MODEL_NAME": "from-environment",
            "RUNNERD_MAX_NUM_BATCHED_TOKENS": "55",
            "RUNNERD_ASYNC_EXECUTION": "off",
        },
    )
    with Client(server.wait_until_ready()) as client:
        info, model = client.server_info(), client.model_info()
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (3, 77)
    assert (info.async_execution, info.async_effective, info.max_in_flight) == ("off", False, 1)
    assert (model.name, model.max_model_len) == ("from-environment", 100)
    assert "synchronous" in server.lines[-1]


def test_the_log_names_requests_and_holds_no_text(daemon) -> None:
    server = daemon()
    with Client(server.wait_until_ready()) as client:
        client.generate("my secret diary", request_id="req-1", max_tokens=4, ignore_eos=True)
        with pytest.raises(Exception, match="stop"):
            client.generate("my secret diary", request_id="req-2", stop=["another secret"] * 17)
    server.terminate()
    assert server.wait() == 0
    assert "request req-1 finished: 15 prompt tokens, 4 output tokens" in server.log()
    assert "request req-2 invalid_request (stopping.stop): 0 prompt tokens" in server.log()
    assert "secret" not in server.log()


def test_progress_of_the_load_is_logged_when_there_is_no_terminal(daemon) -> None:
    server = daemon("--runner-option", "load_seconds=0.3")
    server.wait_until_ready()
    assert re.search(r"progress: .*: \d+ of \d+", server.log())


def test_a_daemon_on_its_own_process_group_survives_nothing_of_its_engine(daemon) -> None:
    """The engine process ends with the daemon, even when that is killed."""
    server = daemon()
    server.wait_until_ready()
    children = _children(server.process.pid)
    assert children
    server.process.kill()
    server.process.wait(10)
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in children):
        assert time.monotonic() < deadline, "the engine process outlived its daemon"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_reaches_the_whole_group_and_still_drains(daemon) -> None:
    server = daemon(*SLOW)
    with Client(server.wait_until_ready()) as client:
        stream = started(client, 40)
        for child in _children(server.process.pid):
            os.kill(child, 2)  # a terminal sends SIGINT to every process of the group
        server.process.send_signal(2)
        messages = list(stream)
        assert messages[-1].output.finish.usage.completion_tokens == 40
        assert server.wait() == 0


@pytest.fixture
def hangups() -> Iterator[None]:
    """Lets processes that are started here take a hangup, though these tests may run without a terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_a_terminal_that_closes_drains_and_leaves_no_socket(daemon, tmp_path) -> None:
    path = tmp_path / "runnerd.sock"
    server = daemon(*SLOW, "--unix-socket", str(path))
    with Client(server.wait_until_ready()) as client:
        stream = started(client, 40)
        for child in _children(server.process.pid):
            os.kill(child, signal.SIGHUP)  # the kernel sends it to the group
        for _ in range(2):  # and the shell sends another
            server.process.send_signal(signal.SIGHUP)
            wait_until_draining(client)
        messages = list(stream)
        assert messages[-1].output.finish.usage.completion_tokens == 40
        assert server.wait() == 0
    assert "draining" in server.log()
    assert not path.exists()


def test_a_closed_terminal_means_nothing_under_nohup(tmp_path) -> None:
    command = ["nohup", sys.executable, "-m", "runnerd_service", "serve", "--runner", "sim", "--port", "0"]
    log = (tmp_path / "log").open("w")
    with (
        log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            address = re.search(r"serving \S+ on (\S+)", server.stdout.readline())
            assert address is not None
            server.send_signal(signal.SIGHUP)
            with Client(address[1]) as client:
                assert client.generate("x", max_tokens=20).outputs
            assert "draining" not in (tmp_path / "log").read_text()
        finally:
            server.terminate()
            assert server.wait(30) == 0
