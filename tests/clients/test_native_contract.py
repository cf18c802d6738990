"""Contract tests and examples of the clients in other languages; one module, so that each client is built once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trustme

# The client is built within the first test's time.
pytestmark = pytest.mark.timeout(1800)

SCRIPT = "Grüße, 世界 🚀 שלום!"
NEED_A_SERVER_OF_THEIR_OWN = {
    "unicodestreamsinwholecharacters",
    "afullqueuenamesthequotaandwhentoretry",
    "achanneloutlivesitsserver",
    "pingseverytensecondsareaccepted",
    "tls",
}


def skipped(outcomes: dict[str, str]) -> set[str]:
    assert len(outcomes) == 14
    return {name for name, outcome in outcomes.items() if outcome == "SKIP"}


def server_certificate(folder: Path) -> tuple[Path, list[str]]:
    """Give the file of an authority, and the flags of a server whose certificate it has signed."""
    authority, certificate, key = (folder / name for name in ("authority.pem", "certificate.pem", "key.pem"))
    signs = trustme.CA()
    signs.cert_pem.write_to_path(authority)
    signed = signs.issue_cert("127.0.0.1")
    signed.cert_chain_pems[0].write_to_path(certificate)
    signed.private_key_pem.write_to_path(key)
    return authority, ["--tls-cert", str(certificate), "--tls-key", str(key)]


def test_clients_get_what_the_server_promises(native_client, daemons, tmp_path) -> None:
    sim = ("--runner", "sim", "--log-level", "warning")
    restarted = daemons.start(*sim, "--runner-option", "step_seconds=0.001")

    def restart() -> None:
        daemons.kill(restarted)
        assert daemons.start(*sim, port=int(restarted.rpartition(":")[2])) == restarted

    authority, tls = server_certificate(tmp_path)
    small = ("--max-num-seqs", "1", "--max-waiting", "1", "--runner-option", "step_seconds=0.005")
    environment = {
        "RUNNERD_ADDRESS": daemons.start(*sim, "--runner-option", "step_seconds=0.001"),
        "RUNNERD_SCRIPTED_ADDRESS": daemons.start(*sim, "--runner-option", f"script={SCRIPT}"),
        "RUNNERD_SCRIPT": SCRIPT,
        "RUNNERD_SMALL_ADDRESS": daemons.start(*sim, *small),
        "RUNNERD_RESTARTED_ADDRESS": restarted,
        "RUNNERD_TLS_ADDRESS": daemons.start(*sim, *tls),
        "RUNNERD_TLS_CA": str(authority),
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
    assert skipped(outcomes) == NEED_A_SERVER_OF_THEIR_OWN
