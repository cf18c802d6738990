"""Turns token ids into text piece by piece, so that the pieces joined are the whole text.

A token's bytes may end inside a character; they wait until the character is complete or known to be broken (then it
shows as U+FFFD). Most vocabularies map each token to fixed bytes, which makes this a table look-up and a UTF-8 decoder
(:class:`PieceDetokenizer`); for the others :class:`WindowDetokenizer` compares decodings of the last few tokens. This
module knows nothing of requests, stop strings or where a vocabulary was read.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_NEW_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Decodes one output as it grows."""

    @property
    def inside_character(self) -> bool:
        """Whether text waits for the rest of a character: :meth:`flush` would give some."""
        ...

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Give for each of the next tokens the text that became complete with it."""
        ...

    def flush(self) -> str:
        """Give what still waits for the rest of a character, as U+FFFD; call it once, at the end."""
        ...


class PieceTable:
    """The bytes of each token, looked up once and kept; shared by all streams of a tokenizer.

    Args:
        piece_bytes: Gives the bytes of a token id; empty for an id without a piece.
        hidden_ids: Tokens that have no text here (special tokens, when they are left out).
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], hidden_ids: Collection[int]) -> None:
        self._piece_bytes = piece_bytes
        self._hidden_ids = frozenset(hidden_ids)
        self.whole_texts: dict[int, str] = {}
        """Texts of the tokens seen so far whose bytes are whole characters."""

    def bytes_of(self, token_id: int) -> bytes:
        """Give the token's bytes; whole characters are noted in ``whole_texts``."""
        piece = b"" if token_id in self._hidden_ids else self._piece_bytes(token_id)
        with contextlib.suppress(UnicodeDecodeError):
            self.whole_texts[token_id] = piece.decode()
        return piece


class PieceDetokenizer:
    """Decodes by a table of pieces. Invalid UTF-8 becomes U+FFFD, one for each maximal broken part.

    Args:
        table: The vocabulary's pieces.
        drops_first_space: Leave out a space at the very beginning.
    """

    __slots__ = ("_at_first", "_decoder", "_table", "_whole_texts", "inside_character")

    def __init__(self, table: PieceTable, *, drops_first_space: bool = False) -> None:
        self._table = table
        self._whole_texts = table.whole_texts
        self._decoder = _NEW_UTF8_DECODER("replace")
        self.inside_character = False
        self._at_first = drops_first_space

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Give for each of the next tokens the text that became complete with it."""
        texts = []
        for token_id in token_ids:
            text = None if self.inside_character else self._whole_texts.get(token_id)
            if text is None:
                text = self._decoder.decode(self._table.bytes_of(token_id))
                self.inside_character = bool(self._decoder.getstate()[0])
            if self._at_first and text:
                self._at_first = False
                text = text.removeprefix(" ")
            texts.append(text)
        return texts

    def flush(self) -> str:
        """Give the unfinished character as U+FFFD."""
        self.inside_character = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes by comparing the decodings of a short window of tokens, with and without the newest.

    Args:
        decode: Decodes a list of token ids.
        context: Tokens that came before the output; their text is not given.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        # Five tokens are enough for the rules that decoders apply across tokens (spaces, unfinished characters).
        self._window = list(context[-5:])
        self._num_given = len(self._window)
        self._given = decode(self._window) if self._window else ""
        self.inside_character = False

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Give for each of the next tokens the text that became complete with it."""
        return [self._push_one(token_id) for token_id in token_ids]

    def flush(self) -> str:
        """Give what the window's text has beyond what was given."""
        self.inside_character = False
        return self._decode(self._window)[len(self._given) :] if self._window else ""

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        has_more = len(text) > len(self._given)
        self.inside_character = has_more and text.endswith(_REPLACEMENT)
        if self.inside_character or not has_more:
            return ""
        new = text[len(self._given) :]
        # The tokens given last become the context of the next ones; older ones cannot change the text any more.
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given = self._decode(self._window)
        return new
