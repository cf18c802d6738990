"""Real daemons, and clients in other languages: built once, from Debian's packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

CLIENTS = Path(__file__).parents[2] / "clients"
BUILD_SECONDS = 600
RUN_SECONDS = 800
WAIT_SECONDS = 60

_DEBIAN_GO = Path("/usr/share/gocode/src/google.golang.org")
_DEBIAN_JARS = Path("/usr/share/java")
_NEEDED = {
    "go": ("go", _DEBIAN_GO / "grpc", _DEBIAN_GO.parent / "github.com/golang/protobuf"),
    "java": (
        "javac",
        "protoc",
        "grpc_java_plugin",
        *(_DEBIAN_JARS / f"{name}.jar" for name in ("grpc-netty", "netty-tcnative", "junit4")),
    ),
    "node": ("node", CLIENTS / "node" / "node_modules"),
}


@dataclass
class Daemons:
    """Servers in processes of their own."""

    folder: Path
    _processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, *arguments: str, port: int = 0) -> str:
        """Run ``serve`` with ``arguments``; give its address once it serves."""
        command = [sys.executable, "-m", "runnerd_service", "serve", "--port", str(port), *arguments]
        log_path = self.folder / f"daemon{len(self._processes)}.log"
        with log_path.open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"serving \S+ on (\S+)", line):
                self._processes[found[1]] = process
                return found[1]
        process.stdout.close()
        raise AssertionError(f"exit code {process.wait(WAIT_SECONDS)}:\n{log_path.read_text()}")

    def kill(self, address: str) -> None:
        process = self._processes[address]
        process.kill()
        process.wait(WAIT_SECONDS)
        assert process.stdout is not None
        process.stdout.close()

    def terminate(self, address: str) -> None:
        """Ask it to end."""
        self._processes[address].terminate()

    def close(self) -> None:
        for address in self._processes:
            self.kill(address)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path)
    yield made
    made.close()


@dataclass(frozen=True)
class Files:
    """An authority, a client whose certificate it has signed, and the flags of servers that do alike."""

    authority: Path
    client_certificate: Path
    client_key: Path
    tls: list[str]
    mutual_tls_and_token: list[str]
    token: str


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The files of TLS and of tokens."""
    folder, token = tmp_path, "chat-token-0123456789"
    authority = folder / "authority.pem"
    signs = trustme.CA()
    signs.cert_pem.write_to_path(authority)
    pairs = {}
    for name in ("127.0.0.1", "client.example"):
        pairs[name] = folder / f"{name}.pem", folder / f"{name}.key"
        signed = signs.issue_cert(name)
        signed.cert_chain_pems[0].write_to_path(pairs[name][0])
        # PKCS #8, as openssl writes it today: Java's TLS reads no older form
        key = serialization.load_pem_private_key(signed.private_key_pem.bytes(), None)
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        pairs[name][1].write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    certificate, key_path = pairs["127.0.0.1"]
    tls = ["--tls-cert", str(certificate), "--tls-key", str(key_path)]
    tokens = folder / "tokens.toml"
    tokens.write_text(f'[[tokens]]\nname = "chat"\ntoken = "{token}"\n')
    both = [*tls, "--tls-client-ca", str(authority), "--auth-tokens", str(tokens)]
    return Files(authority, *pairs["client.example"], tls, both, token)


@dataclass(frozen=True)
class NativeClient:
    """A built client: what runs its contract tests and its examples, and in which environment."""

    language: str
    contract: tuple[str | Path, ...]
    examples: Mapping[str, tuple[str | Path, ...]]
    """By topic; the address is the last argument."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def test(self, environment: Mapping[str, str], restart: Callable[[], None] | None = None) -> dict[str, str]:
        """Run the contract tests; give the outcome (PASS or SKIP) of each by its name in lower case.

        Args:
            environment: Where the servers are.
            restart: Called when a test asks for a restart of its server.
        """
        process = subprocess.Popen(
            self.contract,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | self.environment | environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        limit = Timer(RUN_SECONDS, process.kill)
        limit.start()
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if line.strip() == "restart the server" and restart is not None:
                    restart()
                    process.stdin.write("done\n")
                    process.stdin.flush()
            code = process.wait(WAIT_SECONDS)
        finally:
            limit.cancel()
            process.kill()
            process.wait(WAIT_SECONDS)
            process.stdin.close()
            process.stdout.close()
        output = "".join(lines)
        assert code == 0, output
        found = re.findall(r"^--- (PASS|SKIP|FAIL): (?:Test)?(\w+)", output, re.MULTILINE)
        return {name.lower(): outcome for outcome, name in found}

    def example(self, topic: str, address: str, stdin: str = "") -> str:
        """Run an example to its end; give what it printed."""
        done = subprocess.run(
            [*self.examples[topic], address],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_SECONDS,
            env=os.environ | self.environment,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout


def _run(*command: str | Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _build_go(folder: Path) -> NativeClient:
    script = CLIENTS / "go" / "offline.sh"
    environment = {"RUNNERD_GOPATH": str(folder / "gopath")}
    binary = folder / "contract"
    examples = folder / "examples"
    examples.mkdir()
    _run(script, "test", "-c", "-o", binary, ".", environment=environment)
    _run(script, "build", "-o", examples, "./examples/...", environment=environment)
    return NativeClient(
        "go",
        (binary, "-test.v"),
        {
            topic: (examples / name, "-address")
            for topic, name in {
                "stream": "stream",
                "chat": "chat",
                "cancel": "cancel",
                "deadline": "deadline",
                "errors": "errors",
                "health": "health",
            }.items()
        },
    )


def _build_java(folder: Path) -> NativeClient:
    script = CLIENTS / "java" / "offline.sh"
    environment = {"RUNNERD_JAVA_TARGET": str(folder / "target")}
    _run(script, "build", environment=environment)
    return NativeClient(
        "java",
        (script, "test"),
        {
            topic: (script, "run", f"dev.runnerd.examples.{name}Example")
            for topic, name in {
                "stream": "Stream",
                "chat": "Chat",
                "cancel": "Cancel",
                "deadline": "Deadline",
                "errors": "ErrorDetails",
                "health": "Health",
            }.items()
        },
        environment,
    )


def _build_node(folder: Path) -> NativeClient:
    """Build in a copy: two processes of the tests may do so at once."""
    project = folder / "clients" / "node"
    skipped = shutil.ignore_patterns("node_modules", "dist", "generated", "*_pb2*", "__pycache__")
    shutil.copytree(CLIENTS / "node", project, ignore=skipped)
    shutil.copytree(CLIENTS.parent / "protos", folder / "protos", ignore=skipped)
    (project / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
    _run(project / "generate.sh", environment={})
    _run(project / "node_modules" / ".bin" / "tsc", "--project", project, environment={})
    built = project / "dist"
    return NativeClient(
        "node",
        ("node", f"--test-reporter={built / 'test' / 'reporter.js'}", built / "test" / "contract.js"),
        {
            topic: ("node", built / "examples" / f"{topic}.js")
            for topic in ("stream", "chat", "cancel", "deadline", "errors", "health")
        },
    )


@pytest.fixture(scope="session", params=["go", "java", "node"])
def native_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeClient:
    """The Go, the Java and the Node client, where what each needs is installed."""
    for needed in _NEEDED[request.param]:
        if not (shutil.which(needed) if isinstance(needed, str) else needed.exists()):
            pytest.skip(f"no {needed} here; clients/{request.param}/README.md says what to install")
    build = {"go": _build_go, "java": _build_java, "node": _build_node}[request.param]
    return build(tmp_path_factory.mktemp(request.param))
