"""What ``make lint`` holds the API against notices a break, and only a break."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"


@pytest.fixture
def changed(tmp_path: Path):
    """Gives what ``buf breaking`` says of the API with one text in generation.proto replaced by another."""

    def check(old: str, new: str) -> list[str]:
        folder = tmp_path / "protos"
        shutil.copytree(PROTOS, folder, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
        file = folder / "runnerd" / "v1" / "generation.proto"
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        command = [Path(sys.executable).parent / "buf", "breaking", folder, "--against", PROTOS / "baseline.binpb"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.stderr == ""
        assert (done.returncode == 0) == (done.stdout == "")
        return done.stdout.splitlines()

    return check


def test_a_changed_type_is_a_break(changed) -> None:
    (message,) = changed("optional float temperature = 1;", "optional double temperature = 1;")
    assert "temperature" in message


def test_a_removed_field_is_a_break(changed) -> None:
    (message,) = changed("optional uint32 beam_width = 13;", "")
    assert '"13"' in message
    assert "beam_width" in message


def test_a_new_field_is_none(changed) -> None:
    assert changed("optional uint32 beam_width = 13;", "optional uint32 beam_width = 13; bool more = 99;") == []
