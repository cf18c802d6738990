"""Reads the metadata of a GGUF file: its key-value part, no tensors. Standard library only, and quick.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

from runnerd_service.errors import ConfigurationError

MetadataValue = str | int | float | bool | list["MetadataValue"]

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_LENGTH = struct.Struct("<Q")
_HEADER = struct.Struct("<4sIQQ")


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, MetadataValue]:
    """Give the metadata whose key ``wanted`` accepts.

    Raises:
        ConfigurationError: Not a GGUF file, or one that is cut short or of an unknown version.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).metadata(wanted)
    except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a whole GGUF file ({error}); download it again") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def metadata(self, wanted: Callable[[str], bool]) -> dict[str, MetadataValue]:
        magic, version, _, num_pairs = _HEADER.unpack_from(self._data)
        if magic != b"GGUF" or version not in (2, 3):
            raise ConfigurationError(
                f"{self._path} begins with {magic!r} and version {version}, expected a GGUF file of version 2 or 3"
            )
        self._at = _HEADER.size
        found: dict[str, MetadataValue] = {}
        for _ in range(num_pairs):
            key = self._string()
            kind = self._scalar(_SCALARS[4])
            if wanted(key):
                found[key] = self._value(int(kind))
            else:
                self._skip(int(kind))
        return found

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(self._format(kind))

    def _array(self) -> list[MetadataValue]:
        kind, count = self._array_head()
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        whole = struct.Struct(f"<{count}{self._format(kind).format[1:]}")
        values: list[MetadataValue] = list(whole.unpack_from(self._data, self._at))
        self._at += whole.size
        return values

    def _array_head(self) -> tuple[int, int]:
        kind = int(self._scalar(_SCALARS[4]))
        return kind, int(self._scalar(_LENGTH))

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            length = int(self._scalar(_LENGTH))
            self._at += length
        elif kind == _ARRAY:
            element, count = self._array_head()
            if element in (_STRING, _ARRAY):
                for _ in range(count):
                    self._skip(element)
            else:
                self._at += count * self._format(element).size
        else:
            self._at += self._format(kind).size

    def _format(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ConfigurationError(f"{self._path} has a value of the unknown type {kind} at byte {self._at}")
        return _SCALARS[kind]

    def _scalar(self, form: struct.Struct) -> int | float | bool:
        value: int | float | bool = form.unpack_from(self._data, self._at)[0]
        self._at += form.size
        return value

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        begin = self._at + _LENGTH.size
        self._at = begin + length
        if self._at > len(self._data):
            raise IndexError(f"a text of {length} bytes at byte {begin} reaches past the end")
        return self._data[begin : self._at].decode()
