"""Who may call: TLS, clients' certificates, bearer tokens, roles; and that files are read again while it runs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from runnerd.v1 import inference_pb2, server_pb2
from runnerd_client import (
    AsyncClient,
    Client,
    PermissionDeniedError,
    RunnerdError,
    Tls,
    UnauthenticatedError,
    UnavailableError,
)
from runnerd_service.cli.main import main
from runnerd_service.config import SecurityConfig, ServerConfig, TenantConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.frontend import Frontend
from runnerd_service.rpc.access import FOR_EVERYBODY, FOR_USERS
from runnerd_service.rpc.server import RpcServer
from runnerd_service.rpc.servicers import LAST_ERROR_FOR_USERS
from runnerd_service.security.reloading import LOOK_SECONDS

WAIT = 30
USER, ADMIN = "user-token-0123456789", "admin-token-0123456789"
TOKENS = f"""
[[tokens]]
name = "chat"
token = "{USER}"

[[tokens]]
name = "operator"
sha256 = "{hashlib.sha256(ADMIN.encode()).hexdigest()}"
role = "admin"
"""
FOR_ADMINISTRATORS = frozenset(
    {
        "/runnerd.v1.ServerService/ListRunners",
        "/runnerd.v1.ServerService/CaptureTrace",
        "/runnerd.v1.ServerService/Drain",
        "/runnerd.v1.ServerService/ResetPrefixCache",
    }
)
LONG = {"max_tokens": 5000, "ignore_eos": True}


class Authority:
    """A certificate authority and the files that it issued."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *names: str, common_name: str | None = None) -> tuple[Path, Path]:
        """Give the paths of a new certificate and its key."""
        made = self._authority.issue_cert(*names, common_name=common_name, key_type=trustme.KeyType.ECDSA)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return cert, key


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    return path


def server_tls(authority: Authority, **more) -> SecurityConfig:
    cert, key = authority.issue("server", "127.0.0.1")
    return SecurityConfig(tls_cert=str(cert), tls_key=str(key), **more)


async def seen(condition) -> None:
    """Wait until a condition that is asked over the wire holds."""
    async with asyncio.timeout(WAIT):
        while not await condition():  # noqa: ASYNC110 - it is asked over the wire
            await asyncio.sleep(0.05)


async def answers(address: str, **connection) -> bool:
    async with AsyncClient(address, timeout=WAIT, **connection) as client:
        try:
            return (await client.server_info()).version != ""
        except (UnavailableError, UnauthenticatedError):
            return False


async def test_tls_is_for_those_who_trust_the_server_and_speak_it(serve, ours, theirs) -> None:
    async with serve(security=server_tls(ours), load=False) as live:
        assert await answers(live.address, tls=Tls(ca=ours.ca))
        assert not await answers(live.address, tls=Tls(ca=theirs.ca))
        assert not await answers(live.address)  # in the clear
        assert not await answers(live.address, tls=Tls(ca=ours.ca, server_name="another.example"))

        def synchronous() -> str:
            with Client(live.address, tls=Tls(ca=ours.ca), timeout=WAIT) as client:
                return client.server_info().version

        assert await asyncio.to_thread(synchronous)


async def test_clients_have_to_show_a_certificate_and_are_known_by_it(serve, ours, theirs, caplog) -> None:
    chat = Tls(ours.ca, *ours.issue("chat", common_name="chat"))
    operator = Tls(ours.ca, *ours.issue("operator", "spiffe.example"))  # by its alternative name
    stranger = Tls(ours.ca, *theirs.issue("chat", common_name="chat"))
    security = server_tls(ours, tls_client_ca=str(ours.ca), tls_admins=("spiffe.example",))
    caplog.set_level(logging.INFO, "runnerd_service.rpc")
    async with serve(security=security) as live:
        assert not await answers(live.address, tls=Tls(ca=ours.ca))
        assert not await answers(live.address, tls=stranger)
        async with AsyncClient(live.address, tls=chat, timeout=WAIT) as client:
            await client.generate("x", request_id="mine", max_tokens=1)
            with pytest.raises(PermissionDeniedError, match=r"chat is no admin.* call \S+/ResetPrefixCache"):
                await client.reset_prefix_cache()
        async with AsyncClient(live.address, tls=operator, timeout=WAIT) as client:
            await client.reset_prefix_cache()
    assert "request mine of chat finished" in caplog.text
    assert "/runnerd.v1.ServerService/ResetPrefixCache by spiffe.example" in caplog.text


async def test_a_server_that_cannot_be_what_was_asked_for_does_not_begin() -> None:
    config = ServerConfig(port=0, tenant=TenantConfig(max_running=1))
    with pytest.raises(ConfigurationError, match="no call has a tenant"):
        RpcServer(config, Frontend(config))
    for security in (SecurityConfig(tls_cert="none", tls_key="none"), SecurityConfig(auth_tokens="none")):
        config = ServerConfig(port=0, security=security)
        with pytest.raises(ConfigurationError, match="cannot read"):
            RpcServer(config, Frontend(config))


async def test_a_unix_socket_is_its_owners_whatever_the_port_asks_for(serve, ours, tokens, tmp_path) -> None:
    path = tmp_path / "s.sock"
    security = server_tls(ours, tls_client_ca=str(ours.ca))
    async with serve(security=security, unix_socket=str(path), load=False):
        assert path.stat().st_mode & 0o777 == 0o600
        async with AsyncClient(f"unix:{path}", timeout=WAIT) as client:
            assert await client.runners()  # which is for administrators
    security = SecurityConfig(auth_tokens=str(tokens))
    async with serve(security=security, unix_socket=str(path), load=False) as live:
        assert not await answers(live.server.addresses[1])  # where tokens are asked for, they are asked for here, too
        assert await answers(live.server.addresses[1], token=USER)


async def test_certificates_are_exchanged_while_streams_run(serve, ours, theirs, caplog) -> None:
    security = server_tls(ours, tls_client_ca=str(ours.ca))
    files = [Path(one) for one in (security.tls_cert, security.tls_key, security.tls_client_ca)]
    old, new = Tls(ours.ca, *ours.issue("a", common_name="a")), Tls(theirs.ca, *theirs.issue("a", common_name="a"))
    before = [path.read_bytes() for path in files]
    after = [path.read_bytes() for path in (*theirs.issue("server", "127.0.0.1"), theirs.ca)]
    async with serve(security=security, options={"step_seconds": "0.01"}) as live:
        try:
            async with AsyncClient(live.address, tls=old) as client, client.stream("x", **LONG) as stream:
                assert (await anext(stream)).HasField("started")
                write(files[:1], after)  # a part of an exchange
                await seen(lambda: _logged(caplog, "does not belong to the certificate"))
                assert await answers(live.address, tls=old)
                write(files, after)
                await seen(lambda: answers(live.address, tls=new))
                assert not await answers(live.address, tls=old)
                async for message in stream:  # which stands on its old connection
                    if message.HasField("output"):
                        break
                assert (await client.generate("y", max_tokens=1)).outputs
        finally:
            write(files, before)


def write(files: list[Path], contents: list[bytes]) -> None:
    for path, content in zip(files, contents, strict=False):
        path.write_bytes(content)


async def _logged(caplog, part: str) -> bool:
    return part in caplog.text


BAD_AUTHORIZATION = [
    (),
    (("authorization", ""),),
    (("authorization", "Bearer"),),
    (("authorization", "Bearer  "),),
    (("authorization", f"Basic {USER}"),),
    (("authorization", USER),),
    (("authorization", f"Bearer {USER}x"),),
    (("authorization", f"Bearer {USER[:-1]}"),),
    (("authorization", f"Bearer {USER}"), ("authorization", f"Bearer {ADMIN}")),
    (("authorization-bin", f"Bearer {USER}".encode()),),
]


async def test_calls_without_a_good_token_are_refused_before_their_message_is_read(serve, tokens, caplog) -> None:
    async with (
        serve(security=SecurityConfig(auth_tokens=str(tokens)), max_message_bytes=10_000, load=False) as live,
        grpc.aio.insecure_channel(live.address) as channel,
    ):
        large = b"\xff" * 2_000_000
        methods = [
            "/runnerd.v1.InferenceService/Generate",
            "/runnerd.v1.ServerService/ResetPrefixCache",
            "/runnerd.v1.ServerService/NoSuchMethod",
        ]
        for method in methods:
            for metadata in BAD_AUTHORIZATION:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    # No message at all, and larger than gRPC takes: which would be another error, were it read.
                    await channel.unary_unary(method)(large, metadata=metadata, timeout=WAIT)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, (method, metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream("/runnerd.v1.InferenceService/StreamGenerate")(b"", timeout=WAIT).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # In any case of the scheme's name.
        call = channel.unary_unary("/runnerd.v1.ServerService/GetLoad")
        assert await call(b"", metadata=(("authorization", f"bEARER {USER}"),), timeout=WAIT) is not None
        stats = live.frontend.request_stats
        assert stats.refused_calls() == {
            "unauthenticated": len(methods) * len(BAD_AUTHORIZATION) + 1,
            "permission_denied": 0,
            "invalid_request": 0,
        }
        generations = {outcome: number for outcome, number in stats.outcomes().items() if number}
        assert generations == {"unauthenticated": len(BAD_AUTHORIZATION) + 1}
    assert USER[:-1] not in caplog.text
    assert ADMIN not in caplog.text
    assert len(caplog.records) <= 2 + len(methods)  # refusals cannot fill the log: a line a second at most


async def test_roles_say_who_may_administrate(serve, tokens, caplog) -> None:
    caplog.set_level(logging.INFO, "runnerd_service.rpc")
    async with serve(security=SecurityConfig(auth_tokens=str(tokens))) as live:
        async with AsyncClient(live.address, token=lambda: USER, timeout=WAIT) as user:
            assert (await user.generate("x", max_tokens=1)).outputs
            assert (await user.tokenize("x")).ids
            assert (await user.server_info()).version
            async with grpc.aio.insecure_channel(live.address) as channel:
                call = channel.unary_unary("/runnerd.v1.ServerService/NoSuchMethod")
                with pytest.raises(grpc.aio.AioRpcError) as unknown:
                    await call(b"", metadata=(("authorization", f"Bearer {USER}"),), timeout=WAIT)
                assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
            for refused in (user.reset_prefix_cache(), user.capture_trace(0.01), user.runners()):
                with pytest.raises(PermissionDeniedError) as caught:
                    await refused
                assert caught.value.reason == "PERMISSION_DENIED"
        async with AsyncClient(live.address, token=ADMIN, timeout=WAIT) as admin:
            await admin.reset_prefix_cache()
            assert (await admin.capture_trace(0.01)).trace_json
        assert "/runnerd.v1.ServerService/ResetPrefixCache by operator" in caplog.text


def test_it_is_decided_for_each_method_who_may_call_it() -> None:
    services = [
        *inference_pb2.DESCRIPTOR.services_by_name.values(),
        *server_pb2.DESCRIPTOR.services_by_name.values(),
        *health_pb2.DESCRIPTOR.services_by_name.values(),
        *reflection_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    decided = FOR_EVERYBODY | FOR_USERS | FOR_ADMINISTRATORS
    assert methods - decided <= {"/grpc.health.v1.Health/List"}  # which this server does not have
    assert decided <= methods
    assert len(decided) == len(FOR_EVERYBODY) + len(FOR_USERS) + len(FOR_ADMINISTRATORS)


async def test_health_needs_no_token_and_reflection_does(serve, tokens) -> None:
    async with (
        serve(security=SecurityConfig(auth_tokens=str(tokens)), load=False) as live,
        grpc.aio.insecure_channel(live.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        found = await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT)
        assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert await _reflected(channel, ()) is grpc.StatusCode.UNAUTHENTICATED
        assert await _reflected(channel, (("authorization", f"Bearer {USER}"),)) is grpc.StatusCode.OK
    async with (
        serve(security=SecurityConfig(reflection=False), load=False) as live,
        grpc.aio.insecure_channel(live.address) as channel,
    ):
        assert await _reflected(channel, ()) is grpc.StatusCode.UNIMPLEMENTED


async def _reflected(channel: grpc.aio.Channel, metadata: tuple) -> grpc.StatusCode:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(metadata=metadata, timeout=WAIT)
    try:
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert "runnerd.v1.InferenceService" in str(await call.read())
        await call.done_writing()
    except (grpc.aio.AioRpcError, AssertionError, asyncio.InvalidStateError):
        pass
    return await call.code()


async def test_tokens_are_read_again_and_a_broken_file_takes_none_away(serve, tokens, caplog) -> None:
    async with serve(security=SecurityConfig(auth_tokens=str(tokens)), load=False) as live:
        assert await answers(live.address, token=USER)
        tokens.write_text(TOKENS.replace(USER, "another-token-0123456789"))
        await seen(lambda: answers(live.address, token="another-token-0123456789"))
        assert not await answers(live.address, token=USER)
        for broken in ("", "tokens = 1", "[[tokens]", '[[tokens]]\nname = "x"'):
            tokens.write_text(broken)
            await asyncio.sleep(LOOK_SECONDS / 4)
            assert await answers(live.address, token="another-token-0123456789")
        await seen(lambda: _refused_and_logged(live, caplog))
        tokens.unlink()
        assert await answers(live.address, token="another-token-0123456789")
        tokens.write_text(TOKENS)
        await seen(lambda: answers(live.address, token=USER))


async def _refused_and_logged(live, caplog) -> bool:
    assert not await answers(live.address, token=USER)
    return "what was read before stays" in caplog.text


async def test_users_are_not_told_how_the_engine_failed(serve, tokens) -> None:
    security = SecurityConfig(auth_tokens=str(tokens))
    async with serve(security=security, options={"fail_at_step": "0"}, max_engine_restarts=0) as live:
        async with AsyncClient(live.address, token=USER, timeout=WAIT) as user:
            with pytest.raises(RunnerdError):
                await user.generate("x")
            assert (await user.server_info()).last_error == LAST_ERROR_FOR_USERS
        async with AsyncClient(live.address, token=ADMIN, timeout=WAIT) as admin:
            assert (await admin.server_info()).last_error not in ("", LAST_ERROR_FOR_USERS)


def test_the_command_line_speaks_tls_and_sends_a_token(
    daemon, ours, theirs, tokens, tmp_path, capsys, monkeypatch
) -> None:
    cert, key = ours.issue("daemon", "127.0.0.1")
    server = daemon("--tls-cert", str(cert), "--tls-key", str(key), "--auth-tokens", str(tokens))
    connection = ["--address", server.wait_until_ready(), "--tls-ca", str(ours.ca)]
    token_file = tmp_path / "token"
    token_file.write_text(ADMIN + "\n")

    def ends(code: int, *arguments: str) -> str:
        assert main(arguments) == code
        return capsys.readouterr().err

    told = ends(4, "info", *connection)
    assert ("authorization: Bearer TOKEN" in told, "--token-file" in told) == (True, True)
    ends(0, "reset-prefix-cache", *connection, "--token-file", str(token_file))
    monkeypatch.setenv("RUNNERD_TOKEN", USER)
    ends(0, "generate", "x", "--raw", "--max-tokens", "1", *connection)
    assert "chat is no administrator" in ends(4, "reset-prefix-cache", *connection)
    assert main(("drain", *connection)) == 4
    told = capsys.readouterr()
    assert told.out == ""  # nothing drains
    assert 'role = "admin"' in told.err
    assert "--tls-admins" in told.err
    ends(0, "generate", "x", "--raw", "--max-tokens", "1", *connection)
    assert "cannot read" in ends(2, "info", *connection[:2], "--tls-ca", str(tmp_path / "none.pem"))
    token_file.write_text("\n")
    assert f"{token_file} is empty" in ends(2, "info", *connection, "--token-file", str(token_file))
    # What does not fit is named, with the flags that help: it is not that no server answers.
    told = ends(3, "info", *connection[:2], "--tls-ca", str(theirs.ca))
    assert ("TLS handshake" in told, "--tls-ca" in told) == (True, True), told
    told = ends(3, "info", *connection, "--tls-server-name", "another.example")
    assert ("TLS handshake" in told, "--tls-server-name" in told) == (True, True), told
    told = ends(3, "info", *connection[:2])
    assert "if the server speaks TLS, give --tls or --tls-ca" in told
    assert USER not in server.log()
    assert ADMIN not in server.log()


async def test_a_client_of_another_stack_shows_its_certificate_and_token(serve, ours, tokens) -> None:
    buf = shutil.which("buf", path=str(Path(sys.executable).parent))
    assert buf is not None, "a part of the dev extra"
    cert, key = ours.issue("go", common_name="go")
    security = server_tls(ours, tls_client_ca=str(ours.ca), auth_tokens=str(tokens))

    async def called(*flags: str) -> tuple[int | None, str]:
        # By reflection: that is a call of its own, which brings the same.
        url = f"https://{live.address}/runnerd.v1.ServerService/GetServerInfo"
        command = [buf, "curl", "--protocol", "grpc", "--cacert", str(ours.ca), *flags, "--data", "{}", url]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
        async with asyncio.timeout(WAIT):
            output, _ = await process.communicate()
        return process.returncode, output.decode()

    shown = ("--cert", str(cert), "--key", str(key))
    bearer = (f"authorization: Bearer {USER}",)
    async with serve(security=security, load=False) as live:
        code, output = await called(*shown, "-H", *bearer, "--reflect-header", *bearer)
        assert (code, '"version"' in output) == (0, True), output
        code, output = await called(*shown, "-H", "authorization: Bearer another", "--reflect-header", *bearer)
        assert (bool(code), '"unauthenticated"' in output) == (True, True), output
        code, output = await called("-H", *bearer, "--reflect-header", *bearer)
        assert (bool(code), '"version"' in output) == (True, False), output


def test_what_would_send_a_token_in_the_clear_is_refused_by_the_client() -> None:
    for address in ("10.0.0.1:1", "dns:///host.example:1", "host.example:1"):
        with pytest.raises(ValueError, match="in the clear"):
            Client(address, token=USER)
        Client(address, token=USER, plaintext_token=True).close()
        Client(address, token=USER, tls=Tls()).close()
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/s.sock"):
        Client(address, token=USER).close()
    with pytest.raises(ValueError, match="speaks no TLS"):
        Client("unix:/s.sock", tls=Tls())
    with pytest.raises(ValueError, match="go together"):
        Tls(cert="a.pem")
    with pytest.raises(FileNotFoundError):
        Client("127.0.0.1:1", tls=Tls(ca="/none.pem"))
