"""What the tests of the simulated CANN run: plain torch_npu, in processes of their own.

Those that leave out a wait are the controls: they must give wrong data, or the right ones prove nothing.
"""

from __future__ import annotations

import ctypes
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 - makes the device known

from device_programs import closed_gate

SIZE = 1 << 16


def pinned(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value).pin_memory()


def add_on_device() -> list[float]:
    values: list[float] = (torch.ones(3, device="npu") + 1).tolist()
    return values


def read_result(*, waits: bool) -> bool:
    """Compute, copy to the host; tell whether what is read there is the result."""
    found = pinned(-1.0)
    done = torch.npu.Event()
    with closed_gate() as gate:
        found.copy_(torch.ones(SIZE, device="npu") + 1, non_blocking=True)
        done.record()
        if waits:
            gate.set()
            done.synchronize()
        return bool((found == 2).all())


def read_on_another_stream(*, waits: bool) -> bool:
    """Compute on one stream and copy on another; tell whether the copy has the result."""
    side = torch.npu.Stream()
    values = torch.zeros(SIZE, device="npu")
    torch.npu.synchronize()
    found = pinned(-1.0)
    with closed_gate() as gate:
        values += 1
        computed = torch.npu.Event()
        computed.record()
        with torch.npu.stream(side):
            if waits:
                side.wait_event(computed)
                gate.set()
            found.copy_(values, non_blocking=True)
        side.synchronize()
    return bool((found == 1).all())


def send_twice(num_buffers: int) -> bool:
    """Send two values, the second before the first has left; tell whether both arrive."""
    buffers = [pinned(0.0) for _ in range(num_buffers)]
    arrived = [torch.empty(SIZE, device="npu") for _ in range(2)]
    with closed_gate():
        for step, target in enumerate(arrived):
            buffer = buffers[step % num_buffers]
            buffer.fill_(step + 1)
            target.copy_(buffer, non_blocking=True)
    return all(bool((target.cpu() == step + 1).all()) for step, target in enumerate(arrived))


def free_while_read(*, recorded: bool) -> bool:
    """Free memory that another stream's copy still reads, and use it again; tell whether the copy is right."""
    side = torch.npu.Stream()
    torch.npu.synchronize()
    torch.npu.empty_cache()  # the memory that is freed is then the only one of its size
    values = torch.full((SIZE,), 7.0).to("npu")
    torch.npu.synchronize()
    found = pinned(-1.0)
    with torch.npu.stream(side), closed_gate():
        found.copy_(values, non_blocking=True)
        if recorded:
            values.record_stream(side)
        del values
        main = torch.npu.default_stream()
        with torch.npu.stream(main):
            other = torch.empty(SIZE, device="npu").fill_(9.0)
            main.synchronize()
    assert bool((other.cpu() == 9).all())
    return bool((found == 7).all())


def describe_devices() -> dict[str, Any]:
    count = torch.npu.device_count()
    free, total = torch.npu.mem_get_info(count - 1)
    return {"count": count, "name": torch.npu.get_device_name(0), "total": total, "free": free}


def allocate(num_bytes: int) -> None:
    torch.empty(num_bytes, dtype=torch.uint8, device="npu")


def use_device(index: int) -> None:
    torch.ones(1, device=f"npu:{index}")


def fresh_memory() -> list[int]:
    # More than the caching allocator keeps.
    values: list[int] = torch.empty(64 << 20, dtype=torch.uint8, device="npu")[:4].tolist()
    return values


def waits_of_a_step() -> dict[str, int]:
    """Give how often the host waited during launches alone, then during one ``item()`` and one synchronization."""
    count = ctypes.CDLL("libascendcl.so").ascend_sim_count
    count.restype = ctypes.c_long
    names = ("synchronize_stream", "synchronize_device", "synchronize_event", "blocking_copy")

    def counted() -> int:
        return sum(count(name.encode()) for name in names)

    values = torch.ones(8, device="npu")
    torch.npu.synchronize()
    marks = [counted()]
    values = values + 1
    marks.append(counted())
    values.sum().item()
    marks.append(counted())
    torch.npu.synchronize()
    marks.append(counted())
    launch, item, synchronize = (after - before for before, after in pairwise(marks))
    return {"launch": launch, "item": item, "synchronize": synchronize}


def fail_then_read() -> None:
    values = torch.ones(3, device="npu")
    values = values + 1
    values = values + 1  # the call that is to fail
    values.tolist()


def fail_then_wait_for_event() -> None:
    values = torch.ones(3, device="npu") + 1
    (values + 1).mul_(2)
    done = torch.npu.Event()
    done.record()
    done.synchronize()


def elapsed_ms() -> float:
    begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    values = torch.ones(3, device="npu")
    torch.npu.synchronize()
    begin.record()
    for _ in range(10):
        values += 1
    end.record()
    torch.npu.synchronize()
    return float(begin.elapsed_time(end))


def log_of_a_sum(path: str) -> list[str]:
    torch.ones(2, 3, device="npu", dtype=torch.bfloat16).add_(1)
    torch.npu.synchronize()
    return Path(path).read_text().splitlines()


def exit_with_work_queued() -> None:
    """Leave the process while its stream is far behind; the wheel's exit hook waits with Python's lock held."""
    values = torch.ones(3, device="npu")
    for _ in range(50):
        values += 1


def replay() -> list[list[float]]:
    """Capture a product of static inputs; give it for three others."""
    weight = torch.arange(4.0).reshape(2, 2).to("npu")
    inputs = torch.zeros(1, 2, device="npu")
    torch.mm(inputs, weight)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        product = torch.mm(inputs, weight) + 1
    found = []
    for step in range(3):
        inputs.copy_(torch.full((1, 2), float(step)).pin_memory(), non_blocking=True)
        graph.replay()
        found.extend(product.tolist())
    return found


def attention_arguments(lengths: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    num_heads, head_dim, block_size = 2, 16, 128
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(len(lengths), num_heads, head_dim, generator=generator, dtype=torch.float16)
    cache = torch.randn(4, block_size, num_heads * head_dim, generator=generator, dtype=torch.float16)
    return (query.npu(), cache.npu(), cache.npu()), {
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu_(1).npu(),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).npu(),
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": lengths,
        "num_heads": num_heads,
        "num_key_value_heads": num_heads,
        "input_layout": "TND",
        "block_size": block_size,
        "sparse_mode": 3,
        "scale": 0.25,
    }


def replay_with_lengths(captured: list[int], updated: list[int]) -> bool:
    """Capture attention at some lengths, replay it at others; tell whether it equals the eager call at those."""
    attention = torch.ops.npu.npu_fused_infer_attention_score
    arguments, options = attention_arguments(captured)
    expected = attention(*arguments, **(options | {"actual_seq_lengths_kv": updated}))[0].cpu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        output, _ = attention(*arguments, **options)
    graph.replay()
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": updated}])
    return torch.equal(output.cpu(), expected)


def capture_with_wait() -> None:
    graph = torch.npu.NPUGraph()
    values = torch.ones(2, device="npu")
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        (values + 1).tolist()


def collectives(rank: int, num_ranks: int, file: str) -> dict[str, list[float]]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    try:
        device = torch.device("npu", rank)
        summed = torch.full((4,), rank + 1.0).to(device)
        dist.all_reduce(summed)
        highest = torch.tensor([rank, 5 - rank]).to(device)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        gathered = torch.empty(2 * num_ranks, dtype=torch.bfloat16, device=device)
        dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), dtype=torch.bfloat16).to(device))
        told = torch.full((3,), rank + 5).to(device)
        dist.broadcast(told, 0)
        scattered = torch.empty(1, device=device)
        dist.reduce_scatter_tensor(scattered, torch.arange(float(num_ranks)).to(device))
        dist.barrier()
        results = {"sum": summed, "max": highest, "gather": gathered, "broadcast": told, "scatter": scattered}
        return {name: value.tolist() for name, value in results.items()}
    finally:
        dist.destroy_process_group()
