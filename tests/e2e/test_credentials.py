"""Certificates and tokens as an operator sees them: warnings, metrics, refusals at the start, handshakes that fail."""

from __future__ import annotations

import socket
import ssl
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from runnerd_client import AsyncClient, Client, Tls, UnavailableError
from runnerd_service.config import SecurityConfig

WAIT = 30
TOKEN = '[[tokens]]\nname = "chat"\ntoken = "user-token-0123456789"\n'
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def issue(authority: trustme.CA, folder: Path, name: str, ends: datetime | None = None) -> tuple[str, str]:
    """Give the paths of a certificate and its key, which a further one of the same name replaces."""
    made = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA, not_after=ends)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    made.private_key_pem.write_to_path(key)
    return str(cert), str(key)


def exchange(authority: trustme.CA, folder: Path, ends: datetime) -> Path:
    """Put a certificate and its key in one file in the place of what was there, at one moment."""
    parts = [Path(one).read_bytes() for one in issue(authority, folder, "next", ends)]
    (folder / "both.new").write_bytes(b"".join(parts))
    return (folder / "both.new").rename(folder / "both.pem")


def scraped(daemon) -> dict[tuple[str, ...], float]:
    """Give the metrics of credentials, by name and values of the labels."""
    url = daemon.wait_for_log(r"metrics on (http://\S+)")[1]
    with urllib.request.urlopen(url, timeout=WAIT) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(("runnerd_tls_", "runnerd_credentials_"))
    }


def wait_for_figures(daemon, expected: dict[tuple[str, ...], float]) -> None:
    deadline = time.monotonic() + WAIT
    while (found := scraped(daemon)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found == expected


def figures(
    ends: datetime, tls: tuple[int, int] = (0, 0), tokens: tuple[int, int] = (0, 0), in_use: tuple[int, int] = (1, 1)
) -> dict[tuple[str, ...], float]:
    reloads, successful = "runnerd_credentials_reloads_total", "runnerd_credentials_last_reload_successful"
    return {
        ("runnerd_tls_certificate_expiry_timestamp_seconds",): int(ends.timestamp()),
        (reloads, "tls", "ok"): tls[0],
        (reloads, "tls", "failed"): tls[1],
        (reloads, "tokens", "ok"): tokens[0],
        (reloads, "tokens", "failed"): tokens[1],
        (successful, "tls"): in_use[0],
        (successful, "tokens"): in_use[1],
    }


def test_the_end_of_the_certificate_and_reloads_are_told_though_nobody_calls(daemon, authority, tmp_path) -> None:
    past, soon, later = (datetime.now(UTC) + days * DAY for days in (-1, 3, 300))
    (tokens := tmp_path / "tokens.toml").write_text(TOKEN)
    cert = str(exchange(authority, tmp_path, past))
    server = daemon("--tls-cert", cert, "--tls-key", cert, "--auth-tokens", str(tokens), "--metrics-port", "0")
    server.wait_until_ready()
    assert f"the certificate {cert} of --tls-cert has expired: it ended on {past:%Y-%m-%d}" in server.log()
    wait_for_figures(server, figures(past))

    tokens.write_text("[[tokens]")
    wait_for_figures(server, figures(past, tokens=(0, 1), in_use=(1, 0)))
    failed = [line for line in server.log().splitlines() if "what was read before stays" in line]
    assert (len(failed), failed[0].count(str(tokens)), failed[0].count("--auth-tokens")) == (1, 1, 1)
    tokens.write_text(TOKEN)
    wait_for_figures(server, figures(past, tokens=(1, 1)))

    for count, ends in enumerate((soon, later), start=1):
        exchange(authority, tmp_path, ends)
        wait_for_figures(server, figures(ends, tls=(count, 0), tokens=(1, 1)))
    assert server.log().count("expires soon: it ends on ") == 1


def test_without_tls_and_tokens_nothing_is_told_of_them(daemon) -> None:
    server = daemon("--metrics-port", "0")
    server.wait_until_ready()
    assert scraped(server) == {}


def test_what_cannot_be_used_ends_the_start_with_the_flag_and_what_to_do(runnerd, authority, tmp_path) -> None:
    cert, key = issue(authority, tmp_path, "server")
    (text := tmp_path / "text").write_text("[[")
    none = str(tmp_path / "none")
    for flags, problem, remedy in (
        (("--metrics-host", "127.0.0.1"), "--metrics-host 127.0.0.1 serves nothing", "give --metrics-port"),
        (("--tls-cert", none, "--tls-key", key), f"cannot read the certificate {none}", "give --tls-cert"),
        (("--tls-cert", cert, "--tls-key", none), f"cannot read the key of the certificate {none}", "give --tls-key"),
        (
            ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", str(text)),
            f"{text} is no PEM certificate",
            "give --tls-client-ca",
        ),
        (("--auth-tokens", str(text)), f"the file of tokens {text} is not TOML", "give --auth-tokens"),
    ):
        ended = runnerd("serve", "--runner", "sim", "--port", "0", *flags)
        assert (ended.returncode, problem in ended.stderr, remedy in ended.stderr) == (2, True, True), ended.stderr


def test_a_handshake_that_fails_leaves_the_line_that_the_docs_explain(daemon, authority, tmp_path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    cert, key = issue(authority, tmp_path, "server")
    stranger = issue(trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path, "stranger")
    expired = issue(authority, tmp_path, "expired", datetime.now(UTC) - DAY)
    server = daemon("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", str(tmp_path / "ca.pem"))
    address = server.wait_until_ready()
    explained = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    for own, line in (
        ((), "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (stranger, "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate"),
        (expired, "CERTIFICATE_VERIFY_FAILED: certificate has expired"),
    ):
        with (
            Client(address, tls=Tls(tmp_path / "ca.pem", *own), timeout=WAIT) as client,
            pytest.raises(UnavailableError, match=r"the server (wants a client's|does not trust this client's) certif"),
        ):
            client.server_info()
        server.wait_for_log(f"Handshake failed with error SSL_ERROR_SSL: .*{line}")
        assert all(part in explained for part in line.split(": "))
    # Plain HTTP of both kinds, and a client that does not trust the server and says so.
    host, port = address.rsplit(":", 1)
    for sent, line in (
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "WRONG_VERSION_NUMBER"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP_REQUEST"),
    ):
        with socket.create_connection((host, int(port)), timeout=WAIT) as plain:
            plain.sendall(sent)
            server.wait_for_log(line)
    context = ssl.create_default_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # later ones tell a server less
    with socket.create_connection((host, int(port)), timeout=WAIT) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname="127.0.0.1")
    server.wait_for_log("TLSV1_ALERT_UNKNOWN_CA")
    assert all(line in explained for line in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER", "TLSV1_ALERT_UNKNOWN_CA"))


async def test_a_token_with_a_tenant_makes_the_metadata_count_for_nothing(serve, tmp_path) -> None:
    (tokens := tmp_path / "tokens.toml").write_text(TOKEN)
    security = SecurityConfig(auth_tokens=str(tokens), tenant_metadata="x-tenant")
    async with serve(security=security) as live:
        for claimed in ("another", "no name"):
            metadata = {"x-tenant": claimed}
            async with AsyncClient(live.address, token="user-token-0123456789", metadata=metadata) as client:
                assert (await client.generate("x", max_tokens=1, timeout=WAIT)).outputs
        assert set(live.frontend.metrics().tenants) == {"chat"}
