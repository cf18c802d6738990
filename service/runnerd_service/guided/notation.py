"""Writes a guide of any kind as a grammar in the notation of llguidance, a variant of Lark.

Nothing is compiled here. A guide may be hostile: whoever calls this bounds its time. The grammars turn forced tokens
off: the mask then holds each token that keeps the text legal, and the model chooses how to spell what is forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from llguidance import StructTag, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from runnerd_service.guided.guide import Guide, GuideError

_OPTIONS = {"no_forcing": True}
_HEAD = f"%llguidance {json.dumps(_OPTIONS)}\n"
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
"""Between JSON's tokens; bounded, since a small model may go on with spaces for ever."""
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_ATTRIBUTES = re.compile(r"^\s*([\w-]+)\[((?:[^\]\"]|\"(?:[^\"\\]|\\.)*\")*)\]\s*:", re.MULTILINE)
"""Of a rule of a grammar; those that bound its text are the compiler's."""
_UNSERVED = re.compile(r"\b(temperature|capture)\b")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_HEADER = re.compile(r"%llguidance\s*(\{[^{}]*\})")


def to_grammar(guide: Guide, special_tokens: Collection[str]) -> str:
    """Give the grammar whose language the guide describes.

    Args:
        guide: What was asked for.
        special_tokens: The model's, as they are spelled.

    Raises:
        GuideError: It is not written in its own notation.
    """
    match guide.kind:
        case "json_object":
            return _json_schema({"type": "object"})
        case "json_schema":
            return _json_schema(_json(guide.texts[0]))
        case "regex":
            return _regex(guide.texts[0])
        case "grammar":
            return _grammar(guide.texts[0])
        case "choice":
            return _choice(guide.texts)
        case "structural_tag":
            return _structural_tag(_json(guide.texts[0]), special_tokens)


def _json(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise GuideError("it is nested too deeply") from error
    except ValueError as error:
        raise GuideError(f"not JSON: {error}") from error


def _json_schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GuideError(f"got {_shown(schema)}, expected a JSON schema: an object, or true")
    return f"{_HEAD}start: %json {_dumped({'x-guidance': _JSON_OPTIONS} | schema)}"


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:  # a number beyond those of JSON, or too deep
        raise GuideError(str(error)) from error


def _regex(regex: str) -> str:
    if not regex:
        raise GuideError("is empty, expected a regular expression")
    return f"{_HEAD}start: /{regex_to_lark(regex)}/"


def _grammar(grammar: str) -> str:
    if _GBNF_RULE.search(grammar):
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the converter raises several kinds
            raise GuideError(f"not GBNF: {error}") from error
    for name, attributes in _ATTRIBUTES.findall(grammar):
        for unserved in _UNSERVED.findall(_TEXT.sub("", attributes)):
            raise GuideError(f"the rule {name} has the attribute {unserved}, which is not served; leave it out")
    return _without_forcing(grammar)


def _choice(texts: tuple[str, ...]) -> str:
    if not texts:
        raise GuideError("got none, expected at least one text", ".texts")
    for index, text in enumerate(texts):
        if not text:
            raise GuideError("is empty, expected a text", f".texts[{index}]")
    return f"{_HEAD}start: /{'|'.join(map(_literal, dict.fromkeys(texts)))}/"


def _literal(text: str) -> str:
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


def _structural_tag(described: Any, special_tokens: Collection[str]) -> str:
    """Free text in which each trigger begins one of the tags that start with it."""
    if not isinstance(described, dict) or not _is_list_of(described.get("triggers"), str):
        raise GuideError('expected {"structures": [{"begin", "schema", "end"}], "triggers": [text]}')
    triggers, structures = described["triggers"], described.get("structures")
    unknown = sorted(set(described) - {"type", "structures", "triggers"})
    if unknown or not _is_list_of(structures, dict):
        raise GuideError(f"got the fields {sorted(described)}, expected structures (a list of objects) and triggers")
    if not triggers or not structures:
        raise GuideError("triggers or structures is empty, expected at least one of each")
    special = [trigger for trigger in triggers if trigger in special_tokens]
    if special and len(special) < len(triggers):
        raise GuideError(f"the trigger {special[0]!r} is a special token and others are text; use one kind")
    tags = [_tag(index, one, triggers) for index, one in enumerate(structures)]
    unused = set(triggers) - {tag.trigger for tag in tags}
    if unused:
        raise GuideError(f"no structure begins with the trigger {min(unused)!r}")
    return _without_forcing(StructTag.to_grammar(tags, assume_special=bool(special)))


def _tag(index: int, structure: dict[str, Any], triggers: list[str]) -> StructTag:
    begin, schema, end = (structure.get(name) for name in ("begin", "schema", "end"))
    if set(structure) != {"begin", "schema", "end"} or not isinstance(begin, str) or not isinstance(end, str):
        raise GuideError(f"structures[{index}]: expected the texts begin and end, and a schema")
    if not isinstance(schema, dict):
        raise GuideError(f"structures[{index}].schema: got {_shown(schema)}, expected an object")
    # The longest: with a shorter one the rest of it would be text of the tag.
    trigger = max((one for one in triggers if one and begin.startswith(one)), key=len, default="")
    if not trigger:
        raise GuideError(f"structures[{index}].begin: {begin!r} begins with none of the triggers")
    schema = {"x-guidance": _JSON_OPTIONS} | schema
    _dumped(schema)
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def _without_forcing(grammar: str) -> str:
    return _HEADER.sub(_merged_header, grammar) if _HEADER.search(grammar) else _HEAD + grammar


def _merged_header(header: re.Match[str]) -> str:
    try:
        return f"%llguidance {json.dumps(json.loads(header[1]) | _OPTIONS)}"
    except ValueError:
        return header[0]  # the compiler says what is wrong with it


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _shown(value: object) -> str:
    return f"{value!r:.40}"
