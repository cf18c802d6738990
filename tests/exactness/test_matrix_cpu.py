"""On the PyTorch runner in float32 each request gets the same tokens, in whatever way and at whatever depth it is run.

Log-probabilities agree to 1e-4: another number of rows may be added up in another order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from matrix import ALONE, DEPTHS, WAYS, Stream, requests_for, run

from runnerd_service.engine.messages import Logprobs

VOCAB_SIZE = 160
EOS = 2
REQUESTS = requests_for(VOCAB_SIZE, EOS)
BYTES_PER_BLOCK = 4 * 2 * 3 * 2 * 16 * 4
"""Tokens, keys and values, layers, heads, dimensions, float32."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        # Wide enough that the highest logit stands out of rounding.
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def run_on_cpu(requests, way, depth: int, model: Path, bytes_per_block: int = BYTES_PER_BLOCK) -> dict[int, Stream]:
    memory_bytes = way.num_blocks * bytes_per_block
    return run(requests, way, depth, "cpu", str(model), {"num_threads": "1"}, memory_bytes=memory_bytes)


def values(records: list[Logprobs] | tuple[Logprobs, ...]) -> list[float]:
    return [logprob for record in records for logprob in (record.logprob, *(value for _, value in record.top))]


def check(got: dict[int, Stream], expected: dict[int, Stream]) -> None:
    for uid, mine in got.items():
        other = expected[uid]
        assert mine.token_ids == other.token_ids, uid
        assert (mine.finish, mine.matched, mine.error) == (other.finish, other.matched, other.error)
        for records, theirs in ((mine.logprobs, other.logprobs), (mine.prompt_logprobs, other.prompt_logprobs)):
            assert [record.token_id for record in records] == [record.token_id for record in theirs]
            assert values(records) == pytest.approx(values(theirs), abs=1e-4)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[int, Stream]:
    """What each gets when it runs by itself, one step in flight, its prompt in one step."""
    return run_on_cpu(REQUESTS, ALONE, 1, tiny)


# Each way at one depth, and the one that preempts at every depth; `-m slow` has the others.
CASES = [
    pytest.param(way, depth, marks=() if depth == 2 or way == "tiny pool" else pytest.mark.slow)
    for way in WAYS
    for depth in DEPTHS
]


@pytest.mark.parametrize(("way", "depth"), CASES)
def test_every_way_gives_the_same_tokens(way: str, depth: int, tiny: Path, alone: dict[int, Stream]) -> None:
    check(run_on_cpu(REQUESTS, WAYS[way], depth, tiny), alone)


@pytest.fixture(scope="module")
def smollm2_alone(demo_gguf: Path) -> dict[int, Stream]:
    return run_on_cpu(requests_for(49152, 2), ALONE, 1, demo_gguf, 4 * 2 * 30 * 3 * 64 * 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_tokens_of_a_real_model(
    way: str, depth: int, demo_gguf: Path, smollm2_alone: dict[int, Stream]
) -> None:
    got = run_on_cpu(requests_for(49152, 2), WAYS[way], depth, demo_gguf, 4 * 2 * 30 * 3 * 64 * 4)
    check(got, smollm2_alone)
