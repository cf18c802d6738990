"""runnerd through gRPC beside the engines that users would pick instead on a plain CPU, in one run.

Greedy, EOS ignored, random prompts of token ids, the same number of threads. Engines are launched in turns, one at a
time, several times each: launches of one engine differ by a fifth, so a round of all engines is compared with itself
only. Each launch warms up on each workload before it is measured. Figures are medians over the rounds. Engines come
with bfloat16 weights, with 8-bit and with 4-bit ones: the table compares what has weights of the same class, the JSON
all with all. An engine that is not installed is left out and said to be; ``--install`` installs them, a folder each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
from chart import draw
from common import daemon, machine, random_prompts, save, table
from peer_engines import PEERS, Launched, install, launch_peer, python_of
from workloads import WORKLOADS, Measured, measure, median_of, run_runnerd

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration of runnerd."""

    weights: str
    """Class of its weights."""
    serve: tuple[str, ...] = ()
    """Arguments of ``runnerd serve`` beside those that all have."""


VARIANTS = {
    "bf16": Variant("bf16"),
    "int8": Variant("int8", ("--runner-option", "quantization=int8")),
    "int4": Variant("int4", ("--runner-option", "quantization=int4")),
}


@contextlib.contextmanager
def launch_runnerd(variant: Variant, checkpoint: Path, arguments: argparse.Namespace) -> Iterator[Launched]:
    """Run the daemon."""
    serve = [str(checkpoint), "--dtype", "bfloat16", "--runner-option", f"num_threads={arguments.threads}"]
    with daemon(*serve, "--no-prefix-caching", *variant.serve, *arguments.serve_argument) as server:
        yield Launched(
            lambda prompts, output_len: asyncio.run(run_runnerd(server.address, prompts, output_len)),
            server.process.pid,
            "this one",
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can be launched."""

    weights: str
    launch: Callable[[], AbstractContextManager[Launched]]


def find_engines(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Engine]:
    """Give each engine that is there, its form of the weights made."""
    found: dict[str, Engine] = {}
    for name in arguments.runnerd_variants:
        variant = VARIANTS[name]
        found[f"runnerd-{name}"] = Engine(
            variant.weights, lambda variant=variant: launch_runnerd(variant, checkpoint, arguments)
        )
    for name in arguments.engines:
        peer = PEERS[name]
        python = python_of(peer, arguments.peers)
        if python is None:
            print(f"{name} is not installed: left out (--install installs it)", file=sys.stderr, flush=True)
            continue
        if peer.environment == "openvino":
            checkpoints.convert_for_openvino(checkpoint, python, peer.dtype)
        if peer.environment == "llamacpp":
            checkpoints.convert_for_llamacpp(checkpoint, python, peer.dtype)
        found[name] = Engine(
            peer.weights,
            lambda peer=peer, python=python: launch_peer(peer, python, str(checkpoint), peer.dtype, arguments.threads),
        )
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
    engines = find_engines(checkpoint, arguments)
    versions: dict[str, str] = {}
    rounds: list[dict[str, dict[str, Measured]]] = []
    for number in range(arguments.rounds):
        rounds.append({})
        for name, engine in list(engines.items())[:: 1 if number % 2 == 0 else -1]:
            with engine.launch() as launched:
                versions[name] = launched.version
                rounds[-1][name] = measure_launch(launched, arguments, seed=number + 1)
            best = {work: round(speed_of(one), 1) for work, one in rounds[-1][name].items()}
            print(f"{checkpoint.name}, round {number + 1}: {name} {best}", file=sys.stderr, flush=True)
    ours = [name for name in engines if name.startswith("runnerd-")]
    results: dict[str, Any] = {}
    for work in arguments.workloads:
        each = {name: median_of([one[name][work] for one in rounds]) for name in engines}
        ratios = {
            mine: {
                name: statistics.median(speed_of(one[mine][work]) / speed_of(one[name][work]) for one in rounds)
                for name in engines
                if name != mine
            }
            for mine in ours
        }
        results[work] = {"engines": each, "times_as_fast": ratios}
    weights = {name: engine.weights for name, engine in engines.items()}
    return {"versions": versions, "weights": weights, "workloads": results}


def speed_of(one: Measured) -> float:
    """Give a repetition's tokens per second, or prompts per second where one token was asked for."""
    return float(one["output_tokens_per_second"])


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    """Lay the results of a checkpoint out, one row per workload and engine, the fastest first."""
    weights: dict[str, str] = result["weights"]
    rivals = {weights[name]: name for name in weights if name.startswith("runnerd-")}
    rows: list[list[object]] = []
    for work, one in result["workloads"].items():
        fastest = sorted(one["engines"].items(), key=lambda item: -speed_of(item[1]))
        for name, figures in fastest:
            tpot, rival = figures.get("tpot_ms", {}), rivals.get(weights[name])
            row: list[object] = [work, name, weights[name], figures["output_tokens_per_second"]]
            row += [figures["ttft_ms"]["p50"], tpot.get("p50", "-"), figures["peak_mib"]]
            ratio = one["times_as_fast"].get(rival, {}).get(name)
            rows.append([*row, f"{figures['machine_busy_cores']:.2f}", "-" if ratio is None else f"{ratio:.2f}"])
    return rows


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", choices=list(PEERS), default=list(PEERS), help="besides runnerd")
    parser.add_argument(
        "--runnerd-variants",
        nargs="+",
        choices=list(VARIANTS),
        default=["bf16"],
        help="configurations of runnerd that run side by side (default: bf16)",
    )
    parser.add_argument("--models", nargs="+", choices=checkpoints.NAMES, default=["smollm2-135m"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3, help="launches of each engine")
    parser.add_argument("--repetitions", type=int, default=2, help="of each workload in a launch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--install", action="store_true", help="install the peers first (gigabytes)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="folder of their environments")
    parser.add_argument("--weights", type=Path, default=ROOT / ".cache" / "benchmark-weights")
    parser.add_argument("--serve-argument", action="append", default=[], help="further argument of runnerd serve")
    return parser.parse_args()


def main() -> None:
    """Measure and report."""
    arguments = parse()
    if arguments.install:
        install(arguments.peers)
    before = machine()
    results = {name: compare(checkpoints.make(name, arguments.weights), arguments) for name in arguments.models}
    chosen = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    result = {"machine": before, "arguments": chosen, "models": results, "load_average_after": os.getloadavg()}
    print(json.dumps(result, indent=1))
    header = ["workload", "engine", "weights", "output tok/s", "TTFT ms", "TPOT ms", "peak MiB", "busy cores"]
    for name, one in results.items():
        rows = table([*header, "runnerd is x"], rows_of(one))
        print(f"{name}, {arguments.threads} threads, {one['versions']}\n\n{rows}\n")
    written = save("cpu", result)
    print(f"written to {written}")
    try:
        draw(results, written.with_suffix(".png"))
    except ImportError as error:
        print(f"no chart: {error}; pip install 'runnerd[bench]'")
    else:
        print(f"drawn to {written.with_suffix('.png')}")


if __name__ == "__main__":
    main()
