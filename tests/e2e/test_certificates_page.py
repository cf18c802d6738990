"""The lines of docs/security.md that make certificates, and those that serve and connect with them, work as printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
SECTION = PAGE.partition("### Certificates to try it with")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```sh\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


def test_printed_lines_make_certificates_that_serve_and_connect(daemon, tmp_path, monkeypatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    make, serve, connect = BLOCKS
    made = subprocess.run(["sh", "-ec", make], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    strict = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "server.pem", "client.pem"]
    subprocess.run(strict, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True, timeout=60)

    monkeypatch.chdir(tmp_path)
    _, _, *flags = shlex.split(serve)
    address = daemon(*flags).wait_until_ready()

    def told(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runnerd_service", *shlex.split(connect)[1:], *more]
        environment = os.environ | {"RUNNERD_ADDRESS": address}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    done = told()
    assert done.returncode == 0, done.stderr
    assert "sim" in done.stdout
    without = subprocess.run(
        [sys.executable, "-m", "runnerd_service", "info", "--address", address, "--tls-ca", "ca.pem"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert without.returncode != 0
