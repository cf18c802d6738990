"""The contract tests of the Go and the Java client (clients/go, clients/java), each run as one program."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

# The client is built within the first test's time.
pytestmark = pytest.mark.timeout(900)

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


@pytest.mark.slow
def test_clients_may_ping_every_ten_seconds(native_client, daemons) -> None:
    outcomes = native_client.test({"RUNNERD_PINGED_ADDRESS": daemons.start("--runner", "sim")})
    assert set(outcomes) - skipped(outcomes) == {"pingseverytensecondsareaccepted"}


@pytest.mark.slow
def test_clients_get_the_same_from_a_real_model(native_client, daemons, demo_gguf) -> None:
    outcomes = native_client.test({"RUNNERD_ADDRESS": daemons.start(str(demo_gguf))})
    assert skipped(outcomes) == NEED_A_SERVER_OF_THEIR_OWN
