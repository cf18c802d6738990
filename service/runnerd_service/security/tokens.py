"""Bearer tokens: who may call, as which tenant, with which rights. They come from a TOML file; only digests are kept.

::

    [[tokens]]
    name = "chat-frontend"                # in logs; the tenant unless one is named
    sha256 = "9f86d081884c7d65…"          # of the token's text, in hex; or the text itself: token = "…"
    tenant = "chat"                       # optional; "*": the one that the request's metadata names
    role = "user"                         # optional; "admin" may also reset, trace, drain
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runnerd_service.errors import ConfigurationError
from runnerd_service.security.reloading import read_bytes

Role = Literal["user", "admin"]

ANY_TENANT = "*"
MIN_TOKEN_CHARACTERS = 16
MAX_TENANT_CHARACTERS = 64
_NAME = re.compile(rf"[A-Za-z0-9._:/@-]{{1,{MAX_TENANT_CHARACTERS}}}")
NAME_RULE = f"1 to {MAX_TENANT_CHARACTERS} letters, digits or . _ : / @ -"
_FLAG = "--auth-tokens"
_EXPECTED = "a TOML file of [[tokens]], each with name and sha256"
_KEYS = frozenset({"name", "token", "sha256", "tenant", "role"})


@dataclass(frozen=True, slots=True)
class Token:
    """A token and what it gives."""

    name: str
    tenant: str
    """``ANY_TENANT``: the one that the request's metadata names."""
    role: Role
    digest: bytes
    """SHA-256 of its text."""


class TokenTable:
    """The tokens of a file.

    Args:
        tokens: With names and digests that are unique.
    """

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, text: str) -> Token | None:
        """Give the token with this text. How long it takes tells nothing of the tokens' texts."""
        digest = hashlib.sha256(text.encode()).digest()
        found = None
        for token in self._tokens:  # all of them, whichever it is
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found


def is_name(text: str) -> bool:
    """Whether ``text`` may name a tenant or a token."""
    return _NAME.fullmatch(text) is not None


def load_tokens(path: Path) -> TokenTable:
    """Read a file of tokens.

    Raises:
        ConfigurationError: It cannot be read, or is wrong; the message names file and flag, and holds no token.
    """
    label = f"the file of tokens {path}"
    try:
        content = tomllib.loads(read_bytes(path, "the file of tokens", _FLAG).decode())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{label} is not UTF-8; give {_FLAG} {_EXPECTED}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{label} is not TOML: {error}; give {_FLAG} {_EXPECTED}") from error
    try:
        return _table(content)
    except ConfigurationError as error:
        raise ConfigurationError(f"{label} of {_FLAG}: {error}") from error


def _table(content: Mapping[str, object]) -> TokenTable:
    if unknown := sorted(content.keys() - {"tokens"}):
        raise ConfigurationError(f"{unknown[0]} is not known; expected [[tokens]] alone")
    entries = content.get("tokens")
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError("it has no token; add a [[tokens]] with name and sha256, or leave out the file")
    tokens = tuple(_token(f"tokens[{index}]", entry) for index, entry in enumerate(entries))
    for attribute in ("name", "digest"):
        values = [getattr(token, attribute) for token in tokens]
        repeated = [token.name for token in tokens if values.count(getattr(token, attribute)) > 1]
        if repeated:
            what = "name" if attribute == "name" else "token"
            raise ConfigurationError(f"{' and '.join(repeated)} have the same {what}; give each its own")
    return TokenTable(tokens)


def _token(label: str, entry: object) -> Token:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{label}: expected a table with name and sha256")
    if unknown := sorted(entry.keys() - _KEYS):
        raise ConfigurationError(f"{label}: {unknown[0]} is not known; expected {', '.join(sorted(_KEYS))}")
    texts: dict[str, str] = {}
    for key, value in entry.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"{label}.{key}: expected a text")
        texts[key] = value
    name = texts.get("name", "")
    tenant = texts.get("tenant", name)
    for key, value in (("name", name), ("tenant", tenant)):
        if not is_name(value) and not (key == "tenant" and value == ANY_TENANT):
            raise ConfigurationError(f"{label}.{key}: got {value!r}, expected {NAME_RULE}")
    role = texts.get("role", "user")
    if role not in ("user", "admin"):
        raise ConfigurationError(f"{label}.role: got {role!r}, expected user or admin")
    return Token(name, tenant, "admin" if role == "admin" else "user", _digest(label, texts))


def _digest(label: str, texts: Mapping[str, str]) -> bytes:
    if ("token" in texts) == ("sha256" in texts):
        raise ConfigurationError(f"{label}: expected one of token and sha256")
    if "token" in texts:
        if len(texts["token"]) < MIN_TOKEN_CHARACTERS:
            raise ConfigurationError(f"{label}.token: is shorter than {MIN_TOKEN_CHARACTERS} characters")
        if not texts["token"].isascii() or not texts["token"].isprintable() or " " in texts["token"]:
            raise ConfigurationError(f"{label}.token: has characters that metadata cannot carry; use ASCII, no spaces")
        return hashlib.sha256(texts["token"].encode()).digest()
    try:
        digest = bytes.fromhex(texts["sha256"])
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigurationError(f"{label}.sha256: expected 64 hexadecimal digits")
    return digest
