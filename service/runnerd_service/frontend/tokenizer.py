"""Text to token ids and back, for the vocabularies that are served. Never imports torch, nor transformers, which would.

The front end knows :class:`Tokenizer`; :func:`load_tokenizer` finds the right one for a model's files. Token ids that
have no piece in the vocabulary (models pad their embeddings) have no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.detokenizer import Detokenizer, PieceDetokenizer, PieceTable
from runnerd_service.guided.guide import Vocabulary

_BYTE_EOS = 256
_BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer(Protocol):
    """A vocabulary. Safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a piece; they are below this."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """``bos_token``, ``eos_token`` and their kind, by the names that chat templates use."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The model's chat templates by name; the usual one is "default". Empty if it has none."""
        ...

    def least_tokens(self, text: bytes) -> int:
        """Give how many tokens a text, given as UTF-8, has at least; 0 where that is not known. Takes no time."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Give the token ids of ``text``; special tokens written out in it are recognized."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Give the text of ``token_ids``; invalid UTF-8 shows as U+FFFD."""
        ...

    def piece(self, token_id: int) -> str:
        """Give a token as the vocabulary spells it; empty for an id without a piece."""
        ...

    def token_text(self, token_id: int) -> str:
        """Give the text of a token alone; an unfinished character shows as U+FFFD."""
        ...

    def vocabulary(self, vocab_size: int) -> Vocabulary | None:
        """Give what each id below ``vocab_size`` adds to a text; None if that depends on the tokens around it."""
        ...

    def stream(self, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """Start to decode an output that grows.

        The pieces joined are ``decode`` of the whole output, except that a vocabulary that drops the space before a
        text's first word keeps it when there is a prompt: prompt and output joined are the whole text.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes as token ids, 256 as EOS. For runners that have no vocabulary of their own."""

    vocab_size = _BYTE_EOS + 1
    special_tokens: Mapping[str, str] = {"eos_token": "<eos>"}
    chat_templates: Mapping[str, str] = {"default": _BYTE_CHAT_TEMPLATE}

    def __init__(self) -> None:
        self._tables = {
            skip: PieceTable(_byte_piece, hidden_ids=(_BYTE_EOS,) if skip else ()) for skip in (False, True)
        }

    def least_tokens(self, text: bytes) -> int:
        """Give the number of bytes."""
        return len(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # there are none to add
        """Give the bytes of ``text``."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Give the text of bytes; invalid UTF-8 shows as U+FFFD."""
        bytes_of = self._tables[skip_special_tokens].bytes_of
        return b"".join(map(bytes_of, token_ids)).decode(errors="replace")

    def piece(self, token_id: int) -> str:
        """Give a printable ASCII character as itself, another byte as ``<0xE4>``."""
        if token_id >= _BYTE_EOS:
            return self.special_tokens["eos_token"] if token_id == _BYTE_EOS else ""
        return chr(token_id) if 0x20 <= token_id < 0x7F else f"<0x{token_id:02X}>"

    def token_text(self, token_id: int) -> str:
        """Give the text of a token alone."""
        return _byte_piece(token_id).decode(errors="replace")

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """Give the bytes; 256 is a special token."""
        return Vocabulary(tuple(map(_byte_piece, range(vocab_size))), (_BYTE_EOS,))

    def stream(self, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """Start to decode an output that grows."""
        return PieceDetokenizer(self._tables[skip_special_tokens])


def load_tokenizer(model: str) -> Tokenizer:
    """Read the tokenizer of the model at ``model``, a directory or a GGUF file.

    Raises:
        ConfigurationError: There is no tokenizer that can be read; the message says what to do.
    """
    # Here, so that a server without a vocabulary needs none of the libraries for it.
    from runnerd_service.frontend.model_tokenizer import ModelTokenizer

    path = Path(model)
    if not path.exists():
        raise ConfigurationError(
            f"model {model!r} does not exist; give the path of a model directory or a GGUF file (nothing is downloaded)"
        )
    return ModelTokenizer.from_gguf(path) if path.is_file() else ModelTokenizer.from_directory(path)


def _byte_piece(token_id: int) -> bytes:
    if token_id < _BYTE_EOS:
        return bytes((token_id,))
    return b"<eos>" if token_id == _BYTE_EOS else b""
