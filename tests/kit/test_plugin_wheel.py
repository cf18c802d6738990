"""A plug-in of a project of its own, as its users get it: a wheel, installed beside runnerd, found by name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runnerd_client import Client, InvalidRequestError

PLUGIN = Path(__file__).parents[1] / "plugin"
CORPUS = PLUGIN / "corpus.txt"
WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the plug-in's wheel is installed."""
    project = tmp_path_factory.mktemp("project") / "plugin"
    shutil.copytree(PLUGIN, project)
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(project / "dist"), str(project))
    [wheel] = (project / "dist").glob("bigram_runner-1.0-*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    return {**os.environ, "PYTHONPATH": str(site)}


def run(*command: str, **more: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def runnerd(environment: dict[str, str], *arguments: str) -> str:
    return run(sys.executable, "-m", "runnerd_service", *arguments, env=environment).stdout


@pytest.fixture
def client(environment: dict[str, str], tmp_path: Path) -> Iterator[Client]:
    """A client of a daemon that serves the plug-in."""
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "runnerd_service", "serve", str(CORPUS), "--runner", "bigram", "--port", "0"]
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as daemon:
        try:
            assert daemon.stdout is not None
            ready = re.search(r"127\.0\.0\.1:\d+", daemon.stdout.readline())
            assert ready is not None, (tmp_path / "log").read_text()
            with Client(ready[0], timeout=WAIT_SECONDS) as client:
                yield client
        finally:
            daemon.terminate()
            daemon.wait(WAIT_SECONDS)


def test_the_installed_plugin_is_listed(environment: dict[str, str]) -> None:
    assert "bigram: which byte follows which in a text file (bigram-runner 1.0)" in runnerd(environment, "runners")


def test_the_kit_finds_nothing_wrong_with_it(environment: dict[str, str]) -> None:
    report = runnerd(environment, "check-runner", "bigram", "--model", str(CORPUS), "--traces", "10")
    assert "0 broken" in report
    assert not re.search("^BROKEN", report, re.MULTILINE)


def test_its_project_runs_the_kit_as_tests(environment: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(PLUGIN, tmp_path / "plugin")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert " passed" in run(*command, cwd=tmp_path / "plugin", env=environment).stdout


def test_it_is_served_over_grpc(client: Client) -> None:
    text = client.generate("the c", temperature=0, max_tokens=24, ignore_eos=True).outputs[0].text
    assert re.search(r"[a-z ]{10}", text)
    again = client.generate("the c", seed=7, max_tokens=24, ignore_eos=True).outputs[0].text
    assert client.generate("the c", seed=7, max_tokens=24, ignore_eos=True).outputs[0].text == again


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 3), ("frequency_penalty", 1.0), ("logit_bias", {1: 2.0}), ("logprobs", 2)]
)
def test_what_it_denies_is_refused_by_name(client: Client, field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        client.generate("the c", **{field: value})  # type: ignore[arg-type]
