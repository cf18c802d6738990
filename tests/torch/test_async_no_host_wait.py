"""Nothing in a decode step of the torch runner makes the host wait for the device: the whole step is watched.

On the CPU the work of a step runs on the stream's thread, where reading a tensor costs nothing; on an accelerator the
same code runs on the host's thread and each such read stops it. So the step's work is watched for every operation that
reads a value that the device computed, or whose shape depends on one. What the host itself sent (the step's arrays) and
what follows from that alone it may read: a kernel for an accelerator takes it from the host's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runnerd_spi import Admit, BlockGrant, Row, RunnerConfig, SamplingParams, StepPlan
from runnerd_torch.attention import build_attention
from runnerd_torch.devices.base import Array, Launch, T
from runnerd_torch.devices.cpu import CpuDevice
from runnerd_torch.linear import build_linear
from runnerd_torch.loading import ModelImpl
from runnerd_torch.runner import TorchModelRunner

WAITING_OPERATIONS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "argwhere",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "multinomial",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
WAITING_METHODS = {
    "__array__",
    "__bool__",
    "__contains__",
    "__float__",
    "__index__",
    "__int__",
    "__iter__",
    "cpu",
    "item",
    "numpy",
    "tolist",
}


class HostValues:
    """Which tensors of a step hold what the host sent, or what follows from that alone (the longest of the rows)."""

    def __init__(self) -> None:
        # By address of the memory; the tensors are kept, so that no address is used again.
        self._kept: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._kept[address(tensor)] = tensor

    def follow(self, args: object, result: object) -> None:
        """Note that ``result`` was computed of ``args``."""
        known = self.hold(args)
        for tensor in tensors_in(result):
            if known:
                self.add(tensor)
            else:
                self._kept.pop(address(tensor), None)

    def hold(self, args: object) -> bool:
        """Whether no tensor among ``args`` has a value that only the device knows."""
        return all(address(one) in self._kept for one in tensors_in(args))


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def is_masked(name: str, args: tuple[Any, ...]) -> bool:
    indices = [one for arg in args if isinstance(arg, list | tuple) for one in arg]
    return name.startswith(("index", "_index")) and any(
        isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices
    )


class OperationWatch(TorchDispatchMode):
    """Notes operations that read device values on the host, or whose shape depends on them."""

    def __init__(self, host_values: HostValues, found: list[str]) -> None:
        super().__init__()
        self._host_values, self._found = host_values, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        waits = name in WAITING_OPERATIONS or is_masked(name, args)
        if waits and not self._host_values.hold((args, kwargs)):
            self._found.append(name)
        result = func(*args, **(kwargs or {}))
        # torch.tensor lifts what it makes of Python numbers.
        self._host_values.follow(() if name == "lift_fresh" else (args, kwargs), result)
        return result


class MethodWatch(TorchFunctionMode):
    """Notes methods that give Python or numpy values; on a CPU tensor some of them are no operation."""

    def __init__(self, host_values: HostValues, found: list[str]) -> None:
        super().__init__()
        self._host_values, self._found = host_values, found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in WAITING_METHODS and not self._host_values.hold(args[:1]):
            self._found.append(name)
        return func(*args, **(kwargs or {}))


class WatchedDevice:
    """The CPU, with the work of each step watched; ``found`` gets what it did that would make the host wait."""

    def __init__(self) -> None:
        self._cpu = CpuDevice(1)
        self.preferred_dtype, self.memory, self.zeros = self._cpu.preferred_dtype, self._cpu.memory, self._cpu.zeros
        self.synchronize, self.close, self.to_host = self._cpu.synchronize, self._cpu.close, self._cpu.to_host
        self.peak_bytes = self._cpu.peak_bytes
        self.found: list[str] = []
        self.num_steps = 0
        self._host_values = HostValues()

    @property
    def torch_device(self) -> torch.device:
        return self._cpu.torch_device

    @property
    def description(self) -> str:
        return "cpu, watched"

    def submit(self, work: Callable[[], T]) -> Launch[T]:
        def watched() -> T:
            self._host_values = HostValues()
            with MethodWatch(self._host_values, self.found), OperationWatch(self._host_values, self.found):
                value = work()
            self.num_steps += 1
            return value

        return self._cpu.submit(watched)

    def to_device(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        tensors = self._cpu.to_device(arrays)
        for tensor in tensors:
            self._host_values.add(tensor)
        return tensors


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=0.8, top_k=5),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.1),
    "bans": SamplingParams(temperature=0.0, bad_words_token_ids=((4,), (1, 2, 3)), min_tokens=9, stop_token_ids=(0, 1)),
    "choices": SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(100)), logit_bias={3: 1.0}),
    "logprobs": SamplingParams(temperature=0.0, num_logprobs=4, num_prompt_logprobs=2),
}


@pytest.fixture(scope="module")
def model(make_checkpoint) -> Path:
    return make_checkpoint("LlamaConfig")


@pytest.fixture(params=["transformers", "fused"])
def model_impl(request: pytest.FixtureRequest) -> ModelImpl:
    return request.param


def open_runner(model: Path, model_impl: ModelImpl, device: WatchedDevice) -> TorchModelRunner:
    config = RunnerConfig(8, 64, 4, model=str(model), dtype="float32", max_model_len=64, max_in_flight=2)
    attention, linear = partial(build_attention, "torch"), partial(build_linear, "torch")
    runner = TorchModelRunner(config, device, attention, linear, 5, model_impl)
    runner.load(lambda stage, done, total: None)
    runner.profile()
    runner.init_kv_cache(64)
    runner.warm_up()
    return runner


def plans(samplings: list[SamplingParams], num_decodes: int) -> Iterator[StepPlan]:
    """A prefill of all, then decodes of all."""
    slots = range(len(samplings))
    yield StepPlan(
        0,
        admits=tuple(Admit(slot, 1, (3, 4, 5), 3, samplings[slot]) for slot in slots),
        grants=tuple(BlockGrant(slot, 1, tuple(range(4 * slot, 4 * slot + 4))) for slot in slots),
        rows=tuple(Row(slot, 1, 3, 0, True) for slot in slots),
    )
    for step in range(num_decodes):
        yield StepPlan(1 + step, rows=tuple(Row(slot, 1, 1, 3 + step, True) for slot in slots))


@pytest.mark.parametrize("name", [*SAMPLINGS, "all of them"])
def test_no_operation_of_a_decode_step_waits_for_the_device(model: Path, model_impl: ModelImpl, name: str) -> None:
    samplings = list(SAMPLINGS.values()) if name == "all of them" else [SAMPLINGS[name]] * 3
    device = WatchedDevice()
    runner = open_runner(model, model_impl, device)
    try:
        prefill, *decodes = plans(samplings, 6)
        runner.execute_model(prefill).result(60)
        device.found.clear()
        num_steps = device.num_steps
        handles = [runner.execute_model(plan) for plan in decodes]
        outputs = [handle.result(60) for handle in handles]
    finally:
        runner.close()
    assert device.num_steps - num_steps == 6
    assert all(row.token_id is not None for output in outputs for row in output.rows)
    assert device.found == []


def test_a_prefill_does_not_wait_for_the_device_either(model: Path, model_impl: ModelImpl) -> None:
    device = WatchedDevice()
    runner = open_runner(model, model_impl, device)
    try:
        device.found.clear()
        prefill = next(plans(list(SAMPLINGS.values()), 0))
        runner.execute_model(prefill).result(60)
    finally:
        runner.close()
    assert device.found == []


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "bool": lambda computed: bool(computed.sum() > 3),
    "item": lambda computed: computed.sum().item(),
    "tolist": lambda computed: computed.tolist(),
    "cpu": lambda computed: computed.cpu(),
    "numpy": lambda computed: computed.numpy(),
    "nonzero": lambda computed: computed.nonzero(),
    "mask": lambda computed: computed[computed > 1],
    "masked_select": lambda computed: computed.masked_select(computed > 1),
    "equal": lambda computed: torch.equal(computed, computed),
    "int": lambda computed: int(computed.sum()),
    "slice": lambda computed: computed[: computed.sum()],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_the_watch_notices_each_way_to_wait(read: Callable[[torch.Tensor], object]) -> None:
    device = WatchedDevice()
    weights = torch.tensor([1, 2, 3])
    device.submit(lambda: read(device.to_device([np.arange(3)])[0] * weights)).wait()
    assert device.found
    sent_only = WatchedDevice()
    sent_only.submit(lambda: read(sent_only.to_device([np.arange(3)])[0] + 0)).wait()
    assert sent_only.found == []
    assert device.close(10)
    assert sent_only.close(10)
