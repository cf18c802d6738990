"""A matcher allows exactly the tokens that keep the text legal, and is a function of the text alone."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_service.guided.guide import Guide, GuideError, Vocabulary
from runnerd_service.guided.matcher import GuideCompiler, MatcherThreads, OutputMatcher, token_bits
from runnerd_service.guided.notation import to_grammar

PIECES = [b"a", b"ab", b"abc", b"b", b"bc", b"c", b"<x>", b"", b"a", b"1", b"12", b"2", b"<eos>"]
PIECES += ["é".encode(), b"\xc3", b"\xa9"]
VOCABULARY = Vocabulary(tuple(PIECES), (6, 12))
TEXT_IDS = [one for one, piece in enumerate(PIECES) if piece and one not in VOCABULARY.special_ids]


COMPILER = GuideCompiler(VOCABULARY, cache_size=4)
THREADS = MatcherThreads()


def matcher(kind: str, *texts: str, tokens: tuple[int, ...] = ()) -> OutputMatcher:
    found = COMPILER.compile(to_grammar(Guide(kind, texts), {"<x>", "<eos>"}))
    found.advance(tokens)
    return found


def allowed(one: OutputMatcher) -> set[bytes]:
    return {piece for token, piece in enumerate(PIECES) if one.allowed >> token & 1}


WORDS = st.lists(st.text("abc12", min_size=1, max_size=6), min_size=1, max_size=5, unique=True)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(words=WORDS, choices=st.lists(st.integers(0, 1000), max_size=6))
def test_a_choice_allows_the_pieces_that_some_word_goes_on_with(words: list[str], choices: list[int]) -> None:
    one, text = matcher("choice", *words), ""
    for choice in (*choices, None):
        rest = [word[len(text) :] for word in words if word.startswith(text)]
        expected = {
            PIECES[token] for token in TEXT_IDS if any(word.encode().startswith(PIECES[token]) for word in rest)
        }
        assert allowed(one) == expected
        assert one.may_end == (text in words)
        assert not one.error
        if choice is None or not expected:
            return
        candidates = [token for token in TEXT_IDS if one.allowed >> token & 1]
        token = candidates[choice % len(candidates)]
        one.advance((token,))
        text += PIECES[token].decode()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(choices=st.lists(st.integers(0, 1000), max_size=8))
def test_the_state_is_that_of_the_tokens_however_they_came(choices: list[int]) -> None:
    regex = "(ab?c{0,2}|1(2|é)*)+"
    steps, other, tokens = matcher("regex", regex), matcher("regex", regex), []
    for choice in choices:
        candidates = [token for token in TEXT_IDS if steps.allowed >> token & 1]
        token = candidates[choice % len(candidates)]
        tokens.append(token)
        THREADS.advance([steps, other], [token, token])
    at_once = matcher("regex", regex, tokens=tuple(tokens))
    assert (at_once.allowed, at_once.may_end) == (steps.allowed, steps.may_end) == (other.allowed, other.may_end)
    text = b"".join(PIECES[token] for token in tokens).decode(errors="ignore")
    assert bool(re.fullmatch(regex, text)) >= at_once.may_end


def test_forced_text_is_left_to_the_model_to_spell() -> None:
    for kind, text in (("regex", "abc"), ("grammar", 'start: "abc"'), ("grammar", 'root ::= "abc"'), ("choice", "abc")):
        assert allowed(matcher(kind, text)) == {b"a", b"ab", b"abc"}
    forcing = '%llguidance {"no_forcing": false}\n%llguidance {}\nstart: "abc"'
    assert allowed(matcher("grammar", forcing)) == {b"a", b"ab", b"abc"}


def test_special_tokens_are_allowed_where_a_grammar_names_them() -> None:
    assert allowed(matcher("grammar", 'start: <x> "a"')) == {b"<x>"}
    assert allowed(matcher("grammar", 'start: "<x>"')) == set()
    described = {"triggers": ["<x>"], "structures": [{"begin": "<x>", "schema": {"enum": [1, 12]}, "end": "a"}]}
    inside = matcher("structural_tag", json.dumps(described), tokens=(0, 6))
    assert allowed(inside) == {b"1", b"12"}


def test_a_text_that_cannot_go_on_is_an_error() -> None:
    one = matcher("regex", "abx")
    assert not one.error
    one.advance((0,))
    one.advance((3,))
    assert one.error == "no text goes on as the guide asks"
    assert not one.may_end


def test_a_character_of_several_tokens_is_followed() -> None:
    one = matcher("regex", "é")
    assert allowed(one) == {"é".encode(), b"\xc3"}
    one.advance((13,))
    assert one.may_end


@pytest.mark.parametrize(
    ("guide", "place"),
    [
        (Guide("json_schema", ("[1]",)), ""),
        (Guide("json_schema", ('{"minimum": 1e999}',)), ""),
        (Guide("json_schema", ('{"a": NaN}',)), ""),
        (Guide("choice", ("a", "")), ".texts[1]"),
        (Guide("structural_tag", ('{"triggers": ["<x>", "a"], "structures": [{}]}',)), ""),
        (Guide("grammar", ('start[temperature=0.7]: "a"',)), ""),
        (Guide("grammar", ('start: a\na[stop="]", capture="x"]: /b+/',)), ""),
        (Guide("structural_tag", ('{"triggers": ["a"], "structures": [{"begin": "a", "end": ""}]}',)), ""),
        (
            Guide(
                "structural_tag",
                ('{"triggers": ["a", "b"], "structures": [{"begin": "a", "schema": {}, "end": ""}]}',),
            ),
            "",
        ),
    ],
)
def test_what_is_not_in_its_notation_is_refused(guide: Guide, place: str) -> None:
    with pytest.raises(GuideError) as caught:
        to_grammar(guide, {"<x>"})
    assert str(caught.value)
    assert caught.value.place == place


@pytest.mark.parametrize(
    "grammar", ['start[max_tokens=5]: "a"', 'start[stop="temperature"]: /a+/', "start: /[capture]:/"]
)
def test_attributes_that_bound_a_text_are_served(grammar: str) -> None:
    assert to_grammar(Guide("grammar", (grammar,)), ()).endswith(grammar)


def test_bits_are_those_of_the_ids() -> None:
    assert token_bits([]) == 0
    assert token_bits([0, 9, 9, 3]) == 0b10_0000_1001
