"""Write docs/api.md from the comments of protos/; with --check, fail if it is stale."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

REPOSITORY = Path(__file__).parent.parent
PROTOS = REPOSITORY / "protos"
PAGE = REPOSITORY / "docs" / "api.md"
PACKAGE = ".runnerd.v1."

_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
# Field numbers in descriptor.proto, of which the path of a comment consists.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _FILE_SYNTAX = 4, 5, 6, 12
_MESSAGE_FIELD, _ENUM_VALUE, _SERVICE_METHOD = 2, 2, 2

_HEAD = """\
<!-- Generated from protos/ by tools/api_docs.py; `make lint` checks that it is fresh. Edit the comments there. -->

# API

Package `runnerd.v1`. Calls to copy, compatibility and errors: [clients.md](clients.md). Who serves which request field:
[request-fields.md](request-fields.md). *optional*: unset differs from zero, and means the stated default.
"""


@dataclass(frozen=True)
class Comments:
    """The comments of a file, by the path of what they describe."""

    file: FileDescriptorProto

    def at(self, *path: int) -> str:
        """Give the comment as one paragraph."""
        for location in self.file.source_code_info.location:
            if tuple(location.path) == path:
                return " ".join(location.leading_comments.split())
        return ""

    def of_file(self) -> str:
        """Give the comment above the syntax statement."""
        return self.at(_FILE_SYNTAX)


def describe() -> list[FileDescriptorProto]:
    """Compile the protos, comments included."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "protos.binpb"
        flags = [f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={target}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *sources], check=True)
        return list(FileDescriptorSet.FromString(target.read_bytes()).file)


def page(files: list[FileDescriptorProto]) -> str:
    """Lay out the page: services first, then messages and enums in the order of the files."""
    lines = [_HEAD, "## Services\n"]
    for file in files:
        lines += _services(file, Comments(file))
    for file in files:
        comments = Comments(file)
        lines += [f"## {file.name}\n", f"{comments.of_file()}\n"]
        for index, message in enumerate(file.message_type):
            lines += _message(message, comments, (_FILE_MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            lines += _enum(enum, comments, (_FILE_ENUM, index))
    return "\n".join(lines)


def _services(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for index, service in enumerate(file.service):
        yield f"### {service.name}\n\n{comments.at(_FILE_SERVICE, index)}\n"
        yield "| method | request | response | |\n|---|---|---|---|"
        for number, method in enumerate(service.method):
            streams = "stream of " if method.server_streaming else ""
            text = _cell(comments.at(_FILE_SERVICE, index, _SERVICE_METHOD, number))
            yield f"| `{method.name}` | {_link(method.input_type)} | {streams}{_link(method.output_type)} | {text} |"
        yield ""


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {message.name}\n\n{comments.at(*path)}\n"
    if message.field:
        yield "| field | number | type | |\n|---|---|---|---|"
    for index, field in enumerate(message.field):
        text = _cell(comments.at(*path, _MESSAGE_FIELD, index))
        yield f"| `{field.name}` | {field.number} | {_type(field, message)} | {text} |"
    yield ""


def _enum(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {enum.name}\n\n{comments.at(*path)}\n"
    yield "| value | number | |\n|---|---|---|"
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {_cell(comments.at(*path, _ENUM_VALUE, index))} |"
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    name = _link(field.type_name) if field.type_name else _SCALARS[field.type]
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = nested.field
            return f"map of {_SCALARS[key.type]} to {_type(value, nested)}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of *{message.oneof_decl[field.oneof_index].name}*"
    return name


def _link(type_name: str) -> str:
    short = type_name.removeprefix(PACKAGE)
    return f"`{short.removeprefix('.')}`" if short == type_name else f"[{short}](#{short.lower()})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    text = page(describe())
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != text:
            print("stale: docs/api.md; run python tools/api_docs.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
