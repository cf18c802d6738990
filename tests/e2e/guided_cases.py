"""Guides for the tests: one of each kind, with a check of its own that knows nothing of the library behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema

from runnerd_client import GuidedDecoding

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blau/é\n"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", 'maybe (é/\\\n"?)']
TAGS = {
    "triggers": ["<f"],
    "structures": [
        {"begin": "<f1>", "schema": {"type": "integer", "minimum": 10, "maximum": 99}, "end": "</f1>"},
        {"begin": "<f2>", "schema": {"enum": [True, None]}, "end": "</f2>"},
    ],
}


@dataclass(frozen=True)
class Case:
    """A guide and whether a text is one of its."""

    guide: GuidedDecoding
    holds: Callable[[str], object]
    options: Mapping[str, Any]
    """What lets a model without sense come to an end soon."""


def matches(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern, re.DOTALL).fullmatch


def is_valid(schema: object) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        return True

    return check


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def follows_tags(text: str) -> bool:
    """Each trigger begins one of the structures, whole; the rest is free."""
    pieces = re.split(r"<f(?=.)", text)
    return all(re.match(r"1>\s*[1-9][0-9]\s*</f1>|2>\s*(true|null)\s*</f2>", piece) for piece in pieces[1:])


# A closing quote or brace is said as rarely as any other sign: the bias makes it common.
SHORT = {"logit_bias": {ord('"'): 5.0, ord("}"): 5.0, ord(" "): -5.0}}
CASES: Mapping[str, Case] = {
    "json_schema": Case(GuidedDecoding(json_schema=json.dumps(SCHEMA)), is_valid(SCHEMA), SHORT),
    "json_object": Case(GuidedDecoding(json_object=True), is_object, SHORT),
    "regex": Case(GuidedDecoding(regex=r"\d{3}-[a-f]{2,4}(/x|é|\n)"), matches(r"[0-9]{3}-[a-f]{2,4}(/x|é|\n)"), {}),
    "lark": Case(
        GuidedDecoding(grammar='start: item ("," item)~0..3\nitem: "(" start ")" | /[a-c]/'),
        lambda text: text.count("(") == text.count(")") and re.fullmatch(r"[(),a-c]+", text),
        {"logit_bias": {ord("("): -2.0}},
    ),
    "gbnf": Case(
        GuidedDecoding(grammar='root ::= "x" [0-9]+ tail?\ntail ::= "." [a-z] [a-z]'),
        matches(r"x[0-9]+(\.[a-z]{2})?"),
        {"logit_bias": {256: 3.0}},
    ),
    "choice": Case(GuidedDecoding(choice={"texts": CHOICES}), CHOICES.__contains__, {}),
    "structural_tag": Case(
        GuidedDecoding(structural_tag=json.dumps(TAGS)),
        follows_tags,
        {"logit_bias": {ord("<"): 4.0, ord("f"): 2.0, 256: 3.0}},
    ),
}
