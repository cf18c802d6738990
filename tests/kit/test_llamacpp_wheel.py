"""llama.cpp behind the SPI, from a distribution of its own: its tests, and the demo weights over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from installed_plugin import install, run_its_tests, runnerd, served

from runnerd_client import Client

PROJECT = Path(__file__).parents[2] / "runners/runnerd-llamacpp"
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "Water boils at",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
    "Die Hauptstadt von Österreich ist",
    "def fibonacci(n):",
]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(PROJECT, tmp_path_factory.mktemp("llamacpp"))


@pytest.fixture(scope="module")
def client(environment: dict[str, str], demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a daemon whose KV memory is too small for all prompts at once, so that it preempts."""
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "96"]
    sizes += ["--kv-cache-memory-bytes", str(112 * 23040)]
    folder = tmp_path_factory.mktemp("log")
    with served(environment, folder, str(demo_gguf), "--runner", "llamacpp", *sizes) as client:
        yield client


def test_it_is_listed_by_what_it_is(environment: dict[str, str]) -> None:
    assert "llamacpp: llama.cpp on the host's cores" in runnerd(environment, "runners")


def test_its_project_passes_its_tests_and_the_kit(environment: dict[str, str], tmp_path: Path) -> None:
    printed = run_its_tests(PROJECT, tmp_path, environment)
    assert " passed" in printed
    assert " skipped" not in printed


def test_the_demo_weights_answer_several_requests_at_once(client: Client) -> None:
    def ask(prompt: str) -> str:
        return client.generate(prompt, temperature=0, max_tokens=30, ignore_eos=True).outputs[0].text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(ask, PROMPTS))
    assert " Paris" in texts[0]
    assert " 15, 16," in texts[3]
    assert all(len(text) > 20 for text in texts)
    assert client.load().num_preemptions > 0


def test_its_memory_is_told_in_tokens(client: Client) -> None:
    info = client.server_info()
    assert (info.block_size, info.num_blocks) == (1, 112)
    assert info.runner == "llamacpp"


def test_a_seed_and_log_probabilities_are_served(client: Client) -> None:
    first, again = (
        client.generate(PROMPTS[1], seed=5, temperature=1.2, top_p=0.9, max_tokens=8, ignore_eos=True, logprobs=2)
        for _ in range(2)
    )
    assert first.outputs[0].text == again.outputs[0].text
    tokens = first.outputs[0].tokens
    assert len(tokens) == 8
    assert all(len(token.candidates) == 2 and token.logprob <= 0 for token in tokens)
