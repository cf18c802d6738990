"""What overlapping gives: the in-process engine with one step in flight and with more, taking turns in one run.

idle: the simulated device at 3 ms a step, the host busy for 0.8 of that: how long the device waits for the host.
tpot: the host's own cost H beside a device time D chosen so that H is as large a share of a synchronous step as in two
published measurements of an accelerator: time per output token (TPOT), to be D when steps overlap.
cpu: a real model on the CPU. Host and device share its cores, so less than H can be hidden; "2, adapts" is the default.
host: H by phase, on one core. ``execute_model`` is the runner's part, all others are the engine's.

Figures are medians over the repetitions. Requests are greedy, none comes or goes while it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from checkpoints import embedded_model
from common import machine, save, table
from engine_loop import Loop, Run

from runnerd_service.config import EngineConfig

# TPOT in ms, synchronous and overlapped, as published for an asynchronous model runner on Ascend NPUs.
PUBLISHED = {"Qwen3-32B": (44.20, 41.73), "Qwen2.5-VL-7B": (29.16, 23.22)}
IDLE_DEVICE_SECONDS = 3e-3
IDLE_BATCH = 32
IDLE_HOST_SHARE = 0.8
TPOT_BATCH = 48
PHASES = ("drain", "schedule", "execute", "settle", "send")
Measured = dict[str, Any]
Depth = int | str
"""Steps in flight, or a text that begins with them."""


def sim(max_num_seqs: int, step_seconds: float) -> EngineConfig:
    """Give the configuration of a simulated device that takes ``step_seconds`` for a step."""
    options = {"step_seconds": repr(step_seconds), "num_blocks": "65536", "eos_bias": "-30"}
    return EngineConfig("sim", max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, runner_options=options)


def take_turns(
    config: EngineConfig, depths: Sequence[int], repetitions: int, run: Callable[[Loop], Run]
) -> dict[Depth, list[Run]]:
    """Run each depth once per repetition; the first is the warm-up."""
    runs: dict[Depth, list[Run]] = {depth: [] for depth in depths}
    with contextlib.ExitStack() as stack:
        loops: dict[Depth, Loop] = {depth: stack.enter_context(Loop(depth, config)) for depth in depths}
        for repetition in range(-1, repetitions):
            for depth, loop in in_turn(loops, repetition):
                one = run(loop)
                if repetition >= 0:
                    runs[depth].append(one)
    return runs


def in_turn(loops: Mapping[Depth, Loop], repetition: int) -> list[tuple[Depth, Loop]]:
    """Give the loops, backwards every second time: a machine that slows down must not favour those that come first."""
    order = list(loops.items())
    return order if repetition % 2 == 0 else order[::-1]


def median(values: Sequence[float]) -> float:
    """Give the median, rounded to what a reader can use."""
    return round(statistics.median(values), 4)


def quartiles(values: list[float]) -> tuple[float, float]:
    """Give the bounds of the middle half: a difference inside of what it spans is noise."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return round(low, 4), round(high, 4)


def busy_wait(seconds: float) -> Callable[[], None]:
    """Give a function that keeps the calling thread busy for so long, as detokenizing and sending would."""

    def wait() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            time.sleep(0)  # lets the simulated device's thread compute: a busy host does not stop a real device

    return wait


def measure_idle(depths: Sequence[int], steps: int, repetitions: int) -> Measured:
    """Measure how long the device waits for a host that is busy for 0.8 of a step's device time."""
    config = sim(IDLE_BATCH, IDLE_DEVICE_SECONDS)
    target_ns = IDLE_HOST_SHARE * IDLE_DEVICE_SECONDS * 1e9
    with Loop(1, config) as loop:
        walls = [one.wall for one in loop.run(IDLE_BATCH, min(steps, 100)).iterations]
    extra = max(0.0, (target_ns - (statistics.median(walls) - IDLE_DEVICE_SECONDS * 1e9)) / 1e9)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # for the same reason
    runs = take_turns(config, depths, repetitions, lambda loop: loop.run(IDLE_BATCH, steps, busy_wait(extra)))
    sys.setswitchinterval(interval)
    return {
        "device_ms": 1e3 * IDLE_DEVICE_SECONDS,
        "batch": IDLE_BATCH,
        "host_ms_added": round(1e3 * extra, 3),
        "steps": steps * repetitions,
        "depths": {
            str(depth): {
                "tpot_ms": median([run.tpot_ms for run in each]),
                "idle_percent": median([run.idle_share for run in each]),
                "idle_percent_all": round(100 * sum(r.idle_ns for r in each) / sum(r.span_ns for r in each), 3),
                "other_busy_cores": median([run.other_busy_cores for run in each]),
            }
            for depth, each in runs.items()
        },
    }


def compare(runs: Mapping[Depth, list[Run]]) -> Measured:
    """Compare each depth with depth 1, repetition by repetition."""
    sync = runs[1]
    host_ms = [run.tpot_ms - run.device_ms for run in sync]
    result: Measured = {
        "device_ms": median([run.device_ms for run in sync]),
        "host_ms": median(host_ms),
        "host_share_percent": median([100 * h / run.tpot_ms for h, run in zip(host_ms, sync, strict=True)]),
        "depths": {},
    }
    for depth, each in runs.items():
        pairs = list(zip(sync, each, strict=True))
        hidden = [(a.tpot_ms - b.tpot_ms) / h for (a, b), h in zip(pairs, host_ms, strict=True)]
        gains = [100 * (1 - b.tpot_ms / a.tpot_ms) for a, b in pairs]
        result["depths"][str(depth)] = {
            "tpot_ms": median([run.tpot_ms for run in each]),
            "device_ms": median([run.device_ms for run in each]),
            "gain_percent": median(gains),
            "gain_percent_quartiles": quartiles(gains),
            "hidden_percent_of_host": median([100 * one for one in hidden]),
            "idle_percent": median([run.idle_share for run in each]),
            "other_busy_cores": median([run.other_busy_cores for run in each]),
        }
    return result


def measure_tpot(depths: Sequence[int], most_steps: int, repetitions: int, seconds: float) -> Measured:
    """Measure TPOT at device times that give the host its published shares, about ``seconds`` for each."""
    results: Measured = {}
    for name, (sync_ms, async_ms) in PUBLISHED.items():
        share = 1 - async_ms / sync_ms
        device = 10e-3
        for _ in range(2):  # H depends a little on D: the longer the wait, the colder the caches
            with Loop(1, sim(TPOT_BATCH, device)) as loop:
                tried = [loop.run(TPOT_BATCH, min(most_steps, 60)) for _ in range(3)]
            host_ms = statistics.median(one.tpot_ms - one.device_ms for one in tried)
            device = host_ms / 1e3 * (1 - share) / share
        # A busy machine has a high H, thus a long D and fewer steps.
        fitting = seconds / (device / (1 - share) * len(depths) * (repetitions + 1))
        steps = max(10, min(most_steps, int(fitting)))
        runs = take_turns(sim(TPOT_BATCH, device), depths, repetitions, lambda loop, n=steps: loop.run(TPOT_BATCH, n))
        results[name] = {"batch": TPOT_BATCH, "published_host_share_percent": round(100 * share, 2), **compare(runs)}
    return results


def measure_cpu(
    arguments: argparse.Namespace, repetitions: int, warm_up_steps: int, run_seconds: float, seconds: float
) -> Measured:
    """Measure TPOT of a real model; a run takes ``run_seconds`` or so, after ``seconds`` no further one is begun."""
    config = EngineConfig(
        "cpu",
        model=arguments.model or embedded_model(),
        dtype="float32",
        max_num_seqs=max(arguments.cpu_batches),
        max_model_len=1024,
        memory_bytes=1 << 30,
        runner_options={"num_threads": str(arguments.threads)},
    )
    results: Measured = {}
    with contextlib.ExitStack() as stack:
        fixed = replace(config, adaptive_depth=False)
        loops: dict[Depth, Loop] = {
            1: stack.enter_context(Loop(1, fixed)),
            2: stack.enter_context(Loop(2, fixed)),
            "2, adapts": stack.enter_context(Loop(2, config)),
        }
        end = time.perf_counter() + seconds
        for batch in arguments.cpu_batches:
            runs: dict[Depth, list[Run]] = {depth: [] for depth in loops}
            steps = warm_up_steps  # of the first repetition
            for repetition in range(-1, repetitions):
                if time.perf_counter() > end:
                    break
                latest = {depth: loop.run(batch, steps, warm_up_steps=3) for depth, loop in in_turn(loops, repetition)}
                if repetition < 0:
                    steps = max(4, min(400, round(run_seconds * 1e3 / latest[1].tpot_ms)))
                    continue
                for depth, run in latest.items():
                    runs[depth].append(run)
            if runs[1]:
                done = {"steps": steps, "repetitions": len(runs[1]), "threads": arguments.threads}
                results[str(batch)] = done | compare(runs)
            else:
                print(f"cpu, batch {batch}: no time left, the machine is too busy", file=sys.stderr, flush=True)
    return results


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure_host(batches: Sequence[int], steps: int, repetitions: int) -> Measured:
    """Measure the host's cost of a step by phase, in microseconds."""
    results: Measured = {}
    for batch in batches:
        # On one core: the simulated device is a thread that reads the engine's own objects. From another core it would
        # make the engine wait for their cache lines, which no device does that gets its step as a packed copy.
        with one_core():
            runs = take_turns(sim(batch, 0.0), [1], repetitions, lambda loop, n=batch: loop.run(n, steps))[1]
        phases = {name: median([run.phase_us(name) for run in runs]) for name in PHASES}
        engine = sum(value for name, value in phases.items() if name != "execute")
        sums = {
            "engine": engine,
            "all": engine + phases["execute"],
            "all_p10": median([run.host_p10_us for run in runs]),
        }
        results[str(batch)] = {
            "us": phases | sums,
            "other_busy_cores": median([run.other_busy_cores for run in runs]),
        }
    return results


def report(result: Measured) -> str:
    """Lay the results out as Markdown tables."""
    parts = []
    idle = result["idle"]
    keys = ("tpot_ms", "idle_percent", "idle_percent_all", "other_busy_cores")
    rows = [[depth, idle["device_ms"], *(one[key] for key in keys)] for depth, one in idle["depths"].items()]
    header = ["steps in flight", "device ms", "TPOT ms", "idle % (median)", "idle % (all)", "others' cores"]
    title = f"Idle device, host busy for 0.8 of a step, {idle['steps']} steps"
    parts.append(f"{title}:\n\n{table(header, format_rows(rows))}")
    header = ["", "host share %", "steps in flight", "device ms", "TPOT ms"]
    header += ["gain %", "middle half of gains", "of H hidden %", "idle %"]
    for title, key in (("TPOT, simulated device, batch 48", "tpot"), ("TPOT, SmolLM2-135M on the CPU", "cpu")):
        if key in result:
            rows = [row for name, one in result[key].items() for row in comparison_rows(key, name, one)]
            parts.append(f"{title}:\n\n{table(header, format_rows(rows))}")
    if "host" in result:
        names = ["drain", "schedule", "execute_model", "settle", "send", "engine's", "all", "all (p10)"]
        rows = [[batch, *(f"{value:.0f}" for value in one["us"].values())] for batch, one in result["host"].items()]
        parts.append(f"Host cost of a step, us:\n\n{table(['batch', *names], rows)}")
    return "\n\n".join(parts)


def comparison_rows(key: str, name: str, result: Measured) -> list[list[object]]:
    """Give a row for each depth."""
    label = f"batch {name}" if key == "cpu" else name
    rows: list[list[object]] = []
    for depth, one in result["depths"].items():
        sync = depth == "1"
        row: list[object] = [label if sync else "", result["host_share_percent"] if sync else "", depth]
        row += [one["device_ms"], one["tpot_ms"]]
        low, high = one["gain_percent_quartiles"]
        row += [""] * 3 if sync else [one["gain_percent"], f"{low:.2f} to {high:.2f}", one["hidden_percent_of_host"]]
        rows.append([*row, one["idle_percent"]])
    return rows


def format_rows(rows: list[list[object]]) -> list[list[object]]:
    """Give numbers two decimals."""
    return [[f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row] for row in rows]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: below a minute")
    parser.add_argument("--skip-cpu", action="store_true", help="leave the real model out")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3], help="steps in flight; 1 always is")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 48, 256], help="of the host's cost")
    parser.add_argument("--cpu-batches", type=int, nargs="+", help="(default: 1 16 48, quick: 1 16)")
    parser.add_argument("--steps", type=int, help="steps per run on the simulated device (default: 200, quick: 60)")
    parser.add_argument("--repetitions", type=int, help="(default: 10, quick: 3; host: at most 3)")
    parser.add_argument("--model", help="model of the CPU part (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    arguments.cpu_batches = arguments.cpu_batches or ([1, 16] if arguments.quick else [1, 16, 48])
    arguments.depths = sorted({1, *arguments.depths})
    steps = arguments.steps or (60 if arguments.quick else 200)
    repetitions = arguments.repetitions or (3 if arguments.quick else 10)
    begin = time.perf_counter()
    chosen = vars(arguments) | {"steps": steps, "repetitions": repetitions}
    result: Measured = {"machine": machine(), "arguments": chosen}
    result["idle"] = measure_idle(arguments.depths, steps, repetitions)
    print("idle: done", file=sys.stderr, flush=True)
    result["tpot"] = measure_tpot(arguments.depths, steps, repetitions, seconds=6 if arguments.quick else 40)
    print("tpot: done", file=sys.stderr, flush=True)
    result["host"] = measure_host(arguments.batches, steps, min(3, repetitions))
    if not arguments.skip_cpu:
        result["cpu"] = measure_cpu(arguments, repetitions, *((3, 0.5, 15) if arguments.quick else (40, 3.0, 480)))
    result["seconds"] = round(time.perf_counter() - begin, 1)
    result["load_average_after"] = os.getloadavg()
    print(json.dumps(result, indent=1))
    print(report(result))
    print(f"written to {save('overlap', result)}")


if __name__ == "__main__":
    main()
