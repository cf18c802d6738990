"""One output and the form that it must have: which tokens it may choose next, and whether it is at its end.

It joins what the guide allows with what the request's other parameters leave. It knows no plans and no threads.
"""

from __future__ import annotations

from collections.abc import Collection

from runnerd_service.guided.matcher import OutputMatcher, token_bits
from runnerd_spi import SamplingParams

_RULED_OUT = (
    "the guide asks for tokens that sampling.allowed_token_ids, sampling.bad_words or stopping.min_tokens rule out; "
    "leave one of them out"
)


class GuidedOutput:
    """An output on its way.

    Args:
        matcher: Of its guide.
        params: The request's.
        eos_token_ids: What ends it once the guide is complete; empty: nothing does.
        field: The guide's field in the client's request.
        vocab_size: Token ids are below this.
    """

    def __init__(
        self,
        matcher: OutputMatcher,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        field: str,
        vocab_size: int,
    ) -> None:
        self.matcher = matcher
        self.field = field
        self.mask = b""
        """Of the next token, as a plan has it."""
        self.is_complete = False
        """Whether it ends here, without a token that says so."""
        self.error = ""
        """Why there is no next token."""
        self._num_bytes = -(-vocab_size // 8)
        self._eos = token_bits(eos_token_ids)
        self._min_tokens = params.min_tokens
        self._ending = token_bits(params.stop_token_ids)
        self._ruled_out = token_bits(word[0] for word in params.bad_words_token_ids if len(word) == 1)
        self._choosable = (1 << vocab_size) - 1
        if params.allowed_token_ids is not None:
            self._choosable = token_bits(params.allowed_token_ids)

    def update(self, num_outputs: int) -> None:
        """Take over where the matcher is, after ``num_outputs`` tokens."""
        matcher = self.matcher
        if matcher.error:
            self.error = f"the guide cannot be followed further: {matcher.error}"
            return
        allowed = matcher.allowed | (self._eos if matcher.may_end else 0)
        self.mask = allowed.to_bytes(self._num_bytes, "little")
        ruled_out = self._ruled_out | (self._ending if num_outputs < self._min_tokens else 0)
        if not allowed & self._choosable & ~ruled_out:
            self.is_complete = matcher.may_end
            self.error = "" if self.is_complete else _RULED_OUT
