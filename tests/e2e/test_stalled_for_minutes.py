"""Readers that stall for minutes cost the daemon their answers and no more, and slow nobody."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from runnerd.v1 import inference_pb2_grpc
from runnerd.v1.generation_pb2 import GenerateRequest
from runnerd_client import AsyncClient

NUM_READERS = 64
NUM_TOKENS = 1500
NUM_LOGPROBS = 5
STALL_SECONDS = 120
STEP_SECONDS = 0.02
TOKEN_BYTES = 600
"""A token in a waiting message, with its records, as Python objects: a generous bound."""
FLAT_BYTES = 4 * 2**20
WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.max_frame_size", 16_384)]


def request_of(number: int) -> GenerateRequest:
    request = GenerateRequest(text=f"reader {number}")
    request.sampling.seed = number
    request.stopping.ignore_eos = True
    request.stopping.max_tokens = NUM_TOKENS
    request.output.logprobs = NUM_LOGPROBS
    return request


def resident_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def ids_of(call) -> list[int]:
    ids: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        ids += [token.id for token in message.output.tokens]
    return ids


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_readers_that_stall_for_minutes_cost_their_answers_and_slow_nobody(daemon) -> None:
    server = daemon("--log-level", "warning", "--max-num-seqs", "96", "--runner-option", f"step_seconds={STEP_SECONDS}")
    address = await asyncio.to_thread(server.wait_until_ready)
    async with AsyncClient(address, timeout=600) as client, contextlib.AsyncExitStack() as stack:
        stubs = []
        for _ in range(8):
            channel = grpc.aio.insecure_channel(address, [*WINDOW, ("grpc.use_local_subchannel_pool", 1)])
            stubs.append(inference_pb2_grpc.InferenceServiceStub(await stack.enter_async_context(channel)))
        answers = await asyncio.gather(
            *(stubs[number % 8].Generate(request_of(number), timeout=600) for number in range(NUM_READERS))
        )
        expected = [[token.id for token in answer.outputs[0].tokens] for answer in answers]
        del answers
        pids = {"front": server.process.pid, "engine": (await client.server_info()).engine_pid}
        before = {name: resident_bytes(pid) for name, pid in pids.items()}
        num_generated = (await client.load()).generation_tokens

        readers = [stubs[number % 8].StreamGenerate(request_of(number), timeout=600) for number in range(NUM_READERS)]
        for reader in readers:
            assert (await reader.read()).HasField("started")
        witness = client.stream("witness", max_tokens=8000, ignore_eos=True, tokens=True)
        num_witnessed = 0

        async def follow() -> None:
            nonlocal num_witnessed
            async for message in witness:
                num_witnessed += len(message.output.tokens)

        following = asyncio.create_task(follow())

        def all_is_made(load) -> bool:
            return load.num_running == 1 and load.generation_tokens >= num_generated + NUM_READERS * NUM_TOKENS

        while not all_is_made(await client.load()):  # noqa: ASYNC110 - over the wire
            await asyncio.sleep(0.5)
        made = {name: resident_bytes(pid) for name, pid in pids.items()}
        first, first_witnessed = await client.load(), num_witnessed
        samples: dict[str, list[int]] = {name: [] for name in pids}
        async with asyncio.TaskGroup() as group:
            stall = group.create_task(asyncio.sleep(STALL_SECONDS))
            while not stall.done() and not following.done():
                for name, pid in pids.items():
                    samples[name].append(resident_bytes(pid))
                await asyncio.sleep(1)
        last, last_witnessed = await client.load(), num_witnessed

        answer_bytes = NUM_READERS * NUM_TOKENS * TOKEN_BYTES
        assert made["front"] - before["front"] < answer_bytes
        assert made["engine"] - before["engine"] < FLAT_BYTES
        for name in pids:
            assert max(samples[name]) - made[name] < FLAT_BYTES, (name, made[name], samples[name])
        # It got a token of each step, but for those that are under way and what a step takes to be read.
        num_steps = last.num_steps - first.num_steps
        assert num_steps > 0
        assert abs((last_witnessed - first_witnessed) - num_steps) <= 50

        assert await asyncio.gather(*map(ids_of, readers)) == expected
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        witness.cancel()
        async with asyncio.timeout(60):
            while (load := await client.load()).num_running or load.num_used_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
