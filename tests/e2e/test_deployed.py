"""Servers as deploy/ starts them: the pod's arguments with its Secrets and probes, the unit's file with its user.

Paths and ports are others than the printed ones; there is no cluster here, and no running systemd.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from runnerd_client import Client, Tls, UnauthenticatedError
from runnerd_service.cli import exit_codes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^```sh\n(.*?)^```", SECTIONS["Kubernetes"], re.MULTILINE | re.DOTALL)
WAIT_SECONDS = 30


def pod() -> dict:
    found = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "runnerd.yaml").read_text())
    return next(one for one in found if one["kind"] == "Deployment")["spec"]["template"]["spec"]


def printed_secrets() -> dict[str, dict[str, str]]:
    """Give the files of each Secret that the page makes, by key."""
    found: dict[str, dict[str, str]] = {}
    for line in BLOCKS[0].splitlines():
        if line.startswith("kubectl create secret "):
            *_, kind, name = [word for word in shlex.split(line) if not word.startswith("--")]
            flags = dict(re.findall(r"--([a-z-]+)=(\S+)", line))
            found[name] = (
                {"tls.crt": flags["cert"], "tls.key": flags["key"]}
                if kind == "tls"
                else {Path(flags["from-file"]).name: flags["from-file"]}
            )
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's first lines make, up to those that need a cluster."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    folder = tmp_path_factory.mktemp("made")
    lines = BLOCKS[0].partition("kubectl ")[0]
    done = subprocess.run(["sh", "-ec", lines], cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder


def mount(folder: Path, files: dict[str, bytes]) -> None:
    """Lay out a Secret, or exchange it, as the kubelet does: links by way of one that is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    version = Path(tempfile.mkdtemp(prefix="..version", dir=folder))
    for key, content in files.items():
        (version / key).write_bytes(content)
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(Path("..data", key))
    (folder / "..next").symlink_to(version.name)
    (folder / "..next").rename(folder / "..data")


def mount_secrets(root: Path, made: Path) -> None:
    volumes = {one["name"]: one["secret"]["secretName"] for one in pod()["volumes"] if "secret" in one}
    secrets = printed_secrets()
    for one in pod()["containers"][0]["volumeMounts"]:
        if one["name"] in volumes:
            files = secrets[volumes[one["name"]]]
            mount(root / one["mountPath"][1:], {key: (made / file).read_bytes() for key, file in files.items()})


def arguments(root: Path) -> list[str]:
    """Give the pod's arguments with paths below ``root``, ports that are free, and no model: the simulated runner's."""
    (container,) = pod()["containers"]
    command, model, *rest = container["args"]
    assert (command, model) == ("serve", "/models/served")
    moved = [re.sub(r"=(/etc/.*)", lambda found: f"={root}{found[1]}", one) for one in rest]
    return [re.sub(r"(--(?:metrics-)?port)=\d+", r"\1=0", one) for one in moved]


def probe(name: str, port: int) -> int:
    """Give the status that a probe of the pod gets."""
    path = pod()["containers"][0][name]["httpGet"]["path"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def answers(client: Client) -> bool:
    """Whether the server comes to know the client's token."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with suppress(UnauthenticatedError):
            return client.load().num_blocks > 0
        time.sleep(0.05)
    return False


def drain_lines(folder: Path, address: str, token_file: str) -> subprocess.CompletedProcess[str]:
    """Run the page's `runnerd drain`."""
    (line,) = [one for one in BLOCKS[1].splitlines() if one.startswith("runnerd drain ")]
    line = line.replace("127.0.0.1:50051", address).replace("operator.token", token_file)
    command = [sys.executable, "-m", "runnerd_service", *shlex.split(line)[1:]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_the_pod_serves_tells_its_probes_and_drains_for_the_operator_alone(daemon, made, tmp_path) -> None:
    mount_secrets(tmp_path, made)
    server = daemon(*arguments(tmp_path))
    port = int(server.wait_for_log(r"metrics on http://[^:]+:(\d+)")[1])
    address = f"127.0.0.1:{server.wait_until_ready().rpartition(':')[2]}"
    tls = Tls(ca=str(made / "ca.pem"), server_name="runnerd.default.svc")
    assert (probe("readinessProbe", port), probe("livenessProbe", port)) == (200, 200)

    (container,) = pod()["containers"]
    with subprocess.Popen(container["lifecycle"]["preStop"]["exec"]["command"]) as pre_stop:
        with Client(address, tls=tls, token=(made / "chat.token").read_text()) as client:
            client.generate("hi", max_tokens=2)  # it is still served
        assert probe("readinessProbe", port) == 200
        assert pre_stop.wait(WAIT_SECONDS) == 0

    with Client(address, tls=tls) as nobody, pytest.raises(UnauthenticatedError):
        nobody.load()
    assert drain_lines(made, address, "chat.token").returncode == exit_codes.REFUSED
    assert probe("readinessProbe", port) == 200
    drained = drain_lines(made, address, "operator.token")
    assert drained.returncode == 0, drained.stderr
    assert (probe("readinessProbe", port), probe("livenessProbe", port)) == (503, 200)
    server.terminate()
    assert server.wait() == 0


def test_an_exchanged_secret_is_taken_without_a_restart(daemon, made, tmp_path) -> None:
    mount_secrets(tmp_path, made)
    server = daemon(*arguments(tmp_path))
    address = f"127.0.0.1:{server.wait_until_ready().rpartition(':')[2]}"
    tls = Tls(ca=str(made / "ca.pem"), server_name="runnerd")
    folder = tmp_path / "etc" / "runnerd" / "tokens"
    mount(folder, {"tokens.toml": b'[[tokens]]\nname = "later"\ntoken = "a-later-token-0123"\n'})
    with Client(address, tls=tls, token="a-later-token-0123") as client:
        assert answers(client)
    with (
        Client(address, tls=tls, token=(made / "chat.token").read_text()) as client,
        pytest.raises(UnauthenticatedError),
    ):
        client.load()


def test_kubectl_makes_secrets_of_the_form_that_the_pod_mounts(made) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    for line in BLOCKS[0].splitlines():
        if line.startswith("kubectl create secret "):
            command = [*shlex.split(line), "--dry-run=client", "--output=json"]
            told = subprocess.run(command, cwd=made, capture_output=True, text=True, check=True, timeout=60).stdout
            secret = json.loads(told)
            files = printed_secrets().pop(secret["metadata"]["name"])
            assert {key: base64.b64decode(one) for key, one in secret["data"].items()} == {
                key: (made / file).read_bytes() for key, file in files.items()
            }


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """Give a folder that other users reach; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


USER = 10001
AS_THE_USER = {"user": USER, "group": USER, "extra_groups": [], "cwd": "/"}


def can_start_as_another_user() -> bool:
    if os.geteuid() != 0:
        return False
    try:
        subprocess.run([sys.executable, "-c", ""], **AS_THE_USER, check=True, timeout=60)
    except (PermissionError, subprocess.CalledProcessError):
        return False
    return True


def test_the_unit_s_server_reads_files_of_its_group_and_alone_opens_its_socket(made) -> None:
    if not can_start_as_another_user():
        pytest.skip("needs root, and a Python that other users may start")
    with reachable_folder() as folder:
        toml = (ROOT / "deploy" / "systemd" / "runnerd.toml").read_text()
        toml = re.sub(r"^# (?=[a-z-]+ = )", "", toml, flags=re.MULTILINE)
        toml = re.sub(r"^model = .*\n", "", toml, flags=re.MULTILINE)
        etc, run = folder / "etc", folder / "run"
        etc.mkdir()
        run.mkdir(mode=0o750)
        os.chown(run, USER, USER)
        (etc / "runnerd.toml").write_text(toml.replace("/etc/runnerd", str(etc)).replace("/run/runnerd", str(run)))
        for name in ("server.pem", "server.key", "tokens.toml"):
            shutil.copy(made / name, etc / name)
            (etc / name).chmod(0o640)
            os.chown(etc / name, 0, USER)
        log = folder / "log"
        with log.open("w") as sink:
            server = subprocess.Popen(
                [sys.executable, "-m", "runnerd_service", "serve", "--config", str(etc / "runnerd.toml")],
                env={"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(run), "RUNNERD_RUNNER": "sim"}
                | {"RUNNERD_PORT": "0", "RUNNERD_METRICS_PORT": "0", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
                stdout=sink,
                stderr=sink,
                umask=0o077,
                **AS_THE_USER,
            )
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while " serving " not in log.read_text() and time.monotonic() < deadline:
                assert server.poll() is None, log.read_text()
                time.sleep(0.02)
            path = run / "runnerd.sock"
            with Client(f"unix:{path}", token=(made / "chat.token").read_text()) as client:  # root may connect
                client.generate("hi", max_tokens=1)
            attempt = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
            other = subprocess.run(
                [sys.executable, "-c", attempt],
                **(AS_THE_USER | {"user": USER + 1}),
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert "PermissionError" in other.stderr
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.stat().st_uid == USER
            server.terminate()
            assert server.wait(WAIT_SECONDS) == 0
        finally:
            server.kill()
            server.wait(WAIT_SECONDS)
