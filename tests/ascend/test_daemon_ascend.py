"""The whole server on an NPU: what clients read over gRPC is what the same server gives them on the CPU."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from daemons import WAIT_SECONDS, Daemon, make_served_model, serving
from driving import prompts_of
from runnerd.v1 import generation_pb2 as pb
from runnerd_client import Client, InvalidRequestError

pytestmark = pytest.mark.timeout(400)

# Five blocks; each of the first two requests below grows into a fourth, beside the other.
SIZES = ("--dtype", "float32", "--block-size", "128", "--max-model-len", "448", "--max-num-seqs", "4")
MEMORY = ("--kv-cache-memory-bytes", str(5 * 65536))
NPU = ("--runner", "ascend", "--runner-option", "allow_float32=true", "--runner-option", "attention=fused")
DELAYS = {"ASCEND_SIM_ALLOW_FP32": "1", "ASCEND_SIM_COPY_US": "1000", "ASCEND_SIM_OP_US": "20"}

REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 270},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9, "max_tokens": 270},
    {"temperature": 0.7, "seed": 5, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.1, "seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "n": 2},
    {"temperature": 0.0, "logprobs": 2, "min_tokens": 5},
)
PROMPTS = prompts_of([120, 118, 5, 123, 140])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("models"))


@contextmanager
def npu(model: Path, *arguments: str) -> Iterator[Daemon]:
    with serving(str(model), *SIZES, *MEMORY, *NPU, *arguments, environment=DELAYS) as daemon:
        yield daemon


def read(client: Client, index: int, into: dict[int, dict[int, list[int]]], started: threading.Event) -> None:
    tokens: dict[int, list[int]] = {}
    options = {"max_tokens": 24, "ignore_eos": True, "tokens": True} | REQUESTS[index]
    with client.stream(PROMPTS[index], **options) as stream:
        for message in stream:
            started.set()
            tokens.setdefault(message.output.index, []).extend(token.id for token in message.output.tokens)
    into[index] = tokens


def read_all(client: Client, after_start: Any = None) -> dict[int, dict[int, list[int]]]:
    """Read all requests together; ``after_start`` is called when each has given something."""
    found: dict[int, dict[int, list[int]]] = {}
    started = [threading.Event() for _ in REQUESTS]
    readers = [
        threading.Thread(target=read, args=(client, index, found, started[index])) for index in range(len(REQUESTS))
    ]
    for reader in readers:
        reader.start()
    if after_start is not None:
        assert started[0].wait(WAIT_SECONDS)
        after_start()
    for reader in readers:
        reader.join(WAIT_SECONDS)
    return found


@pytest.fixture(scope="module")
def expected(model) -> dict[int, dict[int, list[int]]]:
    """What the CPU gives, with room for all."""
    cpu = ("--runner", "cpu", "--runner-option", "num_threads=1", "--runner-option", "attention=torch")
    with serving(str(model), *SIZES, *cpu) as daemon, Client(daemon.address, timeout=WAIT_SECONDS) as client:
        return read_all(client)


@pytest.fixture(scope="module")
def daemon(model) -> Iterator[Daemon]:
    with npu(model, "--metrics-port", "0") as one:
        yield one


def test_streams_give_the_tokens_of_the_cpu_while_they_are_preempted(daemon, expected):
    with Client(daemon.address, timeout=WAIT_SECONDS) as client:
        found = read_all(client)
        load = client.load()
    assert found == expected
    assert load.num_preemptions > 0
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)


def test_decode_steps_are_replayed_and_counted(daemon):
    with Client(daemon.address, timeout=WAIT_SECONDS) as client:
        client.generate(PROMPTS[2], temperature=0.0, max_tokens=4, ignore_eos=True)
    url = next(line for line in daemon.log if "/metrics" in line).split()[-1]
    with urllib.request.urlopen(url, timeout=10) as answer:
        samples = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    assert float(samples["runnerd_graph_steps_total"]) >= 3
    assert float(samples["runnerd_graph_misses_total"]) == 0
    assert float(samples["runnerd_async_effective"]) == 1


def test_guided_decoding_is_refused_by_field_while_steps_overlap(daemon):
    with Client(daemon.address, timeout=WAIT_SECONDS) as client, pytest.raises(InvalidRequestError) as caught:
        client.generate("w5", guided_decoding=pb.GuidedDecoding(regex="[0-9]+"))
    assert "--async-execution off" in str(caught.value)


def test_guided_decoding_is_served_where_steps_do_not_overlap(tmp_path):
    model = make_served_model(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # a word is its letters, with no space between two
    tokenizer.save(str(model / "tokenizer.json"))
    guide = pb.GuidedDecoding(regex="(w1|w2)*w3")
    with npu(model, "--async-execution", "off") as daemon, Client(daemon.address, timeout=WAIT_SECONDS) as client:
        answers = [client.generate("w5", guided_decoding=guide, ignore_eos=True, seed=seed, n=2) for seed in range(3)]
    for output in (output for answer in answers for output in answer.outputs):
        assert re.fullmatch("(w1|w2)*w3", output.text)
        assert output.finish.reason == pb.FINISH_REASON_GUIDE


def test_an_abandoned_stream_gives_its_place_back(daemon, expected):
    with Client(daemon.address, timeout=WAIT_SECONDS) as client:
        with client.stream(PROMPTS[0], max_tokens=300, ignore_eos=True, temperature=0.0) as stream:
            next(iter(stream))
        answer = client.generate(PROMPTS[4], tokens=True, max_tokens=24, ignore_eos=True, **REQUESTS[4])
    assert [token.id for token in answer.outputs[0].tokens] == expected[4][0]


def test_streams_outlive_an_engine_that_is_killed(model, expected):
    with npu(model) as daemon, Client(daemon.address, timeout=WAIT_SECONDS) as client:
        found = read_all(client, after_start=lambda: daemon.engine().kill())
        assert found == expected
