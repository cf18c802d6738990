"""Follows guides token by token: compiled by llguidance, one matcher for each output. Knows no requests and no engine.

All work is bounded by the library's own limits: whoever exceeds one ends with an error, in milliseconds.
"""

from __future__ import annotations

import ctypes
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from runnerd_service.guided.guide import GuideError, Vocabulary

_END_TOKEN = b"<|end of the guided text|>"
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""The library's own, but for the memory of a matcher: a lexer state takes 1 to 2 kB."""
_MAX_ERROR_CHARACTERS = 300
_EXCERPT = re.compile(r"\s*(\d+ \||\^)")


class GuideCompiler:
    """Compiles grammars for one vocabulary and keeps the latest ones. One thread at a time.

    Args:
        vocabulary: The model's.
        cache_size: How many compiled grammars to keep.
    """

    def __init__(self, vocabulary: Vocabulary, cache_size: int) -> None:
        self._vocab_size = len(vocabulary.tokens)
        wrapped = TokenizerWrapper(_Tokens(vocabulary))
        # One more: the library's end of a text is none of the model's tokens. Which of those end it is told apart.
        self._tokenizer = LLTokenizer(wrapped, n_vocab=self._vocab_size + 1, eos_token=self._vocab_size)
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._cache_size = cache_size

    def compile(self, grammar: str) -> OutputMatcher:
        """Give a matcher at the beginning of a text.

        Raises:
            GuideError: The grammar is wrong, too large, or no text of this vocabulary begins as it asks.
        """
        compiled = self._cache.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            if compiled.is_error():
                raise GuideError(_first_lines(compiled.get_error()))
        self._cache[grammar] = compiled
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return OutputMatcher(compiled.deep_copy(), self._vocab_size)


class OutputMatcher:
    """How far a text has come in its guide.

    Args:
        matcher: The library's, at the beginning of a text.
        vocab_size: Token ids are below this.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.allowed = 0
        """The tokens that go on legally: bit t is that of token t."""
        self.may_end = False
        """Whether the text is complete as it is."""
        self.error = ""
        """Why it cannot go on; empty as long as it can, or may end."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that the guide allows, and find out what comes next."""
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))
        self._take(self._matcher.compute_bitmask())

    def _take(self, mask: bytes) -> None:
        allowed = int.from_bytes(mask, "little")
        self.allowed = allowed & (1 << self._vocab_size) - 1
        # Where nothing goes on the library offers its end, whether the text is complete or not.
        self.may_end = bool(allowed >> self._vocab_size & 1) and self._matcher.is_accepting()
        if self.may_end or self.allowed:
            return
        told = _first_lines(self._matcher.get_error()) or self._matcher.stop_reason()
        self.error = "no text goes on as the guide asks" if "NoExtension" in told else told


class MatcherThreads:
    """Advances many matchers at once, on the library's threads."""

    def __init__(self) -> None:
        self._executor = LLExecutor()

    def advance(self, matchers: Sequence[OutputMatcher], token_ids: Sequence[int]) -> None:
        """Let each matcher go on by its token, as :meth:`OutputMatcher.advance` does."""
        if len(matchers) == 1:
            matchers[0].advance(token_ids)
            return
        inner = [one._matcher for one in matchers]
        self._executor.consume_token_par(list(zip(inner, token_ids, strict=True)))
        num_bytes = -(-(matchers[0]._vocab_size + 1) // 32) * 4
        masks = bytearray(num_bytes * len(inner))
        address = ctypes.addressof(ctypes.c_char.from_buffer(masks))
        places = [(one, place) for place, one in enumerate(inner)]
        self._executor.unsafe_compute_mask_ptr(places, address, num_bytes, len(inner))
        for place, one in enumerate(matchers):
            one._take(bytes(masks[place * num_bytes : (place + 1) * num_bytes]))


def token_bits(token_ids: Iterable[int]) -> int:
    """Give the bits of ``token_ids``."""
    bits = bytearray()
    for token_id in token_ids:
        if token_id // 8 >= len(bits):
            bits.extend(bytes(token_id // 8 + 1 - len(bits)))
        bits[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(bits, "little")


class _Tokens:
    """A vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, _END_TOKEN]
        self.special_token_ids = [*vocabulary.special_ids, size]
        self.eos_token_id = size
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        # Asked for forced tokens only, which no grammar of ours has.
        return []


def _first_lines(error: str) -> str:
    """Give an error without the library's account of its state and of the grammar, which is not the client's text."""
    lines = [
        line
        for line in error.partition("<state>")[0].partition("<non-verbose/>")[0].splitlines()
        if not _EXCERPT.match(line)
    ]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[: _MAX_ERROR_CHARACTERS - 1]}…"
