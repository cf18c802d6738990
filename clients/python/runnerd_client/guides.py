"""Forms that an output can be given: ``client.generate(prompt, guided_decoding=guides.choice("yes", "no"))``.

The server checks them; it serves them where its steps do not overlap (``runnerd serve --async-execution off``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from runnerd.v1 import generation_pb2 as pb

Schema = Mapping[str, object]


class Structure(TypedDict):
    """A part of an output that has a form, between two texts."""

    begin: str
    """Starts with one of the triggers."""
    schema: Schema
    """What lies between, as JSON."""
    end: str


def json_schema(schema: Schema | str) -> pb.GuidedDecoding:
    """Ask for JSON that a schema describes.

    Raises:
        TypeError: ``schema`` holds what JSON cannot say.
        ValueError: The same, of a number.
    """
    return pb.GuidedDecoding(json_schema=schema if isinstance(schema, str) else _json(schema))


def json_object() -> pb.GuidedDecoding:
    """Ask for any JSON object."""
    return pb.GuidedDecoding(json_object=True)


def regex(pattern: str) -> pb.GuidedDecoding:
    """Ask for text that the whole of a regular expression matches, in the syntax of Rust's regex crate."""
    return pb.GuidedDecoding(regex=pattern)


def grammar(rules: str) -> pb.GuidedDecoding:
    """Ask for text of a context-free grammar: Lark with a rule ``start``, or GBNF with a rule ``root``."""
    return pb.GuidedDecoding(grammar=rules)


def choice(*texts: str) -> pb.GuidedDecoding:
    """Ask for one of these texts."""
    return pb.GuidedDecoding(choice=pb.Choices(texts=texts))


def structural_tag(structures: Iterable[Structure], triggers: Sequence[str]) -> pb.GuidedDecoding:
    """Ask for free text in which each trigger begins one of the structures that start with it.

    Raises:
        TypeError: A schema holds what JSON cannot say.
        ValueError: The same, of a number.
    """
    return pb.GuidedDecoding(structural_tag=_json({"structures": list(structures), "triggers": list(triggers)}))


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)
