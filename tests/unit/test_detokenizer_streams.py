"""Text that grows token by token against the text of all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from runnerd_service.frontend.detokenizer import Detokenizer, WindowDetokenizer
from runnerd_service.frontend.model_tokenizer import ModelTokenizer
from runnerd_service.frontend.tokenizer import ByteTokenizer, Tokenizer

TEXTS = (
    "Hello, world!",
    "日本語のテキストと中文字符，很长的句子。",  # noqa: RUF001
    "한국어 텍스트 그리고 العربية עברית हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 mixed 🙂 text é e\u0301",
    "naïve Füße ﬁne\n\ttabs   spaces",
    "\ufffd real replacement characters \ufffd\ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 and \U0010ffff",  # noqa: RUF001
)
BYTES = st.lists(st.one_of(st.integers(0, 256), st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99, 0x82, 0xC3])))


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cut ``ids`` into parts of the given sizes, over and over."""
    parts, at = [], 0
    while at < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(list(ids[at : at + size]))
        at += size
    return parts


def grow(stream: Detokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    """Give the pieces of text, one per token, the last with what was flushed."""
    pieces = [text for part in cut(ids, sizes) for text in stream.push(part)]
    assert len(pieces) == len(ids)
    is_unfinished = stream.inside_character
    pieces.append(stream.flush())
    assert bool(pieces[-1]) == is_unfinished
    return pieces


@pytest.fixture(scope="module")
def smollm(demo_gguf: Path) -> ModelTokenizer:
    return ModelTokenizer.from_gguf(demo_gguf)


@pytest.fixture(scope="module")
def backend() -> Backend:
    """A vocabulary with byte fallback, whose decoder drops the space before the first word."""
    words = ["▁", "▁the", "▁cat", "he", "l", "o", "▁▁", "日", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="module")
def sentencepiece(backend: Backend) -> ModelTokenizer:
    return ModelTokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {})


@pytest.fixture(scope="module")
def metaspace() -> ModelTokenizer:
    """A vocabulary without a fixed text per token: its decoder treats the first token differently."""
    words = ["▁the", "▁cat", "s", "▁日", "本"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="s"))
    backend.decoder = decoders.Metaspace()
    return ModelTokenizer(backend, {}, {})


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (1000,)])
def test_pieces_joined_are_the_text(text: str, sizes: tuple[int, ...], smollm: ModelTokenizer) -> None:
    tokenizers: tuple[Tokenizer, ...] = (smollm, ByteTokenizer())
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(grow(tokenizer.stream(skip_special_tokens=True), ids, sizes)) == text


@settings(deadline=None)
@given(ids=BYTES, skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_bytes_give_the_text_of_the_whole(ids: list[int], skip: bool, sizes: list[int]) -> None:
    tokenizer = ByteTokenizer()
    whole = tokenizer.decode(ids, skip_special_tokens=skip)

    assert "".join(grow(tokenizer.stream(skip_special_tokens=skip), ids, sizes)) == whole
    if skip:
        assert whole == bytes(one for one in ids if one < 256).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49_200), max_size=20), skip=st.booleans())
def test_any_ids_give_the_text_of_the_whole(ids: list[int], skip: bool, smollm: ModelTokenizer) -> None:
    whole = smollm.decode(ids, skip_special_tokens=skip)

    assert "".join(grow(smollm.stream(skip_special_tokens=skip), ids)) == whole


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=20), skip=st.booleans())
def test_byte_fallback_gives_the_text_of_the_whole(ids: list[int], skip: bool, sentencepiece: ModelTokenizer) -> None:
    whole = sentencepiece.decode(ids, skip_special_tokens=skip)

    assert "".join(grow(sentencepiece.stream(skip_special_tokens=skip), ids)) == whole


@settings(deadline=None)
@given(text=st.text(alphabet="the cat lo日é🙂語", min_size=1, max_size=30))
def test_byte_fallback_of_valid_text_is_what_the_library_decodes(
    text: str, sentencepiece: ModelTokenizer, backend: Backend
) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)

    assert sentencepiece.decode(ids, skip_special_tokens=False) == backend.decode(ids)


def test_character_stays_whole_when_a_broken_byte_follows_it(sentencepiece: ModelTokenizer) -> None:
    # the library alone would turn all bytes of such a run into U+FFFD, also those that were shown already
    ids = [3 + byte for byte in "語".encode() + b"\xff"]

    assert grow(sentencepiece.stream(skip_special_tokens=True), ids) == ["", "", "語", "\ufffd", ""]


def test_character_is_given_with_the_token_that_completes_it() -> None:
    pieces = grow(ByteTokenizer().stream(skip_special_tokens=True), list("a🙂b".encode()))

    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_unfinished_character_shows_at_the_end_as_a_replacement() -> None:
    assert grow(ByteTokenizer().stream(skip_special_tokens=True), [0xF0, 0x9F]) == ["", "", "\ufffd"]


def test_special_token_inside_a_character_is_left_out_and_the_character_kept() -> None:
    ids = [0xC3, 256, 0xA9]

    assert grow(ByteTokenizer().stream(skip_special_tokens=True), ids) == ["", "", "é", ""]
    assert grow(ByteTokenizer().stream(skip_special_tokens=False), ids) == ["", "\ufffd<eos>", "\ufffd", ""]


def test_space_before_the_first_word_is_kept_after_a_prompt(sentencepiece: ModelTokenizer, backend: Backend) -> None:
    prompt = sentencepiece.encode("the", add_special_tokens=True)
    output = [backend.token_to_id("▁cat")]
    whole = sentencepiece.decode([*prompt, *output], skip_special_tokens=True)

    assert whole == "the cat"
    after_prompt = sentencepiece.stream(skip_special_tokens=True, prompt_token_ids=prompt)
    assert "".join(grow(after_prompt, output)) == " cat"
    assert "".join(grow(sentencepiece.stream(skip_special_tokens=True), output)) == "cat"


@given(ids=st.lists(st.integers(0, 4), max_size=12), num_prompt=st.integers(0, 5))
def test_decoder_without_fixed_pieces_continues_the_prompt(
    ids: list[int], num_prompt: int, metaspace: ModelTokenizer
) -> None:
    prompt, output = ids[:num_prompt], ids[num_prompt:]
    before = metaspace.decode(prompt, skip_special_tokens=True)

    pieces = grow(metaspace.stream(skip_special_tokens=True, prompt_token_ids=prompt), output)

    assert before + "".join(pieces) == metaspace.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=30), num_context=st.integers(0, 8))
def test_window_gives_the_text_of_the_whole_for_characters_of_several_bytes(ids: list[int], num_context: int) -> None:
    def decode(some: list[int]) -> str:
        return "".join(chr(0x3040 + one) for one in some)

    context, output = ids[:num_context], ids[num_context:]

    assert "".join(grow(WindowDetokenizer(decode, context), output)) == decode(output)


def test_window_waits_for_the_rest_of_a_character() -> None:
    stream = WindowDetokenizer(lambda ids: bytes(ids).decode(errors="replace"))

    assert grow(stream, list("a🙂".encode())) == ["a", "", "", "", "🙂", ""]
    assert grow(WindowDetokenizer(lambda ids: bytes(ids).decode(errors="replace")), [0xF0]) == ["", "\ufffd"]
