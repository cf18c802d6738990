"""The Python client as a distribution of its own: its wheel, and its example programs, which run on that wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

REPOSITORY = Path(__file__).parents[2]
PROJECT = REPOSITORY / "clients" / "python"
WAIT_SECONDS = 120


def run(*command: str, **more: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(PROJECT))
    [wheel] = folder.glob("runnerd_client-*.whl")
    with ZipFile(wheel) as content:  # all of its files are Python: that is what installing it does
        content.extractall(site)
    return site


@pytest.fixture
def example(site: Path) -> Callable[..., str]:
    """Runs an example on the wheel; gives what it printed."""

    def run_example(name: str, *arguments: str, stdin: str = "") -> str:
        path = str(PROJECT / "examples" / f"{name}.py")
        return run(sys.executable, path, *arguments, input=stdin, env={**os.environ, "PYTHONPATH": str(site)})

    return run_example


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that answers what it is told to, 2 ms a token."""
    options = ["--runner-option", "script=one two three", "--runner-option", "step_seconds=0.002"]
    command = [sys.executable, "-m", "runnerd_service", "serve", "--runner", "sim", "--port", "0", *options]
    with (
        (tmp_path_factory.mktemp("daemon") / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"serving \S+ on (\S+)", line)))
        finally:
            process.kill()


def test_the_wheel_stands_on_grpc_and_protobuf_alone(site: Path) -> None:
    installed = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert installed == {"runnerd", "runnerd_client"}
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
import runnerd_client, runnerd.v1.server_pb2
print(runnerd_client.__file__, *sorted(name for name in sys.modules if "." not in name))
"""
    where, *modules = run(sys.executable, "-I", "-c", program).split()
    assert where.startswith(str(site))
    assert {"grpc", "google"} <= set(modules)
    assert not {"numpy", "torch", "msgspec", "zmq", "runnerd_service", "runnerd_spi"} & set(modules)


def test_its_version_is_that_of_the_service() -> None:
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (REPOSITORY, PROJECT)]
    assert projects[0]["version"] == projects[1]["version"]


def test_each_example_does_what_it_says(example, daemon: str) -> None:
    stream = example("stream", daemon, "Why?")
    assert re.fullmatch(r"request \S+: 4 prompt tokens\none two three\nFINISH_REASON_STOP, 14 tokens\n", stream)
    assert example("chat", daemon, stdin="Hello!\nAnd?\n") == "one two three\none two three\n"
    assert re.fullmatch(r"first piece: '.+'\nthe server has nothing to do\n", example("cancel", daemon))
    deadline = example("deadline", daemon, "0.5")
    assert re.fullmatch(r"DEADLINE_EXCEEDED: not done in 0.5 s\n\d+ tokens in 0.5 s\n", deadline)
    errors = example("errors", daemon).splitlines()
    assert [line.split(":")[0] for line in errors] == ["sampling.temperature", "sampling.top_p", "MODEL_NOT_FOUND"]
    assert example("many", daemon, "20") == "640 tokens in 20 streams\n"


@pytest.mark.parametrize("path", sorted((PROJECT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_without_its_arguments_says_how_it_is_used(site: Path, path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"usage: python {path.name} ADDRESS( [A-Z]+)?\n", done.stderr)


def test_each_example_is_run_here(example) -> None:
    names = {path.stem for path in (PROJECT / "examples").glob("*.py")}
    assert names == set(re.findall(r'example\("(\w+)"', Path(__file__).read_text()))
