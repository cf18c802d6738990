"""Where the time of a step of the native decoder goes, beside what the machine's memory and arithmetic allow.

The runner is driven in this process, one step in flight. The floor of a phase is the larger of two times: its bytes
(weights, keys and values) at the machine's read bandwidth, and its arithmetic at the rate of a large product of
PyTorch's; both rates are measured in the same run. What is not a phase is sampling and the host's part of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import checkpoints
import torch
from common import machine, save, table

from runnerd_spi import Admit, BlockGrant, Release, Row, RunnerConfig, SamplingParams, StepPlan
from runnerd_torch.decoder import NativeDecoder, Quantization
from runnerd_torch.decoder.library import PHASES
from runnerd_torch.plugin import CPU
from runnerd_torch.runner import TorchModelRunner

ROOT = Path(__file__).parent.parent
BLOCK_SIZE = 16
WORKLOADS = {"1 x 192": (1, 192), "16 x 192": (16, 192), "48 x 96": (48, 96)}
"""Rows, and tokens that each has when it decodes."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine can do."""

    bytes_per_second: float
    operations_per_second: float


def best_seconds(work: Callable[[], object], repetitions: int = 7) -> float:
    """Give the shortest time of several."""
    work()
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure_rates(dtype: torch.dtype) -> Rates:
    """Measure reading and multiplying."""
    numbers = torch.ones(1 << 26)
    left, right = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return Rates(numbers.nbytes / best_seconds(numbers.sum), 2 * 2048**3 / best_seconds(lambda: left @ right))


class Decoding:
    """A runner, and the steps of a batch that decodes."""

    def __init__(self, checkpoint: Path, arguments: argparse.Namespace) -> None:
        options = {"num_threads": arguments.threads, "model_impl": "native", "quantization": arguments.quantization}
        config = RunnerConfig(
            model=str(checkpoint),
            dtype=arguments.dtype,
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_in_flight=1,
            block_size=BLOCK_SIZE,
            options=options,
        )
        runner = CPU.create(config)
        assert isinstance(runner, TorchModelRunner)
        self.runner = runner
        runner.load(lambda *_: None)
        runner.profile()
        runner.init_kv_cache(64 * 32)
        runner.warm_up()
        assert runner._loaded is not None
        assert isinstance(runner._loaded.model, NativeDecoder)
        self.decoder = runner._loaded.model
        self.shape = runner._loaded.shape
        self._step_id = self._epoch = 0

    def measure(self, num_rows: int, length: int, steps: int) -> dict[str, Any]:
        """Give medians of the whole step and means of its phases, in ms."""
        self._epoch += 1
        num_blocks = -(-(length + steps + 1) // BLOCK_SIZE)
        prompt = tuple(range(100, 100 + length))
        for slot in range(num_rows):
            blocks = tuple(range(slot * num_blocks, (slot + 1) * num_blocks))
            self._step(
                admits=(Admit(slot, self._epoch, prompt, length, GREEDY),),
                grants=(BlockGrant(slot, self._epoch, blocks),),
                rows=(Row(slot, self._epoch, length, 0, sample=True),),
            )
        self.decoder.phase_ns = torch.zeros(len(PHASES), dtype=torch.int64)
        times = []
        for step in range(steps):
            begin = time.perf_counter()
            self._step(rows=tuple(Row(slot, self._epoch, 1, length + step, sample=True) for slot in range(num_rows)))
            times.append(1e3 * (time.perf_counter() - begin))
        phases = {name: ns / steps / 1e6 for name, ns in zip(PHASES, self.decoder.phase_ns.tolist(), strict=True)}
        self.decoder.phase_ns = None
        self._step(releases=tuple(Release(slot, self._epoch) for slot in range(num_rows)))
        return {"step_ms": statistics.median(times), "phases_ms": phases}

    def floors(self, num_rows: int, length: int, rates: Rates) -> dict[str, float]:
        """Give the least time of each phase, in ms."""
        layer, size = self.shape.layers[0], self.decoder.weight_itemsize
        hidden, inner, count = self.shape.hidden_size, self.shape.intermediate_size, len(self.shape.layers)
        heads, kv_heads = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        weights = {
            "qkv": count * hidden * (heads + 2 * kv_heads),
            "output": count * heads * hidden,
            "gate_up": count * hidden * 2 * inner,
            "down": count * inner * hidden,
            "head": hidden * self.shape.vocab_size,
        }
        floors = {
            name: max(number * size / rates.bytes_per_second, 2 * number * num_rows / rates.operations_per_second)
            for name, number in weights.items()
        }
        read = 2 * count * num_rows * length * kv_heads * self.shape.dtype.itemsize
        floors["attend"] = read / rates.bytes_per_second
        return {name: 1e3 * seconds for name, seconds in floors.items()}

    def _step(self, **parts: Any) -> None:
        self.runner.execute_model(StepPlan(self._step_id, **parts)).result()
        self._step_id += 1


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=checkpoints.NAMES, default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", default="none", choices=get_args(Quantization))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--weights", type=Path, default=ROOT / ".cache" / "benchmark-weights")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    before = machine()
    decoding = Decoding(checkpoints.make(arguments.model, arguments.weights), arguments)
    rates = measure_rates(decoding.shape.dtype)
    results = {}
    rows: list[list[object]] = []
    for name, (num_rows, length) in WORKLOADS.items():
        print(name, file=sys.stderr, flush=True)
        one = decoding.measure(num_rows, length, arguments.steps)
        floors = decoding.floors(num_rows, length + arguments.steps // 2, rates)
        results[name] = one | {"floors_ms": floors}
        other = one["step_ms"] - sum(one["phases_ms"].values())
        for phase, ms in [*one["phases_ms"].items(), ("sampling, host", other)]:
            rows.append([name, phase, f"{ms:.2f}", f"{floors[phase]:.2f}" if phase in floors else ""])
        rows.append([name, "all", f"{one['step_ms']:.2f}", f"{sum(floors.values()):.2f}"])
    chosen = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    gigabytes, teraflops = rates.bytes_per_second / 1e9, rates.operations_per_second / 1e12
    result = {"machine": before, "arguments": chosen, "gigabytes_per_second": gigabytes, "teraflops": teraflops}
    result |= {"workloads": results, "load_average_after": os.getloadavg()}
    print(json.dumps(result, indent=1))
    print(f"reads {gigabytes:.1f} GB/s, multiplies {teraflops:.2f} TFLOP/s\n")
    print(table(["rows x tokens", "phase", "ms", "floor ms"], rows))
    print(f"written to {save('phases', result)}")


if __name__ == "__main__":
    main()
