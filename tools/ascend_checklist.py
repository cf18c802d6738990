"""Checks the Ascend runner on a real NPU: what no simulation can show. Run it, and send the report back.

    source /usr/local/Ascend/ascend-toolkit/set_env.sh
    python tools/ascend_checklist.py --report ascend-report.json [--model PATH]

Each check prints one line. A check that fails does not stop the others; the exit code is 1 when one did. Without a
model it makes small ones with random weights; with one, figures and rates are those of that model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runnerd_spi import (
    Admit,
    BlockGrant,
    ModelInfo,
    ModelRunner,
    OptionValue,
    Release,
    Row,
    RowOutput,
    RunnerConfig,
    RunnerPlugin,
    SamplingParams,
    StepPlan,
    parse_options,
)
from runnerd_torch.ascend.plugin import ASCEND
from runnerd_torch.plugin import CPU

MAX_MODEL_LEN = 512
NUM_BLOCKS = 32
BLOCK_SIZE = 128


@dataclass
class Check:
    """What one check gave."""

    name: str
    ok: bool = False
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All of a run."""

    environment: dict[str, str]
    checks: list[Check] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Do one check; what it gives or raises becomes a line."""
        begin = time.monotonic()
        try:
            result = Check(name, True, check())
        except Exception as error:  # noqa: BLE001 - the report says what went wrong
            lines = str(error).strip().splitlines() or [""]
            result = Check(name, False, f"{type(error).__name__}: {lines[0]}")
        result.seconds = round(time.monotonic() - begin, 3)
        self.checks.append(result)
        print(f"{'ok  ' if result.ok else 'FAIL'} {name}: {result.detail} ({result.seconds} s)", flush=True)


def environment() -> dict[str, str]:
    """Give versions and variables that matter."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("runnerd", "torch", "torch-npu", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    for name in sorted(os.environ):
        if name.startswith(("ASCEND_", "HCCL_", "PYTORCH_NPU_", "TASK_QUEUE_")):
            found[name] = os.environ[name]
    try:
        finished = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=60, check=False)
        found["npu-smi"] = finished.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        found["npu-smi"] = str(error)
    return found


class Machine:
    """A warmed-up runner and the blocks and slots that its requests use."""

    def __init__(self, runner: ModelRunner, info: ModelInfo, block_size: int) -> None:
        self._runner = runner
        self._blocks_per_slot = NUM_BLOCKS * BLOCK_SIZE // block_size // 8
        self._step_id = 0
        self._epoch = 0
        self.info = info

    def _run(
        self, prompts: list[list[int]], num_tokens: int, chunk: int, sampling: SamplingParams
    ) -> list[list[RowOutput]]:
        self._epoch += 1
        admits = tuple(Admit(i, self._epoch, tuple(one), len(one), sampling) for i, one in enumerate(prompts))
        blocks = self._blocks_per_slot
        grants = tuple(
            BlockGrant(i, self._epoch, tuple(range(i * blocks, (i + 1) * blocks))) for i in range(len(prompts))
        )
        computed, lengths = [0] * len(prompts), [len(one) for one in prompts]
        handles = []
        while any(lengths[i] < len(one) + num_tokens for i, one in enumerate(prompts)):
            rows = []
            for i, one in enumerate(prompts):
                count = min(chunk, lengths[i] - computed[i])
                if lengths[i] >= len(one) + num_tokens:
                    continue
                sample = computed[i] + count == lengths[i]
                rows.append(Row(i, self._epoch, count, computed[i], sample))
                computed[i] += count
                lengths[i] += sample
            plan = StepPlan(self._step_id, admits=admits, grants=grants, rows=tuple(rows))
            handles.append((self._runner.execute_model(plan), rows))
            self._step_id, admits, grants = self._step_id + 1, (), ()
        releases = tuple(Release(i, self._epoch) for i in range(len(prompts)))
        self._runner.execute_model(StepPlan(self._step_id, releases=releases))
        self._step_id += 1
        outputs: list[list[RowOutput]] = [[] for _ in prompts]
        for handle, rows in handles:
            for row, output in zip(rows, handle.result(600).rows, strict=True):
                if output.failure is not None:
                    raise RuntimeError(output.failure)
                outputs[row.slot].append(output)
        return outputs

    def generate(
        self, prompts: list[list[int]], num_tokens: int, chunk: int, sampling: SamplingParams
    ) -> list[list[int]]:
        """Give ``num_tokens`` tokens of each prompt, their prompts computed ``chunk`` tokens at a time."""
        return [
            [output.token_id for output in outputs if output.token_id is not None]
            for outputs in self._run(prompts, num_tokens, chunk, sampling)
        ]

    def prompt_logprobs(self, prompts: list[list[int]], chunk: int) -> list[float]:
        """Give the log-probability of each prompt token but the first of each prompt."""
        sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
        return [
            record.logprob
            for outputs in self._run(prompts, 1, chunk, sampling)
            for output in outputs
            for record in output.prompt_logprobs
        ]


@contextmanager
def machine(
    plugin: RunnerPlugin,
    model: Path,
    dtype: str,
    options: Mapping[str, OptionValue],
    *,
    depth: int = 2,
    eager: bool = False,
    block_size: int = BLOCK_SIZE,
) -> Iterator[Machine]:
    """Open a runner."""
    config = RunnerConfig(
        model=str(model),
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        block_size=block_size,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=depth,
        enforce_eager=eager,
        options=options,
    )
    runner = plugin.create(config)
    try:
        info = runner.load(lambda stage, done, total: None)
        runner.profile()
        runner.init_kv_cache(NUM_BLOCKS * BLOCK_SIZE // block_size)
        runner.warm_up()
        yield Machine(runner, info, block_size)
    finally:
        runner.close()


def make_model(folder: Path, family: str, head_dim: int) -> Path:
    """Write a small model with random weights."""
    import torch
    import transformers

    path = folder / f"{family}{head_dim}"
    config = getattr(transformers, family)(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        initializer_range=0.1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def prompts_of(lengths: list[int], vocab_size: int) -> list[list[int]]:
    """Give random prompts, the same each time."""
    dice = random.Random(7)
    return [[dice.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def mean_error(values: list[float], reference: list[float]) -> float:
    """Give the mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(values, reference, strict=True)) / len(reference)


def check_installation() -> str:
    """Look for packages, libraries and variables."""
    ASCEND.check()
    return "complete"


def check_numerics(model: Path, dtype: str, options: Mapping[str, OptionValue]) -> str:
    """Compare log-probabilities with the CPU's in float32; the CPU in the same dtype shows what rounding does."""
    results: list[list[float]] = []
    ways: tuple[tuple[RunnerPlugin, str, Mapping[str, OptionValue]], ...] = (
        (CPU, "float32", {}),
        (CPU, dtype, {}),
        (ASCEND, dtype, options),
    )
    for plugin, one_dtype, one_options in ways:
        with machine(plugin, model, one_dtype, one_options) as one:
            prompts = prompts_of([5, 64, 130, 200], one.info.vocab_size)
            results.append(one.prompt_logprobs(prompts, 64))
    reference, cpu, npu = results
    text = (
        f"mean error of log-probabilities {mean_error(npu, reference):.4f}, of the CPU {mean_error(cpu, reference):.4f}"
    )
    if mean_error(npu, reference) > 2 * mean_error(cpu, reference) + 1e-3:
        raise AssertionError(text)
    return text


def check_equal(model: Path, dtype: str, options: dict[str, OptionValue]) -> str:
    """Compare depths, modes and block sizes on the NPU with each other: these must be equal."""
    ways = {
        "depth 1, eager": (1, True, 128),
        "depth 2, eager": (2, True, 128),
        "depth 1, graphs": (1, False, 128),
        "depth 4, graphs": (4, False, 128),
        "depth 2, eager, blocks of 512": (2, True, 512),
    }
    results = {}
    for name, (depth, eager, block_size) in ways.items():
        with machine(ASCEND, model, dtype, options, depth=depth, eager=eager, block_size=block_size) as npu:
            prompts = prompts_of([3, 40, 129], npu.info.vocab_size)
            results[name] = npu.generate(prompts, 24, 1024, SamplingParams(temperature=0.8, seed=11, top_p=0.9))
    first = next(iter(results.values()))
    for name, tokens in results.items():
        if tokens != first:
            raise AssertionError(f"{name} differs from {next(iter(results))}: {tokens} instead of {first}")
    return f"{len(results)} ways give the same tokens"


def measure(model: Path, dtype: str, options: dict[str, OptionValue]) -> str:
    """Measure decode rates; a report, not a test."""
    parts = []
    for name, depth, eager in (("eager, synchronous", 1, True), ("eager, overlapped", 2, True), ("graphs", 2, False)):
        with machine(ASCEND, model, dtype, options, depth=depth, eager=eager) as npu:
            prompts = prompts_of([32] * 8, npu.info.vocab_size)
            npu.generate(prompts, 8, 1024, SamplingParams(temperature=0.0))
            begin = time.monotonic()
            npu.generate(prompts, 64, 1024, SamplingParams(temperature=0.0))
            parts.append(f"{name}: {8 * 64 / (time.monotonic() - begin):.0f} tokens/s")
    return "; ".join(parts)


def main() -> int:
    """Run all checks; give 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory; small random models are made without one")
    parser.add_argument("--dtype", action="append", help="bfloat16 (default) or float16; may be repeated")
    parser.add_argument("--report", type=Path, default=Path("ascend-report.json"), help="where the report goes")
    parser.add_argument("--runner-option", action="append", default=[], metavar="NAME=VALUE", help="as for serve")
    arguments = parser.parse_args()
    options = parse_options(ASCEND, dict(one.split("=", 1) for one in arguments.runner_option))
    report = Report(environment())
    report.run("installation", check_installation)
    with tempfile.TemporaryDirectory() as folder:
        models = {"model": arguments.model} if arguments.model else {}
        if not models:
            for family in ("LlamaConfig", "Qwen2Config", "Qwen3Config"):
                for head_dim in (64, 128):
                    models[f"{family} with heads of {head_dim}"] = make_model(Path(folder), family, head_dim)
        for dtype in arguments.dtype or ["bfloat16"]:
            for name, path in models.items():
                report.run(
                    f"log-probabilities as on the CPU: {name}, {dtype}", partial(check_numerics, path, dtype, options)
                )
            path = next(iter(models.values()))
            report.run(
                f"tokens do not depend on depth, graphs and block size, {dtype}",
                partial(check_equal, path, dtype, options),
            )
            report.run(f"decode rates, {dtype}", partial(measure, path, dtype, options))
    arguments.report.write_text(json.dumps(asdict(report), indent=2))
    print(f"the report is in {arguments.report}")
    return 0 if all(check.ok for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
