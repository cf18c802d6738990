"""Contract tests and examples of the clients in other languages; one module, so that each client is built once."""

from __future__ import annotations

import re

import pytest

# The client is built within the first test's time.
pytestmark = pytest.mark.timeout(1800)

SCRIPT = "Grüße, 世界 🚀 שלום!"
NEED_A_SERVER_OF_THEIR_OWN = {
    "unicodestreamsinwholecharacters",
    "afullqueuenamesthequotaandwhentoretry",
    "achanneloutlivesitsserver",
    "pingseverytensecondsareaccepted",
    "tls",
    "certificateandtokenarebothaskedfor",
    "unixsocket",
}
"""Names of tests. Java has no unix socket: Debian's netty comes without the native part that opens one."""


def skipped(outcomes: dict[str, str]) -> set[str]:
    assert len(outcomes) == 16 + ("unixsocket" in outcomes)
    return {name for name, outcome in outcomes.items() if outcome == "SKIP"}


def test_clients_get_what_the_server_promises(native_client, daemons, files, tmp_path_factory) -> None:
    sim = ("--runner", "sim", "--log-level", "warning")
    restarted = daemons.start(*sim, "--runner-option", "step_seconds=0.001")

    def restart() -> None:
        daemons.kill(restarted)
        assert daemons.start(*sim, port=int(restarted.rpartition(":")[2])) == restarted

    # short: the path of a unix socket may have 107 bytes
    socket = tmp_path_factory.mktemp("s") / "s"
    small = ("--max-num-seqs", "1", "--max-waiting", "1", "--runner-option", "step_seconds=0.005")
    environment = {
        "RUNNERD_ADDRESS": daemons.start(*sim, "--runner-option", "step_seconds=0.001", "--unix-socket", str(socket)),
        "RUNNERD_UNIX_ADDRESS": f"unix:{socket}",
        "RUNNERD_SCRIPTED_ADDRESS": daemons.start(*sim, "--runner-option", f"script={SCRIPT}"),
        "RUNNERD_SCRIPT": SCRIPT,
        "RUNNERD_SMALL_ADDRESS": daemons.start(*sim, *small),
        "RUNNERD_RESTARTED_ADDRESS": restarted,
        "RUNNERD_TLS_ADDRESS": daemons.start(*sim, *files.tls),
        "RUNNERD_TLS_CA": str(files.authority),
        "RUNNERD_MUTUAL_TLS_ADDRESS": daemons.start(*sim, *files.mutual_tls_and_token),
        "RUNNERD_CLIENT_CERT": str(files.client_certificate),
        "RUNNERD_CLIENT_KEY": str(files.client_key),
        "RUNNERD_TOKEN": files.token,
    }
    outcomes = native_client.test(environment, restart)
    assert skipped(outcomes) == {"pingseverytensecondsareaccepted"}


def test_examples_do_what_they_say(native_client, daemons) -> None:
    script = "Grüße, 世界!"
    num_tokens = len(script.encode()) + 1  # bytes and EOS
    sim = ("--runner", "sim", "--log-level", "warning", "--runner-option", f"script={script}")
    address = daemons.start(*sim, "--runner-option", "step_seconds=0.005")

    assert native_client.example("health", address).startswith("SERVING\nsim: ")
    assert native_client.example("stream", address) == f"{script}\n[FINISH_REASON_STOP, {num_tokens} tokens]\n"
    assert native_client.example("chat", address, "Hello!\nAnd again?\n") == f"{script}\n{script}\n"
    cancelled = native_client.example("cancel", address)
    assert cancelled.startswith(script)
    assert cancelled.endswith("running: 0, KV blocks in use: 0\n")
    refused = native_client.example("errors", address)
    assert re.match(r"\w+ INVALID_REQUEST\n  sampling.temperature: .*\n  sampling.top_p: .*\n$", refused)
    late = native_client.example("deadline", address).splitlines()
    assert re.fullmatch("the call's deadline: DEADLINE_?EXCEEDED", late[0], re.IGNORECASE)
    assert re.fullmatch(r"stopping.time_limit: FINISH_REASON_TIME_LIMIT after \d+ tokens", late[1])


@pytest.mark.slow
def test_clients_may_ping_every_ten_seconds(native_client, daemons) -> None:
    outcomes = native_client.test({"RUNNERD_PINGED_ADDRESS": daemons.start("--runner", "sim")})
    assert set(outcomes) - skipped(outcomes) == {"pingseverytensecondsareaccepted"}


@pytest.mark.slow
def test_clients_get_the_same_from_a_real_model(native_client, daemons, demo_gguf) -> None:
    # In bfloat16 an answer may depend on the requests beside it.
    outcomes = native_client.test({"RUNNERD_ADDRESS": daemons.start(str(demo_gguf), "--dtype", "float32")})
    assert skipped(outcomes) == NEED_A_SERVER_OF_THEIR_OWN & outcomes.keys()
