"""The first lines that a client's README gives to copy run as they stand, with no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parents[2] / "clients"
PRINTED = "127.0.0.1:50051"
SCRIPT = "Grüße, 世界!"
BUILD_SECONDS = 600
MAVEN = Path("/usr/share/maven-repo/org")
NEEDED = [Path("/usr/bin/mvn")] + [
    MAVEN / one
    for one in (
        "apache/maven/plugins/maven-compiler-plugin",
        "apache/maven/plugins/maven-resources-plugin",
        "apache/maven/plugins/maven-surefire-plugin",
        "codehaus/mojo/exec-maven-plugin",
    )
]

pytestmark = pytest.mark.timeout(1800)


def blocks(language: str) -> list[tuple[str, str]]:
    """Give each block of lines to copy, and the paragraph before it."""
    page = (CLIENTS / language / "README.md").read_text()
    return re.findall(r"^(\S(?:.*\n)+?)\n((?: {4}.*\n)+)", page, re.MULTILINE)


def to_run(language: str) -> list[str]:
    """Give the blocks that are neither for the package manager nor said not to be run."""
    return [
        lines
        for paragraph, lines in blocks(language)
        if "Not run in our CI" not in paragraph and not re.match(" {4}(apt-get|npm ci|pip)", lines)
    ]


def server_flags(language: str) -> list[str]:
    """Give what the page starts its server with."""
    page = (CLIENTS / language / "README.md").read_text()
    return re.search(r"runnerd serve ((?:--[a-z-]+ [\w=.]+\s*)+)", page)[1].split()


def copy_of(language: str, folder: Path) -> Path:
    """Give a copy of the client beside the protos: what is built lies in it, and no other process builds there."""
    project = folder / "clients" / language
    built = shutil.ignore_patterns("node_modules", "dist", "generated", "target", ".gopath", "*_pb2*", "__pycache__")
    shutil.copytree(CLIENTS / language, project, ignore=built)
    shutil.copytree(CLIENTS.parent / "protos", folder / "protos", ignore=built)
    if language == "node":
        (project / "node_modules").symlink_to(CLIENTS / language / "node_modules")
    return project


def run_block(block: str, project: Path, address: str) -> str:
    """Run printed lines with the server's address in the printed one's place; give what they printed."""
    done = subprocess.run(
        ["sh", "-ec", block.replace(PRINTED, address)],
        cwd=project,
        env={name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\x1b\[\d*m", "", done.stdout)  # Maven resets the terminal's colours


def test_printed_lines_run_as_they_stand(native_client, daemons, tmp_path: Path) -> None:
    language = native_client.language
    if language == "java" and not all(path.exists() for path in NEEDED):
        pytest.skip("no Maven of Debian's here; clients/java/README.md says what to install")
    address = daemons.start(*server_flags(language), "--log-level", "warning", "--runner-option", f"script={SCRIPT}")
    project = copy_of(language, tmp_path)
    printed = [run_block(block, project, address) for block in to_run(language)]
    assert len(printed) == {"go": 1, "java": 2, "node": 1}[language]
    for one in printed:
        assert one.endswith(f"{SCRIPT}\n[FINISH_REASON_STOP, {len(SCRIPT.encode()) + 1} tokens]\n")
    # On the page's server the deadline passes, as the example is there to show.
    late = native_client.example("deadline", address)
    assert re.match("the call's deadline: DEADLINE_?EXCEEDED\n", late, re.IGNORECASE)
    assert any(late.partition(":")[0] in one for one in printed)


@pytest.mark.parametrize("language", ["go", "java", "node", "python"])
def test_each_page_s_server_is_slow_enough_for_the_deadline_example(language: str) -> None:
    seconds = next(flag for flag in server_flags(language) if flag.startswith("step_seconds=")).partition("=")[2]
    assert float(seconds) * 1000 > 10 * 0.5  # 1000 tokens, and half a second for them


@pytest.mark.parametrize("native_client", ["node"], indirect=True)
def test_the_node_page_shows_how_a_program_generates(native_client, daemons, tmp_path: Path) -> None:
    program = re.search(r"```ts\n(import .*?)```", (CLIENTS / "node" / "README.md").read_text(), re.DOTALL)[1]
    project = copy_of(native_client.language, tmp_path)
    (project / "examples" / "page.ts").write_text(program.replace("runnerd-client", "../src/index.js"))
    run_block("npm run build", project, "")
    address = daemons.start(*server_flags("node"), "--log-level", "warning", "--runner-option", f"script={SCRIPT}")
    built = (project / "dist" / "examples" / "page.js").read_text()
    (project / "dist" / "examples" / "page.js").write_text(built.replace(PRINTED, address))
    printed = run_block("node dist/examples/page.js", project, address)
    assert re.fullmatch(rf"{re.escape(SCRIPT)}\nrunning: \d\n", printed)


@pytest.mark.parametrize("language", ["go", "java"])
def test_the_packages_that_a_page_names_are_those_that_the_tests_install(language: str) -> None:
    script = (CLIENTS.parent / "tools" / "install_test_packages.sh").read_text()
    installed = set(re.search(r'^packages="([^"]*)"', script, re.MULTILINE)[1].split())
    named = {
        package
        for _, lines in blocks(language)
        for line in lines.splitlines()
        if "apt-get install" in line
        for package in line.partition("--no-install-recommends ")[2].split()
    }
    assert named
    # Debian 12's default Java is 17.
    assert named - {"openjdk-17-jdk-headless"} <= installed
