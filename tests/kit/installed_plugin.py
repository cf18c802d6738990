"""A plug-in of a project of its own, as its users get it: a wheel, installed beside runnerd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runnerd_client import Client

WAIT_SECONDS = 240


def install(project: Path, folder: Path) -> dict[str, str]:
    """Build the project's wheel, install it into ``folder``, and give an environment in which it is found."""
    source, site = folder / "project", folder / "site"
    shutil.copytree(project, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(source))
    [wheel] = (folder / "dist").glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    return {**os.environ, "PYTHONPATH": str(site)}


def run(*command: str, **more: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def runnerd(environment: dict[str, str], *arguments: str) -> str:
    return run(sys.executable, "-m", "runnerd_service", *arguments, env=environment).stdout


def run_its_tests(project: Path, folder: Path, environment: dict[str, str]) -> str:
    """Run a project's own tests where only its wheel is to be found, and give what they print."""
    shutil.copytree(project, folder / "project")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    return run(*command, cwd=folder / "project", env=environment).stdout


@contextmanager
def served(environment: dict[str, str], folder: Path, *arguments: str) -> Iterator[Client]:
    """Give a client of a daemon with these arguments."""
    log = (folder / "log").open("w")
    command = [sys.executable, "-m", "runnerd_service", "serve", *arguments, "--port", "0"]
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as daemon:
        try:
            assert daemon.stdout is not None
            ready = re.search(r"127\.0\.0\.1:\d+", daemon.stdout.readline())
            assert ready is not None, (folder / "log").read_text()
            with Client(ready[0], timeout=WAIT_SECONDS) as client:
                yield client
        finally:
            daemon.terminate()
            daemon.wait(WAIT_SECONDS)
