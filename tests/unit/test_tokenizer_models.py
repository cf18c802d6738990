"""Tokenizers of model files against what transformers makes of the same files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.gguf_metadata import read_gguf_metadata
from runnerd_service.frontend.model_tokenizer import ModelTokenizer
from runnerd_service.frontend.tokenizer import ByteTokenizer, load_tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    " leading and trailing  spaces   ",
    "tabs\tand\nnew lines\n\n\nand \r\n more",
    "don't can't we'll I'VE",
    "numbers 1 12 123 1234567890 3.14159 1e-7",
    "def f(x):\n    return x ** 2  # squared\n",
    "Füße, naïve, Ångström, ﬁne",
    "日本語のテキストと中文字符",
    "한국어 텍스트",
    "العربية والعبرية עברית",
    "हिन्दी पाठ",
    "emoji 🙂 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "a\u00a0b\u2003c\u200bd",
    "\x00\x01\x7f",
    "",
)
CORPUS = (*TEXTS, "the cat sat on the mat and the dog ate the hat " * 3, "lorem ipsum dolor sit amet " * 3)


@pytest.fixture(scope="module")
def smollm(demo_gguf: Path) -> ModelTokenizer:
    return ModelTokenizer.from_gguf(demo_gguf)


@pytest.fixture(scope="module")
def transformers_smollm(demo_gguf: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(demo_gguf.parent), gguf_file=demo_gguf.name)


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_tokenizer_gives_the_ids_and_texts_of_transformers(
    text: str, smollm: ModelTokenizer, transformers_smollm: Any
) -> None:
    ids = smollm.encode(text, add_special_tokens=True)

    assert ids == transformers_smollm.encode(text)
    for skip in (False, True):
        assert smollm.decode(ids, skip_special_tokens=skip) == transformers_smollm.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: not any(one.isnumeric() for one in text)))
def test_gguf_tokenizer_agrees_with_transformers_on_any_text(
    text: str, smollm: ModelTokenizer, transformers_smollm: Any
) -> None:
    assert smollm.encode(text, add_special_tokens=True) == transformers_smollm.encode(text)


def test_digits_stand_alone_where_the_vocabulary_was_trained_so(smollm: ModelTokenizer) -> None:
    # transformers ignores the file's pre-tokenizer name here and would take one space with the digit
    ids = smollm.encode("x   7", add_special_tokens=False)

    assert [smollm.piece(one) for one in ids] == ["x", "ĠĠĠ", "7"]


def test_gguf_file_names_special_tokens_and_chat_template(smollm: ModelTokenizer, transformers_smollm: Any) -> None:
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.special_tokens["bos_token"] == "<|im_start|>"
    assert smollm.chat_templates == {"default": transformers_smollm.chat_template}
    assert smollm.vocab_size == len(transformers_smollm)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49_200), max_size=12))
def test_any_ids_decode_as_in_transformers(ids: list[int], smollm: ModelTokenizer, transformers_smollm: Any) -> None:
    known = [one for one in ids if one < smollm.vocab_size]

    assert smollm.decode(ids, skip_special_tokens=False) == transformers_smollm.decode(known)


def test_long_text_has_the_ids_of_transformers(smollm: ModelTokenizer, transformers_smollm: Any) -> None:
    text = "".join(TEXTS) * 20  # other calls of the library make these ids than those of short texts

    for special in (False, True):
        assert smollm.encode(text, add_special_tokens=special) == transformers_smollm.encode(
            text, add_special_tokens=special
        )


def test_other_threads_go_on_while_a_long_text_becomes_tokens(smollm: ModelTokenizer) -> None:
    begun, done, num_turns = threading.Event(), threading.Event(), 0

    def encode() -> None:
        begun.set()
        smollm.encode("hello world " * 40_000, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    while not done.is_set():
        num_turns += 1
        time.sleep(0)
    thread.join()
    assert num_turns > 10


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40) | st.text("e\u0301\u1fef▁ \t0a\x04\U00040000", max_size=40))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(
    text: str, smollm: ModelTokenizer, sentencepiece: ModelTokenizer
) -> None:
    for tokenizer in (smollm, sentencepiece, ByteTokenizer()):
        assert tokenizer.least_tokens(text.encode()) <= len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.least_tokens(f"x{text}".encode()) > 0


def test_longest_token_of_a_vocabulary_is_known_where_no_text_is_lost(tmp_path: Path) -> None:
    vocabulary = {character: index for index, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Backend(models.BPE(vocabulary | {"ab": 256, "abab": 257}, [("a", "b"), ("ab", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    described = json.loads(backend.to_str())
    removing = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}
    added = {"id": 900, "content": "<|x|>", "single_word": False, "normalized": False, "special": True}
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    squeeze = {"type": "Replace", "pattern": {"String": "  "}, "content": " "}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}
    lossy = {"type": "Sequence", "pretokenizers": [removing, described["pre_tokenizer"]]}
    words = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}

    def least_tokens(**changes: Any) -> int:
        (tmp_path / "tokenizer.json").write_text(json.dumps(described | changes))
        return ModelTokenizer.from_directory(tmp_path).least_tokens(b"ab" * 1000)

    assert least_tokens() == 500
    assert least_tokens(normalizer={"type": "NFC"}) == 56  # 4 bytes, 9 times smaller
    assert least_tokens(added_tokens=[added | {"content": "é" * 20, "lstrip": False, "rstrip": False}]) == 50
    # each of these can make few tokens of a long text
    assert least_tokens(added_tokens=[added | {"lstrip": False, "rstrip": True}]) == 0
    assert least_tokens(normalizer=strip) == 0
    assert least_tokens(normalizer=squeeze) == 0
    assert least_tokens(pre_tokenizer=lossy) == 0
    assert least_tokens(pre_tokenizer=metaspace) == 0
    assert least_tokens(model=words) == 0


def train_sentencepiece_like() -> tuple[list[str], list[float], list[int]]:
    """Give the tokens, scores and token types of a small vocabulary of SentencePiece's kind."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    learned = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(token for token, _ in learned)]
    scores = [0.0] * 259 + [float(-index) for index in range(len(learned))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(learned)
    return tokens, scores, types


def write_gguf(path: Path, *, kind: str, pre: str | None = None, architecture: str = "llama") -> None:
    tokens, scores, types = train_sentencepiece_like()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, kind="llama")
    return path


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_path: Path) -> ModelTokenizer:
    return ModelTokenizer.from_gguf(sentencepiece_path)


@pytest.fixture(scope="module")
def transformers_sentencepiece(sentencepiece_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    folder, name = str(sentencepiece_path.parent), sentencepiece_path.name
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_vocabulary_in_gguf_gives_the_ids_of_transformers(
    text: str, sentencepiece: ModelTokenizer, transformers_sentencepiece: Any
) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=True)

    assert ids == transformers_sentencepiece.encode(text)
    assert ids[0] == 1, "BOS"
    assert sentencepiece.decode(ids, skip_special_tokens=True) == transformers_sentencepiece.decode(
        ids, skip_special_tokens=True
    )


def test_sentencepiece_text_round_trips(sentencepiece: ModelTokenizer) -> None:
    # A first space of the text's own is taken for the one that would be put there, and dropped again.
    for text in (one for one in TEXTS if not one.startswith(" ")):
        ids = sentencepiece.encode(text, add_special_tokens=False)
        assert sentencepiece.decode(ids, skip_special_tokens=False) == text


def test_vocabulary_of_an_unknown_family_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", kind="gpt2", pre="some-new-model")

    with pytest.raises(ConfigurationError, match=r"some-new-model.*tokenizer\.json"):
        load_tokenizer(str(tmp_path / "odd.gguf"))


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_vocabulary_of_an_unknown_kind_is_refused(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", kind=kind)

    with pytest.raises(ConfigurationError, match=kind):
        load_tokenizer(str(tmp_path / "odd.gguf"))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 some other file of more than twenty-four bytes"])
def test_file_that_is_no_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"model\.gguf"):
        load_tokenizer(str(tmp_path / "model.gguf"))


def test_gguf_file_cut_short_is_refused_at_any_length(sentencepiece_path: Path, tmp_path: Path) -> None:
    whole = sentencepiece_path.read_bytes()
    for length in range(1, 2000, 37):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match=r"cut\.gguf"):
            load_tokenizer(str(tmp_path / "cut.gguf"))


def test_metadata_is_what_the_gguf_package_reads(sentencepiece_path: Path) -> None:
    reader = gguf.GGUFReader(sentencepiece_path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}

    assert read_gguf_metadata(sentencepiece_path, lambda key: True) == expected
    assert read_gguf_metadata(sentencepiece_path, lambda key: key == "llama.context_length") == {
        "llama.context_length": 64
    }


def test_directory_is_read_by_its_tokenizer_json(
    smollm: ModelTokenizer, transformers_smollm: Any, tmp_path: Path
) -> None:
    transformers_smollm.save_pretrained(tmp_path)

    read = load_tokenizer(str(tmp_path))

    assert read.chat_templates == smollm.chat_templates
    assert read.special_tokens["eos_token"] == "<|im_end|>"
    for text in TEXTS:
        assert read.encode(text, add_special_tokens=True) == transformers_smollm.encode(text)


def test_directory_that_adds_bos_says_so_in_its_configuration(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"<s>": 0, "a": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": {"content": "<s>"}}')

    read = load_tokenizer(str(tmp_path))

    assert read.encode("aa", add_special_tokens=True) == [0, 1, 1]
    assert read.encode("aa", add_special_tokens=False) == [1, 1]
    assert read.decode([0, 1], skip_special_tokens=True) == "a"


def test_directory_without_a_tokenizer_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="save_pretrained"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{}", "[1]"])
def test_broken_tokenizer_json_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_configuration_is_refused(content: str, tmp_path: Path) -> None:
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)

    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json"):
        load_tokenizer(str(tmp_path))


def test_named_templates_are_kept_by_name(tmp_path: Path) -> None:
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}'
    )

    assert load_tokenizer(str(tmp_path)).chat_templates == {"default": "d", "tool_use": "t"}


@given(text=st.text(max_size=30))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=True)

    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, 256], skip_special_tokens=True) == text
    assert tokenizer.decode([*ids, 256], skip_special_tokens=False) == f"{text}<eos>"


def test_byte_pieces_are_printable() -> None:
    tokenizer = ByteTokenizer()

    assert [tokenizer.piece(one) for one in (65, 10, 255, 256, 300)] == ["A", "<0x0A>", "<0xFF>", "<eos>", ""]


def run_apart(code: str) -> Sequence[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_front_end_never_imports_torch(demo_gguf: Path) -> None:
    loaded = run_apart(
        "import sys\n"
        "import runnerd_service.frontend.frontend\n"
        "from runnerd_service.frontend.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(demo_gguf)!r}).encode('hello', add_special_tokens=True)\n"
        "print(*[name for name in ('torch', 'transformers', 'grpc', 'tokenizers') if name in sys.modules])"
    )

    assert loaded == ["tokenizers"]


def test_runner_without_a_vocabulary_needs_no_tokenizer_library() -> None:
    loaded = run_apart(
        "import sys\n"
        "import runnerd_service.frontend.frontend\n"
        "from runnerd_service.frontend.tokenizer import ByteTokenizer\n"
        "print('tokenizers' in sys.modules, len(ByteTokenizer().encode('abc', add_special_tokens=True)))"
    )

    assert loaded == ["False", "3"]
