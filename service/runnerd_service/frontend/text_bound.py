"""How many tokens a text has at least, told by its bytes alone, before any are made.

No text that fits may be refused by this, so it is told only where no more than single bytes can be lost on the way to
tokens: a normalizer that strips, a token that takes the spaces beside it, or one unknown token for a whole word would
make few tokens of any text. This module knows nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

_NFC_SHRINKS = 9
"""Composing makes a text at most so many times smaller in UTF-8: no character grows or shrinks by more than 3 when it
is taken apart, and none by more when the parts are put together."""
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits")
_BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class TextBound:
    """What is known of how a vocabulary makes tokens of any text."""

    longest_token_bytes: int | None
    """How many bytes of a text one token can stand for at most; None where that is not known."""
    lost_bytes: bytes = b""
    """Those that have no token and are dropped."""

    def least_tokens(self, text: bytes) -> int:
        """Give how many tokens the text of these UTF-8 bytes has at least."""
        if self.longest_token_bytes is None:
            return 0
        num_kept = len(text.translate(None, self.lost_bytes)) if self.lost_bytes else len(text)
        return -(-num_kept // self.longest_token_bytes)


def text_bound(backend: Backend, byte_characters: Mapping[str, int]) -> TextBound:
    """Give what is known of ``backend``.

    Args:
        backend: The library's tokenizer.
        byte_characters: The alphabet of byte-level vocabularies, with the byte that each stands for.
    """
    unknown = TextBound(None)
    shrinks = _shrinks(_described(backend.normalizer))
    pre_tokenizers = list(_steps(_described(backend.pre_tokenizer), "pretokenizers"))
    added = backend.get_added_tokens_decoder().values()
    model = backend.model
    if shrinks is None or not isinstance(model, BPE) or not all(map(_keeps_all, pre_tokenizers)):
        return unknown
    if any(token.lstrip or token.rstrip for token in added):
        return unknown
    pieces = backend.get_vocab(with_added_tokens=False)
    lost = b""
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        longest = max(map(len, pieces), default=1)  # a character of a piece is a byte
        lost = bytes(byte for character, byte in byte_characters.items() if character not in pieces)
    elif model.byte_fallback and pieces.keys() >= _BYTE_PIECES:
        longest = max(len(piece.encode()) for piece in pieces)
    else:
        return unknown
    if lost and backend.normalizer is not None:
        return unknown  # it may make bytes that are lost of others
    return TextBound(shrinks * max(longest, *(len(token.content.encode()) for token in added), 1), lost)


def _described(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _steps(described: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Give the single steps of a normalizer or pre-tokenizer; ``name`` is what a sequence calls them."""
    if described is None:
        return
    if described["type"] == "Sequence":
        for step in described[name]:
            yield from _steps(step, name)
    else:
        yield described


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """Give how many times smaller a text can become at most; None if any number of times."""
    shrinks = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif step["type"] == "Replace":
            old = step["pattern"].get("String")
            if not old or len(step["content"].encode()) < len(old.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinks


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS
