"""Guides on the embedded model: each kind gives its form, greedy choices are those of a mask made from the texts."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from runnerd_client import Client, FinishReason, GuidedDecoding

sys.path.insert(0, str(Path(__file__).parent))

from guided_cases import CASES, CHOICES, SCHEMA, is_valid

pytestmark = pytest.mark.timeout(300)

PROMPT = "A person, as JSON: "
WORDS = ["Paris", "Par is", "London", "Pa", "The city of Paris", "Lyon"]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a synchronous daemon whose KV cache is small."""
    command = [sys.executable, "-m", "runnerd_service", "serve", "--port", "0", "--dtype", "float32"]
    command += [
        "--async-execution",
        "off",
        "--max-num-batched-tokens",
        "16",
        "--max-num-seqs",
        "8",
        "--block-size",
        "8",
    ]
    command += ["--max-model-len", "160", "--kv-cache-memory-bytes", str(24 * 8 * 30 * 2 * 3 * 64 * 4)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    reader.start()
    try:
        found = re.search(r"serving SmolLM2-135M-Instruct on (\S+) .*synchronous", process.stdout.readline())
        assert found, "".join(log)
        with Client(found[1], timeout=120) as one:
            yield one
    finally:
        process.terminate()
        process.wait(60)
        reader.join(10)
        process.stdout.close()
        process.stderr.close()


def test_each_kind_gives_texts_of_its_form_alone_and_while_others_preempt_it(client: Client) -> None:
    requests = [
        {"guided_decoding": case.guide, "temperature": index % 2 * 0.8, "seed": 3, "max_tokens": 60}
        for index, case in enumerate(CASES.values())
    ]
    alone = [client.generate(PROMPT, **one).outputs[0] for one in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        together = list(threads.map(lambda one: client.generate(PROMPT, **one).outputs[0], requests))
    assert [one.text for one in together] == [one.text for one in alone]
    ended = [
        (one.text, case)
        for one, case in zip(alone, CASES.values(), strict=True)
        if one.finish.reason == FinishReason.FINISH_REASON_STOP
    ]
    for text, case in ended:
        assert case.holds(text), text
    assert is_valid(SCHEMA)(alone[0].text)
    assert len(ended) >= len(CASES) // 2, "most come to an end by themselves"


@pytest.mark.slow
def test_greedy_choices_are_those_of_the_model_among_the_texts(client: Client, demo_gguf: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent,
        gguf_file=demo_gguf.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    special = set(tokenizer.all_special_ids)
    pieces = {one: tokenizer.decode([one]) for one in range(len(tokenizer)) if one not in special}
    [eos] = {tokenizer.eos_token_id}

    def expected(prompt: str, texts: list[str]) -> list[int]:
        ids, text = tokenizer(prompt, return_tensors="pt").input_ids, ""
        found: list[int] = []
        while not found or found[-1] != eos:
            rest = [one[len(text) :] for one in texts if one.startswith(text)]
            allowed = [token for token, piece in pieces.items() if piece and any(one.startswith(piece) for one in rest)]
            allowed += [eos] if text in texts else []
            with torch.inference_mode():
                logits = model(ids).logits[0, -1]
            found.append(max(allowed, key=lambda token: (logits[token].item(), -token)))
            text += pieces.get(found[-1], "")
            ids = torch.cat((ids, torch.tensor([[found[-1]]])), dim=1)
        return found

    for prompt, texts in (("The capital of France is", [f" {one}" for one in WORDS]), ("Yes or no?", CHOICES[:2])):
        guide = GuidedDecoding(choice={"texts": texts})
        answer = client.generate(prompt, guided_decoding=guide, temperature=0.0, tokens=True).outputs[0]
        assert [token.id for token in answer.tokens] == expected(prompt, texts)
        assert answer.text in texts
