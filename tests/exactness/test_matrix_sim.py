"""On the simulated runner each request gets the same bytes, in whatever way and at whatever depth it is run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matrix import ALONE, DEPTHS, WAYS, Stream, requests_for, run

REQUESTS = requests_for(vocab_size=256, eos=256)
OPTIONS = {"kv_shadow": "true", "max_model_len": "96", "eos_bias": "1.5"}


@pytest.fixture(scope="module")
def alone() -> dict[int, Stream]:
    """What each gets when it runs by itself, one step in flight, its prompt in one step."""
    return run(REQUESTS, ALONE, 1, "sim", None, OPTIONS | {"num_blocks": str(ALONE.num_blocks)})


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bytes(way: str, depth: int, alone: dict[int, Stream]) -> None:
    got = run(REQUESTS, WAYS[way], depth, "sim", None, OPTIONS | {"num_blocks": str(WAYS[way].num_blocks)})
    assert {uid: stream.packed() for uid, stream in got.items()} == {
        uid: stream.packed() for uid, stream in alone.items()
    }


def test_the_requests_differ_and_end_in_every_way(alone: dict[int, Stream]) -> None:
    assert len({stream.packed() for stream in alone.values()}) > len(REQUESTS) * 0.9
    assert {stream.finish for stream in alone.values()} == {"eos", "stop_token", "length"}


def test_without_prefix_caching_the_bytes_are_the_same(alone: dict[int, Stream]) -> None:
    way = replace(WAYS["tiny pool"], prefix_caching=False)
    got = run(REQUESTS, way, 2, "sim", None, OPTIONS | {"num_blocks": str(way.num_blocks)})
    assert {uid: stream.packed() for uid, stream in got.items()} == {
        uid: stream.packed() for uid, stream in alone.items()
    }
