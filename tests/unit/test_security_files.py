"""Files of tokens and certificates: what is taken, and that what is wrong is refused by name and tells no secret."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from runnerd_service.config import SecurityConfig, ServerConfig, TenantConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.metrics import ReloadFigures
from runnerd_service.security.certificates import certificate_paths, load_certificates
from runnerd_service.security.credentials import Credentials
from runnerd_service.security.exposure import check_metrics, check_tenants, exposure_warnings
from runnerd_service.security.reloading import Reloading, read_bytes
from runnerd_service.security.tokens import load_tokens
from runnerd_service.security.validity import SOON, Validity, validity_problem

SECRET = "a-secret-of-many-characters"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


@pytest.fixture
def tokens(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "tokens.toml"
        path.write_text(text)
        return path

    return write


def test_a_token_is_found_by_its_text_whether_the_file_holds_that_or_its_digest(tokens) -> None:
    path = tokens(
        f'''
        [[tokens]]
        name = "plain"
        token = "{SECRET}"
        [[tokens]]
        name = "gateway"
        sha256 = "{hashlib.sha256(b"another").hexdigest().upper()}"
        tenant = "*"
        role = "admin"
        '''
    )
    table = load_tokens(path)
    plain, gateway = table.find(SECRET), table.find("another")
    assert plain is not None
    assert gateway is not None
    assert (plain.name, plain.tenant, plain.role) == ("plain", "plain", "user")
    assert (gateway.name, gateway.tenant, gateway.role) == ("gateway", "*", "admin")
    assert [table.find(text) for text in ("", SECRET + "x", SECRET[:-1], "é", DIGEST)] == [None] * 5


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no token"),
        ("tokens = []", "has no token"),
        ("tokens = [1]", r"tokens\[0\]: expected a table"),
        ("x = 1", "x is not known"),
        ("[[", "is not TOML"),
        (f'[[tokens]]\nname = "a b"\ntoken = "{SECRET}"', "name: got 'a b'"),
        (f'[[tokens]]\ntoken = "{SECRET}"', "name: got ''"),
        (f'[[tokens]]\nname = "*"\ntoken = "{SECRET}"', r"name: got '\*'"),
        (f'[[tokens]]\nname = "a"\ntenant = ""\ntoken = "{SECRET}"', "tenant: got ''"),
        (f'[[tokens]]\nname = "a"\nrole = "root"\ntoken = "{SECRET}"', "role: got 'root', expected user or admin"),
        (f'[[tokens]]\nname = "a"\nrights = "all"\ntoken = "{SECRET}"', "rights is not known"),
        (f'[[tokens]]\nname = "a"\ntoken = "{SECRET}"\nsha256 = "{DIGEST}"', "one of token and sha256"),
        ('[[tokens]]\nname = "a"', "one of token and sha256"),
        ('[[tokens]]\nname = "a"\ntoken = 12345678901234567890', "token: expected a text"),
        ('[[tokens]]\nname = "a"\ntoken = "short"', "shorter than 16"),
        ('[[tokens]]\nname = "a"\ntoken = "0123456789 0123456789"', "no spaces"),
        ('[[tokens]]\nname = "a"\nsha256 = "abc"', "64 hexadecimal digits"),
        (
            f'[[tokens]]\nname = "a"\ntoken = "{SECRET}"\n[[tokens]]\nname = "b"\nsha256 = "{DIGEST}"',
            "a and b have the same token",
        ),
        (
            f'[[tokens]]\nname = "a"\ntoken = "{SECRET}"\n[[tokens]]\nname = "a"\ntoken = "{SECRET}2"',
            "a and a have the same name",
        ),
    ],
)
def test_a_wrong_file_of_tokens_is_refused_by_what_is_wrong(tokens, text: str, part: str) -> None:
    with pytest.raises(ConfigurationError, match=part) as caught:
        load_tokens(tokens(text))
    told = str(caught.value)
    assert SECRET not in told
    assert (told.count("--auth-tokens"), told.count("tokens.toml"), told.count("the file of tokens")) == (1, 1, 1)


def test_a_file_of_tokens_that_cannot_be_read_is_told_with_its_flag(tmp_path, tokens) -> None:
    for path, part in (
        (tmp_path / "none", "No such file or directory; give --auth-tokens"),
        (tmp_path, "Is a directory; give --auth-tokens"),
        (tokens("tokens = " + "[" * 100_000), "is not TOML: .*; give --auth-tokens a TOML file"),
    ):
        with pytest.raises(ConfigurationError, match=part):
            load_tokens(path)
    (binary := tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="is not UTF-8; give --auth-tokens"):
        load_tokens(binary)


def checked(config: SecurityConfig) -> None:
    assert certificate_paths(config)
    load_certificates(config)


def test_files_of_tls_that_do_not_go_together_are_refused(tmp_path) -> None:
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    paths = {}
    for name in ("a", "b"):
        made = authority.issue_cert("host.example", key_type=trustme.KeyType.ECDSA)
        paths[name], paths[f"{name}.key"] = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        made.cert_chain_pems[0].write_to_path(paths[name])
        made.private_key_pem.write_to_path(paths[f"{name}.key"])
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    key = serialization.load_pem_private_key(paths["a.key"].read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    locked = tmp_path / "locked.key"
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    a, a_key, b_key, none = str(paths["a"]), str(paths["a.key"]), str(paths["b.key"]), str(tmp_path / "none")
    for config, part in (
        (SecurityConfig(tls_cert=a), "needs both"),
        (SecurityConfig(tls_key=a_key), "needs both"),
        (SecurityConfig(tls_client_ca=a), "needs --tls-cert"),
        (SecurityConfig(tls_cert=a, tls_key=a_key, tls_admins=("x",)), "--tls-client-ca"),
        (
            SecurityConfig(tls_cert=a, tls_key=a_key, tls_client_ca=a, tls_admins=("x",), auth_tokens=a),
            "leave out --tls-admins",
        ),
        (SecurityConfig(tls_cert=none, tls_key=a_key), f"cannot read the certificate {none}: No such.*give --tls-cert"),
        (SecurityConfig(tls_cert=a, tls_key=none), f"cannot read the key .*{none}: No such.*give --tls-key"),
        (
            SecurityConfig(tls_cert=str(tmp_path), tls_key=a_key),
            "cannot read the certificate .*a directory.*--tls-cert",
        ),
        (SecurityConfig(tls_cert=a, tls_key=b_key), f"{b_key} does not belong to .*{a}; give --tls-key"),
        (SecurityConfig(tls_cert=a, tls_key=str(text)), f"key {text} cannot be used.*give --tls-key a PEM"),
        (SecurityConfig(tls_cert=a, tls_key=str(locked)), f"{locked} has a password; give --tls-key one without"),
        (SecurityConfig(tls_cert=str(text), tls_key=a_key), f"{text} is no PEM certificate.*give --tls-cert a PEM"),
        (SecurityConfig(tls_cert=a_key, tls_key=a_key), f"{a_key} is no PEM certificate.*give --tls-cert a PEM"),
        (
            SecurityConfig(tls_cert=a, tls_key=a_key, tls_client_ca=str(text)),
            f"{text} is no PEM certificate.*give --tls-client-ca a PEM",
        ),
        (
            SecurityConfig(tls_cert=a, tls_key=a_key, tls_client_ca=none),
            f"cannot read the certificates .*{none}: No such.*give --tls-client-ca",
        ),
    ):
        with pytest.raises(ConfigurationError, match=part):
            checked(config)
    assert certificate_paths(SecurityConfig()) == ()
    # Whatever stands between the certificates, in any encoding, and the key in the same file.
    both = tmp_path / "both.pem"
    both.write_bytes("für uns\n".encode() + paths["a.key"].read_bytes() + paths["a"].read_bytes())
    assert load_certificates(SecurityConfig(tls_cert=str(both), tls_key=str(both))).validity
    assert load_certificates(SecurityConfig(tls_cert=a, tls_key=a_key, tls_client_ca=a)).client_roots


def test_a_file_is_read_when_it_changes_and_at_no_other_time(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    path, reads = tmp_path / "file", []
    path.write_text("first")

    def load() -> str:
        reads.append(read_bytes(path, "the content", "--file").decode())
        if reads[-1] == "bad":
            raise ConfigurationError(f"{path} is bad")
        return reads[-1]

    value = Reloading("the file", [path], load)

    def looked(text: str | None = None) -> str:
        if text is not None:
            path.write_text(text)
        for _ in range(3):
            value.look()
        return value.get()

    assert looked() == "first"
    assert reads == ["first"]
    assert value.figures() == ReloadFigures(0, 0, in_use=True)
    assert looked("bad") == "first"
    assert value.figures() == ReloadFigures(0, 1, in_use=False)
    assert looked("second") == "second"
    assert value.figures() == ReloadFigures(1, 1, in_use=True)
    kept = path.rename(tmp_path / "kept")
    assert looked() == "second"
    assert value.figures() == ReloadFigures(1, 2, in_use=False)
    kept.rename(path)
    assert looked() == "second"
    assert value.figures() == ReloadFigures(1, 2, in_use=True)
    # A line for each change, however often it is looked at; each names the file once.
    lines = [record.getMessage() for record in caplog.records]
    assert [line.count(str(path)) for line in lines] == [1, 0, 1, 0]
    assert [line for line in lines if "what was read before stays" in line] == [lines[0], lines[2]]
    assert "give --file the path" in lines[2]


def test_a_link_that_is_set_to_another_file_is_followed(tmp_path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    link, path = tmp_path / "current", tmp_path / "current" / "file"
    link.symlink_to("first")
    value = Reloading("the file", [path], path.read_text)
    assert value.get() == "first"
    (tmp_path / "next").symlink_to("second")  # as Kubernetes exchanges a secret
    (tmp_path / "next").rename(link)
    value.look()
    assert value.get() == "second"


def issued(folder: Path, name: str, ends: datetime | None = None, begins: datetime | None = None) -> SecurityConfig:
    """Give the settings of a new certificate and its key; of other validity than a usual one, where that is said."""
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    made = authority.issue_cert("host.example", key_type=trustme.KeyType.ECDSA, not_before=begins, not_after=ends)
    made.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    made.private_key_pem.write_to_path(folder / f"{name}.key")
    return SecurityConfig(tls_cert=str(folder / f"{name}.pem"), tls_key=str(folder / f"{name}.key"))


DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("begins", "ends", "part"),
    [
        (-3 * DAY, -DAY, "has expired: it ended on "),
        (DAY, 99 * DAY, "is not valid yet: it begins on "),
        (-DAY, 13 * DAY, "expires soon: it ends on "),
        (-DAY, 15 * DAY, ""),
    ],
)
def test_a_certificate_that_clients_refuse_or_soon_will_is_warned_of_whenever_it_is_read(
    tmp_path, caplog, begins: timedelta, ends: timedelta, part: str
) -> None:
    now = datetime.now(UTC)
    config = issued(tmp_path, "a", now + ends, now + begins)
    credentials = Credentials(config)
    for _ in range(3):
        credentials.look()
    told = f"{now + (begins if 'begins' in part else ends):%Y-%m-%d %H:%M:%S} UTC"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (1 if part else 0)
    for wanted in (f"the certificate {config.tls_cert} of --tls-cert {part}{told}", "no restart") if part else ():
        assert wanted in warnings[0]
    assert credentials.figures().certificate_expiry_seconds == int((now + ends).timestamp())
    os.utime(config.tls_cert)
    credentials.look()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (2 if part else 0)


def test_time_alone_makes_a_certificate_worth_a_warning() -> None:
    begins, ends = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)
    validity, second = Validity(begins, ends), timedelta(seconds=1)
    moments = (begins - second, begins, ends - SOON, ends - SOON + second, ends, ends + second)
    found = [validity_problem(validity, now).split(" ")[:2] for now in moments]
    assert found == [["is", "not"], [""], [""], ["expires", "soon:"], ["expires", "soon:"], ["has", "expired:"]]
    assert "cannot be read" in validity_problem(None, begins)


def test_a_certificate_that_openssl_alone_reads_is_served_and_its_end_is_said_to_be_unknown(tmp_path, caplog) -> None:
    config = issued(tmp_path, "a")
    path = Path(config.tls_cert)
    der = ssl.PEM_cert_to_DER_cert(path.read_text())
    path.write_text(
        ssl.DER_cert_to_PEM_cert(der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x54", 1))
    )  # its version
    credentials = Credentials(config)
    for _ in range(3):
        credentials.look()
    assert credentials.figures().certificate_expiry_seconds is None
    (warning,) = caplog.messages
    assert f"the certificate {path} of --tls-cert has an end that cannot be read" in warning


def test_limits_of_tenants_without_tenants_are_refused() -> None:
    limited = TenantConfig(max_waiting=1)
    with pytest.raises(ConfigurationError, match="no call has a tenant"):
        check_tenants(ServerConfig(tenant=limited))
    for security in (
        SecurityConfig(auth_tokens="a"),
        SecurityConfig(tls_client_ca="a"),
        SecurityConfig(tenant_metadata="a"),
    ):
        check_tenants(ServerConfig(tenant=limited, security=security))
    check_tenants(ServerConfig())


def test_an_address_of_the_metrics_needs_a_port() -> None:
    with pytest.raises(ConfigurationError, match=r"--metrics-host 10\.0\.0\.1 .*give --metrics-port, too"):
        check_metrics(ServerConfig(metrics_host="10.0.0.1"))
    check_metrics(ServerConfig(metrics_host="10.0.0.1", metrics_port=0))
    check_metrics(ServerConfig(metrics_port=0))


SAFE = SecurityConfig(tls_cert="a", tls_key="b", auth_tokens="c")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (ServerConfig(), []),
        (ServerConfig(host="::1"), []),
        (ServerConfig(host="localhost"), []),
        (ServerConfig(host="127.1.2.3", metrics_port=1), []),
        (ServerConfig(host="0.0.0.0"), ["may use this server", "in the clear"]),
        (ServerConfig(host="::"), ["may use this server", "in the clear"]),
        (ServerConfig(host="host.example"), ["may use this server", "in the clear"]),
        (ServerConfig(host="10.0.0.1", security=SecurityConfig(auth_tokens="c")), ["answers and tokens cross"]),
        (ServerConfig(host="10.0.0.1", security=SecurityConfig(tls_cert="a", tls_key="b")), ["may use this server"]),
        (ServerConfig(host="10.0.0.1", security=SAFE), []),
        (ServerConfig(host="10.0.0.1", security=SAFE, metrics_port=0), ["reaches 10.0.0.1 may read the metrics"]),
        (ServerConfig(host="10.0.0.1", security=SAFE, metrics_port=0, metrics_host="127.0.0.1"), []),
        (ServerConfig(metrics_port=0, metrics_host="10.0.0.1"), ["reaches 10.0.0.1 may read the metrics"]),
        (ServerConfig(metrics_port=0, metrics_host="localhost"), []),
    ],
)
def test_who_can_reach_the_server_unasked_is_warned_of(config: ServerConfig, parts: list[str]) -> None:
    found = exposure_warnings(config)
    assert len(found) == len(parts)
    assert all(part in one for part, one in zip(parts, found, strict=True))
