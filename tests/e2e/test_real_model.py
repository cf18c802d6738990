"""The embedded model through a daemon: what a client reads is what transformers.generate gives, token for token."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from runnerd_client import Client

pytestmark = pytest.mark.timeout(300)

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Österreich ist Wien. 東京は日本の首都です。 Москва",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18",
    "Once upon a time",
    "Water boils at",
    "SELECT name FROM",
    "🙂🙃",
]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A daemon on the embedded model, with a KV cache and a step so small that it chunks and preempts."""
    # 12 blocks of 8 tokens: the longest request alone takes 11 of them, and each of the short ones grows to four.
    command = [sys.executable, "-m", "runnerd_service", "serve", "--port", "0", "--dtype", "float32"]
    command += ["--max-num-batched-tokens", "16", "--max-num-seqs", "8", "--block-size", "8"]
    command += ["--max-model-len", "96", "--kv-cache-memory-bytes", str(12 * 8 * 30 * 2 * 3 * 64 * 4)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        found = re.search(r"serving SmolLM2-135M-Instruct on (\S+)", line)
        assert found, line + "".join(log)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)
        reader.join(10)
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)


@pytest.fixture(scope="module")
def oracle(tokenizer, demo_gguf: Path) -> list[list[int]]:
    """Greedy tokens of transformers.generate for each prompt, EOS not heeded."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent,
        gguf_file=demo_gguf.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    config = transformers.GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    outputs = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            generated = model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
        outputs.append(generated[0, ids.shape[1] :].tolist())
    return outputs


def test_streams_together_give_the_tokens_of_transformers_while_they_are_chunked_and_preempted(
    address, oracle, tokenizer
):
    streamed: dict[int, tuple[str, list[int]]] = {}

    def read(client: Client, index: int) -> None:
        text, ids = "", []
        options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "tokens": True}
        with client.stream(PROMPTS[index], **options) as stream:
            for message in stream:
                text += message.output.text
                ids += [token.id for token in message.output.tokens]
        streamed[index] = text, ids

    with Client(address, timeout=120) as client:
        readers = [threading.Thread(target=read, args=(client, index)) for index in range(len(PROMPTS))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        load = client.load()
        unary = [
            client.generate(prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, tokens=True)
            for prompt in PROMPTS
        ]
        # The longest again, while its blocks are still there.
        options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "tokens": True}
        twice = [client.generate(max(PROMPTS, key=len), **options).outputs[0] for _ in range(2)]
    assert [streamed[index][1] for index in range(len(PROMPTS))] == oracle
    assert [[token.id for token in answer.outputs[0].tokens] for answer in unary] == oracle
    for index, answer in enumerate(unary):
        assert streamed[index][0] == answer.outputs[0].text == tokenizer.decode(oracle[index], skip_special_tokens=True)
    assert load.num_preemptions > 0
    assert twice[1].finish.usage.cached_tokens > 0
    assert twice[0].tokens == twice[1].tokens
    assert [token.id for token in twice[1].tokens] == oracle[PROMPTS.index(max(PROMPTS, key=len))]
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)


MANY_SCRIPTS = (
    "हिन्दी में एक वाक्य",
    "العربية والعبرية עברית",
    "한국어 문장 하나",
    "ไทย ქართული አማርኛ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 and \U0010ffff",  # noqa: RUF001
)


def test_text_is_the_decoded_ids_whatever_the_prompts_script_and_however_broken_the_bytes(address, tokenizer):
    # Parts of characters, in any order, and a few whole ones; then any token at all.
    fragments = [one for one in range(2000) if "\ufffd" in tokenizer.decode([one])]
    choices = ([*fragments, 330, 1131, 0], [])
    options = {"temperature": 100.0, "max_tokens": 16, "ignore_eos": True, "tokens": True}
    num_broken = 0
    with Client(address, timeout=120) as client:
        for seed, prompt in enumerate(MANY_SCRIPTS):
            pieces, ids, skip = [], [], seed < 3
            allowed = {"allowed_token_ids": choices[seed % 2]}
            with client.stream(prompt, seed=seed, skip_special_tokens=skip, **allowed, **options) as stream:
                for message in stream:
                    pieces.append(message.output.text)
                    ids += [token.id for token in message.output.tokens]
            text = "".join(pieces)
            assert len(ids) == 16
            assert text == tokenizer.decode(ids, skip_special_tokens=skip)
            num_broken += "\ufffd" in text
    assert num_broken >= 3


def test_the_chat_answer_names_the_capital(address):
    with Client(address, timeout=120) as client:
        answer = client.generate(
            [{"role": "user", "content": "What is the capital of France?"}], temperature=0.0, max_tokens=32
        )
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish.eos_token_id == 2


def test_the_front_process_tokenizes_as_transformers_does(address, tokenizer):
    with Client(address, timeout=120) as client:
        for prompt in PROMPTS:
            answer = client.tokenize(prompt)
            assert list(answer.ids) == tokenizer(prompt).input_ids
            assert client.detokenize(answer.ids) == tokenizer.decode(answer.ids, skip_special_tokens=True)
