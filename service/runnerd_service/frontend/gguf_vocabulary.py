"""Builds a tokenizer from the vocabulary inside a GGUF file, without transformers (and so without torch).

A GGUF file names its pre-tokenizer by a word and stores no regular expressions; the ones here are those of the
families' published ``tokenizer.json`` files. A vocabulary of another family is refused: a tokenizer that is almost
right gives wrong answers in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runnerd_service.errors import ConfigurationError
from runnerd_service.frontend.gguf_metadata import MetadataValue, read_gguf_metadata

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_GPT4O = rf"{_LEAD}{_UPPER}*{_LOWER}+{_SHORT}|{_LEAD}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}{_REST}"


@dataclass(frozen=True, slots=True)
class _Family:
    """How byte-level vocabularies that share a pre-tokenizer split text."""

    split: str | None = None
    """Regular expression; None for that of GPT-2."""
    single_digits: bool = False
    ignore_merges: bool = False
    """A word that is a token is taken whole, whatever the merges would make of it."""
    adds_bos: bool = False


_FAMILIES = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _Family()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Family(single_digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _Family(_LLAMA3, ignore_merges=True, adds_bos=True)),
    **dict.fromkeys(("falcon3", "dbrx", "smaug-bpe"), _Family(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _Family(_QWEN2)),
    "tekken": _Family(_TEKKEN, ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Family(_GPT4O)),
}


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What a GGUF file says about text."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """By name as chat templates use them: ``bos_token``, ``eos_token``, ..."""
    chat_template: str | None


def load_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """Read the tokenizer of the GGUF file at ``path``.

    Raises:
        ConfigurationError: Not a GGUF file, no vocabulary in it, or one of a family that is not known here.
    """
    metadata = read_gguf_metadata(path, lambda key: key.startswith("tokenizer.") or key == "general.architecture")
    vocabulary = _Vocabulary(path, metadata)
    kind = vocabulary.text("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif kind == "llama" and not (vocabulary.architecture or "").startswith("gemma"):
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise vocabulary.unknown(f"a vocabulary of kind {kind!r} for architecture {vocabulary.architecture!r}")
    special_tokens = vocabulary.special_tokens()
    _add_tokens(backend, vocabulary)
    bos = special_tokens.get("bos_token") if vocabulary.flag("add_bos_token", adds_bos) else None
    eos = special_tokens.get("eos_token") if vocabulary.flag("add_eos_token", False) else None
    set_surrounding_tokens(backend, bos, eos)
    template = metadata.get("tokenizer.chat_template")
    return GGUFTokenizer(backend, special_tokens, template if isinstance(template, str) else None)


def set_surrounding_tokens(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let ``backend`` put ``bos`` before and ``eos`` after each text that asks for special tokens."""
    around = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)],
    )


class _Vocabulary:
    def __init__(self, path: Path, metadata: dict[str, MetadataValue]) -> None:
        self._path = path
        self._metadata = metadata
        self.tokens = self._texts("tokens")
        if not self.tokens:
            raise ConfigurationError(f"{path} holds no vocabulary (tokenizer.ggml.tokens); use a file that has one")
        architecture = metadata.get("general.architecture")
        self.architecture = architecture if isinstance(architecture, str) else None

    def unknown(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._path} has {what}, which is not known here; save the model as a directory that holds its "
            "tokenizer.json and serve that"
        )

    def text(self, key: str) -> str | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, str) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    def numbers(self, key: str) -> list[float]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return [one for one in value if isinstance(one, (int, float))] if isinstance(value, list) else []

    def merges(self) -> list[tuple[str, str]] | None:
        pairs = [merge.partition(" ") for merge in self._texts("merges")]
        return [(left, right) for left, _, right in pairs] or None

    def special_tokens(self) -> dict[str, str]:
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self._metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
        return {f"{name}_token": self.tokens[one] for name, one in ids.items() if isinstance(one, int)}

    def _texts(self, key: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = vocabulary.text("pre")
    family = _FAMILIES.get(name or "gpt-2")
    merges = vocabulary.merges()
    if family is None:
        raise vocabulary.unknown(f"a vocabulary with the pre-tokenizer {name!r}")
    if merges is None:
        raise vocabulary.unknown("a byte-level vocabulary without merges")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=family.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if family.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if family.split is not None:
        steps.append(pre_tokenizers.Split(Regex(family.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, family.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    scores = vocabulary.numbers("scores")
    merges = vocabulary.merges() or _merges_from_scores(vocabulary.tokens, scores)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.flag("add_space_prefix", True)
    if vocabulary.architecture == "phi3":
        prepend = [normalizers.Prepend("▁")] if prefix else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            "▁", prepend_scheme="first" if prefix else "never", split=False
        )
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Give the merges that SentencePiece's rule implies: of two neighbours, join those whose union scores best."""
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=False):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges.extend((score, len(left), len(right), left, right) for left, right in pairs)
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Register the tokens that are matched whole in a text, before any splitting."""
    types = vocabulary.numbers("token_type")
    kinds = list(zip(vocabulary.tokens, types, strict=False))
    backend.add_special_tokens([AddedToken(one, normalized=False) for one, kind in kinds if kind == _CONTROL])
    backend.add_tokens([AddedToken(one, normalized=False) for one, kind in kinds if kind == _USER_DEFINED])
