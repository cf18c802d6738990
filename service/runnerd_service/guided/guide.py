"""What guided decoding is told: a guide as a client writes it, and the vocabulary it is followed in. Data alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

GuideKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A form that an output must have, as asked for."""

    kind: GuideKind
    texts: tuple[str, ...] = ()
    """The choices; of the other kinds the one text, of ``json_object`` none."""

    @property
    def field(self) -> str:
        """Its path in the request message."""
        return f"guided_decoding.{self.kind}"

    @property
    def num_bytes(self) -> int:
        """Bytes of its texts in UTF-8."""
        return sum(len(text.encode(errors="replace")) for text in self.texts)


class GuideError(Exception):
    """A guide is wrong, too large or matches nothing. The message is fit for clients.

    Args:
        message: What is wrong.
        place: Which part of the guide's field it is, such as ``.texts[2]``; empty for all of it.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """What each token id of a model adds to a text."""

    tokens: tuple[bytes, ...]
    """[vocab_size]. Empty for an id that adds nothing, which no guide allows."""
    special_ids: tuple[int, ...] = ()
    """Tokens that are no text; only a grammar that names one (``<|name|>``) allows it."""
