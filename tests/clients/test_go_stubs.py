"""The Go stubs are in the repository, as Go modules have it; they must be those of the protos."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

GO = Path(__file__).parents[2] / "clients" / "go"


def versions(folder: Path) -> str:
    header = (folder / "runnerdv1" / "server.pb.go").read_text().partition("// source:")[0]
    return " ".join(re.findall(r"v\d\S+", header))


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    for tool in ("protoc", "protoc-gen-go", "protoc-gen-go-grpc"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here; clients/go/generate.sh has the packages")
    subprocess.run([GO / "generate.sh", tmp_path], check=True, timeout=60)
    if versions(tmp_path) != versions(GO):
        pytest.skip(f"the stubs are made by protoc-gen-go and protoc {versions(GO)}; here is {versions(tmp_path)}")
    made = {path.name: path.read_text() for path in (tmp_path / "runnerdv1").iterdir()}
    kept = {path.name: path.read_text() for path in (GO / "runnerdv1").iterdir()}
    stale = sorted(name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name))
    assert stale == [], "run clients/go/generate.sh"
