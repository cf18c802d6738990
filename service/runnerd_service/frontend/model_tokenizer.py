"""The tokenizer of a model's files, by the ``tokenizers`` library alone.

A directory needs ``tokenizer.json``; ``tokenizer_config.json`` and the files beside it bring the chat template and the
names of the special tokens. This module knows nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.detokenizer import Detokenizer, PieceDetokenizer, PieceTable, WindowDetokenizer
from runnerd_service.frontend.gguf_vocabulary import load_gguf_tokenizer, set_surrounding_tokens
from runnerd_service.frontend.text_bound import text_bound
from runnerd_service.guided.guide import Vocabulary

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPACE = "▁"
_LONG_CHARACTERS = 1_000
"""Texts above this are encoded where the interpreter is left to other threads; it takes another thread."""


class ModelTokenizer:
    """A vocabulary read by the ``tokenizers`` library.

    Args:
        backend: The library's tokenizer.
        special_tokens: By the names that chat templates use.
        chat_templates: By name.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens
        self.chat_templates = chat_templates
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._bound = text_bound(backend, _BYTE_OF_CHARACTER)
        special_ids = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        named_ids = map(backend.token_to_id, special_tokens.values())
        special_ids.update(token_id for token_id in named_ids if token_id is not None)
        rule = _PieceRule.of(backend)
        self._rule = rule
        self._special_ids = frozenset(special_ids)
        self._tables = (
            None
            if rule is None
            else {skip: PieceTable(rule.piece_bytes, special_ids if skip else ()) for skip in (False, True)}
        )

    @classmethod
    def from_gguf(cls, path: Path) -> ModelTokenizer:
        """Read the tokenizer inside a GGUF file.

        Raises:
            ConfigurationError: It cannot be read, or its vocabulary is of an unknown family.
        """
        found = load_gguf_tokenizer(path)
        templates = {} if found.chat_template is None else {"default": found.chat_template}
        return cls(found.backend, found.special_tokens, templates)

    @classmethod
    def from_directory(cls, path: Path) -> ModelTokenizer:
        """Read the tokenizer of a model directory.

        Raises:
            ConfigurationError: There is none, or it cannot be read.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(
                f"{path} has no tokenizer.json; write one with "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory) of transformers"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigurationError(f"{file} cannot be read: {error}") from error
        config = _read_json(path / "tokenizer_config.json")
        named = _read_json(path / "special_tokens_map.json") | config
        special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(named.get(name))) is not None}
        if "add_bos_token" in config or "add_eos_token" in config:
            set_surrounding_tokens(
                backend,
                special_tokens.get("bos_token") if config.get("add_bos_token") else None,
                special_tokens.get("eos_token") if config.get("add_eos_token") else None,
            )
        return cls(backend, special_tokens, _chat_templates(path, config))

    def least_tokens(self, text: bytes) -> int:
        """Give how many tokens a text, given as UTF-8, has at least; 0 where that is not known."""
        return self._bound.least_tokens(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Give the token ids of ``text``."""
        if len(text) <= _LONG_CHARACTERS:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # ``encode`` keeps the interpreter for as long as it takes; this gives the same ids.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Give the text of ``token_ids``."""
        if self._tables is None or self._rule is None:
            return self._backend_decode(skip_special_tokens)(list(token_ids))
        raw = b"".join(map(self._tables[skip_special_tokens].bytes_of, token_ids))
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if self._rule.drops_first_space else text

    def piece(self, token_id: int) -> str:
        """Give a token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Give the text of a token alone."""
        if self._rule is None:
            return self._backend_decode(False)([token_id])
        return self._rule.piece_bytes(token_id).decode(errors="replace")

    def vocabulary(self, vocab_size: int) -> Vocabulary | None:
        """Give what each id below ``vocab_size`` adds to a text; None where the decoder looks at several tokens."""
        if self._rule is None:
            return None
        special_ids = tuple(sorted(one for one in self._special_ids if one < vocab_size))
        return Vocabulary(tuple(map(self._rule.piece_bytes, range(vocab_size))), special_ids)

    def stream(self, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """Start to decode an output that grows."""
        if self._tables is None or self._rule is None:
            return WindowDetokenizer(self._backend_decode(skip_special_tokens), prompt_token_ids)
        drops_first_space = self._rule.drops_first_space and not prompt_token_ids
        return PieceDetokenizer(self._tables[skip_special_tokens], drops_first_space=drops_first_space)

    def _backend_decode(self, skip_special_tokens: bool) -> Callable[[list[int]], str]:
        return lambda token_ids: self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


class _PieceRule:
    """How a vocabulary's pieces stand for bytes, where each piece always stands for the same ones."""

    def __init__(self, backend: Backend, to_bytes: Callable[[str], bytes], drops_first_space: bool) -> None:
        self._backend = backend
        self._to_bytes = to_bytes
        self.drops_first_space = drops_first_space

    @classmethod
    def of(cls, backend: Backend) -> _PieceRule | None:
        """Give the rule of ``backend``'s decoder; None if it has no such rule."""
        if backend.decoder is None:
            return None
        described = json.loads(backend.decoder.__getstate__())
        steps = described["decoders"] if described["type"] == "Sequence" else [described]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend, _byte_level_bytes, drops_first_space=False)
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
            if steps[0]["pattern"] != {"String": _SPACE} or steps[0]["content"] != " ":
                return None
            if kinds[3:] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0):
                return None
            return cls(backend, _sentencepiece_bytes, drops_first_space=bool(kinds[3:]))
        return None

    def piece_bytes(self, token_id: int) -> bytes:
        """Give the bytes of a token; none for an id without a piece."""
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._to_bytes(piece)


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes((int(piece[3:5], 16),))
        except ValueError:
            pass
    return piece.replace(_SPACE, " ").encode()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()  # an added token, spelled as it is


def _byte_of_character() -> dict[str, int]:
    """Give the alphabet of byte-level vocabularies: printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    return {entry["name"]: entry["template"] for entry in found or ()}


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}, expected an object")
    return content
