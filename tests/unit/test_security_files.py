"""Files of tokens and certificates: what is taken, and that what is wrong is refused by name and tells no secret."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import trustme

from runnerd_service.config import SecurityConfig, ServerConfig, TenantConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.security.certificates import certificate_paths, load_certificates
from runnerd_service.security.exposure import check_tenants, exposure_warnings
from runnerd_service.security.reloading import Reloading
from runnerd_service.security.tokens import load_tokens

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
    assert SECRET not in str(caught.value)


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
        (SecurityConfig(tls_cert=none, tls_key=a_key), "cannot read the certificate"),
        (SecurityConfig(tls_cert=a, tls_key=none), "cannot read the key"),
        (SecurityConfig(tls_cert=a, tls_key=b_key), "cannot be used"),
        (SecurityConfig(tls_cert=str(text), tls_key=a_key), "cannot be used"),
        (SecurityConfig(tls_cert=a, tls_key=a_key, tls_client_ca=str(text)), "is no PEM certificate"),
    ):
        with pytest.raises(ConfigurationError, match=part):
            checked(config)
    assert certificate_paths(SecurityConfig()) == ()
    assert load_certificates(SecurityConfig(tls_cert=a, tls_key=a_key, tls_client_ca=a)).client_roots


def test_a_file_is_read_when_it_changes_and_at_no_other_time(tmp_path) -> None:
    path, reads = tmp_path / "file", []
    path.write_text("first")

    def load() -> str:
        reads.append(path.read_text())
        if reads[-1] == "bad":
            raise ConfigurationError("bad")
        return reads[-1]

    value = Reloading("the file", [path], load, look_seconds=0)
    assert [value.get() for _ in range(3)] == ["first"] * 3
    assert reads == ["first"]
    path.write_text("bad")
    assert value.get() == "first"
    path.write_text("second")
    assert [value.get() for _ in range(3)] == ["second"] * 3
    path.unlink()
    with pytest.raises(FileNotFoundError):  # which a real load tells as a ConfigurationError
        value.get()


def test_a_link_that_is_set_to_another_file_is_followed(tmp_path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    link, path = tmp_path / "current", tmp_path / "current" / "file"
    link.symlink_to("first")
    value = Reloading("the file", [path], path.read_text, look_seconds=0)
    assert value.get() == "first"
    (tmp_path / "next").symlink_to("second")  # as Kubernetes exchanges a secret
    (tmp_path / "next").rename(link)
    assert value.get() == "second"


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
        (ServerConfig(host="10.0.0.1", security=SAFE, metrics_port=0), ["may read the metrics"]),
    ],
)
def test_who_can_reach_the_server_unasked_is_warned_of(config: ServerConfig, parts: list[str]) -> None:
    found = exposure_warnings(config)
    assert len(found) == len(parts)
    assert all(part in one for part, one in zip(parts, found, strict=True))
